"""kv_write against NumPy assignment."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.kv_layout import KEY, VALUE, KVLayout
from pallas_kernels.kv_write import kv_write

LAYOUT = KVLayout(
    num_layers=3, block_size=4, num_kv_heads=2, head_dim=8, dtype="float32", dtype_bytes=4
)
NUM_BLOCKS = 5


@pytest.mark.parametrize(
    "slots", [(0,), (-1,), (19,), (3, 4, 17), (-1, 5, -1, 6), (-1, -1), tuple(range(19, -1, -1))]
)
def test_writes_slots_and_nothing_else(slots: tuple[int, ...]):
    rng = np.random.default_rng(len(slots))
    pool = rng.standard_normal(LAYOUT.pool_shape(NUM_BLOCKS)).astype(np.float32)
    k, v = rng.standard_normal((2, len(slots), 2, 8)).astype(np.float32)
    expected = pool.copy()
    for token, slot in enumerate(slots):
        if slot >= 0:
            block, offset = divmod(slot, LAYOUT.block_size)
            expected[block, 1, KEY, offset] = k[token]
            expected[block, 1, VALUE, offset] = v[token]
    written = kv_write(
        jnp.asarray(pool), jnp.int32(1), jnp.asarray(k), jnp.asarray(v), jnp.array(slots, jnp.int32)
    )
    np.testing.assert_array_equal(np.asarray(written), expected)


@pytest.mark.parametrize("tokens", [1, 2, 64])
def test_in_place(tokens: int):
    """A donated pool is updated where it lies: no temporary of its size, even for one token."""
    pool = jax.ShapeDtypeStruct(LAYOUT.pool_shape(4096), jnp.float32)
    new = jax.ShapeDtypeStruct((tokens, 2, 8), jnp.float32)
    slots = jax.ShapeDtypeStruct((tokens,), jnp.int32)
    write = jax.jit(kv_write, donate_argnums=0)
    layer = jax.ShapeDtypeStruct((), jnp.int32)
    memory = write.lower(pool, layer, new, new, slots).compile().memory_analysis()
    pool_bytes = LAYOUT.bytes_per_block * 4096
    assert memory.alias_size_in_bytes >= pool_bytes
    assert memory.temp_size_in_bytes < pool_bytes // 100
