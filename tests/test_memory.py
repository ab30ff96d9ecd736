"""No step, swap or write makes a copy of the pool."""

from __future__ import annotations

from collections.abc import Callable

import jax
import numpy as np
import pytest

from flowkv_jax import Engine, SamplingParams
from flowkv_jax.engine.batch import PREFILL_ROWS
from flowkv_jax.kv_cache.pool import KVPool
from pallas_kernels.kv_layout import KVLayout
from transfer.errors import PoolMoved
from transfer.types import BlockRun

SHAPES = [(1, 1), (2, 1), (4, 1)] + [
    (rows, tile) for tile, counts in PREFILL_ROWS.items() for rows in counts
]


@pytest.fixture(scope="module")
def engine(tiny_model: Callable[..., object], xla_cache: object):
    with Engine(
        str(tiny_model("gqa_tied")),
        max_num_seqs=4,
        num_blocks=16384,
        max_model_len=512,
        compilation_cache_dir=str(xla_cache),
    ) as engine:
        yield engine


def test_every_shape_is_listed(engine: Engine):
    assert set(engine._runners[0]._batches.shapes()) == set(SHAPES)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_compiled_step_updates_the_pool_in_place(engine: Engine, shape: tuple[int, int]):
    pool_bytes = engine._runners[0].pool.kv_PL2ZKH.nbytes
    memory = engine._runners[0].lower_layers(shape).compile().memory_analysis()
    assert memory.alias_size_in_bytes >= pool_bytes
    assert memory.temp_size_in_bytes < pool_bytes / 4


def test_the_pool_stays_where_it_is(engine: Engine):
    pointer = engine._runners[0].pool.kv_PL2ZKH.unsafe_buffer_pointer()
    params = SamplingParams(temperature=0, max_tokens=20)
    engine.generate([[5] * 100, [6] * 30, [7]], params)
    assert engine._runners[0].pool.kv_PL2ZKH.unsafe_buffer_pointer() == pointer


LAYOUT = KVLayout(
    num_layers=2, block_size=4, num_kv_heads=4, head_dim=8, dtype="float32", dtype_bytes=4
)


@pytest.mark.parametrize("sharded", [False, True])
def test_swapping_round_trip_in_place(sharded: bool):
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:4]), ("tensor",)) if sharded else None
    pool = KVPool(LAYOUT, 16, 8, mesh=mesh, axis="tensor" if sharded else None)
    contents = np.random.default_rng(0).standard_normal(pool.kv_PL2ZKH.shape).astype(np.float32)
    pool.update(lambda old: (jax.device_put(contents.copy(), old.sharding), None))
    pool.swap_out([BlockRun(3, 0, 5), BlockRun(12, 5, 1)])
    pool.swap_in([BlockRun(0, 9, 5), BlockRun(5, 0, 1)])
    expected = contents.copy()
    expected[9:14] = contents[3:8]
    expected[0] = contents[12]
    np.testing.assert_array_equal(np.asarray(pool.kv_PL2ZKH), expected)


def test_swapping_holds_on_to_no_view():
    pool = KVPool(LAYOUT, 16, 8)
    pool.swap_out([BlockRun(0, 0, 4)])
    pool.swap_in([BlockRun(0, 4, 4)])
    pointer = pool.kv_PL2ZKH.unsafe_buffer_pointer()
    pool.swap_out([BlockRun(0, 0, 4)])
    pool.swap_in([BlockRun(0, 4, 3)])
    assert pool.kv_PL2ZKH.unsafe_buffer_pointer() == pointer


def test_a_pool_starts_over_although_a_transfer_is_inside(monkeypatch: pytest.MonkeyPatch):
    """A failed step has taken the array with it; the transfer hears of that itself."""
    pool = KVPool(LAYOUT, 16, 8)
    elsewhere = pool._zeros()
    monkeypatch.setattr(pool, "_zeros", lambda: elsewhere)
    with pytest.raises(PoolMoved), pool.access.open():
        pool.kv_PL2ZKH.delete()
        pool.reset()
    assert not np.asarray(pool.kv_PL2ZKH).any()
    with pool.access.open() as memory:
        assert memory.flat is not None
