"""New K/V of a step into the pool, in place."""

from __future__ import annotations

import math
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels import triton
from pallas_kernels.kv_layout import (
    KEY,
    LARGEST_INDEX,
    POOL_AXES,
    VALUE,
    flat_index,
    pool_index,
)

Implementation = Literal["auto", "reference", "xla", "gpu"]
IMPLEMENTATIONS = ("reference", "xla", "gpu")


def kv_write(
    kv_PL2ZKH: jax.Array,
    layer: jax.Array | int,
    k_TKH: jax.Array,
    v_TKH: jax.Array,
    slots_T: jax.Array,
    *,
    implementation: Implementation = "auto",
    axes: str = POOL_AXES,
    interpret: bool | None = None,
) -> jax.Array:
    """Put K and V of T tokens into layer `layer`.

    Inside a jitted step that donates the pool this updates it in place.

    Args:
        kv_PL2ZKH: the pool; give it up, use the returned one. May hold the bits of K's 16-bit type
            (`kv_layout.storage_dtype`).
        layer: a Python int or a traced int32 scalar.
        k_TKH, v_TKH: float[T, K, H].
        slots_T: int32[T], block * Z + offset of each token; a slot outside [0, P * Z) writes
            nowhere. No two slots inside are equal.
        implementation: "auto", "reference", "xla", or "gpu" (Pallas; interpreted where there is no
            GPU).
        axes: order of the pool's axes, for measuring other layouts.
        interpret: see `triton.kernel_call`.

    Returns:
        The pool with the T positions replaced.

    Raises:
        ValueError: shapes or dtypes that do not fit, or an unknown implementation.
    """
    _check(kv_PL2ZKH, k_TKH, v_TKH, slots_T, axes)
    if implementation == "auto":
        implementation = "gpu" if jax.default_backend() == "gpu" else "xla"
    if implementation not in IMPLEMENTATIONS:
        known = ", ".join(["auto", *IMPLEMENTATIONS])
        raise ValueError(f"{implementation=} is not one of: {known}")
    if kv_PL2ZKH.dtype != k_TKH.dtype:
        k_TKH, v_TKH = (jax.lax.bitcast_convert_type(x, kv_PL2ZKH.dtype) for x in (k_TKH, v_TKH))
    layer = jnp.asarray(layer, jnp.int32)
    if implementation == "gpu":
        return _gpu(kv_PL2ZKH, layer, k_TKH, v_TKH, slots_T, axes, interpret)
    write = _reference if implementation == "reference" else _xla
    return write(kv_PL2ZKH, layer, k_TKH, v_TKH, slots_T, axes)


def _check(
    kv: jax.Array, k_TKH: jax.Array, v_TKH: jax.Array, slots_T: jax.Array, axes: str
) -> None:
    heads_and_dim = (kv.shape[axes.index("K")], kv.shape[axes.index("H")])
    if k_TKH.shape != (*slots_T.shape, *heads_and_dim) or v_TKH.shape != k_TKH.shape:
        raise ValueError(
            f"K of shape {k_TKH.shape} and V of shape {v_TKH.shape} do not fit {slots_T.shape[0]} "
            f"slots and a pool of {heads_and_dim[0]} heads of {heads_and_dim[1]}"
        )
    holds_bits = kv.dtype == jnp.uint16 and k_TKH.dtype.itemsize == 2
    if v_TKH.dtype != k_TKH.dtype or (k_TKH.dtype != kv.dtype and not holds_bits):
        raise ValueError(f"K is {k_TKH.dtype}, V is {v_TKH.dtype}, the pool is {kv.dtype}")


def _reference(
    kv: jax.Array,
    layer: jax.Array,
    k_TKH: jax.Array,
    v_TKH: jax.Array,
    slots_T: jax.Array,
    axes: str,
) -> jax.Array:
    num_blocks, block_size = (kv.shape[axes.index(axis)] for axis in "PZ")
    block_T = jnp.where(slots_T < 0, num_blocks, slots_T // block_size)
    for half, new_TKH in ((KEY, k_TKH), (VALUE, v_TKH)):
        index = pool_index(
            axes,
            block=block_T,
            layer=layer,
            half=half,
            token=slots_T % block_size,
            kv_head=slice(None),
            head_dim=slice(None),
        )
        kv = kv.at[index].set(new_TKH, mode="drop")
    return kv


def _xla(
    kv: jax.Array,
    layer: jax.Array,
    k_TKH: jax.Array,
    v_TKH: jax.Array,
    slots_T: jax.Array,
    axes: str,
) -> jax.Array:
    if slots_T.shape[0] == 1:
        # XLA turns a scatter of one row into a select over the whole pool; two stay a scatter.
        slots_T = jnp.pad(slots_T, (0, 1), constant_values=-1)
        k_TKH, v_TKH = (jnp.pad(x, ((0, 1), (0, 0), (0, 0))) for x in (k_TKH, v_TKH))
    num_tokens = slots_T.shape[0]
    num_blocks, block_size = (kv.shape[axes.index(axis)] for axis in "PZ")
    # One row a (block, layer, key/value, token).
    num_rows = math.prod(kv.shape[:4])
    if num_rows + num_tokens > LARGEST_INDEX:
        raise ValueError(
            f"a pool of {num_rows} rows (blocks * layers * 2 * block_size) is beyond the "
            f"{LARGEST_INDEX} that 32-bit row numbers of implementation='xla' reach"
        )
    rows_XY = kv.reshape(num_rows, -1)
    is_inside_T = (slots_T >= 0) & (slots_T < num_blocks * block_size)
    # Slots that write nowhere go past the end, each to a place of its own; the scatter drops them.
    nowhere_T = num_rows + jnp.arange(num_tokens, dtype=jnp.int32)
    for half, new_TKH in ((KEY, k_TKH), (VALUE, v_TKH)):
        row_T = flat_index(
            kv.shape[:4],
            pool_index(
                axes[:4],
                block=slots_T // block_size,
                layer=layer,
                half=half,
                token=slots_T % block_size,
            ),
        )
        rows_XY = rows_XY.at[jnp.where(is_inside_T, row_T, nowhere_T)].set(
            new_TKH.reshape(num_tokens, -1), mode="drop", unique_indices=True
        )
    return rows_XY.reshape(kv.shape)


def _gpu(
    kv: jax.Array,
    layer: jax.Array,
    k_TKH: jax.Array,
    v_TKH: jax.Array,
    slots_T: jax.Array,
    axes: str,
    interpret: bool | None,
) -> jax.Array:
    num_tokens = k_TKH.shape[0]
    # Heads of a token lie together in the pool as they do in K and V.
    k_TY, v_TY = (x.reshape(num_tokens, -1) for x in (k_TKH, v_TKH))
    pool = kv.reshape(*kv.shape[:4], -1)
    out: jax.Array = triton.kernel_call(
        partial(_write_token, axes=axes),
        (k_TY, v_TY, layer.reshape(1), slots_T, pool),
        jax.ShapeDtypeStruct(pool.shape, pool.dtype),
        name="flowkv_kv_write",
        grid=(num_tokens,),
        num_warps=1,
        aliases={4: 0},
        interpret=interpret,
    )
    return out.reshape(kv.shape)


def _write_token(
    k_ref: Any,
    v_ref: Any,
    layer_ref: Any,
    slots_ref: Any,
    pool_ref: Any,
    out_ref: Any,
    *,
    axes: str,
) -> None:
    del pool_ref  # the same memory as out_ref
    token = pl.program_id(0)
    slot = slots_ref[token]
    num_blocks, block_size = (out_ref.shape[axes.index(axis)] for axis in "PZ")
    is_inside = (slot >= 0) & (slot < num_blocks * block_size)
    for start, size in triton.pieces(k_ref.shape[1]):
        columns = start + jnp.arange(size, dtype=jnp.int32)
        mask = jnp.broadcast_to(is_inside, columns.shape)
        for half, new_ref in ((KEY, k_ref), (VALUE, v_ref)):
            place = pool_index(
                axes[:4],
                block=slot // block_size,
                layer=layer_ref[0],
                half=half,
                token=slot % block_size,
            )
            triton.store(
                out_ref.at[(*place, columns)], triton.load(new_ref.at[token, columns], mask), mask
            )
