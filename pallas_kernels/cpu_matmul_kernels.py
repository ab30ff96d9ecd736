"""The kernels behind `cpu_matmul`, for Numba. Their call is (x, w) -> y, all matrices."""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
from numba import types
from numba.extending import intrinsic

from pallas_kernels.numba_ffi import (
    ARGUMENT_POINTERS,
    FRAME_WORDS,
    RESULT_POINTERS,
    as_pointer,
    data,
    dims,
    words,
)
from pallas_kernels.numba_parallel import call_frame, finish, num_items, take
from pallas_kernels.numba_vectors import LANES, Vectors, elements_of

ELEMENTS = {"float32": np.float32, "bfloat16": np.uint16}
PANEL = 4 * LANES
"""Columns of a panel, which is an item."""
HEAD_GRAIN = 32 * LANES
"""Rows of the output head in an item."""
MOST_ROWS, MOST_HEAD_ROWS = 32, 8
"""Beyond, XLA's products are as fast or faster."""
_FOUR_VECTOR_ROWS, MOST_DIRECT_ROWS = 6, 8
"""Rows of x whose sums for four vectors of columns, or two, stay in registers. With more, a piece
of the panel is widened once, into the nearest cache, for `TILE_ROWS` rows after the other."""
TILE_ROWS = 4
_ONE, _TWO, _FOUR, _TILE = (0,) * 1, (0,) * 2, (0,) * 4, (0,) * TILE_ROWS
"""Sizes, as the lengths of tuples, which are known when what they are given to is compiled."""
_PIECE = 32
"""Rows of a piece: it, the next one and the tile's part of x fit the nearest cache."""
_AHEAD = 16
"""Rows of w that are asked for ahead of their use."""


@numba.njit(forceinline=True)
def multiply_panels(job: int, element: Any, num_rows: int, rows: Any) -> None:
    """Do items of y = x @ w: panels of columns.

    Args:
        num_rows: M.
        rows: a tuple as long as M, up to `MOST_DIRECT_ROWS`: its length is known when this is
            compiled.
    """
    item = take(job)
    if item >= num_items(job):
        return
    x, w, y, depth, columns = _matrices(job, element)
    piece = np.empty(_PIECE * PANEL, np.float32)
    while item < num_items(job):
        first = item * PANEL
        place = y + 4 * first
        width = min(PANEL, columns - first)
        _multiply(w, first, columns, width, depth, x, place, columns, num_rows, rows, piece)
        finish(job)
        item = take(job)


@numba.njit(forceinline=True)
def multiply_gated(job: int, element: Any, num_rows: int, rows: Any) -> None:
    """Do items of y = silu(x @ w[:, :F]) * (x @ w[:, F:]): panels of F. As `multiply_panels`."""
    item = take(job)
    if item >= num_items(job):
        return
    x, w, y, depth, columns = _matrices(job, element)
    piece = np.empty(_PIECE * PANEL, np.float32)
    # Always by way of the array: Numba frees one after its last use, whatever points into it.
    up = np.empty(num_rows * PANEL, np.float32)
    while item < num_items(job):
        first = item * PANEL
        place = y + 4 * first
        width = min(PANEL, columns - first)
        ldw = 2 * columns
        _multiply(w, first, ldw, width, depth, x, place, columns, num_rows, rows, piece)
        _multiply(
            w,
            columns + first,
            ldw,
            width,
            depth,
            x,
            up.ctypes.data,
            PANEL,
            num_rows,
            rows,
            piece,
        )
        for row in range(num_rows):
            _gate(place + 4 * row * columns, up.ctypes.data + 4 * row * PANEL, width // LANES)
        finish(job)
        item = take(job)


@numba.njit(forceinline=True)
def _multiply(
    w: Any,
    first: int,
    ldw: int,
    width: int,
    depth: int,
    x: int,
    y: int,
    ldy: int,
    num_rows: int,
    rows: Any,
    piece: Any,
) -> None:
    """y = x @ a panel of w, whose row k is w[first + k * ldw ...], `width` columns of it."""
    if width < PANEL:
        for column in range(0, width, LANES):
            for row in range(num_rows):
                source, place = x + 4 * row * depth, y + 4 * (row * ldy + column)
                _panel(w, first + column, ldw, depth, source, depth, place, ldy, False, _ONE, _ONE)
    elif num_rows <= _FOUR_VECTOR_ROWS:
        _panel(w, first, ldw, depth, x, depth, y, ldy, False, rows, _FOUR)
    elif num_rows <= MOST_DIRECT_ROWS:
        for column in range(0, PANEL, 2 * LANES):
            place = y + 4 * column
            _panel(w, first + column, ldw, depth, x, depth, place, ldy, False, rows, _TWO)
    else:
        share = _PIECE * TILE_ROWS // num_rows
        for start in range(0, depth, _PIECE):
            length = min(_PIECE, depth - start)
            _widen(w, start * ldw + first, ldw, length, piece.ctypes.data)
            for row in range(0, num_rows, TILE_ROWS):
                # While this piece is multiplied, the next one is on its way.
                ahead = start + _PIECE + row // TILE_ROWS * share
                _prefetch(w, ahead * ldw + first, ldw, min(share, depth - ahead))
                source, place = x + 4 * (row * depth + start), y + 4 * row * ldy
                more = start > 0
                _panel(piece, 0, PANEL, length, source, depth, place, ldy, more, _TILE, _FOUR)


@numba.njit(forceinline=True)
def multiply_head(job: int, element: Any, num_rows: int, rows: Any) -> None:
    """Do items of y = x @ w.T: rows of w.

    Args:
        num_rows: M.
        rows: a tuple as long as the rows of x to multiply with at a time; divides M.
    """
    item = take(job)
    if item >= num_items(job):
        return
    x, w, y, depth, columns = _matrices(job, element)
    while item < num_items(job):
        for column in range(item * HEAD_GRAIN, min((item + 1) * HEAD_GRAIN, columns), LANES):
            for row in range(0, num_rows, len(rows)):
                place = y + 4 * (row * columns + column)
                _dots(w, column * depth, depth, x + 4 * row * depth, place, columns, rows)
        finish(job)
        item = take(job)


@numba.njit(forceinline=True)
def _matrices(job: int, element: Any) -> Any:
    """Address of x, elements of w, address of y, depth, columns of y."""
    frame = words(call_frame(job), FRAME_WORDS)
    arguments, results = frame[ARGUMENT_POINTERS], frame[RESULT_POINTERS]
    depth = dims(arguments, 0, 2)[1]
    columns = dims(results, 0, 2)[1]
    w_rows, w_columns = dims(arguments, 1, 2)
    w = numba.carray(as_pointer(data(arguments, 1)), (w_rows * w_columns,), element)
    return data(arguments, 0), w, data(results, 0), depth, columns


@intrinsic
def _panel(
    typing_context: Any,
    w: Any,
    first: Any,
    ldw: Any,
    depth: Any,
    x: Any,
    ldx: Any,
    y: Any,
    ldy: Any,
    accumulate: Any,
    rows: Any,
    vectors: Any,
) -> Any:
    """y = x @ w, or += where `accumulate`, for len(rows) rows and len(vectors) vectors of columns.

    Row k of w is w[first + k * ldw ...], x and y are float32 by address, ld* elements a row.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        base, element = elements_of(context, builder, signature.args[0], arguments[0])
        _emit_panel(builder, base, element, arguments[1:9], len(rows), len(vectors))
        return context.get_dummy_value()

    return types.void(w, *[types.int64] * 7, types.boolean, rows, vectors), generate


def _emit_panel(
    builder: Any, base: Any, element: Any, arguments: Any, num_rows: int, num_vectors: int
) -> None:
    first, ldw, depth, x, ldx, y, ldy, accumulate = arguments
    v = Vectors(builder)
    rows, columns = range(num_rows), range(num_vectors)
    where = [
        v.pointer(y, builder.add(builder.mul(ldy, v.number(row)), v.number(column * LANES)), v.type)
        for row in rows
        for column in columns
    ]
    start = [builder.select(accumulate, v.load(place), v.constant(0)) for place in where]
    ahead = builder.mul(ldw, v.number(_AHEAD))
    with v.loop(depth, start) as (k, sums):
        place = builder.add(first, builder.mul(k, ldw))
        v.prefetch_elements(base, element, builder.add(place, ahead), num_vectors * LANES)
        weights = [
            v.load_wide(builder.gep(base, [builder.add(place, v.number(n * LANES))]), element)
            for n in columns
        ]
        for row in rows:
            of_x = builder.add(builder.mul(ldx, v.number(row)), k)
            spread = v.spread(v.load(v.pointer(x, of_x, v.single)))
            for n in columns:
                index = row * num_vectors + n
                sums.following[index] = v.fma(spread, weights[n], sums.running[index])
    for total, place in zip(sums.after, where, strict=True):
        v.store(total, place)


@intrinsic
def _gate(typing_context: Any, gate: Any, up: Any, vectors: Any) -> Any:
    """gate = silu(gate) * up, for so many vectors of float32 by address."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        gate, up, count = arguments
        v = Vectors(builder)
        with v.loop(count) as (i, _):
            offset = builder.mul(i, v.number(LANES))
            place = v.pointer(gate, offset, v.type)
            x = v.load(place)
            # sigmoid(x) of e = exp(-|x|): 1 / (1 + e), or e / (1 + e) below 0.
            e = v.exp(builder.fneg(v.call("fabs", x)))
            one = v.constant(1)
            upper = builder.select(builder.fcmp_ordered("<", x, v.constant(0)), e, one)
            sigmoid = builder.fdiv(upper, builder.fadd(one, e))
            factor = v.load(v.pointer(up, offset, v.type))
            v.store(builder.fmul(builder.fmul(x, sigmoid), factor), place)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 3), generate


@intrinsic
def _widen(typing_context: Any, w: Any, first: Any, ldw: Any, depth: Any, out: Any) -> Any:
    """A panel's rows, w[first + k * ldw ...], one after the other at `out`, as float32."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        base, element = elements_of(context, builder, signature.args[0], arguments[0])
        _, first, ldw, depth, out = arguments
        v = Vectors(builder)
        with v.loop(depth) as (k, _):
            place = builder.add(first, builder.mul(k, ldw))
            row = builder.mul(k, v.number(PANEL))
            for n in range(0, PANEL, LANES):
                wide = v.load_wide(builder.gep(base, [builder.add(place, v.number(n))]), element)
                v.store(wide, v.pointer(out, builder.add(row, v.number(n)), v.type))
        return context.get_dummy_value()

    return types.void(w, *[types.int64] * 4), generate


@intrinsic
def _prefetch(typing_context: Any, w: Any, first: Any, ldw: Any, count: Any) -> Any:
    """Ask for a panel's rows, w[first + k * ldw ...] for k < count."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        base, element = elements_of(context, builder, signature.args[0], arguments[0])
        _, first, ldw, count = arguments
        v = Vectors(builder)
        with v.loop(count) as (k, _):
            v.prefetch_elements(base, element, builder.add(first, builder.mul(k, ldw)), PANEL)
        return context.get_dummy_value()

    return types.void(w, *[types.int64] * 3), generate


@intrinsic
def _dots(
    typing_context: Any, w: Any, first: Any, depth: Any, x: Any, y: Any, ldy: Any, rows: Any
) -> Any:
    """y[m * ldy + i] = x[m] . w[first + i * depth ...] for m < len(rows) and i < LANES.

    depth is a multiple of LANES; x is float32[len(rows), depth], by address as y is.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        base, element = elements_of(context, builder, signature.args[0], arguments[0])
        _emit_dots(builder, base, element, arguments[1:6], len(rows))
        return context.get_dummy_value()

    return types.void(w, *[types.int64] * 5, rows), generate


def _emit_dots(builder: Any, base: Any, element: Any, arguments: Any, num_rows: int) -> None:
    first, depth, x, y, ldy = arguments
    v = Vectors(builder)
    lanes = v.stack(num_rows * LANES)
    steps = builder.sdiv(depth, v.number(LANES))
    with v.loop(v.number(LANES)) as (i, _):
        row = builder.add(first, builder.mul(i, depth))
        with v.loop(steps, [v.constant(0)] * num_rows) as (step, sums):
            offset = builder.mul(step, v.number(LANES))
            weights = v.load_wide(builder.gep(base, [builder.add(row, offset)]), element)
            for m in range(num_rows):
                of_x = builder.add(builder.mul(depth, v.number(m)), offset)
                part = v.load(v.pointer(x, of_x, v.type))
                sums.following[m] = v.fma(part, weights, sums.running[m])
        for m in range(num_rows):
            place = builder.gep(lanes, [builder.add(v.number(m * LANES), i)])
            builder.store(sums.after[m], place)
    for m in range(num_rows):
        parts = [builder.load(builder.gep(lanes, [v.number(m * LANES + i)])) for i in range(LANES)]
        v.store(v.sums(parts), v.pointer(y, builder.mul(ldy, v.number(m)), v.type))
