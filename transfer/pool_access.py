"""What a transfer sees of a pool: its layout, its bytes, the generations of its blocks.

    block p is the bytes  [p * bytes_per_block, (p + 1) * bytes_per_block)

in the axis order of `KVLayout`, whatever the pool is made of. A pool whose bytes lie in one piece
of host memory shows them as `HostMemory.flat`, and is read and written in place. One that is
sharded, or on an accelerator, is copied out and in by whole blocks. Imports no JAX: `JaxPool` is
in `transfer.jax_pool`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from pallas_kernels.kv_layout import KVLayout
from transfer.errors import BackendError, PoolBoundsError
from transfer.types import BlockRun

if TYPE_CHECKING:
    import jax

Bytes = npt.NDArray[np.uint8]
Generations = Callable[[Sequence[int]], Sequence[int]]
"""Block ids -> how often each has been freed, as the pool's allocator counts."""


class HostMemory(ABC):
    """A pool's bytes, for as long as `PoolAccess.open` holds.

    Attributes:
        flat: uint8 [num_blocks * bytes_per_block], the pool itself; None where it does not lie in
            one piece of host memory, and `read` and `write` copy.
    """

    flat: Bytes | None

    @abstractmethod
    def read(self, start: int, out: Bytes) -> None:
        """Copy whole blocks from block `start` on into `out`."""

    @abstractmethod
    def write(self, start: int, data: Bytes) -> None:
        """Copy `data`, whole blocks, to block `start` on."""


class PoolAccess(ABC):
    """One node's pool, as the transfer engine uses it.

    Args:
        layout: shape of a block.
        num_blocks: P.
        generations: None where blocks carry no generation; then no request may ask for the check.
    """

    def __init__(
        self, layout: KVLayout, num_blocks: int, generations: Generations | None = None
    ) -> None:
        if num_blocks < 1:
            raise ValueError(f"num_blocks={num_blocks} must be at least 1")
        self.layout = layout
        self.num_blocks = num_blocks
        self.generations = generations

    @abstractmethod
    def open(self) -> AbstractContextManager[HostMemory]:
        """Hold the pool's memory where it is while its bytes are read or written."""

    @property
    def is_device_pool(self) -> bool:
        """Whether `take` and `put` work: the pool is a JAX array."""
        return False

    def take(self, start: int, count: int) -> jax.Array:
        """Blocks [start, start + count) as a new array [count, L, 2, Z, K, H]."""
        raise BackendError(f"{type(self).__name__} holds no JAX array")

    def put(self, start: int, kv_PL2ZKH: jax.Array) -> None:
        """Write blocks from `start` on. Copies between devices and shardings as needed.

        Only dispatches; the engine calls `flush` before it calls a leg done.
        """
        raise BackendError(f"{type(self).__name__} holds no JAX array")

    def flush(self) -> None:
        """Wait until everything that was put is in the pool."""
        return


def check_bounds(node: str, num_blocks: int, intervals: Sequence[tuple[int, int]]) -> None:
    """Raise `PoolBoundsError` unless every (first block id, count) lies in a pool of that size."""
    for start, count in intervals:
        if start < 0 or count < 1 or start + count > num_blocks:
            raise PoolBoundsError(
                f"blocks [{start}, {start + count}) are not in {node}, which has {num_blocks} "
                "blocks"
            )


class FlatMemory(HostMemory):
    """Host memory in one piece."""

    def __init__(self, flat: Bytes, bytes_per_block: int) -> None:
        self.flat: Bytes = flat
        self._bytes_per_block = bytes_per_block

    def read(self, start: int, out: Bytes) -> None:
        offset = start * self._bytes_per_block
        np.copyto(out, self.flat[offset : offset + out.size])

    def write(self, start: int, data: Bytes) -> None:
        offset = start * self._bytes_per_block
        self.flat[offset : offset + data.size] = data


class NumpyPool(PoolAccess):
    """A pool in host memory.

    Args:
        array: C-contiguous, `num_blocks * layout.bytes_per_block` bytes; None for a new one of
            zeros.
    """

    def __init__(
        self,
        layout: KVLayout,
        num_blocks: int,
        array: npt.NDArray[np.generic] | None = None,
        generations: Generations | None = None,
    ) -> None:
        super().__init__(layout, num_blocks, generations)
        size = num_blocks * layout.bytes_per_block
        if array is None:
            array = np.zeros(size, np.uint8)
        if not array.flags.c_contiguous or array.nbytes != size:
            raise ValueError(
                f"array of {array.nbytes} bytes, contiguous: {array.flags.c_contiguous}; the pool "
                f"needs {size} contiguous bytes"
            )
        self.rows: Bytes = array.reshape(-1).view(np.uint8).reshape(num_blocks, -1)
        self._memory = FlatMemory(self.rows.reshape(-1), layout.bytes_per_block)

    def open(self) -> AbstractContextManager[HostMemory]:
        return nullcontext(self._memory)


def outgoing(
    memory: HostMemory, offsets: Sequence[int], sizes: Sequence[int], piece_bytes: int, block: int
) -> Iterator[Bytes]:
    """The ranges' bytes in order, in pieces of at most `piece_bytes` (or one block).

    Pieces of flat memory are views; others are valid until the next one is asked for.
    """
    for offset, size, buffer in _pieces(memory, offsets, sizes, piece_bytes, block):
        if memory.flat is not None:
            yield memory.flat[offset : offset + size]
        else:
            memory.read(offset // block, buffer[:size])
            yield buffer[:size]


def incoming(
    memory: HostMemory, offsets: Sequence[int], sizes: Sequence[int], piece_bytes: int, block: int
) -> Iterator[Bytes]:
    """Buffers for the ranges in order; each must be filled before the next one is asked for."""
    for offset, size, buffer in _pieces(memory, offsets, sizes, piece_bytes, block):
        if memory.flat is not None:
            yield memory.flat[offset : offset + size]
        else:
            yield buffer[:size]
            memory.write(offset // block, buffer[:size])


def _pieces(
    memory: HostMemory, offsets: Sequence[int], sizes: Sequence[int], piece_bytes: int, block: int
) -> Iterator[tuple[int, int, Bytes]]:
    buffer = np.empty(0, np.uint8)
    if memory.flat is None:
        piece_bytes = max(block, piece_bytes - piece_bytes % block)
        buffer = np.empty(min(piece_bytes, max(sizes, default=0)), np.uint8)
    for offset, size in zip(offsets, sizes, strict=True):
        if memory.flat is None and (offset % block or size % block):
            raise BackendError(
                "a sharded or device pool moves whole blocks only; use the block-major or "
                "aligned-runs strategy"
            )
        for start in range(0, size, piece_bytes):
            yield offset + start, min(piece_bytes, size - start), buffer


def block_ids(runs: Sequence[BlockRun], *, of_source: bool) -> list[int]:
    """Block ids in run order, of the source or of the destination."""
    ids: list[int] = []
    for run in runs:
        start = run.src_start if of_source else run.dst_start
        ids.extend(range(start, start + run.num_blocks))
    return ids
