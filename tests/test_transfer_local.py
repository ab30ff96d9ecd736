"""Within one process: between devices, shardings and kinds of pools, and through a relay."""

from __future__ import annotations

from collections.abc import Iterator

import jax
import numpy as np
import pytest

from tests.test_transfer_pool_access import BLOCK, LAYOUT, all_bytes, jax_pool, numbers
from transfer.backends.local import LocalBackend
from transfer.config import TransferConfig
from transfer.engine import TransferEngine
from transfer.jax_pool import JaxPool
from transfer.pool_access import NumpyPool, PoolAccess
from transfer.types import (
    BlockRun,
    Candidate,
    PathDecision,
    PathPart,
    PathType,
    TransferRequest,
    Verification,
)

KINDS = ("numpy", 1, 2, 4)


def make(kind: str | int, seed: int) -> PoolAccess:
    return (
        NumpyPool(LAYOUT, 12, numbers(12, seed))
        if kind == "numpy"
        else jax_pool(int(kind), 12, seed)
    )


def move(runs: tuple[BlockRun, ...]) -> TransferRequest:
    size = sum(run.num_blocks for run in runs) * BLOCK
    return TransferRequest("a", "b", size, runs, BLOCK, verification=Verification.CHECKSUM)


@pytest.fixture
def engine() -> Iterator[TransferEngine]:
    with TransferEngine(TransferConfig(inline_bytes=BLOCK, chunk_bytes=2 * BLOCK)) as made:
        yield made


RUNS = (BlockRun(0, 6, 5), BlockRun(7, 1, 1), BlockRun(9, 2, 2))


@pytest.mark.parametrize("there", KINDS, ids=str)
@pytest.mark.parametrize("here", KINDS, ids=str)
def test_any_pool_to_any_pool(engine: TransferEngine, there: str | int, here: str | int) -> None:
    """TP 2 -> TP 4 among them."""
    source, destination = make(there, 1), make(here, 2)
    engine.register_pool("a", source)
    engine.register_pool("b", destination)
    report = engine.submit(move(RUNS)).wait(30)
    assert report.routes == ((("a", "b"), "local"),) and report.calls == 3
    expected = numbers(12, 2)
    for src, dst, count in RUNS:
        expected[dst : dst + count] = numbers(12, 1)[src : src + count]
    np.testing.assert_array_equal(all_bytes(destination), expected.reshape(-1).view(np.uint8))
    assert engine.pinned("b", list(range(12))) == []


class RelayOnly:
    """Always through "relay"."""

    def select(self, request: TransferRequest) -> PathDecision:
        part = PathPart(("a", "relay", "b"), request.data_bytes, request.runs)
        chosen = Candidate(PathType.NVLINK_RELAY, (part,), 1.0, {}, 1.0)
        return PathDecision(request, chosen, (chosen,), "set")

    def observe(self, hops: object, data_bytes: int, seconds: float) -> None:
        pass


def test_through_a_third_device_in_chunks(
    engine: TransferEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    devices = jax.devices()
    pools = [
        JaxPool(LAYOUT, jax.device_put(numbers(12, seed), device))
        for seed, device in ((1, devices[0]), (2, devices[2]))
    ]
    engine.register_pool("a", pools[0])
    engine.register_pool("b", pools[1])
    engine.register_relay("relay", devices[1])
    engine.set_selector(RelayOnly())
    put = pools[1].put
    relayed: list[tuple[int, set[jax.Device]]] = []

    def seen(start: int, array: jax.Array) -> None:
        relayed.append((array.shape[0], array.devices()))
        put(start, array)

    monkeypatch.setattr(pools[1], "put", seen)
    report = engine.submit(move((BlockRun(0, 4, 7),))).wait(30)
    assert report.path_type is PathType.NVLINK_RELAY and report.calls == 1
    assert relayed == [(count, {devices[1]}) for count in (2, 2, 2, 1)]
    assert pools[1].array.devices() == {devices[2]}
    np.testing.assert_array_equal(np.asarray(pools[1].array)[4:11], numbers(12, 1)[:7])


def test_a_stopped_move_stops() -> None:
    calls = 0

    def check() -> None:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise KeyboardInterrupt

    from transfer.backends.base import Plan

    backend = LocalBackend({}, 1)
    source, destination = make("numpy", 1), make("numpy", 2)
    plan = Plan("t", 1, "a", "b", ("a", "b"), (BlockRun(0, 0, 4), BlockRun(4, 5, 4)), LAYOUT)
    with pytest.raises(KeyboardInterrupt):
        backend.move(source, destination, plan, check)
    expected = numbers(12, 2)
    expected[:4] = numbers(12, 1)[:4]
    np.testing.assert_array_equal(all_bytes(destination), expected.reshape(-1).view(np.uint8))
