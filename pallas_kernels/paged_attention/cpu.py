"""Attention on CPU through Numba kernels that read the pool where it lies.

XLA can only gather blocks into a new array and multiply that, which moves every cached byte three
times and starts a dozen small operations a chunk. Decode (`cpu_decode`) and prefill (`cpu_prefill`)
cut their work into items, which the threads of XLA share (`numba_parallel`).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import numba_parallel
from pallas_kernels.kv_layout import POOL_AXES
from pallas_kernels.numba_vectors import LANES
from pallas_kernels.paged_attention import cpu_arguments, cpu_decode, cpu_prefill, cpu_tokens

_ELEMENTS = {"float32": np.float32, "bfloat16": np.uint16, "float16": np.int16}
"""What a pool's elements are read as; see `numba_math.widen`."""
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
    num_items = num_rows * num_kv_heads * num_tiles
    result = jax.ShapeDtypeStruct((num_items, tile * group, head_dim), jnp.float32)
    out_IYH = jax.ffi.ffi_call(target, result)(*arguments)
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


@cache
def _target(dtype: str, order: tuple[int, int, int], group: int, head_dim: int, tile: int) -> str:
    """Name of the custom call for these sizes; compiled, or read from Numba's cache, once.

    A tile of 0 is decode.
    """
    sizes = f"{group}x{head_dim}x{tile}_{''.join(map(str, order))}"
    name = f"flowkv_attention_{dtype}_{sizes}"
    make_task = _prefill_task if tile else _decode_task
    task = make_task(_ELEMENTS[dtype], order, cpu_tokens.sizes(group, head_dim), tile)
    numba_parallel.register_shared(name, task, result_rank=3)
    return name


# What the tasks close over is part of the key of Numba's cache: plain values, and a digest of the
# sources, for Numba itself only looks at the age of this file. Sizes are constants in them, so
# inner loops unroll.


def _decode_task(element: Any, order: Any, sizes: Any, tile: int) -> Callable[[int], None]:
    digest = numba_parallel.sources_digest(cpu_arguments, cpu_decode, cpu_tokens)

    def task(job: int) -> None:
        cpu_decode.attend(job, element, order, sizes)
        numba_parallel.release(max(job, -digest))

    return task


def _prefill_task(element: Any, order: Any, sizes: Any, tile: int) -> Callable[[int], None]:
    digest = numba_parallel.sources_digest(cpu_arguments, cpu_prefill)

    def task(job: int) -> None:
        cpu_prefill.attend(job, element, order, sizes, tile)
        numba_parallel.release(max(job, -digest))

    return task
