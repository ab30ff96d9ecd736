"""Peers that die, hang or lie: a specific error, blocks free on both sides, nothing left."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.transfer_peer import (
    PeerProcess,
    assert_moved,
    filled_pool,
    peer_process,
    request,
    until,
)
from transfer import messages
from transfer.backends.defaults import default_backends
from transfer.config import TransferConfig
from transfer.engine import TransferEngine
from transfer.errors import (
    BackendError,
    Cancelled,
    ChecksumMismatch,
    PeerLost,
    TransferError,
)
from transfer.handle import TransferHandle
from transfer.lifecycle import TransferState
from transfer.testing import (
    Arrivals,
    Fault,
    ManualClock,
    ScriptedBackend,
    engine_pair,
    lose_messages,
)
from transfer.types import Verification

ALL = list(range(64))


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    """No thread, descriptor or shared-memory file stays behind."""
    gc.collect()
    process = psutil.Process()
    before = (set(threading.enumerate()), process.num_fds(), set(os.listdir("/dev/shm")))
    yield
    gc.collect()
    after = (set(threading.enumerate()), process.num_fds(), set(os.listdir("/dev/shm")))
    assert after == before


def scripted_engine(*faults: Fault, **config: float) -> TransferEngine:
    settings = TransferConfig(**config)  # type: ignore[arg-type]
    backends = [*default_backends(settings), ScriptedBackend(faults, name="scripted")]
    return TransferEngine(settings, backends=backends)


class TestKilledDestination:
    """kill -9 of the destination at each state; we are the source."""

    def expect_lost(self, engine: TransferEngine, handle: TransferHandle) -> None:
        with pytest.raises(PeerLost):
            handle.wait(10)
        assert handle.state is TransferState.FAILED
        assert engine.pinned("a", ALL) == []
        until(lambda: engine.peers == {})
        with pytest.raises(PeerLost, match="not connected any more"):
            engine.submit(request([(0, 0, 1)]))

    @pytest.mark.parametrize("state", ["offered", "moving", "settling"])
    def test_at(self, state: str) -> None:
        with scripted_engine(Fault.DESTINATION_HANGS) as engine, peer_process(faults=[]) as peer:
            engine.register_pool("a", filled_pool(64, 1))
            engine.connect(peer.address)
            if state == "offered":
                peer.process.send_signal(signal.SIGSTOP)
            handle = engine.submit(request([(0, 0, 8)]), backend="scripted")
            assert handle.state is TransferState.MOVING
            if state != "offered":
                until(lambda: peer.ask("pins") == "8")
            if state == "settling":
                peer.process.send_signal(signal.SIGSTOP)
                handle.cancel()
                assert handle.state is TransferState.SETTLING
            peer.kill()
            if state == "settling":
                with pytest.raises(Cancelled):
                    handle.wait(10)
                assert engine.pinned("a", ALL) == []
            else:
                self.expect_lost(engine, handle)

    @pytest.mark.parametrize("backend", ["shared_memory", "ring", "tcp", "storage"])
    def test_in_the_middle_of_a_large_move(self, backend: str, tmp_path: Path) -> None:
        pool = filled_pool(60_000, 1)
        ring, name = backend == "ring", "shared_memory" if backend == "ring" else backend
        config = TransferConfig(storage_dir=tmp_path)
        from transfer.backends.shared_memory import SharedMemoryBackend

        backends = default_backends(config)
        if ring:
            backends[0] = SharedMemoryBackend(config, single_copy=False)
        with (
            TransferEngine(config, backends=backends) as engine,
            peer_process(num_blocks=60_000, ring=ring, storage_dir=str(tmp_path)) as peer,
        ):
            engine.register_pool("a", pool)
            engine.connect(peer.address)
            peer.process.send_signal(signal.SIGSTOP)
            handle = engine.submit(request([(0, 0, 60_000)]), backend=name)
            with pytest.raises(TimeoutError):
                handle.wait(0.05)
            peer.kill()
            with pytest.raises((PeerLost, BackendError)):
                handle.wait(10)
            assert handle.state is TransferState.FAILED
            assert engine.pinned("a", ALL) == []
        assert [p for p in tmp_path.iterdir() if p.suffix in (".kv", ".part")] == []


class TestKilledSource:
    @pytest.mark.parametrize("fault", [Fault.SOURCE_HANGS, Fault.DESTINATION_HANGS])
    def test_the_destination_frees_its_blocks_and_hears_of_it(self, fault: Fault) -> None:
        arrivals = Arrivals()
        backends = [*default_backends(TransferConfig()), ScriptedBackend(name="scripted")]
        with (
            TransferEngine(backends=backends, on_arrival=arrivals) as engine,
            peer_process(faults=[fault.value]) as peer,
        ):
            engine.register_pool("a", filled_pool(64, 1))
            engine.connect(peer.address)
            name = peer.ask("submit a 0 4 8 scripted")
            until(lambda: engine.pinned("a", ALL) == list(range(4, 12)))
            peer.kill()
            arrival = arrivals.wait(name)
            assert arrival.state is TransferState.FAILED
            assert isinstance(arrival.error, PeerLost)
            assert engine.pinned("a", ALL) == []

    def test_a_restarted_peer_is_a_new_one(self) -> None:
        with TransferEngine() as engine:
            engine.register_pool("a", filled_pool(64, 1))
            engine.listen()
            ids = []
            for _ in range(2):
                with peer_process() as peer:
                    host, port = engine.listen_address
                    assert peer.ask(f"connect {host} {port}") == "a"
                    ids += engine.peers
                    engine.submit(request([(0, 0, 4)])).wait(10)
                    peer.kill()
                    until(lambda: engine.peers == {})
            assert len(set(ids)) == 2


class TestSilence:
    def test_a_stopped_peer_counts_as_lost(self) -> None:
        config = {"heartbeat_s": 0.05, "peer_timeout_s": 0.3, "handshake_timeout_s": 0.3}
        with scripted_engine(Fault.NONE, **config) as engine, peer_process(faults=[]) as peer:
            engine.register_pool("a", filled_pool(64, 1))
            engine.connect(peer.address)
            time.sleep(0.5)
            assert len(engine.peers) == 1, "an idle peer that answers is not lost"
            peer.process.send_signal(signal.SIGSTOP)
            handle = engine.submit(request([(0, 0, 8)]), backend="scripted")
            with pytest.raises(PeerLost, match="nothing came from the peer"):
                handle.wait(10)
            peer.kill()

    def test_a_peer_that_does_not_stop_is_dropped(self) -> None:
        faults = (Fault.DESTINATION_HANGS,)
        with (
            scripted_engine(*faults, settle_timeout_s=0.2, handshake_timeout_s=0.3) as engine,
            peer_process(faults=[]) as peer,
        ):
            engine.register_pool("a", filled_pool(64, 1))
            engine.connect(peer.address)
            handle = engine.submit(request([(0, 0, 8)], deadline_s=0.1), backend="scripted")
            until(lambda: peer.ask("pins") == "8")
            peer.process.send_signal(signal.SIGSTOP)
            with pytest.raises(TransferError, match="deadline"):
                handle.wait(10)
            assert engine.pinned("a", ALL) == []
            peer.kill()


class TestLostMessages:
    """A lost answer costs a question and no transfer."""

    @pytest.mark.parametrize("kind", [messages.Done, messages.Accept, messages.Failed])
    def test_answers(self, kind: type) -> None:
        clock = ManualClock()
        fault = Fault.DESTINATION_FAILS if kind is messages.Failed else Fault.NONE
        with engine_pair([ScriptedBackend([fault])], clock=clock) as (source, destination):
            a, b = filled_pool(64, 1), filled_pool(64, 2)
            source.register_pool("a", a)
            destination.register_pool("b", b)
            source.connect(destination.listen_address)
            lost = lose_messages(destination, kind, 1)
            handle = source.submit(request([(0, 0, 60)]))
            if kind is not messages.Accept:
                until(lambda: bool(lost))
                with pytest.raises(TimeoutError):
                    handle.wait(0.05)
                clock.advance(source.config.query_after_s)
                source.tick()
            if fault is Fault.NONE:
                handle.wait(10)
                assert_moved(a, b, request([(0, 0, 60)]))
            else:
                with pytest.raises(BackendError, match="the destination fails"):
                    handle.wait(10)

    def test_a_connection_that_breaks_before_the_answer(self) -> None:
        with engine_pair([ScriptedBackend()]) as (source, destination):
            a, b = filled_pool(64, 1), filled_pool(64, 2)
            source.register_pool("a", a)
            destination.register_pool("b", b)
            source.connect(destination.listen_address)
            lost = lose_messages(destination, messages.Done, 1)
            handle = source.submit(request([(0, 0, 60)]))
            until(lambda: bool(lost))
            source.disconnect(destination.engine_id)
            handle.wait(10)
            assert_moved(a, b, request([(0, 0, 60)]))
            assert list(source.peers) == [destination.engine_id]

    def test_a_connection_that_breaks_during_the_move(self) -> None:
        arrivals = Arrivals()
        backend = ScriptedBackend([Fault.DESTINATION_HANGS])
        with engine_pair([backend], arrivals=arrivals) as (source, destination):
            source.register_pool("a", filled_pool(64, 1))
            destination.register_pool("b", filled_pool(64, 2))
            source.connect(destination.listen_address)
            handle = source.submit(request([(0, 0, 60)]))
            until(lambda: destination.pinned("b", [0]) == [0])
            source.disconnect(destination.engine_id)
            with pytest.raises(PeerLost):
                handle.wait(10)
            assert arrivals.wait(handle.transfer).state is TransferState.FAILED
            assert destination.pinned("b", ALL) == []

    def test_a_cancel_that_comes_too_late(self) -> None:
        with engine_pair([ScriptedBackend()]) as (source, destination):
            source.register_pool("a", filled_pool(64, 1))
            destination.register_pool("b", filled_pool(64, 2))
            source.connect(destination.listen_address)
            lost = lose_messages(destination, messages.Done, 1)
            handle = source.submit(request([(0, 0, 60)]))
            until(lambda: bool(lost))
            handle.cancel()
            handle.wait(10)
            assert handle.state is TransferState.COMPLETED


class TestCorruption:
    def test_one_flipped_bit_is_found_with_checksums_and_retried_elsewhere(self) -> None:
        backends = [
            ScriptedBackend([Fault.CORRUPT_BYTE, Fault.CORRUPT_BYTE], name="nixl"),
            ScriptedBackend(name="tcp"),
        ]
        with engine_pair(backends) as (source, destination):
            a, b = filled_pool(64, 1), filled_pool(64, 2)
            source.register_pool("a", a)
            destination.register_pool("b", b)
            source.connect(destination.listen_address)
            req = request([(0, 0, 60)], verification=Verification.CHECKSUM)
            with pytest.raises(ChecksumMismatch, match="the bytes that arrived"):
                source.submit(req, backend="nixl").wait(10)
            report = source.submit(req).wait(10)
            assert_moved(a, b, req)
            assert report.retries == 1 and report.routes == ((("a", "b"), "tcp"),)


class TestSharedMemoryLease:
    def test_blocks_given_up_while_they_are_read_are_not_accepted(self) -> None:
        """The source ends the leg while the destination, cut off from it, still reads."""
        from transfer.backends.shared_memory import Lease

        arrivals = Arrivals()
        with engine_pair(arrivals=arrivals) as (source, destination):
            source.register_pool("a", filled_pool(64, 1))
            destination.register_pool("b", filled_pool(64, 2))
            source.connect(destination.listen_address)
            backend = source.backend("shared_memory")
            offer = backend.offer

            def offer_and_give_up(*args):  # type: ignore[no-untyped-def]
                half = offer(*args)
                lease: Lease = half._lease  # type: ignore[attr-defined]
                lease.end()
                return half

            backend.offer = offer_and_give_up  # type: ignore[method-assign]
            for blocks in (1, 60):
                handle = source.submit(request([(0, 0, blocks)]), backend="shared_memory")
                with pytest.raises(PeerLost, match="gave the blocks up"):
                    handle.wait(10)
                assert arrivals.wait(handle.transfer).state is TransferState.FAILED


def test_a_killed_peer_leaves_no_segment() -> None:
    with peer_process(ring=True) as peer:
        assert isinstance(peer, PeerProcess)
        peer.kill()
    assert not [name for name in os.listdir("/dev/shm") if "transfer" in name]
