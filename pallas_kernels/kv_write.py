"""New K/V of a step into the pool, in place."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def kv_write(
    kv_PL2ZKH: jax.Array,
    layer: jax.Array | int,
    k_TKH: jax.Array,
    v_TKH: jax.Array,
    slots_T: jax.Array,
) -> jax.Array:
    """Put K and V of T tokens into layer `layer`.

    Inside a jitted step that donates the pool this updates it in place.

    Args:
        kv_PL2ZKH: the pool; give it up, use the returned one. May hold the bits of K's 16-bit type
            (`kv_layout.storage_dtype`).
        layer: a Python int or a traced int32 scalar.
        k_TKH, v_TKH: float[T, K, H].
        slots_T: int32[T], block * Z + offset of each token; a negative slot writes nowhere. No two
            non-negative slots are equal.

    Returns:
        The pool with the T positions replaced.
    """
    if slots_T.shape[0] == 1:
        # XLA turns a scatter of one row into a select over the whole pool; two stay a scatter.
        slots_T = jnp.pad(slots_T, (0, 1), constant_values=-1)
        k_TKH, v_TKH = (jnp.pad(x, ((0, 1), (0, 0), (0, 0))) for x in (k_TKH, v_TKH))
    num_blocks, num_layers, _, block_size, num_kv_heads, head_dim = kv_PL2ZKH.shape
    # One row a (block, layer, key/value, token). Negative slots go out of bounds, where the scatter
    # drops them; the row count fits int32 for any pool under 2^31 token rows.
    rows_XY = kv_PL2ZKH.reshape(num_blocks * num_layers * 2 * block_size, num_kv_heads * head_dim)
    block_T, offset_T = slots_T // block_size, slots_T % block_size
    key_T = ((block_T * num_layers + layer) * 2) * block_size + offset_T
    nowhere_T = rows_XY.shape[0] + jnp.arange(slots_T.shape[0], dtype=jnp.int32)
    if kv_PL2ZKH.dtype != k_TKH.dtype:
        k_TKH, v_TKH = (jax.lax.bitcast_convert_type(x, kv_PL2ZKH.dtype) for x in (k_TKH, v_TKH))
    for new_TKH, row_T in ((k_TKH, key_T), (v_TKH, key_T + block_size)):
        rows_XY = rows_XY.at[jnp.where(slots_T < 0, nowhere_T, row_T)].set(
            new_TKH.reshape(-1, num_kv_heads * head_dim),
            mode="drop",
            unique_indices=True,
        )
    return rows_XY.reshape(kv_PL2ZKH.shape)
