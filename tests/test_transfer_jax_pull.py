"""The jax_pull backend between two processes."""

from __future__ import annotations

import gc
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from tests.transfer_backend_peer import (
    CONFIG,
    FRAGMENTED,
    LAYOUT,
    BackendPeer,
    Commands,
    Runs,
    backend_peer,
    ids_of,
    make_backend,
)
from transfer.backends import jax_pull
from transfer.backends.jax_pull import JaxPullBackend
from transfer.errors import BackendError, RequestError
from transfer.lifecycle import TransferState

HERE = {"a": "numpy", "a-jax": "jax", "a-sharded": "sharded"}
THERE = {"b": "numpy", "b-jax": "jax", "b-sharded": "sharded"}
NUM_BLOCKS_MOVED = sum(count for _, _, count in FRAGMENTED)


def wait_until(condition: Callable[[], bool], timeout_s: float = 10.0) -> bool:
    ends_s = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > ends_s:
            return False
        time.sleep(0.01)
    return True


@pytest.fixture(scope="module")
def here() -> Iterator[Commands]:
    commands = Commands(make_backend("jax_pull"), HERE, seed=1)
    before = set(threading.enumerate())
    yield commands
    commands.engine.close()
    assert set(threading.enumerate()) <= before


@pytest.fixture(scope="module")
def there(here: Commands) -> Iterator[BackendPeer]:
    with backend_peer("jax_pull", THERE) as peer:
        here.connect(*peer.listen())
        yield peer
        assert peer.close() == []


@pytest.fixture
def tracked(monkeypatch: pytest.MonkeyPatch) -> list[weakref.ref[np.ndarray]]:
    """References to every copy that the source makes here."""
    references = []
    real = jax_pull._aligned

    def aligned(size: int) -> np.ndarray:
        buffer = real(size)
        references.append(weakref.ref(buffer.base))
        return buffer

    monkeypatch.setattr(jax_pull, "_aligned", aligned)
    return references


def all_free(references: list[weakref.ref[np.ndarray]]) -> bool:
    # JAX drops what it has let go of in another thread at its next call, or here.
    gc.collect()
    return bool(references) and all(reference() is None for reference in references)


def assert_same(here: Commands, src: str, there: BackendPeer, dst: str, runs: Runs) -> None:
    sent = here.crc(src, ids_of(runs, of_source=True))
    assert there.crc(dst, ids_of(runs, of_source=False)) == sent


@pytest.mark.parametrize("dst", THERE)
@pytest.mark.parametrize("src", HERE)
def test_fragmented_runs_between_every_two_kinds_of_pool(
    here: Commands, there: BackendPeer, src: str, dst: str
) -> None:
    there.overwrite(dst, 3)
    untouched = there.crc(dst, [0, 1, 2, 4, 9, 17, 19, 36, 39, 45, 62])
    calls = here.metric_calls()
    done = here.wait(here.submit(src, dst, FRAGMENTED, verify=True))
    assert done == ["completed", "NoneType", "None", len(FRAGMENTED)]
    assert here.metric_calls() - calls == len(FRAGMENTED)
    assert_same(here, src, there, dst, FRAGMENTED)
    assert there.crc(dst, [0, 1, 2, 4, 9, 17, 19, 36, 39, 45, 62]) == untouched


def test_the_other_way_round(here: Commands, there: BackendPeer) -> None:
    assert there.wait(there.submit("b", "a", FRAGMENTED, "aligned-runs", True))[0] == "completed"
    sent = there.crc("b", ids_of(FRAGMENTED, of_source=True))
    assert here.crc("a", ids_of(FRAGMENTED, of_source=False)) == sent


@pytest.mark.parametrize(
    ("strategy", "calls"),
    [
        ("aligned-runs", len(FRAGMENTED)),
        ("block-major", NUM_BLOCKS_MOVED),
        ("layer-major", NUM_BLOCKS_MOVED * 2 * LAYOUT.num_layers),
    ],
)
def test_calls_of_the_three_strategies(
    here: Commands, there: BackendPeer, strategy: str, calls: int
) -> None:
    there.overwrite("b", 4)
    done = here.wait(here.submit("a", "b", FRAGMENTED, strategy, verify=True))
    assert done == ["completed", "NoneType", "None", calls]
    assert_same(here, "a", there, "b", FRAGMENTED)


@pytest.mark.parametrize(("src", "dst"), [("a-sharded", "b"), ("a", "b-sharded")])
def test_pieces_of_blocks_need_memory_in_one_piece(
    here: Commands, there: BackendPeer, src: str, dst: str
) -> None:
    state, kind, text, _ = here.wait(here.submit(src, dst, FRAGMENTED, "layer-major"))
    assert (state, kind) == ("failed", "BackendError")
    assert "whole blocks only" in str(text)


def test_a_window_smaller_than_the_leg(
    here: Commands,
    there: BackendPeer,
    monkeypatch: pytest.MonkeyPatch,
    tracked: list[weakref.ref[np.ndarray]],
) -> None:
    monkeypatch.setattr(jax_pull, "_WINDOW_BYTES", 6 * LAYOUT.bytes_per_block)
    there.overwrite("b", 5)
    assert here.wait(here.submit("a", "b", FRAGMENTED, "block-major"))[0] == "completed"
    assert_same(here, "a", there, "b", FRAGMENTED)
    assert wait_until(lambda: all_free(tracked))


def test_a_corrupt_byte_is_found(
    here: Commands, there: BackendPeer, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = np.copyto

    def copy_wrongly(there: np.ndarray, here: np.ndarray) -> None:
        real(there, here)
        there[7] ^= 1

    monkeypatch.setattr(jax_pull.np, "copyto", copy_wrongly)
    state, kind, _, _ = here.wait(here.submit("a", "b", [(0, 0, 40)], verify=True))
    assert (state, kind) == ("failed", "ChecksumMismatch")


def test_generations_are_checked_after_the_bytes(here: Commands, there: BackendPeer) -> None:
    generation = here._num_freed
    here.pause("get", 1)
    transfer = here.submit("a", "b", FRAGMENTED, generation=generation)
    assert here.paused()
    here.free_all()
    here.resume()
    state, kind, text, _ = here.wait(transfer)
    assert (state, kind) == ("failed", "StaleGeneration")
    assert "was freed" in str(text)
    there.free_all()
    fresh = here._num_freed
    assert here.wait(here.submit("a", "b", FRAGMENTED, generation=fresh))[0] == "completed"


@pytest.mark.parametrize("step", [("receive", 1), ("get", 1), ("put", 1)])
def test_cancel_leaves_nothing_offered(
    here: Commands,
    there: BackendPeer,
    tracked: list[weakref.ref[np.ndarray]],
    step: tuple[str, int],
) -> None:
    there.pause(*step)
    transfer = here.submit("a", "b", FRAGMENTED)
    assert there.paused()
    assert wait_until(lambda: bool(tracked))
    here.cancel(transfer)
    there.resume()
    assert here.wait(transfer)[0] == "cancelled"
    assert wait_until(lambda: all_free(tracked))
    assert here.num_pinned() == there.num_pinned() == 0
    assert here.wait(here.submit("a", "b", FRAGMENTED, verify=True))[0] == "completed"


def test_a_deadline_ends_the_wait_for_a_slow_peer(
    here: Commands, there: BackendPeer, tracked: list[weakref.ref[np.ndarray]]
) -> None:
    there.pause("receive", 1)
    transfer = here.submit("a", "b", FRAGMENTED, deadline_s=0.3)
    handle = here.handle(transfer)
    assert wait_until(lambda: handle.state is TransferState.SETTLING)
    there.resume()
    assert here.wait(transfer)[:2] == ["failed", "DeadlineExceeded"]
    assert wait_until(lambda: all_free(tracked))


@pytest.mark.parametrize("step", [("receive", 1), ("put", 1)])
def test_destination_is_killed(
    here: Commands, tracked: list[weakref.ref[np.ndarray]], step: tuple[str, int]
) -> None:
    with backend_peer("jax_pull", {"c": "numpy"}) as peer:
        here.connect(*peer.listen())
        peer.pause(*step)
        transfer = here.submit("a", "c", FRAGMENTED)
        assert peer.paused()
        peer.kill()
        assert here.wait(transfer)[:2] == ["failed", "PeerLost"]
    assert wait_until(lambda: all_free(tracked))
    assert here.num_pinned() == 0


@pytest.mark.parametrize("step", [("run", 1), ("get", 1)])
def test_source_is_killed(here: Commands, step: tuple[str, int]) -> None:
    with backend_peer("jax_pull", {"d": "numpy"}) as peer:
        host, port = here.listen() if not here_listens(here) else here.engine.listen_address
        peer.connect(host, port)
        peer.pause(*step)
        here.pause("put", 1)
        peer.submit("d", "a", FRAGMENTED)
        assert peer.paused()
        peer.kill()
        here.resume()
    assert wait_until(lambda: here.num_pinned() == 0)


def here_listens(here: Commands) -> bool:
    try:
        return bool(here.engine.listen_address)
    except RequestError:
        return False


def test_only_loopback_without_a_secret() -> None:
    with pytest.raises(RequestError, match=r"'192\.0\.2\.1' without a secret"):
        JaxPullBackend(CONFIG, host="192.0.2.1")
    with pytest.raises(RequestError, match="names no interface"):
        JaxPullBackend(CONFIG, host="0.0.0.0", secret="s")
    with pytest.raises(BackendError, match="does not start on '192.0.2.1'"):
        JaxPullBackend(CONFIG, host="192.0.2.1", secret="s")


def test_a_jax_without_transfers_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jax.experimental.transfer", None)
    with pytest.raises(BackendError, match="needs jax.experimental.transfer, of jax"):
        JaxPullBackend(CONFIG)
