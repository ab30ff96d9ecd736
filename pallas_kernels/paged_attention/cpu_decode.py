"""Decode attention on CPU: each cached byte is read once, where it lies.

Work is cut into (row, KV head) items. An item walks over chunks of tokens with an online softmax;
its G query heads share every key and value loaded.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np

from pallas_kernels import numba_math
from pallas_kernels.numba_ffi import FRAME_WORDS, words
from pallas_kernels.numba_parallel import call_frame, finish, num_items, take
from pallas_kernels.numba_vectors import LANES
from pallas_kernels.paged_attention.cpu_arguments import (
    arguments,
    block_start,
    float_result,
    pool_elements,
    pool_strides,
)
from pallas_kernels.paged_attention.cpu_tokens import accumulate, score

CHUNK_TOKENS = 64
_ROW = CHUNK_TOKENS + LANES
"""Length of a row of scores: the last tokens' scores are written `LANES` at a time."""
_softmax_step = numba_math.softmax_step(CHUNK_TOKENS // LANES)


@numba.njit(forceinline=True)
def attend(job: int, element: Any, order: Any, sizes: Any) -> None:
    """Do items of a job; see `cpu_arguments` for what its call holds.

    Items are (row, KV head), counted over rows first. Result: float32[items, G, H].

    Args:
        element: type of the pool's elements; see `numba_math.widen`.
        order: see `cpu_arguments.pool_strides`.
        sizes: `cpu_tokens.sizes`.
    """
    item = take(job)
    if item >= num_items(job):
        return
    group, head_dim = len(sizes[0]), len(sizes[1]) * LANES
    frame = words(call_frame(job), FRAME_WORDS)
    q, layer, tables, lens, _, block_size, num_kv_heads = arguments(frame)
    pool = pool_elements(frame, element)
    strides = pool_strides(frame, order)
    out_all = float_result(frame, group * head_dim)
    q_all = q.reshape(-1, group * head_dim)
    stride = num_kv_heads * head_dim  # from a token to the next
    weights_GC = np.zeros((group, _ROW), np.float32)
    peaks_G = np.empty(group, np.float32)
    totals_G = np.empty(group, np.float32)
    weights = weights_GC.ctypes.data
    while item < num_items(job):
        row, head = divmod(item, num_kv_heads)
        q_Y, out_Y = q_all[item], out_all[item]
        q_address, out_address = q_Y.ctypes.data, out_Y.ctypes.data
        peaks_G[:] = np.float32(-1e30)
        totals_G[:] = np.float32(0)
        out_Y[:] = np.float32(0)
        head_start = head * head_dim
        for chunk in range(0, lens[row], CHUNK_TOKENS):
            tokens = min(CHUNK_TOKENS, lens[row] - chunk)
            place = 0
            while place < tokens:
                block, offset = divmod(chunk + place, block_size)
                keys = block_start(strides, tables[row, block], layer)
                keys += offset * stride + head_start
                count = min(LANES, block_size - offset, tokens - place)
                scores = weights + 4 * place
                # While keys are scored, their values are on the way.
                score(pool, keys, stride, count, q_address, scores, _ROW, strides[2], sizes)
                place += count
            for g in range(group):
                _weigh(weights_GC[g], tokens, peaks_G, totals_G, out_Y, g, head_dim)
            place = 0
            while place < tokens:
                block, offset = divmod(chunk + place, block_size)
                values = block_start(strides, tables[row, block], layer) + strides[2]
                values += offset * stride + head_start
                count = min(block_size - offset, tokens - place)
                # While values are summed, the next chunk's keys are.
                block, offset = divmod(min(chunk + CHUNK_TOKENS + place, lens[row] - 1), block_size)
                ahead = block_start(strides, tables[row, block], layer) - values
                ahead += offset * stride + head_start
                place_weights = weights + 4 * place
                accumulate(
                    pool, values, stride, count, place_weights, _ROW, out_address, ahead, sizes
                )
                place += count
        for g in range(group):
            total = max(totals_G[g], np.float32(1e-30))
            for h in range(head_dim):
                out_Y[g * head_dim + h] /= total
        finish(job)
        item = take(job)


@numba.njit(forceinline=True)
def _weigh(
    row_C: Any, tokens: int, peaks_G: Any, totals_G: Any, out_Y: Any, g: int, head_dim: int
) -> None:
    """Scores to weights relative to the running peak; rescales what was summed under an older."""
    peak, total = _softmax_step(row_C.ctypes.data, tokens, peaks_G[g])
    if peak > peaks_G[g]:
        keep = numba_math.exp(peaks_G[g] - peak)
        totals_G[g] *= keep
        for h in range(head_dim):
            out_Y[g * head_dim + h] *= keep
        peaks_G[g] = peak
    totals_G[g] += total
