"""Sequences that have no place, first come first."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator

from flowkv_jax.cluster.tracked_sequence import TrackedSequence


def _order(sequence: TrackedSequence) -> tuple[float, str]:
    return sequence.spec.arrival_s, sequence.sequence_id


class PendingSequences:
    """Ordered by arrival, so one that lost its place comes before those that never had one."""

    def __init__(self) -> None:
        self._items: list[TrackedSequence] = []

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[TrackedSequence]:
        """In order; a copy, so that they may leave meanwhile."""
        return iter(self._items.copy())

    def add(self, sequence: TrackedSequence) -> None:
        insort(self._items, sequence, key=_order)

    def discard(self, sequence: TrackedSequence) -> None:
        """Take one out, if it waits here."""
        index = bisect_left(self._items, _order(sequence), key=_order)
        if index < len(self._items) and self._items[index] is sequence:
            del self._items[index]

    def expired(self, now_s: float) -> list[TrackedSequence]:
        """Those whose deadline is not after `now_s`."""
        return [
            sequence
            for sequence in self._items
            if sequence.spec.deadline_s is not None and sequence.spec.deadline_s <= now_s
        ]
