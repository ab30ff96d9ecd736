"""The nixl backend between two processes, where NIXL is installed (`make test-nixl`)."""

from __future__ import annotations

import importlib.util
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import ClassVar

import pytest

from tests.transfer_backend_peer import (
    CONFIG,
    FRAGMENTED,
    LAYOUT,
    BackendPeer,
    Commands,
    Told,
    backend_peer,
    make_backend,
    make_pool,
)
from tests.transfer_backend_suite import Step, TransferBackendSuite
from transfer.backends import nixl_agent
from transfer.backends.base import Peer, Plan
from transfer.backends.nixl import NixlBackend
from transfer.errors import BackendError, PeerLost, ProtocolError
from transfer.types import BlockRun

IS_INSTALLED = any(importlib.util.find_spec(name) for name in nixl_agent._MODULES)


def test_without_nixl_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in nixl_agent._MODULES:
        monkeypatch.setitem(sys.modules, f"{name}._api", None)
    with pytest.raises(BackendError, match=r"needs NIXL: pip install 'flowkv-jax\[nixl\]'"):
        NixlBackend(CONFIG)


def test_what_nixl_itself_lacks_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def import_module(name: str) -> object:
        raise ModuleNotFoundError("No module named 'torch'", name="torch")

    monkeypatch.setattr(nixl_agent.importlib, "import_module", import_module)
    with pytest.raises(BackendError, match=r"needs NIXL \(No module named 'torch'\)"):
        NixlBackend(CONFIG)


if IS_INSTALLED:

    @pytest.fixture(scope="module")
    def here() -> Iterator[Commands]:
        before = set(threading.enumerate())
        commands = Commands(make_backend("nixl"), {"a": "numpy", "a-jax": "jax"}, seed=1)
        yield commands
        commands.engine.close()
        assert set(threading.enumerate()) <= before

    @pytest.fixture(scope="module")
    def there(here: Commands) -> Iterator[BackendPeer]:
        nodes = {"b": "numpy", "b-jax": "jax", "b-sharded": "sharded"}
        with backend_peer("nixl", nodes) as peer:
            here.connect(*peer.listen())
            yield peer
            assert peer.close() == []

    class TestNixl(TransferBackendSuite):
        sources: ClassVar[list[str]] = ["a", "a-jax"]
        destinations: ClassVar[list[str]] = ["b", "b-jax"]
        kills_of_source: ClassVar[list[Step]] = [("receive", 1)]

        def new_peer(self, nodes: dict[str, str]) -> AbstractContextManager[Told]:
            return backend_peer("nixl", nodes)

    def test_only_memory_in_one_piece(here: Commands, there: BackendPeer) -> None:
        state, kind, text, _ = here.wait(here.submit("a", "b-sharded", FRAGMENTED))
        assert (state, kind) == ("failed", "BackendError")
        assert "one piece only" in str(text)

    class NeverStopped:
        """The link of a leg that nobody cancels."""

        def put(self, body: bytes) -> None:
            raise AssertionError("nothing to say")

        def get(self, timeout_s: float | None = None) -> bytes:
            raise AssertionError("nothing to hear")

        def check(self) -> None:
            pass

        def on_stop(self, callback: Callable[[], None]) -> None:
            pass

    def test_blocks_that_were_given_up_are_not_believed() -> None:
        source, destination = NixlBackend(CONFIG), NixlBackend(CONFIG)
        pools = [make_pool("numpy", seed, lambda ids: [0] * len(ids)) for seed in (1, 2)]
        plan = Plan("t", 1, "a", "b", ("a", "b"), (BlockRun(0, 0, 4),), LAYOUT)
        peer = Peer("e", True, {"nixl": source.hello() or b""}, None)
        link = NeverStopped()
        try:
            for is_given_up in (False, True):
                half = source.offer(pools[0], plan, peer)
                if is_given_up:
                    half.close()
                    with pytest.raises(PeerLost, match="gave the blocks up"):
                        destination.receive(link, pools[1], plan, half.opening, peer)
                else:
                    assert destination.receive(link, pools[1], plan, half.opening, peer) == 1
                    half.close()
            stranger = Peer("f", True, {"nixl": b"another"}, None)
            half = source.offer(pools[0], plan, peer)
            with pytest.raises(ProtocolError, match="from 'another'"):
                destination.receive(link, pools[1], plan, half.opening, stranger)
            with pytest.raises(ProtocolError, match="cannot be read"):
                destination.receive(link, pools[1], plan, b"?", peer)
            half.close()
        finally:
            destination.close()
            source.close()
