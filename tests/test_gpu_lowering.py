"""Pallas kernels lower for CUDA, and compute addresses in pools of any size without overflow."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.block_copy import gather_blocks, put_run, scatter_blocks, slice_run
from pallas_kernels.kv_layout import (
    LARGEST_INDEX,
    LAYER_MAJOR_AXES,
    POOL_AXES,
    flat_index,
    pool_index,
)
from pallas_kernels.kv_write import kv_write
from pallas_kernels.paged_attention import cpu_arguments, gpu, xla
from tests.triton_modules import export_for_cuda, triton_modules

DTYPES = ["float32", "bfloat16", "float16"]
HUGE = {"num_blocks": 300_000, "layers": 80}
"""98 billion elements: a node's share of Llama 70B, and then some."""


@dataclass(frozen=True)
class Kernel:
    """A function of abstract arrays, the pool among them."""

    function: Callable[..., Any]
    shapes: tuple[Any, ...]
    pool: int
    """Which of `shapes` the pool is."""
    reference: str
    """The kernel's own argument through which it reads or writes the pool, in Triton IR."""


def abstract(shape: tuple[int, ...], dtype: str = "int32") -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def kernels(
    dtype: str,
    *,
    num_blocks: int = 64,
    layers: int = 4,
    block_size: int = 16,
    head_dim: int = 128,
    axes: str = POOL_AXES,
) -> dict[str, Kernel]:
    """Every Pallas kernel, for Triton."""
    kv_heads, heads, rows, tokens, run = 2, 8, 4, 64, 5
    pool = _pool((num_blocks, layers, 2, block_size, kv_heads, head_dim), dtype, axes)
    blocks = _pool((run, layers, 2, block_size, kv_heads, head_dim), dtype, axes)
    options = {"axes": axes, "interpret": False}
    named = options | {"implementation": "gpu"}
    tables = (abstract(()), abstract((rows, 512)), abstract((rows,)), abstract((rows,)))

    def attend(**extra: Any) -> Callable[..., Any]:
        return lambda *arrays: gpu.paged_attention(*arrays, 0.1, **options, **extra)

    def queries(count: int) -> jax.ShapeDtypeStruct:
        return abstract((rows, count, heads, head_dim), dtype)

    new = abstract((tokens, kv_heads, head_dim), dtype)
    return {
        "decode": Kernel(attend(num_splits=1), (queries(1), pool, *tables), 1, "%arg1"),
        "decode_split": Kernel(attend(num_splits=8), (queries(1), pool, *tables), 1, "%arg1"),
        "prefill": Kernel(attend(), (queries(256), pool, *tables), 1, "%arg1"),
        "kv_write": Kernel(
            lambda *arrays: kv_write(*arrays, **named),
            (pool, abstract(()), new, new, abstract((tokens,))),
            0,
            "%arg5",
        ),
        "slice_run": Kernel(
            lambda kv, start: slice_run(kv, start, num_blocks=run, **named),
            (pool, abstract(())),
            0,
            "%arg0",
        ),
        "put_run": Kernel(
            lambda *arrays: put_run(*arrays, **named), (pool, blocks, abstract(())), 0, "%arg3"
        ),
        "gather_blocks": Kernel(
            lambda *arrays: gather_blocks(*arrays, **named), (pool, abstract((run,))), 0, "%arg0"
        ),
        "scatter_blocks": Kernel(
            lambda *arrays: scatter_blocks(*arrays, **named),
            (pool, blocks, abstract((run,))),
            0,
            "%arg3",
        ),
    }


def _pool(shape: tuple[int, ...], dtype: str, axes: str) -> jax.ShapeDtypeStruct:
    return abstract(tuple(shape[POOL_AXES.index(axis)] for axis in axes), dtype)


NAMES = list(kernels("float32"))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_lowers_for_cuda(name: str, dtype: str):
    kernel = kernels(dtype)[name]
    exported = export_for_cuda(kernel.function, *kernel.shapes)
    assert exported.platforms == ("cuda",)
    assert len(triton_modules(kernel.function, *kernel.shapes)) == 1


@pytest.mark.parametrize("name", ["decode", "prefill", "kv_write"])
@pytest.mark.parametrize("block_size", [8, 24, 64])
@pytest.mark.parametrize("head_dim", [64, 80, 96, 256])
def test_lowers_for_other_sizes(name: str, block_size: int, head_dim: int):
    kernel = kernels("bfloat16", block_size=block_size, head_dim=head_dim)[name]
    assert len(triton_modules(kernel.function, *kernel.shapes)) == 1


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("axes", [POOL_AXES, LAYER_MAJOR_AXES])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_offsets_into_a_huge_pool_are_64_bits_wide(name: str, axes: str, dtype: str):
    """Each offset added to a pool's pointer, and every factor of it, is computed in 64 bits.

    32-bit values go in only as coordinates (a block id, a layer, a token, ...), each below the
    extent of its axis.
    """
    kernel = kernels(dtype, axes=axes, **HUGE)[name]
    assert math.prod(kernel.shapes[kernel.pool].shape) > 2**31
    [text] = triton_modules(kernel.function, *kernel.shapes)
    widths = [width for name, width in _additions(text) if name == kernel.reference]
    assert widths
    assert set(widths) == {"i64"}


def _additions(text: str) -> list[tuple[str, str]]:
    """(kernel argument, width of the offset) of every address computed."""
    base = {f"%arg{index}": f"%arg{index}" for index in range(16)}
    found = []
    for line in text.splitlines():
        if match := re.match(r"\s*(%\w+) = tt\.(?:splat|broadcast|expand_dims) (%\w+)", line):
            if match[2] in base:
                base[match[1]] = base[match[2]]
        elif match := re.match(r"\s*(%\w+) = tt\.addptr (%\w+), %\w+ : .*?(i\d+)>?$", line):
            base[match[1]] = base[match[2]]
            found.append((base[match[2]], match[3]))
    return found


def test_pools_beyond_32_bit_row_numbers_are_refused_by_xla():
    shape = (2**24, 80, 2, 16, 1, 64)
    new = abstract((2, 1, 64), "bfloat16")
    with pytest.raises(ValueError, match="beyond the 2147483647"):
        jax.eval_shape(
            lambda *arrays: kv_write(*arrays, implementation="xla"),
            abstract(shape, "bfloat16"),
            abstract(()),
            new,
            new,
            abstract((2,)),
        )
    q = abstract((2, 1, 4, 64), "bfloat16")
    with pytest.raises(ValueError, match="beyond the 2147483647"):
        jax.eval_shape(
            lambda *arrays: xla.paged_attention(*arrays, 0.1),
            q,
            abstract(shape, "bfloat16"),
            abstract(()),
            abstract((2, 8)),
            abstract((2,)),
            abstract((2,)),
        )


@settings(deadline=None)
@given(
    extents=st.tuples(*[st.integers(1, 2**15)] * 4),
    data=st.data(),
)
def test_row_numbers_are_those_of_numpy_and_below_the_number_of_rows(extents, data):
    coordinates = [data.draw(st.integers(0, extent - 1)) for extent in extents]
    row = flat_index(extents, coordinates)
    assert row == np.ravel_multi_index(coordinates, extents)
    assert row < math.prod(extents)
    if math.prod(extents) <= LARGEST_INDEX:
        in_32_bits = flat_index(extents, [jnp.int32(x) for x in coordinates])
        assert int(in_32_bits) == row


@settings(deadline=None)
@given(
    axes=st.sampled_from([POOL_AXES, LAYER_MAJOR_AXES]),
    extents=st.tuples(st.integers(1, 2**20), st.integers(1, 128), st.just(2)),
    inner=st.integers(1, 2**17),
    data=st.data(),
)
def test_addresses_on_cpu_are_those_of_numpy(axes, extents, inner, data):
    """The function that the CPU kernels compute a block's place with, compiled, far past 2^31."""
    by_axis = dict(zip("PL2", extents, strict=True))
    shape = [by_axis[axis] for axis in axes[:3]]
    order = tuple(axes.index(axis) for axis in "PL2")
    block = data.draw(st.integers(0, by_axis["P"] - 1))
    layer = data.draw(st.integers(0, by_axis["L"] - 1))
    strides = cpu_arguments.strides_of(*shape, inner, order)
    start = cpu_arguments.block_start(strides, np.int32(block), np.int32(layer))
    place = pool_index(axes[:3], block=block, layer=layer, half=0)
    assert start == np.ravel_multi_index([*place, 0], [*shape, inner])
    assert start + strides[2] == np.ravel_multi_index(
        [*pool_index(axes[:3], block=block, layer=layer, half=1), 0], [*shape, inner]
    )
