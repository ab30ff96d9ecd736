"""Which blocks of a pool transfers are using: many readers or one writer. Imports no JAX.

Whoever frees a block asks first; a block under a transfer is not free, whatever its reference
count says. The engine is the only one that pins, and unpins a transfer's blocks once, when the
transfer is final.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from transfer.errors import BlocksBusy, UnknownNode

_FEW = 4

Interval = tuple[int, int]
"""(first block id, number of blocks)"""


class Pins:
    """Pins of one pool.

    Args:
        node: the pool's name, for messages.
        num_blocks: P.
    """

    def __init__(self, node: str, num_blocks: int) -> None:
        self._node = node
        self._lock = threading.Lock()
        self._readers = np.zeros(num_blocks, np.int32)
        self._writer = np.zeros(num_blocks, np.int64)
        self._serial_of: dict[str, int] = {}
        self._written_by: dict[str, list[Interval]] = {}
        self._next_serial = 1
        self._is_retired = False

    def read(self, intervals: Sequence[Interval]) -> None:
        """Pin for reading, each block as often as it occurs.

        Raises:
            BlocksBusy: a transfer writes any of them. UnknownNode: the pool was retired.
        """
        with self._lock:
            self._refuse_if_retired()
            for blocks in _indices(intervals):
                if np.count_nonzero(self._writer[blocks]):
                    self._refuse(blocks, self._writer[blocks] > 0, "written")
            for blocks in _indices(intervals):
                self._count(blocks, 1)

    def unpin_read(self, intervals: Sequence[Interval]) -> None:
        with self._lock:
            for blocks in _indices(intervals):
                self._count(blocks, -1)

    def write(self, owner: str, intervals: Sequence[Interval]) -> None:
        """Pin for writing by `owner`, which may have pinned some of them before.

        Raises:
            BlocksBusy: a transfer reads any of them, or another owner writes it.
            UnknownNode: the pool was retired.
        """
        with self._lock:
            self._refuse_if_retired()
            serial = self._serial_of.get(owner, self._next_serial)
            for blocks in _indices(intervals):
                writer = self._writer[blocks]
                if np.count_nonzero(writer):
                    self._refuse(blocks, (writer > 0) & (writer != serial), "written")
                if np.count_nonzero(self._readers[blocks]):
                    self._refuse(blocks, self._readers[blocks] > 0, "read")
            if serial == self._next_serial:
                self._next_serial += 1
                self._serial_of[owner] = serial
                self._written_by[owner] = []
            self._written_by[owner].extend(intervals)
            for blocks in _indices(intervals):
                self._writer[blocks] = serial

    def unpin_write(self, owner: str) -> None:
        """End everything that `owner` pinned for writing. Idempotent."""
        with self._lock:
            self._serial_of.pop(owner, None)
            for blocks in _indices(self._written_by.pop(owner, ())):
                self._writer[blocks] = 0

    def pinned(self, block_ids: Sequence[int]) -> list[int]:
        """Those of `block_ids` that a transfer is using."""
        ids = np.asarray(block_ids, np.int64)
        with self._lock:
            return [int(i) for i in ids[(self._writer[ids] > 0) | (self._readers[ids] > 0)]]

    @property
    def num_pinned(self) -> int:
        with self._lock:
            return int(np.count_nonzero((self._writer > 0) | (self._readers > 0)))

    def retire(self) -> None:
        """Let nothing be pinned any more.

        Raises:
            BlocksBusy: something is.
        """
        with self._lock:
            busy = np.flatnonzero((self._writer > 0) | (self._readers > 0))
            if busy.size:
                raise BlocksBusy(
                    f"{busy.size} blocks of {self._node}, {busy[0]} the first, are used by "
                    "transfers; wait for these, or cancel them"
                )
            self._is_retired = True

    def _refuse_if_retired(self) -> None:
        if self._is_retired:
            raise UnknownNode(f"node {self._node!r} was unregistered here")

    def _count(self, blocks: slice | npt.NDArray[np.int64], by: int) -> None:
        if isinstance(blocks, slice):
            self._readers[blocks] += by
        else:
            # A block may occur more than once among the sources.
            np.add.at(self._readers, blocks, by)

    def _refuse(
        self, blocks: slice | npt.NDArray[np.int64], busy: npt.NDArray[np.bool_], what: str
    ) -> None:
        if busy.any():
            first = int(busy.argmax())
            block = blocks.start + first if isinstance(blocks, slice) else int(blocks[first])
            raise BlocksBusy(
                f"block {block} of {self._node} is being {what} by another transfer; wait for it "
                "to end"
            )


def _indices(intervals: Sequence[Interval]) -> list[slice | npt.NDArray[np.int64]]:
    """What selects the blocks: slices of a few intervals, one array of ids for many."""
    if len(intervals) <= _FEW:
        return [slice(start, start + count) for start, count in intervals]
    table = np.asarray(intervals, np.int64)
    counts = table[:, 1]
    within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    return [np.repeat(table[:, 0], counts) + within]
