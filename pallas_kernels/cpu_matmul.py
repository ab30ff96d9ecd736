"""Products of a few rows with a weight matrix on CPU: every weight is read once, and widened on
the way.

A decode step multiplies a few rows with every weight of the model, so its time is the time of
reading them. XLA on CPU rearranges 16-bit weights at every call. These kernels go down a panel of
columns and keep its sums in registers; weights are asked for ahead of their use, because down a
panel every row is in another place.

    y[M, N] = x[M, K] w[K, N]                           x and y float32, w float32 or bfloat16
    y[M, F] = silu(x w[:, 0]) * (x w[:, 1])             w[D, 2, F], a gated layer
    y[M, V] = x[M, D] w[V, D].T                         the output head
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp


def serves(x_MK: jax.Array, weight: jax.Array, *, transposed: bool = False) -> bool:
    """Whether `matmul` can multiply these here, and faster than XLA."""
    if jax.default_backend() != "cpu" or importlib.util.find_spec("numba") is None:
        return False
    if x_MK.dtype != jnp.float32 or weight.dtype not in (jnp.float32, jnp.bfloat16):
        return False
    kernels = _kernels()
    rows = x_MK.shape[0]
    is_whole = rows <= kernels.MOST_DIRECT_ROWS or rows % kernels.TILE_ROWS == 0
    fits_vectors = all(
        extent % kernels.LANES == 0 for extent in (weight.shape[0], weight.shape[-1])
    )
    most_rows = kernels.MOST_HEAD_ROWS if transposed else kernels.MOST_ROWS
    return is_whole and fits_vectors and rows <= most_rows


def matmul(x_MK: jax.Array, weight: jax.Array, *, transposed: bool = False) -> jax.Array:
    """x @ weight, or x @ weight.T where `transposed`; accumulated in float32.

    Args:
        x_MK: float32[M, K], of few rows.
        weight: float32 or bfloat16, [K, N], or [N, K] where `transposed`.

    Returns:
        float32[M, N].
    """
    rows = x_MK.shape[0]
    target = _target("transposed" if transposed else "plain", weight.dtype.name, rows)
    result = jax.ShapeDtypeStruct((rows, weight.shape[0 if transposed else 1]), jnp.float32)
    out: jax.Array = jax.ffi.ffi_call(target, result)(x_MK, weight)
    return out


def gated(x_MD: jax.Array, weight_D2F: jax.Array) -> jax.Array:
    """silu(x @ weight[:, 0]) * (x @ weight[:, 1]) -> float32[M, F]; as `matmul`."""
    rows, (depth, _, inner) = x_MD.shape[0], weight_D2F.shape
    target = _target("gated", weight_D2F.dtype.name, rows)
    result = jax.ShapeDtypeStruct((rows, inner), jnp.float32)
    out: jax.Array = jax.ffi.ffi_call(target, result)(x_MD, weight_D2F.reshape(depth, 2 * inner))
    return out


def _kernels() -> Any:
    # Numba takes a third of a second to import, which other platforms need not pay.
    return importlib.import_module("pallas_kernels.cpu_matmul_kernels")


@cache
def _target(kind: str, dtype: str, rows: int) -> str:
    """Name of the custom call; compiled, or read from Numba's cache, once."""
    from pallas_kernels import cpu_matmul_kernels, numba_parallel

    tasks = {"plain": _panel_task, "gated": _gated_task, "transposed": _head_task}
    name = f"flowkv_matmul_{kind}_{dtype}_{rows}"
    numba_parallel.register_shared(
        name,
        tasks[kind](cpu_matmul_kernels.ELEMENTS[dtype], rows),
        result_rank=2,
        axis=1,
        grain=cpu_matmul_kernels.HEAD_GRAIN if kind == "transposed" else cpu_matmul_kernels.PANEL,
    )
    return name


def _panel_task(element: Any, rows: int) -> Callable[[int], None]:
    from pallas_kernels import cpu_matmul_kernels, numba_parallel

    digest = numba_parallel.sources_digest(cpu_matmul_kernels)
    direct = (0,) * min(rows, cpu_matmul_kernels.MOST_DIRECT_ROWS)

    def task(job: int) -> None:
        cpu_matmul_kernels.multiply_panels(job, element, rows, direct)
        numba_parallel.release(max(job, -digest))

    return task


def _gated_task(element: Any, rows: int) -> Callable[[int], None]:
    from pallas_kernels import cpu_matmul_kernels, numba_parallel

    digest = numba_parallel.sources_digest(cpu_matmul_kernels)
    direct = (0,) * min(rows, cpu_matmul_kernels.MOST_DIRECT_ROWS)

    def task(job: int) -> None:
        cpu_matmul_kernels.multiply_gated(job, element, rows, direct)
        numba_parallel.release(max(job, -digest))

    return task


def _head_task(element: Any, rows: int) -> Callable[[int], None]:
    from pallas_kernels import cpu_matmul_kernels, numba_parallel

    digest = numba_parallel.sources_digest(cpu_matmul_kernels)
    at_once = (0,) * next(n for n in (8, 4, rows) if rows % n == 0)

    def task(job: int) -> None:
        cpu_matmul_kernels.multiply_head(job, element, rows, at_once)
        numba_parallel.release(max(job, -digest))

    return task
