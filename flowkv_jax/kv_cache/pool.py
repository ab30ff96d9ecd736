"""The KV pool on the device and its swap space on the host: allocation, and copies of runs.

The device pool is an immutable array that every step gives up and gets back (`kv_PL2ZKH`), held by
a `JaxPool`: transfers read and write other blocks of it meanwhile. Host memory is written in place.

On CPU `np.asarray` of the pool is a view without a copy, and copying out of it runs at memory
speed. A view that is still alive when the next step gives the pool up would make that step copy
the whole pool, so no view outlives the method that made it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from pallas_kernels.block_copy import put_run, slice_run
from pallas_kernels.kv_layout import KVLayout, storage_dtype
from transfer.errors import PoolMoved
from transfer.jax_pool import JaxPool
from transfer.pool_access import Generations
from transfer.types import BlockRun

_Result = TypeVar("_Result")

POOL_SPEC_AXIS = 4
"""The KV-head axis of the pool: the one that tensor parallelism cuts."""


def pool_spec(axis: str) -> PartitionSpec:
    """How the pool lies on a mesh: sharded over KV heads."""
    return PartitionSpec(*[None] * POOL_SPEC_AXIS, axis)


class KVPool:
    """A node's KV cache.

    Args:
        layout: shape of a block.
        num_blocks: P.
        num_swap_blocks: blocks of host memory for preempted requests; pages are only touched, and
            so only resident, once they are used.
        mesh, axis: where the pool is sharded over KV heads; None for one device.
        generations: how often each block has been freed, for transfers that check it.

    Attributes:
        access: the pool as transfers see it.
    """

    def __init__(
        self,
        layout: KVLayout,
        num_blocks: int,
        num_swap_blocks: int,
        *,
        mesh: Mesh | None = None,
        axis: str | None = None,
        generations: Generations | None = None,
    ) -> None:
        self.layout = layout
        self.num_blocks = num_blocks
        self._sharding = (
            None if mesh is None or axis is None else NamedSharding(mesh, pool_spec(axis))
        )
        self._dtype = jnp.dtype(storage_dtype(layout.dtype, jax.default_backend()))
        self._host_PL2ZKH = np.zeros(layout.pool_shape(num_swap_blocks), self._dtype)
        self.access = JaxPool(layout, self._zeros(), generations)

    @property
    def kv_PL2ZKH(self) -> jax.Array:
        """The pool as it is now; the next `update` gives it up."""
        return self.access.array

    def update(self, program: Callable[[jax.Array], tuple[jax.Array, _Result]]) -> _Result:
        """Give the pool to a program that gives it back beside a result."""
        return self.access.update_with(program)

    def reset(self) -> None:
        """A fresh pool, after a failed step may have left the old one given up."""
        # A transfer that was using the old one is told so itself.
        with suppress(PoolMoved):
            self.access.update(lambda old: self._zeros())

    def swap_out(self, runs: Sequence[BlockRun]) -> None:
        """Copy runs from the device to the host. Waits for the steps dispatched so far."""
        if not runs:
            return
        if next(iter(self.kv_PL2ZKH.devices())).platform == "cpu":
            self._swap_out_views(runs)
            return
        for source, destination, count in _pieces(runs):
            piece = _slice_out(self.kv_PL2ZKH, jnp.int32(source), num_blocks=count)
            self._host_PL2ZKH[destination : destination + count] = np.asarray(piece)

    def swap_in(self, runs: Sequence[BlockRun]) -> None:
        """Copy runs from the host to the device."""
        for source, destination, count in _pieces(runs):
            # A copy, for the host blocks may be reused before the device has read them.
            piece = self._host_PL2ZKH[source : source + count].copy()
            self.access.update(partial(_put_back, run_CL2ZKH=piece, start=jnp.int32(destination)))

    def _swap_out_views(self, runs: Sequence[BlockRun]) -> None:
        for shard in self.kv_PL2ZKH.addressable_shards:
            view = np.asarray(shard.data)
            heads = shard.index[POOL_SPEC_AXIS]
            for source, destination, count in runs:
                np.copyto(
                    self._host_PL2ZKH[destination : destination + count, :, :, :, heads],
                    view[source : source + count],
                )

    def _zeros(self) -> jax.Array:
        shape = self.layout.pool_shape(self.num_blocks)
        return jnp.zeros(shape, self._dtype, device=self._sharding)


def _pieces(runs: Sequence[BlockRun]) -> list[BlockRun]:
    """Runs cut into powers of two, so that copies have few shapes and so few compilations."""
    pieces = []
    for source, destination, count in runs:
        done = 0
        while done < count:
            size = 1 << ((count - done).bit_length() - 1)
            pieces.append(BlockRun(source + done, destination + done, size))
            done += size
    return pieces


_slice_out = jax.jit(slice_run, static_argnames="num_blocks")
_put_back = jax.jit(put_run, donate_argnums=0)
