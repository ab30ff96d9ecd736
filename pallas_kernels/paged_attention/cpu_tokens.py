"""Products of a few queries with tokens of the pool, for decode: each element is loaded once.

A query's products with a token are summed lane by lane, and the lanes of `LANES` tokens together,
so that no token pays for a sum across a register. Weighted values are summed in registers over all
tokens of a call.

A block's share of one layer is a few kilobytes, too short for a processor to guess what comes next,
so every call also asks for the memory that the next one will read, `ahead` elements further. That
halved the time of decode where the cache is larger than the processor's.
"""

from __future__ import annotations

from typing import Any

from numba import types
from numba.extending import intrinsic

from pallas_kernels.numba_vectors import LANES, Vectors, elements_of

_MOST_SUMS = 20 if LANES == 16 else 8
"""Vectors of weighted values to keep in registers, of the 32 (16 without AVX-512) there are."""


Sizes = tuple[tuple[int, ...], tuple[int, ...]]


def sizes(group: int, head_dim: int) -> Sizes:
    """G and H / LANES as the lengths of two tuples, which are part of a type and so known to the
    functions here when they are compiled."""
    return (0,) * group, (0,) * (head_dim // LANES)


@intrinsic
def score(
    typing_context: Any,
    pool: Any,
    first: Any,
    stride: Any,
    count: Any,
    q: Any,
    scores: Any,
    ld: Any,
    ahead: Any,
    sizes: Any,
) -> Any:
    """scores[g * ld + i] = q[g] . key of token i < count <= LANES.

    The elements of token i begin at pool[first + i * stride]. q is float32[G, H] and scores
    float32, by address. `LANES` scores are written for each g, those past `count` without meaning.
    What lies `ahead` elements from each token is prefetched.
    """
    group, vectors = (len(part) for part in sizes)

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        base, element = elements_of(context, builder, signature.args[0], arguments[0])
        _emit_score(builder, base, element, arguments[1:-1], group, vectors)
        return context.get_dummy_value()

    return types.void(pool, *[types.int64] * 7, sizes), generate


@intrinsic
def accumulate(
    typing_context: Any,
    pool: Any,
    first: Any,
    stride: Any,
    count: Any,
    weights: Any,
    ld: Any,
    out: Any,
    ahead: Any,
    sizes: Any,
) -> Any:
    """out[g] += sum over i < count of weights[g * ld + i] * value of token i.

    The elements of token i begin at pool[first + i * stride]. weights are float32 and out is
    float32[G, H], by address. What lies `ahead` elements from each token is prefetched.
    """
    group, vectors = (len(part) for part in sizes)

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        base, element = elements_of(context, builder, signature.args[0], arguments[0])
        at_once = max(1, _MOST_SUMS // vectors)
        for g in range(0, group, at_once):
            heads = range(g, min(g + at_once, group))
            _emit_accumulate(builder, base, element, arguments[1:-1], heads, vectors)
        return context.get_dummy_value()

    return types.void(pool, *[types.int64] * 7, sizes), generate


def _emit_score(
    builder: Any, base: Any, element: Any, arguments: Any, group: int, num_vectors: int
) -> None:
    first, stride, count, q, scores, ld, ahead = arguments
    v = Vectors(builder)
    vectors, head_dim = range(num_vectors), num_vectors * LANES

    # What a token's products come to, lane by lane, until there are `LANES` tokens.
    lanes = v.stack(group * LANES)
    with v.loop(count) as (i, _):
        start = builder.add(first, builder.mul(i, stride))
        v.prefetch_elements(base, element, builder.add(start, ahead), head_dim)
        key = [
            v.load_wide(builder.gep(base, [builder.add(start, v.number(n * LANES))]), element)
            for n in vectors
        ]
        for g in range(group):
            total = None
            for n in vectors:
                part = v.load(v.pointer(q, v.number(g * head_dim + n * LANES), v.type))
                total = builder.fmul(part, key[n]) if total is None else v.fma(part, key[n], total)
            place = builder.gep(lanes, [builder.add(v.number(g * LANES), i)])
            builder.store(total, place)
    for g in range(group):
        tokens = [builder.load(builder.gep(lanes, [v.number(g * LANES + i)])) for i in range(LANES)]
        v.store(v.sums(tokens), v.pointer(scores, builder.mul(ld, v.number(g)), v.type))


def _emit_accumulate(
    builder: Any, base: Any, element: Any, arguments: Any, heads: range, num_vectors: int
) -> None:
    first, stride, count, weights, ld, out, ahead = arguments
    v = Vectors(builder)
    vectors, head_dim = range(num_vectors), num_vectors * LANES

    where = [
        v.pointer(out, v.number(g * head_dim + n * LANES), v.type) for g in heads for n in vectors
    ]
    with v.loop(count, [v.load(pointer) for pointer in where]) as (i, sums):
        start = builder.add(first, builder.mul(i, stride))
        v.prefetch_elements(base, element, builder.add(start, ahead), head_dim)
        value = [
            v.load_wide(builder.gep(base, [builder.add(start, v.number(n * LANES))]), element)
            for n in vectors
        ]
        for row, g in enumerate(heads):
            position = builder.add(builder.mul(ld, v.number(g)), i)
            weight = v.spread(v.load(v.pointer(weights, position, v.single)))
            for n in vectors:
                index = row * len(vectors) + n
                sums.following[index] = v.fma(weight, value[n], sums.running[index])
    for total, pointer in zip(sums.after, where, strict=True):
        v.store(total, pointer)
