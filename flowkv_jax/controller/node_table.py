"""Columns over all nodes, so that one decision costs a few array operations and no loop.

A node has a slot while it is live; a column holds one value a slot. The controller and its booking
ledger write here as things happen, the router only reads. What is booked is counted in whole
numbers (times in microseconds), so that taking away what was added leaves exactly nothing.

Work is counted once: `booked` is what this controller gave and has not seen done, at once;
`unbooked` is what a node reported beyond that, when it reported (a sequence that lost its blocks
and computes its prompt again, or work that was given by a controller that has died).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Column = npt.NDArray[Any]

_INTS = (
    "block_size",
    "block_bytes",
    "num_blocks",
    "max_num_seqs",
    "name_rank",
    "host_id",
    "booked_prefills",
    "booked_prefill_tokens",
    "booked_prefill_us",
    "booked_sends",
    "booked_decodes",
    "booked_blocks",
    "unbooked_prefill_tokens",
    "unbooked_sequences",
    "unbooked_blocks",
    "head_us",
)
_FLOATS = (
    "prefill_tokens_per_s",
    "prefill_load",
    "decode_load",
    "head_started_s",
)
_BOOLS = ("is_live", "can_prefill", "can_decode", "is_usable")


class NodeTable:
    """Columns of equal length; `num_slots` of it are in use or free for reuse.

    Attributes (arrays, one value a slot):
        is_live: a node has this slot.
        can_prefill, can_decode: it is given such work.
        is_usable: it may be given any work where nobody else is left.
        block_size, block_bytes, num_blocks, max_num_seqs: facts.
        name_rank: position of its name among all; breaks ties.
        host_id: equal for nodes of one host.
        prefill_tokens_per_s: estimated.
        prefill_load, decode_load: scores.
        booked_prefills, booked_prefill_tokens, booked_prefill_us: prompts under way.
        head_us, head_started_s: predicted time of the oldest of them, and since when it is the
            oldest: what of it is done by now is no queue any more.
        booked_sends, booked_decodes, booked_blocks: see `NodeView`.
        unbooked_prefill_tokens, unbooked_sequences, unbooked_blocks: reported beyond the booked.
    """

    block_size: Column
    block_bytes: Column
    num_blocks: Column
    max_num_seqs: Column
    name_rank: Column
    host_id: Column
    booked_prefills: Column
    booked_prefill_tokens: Column
    booked_prefill_us: Column
    booked_sends: Column
    booked_decodes: Column
    booked_blocks: Column
    unbooked_prefill_tokens: Column
    unbooked_sequences: Column
    unbooked_blocks: Column
    head_us: Column
    prefill_tokens_per_s: Column
    prefill_load: Column
    decode_load: Column
    head_started_s: Column
    is_live: Column
    can_prefill: Column
    can_decode: Column
    is_usable: Column

    def __init__(self, num_slots: int = 8) -> None:
        self.num_slots = 0
        self.names: list[str] = []
        self._free: list[int] = []
        self._hosts: dict[str, int] = {}
        self._slots: dict[str, int] = {}
        for name, kind in _columns():
            setattr(self, name, np.zeros(num_slots, kind))

    def __len__(self) -> int:
        """Slots in use."""
        return self.num_slots - len(self._free)

    def add(self, name: str, host: str) -> int:
        """Take a slot for a node; all its values are zero but those of `name` and `host`."""
        if self._free:
            slot = self._free.pop()
            self.names[slot] = name
        else:
            slot = self.num_slots
            self.num_slots += 1
            self.names.append(name)
            if slot == len(self.is_live):
                self._grow()
        self.is_live[slot] = True
        self.host_id[slot] = self._hosts.setdefault(host, len(self._hosts))
        self._rank_names()
        return slot

    def remove(self, slot: int) -> None:
        """Give a slot back."""
        for name, _ in _columns():
            getattr(self, name)[slot] = 0
        self.names[slot] = ""
        self._free.append(slot)
        self._rank_names()

    def slot_of(self, name: str) -> int | None:
        """The slot of a live node; None if there is none."""
        return self._slots.get(name)

    def queue_s(self, now_s: float) -> npt.NDArray[np.float64]:
        """Predicted seconds, by slot, until a prompt given now would begin to be computed."""
        n = self.num_slots
        head_s = self.head_us[:n] * 1e-6
        done_s = np.clip(now_s - self.head_started_s[:n], 0.0, head_s)
        booked_s = self.booked_prefill_us[:n] * 1e-6 - done_s
        rate = np.maximum(self.prefill_tokens_per_s[:n], 1e-9)
        queue: npt.NDArray[np.float64] = booked_s + self.unbooked_prefill_tokens[:n] / rate
        return queue

    def _grow(self) -> None:
        for name, kind in _columns():
            old = getattr(self, name)
            new: Column = np.zeros(2 * len(old), kind)
            new[: len(old)] = old
            setattr(self, name, new)

    def _rank_names(self) -> None:
        live = sorted((name, slot) for slot, name in enumerate(self.names) if self.is_live[slot])
        self._slots = dict(live)
        self.name_rank[[slot for _, slot in live]] = np.arange(len(live))


def _columns() -> list[tuple[str, type]]:
    return (
        [(name, np.int64) for name in _INTS]
        + [(name, np.float64) for name in _FLOATS]
        + [(name, np.bool_) for name in _BOOLS]
    )
