"""The jax_pull backend between two processes."""

from __future__ import annotations

import gc
import sys
import threading
import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import ClassVar

import numpy as np
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
)
from tests.transfer_backend_suite import Step, TransferBackendSuite, assert_same, wait_until
from transfer.backends import jax_pull
from transfer.backends.base import Peer
from transfer.backends.jax_pull import JaxPullBackend
from transfer.errors import BackendError, RequestError

References = list[weakref.ref[np.ndarray]]


@pytest.fixture(scope="module")
def here() -> Iterator[Commands]:
    before = set(threading.enumerate())
    nodes = {"a": "numpy", "a-jax": "jax", "a-sharded": "sharded"}
    commands = Commands(make_backend("jax_pull"), nodes, seed=1)
    yield commands
    commands.engine.close()
    assert set(threading.enumerate()) <= before


@pytest.fixture(scope="module")
def there(here: Commands) -> Iterator[BackendPeer]:
    nodes = {"b": "numpy", "b-jax": "jax", "b-sharded": "sharded"}
    with backend_peer("jax_pull", nodes) as peer:
        here.connect(*peer.listen())
        yield peer
        assert peer.close() == []


@pytest.fixture(autouse=True)
def copies(monkeypatch: pytest.MonkeyPatch) -> Iterator[References]:
    """References to every copy that is offered here. None outlives its transfer."""
    references: References = []
    real = jax_pull._aligned

    def aligned(size: int) -> np.ndarray:
        buffer = real(size)
        references.append(weakref.ref(buffer.base))
        return buffer

    def all_free() -> bool:
        # What JAX lets go of in a thread of its own it drops at its next call, or here.
        gc.collect()
        return all(reference() is None for reference in references)

    monkeypatch.setattr(jax_pull, "_aligned", aligned)
    yield references
    assert wait_until(all_free)


class TestJaxPull(TransferBackendSuite):
    sources: ClassVar[list[str]] = ["a", "a-jax", "a-sharded"]
    destinations: ClassVar[list[str]] = ["b", "b-jax", "b-sharded"]
    cancel_steps: ClassVar[list[Step]] = [("receive", 1), ("get", 1), ("put", 1)]
    kills_of_destination: ClassVar[list[Step]] = [("receive", 1), ("put", 1)]
    kills_of_source: ClassVar[list[Step]] = [("run", 1), ("put", 1)]

    def new_peer(self, nodes: dict[str, str]) -> AbstractContextManager[Told]:
        return backend_peer("jax_pull", nodes)


@pytest.mark.parametrize(("src", "dst"), [("a-sharded", "b"), ("a", "b-sharded")])
def test_pieces_of_blocks_need_memory_in_one_piece(
    here: Commands, there: BackendPeer, src: str, dst: str
) -> None:
    state, kind, text, _ = here.wait(here.submit(src, dst, FRAGMENTED, "layer-major"))
    assert (state, kind) == ("failed", "BackendError")
    assert "whole blocks only" in str(text)


def test_a_window_smaller_than_the_leg(
    here: Commands, there: BackendPeer, monkeypatch: pytest.MonkeyPatch, copies: References
) -> None:
    monkeypatch.setattr(jax_pull, "_WINDOW_BYTES", 6 * LAYOUT.bytes_per_block)
    there.overwrite("b", 5)
    assert here.wait(here.submit("a", "b", FRAGMENTED, "block-major"))[0] == "completed"
    assert_same(here, "a", there, "b")
    assert len(copies) == sum(count for _, _, count in FRAGMENTED)


def test_a_corrupt_byte_is_found(
    here: Commands, there: BackendPeer, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = np.copyto

    def copy_wrongly(out: np.ndarray, data: np.ndarray) -> None:
        real(out, data)
        out[7] ^= 1

    monkeypatch.setattr(jax_pull.np, "copyto", copy_wrongly)
    state, kind, _, _ = here.wait(here.submit("a", "b", [(0, 0, 40)], verify=True))
    assert (state, kind) == ("failed", "ChecksumMismatch")


def test_only_loopback_without_a_secret() -> None:
    with pytest.raises(RequestError, match=r"'192\.0\.2\.1' without a secret"):
        JaxPullBackend(CONFIG, host="192.0.2.1")
    with pytest.raises(RequestError, match="names no interface"):
        JaxPullBackend(CONFIG, host="0.0.0.0", secret="s")
    with pytest.raises(BackendError, match=r"does not start on '192\.0\.2\.1'"):
        JaxPullBackend(CONFIG, host="192.0.2.1", secret="s")


def test_servers_that_would_abort_each_other_do_not_connect(here: Commands) -> None:
    backend = here.backend
    hello = jax_pull.msgspec.msgpack.encode(("127.0.0.1:1", 5))
    peer = Peer("e", True, {"jax_pull": hello}, None)
    assert backend.why_not(peer) == "5 data sockets there, 2 here"
    assert "no such backend" in backend.why_not(Peer("e", True, {}, None))


def test_a_jax_without_transfers_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jax.experimental.transfer", None)
    with pytest.raises(BackendError, match=r"needs jax\.experimental\.transfer, of jax"):
        JaxPullBackend(CONFIG)
