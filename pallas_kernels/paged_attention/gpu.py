"""Paged attention in Pallas, for GPUs: reads the pool where it lies.

Decode gives a program to each (row, KV head, share of the context). Its G query heads are the rows
of one matrix, padded to what tensor cores take, so keys and values are read once for the group.
With few rows the context is cut into shares so that the whole chip has work (flash-decoding);
`partial_softmax.merge` puts the shares together.

Prefill gives a program to each (row, query head, tile of queries); it stops at the last position
its tile may see.

Both walk over tiles of tokens with an online softmax in base 2. A tile's tokens are looked up one
by one in the block table (position -> block, offset), so any block size works, and each token's
head is read as contiguous pieces. What a row does not see is never read, whatever is in it: neither
table entries past its length nor stale positions of its last block.

References are indexed with coordinates only; see `pallas_kernels.triton` for why no index
overflows.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels import triton
from pallas_kernels.kv_layout import KEY, POOL_AXES, VALUE, pool_index
from pallas_kernels.paged_attention.partial_softmax import MASKED, choose_splits, merge

_Index = Callable[[jax.Array, jax.Array], tuple[Any, ...]]
"""(row, column) of a tile to coordinates of an array, for whole tiles at a time."""

_TILE_TOKENS = 64
_QUERY_TILE_ELEMENTS = 64 * 128
"""Query rows times head dim of a prefill program; so bounded its sums stay in registers."""
MAX_HEAD_DIM = 256
MAX_GROUP = 64
_LOG2_E = math.log2(math.e)


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
    num_splits: int | None = None,
    interpret: bool | None = None,
) -> jax.Array:
    """See `paged_attention.api`.

    Args:
        axes: order of the pool's axes, for measuring other layouts.
        num_splits: shares of a row's context in decode; None chooses by the size of the batch.
        interpret: see `triton.kernel_call`.
    """
    num_heads, head_dim = q_RTNH.shape[2:]
    group = num_heads // kv_PL2ZKH.shape[axes.index("K")]
    why_not = unsupported(q_RTNH.dtype.name, head_dim, group)
    if why_not:
        raise ValueError(f"implementation='gpu' cannot serve this: {why_not}")
    arguments = (q_RTNH, kv_PL2ZKH, layer.reshape(1), block_tables_RM, kv_lens_R)
    options: dict[str, Any] = {"axes": axes, "scale_log2": scale * _LOG2_E}
    if q_RTNH.shape[1] == 1:
        return _decode(arguments, options, num_splits, interpret)
    return _prefill((*arguments, q_starts_R), options, interpret)


def unsupported(dtype: str, head_dim: int, group: int) -> str:
    """Why these sizes cannot be served, with value and bound; empty if they can."""
    if dtype not in ("float32", "bfloat16", "float16"):
        return f"dtype {dtype} is none of float32, bfloat16, float16"
    if head_dim % triton.LEAST_DOT or not 0 < head_dim <= MAX_HEAD_DIM:
        return f"{head_dim=} is no multiple of {triton.LEAST_DOT} up to {MAX_HEAD_DIM}"
    if group > MAX_GROUP:
        return f"{group} query heads a KV head are more than {MAX_GROUP}"
    return ""


def _decode(
    arguments: tuple[jax.Array, ...],
    options: dict[str, Any],
    num_splits: int | None,
    interpret: bool | None,
) -> jax.Array:
    q_R1NH, kv, _, block_tables_RM, _ = arguments
    num_rows, _, num_heads, head_dim = q_R1NH.shape
    num_kv_heads, block_size = (kv.shape[options["axes"].index(axis)] for axis in "KZ")
    if num_splits is None:
        most_tokens = block_tables_RM.shape[1] * block_size
        num_splits = choose_splits(num_rows * num_kv_heads, most_tokens)
    dtype = q_R1NH.dtype if num_splits == 1 else jnp.float32
    out = jax.ShapeDtypeStruct((num_rows, num_splits, num_heads, head_dim), dtype)
    sums = jax.ShapeDtypeStruct((num_rows, num_splits, num_heads), jnp.float32)
    out_RSNH, peak_RSN, total_RSN = triton.kernel_call(
        partial(_decode_kernel, num_splits=num_splits, **options),
        arguments,
        (out, sums, sums),
        name="flowkv_decode_attention",
        grid=(num_rows, num_kv_heads, num_splits),
        interpret=interpret,
    )
    if num_splits == 1:
        return out_RSNH
    return merge(out_RSNH, peak_RSN, total_RSN)[:, None].astype(q_R1NH.dtype)


def _prefill(
    arguments: tuple[jax.Array, ...], options: dict[str, Any], interpret: bool | None
) -> jax.Array:
    q_RTNH = arguments[0]
    num_rows, num_queries, num_heads, head_dim = q_RTNH.shape
    query_tile = _query_tile(num_queries, head_dim, q_RTNH.dtype)
    out: jax.Array = triton.kernel_call(
        partial(_prefill_kernel, query_tile=query_tile, **options),
        arguments,
        jax.ShapeDtypeStruct(q_RTNH.shape, q_RTNH.dtype),
        name="flowkv_prefill_attention",
        # Tiles of a prompt's end see most and start first.
        grid=(pl.cdiv(num_queries, query_tile), num_heads, num_rows),
        interpret=interpret,
    )
    return out


def _query_tile(num_queries: int, head_dim: int, dtype: jnp.dtype) -> int:
    most = min(64, _QUERY_TILE_ELEMENTS // triton.power_of_two(head_dim))
    if dtype == jnp.float32:
        most = triton.LEAST_DOT  # multiplied without tensor cores, which takes more registers
    return max(triton.LEAST_DOT, min(most, triton.power_of_two(num_queries)))


def _decode_kernel(
    q_ref: Any,
    kv_ref: Any,
    layer_ref: Any,
    tables_ref: Any,
    lens_ref: Any,
    out_ref: Any,
    peak_ref: Any,
    total_ref: Any,
    *,
    axes: str,
    scale_log2: float,
    num_splits: int,
) -> None:
    row, kv_head, split = (pl.program_id(axis) for axis in range(3))
    num_heads, head_dim = q_ref.shape[2:]
    group = num_heads // kv_ref.shape[axes.index("K")]
    length = lens_ref[row]
    tiles = pl.cdiv(length, _TILE_TOKENS)
    tiles_per_split = pl.cdiv(tiles, num_splits)
    first = split * tiles_per_split
    g = jnp.arange(max(triton.LEAST_DOT, triton.power_of_two(group)), dtype=jnp.int32)
    is_head = g < group
    heads = kv_head * group + g
    parts = triton.pieces(head_dim)
    peak, total, sums = _attend(
        [_load(q_ref, lambda y, h: (row, 0, y, h), heads, is_head, part) for part in parts],
        _Tokens(kv_ref, tables_ref, axes, row, layer_ref[0], kv_head),
        first,
        jnp.minimum(first + tiles_per_split, tiles),
        length,
        jnp.full_like(g, length - 1),
        scale_log2,
    )
    if num_splits == 1:
        sums = _normalise(sums, total)
    for part, value in zip(parts, sums, strict=True):
        _store(out_ref, lambda y, h: (row, split, y, h), heads, is_head, part, value)
    triton.store(peak_ref.at[row, split, heads], peak, is_head)
    triton.store(total_ref.at[row, split, heads], total, is_head)


def _prefill_kernel(
    q_ref: Any,
    kv_ref: Any,
    layer_ref: Any,
    tables_ref: Any,
    lens_ref: Any,
    starts_ref: Any,
    out_ref: Any,
    *,
    axes: str,
    scale_log2: float,
    query_tile: int,
) -> None:
    tile = pl.num_programs(0) - 1 - pl.program_id(0)
    head, row = pl.program_id(1), pl.program_id(2)
    num_queries, num_heads, head_dim = q_ref.shape[1:]
    kv_head = head // (num_heads // kv_ref.shape[axes.index("K")])
    length, start = lens_ref[row], starts_ref[row]
    first_query = tile * query_tile
    queries = first_query + jnp.arange(query_tile, dtype=jnp.int32)
    is_query = queries < num_queries
    # One past what the tile's last query sees; none if the whole tile is padding.
    end = jnp.minimum(length, start + first_query + query_tile)
    end = jnp.where(start + first_query < length, end, 0)
    parts = triton.pieces(head_dim)
    _, total, sums = _attend(
        [_load(q_ref, lambda y, h: (row, y, head, h), queries, is_query, part) for part in parts],
        _Tokens(kv_ref, tables_ref, axes, row, layer_ref[0], kv_head),
        0,
        pl.cdiv(end, _TILE_TOKENS),
        end,
        start + queries,
        scale_log2,
    )
    for part, value in zip(parts, _normalise(sums, total), strict=True):
        _store(out_ref, lambda y, h: (row, y, head, h), queries, is_query, part, value)


class _Tokens:
    """Keys and values of one row and KV head, by position."""

    def __init__(
        self, kv_ref: Any, tables_ref: Any, axes: str, row: Any, layer: Any, kv_head: Any
    ) -> None:
        self._kv_ref = kv_ref
        self._tables_ref = tables_ref
        self._axes = axes
        self._row = row
        self._layer = layer
        self._kv_head = kv_head
        self.block_size = kv_ref.shape[axes.index("Z")]

    def locate(self, positions: jax.Array, is_read: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Block and offset of each position that is read; block 0 for the others."""
        block, offset = positions // self.block_size, positions % self.block_size
        return triton.load(self._tables_ref.at[self._row, block], is_read), offset

    def load(
        self,
        half: int,
        place: tuple[jax.Array, jax.Array],
        is_read: jax.Array,
        part: tuple[int, int],
        dtype: jnp.dtype,
    ) -> jax.Array:
        """[positions, size of the part of the head dim], zeros where nothing is read."""
        blocks, offsets = place

        def index(token: jax.Array, head_dim: jax.Array) -> tuple[Any, ...]:
            return pool_index(
                self._axes,
                block=jnp.broadcast_to(blocks[:, None], token.shape),
                layer=self._layer,
                half=half,
                token=token,
                kv_head=self._kv_head,
                head_dim=head_dim,
            )

        value = _load(self._kv_ref, index, offsets, is_read, part)
        return value if value.dtype == dtype else jax.lax.bitcast_convert_type(value, dtype)


def _attend(
    q_parts: list[jax.Array],
    tokens: _Tokens,
    first_tile: Any,
    end_tile: Any,
    length: Any,
    last_visible: jax.Array,
    scale_log2: float,
) -> tuple[jax.Array, jax.Array, list[jax.Array]]:
    """Online softmax of queries [Y, H] (in pieces of H) over tiles of tokens.

    Query y sees positions up to last_visible[y]; nothing from `length` on is read.

    Returns:
        Peak of the scores in base 2 [Y], sum of the weights [Y], weighted values [Y, H] in pieces.
    """
    num_queries = q_parts[0].shape[0]
    dtype = q_parts[0].dtype
    parts = triton.pieces(sum(part.shape[1] for part in q_parts))
    offsets = jnp.arange(_TILE_TOKENS, dtype=jnp.int32)

    def body(tile: Any, carry: Any) -> Any:
        peak, total, sums = carry
        positions = tile * _TILE_TOKENS + offsets
        is_read = positions < length
        place = tokens.locate(positions, is_read)
        scores = jnp.zeros((num_queries, _TILE_TOKENS), jnp.float32)
        for part, q in zip(parts, q_parts, strict=True):
            k = tokens.load(KEY, place, is_read, part, dtype)
            scores += triton.dot(q, k, transposed=True)
        is_seen = is_read[None, :] & (positions[None, :] <= last_visible[:, None])
        scores = jnp.where(is_seen, scores * scale_log2, MASKED)
        new_peak = jnp.maximum(peak, jnp.max(scores, axis=1))
        keep = jnp.exp2(peak - new_peak)
        # A query that has seen nothing yet has a masked peak, against which masked scores count.
        weights = jnp.where(is_seen, jnp.exp2(scores - new_peak[:, None]), 0.0)
        total = total * keep + jnp.sum(weights, axis=1)
        weights = weights.astype(dtype)
        sums = [
            value * keep[:, None]
            + triton.dot(weights, tokens.load(VALUE, place, is_read, part, dtype))
            for part, value in zip(parts, sums, strict=True)
        ]
        return new_peak, total, sums

    return jax.lax.fori_loop(
        first_tile,
        end_tile,
        body,
        (
            jnp.full((num_queries,), MASKED, jnp.float32),
            jnp.zeros((num_queries,), jnp.float32),
            [jnp.zeros((num_queries, size), jnp.float32) for _, size in parts],
        ),
    )


def _normalise(sums: list[jax.Array], total: jax.Array) -> list[jax.Array]:
    """Weighted sums to averages; zero for queries that saw nothing."""
    divisor = jnp.where(total > 0, total, 1.0)
    return [value / divisor[:, None] for value in sums]


def _load(
    reference: Any, index: _Index, rows: jax.Array, mask: jax.Array, part: tuple[int, int]
) -> jax.Array:
    """[rows, a piece of the head dim] of a reference; zeros where the mask of rows is false."""
    row, column, mask = _grid(rows, mask, part)
    return triton.load(reference.at[index(row, column)], mask)


def _store(
    reference: Any,
    index: _Index,
    rows: jax.Array,
    mask: jax.Array,
    part: tuple[int, int],
    value: jax.Array,
) -> None:
    row, column, mask = _grid(rows, mask, part)
    triton.store(reference.at[index(row, column)], value.astype(reference.dtype), mask)


def _grid(
    rows: jax.Array, mask: jax.Array, part: tuple[int, int]
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Row index, column index and mask of each element of [rows, a piece of the head dim]."""
    start, size = part
    shape = (rows.shape[0], size)
    column = start + jnp.arange(size, dtype=jnp.int32)
    return (
        jnp.broadcast_to(rows[:, None], shape),
        jnp.broadcast_to(column[None, :], shape),
        jnp.broadcast_to(mask[:, None], shape),
    )
