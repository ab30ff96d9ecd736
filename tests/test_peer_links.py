"""What is said to a worker that is being dialled waits, in order; what cannot be said is told."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest

from flowkv_jax.cluster.messages import Peer
from flowkv_jax.handoff.exchange import Exchange
from flowkv_jax.worker import peer_links
from flowkv_jax.worker.peer_links import PeerLinks
from tests.cluster_fakes import wait_for
from transfer.connection import Address
from transfer.errors import PeerLost, UnknownNode

A = Peer("a", 1, ("host", 1))
A_ANEW = Peer("a", 2, ("host", 2))


class FakeTransfers:
    """Engines by address; dialling one waits until it may."""

    def __init__(self) -> None:
        self.may_answer = threading.Event()
        self.is_there = True
        self.dialled: list[Address] = []
        self.hung_up: list[str] = []
        self.said: list[tuple[str, bytes]] = []
        self.engine_of: dict[str, str] = {}

    def connect(self, address: Address) -> None:
        self.dialled.append(address)
        assert self.may_answer.wait(60)
        if not self.is_there:
            raise PeerLost("nobody")
        self.engine_of["a"] = f"engine-{address[1]}"

    def peer_of(self, node: str) -> str | None:
        return self.engine_of.get(node)

    def disconnect(self, engine_id: str) -> None:
        self.hung_up.append(engine_id)
        self.engine_of.clear()

    def notify(self, node: str, payload: bytes) -> None:
        if node not in self.engine_of:
            raise UnknownNode(node)
        self.said.append((node, payload))


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_links, "_PAUSE_S", 0.0)


@pytest.fixture
def transfers() -> FakeTransfers:
    return FakeTransfers()


@pytest.fixture
def unreachable() -> list[str]:
    return []


@pytest.fixture
def links(transfers: FakeTransfers, unreachable: list[str]) -> Iterator[PeerLinks]:
    exchange: Any = SimpleNamespace(transfers=transfers)
    made = PeerLinks(cast(Exchange, exchange), unreachable.append)
    yield made
    transfers.may_answer.set()
    made.close()


def test_what_is_said_waits_for_the_connection(links: PeerLinks, transfers: FakeTransfers) -> None:
    links.want(A)
    for payload in (b"1", b"2"):
        links.notify("a", payload)
    assert transfers.said == []
    transfers.may_answer.set()
    wait_for(lambda: transfers.said == [("a", b"1"), ("a", b"2")])
    links.notify("a", b"3")
    assert transfers.said[-1] == ("a", b"3")


def test_whom_nobody_named_is_unknown_at_once(links: PeerLinks) -> None:
    with pytest.raises(UnknownNode):
        links.notify("b", b"")


def test_one_who_has_dialled_us_is_not_dialled(links: PeerLinks, transfers: FakeTransfers) -> None:
    transfers.engine_of["a"] = "its own"
    links.want(A)
    links.notify("a", b"1")
    wait_for(lambda: transfers.said)
    assert transfers.dialled == []


def test_who_cannot_be_reached_is_told_if_anything_was_to_be_said(
    links: PeerLinks, transfers: FakeTransfers, unreachable: list[str]
) -> None:
    transfers.is_there = False
    links.want(A)
    links.notify("a", b"1")
    transfers.may_answer.set()
    wait_for(lambda: unreachable == ["a"])
    assert len(transfers.dialled) == 5
    with pytest.raises(UnknownNode):
        links.notify("a", b"2")


def test_one_that_comes_anew_is_dialled_anew(links: PeerLinks, transfers: FakeTransfers) -> None:
    transfers.may_answer.set()
    links.want(A)
    wait_for(lambda: transfers.engine_of)
    links.drop(A)
    links.want(A_ANEW)
    links.notify("a", b"new")
    wait_for(lambda: transfers.said)
    assert transfers.dialled == [A.transfer_address, A_ANEW.transfer_address]
    assert transfers.hung_up == ["engine-1"]
    links.drop(A)  # stale
    assert links.names == ["a"]


def test_one_that_left_while_it_was_dialled(
    links: PeerLinks, transfers: FakeTransfers, unreachable: list[str]
) -> None:
    links.want(A)
    wait_for(lambda: transfers.dialled)
    links.notify("a", b"1")
    links.drop(A)
    transfers.may_answer.set()
    wait_for(lambda: transfers.hung_up)
    assert transfers.said == [] and unreachable == [] and links.names == []
