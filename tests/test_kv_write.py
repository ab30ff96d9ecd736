"""Every implementation of kv_write against NumPy assignment."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.kv_layout import KEY, LAYER_MAJOR_AXES, POOL_AXES, VALUE, KVLayout
from pallas_kernels.kv_write import IMPLEMENTATIONS, kv_write

LAYOUT = KVLayout(
    num_layers=3, block_size=4, num_kv_heads=3, head_dim=16, dtype="float32", dtype_bytes=4
)
NUM_BLOCKS = 5
SLOTS = [
    (0,),
    (-1,),
    (19,),
    (20,),
    (3, 4, 17),
    (-1, 5, -1, 6),
    (-1, -1),
    (2**31 - 1, 7, -(2**31)),
    tuple(range(19, -1, -1)),
]
in_place = partial(jax.jit, donate_argnums=0, static_argnames=("implementation", "axes"))
write = in_place(kv_write)


def written_by_numpy(pool: np.ndarray, k: np.ndarray, v: np.ndarray, slots: tuple[int, ...]):
    expected = pool.copy()
    for token, slot in enumerate(slots):
        if 0 <= slot < NUM_BLOCKS * LAYOUT.block_size:
            block, offset = divmod(slot, LAYOUT.block_size)
            expected[block, 1, KEY, offset] = k[token]
            expected[block, 1, VALUE, offset] = v[token]
    return expected


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("slots", SLOTS)
def test_writes_slots_and_nothing_else(implementation: str, dtype: str, slots: tuple[int, ...]):
    rng = np.random.default_rng(len(slots))
    pool = np.asarray(jnp.asarray(rng.standard_normal(LAYOUT.pool_shape(NUM_BLOCKS)), dtype))
    k, v = np.asarray(jnp.asarray(rng.standard_normal((2, len(slots), 3, 16)), dtype))
    expected = written_by_numpy(pool, k, v, slots)
    new = (jnp.int32(1), jnp.asarray(k), jnp.asarray(v), jnp.array(slots, jnp.int32))
    for axes in (POOL_AXES, LAYER_MAJOR_AXES):
        order = [POOL_AXES.index(axis) for axis in axes]
        written = write(
            jnp.asarray(pool).transpose(order), *new, implementation=implementation, axes=axes
        )
        np.testing.assert_array_equal(np.asarray(written), expected.transpose(order))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_keeps_16_bit_floats_as_bits(implementation: str):
    rng = np.random.default_rng(0)
    pool = rng.integers(0, 2**16, LAYOUT.pool_shape(NUM_BLOCKS)).astype(np.uint16)
    k, v = jnp.asarray(rng.standard_normal((2, 2, 3, 16)), jnp.bfloat16)
    slots = (7, 0)
    bits = [np.asarray(x).view(np.uint16) for x in (k, v)]
    written = write(
        jnp.asarray(pool), 1, k, v, jnp.array(slots, jnp.int32), implementation=implementation
    )
    np.testing.assert_array_equal(np.asarray(written), written_by_numpy(pool, *bits, slots))


@pytest.mark.parametrize("tokens", [1, 2, 64])
def test_in_place(tokens: int):
    """A donated pool is updated where it lies: no temporary of its size, even for one token."""
    pool = jax.ShapeDtypeStruct(LAYOUT.pool_shape(4096), jnp.float32)
    new = jax.ShapeDtypeStruct((tokens, 3, 16), jnp.float32)
    slots = jax.ShapeDtypeStruct((tokens,), jnp.int32)
    layer = jax.ShapeDtypeStruct((), jnp.int32)
    memory = write.lower(pool, layer, new, new, slots).compile().memory_analysis()
    pool_bytes = LAYOUT.bytes_per_block * 4096
    assert memory.alias_size_in_bytes >= pool_bytes
    assert memory.temp_size_in_bytes < pool_bytes // 100


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"k": (2, 3, 8)}, r"K of shape \(2, 3, 8\)"),
        ({"slots": (3,)}, "do not fit 3 slots and a pool of 3 heads of 16"),
        ({"v_dtype": "bfloat16"}, "K is float32, V is bfloat16, the pool is float32"),
        ({"implementation": "cpu"}, "'cpu' is not one of: auto, reference, xla, gpu"),
    ],
)
def test_refuses_what_does_not_fit(change: dict, message: str):
    options = {"k": (2, 3, 16), "slots": (2,), "v_dtype": "float32", "implementation": "auto"}
    options |= change
    with pytest.raises(ValueError, match=message):
        kv_write(
            jnp.zeros(LAYOUT.pool_shape(NUM_BLOCKS), jnp.float32),
            0,
            jnp.zeros(options["k"], jnp.float32),
            jnp.zeros((2, 3, 16), options["v_dtype"]),
            jnp.zeros(options["slots"], jnp.int32),
            implementation=options["implementation"],
        )
