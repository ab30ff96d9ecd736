"""Decode attention on CPU: reads the pool where it lies, through a Numba kernel.

XLA can only gather blocks into a new array and multiply that, which moves every cached byte three
times and starts a dozen small operations a chunk. This kernel reads each byte once. Work is cut
into (row, KV head) items and dealt to several custom calls, which XLA runs side by side.

Prefill has enough arithmetic to a byte for XLA's matrix products, and goes to `xla`.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numba
import numpy as np

from pallas_kernels import numba_ffi
from pallas_kernels.numba_ffi import ARGUMENT_POINTERS, FRAME_WORDS, RESULT_POINTERS
from pallas_kernels.paged_attention import xla

_ELEMENTS = {"float32": np.float32, "bfloat16": np.uint16, "float16": np.int16}
"""What a pool's elements are read as; see `numba_ffi.widen`."""
_PARTS = 16
"""Custom calls a step's work is cut into. XLA's executor hands operations to another thread only
from among more than eight that are ready at once; of sixteen it hands over half."""
_LEAST_PARTS = 9


def paged_attention(
    q_RTNH: jax.Array,
    kv_PL2ZKH: jax.Array,
    layer: jax.Array,
    block_tables_RM: jax.Array,
    kv_lens_R: jax.Array,
    q_starts_R: jax.Array,
    scale: float,
) -> jax.Array:
    """See `paged_attention.api`."""
    if q_RTNH.shape[1] != 1:
        return xla.paged_attention(
            q_RTNH, kv_PL2ZKH, layer, block_tables_RM, kv_lens_R, q_starts_R, scale
        )
    num_rows, _, num_heads, head_dim = q_RTNH.shape
    num_kv_heads = kv_PL2ZKH.shape[4]
    group = num_heads // num_kv_heads
    target = _target(q_RTNH.dtype.name, group, head_dim)
    q_RNH = q_RTNH[:, 0].astype(jnp.float32) * scale
    parts = []
    for first, end in _shares(num_rows * num_kv_heads):
        call = jax.ffi.ffi_call(
            target, jax.ShapeDtypeStruct((end - first, group, head_dim), jnp.float32)
        )
        first_item = np.array([first], np.int32)
        parts.append(
            call(q_RNH, kv_PL2ZKH, layer.reshape(1), block_tables_RM, kv_lens_R, first_item)
        )
    return jnp.concatenate(parts).reshape(q_RTNH.shape).astype(q_RTNH.dtype)


def _shares(num_items: int) -> list[tuple[int, int]]:
    """[first, end) of the items of each custom call."""
    parts = min(_PARTS, num_items) if num_items >= _LEAST_PARTS else 1
    edges = [part * num_items // parts for part in range(parts + 1)]
    return list(zip(edges, edges[1:], strict=False))


@cache
def _target(dtype: str, group: int, head_dim: int) -> str:
    """Name of the custom call for these sizes; compiled, or read from Numba's cache, once."""
    name = f"flowkv_decode_attention_{dtype}_{group}x{head_dim}"
    numba_ffi.register(name, _compile_handler(_ELEMENTS[dtype], group, head_dim))
    return name


def _compile_handler(element: Any, group: int, head_dim: int) -> Any:
    """The handler for pools of `element`. Sizes are constants in it, so inner loops unroll."""

    def handle(frame_address: int) -> int:
        frame = numba_ffi.words(frame_address, FRAME_WORDS)
        if not numba_ffi.answer_metadata(frame):
            address, size = _pool(frame)
            pool = numba.carray(numba_ffi.as_pointer(address), (size,), element)
            _attend(frame, pool, group, head_dim)
        return 0

    return numba.cfunc(numba_ffi.HANDLER_SIGNATURE, cache=True)(handle)


@numba.njit(forceinline=True)
def _pool(frame: Any) -> tuple[int, int]:
    """Address and number of elements of the pool."""
    arguments = frame[ARGUMENT_POINTERS]
    size = 1
    for extent in numba_ffi.dims(arguments, 1, 6):
        size *= extent
    return numba_ffi.data(arguments, 1), size


@numba.njit(forceinline=True)
def _attend(frame: Any, pool: Any, group: int, head_dim: int) -> None:
    """Every item of this call: items are (row, KV head), counted over rows first.

    Arguments: q float32[R, N, H] (scaled), pool, layer [1], tables [R, M], lens [R], first item
    [1]. Result: float32[items, G, H].
    """
    arguments, results = frame[ARGUMENT_POINTERS], frame[RESULT_POINTERS]
    _, num_layers, _, block_size, num_kv_heads, _ = numba_ffi.dims(arguments, 1, 6)
    num_rows, table_width = numba_ffi.dims(arguments, 3, 2)
    num_items = numba_ffi.dims(results, 0, 3)[0]
    width = group * head_dim
    q = numba.carray(
        numba_ffi.as_pointer(numba_ffi.data(arguments, 0)),
        (num_rows * num_kv_heads, width),
        np.float32,
    )
    layer = numba.carray(numba_ffi.as_pointer(numba_ffi.data(arguments, 2)), (1,), np.int32)[0]
    tables = numba.carray(
        numba_ffi.as_pointer(numba_ffi.data(arguments, 3)), (num_rows, table_width), np.int32
    )
    lens = numba.carray(numba_ffi.as_pointer(numba_ffi.data(arguments, 4)), (num_rows,), np.int32)
    first = numba.carray(numba_ffi.as_pointer(numba_ffi.data(arguments, 5)), (1,), np.int32)[0]
    out = numba.carray(
        numba_ffi.as_pointer(numba_ffi.data(results, 0)), (num_items, width), np.float32
    )
    stride = num_kv_heads * head_dim  # from a token to the next
    half_block = block_size * stride  # from a block's keys to its values
    weights_GZ = np.empty((group, block_size), np.float32)
    peaks_G = np.empty(group, np.float32)
    totals_G = np.empty(group, np.float32)
    for item in range(num_items):
        row, head = divmod(first + item, num_kv_heads)
        length = lens[row]
        q_Y, out_Y = q[first + item], out[item]
        peaks_G[:] = np.float32(-1e30)
        totals_G[:] = np.float32(0)
        out_Y[:] = np.float32(0)
        for block in range((length + block_size - 1) // block_size):
            # 64 bits throughout: a pool may hold more than 2**31 elements.
            base = (np.int64(tables[row, block]) * num_layers + layer) * 2 * half_block
            base += head * head_dim
            count = min(block_size, length - block * block_size)
            keys = pool[base : base + half_block]
            values = pool[base + half_block : base + 2 * half_block]
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
                total += q_H[h] * numba_ffi.widen(key_H[h])
            scores_GZ[g, z] = total


# Not reassociated: that would undo the two-part reduction in `_exp`.
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
            keep = _exp(peaks_G[g] - peak)
            totals_G[g] *= keep
            out_H = out_Y[g * head_dim : (g + 1) * head_dim]
            for h in range(head_dim):
                out_H[h] *= keep
            peaks_G[g] = peak
        for z in range(count):
            row_Z[z] = _exp(row_Z[z] - peak)
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
                    w0 * numba_ffi.widen(v0_H[h])
                    + w1 * numba_ffi.widen(v1_H[h])
                    + w2 * numba_ffi.widen(v2_H[h])
                    + w3 * numba_ffi.widen(v3_H[h])
                )
    for z in range(fours, count):
        value_H = values[z * stride : z * stride + head_dim]
        for g in range(group):
            out_H = out_Y[g * head_dim : (g + 1) * head_dim]
            for h in range(head_dim):
                out_H[h] += weights_GZ[g, z] * numba_ffi.widen(value_H[h])


@numba.njit(inline="always")
def _exp(x: float) -> float:
    """exp of x <= 0 in float32, to 2e-7 relative; vectorises, which a library call would not.

    2**n * e**r with n = round(x / ln 2), |r| <= ln(2)/2, and Taylor's polynomial of degree 7.
    """
    x = max(x, np.float32(-87.0))
    n = np.int32(x * np.float32(1.4426950408889634) - np.float32(0.5))
    r = x - np.float32(n) * np.float32(0.693359375) + np.float32(n) * np.float32(2.12194440e-4)
    p = np.float32(1 / 5040)
    p = p * r + np.float32(1 / 720)
    p = p * r + np.float32(1 / 120)
    p = p * r + np.float32(1 / 24)
    p = p * r + np.float32(1 / 6)
    p = p * r + np.float32(0.5)
    p = p * r + np.float32(1)
    p = p * r + np.float32(1)
    return p * numba_ffi.power_of_two(n)
