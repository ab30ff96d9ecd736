"""The blocks of one request in the pool: its table, and how much of it is in the prefix cache."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from flowkv_jax.kv_cache.prefix_cache import CachedBlock

BlockTable = npt.NDArray[np.int32]


class RequestBlocks:
    """Blocks of one request.

    Attributes:
        view: its table: the read-only filled part of a buffer that doubles.
        capacity_tokens: positions that the blocks hold.
        registered: cached blocks with which the table begins; each is held once for it.
    """

    __slots__ = ("_buffer", "capacity_tokens", "registered", "view")

    def __init__(self) -> None:
        self._buffer: BlockTable = np.empty(16, np.int32)
        self.view: BlockTable = self._buffer[:0]
        self.capacity_tokens = 0
        self.registered: list[CachedBlock] = []

    def append(self, block_ids: Sequence[int], block_size: int) -> None:
        """Lengthen the table. Makes a new `view`; older ones stay as they are."""
        start = self.view.size
        end = start + len(block_ids)
        if end > self._buffer.size:
            buffer = np.empty(max(end, 2 * self._buffer.size), np.int32)
            buffer[:start] = self.view
            self._buffer = buffer
        self._buffer[start:end] = block_ids
        self.view = self._buffer[:end]
        self.view.flags.writeable = False
        self.capacity_tokens = end * block_size

    def private_blocks(self) -> list[int]:
        """Blocks behind the registered ones."""
        blocks: list[int] = self.view[len(self.registered) :].tolist()
        return blocks
