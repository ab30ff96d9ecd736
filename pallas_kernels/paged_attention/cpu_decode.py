"""Decode attention on CPU: each cached byte is read once, where it lies.

Work is cut into (row, KV head) items; the sums of an item's G query heads stay in a small array.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np

from pallas_kernels import numba_math
from pallas_kernels.paged_attention.cpu_arguments import (
    arguments,
    block_start,
    float_result,
    pool_strides,
)


@numba.njit(forceinline=True)
def attend(frame: Any, pool: Any, order: Any, group: int, head_dim: int) -> None:
    """Every item of this call; see `cpu_arguments` for what the frame holds.

    Items are (row, KV head), counted over rows first. Result: float32[items, G, H].
    """
    q, layer, tables, lens, _, first, step, block_size, num_kv_heads = arguments(frame)
    strides = pool_strides(frame, order)
    out_all = float_result(frame, group * head_dim)
    q_all = q.reshape(-1, group * head_dim)
    stride = num_kv_heads * head_dim  # from a token to the next
    half_block = block_size * stride
    weights_GZ = np.empty((group, block_size), np.float32)
    peaks_G = np.empty(group, np.float32)
    totals_G = np.empty(group, np.float32)
    for index in range(out_all.shape[0]):
        item = first + index * step
        if item >= q_all.shape[0]:
            break
        row, head = divmod(item, num_kv_heads)
        length = lens[row]
        q_Y, out_Y = q_all[item], out_all[index]
        peaks_G[:] = np.float32(-1e30)
        totals_G[:] = np.float32(0)
        out_Y[:] = np.float32(0)
        for block in range((length + block_size - 1) // block_size):
            base = block_start(strides, tables[row, block], layer) + head * head_dim
            count = min(block_size, length - block * block_size)
            keys = pool[base : base + half_block]
            values = pool[base + strides[2] : base + strides[2] + half_block]
            _score(keys, stride, count, q_Y, weights_GZ, group, head_dim)
            _weigh(weights_GZ, count, peaks_G, totals_G, out_Y, group, head_dim)
            _accumulate(values, stride, count, weights_GZ, out_Y, group, head_dim)
        for g in range(group):
            total = max(totals_G[g], np.float32(1e-30))
            for h in range(head_dim):
                out_Y[g * head_dim + h] /= total


@numba.njit(forceinline=True, fastmath=True)
def _score(
    keys: Any, stride: int, count: int, q_Y: Any, scores_GZ: Any, group: int, head_dim: int
) -> None:
    """scores[g, z] = q[g] . key of token z."""
    for z in range(count):
        # Slices throughout: their indices cannot be negative, and Numba's wrap-around for negative
        # ones would keep LLVM from vectorising.
        key_H = keys[z * stride : z * stride + head_dim]
        for g in range(group):
            q_H = q_Y[g * head_dim : (g + 1) * head_dim]
            total = np.float32(0)
            for h in range(head_dim):
                total += q_H[h] * numba_math.widen(key_H[h])
            scores_GZ[g, z] = total


# Not reassociated: that would undo the two-part reduction in `exp`.
@numba.njit(forceinline=True, fastmath={"contract", "nnan", "nsz"})
def _weigh(
    scores_GZ: Any, count: int, peaks_G: Any, totals_G: Any, out_Y: Any, group: int, head_dim: int
) -> None:
    """Scores to weights relative to the running peak; rescales what was summed under an older."""
    for g in range(group):
        row_Z = scores_GZ[g, :count]
        peak = peaks_G[g]
        for z in range(count):
            peak = max(peak, row_Z[z])
        if peak > peaks_G[g]:
            keep = numba_math.exp(peaks_G[g] - peak)
            totals_G[g] *= keep
            out_H = out_Y[g * head_dim : (g + 1) * head_dim]
            for h in range(head_dim):
                out_H[h] *= keep
            peaks_G[g] = peak
        for z in range(count):
            row_Z[z] = numba_math.exp(row_Z[z] - peak)
        total = np.float32(0)
        for z in range(count):
            total += row_Z[z]
        totals_G[g] += total


@numba.njit(forceinline=True, fastmath=True)
def _accumulate(
    values: Any, stride: int, count: int, weights_GZ: Any, out_Y: Any, group: int, head_dim: int
) -> None:
    """out[g] += weights[g, z] * value of token z."""
    # Four tokens at a time: the sums are loaded and stored a quarter as often.
    fours = count - count % 4
    for z in range(0, fours, 4):
        v0_H = values[z * stride : z * stride + head_dim]
        v1_H = values[(z + 1) * stride : (z + 1) * stride + head_dim]
        v2_H = values[(z + 2) * stride : (z + 2) * stride + head_dim]
        v3_H = values[(z + 3) * stride : (z + 3) * stride + head_dim]
        for g in range(group):
            out_H = out_Y[g * head_dim : (g + 1) * head_dim]
            w0, w1 = weights_GZ[g, z], weights_GZ[g, z + 1]
            w2, w3 = weights_GZ[g, z + 2], weights_GZ[g, z + 3]
            for h in range(head_dim):
                out_H[h] += (
                    w0 * numba_math.widen(v0_H[h])
                    + w1 * numba_math.widen(v1_H[h])
                    + w2 * numba_math.widen(v2_H[h])
                    + w3 * numba_math.widen(v3_H[h])
                )
    for z in range(fours, count):
        value_H = values[z * stride : z * stride + head_dim]
        for g in range(group):
            out_H = out_Y[g * head_dim : (g + 1) * head_dim]
            for h in range(head_dim):
                out_H[h] += weights_GZ[g, z] * numba_math.widen(value_H[h])
