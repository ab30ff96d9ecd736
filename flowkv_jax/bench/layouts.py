"""`flowkv bench layouts`: what the block-major order costs attention, against the layer-major one.

The same decode attention, through all layers, over pools that differ in the order of their axes
only: block-major [P, L, 2, Z, K, H] and layer-major [L, 2, P, Z, K, H]. Both run in turns.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median
from time import perf_counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.kv_layout import LAYER_MAJOR_AXES, POOL_AXES, storage_dtype

_WARM_UP = 2


def run_layouts_benchmark(
    contexts: Sequence[int] = (128, 1024, 4096),
    *,
    batch: int = 8,
    num_layers: int = 30,
    num_kv_heads: int = 3,
    group: int = 3,
    head_dim: int = 64,
    block_size: int = 16,
    dtype: str = "float32",
    implementation: str = "cpu",
    repeat: int = 9,
    seed: int = 0,
) -> list[dict[str, Any]]:
    """Time decode attention in both layouts. The defaults are SmolLM2-135M's sizes.

    Args:
        contexts: cached tokens of every row.
        implementation: a module of `pallas_kernels.paged_attention`: cpu, xla, gpu.

    Returns:
        For each context: medians in ms over all layers, and `price`, block-major over layer-major.
    """
    attend = importlib.import_module(
        f"pallas_kernels.paged_attention.{implementation}"
    ).paged_attention
    results = []
    for context in contexts:
        rng = np.random.default_rng(seed)
        width = -(-context // block_size)
        ids = rng.permutation(batch * width).astype(np.int32).reshape(batch, width)
        lens = jnp.full(batch, context, jnp.int32)
        q = jnp.asarray(
            rng.standard_normal((batch, 1, num_kv_heads * group, head_dim), np.float32), dtype
        )
        extents = dict(
            zip(
                "PL2ZKH",
                (batch * width, num_layers, 2, block_size, num_kv_heads, head_dim),
                strict=True,
            )
        )
        runs: dict[str, Callable[[], jax.Array]] = {}
        for axes in (POOL_AXES, LAYER_MAJOR_AXES):
            pool = _random_pool(tuple(extents[axis] for axis in axes), dtype, seed)
            step = jax.jit(_through_layers(attend, axes, num_layers, head_dim**-0.5))
            arguments = (q, pool, jnp.asarray(ids), lens)
            runs[axes] = partial(step, *arguments)
        times_s: dict[str, list[float]] = {axes: [] for axes in runs}
        for _ in range(_WARM_UP + repeat):
            for axes, run in runs.items():
                started = perf_counter()
                run().block_until_ready()
                times_s[axes].append(perf_counter() - started)
        block_ms, layer_ms = (1e3 * median(times_s[axes][_WARM_UP:]) for axes in runs)
        results.append(
            {
                "context": context,
                "block_major_ms": block_ms,
                "layer_major_ms": layer_ms,
                "price": block_ms / layer_ms,
            }
        )
    return results


def _through_layers(attend: Any, axes: str, num_layers: int, scale: float) -> Callable[..., Any]:
    def step(q: jax.Array, pool: jax.Array, tables: jax.Array, lens: jax.Array) -> jax.Array:
        for layer in range(num_layers):
            q = attend(q, pool, jnp.int32(layer), tables, lens, lens - 1, scale, axes=axes)
        return q

    return step


def _random_pool(shape: tuple[int, ...], dtype: str, seed: int) -> jax.Array:
    values = jax.random.normal(jax.random.key(seed), shape, jnp.dtype(dtype))
    stored = storage_dtype(dtype, jax.default_backend())
    return values if stored == dtype else jax.lax.bitcast_convert_type(values, jnp.dtype(stored))
