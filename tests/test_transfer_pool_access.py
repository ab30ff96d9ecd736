"""Pools as transfers see them: in NumPy, and in JAX on one device or several."""

from __future__ import annotations

import subprocess
import sys
import threading
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from pallas_kernels.kv_layout import POOL_AXES, KVLayout
from transfer.errors import BackendError, PoolBoundsError, PoolMoved
from transfer.jax_pool import JaxPool
from transfer.pool_access import (
    HostMemory,
    NumpyPool,
    PoolAccess,
    block_ids,
    check_bounds,
    incoming,
    outgoing,
)
from transfer.types import BlockRun

LAYOUT = KVLayout(2, 4, 4, 8, "float32", 4)
BLOCK = LAYOUT.bytes_per_block


def numbers(num_blocks: int, seed: int = 0) -> np.ndarray:
    shape = LAYOUT.pool_shape(num_blocks)
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def sharded(num_shards: int) -> NamedSharding:
    axes = [None] * len(POOL_AXES)
    axes[POOL_AXES.index("K")] = "tp"  # type: ignore[call-overload]
    return NamedSharding(Mesh(np.array(jax.devices()[:num_shards]), "tp"), PartitionSpec(*axes))


def jax_pool(num_shards: int, num_blocks: int = 12, seed: int = 0) -> JaxPool:
    values = numbers(num_blocks, seed)
    if num_shards == 1:
        return JaxPool(LAYOUT, jnp.array(values))
    return JaxPool(LAYOUT, jax.device_put(values, sharded(num_shards)))


@pytest.fixture(params=["numpy", 1, 2, 4], ids=str)
def pool(request: pytest.FixtureRequest) -> PoolAccess:
    if request.param == "numpy":
        return NumpyPool(LAYOUT, 12, numbers(12))
    return jax_pool(request.param)


def all_bytes(pool: PoolAccess) -> np.ndarray:
    out = np.empty(pool.num_blocks * BLOCK, np.uint8)
    with pool.open() as memory:
        memory.read(0, out)
    return out


class TestEveryPool:
    def test_blocks_are_their_bytes_whatever_holds_them(self, pool: PoolAccess) -> None:
        np.testing.assert_array_equal(all_bytes(pool), numbers(12).reshape(-1).view(np.uint8))

    def test_writes(self, pool: PoolAccess) -> None:
        new = numbers(3, seed=1).reshape(-1).view(np.uint8)
        with pool.open() as memory:
            memory.write(5, new)
        expected = numbers(12)
        expected[5:8] = numbers(3, seed=1)
        np.testing.assert_array_equal(all_bytes(pool), expected.reshape(-1).view(np.uint8))
        if isinstance(pool, JaxPool):
            np.testing.assert_array_equal(np.asarray(pool.array), expected)

    @pytest.mark.parametrize("piece_bytes", [BLOCK, 3 * BLOCK + 1, 1 << 20])
    def test_ranges_in_pieces(self, pool: PoolAccess, piece_bytes: int) -> None:
        offsets, sizes = [2 * BLOCK, 9 * BLOCK, 0], [5 * BLOCK, BLOCK, 2 * BLOCK]
        whole = all_bytes(pool)
        expected = np.concatenate([whole[o : o + n] for o, n in zip(offsets, sizes, strict=True)])
        with pool.open() as memory:
            read = [p.copy() for p in outgoing(memory, offsets, sizes, piece_bytes, BLOCK)]
            np.testing.assert_array_equal(np.concatenate(read), expected)
            for piece in incoming(memory, offsets, sizes, piece_bytes, BLOCK):
                piece[:] = 7
        whole = all_bytes(pool)
        assert sum(np.count_nonzero(whole == 7) >= size for size in sizes) == 3
        assert (whole[2 * BLOCK : 7 * BLOCK] == 7).all() and (whole[: 2 * BLOCK] == 7).all()

    def test_parts_of_blocks_need_flat_memory(self, pool: PoolAccess) -> None:
        with pool.open() as memory:
            if memory.flat is None:
                with pytest.raises(BackendError, match="moves whole blocks only"):
                    list(outgoing(memory, [4], [BLOCK], BLOCK, BLOCK))


class TestNumpyPool:
    def test_is_a_view_of_the_array(self) -> None:
        array = numbers(12)
        pool = NumpyPool(LAYOUT, 12, array)
        pool.rows[3] = 0
        assert not array[3].any()

    @pytest.mark.parametrize("bad", [numbers(11), numbers(12)[..., ::2], numbers(24)[::2]])
    def test_other_arrays_are_refused(self, bad: np.ndarray) -> None:
        with pytest.raises(ValueError, match="the pool needs"):
            NumpyPool(LAYOUT, 12, bad)

    def test_it_holds_no_jax_array(self) -> None:
        pool = NumpyPool(LAYOUT, 2)
        assert not pool.is_device_pool
        with pytest.raises(BackendError, match="holds no JAX array"):
            pool.take(0, 1)

    def test_importing_it_and_the_engine_imports_no_jax(self) -> None:
        code = (
            "import sys, transfer.testing, transfer.backends.storage; "
            "sys.exit('jax' in sys.modules)"
        )
        assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


class TestBounds:
    @pytest.mark.parametrize("interval", [(-1, 2), (0, 0), (11, 2), (12, 1)])
    def test_outside(self, interval: tuple[int, int]) -> None:
        check_bounds("a", 12, [(0, 12), (11, 1)])
        with pytest.raises(PoolBoundsError, match="which has 12 blocks"):
            check_bounds("a", 12, [(0, 1), interval])

    def test_ids(self) -> None:
        runs = [BlockRun(5, 1, 2), BlockRun(0, 9, 1)]
        assert block_ids(runs, of_source=True) == [5, 6, 0]
        assert block_ids(runs, of_source=False) == [1, 2, 9]


@partial(jax.jit, donate_argnums=0)
def touch(kv_PL2ZKH: jax.Array, block: jax.Array) -> jax.Array:
    return kv_PL2ZKH.at[block].set(1.0)


class TestJaxPool:
    @pytest.mark.parametrize("num_shards", [1, 2])
    def test_a_step_after_a_transfer_still_updates_in_place(self, num_shards: int) -> None:
        """No view of the pool stays behind, which would make the step copy it."""
        pool = jax_pool(num_shards)
        before = [s.data.unsafe_buffer_pointer() for s in pool.array.addressable_shards]
        with pool.open() as memory:
            memory.write(0, np.zeros(BLOCK, np.uint8))
            pool.update(lambda kv: touch(kv, jnp.int32(3)))
            memory.write(1, np.zeros(BLOCK, np.uint8))
        pool.update(lambda kv: touch(kv, jnp.int32(4)))
        after = [s.data.unsafe_buffer_pointer() for s in pool.array.addressable_shards]
        assert after == before
        values = np.asarray(pool.array)
        assert not values[:2].any() and (values[3:5] == 1).all()

    def test_update_with_gives_the_other_results(self) -> None:
        pool = jax_pool(1)
        address = pool.array.unsafe_buffer_pointer()
        with pool.open():
            total = pool.update_with(lambda kv: (touch(kv, jnp.int32(3)), "result"))
        assert total == "result"
        assert pool.array.unsafe_buffer_pointer() == address
        assert (np.asarray(pool.array)[3] == 1).all()

    def test_a_program_that_raises_changes_nothing(self) -> None:
        pool = jax_pool(1)

        def fail(kv: jax.Array) -> tuple[jax.Array, int]:
            raise LookupError("of the program")

        with pytest.raises(LookupError):
            pool.update_with(fail)
        np.testing.assert_array_equal(np.asarray(pool.array), numbers(12))

    @pytest.mark.parametrize("with_result", [False, True])
    def test_other_memory_waits_for_transfers_inside(self, with_result: bool) -> None:
        pool = jax_pool(1)
        order: list[str] = []

        def replace() -> None:
            if with_result:
                assert pool.update_with(lambda kv: (kv + 1, 7)) == 7
            else:
                pool.update(lambda kv: kv + 1)
            order.append("replaced")

        thread = threading.Thread(target=replace)
        with pool.open() as memory:
            thread.start()
            thread.join(0.05)
            assert memory.flat is not None and memory.flat.sum() >= 0
            order.append("transferred")
        thread.join()
        assert order == ["transferred", "replaced"]
        np.testing.assert_array_equal(np.asarray(pool.array), numbers(12) + 1)

    def test_memory_pulled_away_is_reported_on_both_sides(self) -> None:
        pool = jax_pool(1)

        def pull_away(kv: jax.Array) -> jax.Array:
            new = kv + 1
            # As if a program had taken it by donation and put its result elsewhere.
            kept.append(kv.unsafe_buffer_pointer())
            new.block_until_ready()
            kv.delete()
            return new

        kept: list[int] = []
        with (
            pytest.raises(PoolMoved, match="replaced during a transfer"),
            pool.open(),
            pytest.raises(PoolMoved, match="did not update it in place"),
        ):
            pool.update(pull_away)
        np.testing.assert_array_equal(all_bytes(pool), (numbers(12) + 1).reshape(-1).view(np.uint8))

    @pytest.mark.parametrize("num_shards", [1, 4])
    def test_take_and_put(self, num_shards: int) -> None:
        pool, other = jax_pool(num_shards), jax_pool(2, seed=3)
        pool.put(4, other.take(1, 7))
        expected = numbers(12)
        expected[4:11] = numbers(12, seed=3)[1:8]
        np.testing.assert_array_equal(np.asarray(pool.array), expected)

    def test_bfloat16_stored_as_bits(self) -> None:
        layout = KVLayout(2, 4, 4, 8, "bfloat16", 2)
        pool = JaxPool(layout, jnp.zeros(layout.pool_shape(3), jnp.uint16))
        with pool.open() as memory:
            memory.write(1, np.full(layout.bytes_per_block, 255, np.uint8))
        assert (np.asarray(pool.array)[1] == 0xFFFF).all()

    @pytest.mark.parametrize(
        ("array", "text"),
        [
            (jnp.zeros((3, 2, 2, 4, 4, 9)), "has shape"),
            (jnp.zeros(LAYOUT.pool_shape(3), jnp.uint16), "2 bytes an element"),
        ],
    )
    def test_other_arrays_are_refused(self, array: jax.Array, text: str) -> None:
        with pytest.raises(ValueError, match=text):
            JaxPool(LAYOUT, array)

    def test_other_shardings_are_refused(self) -> None:
        mesh = Mesh(np.array(jax.devices()[:2]), "x")
        for spec, text in ((PartitionSpec("x"), "KV-head axis only"), (PartitionSpec(), "replica")):
            array = jax.device_put(numbers(4), NamedSharding(mesh, spec))
            with pytest.raises(ValueError, match=text):
                JaxPool(LAYOUT, array)


def test_host_memory_is_abstract() -> None:
    with pytest.raises(TypeError):
        HostMemory()  # type: ignore[abstract]
