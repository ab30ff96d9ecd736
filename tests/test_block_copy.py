"""Runs and ragged blocks out of the pool and back, against NumPy indexing."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.block_copy import gather_blocks, put_run, scatter_blocks, slice_run
from pallas_kernels.kv_layout import LAYER_MAJOR_AXES, POOL_AXES, KVLayout

LAYOUT = KVLayout(
    num_layers=2, block_size=4, num_kv_heads=3, head_dim=24, dtype="float32", dtype_bytes=4
)
NUM_BLOCKS = 6
DTYPES = ["float32", "bfloat16", "uint16"]
static = ("implementation", "axes")
compiled_slice = jax.jit(slice_run, static_argnames=("num_blocks", *static))
compiled_gather = jax.jit(gather_blocks, static_argnames=static)
compiled_put = jax.jit(put_run, donate_argnums=0, static_argnames=static)
compiled_scatter = jax.jit(scatter_blocks, donate_argnums=0, static_argnames=static)


def blocks(count: int, dtype: str, axes: str = POOL_AXES, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    values = rng.integers(0, 100, LAYOUT.pool_shape(count))
    order = [POOL_AXES.index(axis) for axis in axes]
    return np.asarray(jnp.asarray(values, dtype)).transpose(order)


def indices(axes: str, ids: object) -> tuple:
    return (slice(None),) * axes.index("P") + (ids,)


@pytest.mark.parametrize("implementation", ["auto", "xla", "gpu"])
@pytest.mark.parametrize("axes", [POOL_AXES, LAYER_MAJOR_AXES])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("start", "count"), [(0, 1), (2, 3), (5, 1), (0, 6)])
def test_runs(implementation: str, axes: str, dtype: str, start: int, count: int):
    pool, new = blocks(NUM_BLOCKS, dtype, axes), blocks(count, dtype, axes, seed=1)
    options = {"implementation": implementation, "axes": axes}
    run = compiled_slice(jnp.asarray(pool), jnp.int32(start), num_blocks=count, **options)
    inside = indices(axes, slice(start, start + count))
    np.testing.assert_array_equal(np.asarray(run), pool[inside])
    put = compiled_put(jnp.asarray(pool), jnp.asarray(new), jnp.int32(start), **options)
    expected = pool.copy()
    expected[inside] = new
    np.testing.assert_array_equal(np.asarray(put), expected)


@pytest.mark.parametrize("implementation", ["xla", "gpu"])
@pytest.mark.parametrize("axes", [POOL_AXES, LAYER_MAJOR_AXES])
@settings(max_examples=15, deadline=None)
@given(ids=st.permutations([*range(NUM_BLOCKS), -1, NUM_BLOCKS, -(2**31), 2**31 - 1]))
def test_ragged_blocks(implementation: str, axes: str, ids: list[int]):
    ids = np.array(ids[:5], np.int32)
    inside = (ids >= 0) & (ids < NUM_BLOCKS)
    pool, new = blocks(NUM_BLOCKS, "float32", axes), blocks(5, "float32", axes, seed=1)
    options = {"implementation": implementation, "axes": axes}
    gathered = compiled_gather(jnp.asarray(pool), jnp.asarray(ids), **options)
    expected = np.zeros_like(new)
    expected[indices(axes, inside)] = pool[indices(axes, ids[inside])]
    np.testing.assert_array_equal(np.asarray(gathered), expected)
    scattered = compiled_scatter(jnp.asarray(pool), jnp.asarray(new), jnp.asarray(ids), **options)
    expected = pool.copy()
    expected[indices(axes, ids[inside])] = new[indices(axes, inside)]
    np.testing.assert_array_equal(np.asarray(scattered), expected)


@pytest.mark.parametrize("count", [1, 7])
def test_putting_is_in_place(count: int):
    """A donated pool is updated where it lies, without a temporary of its size."""
    pool = jax.ShapeDtypeStruct(LAYOUT.pool_shape(4096), jnp.float32)
    new = jax.ShapeDtypeStruct(LAYOUT.pool_shape(count), jnp.float32)
    start, ids = (jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((), (count,)))
    pool_bytes = LAYOUT.bytes_per_block * 4096
    for program in (
        compiled_put.lower(pool, new, start),
        compiled_scatter.lower(pool, new, ids),
    ):
        memory = program.compile().memory_analysis()
        assert memory.alias_size_in_bytes >= pool_bytes
        assert memory.temp_size_in_bytes < pool_bytes // 100


def test_refuses_what_does_not_fit():
    pool, two = jnp.asarray(blocks(NUM_BLOCKS, "float32")), jnp.asarray(blocks(2, "float32"))
    ids = jnp.zeros(3, jnp.int32)
    with pytest.raises(ValueError, match="num_blocks=7 must be from 1 to the pool's 6 blocks"):
        slice_run(pool, 0, num_blocks=7)
    with pytest.raises(ValueError, match="blocks are bfloat16, the pool is float32"):
        put_run(pool, two.astype(jnp.bfloat16), 0)
    with pytest.raises(ValueError, match="do not fit a pool of"):
        put_run(pool, two[..., :8], 0)
    with pytest.raises(ValueError, match="2 blocks for 3 ids"):
        scatter_blocks(pool, two, ids)
    with pytest.raises(ValueError, match="'cuda' is not one of: auto, xla, gpu"):
        gather_blocks(pool, ids, implementation="cuda")
