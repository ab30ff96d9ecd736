"""The collective backend between processes of one world, which all start here together."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, nullcontext
from types import SimpleNamespace
from typing import ClassVar

import msgspec
import pytest

from tests.transfer_backend_peer import (
    CONFIG,
    FRAGMENTED,
    BackendPeer,
    Told,
    backend_peer,
)
from tests.transfer_backend_suite import Step, TransferBackendSuite, assert_same
from transfer.backends import collective
from transfer.backends.base import Peer
from transfer.backends.collective import CollectiveBackend
from transfer.backends.collective_arrays import bucket
from transfer.errors import BackendError, ProtocolError

NODES: list[dict[str, str]] = [
    {"a": "numpy", "a-jax": "jax", "a-sharded": "sharded"},
    {"b": "numpy", "b-jax": "jax", "b-sharded": "sharded"},
    {"killed-destination-0": "numpy"},
    {"killed-source-0": "numpy"},
]


@pytest.fixture(scope="module")
def world() -> Iterator[list[BackendPeer]]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        coordinator = f"127.0.0.1:{server.getsockname()[1]}"
    with ExitStack() as processes:
        peers = [
            processes.enter_context(
                backend_peer(
                    "collective",
                    nodes,
                    seed=index,
                    coordinator=coordinator,
                    index=index,
                    count=len(NODES),
                )
            )
            for index, nodes in enumerate(NODES)
        ]
        yield peers
        assert peers[0].close() == peers[1].close() == []


@pytest.fixture(scope="module")
def here(world: list[BackendPeer]) -> BackendPeer:
    return world[0]


@pytest.fixture(scope="module")
def there(world: list[BackendPeer]) -> BackendPeer:
    world[0].connect(*world[1].listen())
    return world[1]


@pytest.fixture
def victims(request: pytest.FixtureRequest, world: list[BackendPeer]) -> None:
    """Lets the suite find the processes that it may kill."""
    request.instance.victims = {
        name: peer for peer, nodes in zip(world, NODES, strict=True) for name in nodes
    }


def test_three_that_send_in_a_circle(world: list[BackendPeer], there: BackendPeer) -> None:
    a, b, c = world[:3]
    a.connect(*c.listen())
    b.connect(*c.listen())
    circle = [(a, "a", "b"), (b, "b", "killed-destination-0"), (c, "killed-destination-0", "a")]
    transfers = [
        (teller, teller.submit(src, dst, [(i, 32 + i, 1)], "aligned-runs", True))
        for i in range(8)
        for teller, src, dst in circle
    ]
    for teller, transfer in transfers:
        assert teller.wait(transfer)[0] == "completed"


@pytest.mark.usefixtures("victims")
class TestCollective(TransferBackendSuite):
    sources: ClassVar[list[str]] = ["a", "a-jax", "a-sharded"]
    destinations: ClassVar[list[str]] = ["b", "b-jax", "b-sharded"]
    cancel_steps: ClassVar[list[Step]] = [("receive", 1), ("get", 1), ("put", 1), ("get", 2)]
    kills_of_destination: ClassVar[list[Step]] = [("get", 2)]
    kills_of_source: ClassVar[list[Step]] = [("put", 2)]
    victims: dict[str, BackendPeer]

    def new_peer(self, nodes: dict[str, str]) -> AbstractContextManager[Told]:
        return nullcontext(self.victims[next(iter(nodes))])


def test_the_others_go_on_after_a_death(here: BackendPeer, there: BackendPeer) -> None:
    there.overwrite("b", 5)
    assert here.wait(here.submit("a", "b", FRAGMENTED, "aligned-runs", True))[0] == "completed"
    assert_same(here, "a", there, "b")


def test_without_a_world_the_error_says_what_to_call() -> None:
    with pytest.raises(BackendError, match=r"call jax\.distributed\.initialize"):
        CollectiveBackend(CONFIG, world="127.0.0.1:1")


def test_processes_of_other_worlds_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collective, "World", lambda: SimpleNamespace(index=0, count=2))
    backend = CollectiveBackend(CONFIG, world="w")

    def why_not(*hello: object) -> str:
        shown = msgspec.msgpack.encode(hello)
        return backend.why_not(Peer("e", True, {"collective": shown}, None))

    assert why_not("w", 1, 2) == ""
    assert why_not("v", 1, 2) == "process 1 of 2 of world 'v' there, 0 of 2 of 'w' here"
    assert why_not("w", 1, 3) == "process 1 of 3 of world 'w' there, 0 of 2 of 'w' here"
    assert why_not("w", 0, 2) == "process 0 of 2 of world 'w' there, 0 of 2 of 'w' here"
    assert "no such backend" in backend.why_not(Peer("e", True, {}, None))
    with pytest.raises(ProtocolError, match="which process of a world"):
        why_not("w")


def test_buckets_are_few_and_waste_little() -> None:
    sizes = range(1, 5000)
    assert all(size <= bucket(size) <= size * 1.25 for size in sizes)
    assert all(bucket(bucket(size)) == bucket(size) for size in sizes)
    assert len({bucket(size) for size in sizes}) < 50
