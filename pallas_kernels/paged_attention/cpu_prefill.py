"""Prefill attention on CPU: matrix products over chunks of tokens that fit the nearest cache.

Work is cut into (row, KV head, tile of queries) items. The queries of a tile, all G heads of them,
are the rows of one matrix, ordered by position, so what a chunk's first token is hidden from is a
number of rows at the top, which are left out. Nothing is read past the last position a tile sees.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np

from pallas_kernels import numba_math
from pallas_kernels.numba_ffi import FRAME_WORDS, words
from pallas_kernels.numba_math import TILE_ROWS
from pallas_kernels.numba_parallel import call_frame, finish, num_items, take
from pallas_kernels.numba_vectors import LANES
from pallas_kernels.paged_attention.cpu_arguments import (
    arguments,
    block_start,
    float_result,
    pool_elements,
    pool_strides,
)

CHUNK_TOKENS = 64


@numba.njit(forceinline=True)
def attend(job: int, element: Any, order: Any, sizes: Any, query_tile: int) -> None:
    """Do items of a job; see `cpu_arguments` for what its call holds.

    Items are (row, KV head, tile), counted over rows first. Result: float32[items,
    query_tile * G, H]; rows of padding are zero. Other arguments are those of
    `cpu_decode.attend`.
    """
    item = take(job)
    if item >= num_items(job):
        return
    group, head_dim = len(sizes[0]), len(sizes[1]) * LANES
    frame = words(call_frame(job), FRAME_WORDS)
    q, layer, tables, lens, starts, block_size, num_kv_heads = arguments(frame)
    pool = pool_elements(frame, element)
    strides = pool_strides(frame, order)
    num_queries = q.shape[1]
    num_tiles = (num_queries + query_tile - 1) // query_tile
    out_all = float_result(frame, query_tile * group * head_dim)
    most_rows = _padded(query_tile * group)
    q_YH = np.zeros((most_rows, head_dim), np.float32)
    sums_YH = np.empty((most_rows, head_dim), np.float32)
    weights_YC = np.empty((most_rows, CHUNK_TOKENS), np.float32)
    k_HC = np.empty((head_dim, CHUNK_TOKENS), np.float32)
    v_CH = np.empty((CHUNK_TOKENS, head_dim), np.float32)
    peaks_Y = np.empty(most_rows, np.float32)
    totals_Y = np.empty(most_rows, np.float32)
    while item < num_items(job):
        row, rest = divmod(item, num_kv_heads * num_tiles)
        head, tile = divmod(rest, num_tiles)
        first_query = tile * query_tile
        start = starts[row] + first_query
        count = min(query_tile, num_queries - first_query, lens[row] - start)
        out_all[item] = np.float32(0)
        count = max(count, 0)
        rows = _padded(count * group)
        _take_queries(q[row, first_query : first_query + count], head * group, group, q_YH[:rows])
        sums_YH[:rows] = np.float32(0)
        peaks_Y[:rows] = np.float32(-1e30)
        totals_Y[:rows] = np.float32(0)
        for chunk in range(0, start + count if count else 0, CHUNK_TOKENS):
            tokens = min(CHUNK_TOKENS, start + count - chunk)
            for z in range(tokens):
                block, offset = divmod(chunk + z, block_size)
                base = block_start(strides, tables[row, block], layer)
                base += (offset * num_kv_heads + head) * head_dim
                keys = pool[base : base + head_dim]
                values = pool[base + strides[2] : base + strides[2] + head_dim]
                _load_token(keys, values, k_HC, v_CH, z, head_dim)
            # Stale values would be harmless, but for a NaN.
            k_HC[:, tokens:] = np.float32(0)
            v_CH[tokens:] = np.float32(0)
            running = (sums_YH[:rows], peaks_Y, totals_Y)
            lead = start - chunk
            _add_chunk(q_YH[:rows], k_HC, v_CH, weights_YC[:rows], running, lead, tokens, group)
        out_YH = out_all[item].reshape(query_tile * group, head_dim)
        for y in range(count * group):
            total = max(totals_Y[y], np.float32(1e-30))
            for h in range(head_dim):
                out_YH[y, h] = sums_YH[y, h] / total
        finish(job)
        item = take(job)


@numba.njit(forceinline=True)
def _take_queries(q_TNH: Any, first_head: int, group: int, q_YH: Any) -> None:
    """The queries of a group's heads as rows, in order of position; zeros after them."""
    count = q_TNH.shape[0]
    for t in range(count):
        for g in range(group):
            q_YH[t * group + g] = q_TNH[t, first_head + g]
    q_YH[count * group :] = np.float32(0)


@numba.njit(forceinline=True)
def _add_chunk(
    q_YH: Any,
    k_HC: Any,
    v_CH: Any,
    weights_YC: Any,
    running: Any,
    lead: int,
    tokens: int,
    group: int,
) -> None:
    """Take a chunk into the running sums of a tile.

    Args:
        running: weighted values [Y, H], peaks [Y], sums of weights [Y].
        lead: position of the tile's first query, from the chunk's first token.
        tokens: how many of the chunk's positions hold one.
    """
    sums_YH, peaks_Y, totals_Y = running
    rows = q_YH.shape[0]
    first_row = max(0, -lead) * group // TILE_ROWS * TILE_ROWS
    numba_math.matmul(q_YH, k_HC, weights_YC, first_row, False)
    for y in range(first_row, rows):
        seen = min(tokens, lead + y // group + 1)
        _weigh(weights_YC[y], max(0, seen), peaks_Y, totals_Y, sums_YH[y], y)
    numba_math.matmul(weights_YC, v_CH, sums_YH, first_row, True)


@numba.njit
def _padded(rows: int) -> int:
    return (rows + TILE_ROWS - 1) // TILE_ROWS * TILE_ROWS


@numba.njit(forceinline=True)
def _load_token(key_H: Any, value_H: Any, k_HC: Any, v_CH: Any, z: int, head_dim: int) -> None:
    for h in range(head_dim):
        k_HC[h, z] = numba_math.widen(key_H[h])
    for h in range(head_dim):
        v_CH[z, h] = numba_math.widen(value_H[h])


@numba.njit(forceinline=True)
def _weigh(row_C: Any, seen: int, peaks_Y: Any, totals_Y: Any, sums_H: Any, y: int) -> None:
    """One row's scores to weights relative to its running peak; zeros for what it may not see."""
    peak, total = _softmax_step(row_C.ctypes.data, seen, peaks_Y[y])
    if peak > peaks_Y[y]:
        keep = numba_math.exp(peaks_Y[y] - peak)
        totals_Y[y] *= keep
        for h in range(sums_H.shape[0]):
            sums_H[h] *= keep
        peaks_Y[y] = peak
    totals_Y[y] += total


_softmax_step = numba_math.softmax_step(CHUNK_TOKENS // LANES)
