"""What the CPU kernels are called with, read out of XLA's call frame.

    0  q        float32[R, T, N, H], scaled
    1  pool     [P, L, 2, Z, K, H], or another order of the first three axes
    2  layer    int32[1]
    3  tables   int32[R, M]
    4  lens     int32[R]
    5  starts   int32[R]

The result lies item by item, each a row of float32.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np

from pallas_kernels.numba_ffi import (
    ARGUMENT_POINTERS,
    RESULT_POINTERS,
    as_pointer,
    data,
    dims,
)


@numba.njit(forceinline=True)
def arguments(frame: Any) -> Any:
    """q, layer, tables, lens, starts, Z and K."""
    pointers = frame[ARGUMENT_POINTERS]
    rows, queries, heads, head_dim = dims(pointers, 0, 4)
    _, _, _, block_size, num_kv_heads, _ = dims(pointers, 1, 6)
    q_shape = (rows, queries, heads, head_dim)
    q = numba.carray(as_pointer(data(pointers, 0)), q_shape, np.float32)
    layer = numba.carray(as_pointer(data(pointers, 2)), (1,), np.int32)[0]
    table_width = dims(pointers, 3, 2)[1]
    tables = numba.carray(as_pointer(data(pointers, 3)), (rows, table_width), np.int32)
    lens = numba.carray(as_pointer(data(pointers, 4)), (rows,), np.int32)
    starts = numba.carray(as_pointer(data(pointers, 5)), (rows,), np.int32)
    return q, layer, tables, lens, starts, block_size, num_kv_heads


@numba.njit(forceinline=True)
def pool_elements(frame: Any, element: Any) -> Any:
    """The pool as one row of elements."""
    pointers = frame[ARGUMENT_POINTERS]
    size = 1
    for extent in dims(pointers, 1, 6):
        size *= extent
    return numba.carray(as_pointer(data(pointers, 1)), (size,), element)


@numba.njit(forceinline=True)
def pool_strides(frame: Any, order: Any) -> tuple[int, int, int]:
    """Elements from a block, a layer, and K to V, to the next, all 64 bits wide.

    Args:
        order: positions of the axes P, L and 2 among the pool's first three.
    """
    extents = dims(frame[ARGUMENT_POINTERS], 1, 6)
    return strides_of(
        extents[0], extents[1], extents[2], extents[3] * extents[4] * extents[5], order
    )


@numba.njit
def strides_of(first: int, second: int, third: int, inner: int, order: Any) -> tuple[int, int, int]:
    """Strides of the axes at positions `order`, in an array [first, second, third, inner]."""
    by_position = (np.int64(second) * third * inner, np.int64(third) * inner, np.int64(inner))
    return by_position[order[0]], by_position[order[1]], by_position[order[2]]


@numba.njit
def block_start(strides: tuple[int, int, int], block: int, layer: int) -> int:
    """Where a block's keys of a layer begin. 64 bits: a pool may hold more than 2**31 elements."""
    return np.int64(block) * strides[0] + np.int64(layer) * strides[1]


@numba.njit(forceinline=True)
def float_result(frame: Any, width: int) -> Any:
    """The result as float32[items, width]."""
    pointers = frame[RESULT_POINTERS]
    items = dims(pointers, 0, 3)[0]
    return numba.carray(as_pointer(data(pointers, 0)), (items, width), np.float32)
