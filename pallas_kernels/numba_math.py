"""Arithmetic for Numba kernels: 16-bit floats, exp, and products of small matrices.

LLVM vectorises plain loops over float32 well, with three exceptions that are spelled here: it has
no 16-bit floats to load, its exp is a library call, and it does not keep a tile of sums in
registers across a loop.
"""

from __future__ import annotations

from typing import Any

import llvmlite.ir as ir
import numba
import numpy as np
from numba import types
from numba.extending import intrinsic

from pallas_kernels.numba_vectors import (
    EXP_LEAST,
    EXP_SERIES,
    LANES,
    LN2_HIGH,
    LN2_LOW,
    LOG2_E,
    Vectors,
)


@intrinsic
def widen(typing_context: Any, element: Any) -> Any:
    """A stored element as float32: float32 as it is, uint16 as bfloat16 bits, int16 as float16."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        value = arguments[0]
        if element == types.float32:
            return value
        if element == types.int16:
            return builder.fpext(builder.bitcast(value, ir.HalfType()), ir.FloatType())
        word = ir.IntType(32)
        return builder.bitcast(
            builder.shl(builder.zext(value, word), ir.Constant(word, 16)), ir.FloatType()
        )

    return types.float32(element), generate


@intrinsic
def power_of_two(typing_context: Any, exponent: Any) -> Any:
    """2 ** exponent as float32 from an int32 in [-126, 127]."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        word = ir.IntType(32)
        biased = builder.add(arguments[0], ir.Constant(word, 127))
        return builder.bitcast(builder.shl(biased, ir.Constant(word, 23)), ir.FloatType())

    return types.float32(types.int32), generate


@numba.njit(inline="always")
def exp(x: float) -> float:
    """exp of x <= 0 in float32, to 2e-7 relative; vectorises, which a library call would not.

    2**n * e**r with n = round(x / ln 2), |r| <= ln(2)/2, and Taylor's polynomial of degree 7.
    """
    x = max(x, np.float32(EXP_LEAST))
    n = np.int32(x * np.float32(LOG2_E) - np.float32(0.5))
    r = x - np.float32(n) * np.float32(LN2_HIGH) - np.float32(n) * np.float32(LN2_LOW)
    p = np.float32(EXP_SERIES[0])
    p = p * r + np.float32(EXP_SERIES[1])
    p = p * r + np.float32(EXP_SERIES[2])
    p = p * r + np.float32(EXP_SERIES[3])
    p = p * r + np.float32(EXP_SERIES[4])
    p = p * r + np.float32(EXP_SERIES[5])
    p = p * r + np.float32(EXP_SERIES[6])
    p = p * r + np.float32(EXP_SERIES[7])
    return p * power_of_two(n)


TILE_ROWS = 6
_TILE_VECTORS = 4 if LANES == 16 else 2
"""A tile of `matmul`'s sums, TILE_ROWS by up to so many vectors, stays in registers."""


def softmax_step(num_vectors: int) -> Any:
    """A function of (row, seen, peak) -> (new peak, sum), on num_vectors * LANES float32 scores.

    Replaces the scores at address `row` by exp(score - new peak); those from index `seen` on, which
    do not count, by zeros.
    """

    def step(typing_context: Any, row: Any, seen: Any, peak: Any) -> Any:
        result = types.UniTuple(types.float32, 2)

        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            new_peak, total = _emit_softmax_step(builder, arguments, num_vectors)
            return context.make_tuple(builder, signature.return_type, (new_peak, total))

        return result(types.int64, types.int64, types.float32), generate

    return intrinsic(step)


def _emit_softmax_step(builder: Any, arguments: Any, num_vectors: int) -> tuple[Any, Any]:
    row, seen, peak = arguments
    v = Vectors(builder)
    where = [
        v.pointer(row, ir.Constant(v.word, index * LANES), v.type) for index in range(num_vectors)
    ]
    lanes = ir.Constant(v.integers, list(range(LANES)))
    limit = v.spread(builder.trunc(seen, ir.IntType(32)))
    counts = [
        builder.icmp_signed("<", builder.add(lanes, v.integer(index * LANES)), limit)
        for index in range(num_vectors)
    ]
    lowest = v.constant(-1e30)
    scores = [
        builder.select(is_seen, v.load(pointer), lowest)
        for is_seen, pointer in zip(counts, where, strict=True)
    ]
    largest = v.spread(peak)
    for vector in scores:
        largest = v.call("maxnum", largest, vector)
    new_peak = v.call("vector.reduce.fmax", largest, result=v.single, flags=("nnan",))
    peaks = v.spread(new_peak)
    total = v.constant(0)
    for vector, is_seen, pointer in zip(scores, counts, where, strict=True):
        weight = v.exp(builder.fsub(vector, peaks))
        weight = builder.select(is_seen, weight, v.constant(0))
        v.store(weight, pointer)
        total = builder.fadd(total, weight)
    return new_peak, v.sum(total)


def _tile(num_vectors: int, *, accumulate: bool) -> Any:
    """A function of (a, lda, b, ldb, c, ldc, depth): c = a @ b or c += a @ b for one tile.

    a is [TILE_ROWS, depth], b is [depth, num_vectors * LANES], c is as wide as b; all float32, by
    address, with the elements from a row to the next as ld*.
    """

    def tile(
        typing_context: Any, a: Any, lda: Any, b: Any, ldb: Any, c: Any, ldc: Any, depth: Any
    ) -> Any:
        signature = types.void(*[types.int64] * 7)

        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            _emit_tile(builder, arguments, num_vectors, accumulate)
            return context.get_dummy_value()

        return signature, generate

    return intrinsic(tile)


def _emit_tile(builder: Any, arguments: Any, num_vectors: int, accumulate: bool) -> None:
    a, lda, b, ldb, c, ldc, depth = arguments
    v = Vectors(builder)
    rows, columns = range(TILE_ROWS), range(num_vectors)

    def sums_in_c(row: int, column: int) -> Any:
        element = builder.add(builder.mul(ldc, v.number(row)), v.number(column * LANES))
        return v.pointer(c, element, v.type)

    start = [
        v.load(sums_in_c(row, column)) if accumulate else v.constant(0)
        for row in rows
        for column in columns
    ]
    with v.loop(depth, start) as (k, sums):
        row_of_b = builder.mul(k, ldb)
        b_vectors = [
            v.load(v.pointer(b, builder.add(row_of_b, v.number(column * LANES)), v.type))
            for column in columns
        ]
        for row in rows:
            element = builder.add(builder.mul(lda, v.number(row)), k)
            spread = v.spread(v.load(v.pointer(a, element, v.single)))
            for column in columns:
                index = row * num_vectors + column
                sums.following[index] = v.fma(spread, b_vectors[column], sums.running[index])
    for index, total in enumerate(sums.after):
        v.store(total, sums_in_c(*divmod(index, num_vectors)))


_set_1, _add_1 = _tile(1, accumulate=False), _tile(1, accumulate=True)
_set_2, _add_2 = _tile(2, accumulate=False), _tile(2, accumulate=True)
_set_4, _add_4 = _tile(4, accumulate=False), _tile(4, accumulate=True)


@numba.njit(forceinline=True)
def matmul(a: Any, b: Any, c: Any, first_row: int, accumulate: bool) -> None:
    """c[first_row:] = a[first_row:] @ b, or += where `accumulate`.

    All are contiguous float32 matrices. Rows are a multiple of `TILE_ROWS`, and so is `first_row`;
    the columns of c are a multiple of `LANES`.
    """
    rows, depth = a.shape
    columns = c.shape[1]
    a_address, b_address, c_address = a.ctypes.data, b.ctypes.data, c.ctypes.data
    for row in range(first_row, rows, TILE_ROWS):
        a_tile = a_address + row * depth * 4
        column = 0
        while column < columns:
            b_tile = b_address + column * 4
            c_tile = c_address + (row * columns + column) * 4
            left = (columns - column) // LANES
            if left >= 4 and _TILE_VECTORS == 4:
                if accumulate:
                    _add_4(a_tile, depth, b_tile, columns, c_tile, columns, depth)
                else:
                    _set_4(a_tile, depth, b_tile, columns, c_tile, columns, depth)
                column += 4 * LANES
            elif left >= 2:
                if accumulate:
                    _add_2(a_tile, depth, b_tile, columns, c_tile, columns, depth)
                else:
                    _set_2(a_tile, depth, b_tile, columns, c_tile, columns, depth)
                column += 2 * LANES
            else:
                if accumulate:
                    _add_1(a_tile, depth, b_tile, columns, c_tile, columns, depth)
                else:
                    _set_1(a_tile, depth, b_tile, columns, c_tile, columns, depth)
                column += LANES
