"""Paged attention without Pallas: online softmax over chunks of blocks, in plain XLA.

The trip count is the longest row's, computed on the device, so no shape depends on context length.
Each trip gathers one chunk of blocks a row as whole [Z*K*H] rows of the flattened pool (one row is
the keys or the values of one block in one layer), which XLA on CPU does several times faster than a
gather with inner axes.

Decode (T = 1) expands the queries block-diagonally to [N, K*H], so that the gathered chunk is used
as it lies: K times the multiplications, none of the transposes, and a faster step. With many
queries the multiplications dominate, so prefill contracts each KV head by itself.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

from pallas_kernels.kv_layout import (
    KEY,
    LARGEST_INDEX,
    POOL_AXES,
    VALUE,
    flat_index,
    pool_index,
)

_MASKED = -1e30
_CHUNK_TOKENS = (128, 64)
"""Tokens in a chunk: the first for which the keys and values of a trip fit `_CHUNK_BYTES`, so that
what a trip gathers is still in cache when it is used."""
_CHUNK_BYTES = 2 << 20


def paged_attention(
    q_RTNH: jax.Array,
    kv_PL2ZKH: jax.Array,
    layer: jax.Array,
    block_tables_RM: jax.Array,
    kv_lens_R: jax.Array,
    q_starts_R: jax.Array,
    scale: float,
    *,
    axes: str = POOL_AXES,
) -> jax.Array:
    """See `paged_attention.api`. `axes` is the order of the pool's, for measuring other layouts."""
    chunk_blocks = _chunk_blocks(kv_PL2ZKH, *block_tables_RM.shape)
    tables_RM = _pad_to_multiple(block_tables_RM, chunk_blocks)
    gather = _ChunkGather(kv_PL2ZKH, layer, tables_RM, kv_lens_R, chunk_blocks, q_RTNH.dtype, axes)
    num_chunks = (jnp.max(kv_lens_R) + (gather.chunk_tokens - 1)) // gather.chunk_tokens
    attend = _attend_decode if q_RTNH.shape[1] == 1 else _attend_prefill
    scaled_RTNH = (q_RTNH.astype(jnp.float32) * scale).astype(q_RTNH.dtype)
    return attend(scaled_RTNH, gather, kv_lens_R, q_starts_R, num_chunks).astype(q_RTNH.dtype)


class _ChunkGather:
    """Reads chunk c of every row: keys and values as dtype[R, C, K*H], C tokens a chunk.

    Positions past a row's length are read from block 0, or from a block's stale end. Their values
    come out as zeros, because a weight of 0 does not silence a NaN.
    """

    def __init__(
        self,
        kv: jax.Array,
        layer: jax.Array,
        tables_RM: jax.Array,
        kv_lens_R: jax.Array,
        chunk_blocks: int,
        dtype: jnp.dtype,
        axes: str,
    ) -> None:
        self.num_kv_heads, self.head_dim = kv.shape[4:]
        self.chunk_tokens = chunk_blocks * kv.shape[3]
        self._chunk_blocks = chunk_blocks
        self._axes = axes
        self._extents = kv.shape[:3]
        num_rows = math.prod(self._extents)
        if num_rows > LARGEST_INDEX:
            raise ValueError(
                f"a pool of {num_rows} rows (blocks * layers * 2) is beyond the {LARGEST_INDEX} "
                "that 32-bit row numbers of implementation='xla' reach"
            )
        self._rows = kv.reshape(num_rows, -1)
        num_blocks = -(-kv_lens_R // kv.shape[3])
        is_used_RM = jnp.arange(tables_RM.shape[1], dtype=jnp.int32)[None] < num_blocks[:, None]
        self._tables_RM = jnp.where(is_used_RM, tables_RM, 0)
        self._kv_lens_R = kv_lens_R
        self._layer = layer
        self._dtype = dtype

    def __call__(self, chunk: jax.Array) -> tuple[jax.Array, jax.Array]:
        ids_RC = jax.lax.dynamic_slice_in_dim(
            self._tables_RM, chunk * self._chunk_blocks, self._chunk_blocks, axis=1
        )
        k, v = (self._half(half, ids_RC) for half in (KEY, VALUE))
        positions_C = chunk * self.chunk_tokens + jnp.arange(self.chunk_tokens, dtype=jnp.int32)
        is_cached_RC = positions_C[None] < self._kv_lens_R[:, None]
        return k, jnp.where(is_cached_RC[..., None], v, jnp.zeros((), v.dtype))

    def _half(self, half: int, ids_RC: jax.Array) -> jax.Array:
        place = pool_index(self._axes[:3], block=ids_RC, layer=self._layer, half=half)
        gathered = self._rows.at[flat_index(self._extents, place)].get(mode="promise_in_bounds")
        gathered = gathered.reshape(ids_RC.shape[0], self.chunk_tokens, -1)
        if gathered.dtype == self._dtype:
            return gathered
        return jax.lax.bitcast_convert_type(gathered, self._dtype)


def _attend_decode(
    q_R1NH: jax.Array,
    gather: _ChunkGather,
    kv_lens_R: jax.Array,
    q_starts_R: jax.Array,
    num_chunks: jax.Array,
) -> jax.Array:
    del q_starts_R  # the single query is the newest token, so kv_len alone is the mask
    num_rows, _, num_heads, head_dim = q_R1NH.shape
    num_kv_heads = gather.num_kv_heads
    own_head_NK = jnp.repeat(
        jnp.eye(num_kv_heads, dtype=q_R1NH.dtype), num_heads // num_kv_heads, axis=0
    )
    wide = num_kv_heads * head_dim
    q_RNX = (q_R1NH[:, 0, :, None, :] * own_head_NK[None, :, :, None]).reshape(
        num_rows, num_heads, wide
    )
    offsets_C = jnp.arange(gather.chunk_tokens, dtype=jnp.int32)

    def body(
        chunk: jax.Array, carry: tuple[jax.Array, jax.Array, jax.Array]
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        peak_RN, total_RN, out_RNX = carry
        k_RCX, v_RCX = gather(chunk)
        positions_C = chunk * gather.chunk_tokens + offsets_C
        visible_RC = positions_C[None, :] < kv_lens_R[:, None]
        scores_RNC = _product("RNX,RCX->RNC", q_RNX, k_RCX)
        scores_RNC = jnp.where(visible_RC[:, None, :], scores_RNC, _MASKED)
        new_peak_RN = jnp.maximum(peak_RN, jnp.max(scores_RNC, axis=-1))
        weights_RNC = jnp.exp(scores_RNC - new_peak_RN[:, :, None])
        keep_RN = jnp.exp(peak_RN - new_peak_RN)
        total_RN = total_RN * keep_RN + jnp.sum(weights_RNC, axis=-1)
        weights_RNC = weights_RNC.astype(v_RCX.dtype)
        out_RNX = out_RNX * keep_RN[:, :, None] + _product("RNC,RCX->RNX", weights_RNC, v_RCX)
        return new_peak_RN, total_RN, out_RNX

    _, total_RN, out_RNX = jax.lax.fori_loop(
        0,
        num_chunks,
        body,
        (
            jnp.full((num_rows, num_heads), _MASKED, jnp.float32),
            jnp.zeros((num_rows, num_heads), jnp.float32),
            jnp.zeros((num_rows, num_heads, wide), jnp.float32),
        ),
    )
    out_RNKH = out_RNX.reshape(num_rows, num_heads, num_kv_heads, head_dim)
    out_RNH = jnp.sum(out_RNKH * own_head_NK[None, :, :, None].astype(jnp.float32), axis=2)
    return (out_RNH / jnp.maximum(total_RN, 1e-30)[:, :, None])[:, None]


def _attend_prefill(
    q_RTNH: jax.Array,
    gather: _ChunkGather,
    kv_lens_R: jax.Array,
    q_starts_R: jax.Array,
    num_chunks: jax.Array,
) -> jax.Array:
    num_rows, num_queries, num_heads, head_dim = q_RTNH.shape
    num_kv_heads = gather.num_kv_heads
    group = num_heads // num_kv_heads
    # [R, K, G*T, H]: the queries of one KV head are one matrix.
    q_RKYH = (
        q_RTNH.reshape(num_rows, num_queries, num_kv_heads, group, head_dim)
        .transpose(0, 2, 3, 1, 4)
        .reshape(num_rows, num_kv_heads, group * num_queries, head_dim)
    )
    last_visible_RT = jnp.minimum(
        q_starts_R[:, None] + jnp.arange(num_queries, dtype=jnp.int32)[None, :],
        kv_lens_R[:, None] - 1,
    )
    last_visible_RY = jnp.tile(last_visible_RT, (1, group))
    offsets_C = jnp.arange(gather.chunk_tokens, dtype=jnp.int32)

    def body(
        chunk: jax.Array, carry: tuple[jax.Array, jax.Array, jax.Array]
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        peak_RKY, total_RKY, out_RKYH = carry
        k_RCKH, v_RCKH = (
            x.reshape(num_rows, gather.chunk_tokens, num_kv_heads, head_dim) for x in gather(chunk)
        )
        positions_C = chunk * gather.chunk_tokens + offsets_C
        visible_RYC = positions_C[None, None, :] <= last_visible_RY[:, :, None]
        scores_RKYC = _product("RKYH,RCKH->RKYC", q_RKYH, k_RCKH)
        scores_RKYC = jnp.where(visible_RYC[:, None], scores_RKYC, _MASKED)
        new_peak_RKY = jnp.maximum(peak_RKY, jnp.max(scores_RKYC, axis=-1))
        weights_RKYC = jnp.exp(scores_RKYC - new_peak_RKY[..., None])
        keep_RKY = jnp.exp(peak_RKY - new_peak_RKY)
        total_RKY = total_RKY * keep_RKY + jnp.sum(weights_RKYC, axis=-1)
        weights_RKYC = weights_RKYC.astype(v_RCKH.dtype)
        out_RKYH = out_RKYH * keep_RKY[..., None] + _product(
            "RKYC,RCKH->RKYH", weights_RKYC, v_RCKH
        )
        return new_peak_RKY, total_RKY, out_RKYH

    _, total_RKY, out_RKYH = jax.lax.fori_loop(
        0,
        num_chunks,
        body,
        (
            jnp.full((num_rows, num_kv_heads, group * num_queries), _MASKED, jnp.float32),
            jnp.zeros((num_rows, num_kv_heads, group * num_queries), jnp.float32),
            jnp.zeros((num_rows, num_kv_heads, group * num_queries, head_dim), jnp.float32),
        ),
    )
    out_RKYH = out_RKYH / jnp.maximum(total_RKY, 1e-30)[..., None]
    return (
        out_RKYH.reshape(num_rows, num_kv_heads, group, num_queries, head_dim)
        .transpose(0, 3, 1, 2, 4)
        .reshape(num_rows, num_queries, num_heads, head_dim)
    )


def _chunk_blocks(kv_PL2ZKH: jax.Array, num_rows: int, table_width: int) -> int:
    block_size, num_kv_heads, head_dim = kv_PL2ZKH.shape[3:]
    bytes_per_token = num_rows * 2 * num_kv_heads * head_dim * kv_PL2ZKH.dtype.itemsize
    tokens = next(
        (tokens for tokens in _CHUNK_TOKENS if tokens * bytes_per_token <= _CHUNK_BYTES),
        _CHUNK_TOKENS[-1],
    )
    return max(1, min(tokens // block_size, table_width))


def _product(equation: str, x: jax.Array, y: jax.Array) -> jax.Array:
    """An einsum that accumulates in float32."""
    return jnp.einsum(equation, x, y, preferred_element_type=jnp.float32)


def _pad_to_multiple(tables_RM: jax.Array, multiple: int) -> jax.Array:
    excess = -tables_RM.shape[1] % multiple
    return jnp.pad(tables_RM, ((0, 0), (0, excess))) if excess else tables_RM
