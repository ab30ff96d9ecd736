"""Bytes on their way over links, counted from when they are assigned.

An agent's sample shows a transfer only after it has run for a while; what is chosen before then
must see it too, or a burst between two samples would take one path. Bytes count from their
assignment until a transfer over the same hops is reported to have ended, or for a few samples,
whichever comes first: by then the samples show them, and what failed or took another way goes
too.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from transfer.graph import Path


@dataclass(slots=True, eq=False)
class _Assigned:
    """One transfer; `others` shared its busiest link when it was assigned."""

    path: Path
    data_bytes: int
    assigned_s: float
    others: int = 0
    is_over: bool = False


class InFlight:
    """Assigned bytes. Holds no lock and no clock; times must not descend.

    Attributes:
        on_link: [transfers, bytes] by index of a link, of those that have some.
    """

    def __init__(self) -> None:
        self.on_link: dict[int, list[int]] = {}
        self._oldest_first: deque[_Assigned] = deque()
        # Per hops, oldest first, and none that is over.
        self._by_hops: dict[tuple[str, ...], deque[_Assigned]] = {}

    def assign(self, path: Path, data_bytes: int, now_s: float) -> None:
        assigned = _Assigned(path, data_bytes, now_s)
        self._oldest_first.append(assigned)
        waiting = self._by_hops.get(path.hops)
        if waiting is None:
            waiting = self._by_hops[path.hops] = deque()
        waiting.append(assigned)
        on_link = self.on_link
        for link in path.links:
            totals = on_link.get(link)
            if totals is None:
                on_link[link] = [1, data_bytes]
            else:
                if totals[0] > assigned.others:
                    assigned.others = totals[0]
                totals[0] += 1
                totals[1] += data_bytes

    def end(self, hops: tuple[str, ...]) -> int:
        """The oldest transfer over these hops has ended.

        Returns:
            How many others shared its busiest link, at its beginning or its end; 0 where nothing
            over these hops is in flight.
        """
        waiting = self._by_hops.get(hops)
        if not waiting:
            return 0
        ended = waiting[0]
        self._release(ended)
        now = [self.on_link[link][0] for link in ended.path.links if link in self.on_link]
        return max([ended.others, *now])

    def expire(self, until_s: float) -> None:
        """Forget what was assigned at `until_s` or before."""
        oldest_first = self._oldest_first
        while oldest_first and (oldest_first[0].is_over or oldest_first[0].assigned_s <= until_s):
            assigned = oldest_first.popleft()
            if not assigned.is_over:
                self._release(assigned)

    def _release(self, assigned: _Assigned) -> None:
        """`assigned` is the oldest of its hops."""
        assigned.is_over = True
        path = assigned.path
        waiting = self._by_hops[path.hops]
        waiting.popleft()
        if not waiting:
            del self._by_hops[path.hops]
        for link in path.links:
            totals = self.on_link[link]
            totals[0] -= 1
            totals[1] -= assigned.data_bytes
            if not totals[0]:
                del self.on_link[link]
