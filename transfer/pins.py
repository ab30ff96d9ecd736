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

from transfer.errors import BlocksBusy

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

    def read(self, intervals: Sequence[Interval]) -> None:
        """Pin for reading. Raises `BlocksBusy` if a transfer writes any of them."""
        with self._lock:
            for start, count in intervals:
                self._refuse(self._writer[start : start + count] > 0, start, "written")
            for start, count in intervals:
                self._readers[start : start + count] += 1

    def unpin_read(self, intervals: Sequence[Interval]) -> None:
        with self._lock:
            for start, count in intervals:
                self._readers[start : start + count] -= 1

    def write(self, owner: str, intervals: Sequence[Interval]) -> None:
        """Pin for writing by `owner`, which may have pinned some of them before.

        Raises:
            BlocksBusy: a transfer reads any of them, or another owner writes it.
        """
        with self._lock:
            serial = self._serial_of.get(owner, self._next_serial)
            for start, count in intervals:
                writer = self._writer[start : start + count]
                self._refuse((writer > 0) & (writer != serial), start, "written")
                self._refuse(self._readers[start : start + count] > 0, start, "read")
            if serial == self._next_serial:
                self._next_serial += 1
                self._serial_of[owner] = serial
                self._written_by[owner] = []
            self._written_by[owner].extend(intervals)
            for start, count in intervals:
                self._writer[start : start + count] = serial

    def unpin_write(self, owner: str) -> None:
        """End everything that `owner` pinned for writing. Idempotent."""
        with self._lock:
            self._serial_of.pop(owner, None)
            for start, count in self._written_by.pop(owner, ()):
                self._writer[start : start + count] = 0

    def pinned(self, block_ids: Sequence[int]) -> list[int]:
        """Those of `block_ids` that a transfer is using."""
        ids = np.asarray(block_ids, np.int64)
        with self._lock:
            return [int(i) for i in ids[(self._writer[ids] > 0) | (self._readers[ids] > 0)]]

    @property
    def num_pinned(self) -> int:
        with self._lock:
            return int(np.count_nonzero((self._writer > 0) | (self._readers > 0)))

    def _refuse(self, busy: npt.NDArray[np.bool_], start: int, what: str) -> None:
        if busy.any():
            raise BlocksBusy(
                f"block {start + int(busy.argmax())} of {self._node} is being {what} by another "
                "transfer; wait for it to end"
            )
