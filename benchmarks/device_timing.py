"""What a device can do, and how long work on it takes.

Device work is asynchronous. A sample here is many calls without a pause and one wait at their end,
so that what the host does between two calls hides behind the device, and the call itself is a
program of several operations in a chain, so that launching it costs little of its time.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from statistics import median
from time import perf_counter
from typing import Any

import jax
import jax.numpy as jnp

_MOST_CALLS = 200
_POISON_ELEMENTS = 1 << 29
_poisoning = threading.Lock()


@dataclass(frozen=True)
class Effort:
    """How much to measure.

    Attributes:
        repeats: samples; what is reported is their median.
        least_s: a sample lasts at least so long, by as many calls as that takes.
    """

    repeats: int
    least_s: float


@dataclass(frozen=True)
class Ceilings:
    """What this device reached in this run.

    Attributes:
        copy_bytes_per_s: of the fastest large copy, bytes read and bytes written together.
        matmul_flops_per_s: of a large bfloat16 matrix product by XLA's library.
        by_name: each measurement behind them.
    """

    copy_bytes_per_s: float
    matmul_flops_per_s: float
    by_name: dict[str, float]


def time_call(call: Callable[[], Any], operations: int, effort: Effort) -> list[float]:
    """Seconds for each operation, a sample a repeat; `call` does `operations` of them.

    `call` runs before the first sample, so that nothing is compiled or allocated in one.
    """
    jax.block_until_ready(call())
    calls = 1
    if effort.least_s:
        begin = perf_counter()
        jax.block_until_ready(call())
        calls = min(_MOST_CALLS, math.ceil(effort.least_s / (perf_counter() - begin)))
    samples_s = []
    for _ in range(effort.repeats):
        begin = perf_counter()
        for _ in range(calls):
            out = call()
        jax.block_until_ready(out)
        samples_s.append((perf_counter() - begin) / (calls * operations))
    return samples_s


def measure_ceilings(
    key: jax.Array, copy_bytes: int, matmul_extent: int, effort: Effort
) -> Ceilings:
    """Copy `copy_bytes` on the device, and multiply square matrices of `matmul_extent`.

    Copying is measured as a copy and as a kernel that negates, since either may be the faster.
    """
    x_key, y_key, z_key = jax.random.split(key, 3)
    source = random_normal(x_key, (max(1, copy_bytes >> 21), 1 << 20))
    by_name = {}
    for name, function in (("copy", jnp.copy), ("negate", jnp.negative)):
        program = jax.jit(function)
        samples_s = time_call(partial(program, source), 1, effort)
        by_name[f"{name}_bytes_per_s"] = 2 * source.nbytes / median(samples_s)
    del source
    x, y = (random_normal(k, (matmul_extent, matmul_extent)) for k in (y_key, z_key))
    program = jax.jit(jnp.matmul)
    samples_s = time_call(partial(program, x, y), 1, effort)
    by_name["matmul_flops_per_s"] = 2 * matmul_extent**3 / median(samples_s)
    return Ceilings(
        max(by_name["copy_bytes_per_s"], by_name["negate_bytes_per_s"]),
        by_name["matmul_flops_per_s"],
        by_name,
    )


def free_bytes() -> int | None:
    """Of the device's memory that JAX may still take; None where it does not say (on CPU)."""
    stats = jax.devices()[0].memory_stats()
    if not stats or "bytes_limit" not in stats:
        return None
    return int(stats["bytes_limit"] - stats["bytes_in_use"])


def poison_free_memory() -> None:
    """Fill half of the device's free memory with NaN and free it again.

    A program's temporary arrays are then likely to start out as NaN. Does nothing on CPU.
    """
    with _poisoning:
        count = (free_bytes() or 0) // 2 // (2 * _POISON_ELEMENTS)
        held = [jnp.full(_POISON_ELEMENTS, jnp.nan, jnp.bfloat16) for _ in range(count)]
        jax.block_until_ready(held)
        del held


def random_normal(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """bfloat16 of any size, made a slab of the first axis at a time: little memory beside it."""
    return _random_slabs(key, shape)


@jax.jit(static_argnums=1)
def _random_slabs(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    def fill(index: jax.Array, array: jax.Array) -> jax.Array:
        slab = jax.random.normal(jax.random.fold_in(key, index), shape[1:], jnp.bfloat16)
        return jax.lax.dynamic_update_index_in_dim(array, slab, index, axis=0)

    return jax.lax.fori_loop(0, shape[0], fill, jnp.zeros(shape, jnp.bfloat16))
