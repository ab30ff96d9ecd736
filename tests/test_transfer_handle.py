"""What a caller learns of a transfer, and when."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator

import pytest

from tests.transfer_peer import filled_pool, request, until
from transfer.callbacks import DeferringLock
from transfer.engine import TransferEngine
from transfer.errors import Cancelled, ChecksumMismatch
from transfer.handle import TransferHandle, TransferReport
from transfer.lifecycle import TransferState
from transfer.testing import Arrivals, Fault, ScriptedBackend, engine_pair
from transfer.types import MAX_TAG_CHARACTERS, PathType, TransferRequest


def a_report(name: str) -> TransferReport:
    return TransferReport(name, PathType.DIRECT, (), 1, 1, 1, 0.0, 0)


@pytest.fixture
def arrivals() -> Arrivals:
    return Arrivals()


@pytest.fixture
def hanging(arrivals: Arrivals) -> Iterator[tuple[TransferEngine, TransferEngine]]:
    """Two connected engines; what the source submits does not end by itself."""
    backend = ScriptedBackend([Fault.DESTINATION_HANGS] * 9)
    with engine_pair([backend], arrivals=arrivals) as (source, destination):
        source.register_pool("a", filled_pool(64, 1))
        destination.register_pool("b", filled_pool(64, 2))
        source.connect(destination.listen_address)
        yield source, destination


class TestDoneCallbacks:
    def test_once_each_in_order_with_the_handle(self) -> None:
        told: list[tuple[str, TransferHandle]] = []
        handle = TransferHandle("t", lambda: None)
        handle.add_done_callback(lambda h: told.append(("first", h)))
        handle.add_done_callback(lambda h: told.append(("second", h)))
        assert told == []
        handle.finish(TransferState.COMPLETED, a_report("t"), None)
        assert told == [("first", handle), ("second", handle)]
        handle.add_done_callback(lambda h: told.append((threading.current_thread().name, h)))
        assert told[2:] == [(threading.current_thread().name, handle)]

    def test_what_one_raises_is_logged_and_the_next_is_called(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        def fail(handle: TransferHandle) -> None:
            raise LookupError("of the callback")

        told: list[TransferHandle] = []
        handle = TransferHandle("t", lambda: None)
        handle.add_done_callback(fail)
        handle.add_done_callback(told.append)
        with caplog.at_level(logging.ERROR, "transfer"):
            handle.finish(TransferState.COMPLETED, a_report("t"), None)
            handle.add_done_callback(fail)
        assert told == [handle]
        assert [record.exc_info[0] for record in caplog.records if record.exc_info] == [
            LookupError,
            LookupError,
        ]

    def test_it_may_use_the_engine_from_any_thread(
        self, hanging: tuple[TransferEngine, TransferEngine]
    ) -> None:
        """No lock of the engine is held: another thread that needs them all gets them."""
        source, _ = hanging
        done = threading.Event()

        def callback(handle: TransferHandle) -> None:
            def ask() -> None:
                handle.cancel()
                source.tick()
                source.submit(request([(0, 32, 4)])).cancel()

            thread = threading.Thread(target=ask)
            thread.start()
            thread.join(10)
            if not thread.is_alive():
                done.set()

        handle = source.submit(request([(0, 0, 8)]))
        handle.add_done_callback(callback)
        handle.cancel()
        assert done.wait(10)
        with pytest.raises(Cancelled):
            handle.wait(0)

    def test_close_calls_it(self) -> None:
        with engine_pair([ScriptedBackend([Fault.DESTINATION_HANGS])]) as (source, destination):
            source.register_pool("a", filled_pool(64, 1))
            destination.register_pool("b", filled_pool(64, 2))
            source.connect(destination.listen_address)
            told: list[TransferState] = []
            source.submit(request([(0, 0, 8)])).add_done_callback(lambda h: told.append(h.state))
            source.close()
        assert told == [TransferState.FAILED]


class TestReport:
    def test_is_what_wait_gives(self) -> None:
        with TransferEngine() as engine:
            engine.register_pool("a", filled_pool(64, 1))
            engine.register_pool("b", filled_pool(64, 2))
            handle = engine.submit(request([(0, 0, 8)]))
            assert handle.wait(10) is handle.report
            assert handle.report.runs == 1

    def test_of_one_that_is_not_final(self, hanging: tuple[TransferEngine, TransferEngine]) -> None:
        handle = hanging[0].submit(request([(0, 0, 8)]))
        with pytest.raises(TimeoutError, match="is moving, not final"):
            _ = handle.report
        handle.cancel()
        with pytest.raises(Cancelled):
            handle.wait(10)
        with pytest.raises(Cancelled):
            _ = handle.report

    def test_of_one_that_failed(self) -> None:
        error = ChecksumMismatch("of the test")
        handle = TransferHandle("t", lambda: None)
        handle.finish(TransferState.FAILED, None, error)
        with pytest.raises(ChecksumMismatch):
            _ = handle.report


class TestTag:
    def test_its_length_is_bounded(self) -> None:
        TransferRequest("a", "b", 1, tag="x" * MAX_TAG_CHARACTERS)
        with pytest.raises(ValueError, match="tag has 257 characters, at most 256 are carried"):
            TransferRequest("a", "b", 1, tag="x" * 257)

    def test_the_destination_hears_it_of_a_transfer_that_fails(
        self, hanging: tuple[TransferEngine, TransferEngine], arrivals: Arrivals
    ) -> None:
        source, destination = hanging
        handle = source.submit(request([(0, 0, 8)], tag="a tag of 世界"))
        until(lambda: bool(destination.pinned("b", [0])))
        handle.cancel()
        arrival = arrivals.wait(handle.transfer)
        assert (arrival.tag, arrival.state) == ("a tag of 世界", TransferState.CANCELLED)


def test_deferred_work_waits_for_the_outermost_release() -> None:
    lock, done = DeferringLock(), []
    with lock:
        with lock:
            lock.defer(lambda: done.append(1))
        assert done == []
        lock.defer(lambda: done.append(2))
    assert done == [1, 2]
    with lock:
        pass
    assert done == [1, 2]
