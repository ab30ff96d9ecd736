"""Blocks out of the pool and back: a contiguous run at a time, or ragged ones by their ids.

All bytes of a block lie together, so a run is one piece of memory and XLA copies it as such; that
is what `auto` does with runs everywhere. Ragged ids are a gather and a scatter for XLA, and one
copying kernel (`gpu`) on GPUs. In a jitted function that donates the pool, `put_run` and
`scatter_blocks` update it in place.
"""

from __future__ import annotations

import math
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels import triton
from pallas_kernels.kv_layout import POOL_AXES

Implementation = Literal["auto", "xla", "gpu"]
_TILE_ELEMENTS = 4096


def slice_run(
    kv_PL2ZKH: jax.Array,
    start: jax.Array | int,
    *,
    num_blocks: int,
    implementation: Implementation = "auto",
    axes: str = POOL_AXES,
    interpret: bool | None = None,
) -> jax.Array:
    """Blocks [start, start + num_blocks) as one array, [num_blocks, L, 2, Z, K, H].

    Args:
        kv_PL2ZKH: the pool.
        start: first block; a Python int or a traced int32 scalar. The run lies inside the pool.
        num_blocks: length of the run; static.
        implementation: "auto", "xla", or "gpu" (the copying kernel; interpreted where there is no
            GPU).
        axes: order of the pool's axes, for measuring other layouts.
        interpret: see `triton.kernel_call`.

    Raises:
        ValueError: the run is longer than the pool, or an unknown implementation.
    """
    pool_blocks = kv_PL2ZKH.shape[axes.index("P")]
    if not 0 < num_blocks <= pool_blocks:
        raise ValueError(f"{num_blocks=} must be from 1 to the pool's {pool_blocks} blocks")
    if _choose(implementation, run=True) == "gpu":
        ids_C = start + jnp.arange(num_blocks, dtype=jnp.int32)
        return _gather_kernel(kv_PL2ZKH, ids_C, axes, interpret)
    return jax.lax.dynamic_slice_in_dim(kv_PL2ZKH, start, num_blocks, axis=axes.index("P"))


def put_run(
    kv_PL2ZKH: jax.Array,
    run_CL2ZKH: jax.Array,
    start: jax.Array | int,
    *,
    implementation: Implementation = "auto",
    axes: str = POOL_AXES,
    interpret: bool | None = None,
) -> jax.Array:
    """The pool with blocks [start, start + C) replaced by a run; the inverse of `slice_run`.

    Args:
        kv_PL2ZKH: the pool; give it up, use the returned one.
        run_CL2ZKH: the new blocks, in the pool's dtype.
        start: first block; the run lies inside the pool.
        implementation, axes, interpret: as in `slice_run`.

    Raises:
        ValueError: shapes or dtypes that do not fit, or an unknown implementation.
    """
    _check_blocks(kv_PL2ZKH, run_CL2ZKH, axes)
    if _choose(implementation, run=True) == "gpu":
        ids_C = start + jnp.arange(run_CL2ZKH.shape[axes.index("P")], dtype=jnp.int32)
        return _scatter_kernel(kv_PL2ZKH, run_CL2ZKH, ids_C, axes, interpret)
    return jax.lax.dynamic_update_slice_in_dim(kv_PL2ZKH, run_CL2ZKH, start, axis=axes.index("P"))


def gather_blocks(
    kv_PL2ZKH: jax.Array,
    ids_C: jax.Array,
    *,
    implementation: Implementation = "auto",
    axes: str = POOL_AXES,
    interpret: bool | None = None,
) -> jax.Array:
    """The blocks of any ids as one array, [C, L, 2, Z, K, H].

    Args:
        kv_PL2ZKH: the pool.
        ids_C: int32[C]; an id outside [0, P) gives a block of zeros.
        implementation, axes, interpret: as in `slice_run`.
    """
    if _choose(implementation, run=False) == "gpu":
        return _gather_kernel(kv_PL2ZKH, ids_C, axes, interpret)
    axis = axes.index("P")
    # A negative index would count from the end.
    ids_C = jnp.where(ids_C < 0, kv_PL2ZKH.shape[axis], ids_C)
    return jnp.take(kv_PL2ZKH, ids_C, axis=axis, mode="fill", fill_value=0)


def scatter_blocks(
    kv_PL2ZKH: jax.Array,
    blocks_CL2ZKH: jax.Array,
    ids_C: jax.Array,
    *,
    implementation: Implementation = "auto",
    axes: str = POOL_AXES,
    interpret: bool | None = None,
) -> jax.Array:
    """The pool with the blocks `ids_C` replaced; the inverse of `gather_blocks`.

    Args:
        kv_PL2ZKH: the pool; give it up, use the returned one.
        blocks_CL2ZKH: the new blocks, in the pool's dtype.
        ids_C: int32[C]; an id outside [0, P) writes nowhere, no two inside are equal.
        implementation, axes, interpret: as in `slice_run`.

    Raises:
        ValueError: shapes or dtypes that do not fit, or an unknown implementation.
    """
    _check_blocks(kv_PL2ZKH, blocks_CL2ZKH, axes)
    axis = axes.index("P")
    if blocks_CL2ZKH.shape[axis] != ids_C.shape[0]:
        raise ValueError(f"{blocks_CL2ZKH.shape[axis]} blocks for {ids_C.shape[0]} ids")
    if _choose(implementation, run=False) == "gpu":
        return _scatter_kernel(kv_PL2ZKH, blocks_CL2ZKH, ids_C, axes, interpret)
    pool_blocks = kv_PL2ZKH.shape[axis]
    is_inside = (ids_C >= 0) & (ids_C < pool_blocks)
    # Each id that writes nowhere needs a place of its own outside, for ids are said to be unique.
    outside_C = pool_blocks + jnp.arange(ids_C.shape[0], dtype=jnp.int32)
    index = (slice(None),) * axis + (jnp.where(is_inside, ids_C, outside_C),)
    return kv_PL2ZKH.at[index].set(blocks_CL2ZKH, mode="drop", unique_indices=True)


def _choose(implementation: str, *, run: bool) -> str:
    if implementation == "auto":
        return "gpu" if jax.default_backend() == "gpu" and not run else "xla"
    if implementation not in ("xla", "gpu"):
        raise ValueError(f"{implementation=} is not one of: auto, xla, gpu")
    return implementation


def _check_blocks(kv: jax.Array, blocks: jax.Array, axes: str) -> None:
    axis = axes.index("P")
    expected = kv.shape[:axis] + (blocks.shape[axis],) + kv.shape[axis + 1 :]
    if blocks.shape != expected or blocks.shape[axis] > kv.shape[axis]:
        raise ValueError(f"blocks of shape {blocks.shape} do not fit a pool of {kv.shape}")
    if blocks.dtype != kv.dtype:
        raise ValueError(f"blocks are {blocks.dtype}, the pool is {kv.dtype}")


def _pieces_view(kv: jax.Array, axes: str) -> jax.Array:
    """[pieces of a block, blocks, elements of a piece]; block-major has one piece."""
    axis = axes.index("P")
    return kv.reshape(math.prod(kv.shape[:axis]), kv.shape[axis], -1)


def _gather_kernel(kv: jax.Array, ids_C: jax.Array, axes: str, interpret: bool | None) -> jax.Array:
    axis = axes.index("P")
    source = _pieces_view(kv, axes)
    num_pieces, _, elements = source.shape
    out: jax.Array = triton.kernel_call(
        _gather_body,
        (source, ids_C),
        jax.ShapeDtypeStruct((num_pieces, ids_C.shape[0], elements), kv.dtype),
        name="flowkv_gather_blocks",
        grid=(pl.cdiv(elements, _TILE_ELEMENTS), ids_C.shape[0], num_pieces),
        interpret=interpret,
    )
    return out.reshape(*kv.shape[:axis], ids_C.shape[0], *kv.shape[axis + 1 :])


def _scatter_kernel(
    kv: jax.Array, blocks: jax.Array, ids_C: jax.Array, axes: str, interpret: bool | None
) -> jax.Array:
    pool, source = _pieces_view(kv, axes), _pieces_view(blocks, axes)
    num_pieces, _, elements = pool.shape
    out: jax.Array = triton.kernel_call(
        _scatter_body,
        (source, ids_C, pool),
        jax.ShapeDtypeStruct(pool.shape, pool.dtype),
        name="flowkv_scatter_blocks",
        grid=(pl.cdiv(elements, _TILE_ELEMENTS), ids_C.shape[0], num_pieces),
        aliases={2: 0},
        interpret=interpret,
    )
    return out.reshape(kv.shape)


def _gather_body(source_ref: Any, ids_ref: Any, out_ref: Any) -> None:
    position, block, piece, columns, is_inside = _place(source_ref, ids_ref)
    value = triton.load(source_ref.at[piece, block, columns], is_inside)
    in_range = columns < out_ref.shape[2]
    triton.store(out_ref.at[piece, position, columns], value, in_range)


def _scatter_body(source_ref: Any, ids_ref: Any, pool_ref: Any, out_ref: Any) -> None:
    del pool_ref  # the same memory as out_ref
    position, block, piece, columns, is_inside = _place(out_ref, ids_ref)
    value = triton.load(source_ref.at[piece, position, columns], is_inside)
    triton.store(out_ref.at[piece, block, columns], value, is_inside)


def _place(pool_ref: Any, ids_ref: Any) -> tuple[Any, ...]:
    """Index among the ids, block, piece, columns of this program, and which of them exist."""
    tile, position, piece = (pl.program_id(axis) for axis in range(3))
    columns = tile * _TILE_ELEMENTS + jnp.arange(_TILE_ELEMENTS, dtype=jnp.int32)
    block = ids_ref[position]
    _, pool_blocks, elements = pool_ref.shape
    is_inside = (columns < elements) & (block >= 0) & (block < pool_blocks)
    return position, jnp.broadcast_to(block, columns.shape), piece, columns, is_inside
