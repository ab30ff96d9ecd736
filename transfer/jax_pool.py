"""A pool that is a JAX array: `kv_PL2ZKH`, on one device or sharded over KV heads.

On CPU the array's memory is read and written in place, by address. Not through `np.asarray`: such
a view is a reference, and while one lives the next program that is given the pool has to copy all
of it. So that an address stays good for as long as somebody uses it, whoever replaces the array
does so through `update`:

    pool.update(lambda kv_PL2ZKH: step(kv_PL2ZKH, ...))

or, where the program gives more than the pool, through `update_with`.

A program that donates the pool and updates it in place gives back the same memory, and transfers
go on meanwhile: they touch other blocks. One that returns other memory has to wait until no
transfer is inside. That needs the old array to be still there: a program that takes the pool by
donation and does *not* update it in place pulls the memory from under a transfer, which is
reported as `PoolMoved`; compile such programs so that they alias the pool.

What is read is what is there: start a transfer once the step that wrote its blocks has finished
(its tokens have been seen). Elsewhere than on CPU blocks are sliced out and put back by compiled
programs, whose sizes are powers of two so that there are few of them.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from pallas_kernels.kv_layout import POOL_AXES, KVLayout
from transfer.errors import PoolMoved
from transfer.pool_access import Bytes, FlatMemory, Generations, HostMemory, PoolAccess

_Result = TypeVar("_Result")

_HEADS = POOL_AXES.index("K")
"""Axis of `kv_PL2ZKH` that tensor parallelism cuts."""


class JaxPool(PoolAccess):
    """See the module's text.

    Args:
        layout: shape of a block; `dtype` may be stored as bits of the same size.
        kv_PL2ZKH: the pool; owned from now on. Sharded, if at all, over its KV-head axis.
        generations: see `PoolAccess`.

    Raises:
        ValueError: shape or element size is not the layout's, or another axis is sharded.
    """

    def __init__(
        self, layout: KVLayout, kv_PL2ZKH: jax.Array, generations: Generations | None = None
    ) -> None:
        super().__init__(layout, kv_PL2ZKH.shape[0], generations)
        if kv_PL2ZKH.shape != layout.pool_shape(self.num_blocks):
            raise ValueError(
                f"kv_PL2ZKH has shape {kv_PL2ZKH.shape}, the layout's is "
                f"{layout.pool_shape(self.num_blocks)}"
            )
        if kv_PL2ZKH.dtype.itemsize != layout.dtype_bytes:
            raise ValueError(
                f"kv_PL2ZKH has {kv_PL2ZKH.dtype.itemsize} bytes an element, the layout's dtype "
                f"{layout.dtype} has {layout.dtype_bytes}"
            )
        self._shards = _shards(kv_PL2ZKH)
        self._array = kv_PL2ZKH
        self._on_cpu = all(d.platform == "cpu" for d in kv_PL2ZKH.devices())
        self._updating = threading.RLock()
        self._inside = threading.Condition()
        self._num_inside = 0
        self._addresses = _addresses(kv_PL2ZKH) if self._on_cpu else ()
        self._moved = False
        self._has_put = False

    @property
    def array(self) -> jax.Array:
        """The pool as it is now; the next `update` may give it up."""
        return self._array

    @property
    def is_device_pool(self) -> bool:
        return True

    def update(self, program: Callable[[jax.Array], jax.Array]) -> None:
        """Replace the array by `program(array)`; see the module's text.

        Raises:
            PoolMoved: the program gave the pool's memory up while a transfer was using it.
        """
        self.update_with(lambda kv_PL2ZKH: (program(kv_PL2ZKH), None))

    def update_with(self, program: Callable[[jax.Array], tuple[jax.Array, _Result]]) -> _Result:
        """Replace the array by the first of what `program(array)` returns; gives back the second.

            token_ids = pool.update_with(lambda kv_PL2ZKH: step(kv_PL2ZKH, ...))

        Raises:
            PoolMoved: as `update`; the array has been replaced, and the result is lost.
        """
        with self._updating:
            old = self._array
            new, result = program(old)
            if self._on_cpu and (addresses := _addresses(new)) != self._addresses:
                self._move(old, new, addresses)
            self._array = new
            return result

    def _move(self, old: jax.Array, new: jax.Array, addresses: tuple[int, ...]) -> None:
        """Go on in other memory, once no transfer is inside the old one; `_updating` held."""
        with self._inside:
            gone = old.is_deleted() and self._num_inside > 0
            self._moved = self._moved or gone
            if not gone:
                self._inside.wait_for(lambda: self._num_inside == 0)
            self._addresses = addresses
            self._array = new
        if gone:
            raise PoolMoved(
                "a program took the pool by donation and did not update it in place while a "
                "transfer was using its memory"
            )

    @contextmanager
    def open(self) -> Iterator[HostMemory]:
        if not self._on_cpu:
            yield _DeviceMemory(self)
            return
        # The buffer exists, and is where it will stay, once the program that makes it has begun.
        with self._inside:
            self._num_inside += 1
            addresses = self._addresses
        try:
            yield self._host_memory(addresses)
            if self._moved:
                raise PoolMoved("the pool's memory was replaced during a transfer")
        finally:
            with self._inside:
                self._num_inside -= 1
                if self._num_inside == 0:
                    self._moved = False
                self._inside.notify_all()

    def take(self, start: int, count: int) -> jax.Array:
        with self._updating:
            pieces = [
                _take(self._array, jnp.int32(start + offset), count=size)
                for offset, size in _powers_of_two(count)
            ]
        return pieces[0] if len(pieces) == 1 else jnp.concatenate(pieces)

    def put(self, start: int, kv_PL2ZKH: jax.Array) -> None:
        for offset, size in _powers_of_two(kv_PL2ZKH.shape[0]):
            piece = kv_PL2ZKH[offset : offset + size]
            piece = jax.device_put(piece.view(self._array.dtype), self._array.sharding)
            with self._updating:
                self.update(partial(_put, piece_PL2ZKH=piece, start=jnp.int32(start + offset)))
                self._has_put = True

    def flush(self) -> None:
        if self._has_put:
            # Nobody may give the array up while it is waited for.
            with self._updating:
                self._has_put = False
                self._array.block_until_ready()

    def _host_memory(self, addresses: tuple[int, ...]) -> HostMemory:
        sizes = [self.num_blocks * self.layout.bytes_per_block // len(addresses)] * len(addresses)
        views = [_at(address, size) for address, size in zip(addresses, sizes, strict=True)]
        if len(views) == 1:
            return FlatMemory(views[0], self.layout.bytes_per_block)
        return _ShardedMemory(self.layout, views, self._shards)


class _ShardedMemory(HostMemory):
    """Host memory of shards over KV heads; blocks are put together on the way out."""

    def __init__(self, layout: KVLayout, views: list[Bytes], heads: list[slice]) -> None:
        self.flat = None
        self._layout = layout
        self._dtype = np.dtype(f"u{layout.dtype_bytes}")
        self._shards = []
        for view, cut in zip(views, heads, strict=True):
            shape = list(layout.pool_shape(1))
            shape[0], shape[_HEADS] = -1, cut.stop - cut.start
            self._shards.append((view.view(self._dtype).reshape(shape), cut))

    def read(self, start: int, out: Bytes) -> None:
        blocks = self._blocks(out)
        for shard, heads in self._shards:
            blocks[..., heads, :] = shard[start : start + len(blocks)]

    def write(self, start: int, data: Bytes) -> None:
        blocks = self._blocks(data)
        for shard, heads in self._shards:
            shard[start : start + len(blocks)] = blocks[..., heads, :]

    def _blocks(self, data: Bytes) -> npt.NDArray[np.generic]:
        count = data.size // self._layout.bytes_per_block
        return data.view(self._dtype).reshape(self._layout.pool_shape(count))


class _DeviceMemory(HostMemory):
    """Blocks of a pool that is not on CPU, by way of the host."""

    def __init__(self, pool: JaxPool) -> None:
        self.flat = None
        self._pool = pool

    def read(self, start: int, out: Bytes) -> None:
        count = out.size // self._pool.layout.bytes_per_block
        blocks = np.ascontiguousarray(np.asarray(self._pool.take(start, count)))
        out[:] = blocks.reshape(-1).view(np.uint8)

    def write(self, start: int, data: Bytes) -> None:
        count = data.size // self._pool.layout.bytes_per_block
        # A copy, for the caller's buffer is reused before the device has read it.
        blocks = data.copy().view(self._pool.array.dtype)
        self._pool.put(start, jnp.asarray(blocks.reshape(self._pool.layout.pool_shape(count))))
        self._pool.flush()


def _shards(kv_PL2ZKH: jax.Array) -> list[slice]:
    """KV heads of each distinct shard, in order.

    Raises:
        ValueError: another axis is cut, or some shards are on other hosts.
    """
    if not kv_PL2ZKH.is_fully_addressable:
        raise ValueError("some of the pool's shards are in other processes")
    for shard in kv_PL2ZKH.addressable_shards:
        for axis, cut in enumerate(shard.index):
            whole = cut.indices(kv_PL2ZKH.shape[axis]) == (0, kv_PL2ZKH.shape[axis], 1)
            if axis != _HEADS and not whole:
                raise ValueError("the pool may be sharded over its KV-head axis only")
    cuts = [s.index[_HEADS].indices(kv_PL2ZKH.shape[_HEADS]) for s in _distinct(kv_PL2ZKH)]
    return [slice(start, stop) for start, stop, _ in cuts]


def _distinct(kv_PL2ZKH: jax.Array) -> list[jax.Shard]:
    shards = [s for s in kv_PL2ZKH.addressable_shards if s.replica_id == 0]
    if len(shards) != len(kv_PL2ZKH.addressable_shards):
        raise ValueError("the pool must not be replicated: a transfer would write one copy only")
    return sorted(shards, key=lambda shard: shard.index[_HEADS].start or 0)


def _addresses(kv_PL2ZKH: jax.Array) -> tuple[int, ...]:
    """Where each shard's memory is. Does not wait for the program that computes it."""
    if len(kv_PL2ZKH.sharding.device_set) == 1:
        return (kv_PL2ZKH.unsafe_buffer_pointer(),)
    return tuple(shard.data.unsafe_buffer_pointer() for shard in _distinct(kv_PL2ZKH))


def _at(address: int, size: int) -> Bytes:
    """uint8 view of memory that someone else keeps."""
    return np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(address))


def _powers_of_two(count: int) -> list[tuple[int, int]]:
    """(offset, size) of pieces whose sizes are powers of two, largest first."""
    pieces, done = [], 0
    while done < count:
        size = 1 << ((count - done).bit_length() - 1)
        pieces.append((done, size))
        done += size
    return pieces


@partial(jax.jit, static_argnames="count")
def _take(kv_PL2ZKH: jax.Array, start: jax.Array, *, count: int) -> jax.Array:
    return jax.lax.dynamic_slice_in_dim(kv_PL2ZKH, start, count, axis=0)


@partial(jax.jit, donate_argnums=0)
def _put(kv_PL2ZKH: jax.Array, piece_PL2ZKH: jax.Array, start: jax.Array) -> jax.Array:
    return jax.lax.dynamic_update_slice_in_dim(kv_PL2ZKH, piece_PL2ZKH, start, axis=0)
