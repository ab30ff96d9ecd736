"""The part of the kernels that belongs to Pallas' Triton backend (sm_80 and later).

Everything Triton-specific is here, so that another backend replaces this file and leaves the
kernels' arithmetic alone. What the kernels rely on:

- Every array in a kernel has a power of two of elements; `pieces` cuts what has not.
- A load or store computes its offset in 64 bits as soon as the array has more than 2^32 bytes, and
  an array of at most that many bytes has offsets below 2^31 elements of 2 bytes or more. So a
  kernel that indexes with coordinates, and never multiplies them itself, cannot overflow.
- Off the GPU the same kernels run in Pallas' interpreter, which is how they are tested.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

LEAST_DOT = 16
"""Smallest extent of a matrix product on tensor cores, in each of its three dimensions."""


def kernel_call(
    kernel: Callable[..., None],
    arguments: Sequence[jax.Array],
    out_shape: Any,
    *,
    name: str,
    grid: tuple[int, ...],
    num_warps: int = 4,
    num_stages: int = 2,
    aliases: dict[int, int] | None = None,
    interpret: bool | None = None,
) -> Any:
    """Run `kernel` over `grid`; its references are whole arrays in device memory.

    Args:
        kernel: takes a reference for each argument, then one for each output.
        out_shape: ShapeDtypeStruct, or a tuple of them.
        aliases: argument index -> index of the output that is the same memory.
        interpret: run in the interpreter; None means wherever the default backend is no GPU.
    """
    backend = _backend()
    if interpret is None:
        interpret = jax.default_backend() != "gpu"
    whole = pl.BlockSpec(memory_space=pl.ANY)
    out_specs = jax.tree.map(lambda _: whole, out_shape)
    call = pl.pallas_call(
        kernel,
        out_shape=out_shape,
        grid=grid,
        in_specs=[whole] * len(arguments),
        out_specs=out_specs,
        input_output_aliases=aliases or {},
        compiler_params=backend.CompilerParams(num_warps=num_warps, num_stages=num_stages),
        interpret=interpret,
        name=name,
    )
    return call(*arguments)


def load(reference: Any, mask: jax.Array) -> jax.Array:
    """What a reference holds; zero where the mask is false, and nothing is read there."""
    return _backend().load(reference, mask=mask, other=0)


def store(reference: Any, value: jax.Array, mask: jax.Array) -> None:
    """Put a value where the mask is true.

    No two elements may have the same coordinates, masked ones neither: the interpreter writes
    masked elements back as they were. Coordinates outside the array are dropped.
    """
    _backend().store(reference, value, mask=mask)


def _backend() -> Any:
    # Imported late: it takes a tenth of a second, which processes without a kernel need not pay.
    from jax.experimental.pallas import triton

    return triton


def dot(x: jax.Array, y: jax.Array, *, transposed: bool = False) -> jax.Array:
    """x [A, B] times y [B, C], or y [C, B] when transposed; accumulated in float32.

    float32 inputs are multiplied as such, not in tf32.
    """
    contracted = ((1,), (1 if transposed else 0,))
    return jax.lax.dot_general(
        x,
        y,
        (contracted, ((), ())),
        precision=jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None,
        preferred_element_type=jnp.float32,
    )


def pieces(extent: int) -> tuple[tuple[int, int], ...]:
    """(start, size) of consecutive pieces of [0, extent) whose sizes are powers of two, largest
    first: 80 is 64 and 16."""
    parts, start = [], 0
    while start < extent:
        size = 1 << ((extent - start).bit_length() - 1)
        parts.append((start, size))
        start += size
    return tuple(parts)


def power_of_two(least: int) -> int:
    """The smallest power of two that is not below `least`."""
    return 1 << max(0, least - 1).bit_length()
