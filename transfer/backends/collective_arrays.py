"""What the two sides of a collective put into its programs, and take out of them.

Both must call a program with the same shape, so it follows from the plan alone, and from what the
opening says of the source's pool:

    whole blocks             unsigned [bucket(blocks), L, 2, Z, K, H]
    pieces of a block        uint8 [bucket(bytes)]

Blocks begin at the array's start. Where the source is a device's pool, the array is a window of
it, cut out by one compiled program per bucket; near the pool's end it begins earlier than the
blocks. What else is in the array is dropped at the destination.
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from transfer.backends.base import Plan
from transfer.errors import BackendError
from transfer.pool_access import Bytes, PoolAccess
from transfer.strategies import Strategy

_ALIGNMENT = 64
_STEPS = 4
"""Bucket sizes from one power of two to the next."""


class Opening(msgspec.Struct, frozen=True, array_like=True):
    """What the destination must know of the source's pool.

    Attributes:
        num_blocks: its size.
        is_window: arrays are windows of it.
    """

    num_blocks: int
    is_window: bool


def bucket(size: int) -> int:
    """The next size up of which there are few: 1 to 8, 10, 12, 14, 16, 20, 24, ..."""
    if size <= 2 * _STEPS:
        return size
    step = 1 << ((size - 1).bit_length() - _STEPS.bit_length())
    return -(-size // step) * step


class _Side:
    """Attributes: `dtype` of all arrays."""

    def __init__(self, pool: PoolAccess, plan: Plan, opening: Opening) -> None:
        with pool.open() as memory:
            is_flat = memory.flat is not None
        if not is_flat and plan.strategy is Strategy.LAYER_MAJOR:
            raise BackendError(
                "a sharded or device pool moves whole blocks only; use the block-major or "
                "aligned-runs strategy"
            )
        self.opening = opening
        self._pool = pool
        self._plan = plan
        self._block = plan.layout.bytes_per_block
        self._on_device = pool.is_device_pool and not is_flat
        whole = plan.strategy is not Strategy.LAYER_MAJOR
        self.dtype = np.dtype(f"u{plan.layout.dtype_bytes}" if whole else np.uint8)

    def shape(self, call: int) -> tuple[int, ...]:
        """Of the call's array, on both sides."""
        size = int(self._plan.calls[call, 2])
        if self._plan.strategy is Strategy.LAYER_MAJOR:
            return (bucket(size),)
        num_blocks = min(bucket(size // self._block), self.opening.num_blocks)
        return self._plan.layout.pool_shape(num_blocks)

    def _window(self, call: int) -> int:
        """First block of the source's pool that is in the call's array."""
        start = int(self._plan.calls[call, 0]) // self._block
        last = self.opening.num_blocks - self.shape(call)[0]
        return min(start, last) if self.opening.is_window else start


class Giver(_Side):
    """The source's side."""

    def __init__(self, source: PoolAccess, plan: Plan) -> None:
        with source.open() as memory:
            is_window = memory.flat is None and source.is_device_pool
        super().__init__(source, plan, Opening(source.num_blocks, is_window))

    def array(self, call: int) -> Any:
        """A copy of the call's blocks."""
        shape = self.shape(call)
        if self._on_device:
            kv_PL2ZKH = self._pool.take(self._window(call), shape[0])
            return kv_PL2ZKH.view(self.dtype)
        offset, _, size = self._plan.calls[call].tolist()
        copy = _aligned(int(np.prod(shape)) * self.dtype.itemsize)
        copy[size:] = 0
        with self._pool.open() as memory:
            if memory.flat is not None:
                copy[:size] = memory.flat[offset : offset + size]
            else:
                memory.read(offset // self._block, copy[:size])
        return copy.view(self.dtype).reshape(shape)


class Taker(_Side):
    """The destination's side."""

    def __init__(self, destination: PoolAccess, plan: Plan, opening: Opening) -> None:
        ends = (plan.calls[:, 0] + plan.calls[:, 2]).max()
        if ends > opening.num_blocks * plan.layout.bytes_per_block:
            raise BackendError(f"the source's pool has {opening.num_blocks} blocks only")
        super().__init__(destination, plan, opening)

    def take(self, call: int, arrived: Any) -> None:
        """Write what has arrived to the pool."""
        src, dst, size = self._plan.calls[call].tolist()
        skipped = 0
        if self.opening.is_window:
            skipped = src - self._window(call) * self._block
        if self._on_device:
            self._put(dst // self._block, skipped // self._block, size // self._block, arrived)
            return
        data = np.asarray(arrived).reshape(-1).view(np.uint8)[skipped : skipped + size]
        with self._pool.open() as memory:
            if memory.flat is not None:
                memory.flat[dst : dst + size] = data
            else:
                memory.write(dst // self._block, data)

    def _put(self, start: int, skipped: int, num_blocks: int, arrived: Any) -> None:
        """In powers of two of blocks, so that few programs are compiled."""
        done = 0
        while done < num_blocks:
            count = 1 << ((num_blocks - done).bit_length() - 1)
            self._pool.put(start + done, _cut(arrived, skipped + done, count))
            done += count


def _cut(kv_PL2ZKH: Any, start: int, count: int) -> Any:
    import jax

    return jax.lax.dynamic_slice_in_dim(kv_PL2ZKH, start, count)


def _aligned(size: int) -> Bytes:
    """uint8 [size] that JAX takes on CPU as it is."""
    buffer = np.empty(size + _ALIGNMENT, np.uint8)
    start = -buffer.ctypes.data % _ALIGNMENT
    return buffer[start : start + size]
