"""Attention on CPU through Numba kernels that read the pool where it lies.

XLA can only gather blocks into a new array and multiply that, which moves every cached byte three
times and starts a dozen small operations a chunk. Decode (`cpu_decode`) and prefill (`cpu_prefill`)
cut their work into items, which are dealt to several custom calls that XLA runs side by side.
"""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numba
import numpy as np

from pallas_kernels import numba_ffi, numba_math, numba_vectors
from pallas_kernels.kv_layout import POOL_AXES
from pallas_kernels.numba_ffi import ARGUMENT_POINTERS, FRAME_WORDS
from pallas_kernels.numba_vectors import LANES
from pallas_kernels.paged_attention import cpu_arguments, cpu_decode, cpu_prefill, cpu_tokens
from pallas_kernels.paged_attention.cpu_arguments import pool_size

_ELEMENTS = {"float32": np.float32, "bfloat16": np.uint16, "float16": np.int16}
"""What a pool's elements are read as; see `numba_math.widen`."""
_MOST_CALLS = 16
"""Custom calls a step's work is dealt to. XLA's executor hands operations to another thread only
from among more than eight that are ready at once; of sixteen it hands over half."""
_LEAST_CALLS = 9
_KERNEL_MODULES = (
    cpu_arguments,
    cpu_decode,
    cpu_prefill,
    cpu_tokens,
    numba_ffi,
    numba_math,
    numba_vectors,
)
_TILE_ROWS = 192
"""Rows (queries times heads of a group) of a prefill item, about: enough to pay for transposing the
keys, few enough to leave out most of what a causal mask hides."""


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
) -> jax.Array:
    """See `paged_attention.api`. `axes` is the order of the pool's, for measuring other layouts."""
    num_rows, num_queries, num_heads, head_dim = q_RTNH.shape
    num_kv_heads = kv_PL2ZKH.shape[4]
    group = num_heads // num_kv_heads
    is_decode = num_queries == 1
    why_not = unsupported(head_dim)
    if why_not:
        raise ValueError(f"implementation='cpu' cannot serve this: {why_not}")
    tile = 1 if is_decode else _query_tile(num_queries, group)
    order = (axes.index("P"), axes.index("L"), axes.index("2"))
    target = _target(q_RTNH.dtype.name, order, group, head_dim, 0 if is_decode else tile)
    arguments = (
        q_RTNH.astype(jnp.float32) * scale,
        kv_PL2ZKH,
        layer.reshape(1),
        block_tables_RM,
        kv_lens_R,
        q_starts_R,
    )
    num_tiles = -(-num_queries // tile)
    out_IYH = _deal(
        target, arguments, num_rows * num_kv_heads * num_tiles, (tile * group, head_dim)
    )
    # Items to positions: [R, K, tiles, queries, G, H] to [R, tiles * queries, K * G, H].
    out = out_IYH.reshape(num_rows, num_kv_heads, num_tiles * tile, group, head_dim)
    out = out[:, :, :num_queries].transpose(0, 2, 1, 3, 4)
    return out.reshape(q_RTNH.shape).astype(q_RTNH.dtype)


def unsupported(head_dim: int) -> str:
    """Why a head dim cannot be served on this processor, with the bound; empty if it can."""
    if head_dim % LANES:
        return f"{head_dim=} is no multiple of {LANES}, the float32 values of a vector register"
    return ""


def _query_tile(num_queries: int, group: int) -> int:
    """Queries of a prefill item: a power of two, at least 8."""
    tile = 8
    while tile < num_queries and 2 * tile * group <= _TILE_ROWS:
        tile *= 2
    return tile


def _deal(
    target: str, arguments: tuple[jax.Array, ...], num_items: int, item_shape: tuple[int, int]
) -> jax.Array:
    """float32[num_items, *item_shape] of a custom call, computed by several of them.

    Items are dealt like cards, for neighbours cost about the same.
    """
    num_calls = _number_of_calls(num_items)
    share = -(-num_items // num_calls)
    call = jax.ffi.ffi_call(target, jax.ShapeDtypeStruct((share, *item_shape), jnp.float32))
    hands = [call(*arguments, np.array([first, num_calls], np.int32)) for first in range(num_calls)]
    if num_calls == 1:
        return hands[0]
    return jnp.stack(hands, axis=1).reshape(share * num_calls, *item_shape)[:num_items]


def _number_of_calls(num_items: int) -> int:
    """How many calls share the items; the most that leave the fewest without a last item."""
    if num_items < _LEAST_CALLS:
        return 1
    counts = range(min(_MOST_CALLS, num_items), _LEAST_CALLS - 1, -1)
    return min(counts, key=lambda calls: -num_items % calls)


@cache
def _sources_digest() -> int:
    """A positive number that changes with the code of the kernels."""
    digest = hashlib.sha256()
    for module in _KERNEL_MODULES:
        digest.update(Path(module.__file__).read_bytes())
    return int.from_bytes(digest.digest()[:7], "big") + 1


@cache
def _target(dtype: str, order: tuple[int, int, int], group: int, head_dim: int, tile: int) -> str:
    """Name of the custom call for these sizes; compiled, or read from Numba's cache, once.

    A tile of 0 is decode.
    """
    sizes = f"{group}x{head_dim}x{tile}_{''.join(map(str, order))}"
    name = f"flowkv_attention_{dtype}_{sizes}"
    numba_ffi.register(name, _compile_handler(_ELEMENTS[dtype], order, group, head_dim, tile))
    return name


def _compile_handler(element: Any, order: Any, group: int, head_dim: int, tile: int) -> Any:
    """The handler for pools of `element`. Sizes are constants in it, so inner loops unroll.

    What it closes over is part of the key of Numba's cache: plain values, and a digest of the
    sources, for Numba itself only looks at the age of this file.
    """
    digest = _sources_digest()
    sizes = cpu_tokens.sizes(group, head_dim)

    def decode(frame_address: int) -> int:
        frame = numba_ffi.words(frame_address, FRAME_WORDS)
        if not numba_ffi.answer_metadata(frame):
            address = numba_ffi.data(frame[ARGUMENT_POINTERS], 1)
            pool = numba.carray(numba_ffi.as_pointer(address), (pool_size(frame),), element)
            cpu_decode.attend(frame, pool, order, sizes)
        return min(digest, 0)

    def prefill(frame_address: int) -> int:
        frame = numba_ffi.words(frame_address, FRAME_WORDS)
        if not numba_ffi.answer_metadata(frame):
            address = numba_ffi.data(frame[ARGUMENT_POINTERS], 1)
            pool = numba.carray(numba_ffi.as_pointer(address), (pool_size(frame),), element)
            cpu_prefill.attend(frame, pool, order, group, head_dim, tile)
        return min(digest, 0)

    handler = prefill if tile else decode
    return numba.cfunc(numba_ffi.HANDLER_SIGNATURE, cache=True)(handler)
