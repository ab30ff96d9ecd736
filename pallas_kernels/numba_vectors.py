"""Vectors of float32 in LLVM's own words, for what Numba's loops do not become by themselves."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import llvmlite.binding as llvm
import llvmlite.ir as ir
import numpy as np
from numba import types

LANES = 16 if llvm.get_host_cpu_features().get("avx512f", False) else 8
"""float32 values in a vector register of this processor."""

_LINE_BYTES = 64
"""Of a cache line."""
EXP_LEAST = -87.0
LOG2_E = 1.4426950408889634
LN2_HIGH, LN2_LOW = 0.693359375, -2.12194440e-4
EXP_SERIES = (1 / 5040, 1 / 720, 1 / 120, 1 / 24, 1 / 6, 0.5, 1.0, 1.0)


@dataclass
class Carried:
    """Vectors that a loop carries from turn to turn.

    Attributes:
        running: what a turn starts with.
        following: what it hands on; its body replaces what changes.
        after: what the last turn handed on, or what the first would have started with.
    """

    running: list[Any]
    following: list[Any]
    after: list[Any]


def elements_of(context: Any, builder: Any, array_type: Any, array: Any) -> tuple[Any, Any]:
    """Pointer to the elements of a Numba array, and their type as `Vectors.load_wide` takes it:
    uint16 holds the bits of bfloat16, int16 those of float16."""
    data = context.make_array(array_type)(context, builder, array).data
    element = {
        types.float32: ir.FloatType(),
        types.uint16: ir.IntType(16),
        types.int16: ir.HalfType(),
    }[array_type.dtype]
    return builder.bitcast(data, element.as_pointer()), element


class Vectors:
    """Emits operations on vectors of `LANES` float32."""

    def __init__(self, builder: Any) -> None:
        self.builder = builder
        self.word, self.single = ir.IntType(64), ir.FloatType()
        self.type = ir.VectorType(self.single, LANES)
        self.integers = ir.VectorType(ir.IntType(32), LANES)

    def constant(self, value: float) -> Any:
        return ir.Constant(self.type, [np.float32(value).item()] * LANES)

    def integer(self, value: int) -> Any:
        return ir.Constant(self.integers, [value] * LANES)

    def number(self, value: int) -> Any:
        """A word."""
        return ir.Constant(self.word, value)

    def pointer(self, base: Any, element: Any, pointee: Any) -> Any:
        """To element number `element` of the float32 values at address `base`."""
        offset = self.builder.shl(element, ir.Constant(self.word, 2))
        return self.builder.inttoptr(self.builder.add(base, offset), pointee.as_pointer())

    def load(self, pointer: Any) -> Any:
        value = self.builder.load(pointer)
        value.align = 4
        return value

    def store(self, value: Any, pointer: Any) -> None:
        self.builder.store(value, pointer).align = 4

    def spread(self, scalar: Any) -> Any:
        """A scalar in all lanes."""
        nothing = ir.Constant(ir.VectorType(scalar.type, LANES), ir.Undefined)
        lone = self.builder.insert_element(nothing, scalar, ir.Constant(ir.IntType(32), 0))
        return self.builder.shuffle_vector(lone, nothing, self.integer(0))

    def call(self, name: str, *arguments: Any, result: Any = None, flags: Any = ()) -> Any:
        """An intrinsic of LLVM, by its stem."""
        name = f"llvm.{name}.v{LANES}f32"
        module = self.builder.module
        function = module.globals.get(name) or ir.Function(
            module, ir.FunctionType(result or self.type, [x.type for x in arguments]), name
        )
        return self.builder.call(function, arguments, fastmath=flags)

    def prefetch(self, pointer: Any) -> None:
        """Ask for the cache line of a pointer, to be read soon."""
        byte, flag = ir.IntType(8).as_pointer(), ir.IntType(32)
        name = "llvm.prefetch.p0"
        module = self.builder.module
        function = module.globals.get(name) or ir.Function(
            module, ir.FunctionType(ir.VoidType(), [byte, flag, flag, flag]), name
        )
        hints = [ir.Constant(flag, value) for value in (0, 3, 1)]  # read, keep, data
        self.builder.call(function, [self.builder.bitcast(pointer, byte), *hints])

    def prefetch_elements(self, base: Any, element: Any, start: Any, count: int) -> None:
        """Ask for `count` elements from number `start` of a pointer to them on."""
        line = _LINE_BYTES // (4 if element == self.single else 2)
        for n in range(0, count, line):
            self.prefetch(self.builder.gep(base, [self.builder.add(start, self.number(n))]))

    def stack(self, count: int) -> Any:
        """Room for vectors in the function's frame."""
        with self.builder.goto_entry_block():
            return self.builder.alloca(self.type, ir.Constant(self.word, count))

    @contextmanager
    def loop(self, count: Any, start: Sequence[Any] = ()) -> Iterator[tuple[Any, Carried]]:
        """Emit what the body emits, as a loop over 0 .. count - 1; gives its index, and what it
        carries, which starts as `start`."""
        b, zero = self.builder, ir.Constant(self.word, 0)
        before = b.block
        body, after = b.append_basic_block("loop"), b.append_basic_block("after")
        b.cbranch(b.icmp_signed(">", count, zero), body, after)
        b.position_at_end(body)
        index = b.phi(self.word)
        running = [b.phi(self.type) for _ in start]
        carried = Carried(running, list(running), [])
        yield index, carried
        following = b.add(index, ir.Constant(self.word, 1))
        tail = b.block  # not `body`, if that has loops of its own
        b.cbranch(b.icmp_signed("<", following, count), body, after)
        index.add_incoming(zero, before)
        index.add_incoming(following, tail)
        b.position_at_end(after)
        carried.after = [b.phi(self.type) for _ in start]
        for first, phi, end, last in zip(
            start, running, carried.following, carried.after, strict=True
        ):
            for node in (phi, last):
                node.add_incoming(first, before)
                node.add_incoming(end, tail)

    def sum(self, x: Any) -> Any:
        """Of all lanes, a scalar."""
        zero = ir.Constant(self.single, 0.0)
        return self.call("vector.reduce.fadd", zero, x, result=self.single, flags=("reassoc",))

    def fma(self, x: Any, y: Any, z: Any) -> Any:
        return self.call("fma", x, y, z)

    def load_wide(self, pointer: Any, element: Any) -> Any:
        """`LANES` elements as float32: float32 as they are, i16 as bfloat16 bits, half widened."""
        if element == self.single:
            return self.load(self.builder.bitcast(pointer, self.type.as_pointer()))
        narrow = ir.VectorType(element, LANES)
        value = self.builder.load(self.builder.bitcast(pointer, narrow.as_pointer()))
        value.align = 2
        if isinstance(element, ir.HalfType):
            return self.builder.fpext(value, self.type)
        bits = self.builder.shl(self.builder.zext(value, self.integers), self.integer(16))
        return self.builder.bitcast(bits, self.type)

    def sums(self, vectors: list[Any]) -> Any:
        """One vector whose lane i is the sum of vector i's lanes; `LANES` vectors come in.

        Halving: each step adds the halves of pairs of vectors, so that one vector holds what two
        held. The order in which pairs are taken leaves the sums in order.
        """
        width = LANES
        while len(vectors) > 1:
            half = len(vectors) // 2
            width //= 2
            vectors = [self._add_halves(vectors[i], vectors[i + half], width) for i in range(half)]
        return vectors[0]

    def _add_halves(self, x: Any, y: Any, width: int) -> Any:
        """In each group of 2 * width lanes: sums of x's halves first, then those of y's."""
        groups = range(0, LANES, 2 * width)
        first, second = [], []
        for g in groups:
            first += [g + i for i in range(width)] + [LANES + g + i for i in range(width)]
            second += [g + width + i for i in range(width)]
            second += [LANES + g + width + i for i in range(width)]
        shuffle = self.builder.shuffle_vector
        return self.builder.fadd(
            shuffle(x, y, ir.Constant(self.integers, first)),
            shuffle(x, y, ir.Constant(self.integers, second)),
        )

    def exp(self, x: Any) -> Any:
        """As `numba_math.exp`."""
        b = self.builder
        x = self.call("maxnum", x, self.constant(EXP_LEAST))
        n = b.fptosi(self.fma(x, self.constant(LOG2_E), self.constant(-0.5)), self.integers)
        minus_n = b.fneg(b.sitofp(n, self.type))
        r = self.fma(minus_n, self.constant(LN2_HIGH), x)
        r = self.fma(minus_n, self.constant(LN2_LOW), r)
        p = self.constant(EXP_SERIES[0])
        for coefficient in EXP_SERIES[1:]:
            p = self.fma(p, r, self.constant(coefficient))
        scale = b.shl(b.add(n, self.integer(127)), self.integer(23))
        return b.fmul(p, b.bitcast(scale, self.type))
