"""Workers and a front in one process, over real sockets."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from flowkv_jax.cluster.membership import Membership
from flowkv_jax.cluster.node_port import SequenceKey, StopOrder
from flowkv_jax.controller.role import Role
from flowkv_jax.errors import FlowKVError
from flowkv_jax.worker.member import Application, Member, MemberConfig
from tests.cluster_fakes import (
    SECRET,
    VERSION,
    CountingNode,
    RecordingListener,
    application,
    spec,
    wait_for,
)

QUICK = MemberConfig(first_backoff_s=0.01, max_backoff_s=0.05, join_timeout_s=60)


class Worker:
    """A member with its node, run by a thread."""

    def __init__(
        self,
        front: Membership,
        told: Application | None = None,
        *,
        secret: bytes = SECRET,
        pace_s: float = 0.0,
        config: MemberConfig = QUICK,
    ) -> None:
        self.node = CountingNode(pace_s)
        self.member = Member(self.node, front.address, secret, told or application(), config)
        self.node.deliver = self.member.deliver
        self.outcome: str | FlowKVError | None = None
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        try:
            self.outcome = self.member.run()
        except FlowKVError as error:
            self.outcome = error

    def wait(self) -> str | FlowKVError | None:
        self._thread.join(60)
        assert not self._thread.is_alive()
        return self.outcome

    def close(self) -> None:
        self.member.stop()
        self.wait()
        self.node.close()


class Cluster:
    """A front and its workers."""

    def __init__(self, **options: Any) -> None:
        self.listener = RecordingListener()
        self.options = {"version": VERSION, **options}
        self.front = Membership(("127.0.0.1", 0), SECRET, self.listener, **self.options)
        self.workers: list[Worker] = []

    def worker(self, told: Application | None = None, **options: Any) -> Worker:
        worker = Worker(self.front, told, **options)
        self.workers.append(worker)
        return worker

    def close(self) -> None:
        for worker in self.workers:
            worker.close()
        self.front.check()
        self.front.close()
        assert self.front.members == []


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    with contextlib.closing(Cluster()) as made:
        yield made


class TestServing:
    def test_a_sequence_is_served(self, cluster: Cluster) -> None:
        cluster.worker(application(Role.PREFILL))
        port = cluster.listener.port("prefill-0")
        assert port.start([spec("s", 3, 8)]).result(0) is None
        assert cluster.listener.finished("s").finish_reason == "length"
        assert cluster.listener.tokens("s") == [3 + 7, 4 + 7, 5 + 7, 6 + 7, 7 + 7]
        assert [u.start for u in cluster.listener.updates["s"]] == [0, 1, 2, 3, 4]

    def test_orders_come_back_from_deliver(self, cluster: Cluster) -> None:
        worker = cluster.worker(pace_s=0.01)
        order = StopOrder(SequenceKey("s", 2), "stop", "END")
        cluster.listener.orders["hybrid-0"] = [order]
        cluster.listener.port("hybrid-0").start([spec("s", total=10**6, attempt=2)])
        wait_for(lambda: ("stop", [order]) in worker.node.calls)
        wait_for(lambda: worker.node.is_idle)

    def test_all_orders_arrive(self, cluster: Cluster) -> None:
        worker = cluster.worker()
        port = cluster.listener.port("hybrid-0")
        port.redirect(SequenceKey("s", 1), "decode-3")
        port.redirect(SequenceKey("s", 1), None)
        port.release("decode-3")
        port.set_role(Role.DECODE)
        wait_for(lambda: worker.node.role is Role.DECODE)
        assert worker.node.calls[1:] == [
            ("redirect", (("s", 1), "decode-3")),
            ("redirect", (("s", 1), None)),
            ("release", "decode-3"),
        ]
