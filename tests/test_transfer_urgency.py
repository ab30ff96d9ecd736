"""Readers that run before ordinary threads, where the system permits it."""

from __future__ import annotations

import os
import threading

import pytest

from tests.transfer_peer import assert_moved, filled_pool, request
from transfer.arrival import Arrival
from transfer.config import TransferConfig
from transfer.engine import TransferEngine
from transfer.testing import engine_pair
from transfer.urgency import make_urgent

URGENT = TransferConfig(urgent_readers=True)


def policy(thread: threading.Thread) -> int:
    assert thread.native_id is not None
    return os.sched_getscheduler(thread.native_id) & ~os.SCHED_RESET_ON_FORK


def test_readers_are_urgent_and_what_they_start_is_not() -> None:
    seen: dict[str, int] = {}
    arrived = threading.Event()

    def on_arrival(arrival: Arrival) -> None:
        reader = threading.current_thread()
        started = threading.Thread(
            target=lambda: seen.update(started=policy(threading.current_thread()))
        )
        started.start()
        started.join()
        seen["reader"] = policy(reader)
        arrived.set()

    with (
        TransferEngine(URGENT) as source,
        TransferEngine(URGENT, on_arrival=on_arrival) as destination,
    ):
        a, b = filled_pool(64, 1), filled_pool(64, 2)
        source.register_pool("a", a)
        destination.register_pool("b", b)
        source.connect(destination.listen())
        source.submit(request([(0, 0, 8)])).wait(10)
        assert_moved(a, b, request([(0, 0, 8)]))
        assert arrived.wait(10)
        refused = destination.events.snapshot("readers")
        assert seen["reader"] == (os.SCHED_OTHER if refused else os.SCHED_FIFO)
        assert seen["started"] == os.SCHED_OTHER
    assert policy(threading.current_thread()) == os.SCHED_OTHER


def test_where_the_system_refuses_the_event_log_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "sched_setscheduler", refuse)
    assert make_urgent() == "Operation not permitted: it takes CAP_SYS_NICE or RLIMIT_RTPRIO"
    with engine_pair(config=URGENT) as (source, destination):
        source.register_pool("a", filled_pool(64, 1))
        destination.register_pool("b", filled_pool(64, 2))
        source.connect(destination.listen_address)
        source.submit(request([(0, 0, 8)])).wait(10)
        assert [event.what for event in source.events.snapshot("readers")] == ["not-urgent"]
