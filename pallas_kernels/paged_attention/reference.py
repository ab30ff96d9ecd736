"""The meaning of paged attention in plain jnp: gather everything, mask, softmax."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.kv_layout import KEY, VALUE


def paged_attention(
    q_RTNH: jax.Array,
    kv_PL2ZKH: jax.Array,
    layer: jax.Array,
    block_tables_RM: jax.Array,
    kv_lens_R: jax.Array,
    q_starts_R: jax.Array,
    scale: float,
) -> jax.Array:
    """See `paged_attention.api`. Memory grows with M: for tests and as the oracle."""
    num_rows, num_queries, num_heads, head_dim = q_RTNH.shape
    num_kv_heads = kv_PL2ZKH.shape[4]
    block_size = kv_PL2ZKH.shape[3]
    positions_MZ = jnp.arange(block_tables_RM.shape[1] * block_size).reshape(-1, block_size)
    is_cached_RMZ = positions_MZ[None] < kv_lens_R[:, None, None]
    kv_RM2ZKH = kv_PL2ZKH[jnp.where(is_cached_RMZ[..., 0], block_tables_RM, 0), layer]
    if kv_RM2ZKH.dtype != q_RTNH.dtype:
        kv_RM2ZKH = jax.lax.bitcast_convert_type(kv_RM2ZKH, q_RTNH.dtype)
    # A weight of 0 would not silence a NaN in a block's unused end.
    kv_RM2ZKH = jnp.where(is_cached_RMZ[:, :, None, :, None, None], kv_RM2ZKH, 0)
    kv_RM2ZKH = kv_RM2ZKH.astype(jnp.float32)
    k_RSKH = kv_RM2ZKH[:, :, KEY].reshape(num_rows, -1, num_kv_heads, head_dim)
    v_RSKH = kv_RM2ZKH[:, :, VALUE].reshape(num_rows, -1, num_kv_heads, head_dim)
    q_RTKGH = q_RTNH.astype(jnp.float32).reshape(num_rows, num_queries, num_kv_heads, -1, head_dim)

    positions_S = jnp.arange(k_RSKH.shape[1])
    query_positions_RT = q_starts_R[:, None] + jnp.arange(num_queries)[None, :]
    visible_RTS = (positions_S[None, None, :] <= query_positions_RT[:, :, None]) & (
        positions_S[None, None, :] < kv_lens_R[:, None, None]
    )
    scores_RTKGS = jnp.einsum("RTKGH,RSKH->RTKGS", q_RTKGH, k_RSKH) * scale
    visible_RTKGS = visible_RTS[:, :, None, None, :]
    scores_RTKGS = jnp.where(visible_RTKGS, scores_RTKGS, -jnp.inf)
    # A row that sees nothing has a maximum of -inf; 0 keeps its weights at exp(-inf) = 0.
    peak = jnp.max(scores_RTKGS, axis=-1, keepdims=True)
    weights_RTKGS = jnp.exp(scores_RTKGS - jnp.where(jnp.isfinite(peak), peak, 0.0))
    total = jnp.sum(weights_RTKGS, axis=-1, keepdims=True)
    weights_RTKGS = weights_RTKGS / jnp.where(total == 0.0, 1.0, total)
    out_RTKGH = jnp.einsum("RTKGS,RSKH->RTKGH", weights_RTKGS, v_RSKH)
    return out_RTKGH.reshape(num_rows, num_queries, num_heads, head_dim).astype(q_RTNH.dtype)
