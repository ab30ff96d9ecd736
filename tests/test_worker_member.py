"""Workers in processes of their own, and what becomes of the cluster when they end badly."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from flowkv_jax.cluster.membership import Membership, MembershipConfig
from flowkv_jax.worker.parent_watch import EXIT_ORPHANED
from tests.cluster_fakes import SECRET, VERSION, RecordingListener, spec, wait_for
from tests.cluster_worker import worker_process

LEASE_S = 2.0


@contextlib.contextmanager
def front(port: int = 0) -> Iterator[tuple[Membership, RecordingListener]]:
    listener = RecordingListener()
    membership = Membership(
        ("127.0.0.1", port),
        SECRET,
        listener,
        version=VERSION,
        config=MembershipConfig(lease_s=LEASE_S, heartbeat_s=0.05),
        tick_s=0.05,
    )
    try:
        yield membership, listener
    finally:
        membership.check()
        membership.close()


@pytest.fixture
def cluster() -> Iterator[tuple[Membership, RecordingListener]]:
    with front() as made:
        yield made


Cluster = tuple[Membership, RecordingListener]


def test_a_process_serves_and_leaves_when_asked(cluster: Cluster) -> None:
    membership, listener = cluster
    with worker_process(membership.address, role="decode") as process:
        port = listener.port("decode-0")
        port.start([spec("a", 2, 40), spec("b", 2, 30)])
        wait_for(lambda: listener.tokens("a") and listener.tokens("b"))
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
        wait_for(lambda: listener.seen("lost", "decode-0"))
    # It finished what it had, and said so before it left.
    assert len(listener.tokens("a")) == 38 and len(listener.tokens("b")) == 28
    assert listener.seen("draining", "decode-0") == [""]
    assert listener.seen("lost", "decode-0") == ["it left: drained"]


def test_a_drain_has_an_end(cluster: Cluster) -> None:
    membership, listener = cluster
    with worker_process(membership.address, drain_timeout_s=0.1) as process:
        listener.port("hybrid-0").start([spec("a", 2, 10**6)])
        wait_for(lambda: listener.tokens("a"))
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
        wait_for(lambda: listener.seen("lost", "hybrid-0"))
    assert listener.seen("lost", "hybrid-0") == ["it left: the time to drain was up"]


def test_the_front_can_have_a_worker_drain(cluster: Cluster) -> None:
    membership, listener = cluster
    with worker_process(membership.address) as process:
        listener.port("hybrid-0").drain(timeout_s=30)
        assert process.wait(60) == 0


def test_a_second_signal_stops_at_once(cluster: Cluster) -> None:
    membership, listener = cluster
    with worker_process(membership.address) as process:
        listener.port("hybrid-0").start([spec("a", 2, 10**6)])
        wait_for(lambda: listener.tokens("a"))
        process.send_signal(signal.SIGTERM)
        wait_for(lambda: listener.seen("draining", "hybrid-0"))
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
        wait_for(lambda: listener.seen("lost", "hybrid-0"))
    assert listener.seen("lost", "hybrid-0") == ["it left: stopped"]


def test_a_killed_worker_is_lost_and_its_name_comes_back(cluster: Cluster) -> None:
    membership, listener = cluster
    with (
        worker_process(membership.address, role="prefill") as process,
        worker_process(membership.address, role="decode"),
    ):
        listener.port("decode-0")
        listener.port("prefill-0").start([spec("a", 2, 10**6)])
        wait_for(lambda: listener.tokens("a"))
        process.kill()
        wait_for(lambda: listener.seen("lost", "prefill-0"))
        assert listener.seen("lost", "decode-0") == []
        with worker_process(membership.address, role="prefill"):
            assert listener.port("prefill-0").epoch == 2


def test_a_stopped_worker_is_lost_by_its_lease_and_joins_anew(cluster: Cluster) -> None:
    membership, listener = cluster
    with worker_process(membership.address) as process:
        port = listener.port("hybrid-0")
        port.start([spec("a", 2, 10**6)])
        wait_for(lambda: listener.tokens("a"))
        process.send_signal(signal.SIGSTOP)
        reason: Any = wait_for(lambda: listener.seen("lost", "hybrid-0"))[0]
        assert "silent for" in reason and "lease is 2 s" in reason
        # What is asked of the old membership goes nowhere.
        port.start([spec("late", 2, 4)])
        num_tokens = len(listener.tokens("a"))
        process.send_signal(signal.SIGCONT)
        again = listener.port("hybrid-0")
        assert again.epoch == 2
        again.start([spec("b", 2, 20)])
        assert listener.finished("b").finish_reason == "length"
    # Nothing of the time before was told: the worker gave it up.
    assert len(listener.tokens("a")) == num_tokens
    assert "late" not in listener.updates


def test_workers_find_a_front_that_restarts() -> None:
    with front() as (membership, listener):
        address = membership.address
        with worker_process(address, role="prefill"), worker_process(address, role="decode"):
            listener.port("decode-0")
            listener.port("prefill-0").start([spec("a", 2, 10**6)])
            wait_for(lambda: listener.tokens("a"))
            membership.close()
            assert {name for what, name, _ in listener.events if what == "lost"} == {
                "prefill-0",
                "decode-0",
            }
            with front(address[1]) as (_, second):
                port = second.port("prefill-0")
                assert port.epoch == 2 and second.port("decode-0").epoch == 2
                port.start([spec("b", 2, 20)])
                assert second.finished("b").finish_reason == "length"
                assert list(second.updates) == ["b"]


def test_a_refused_process_says_why(cluster: Cluster) -> None:
    membership, _ = cluster
    with worker_process(membership.address, version="9.9") as process:
        assert process.wait(60) == 2


def test_a_worker_ends_with_the_pipe_of_its_launcher(cluster: Cluster) -> None:
    membership, listener = cluster
    with worker_process(membership.address, watch_parent=True) as process:
        listener.port("hybrid-0")
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(60) == EXIT_ORPHANED
        wait_for(lambda: listener.seen("lost", "hybrid-0"))
