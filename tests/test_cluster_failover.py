"""Dispatcher, controller and membership together, over worker processes that die."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence

import pytest

from flowkv_jax.cluster.dispatcher import Dispatcher
from flowkv_jax.cluster.membership import Membership, MembershipConfig
from flowkv_jax.cluster.node_port import StopOrder
from flowkv_jax.cluster.remote_node import RemoteNode
from flowkv_jax.cluster.roster import Member
from flowkv_jax.cluster.submission import Submission
from flowkv_jax.controller.controller import Controller, StaleEpoch
from flowkv_jax.controller.routing import Placement, RouteQuery
from flowkv_jax.controller.snapshot import NodeReport
from flowkv_jax.engine.output_processor import RequestOutputState
from flowkv_jax.outputs import RequestOutput
from flowkv_jax.sampling_params import SamplingParams
from flowkv_jax.sequence import HandoffReport, SequenceUpdate
from tests.cluster_fakes import SECRET, VERSION, spec, wait_for
from tests.cluster_worker import worker_process

NUM_PROMPT = 4


class LockedController:
    """A controller under a lock, as its dispatcher and its nodes' readers share it."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.controller = Controller()
        self.epochs: dict[tuple[str, int], int] = {}

    def place(self, query: RouteQuery, now_s: float) -> Placement:
        with self.lock:
            return self.controller.place(query, now_s)

    def prefilled(self, booking: int, now_s: float) -> None:
        with self.lock:
            self.controller.prefilled(booking, now_s)

    def moved(self, booking: int, report: HandoffReport, now_s: float) -> None:
        with self.lock:
            self.controller.moved(booking, report, now_s)

    def ended(self, booking: int, now_s: float) -> None:
        with self.lock:
            self.controller.ended(booking, now_s)


class Front:
    """A `MembershipListener` that joins the pieces."""

    def __init__(self) -> None:
        self.routing = LockedController()
        self.dispatcher = Dispatcher(self.routing, max_waiting_requests=1000)
        self.membership = Membership(
            ("127.0.0.1", 0),
            SECRET,
            self,
            version=VERSION,
            config=MembershipConfig(lease_s=2.0, heartbeat_s=0.05),
            tick_s=0.05,
        )
        self.streams: dict[str, list[RequestOutput | Exception]] = {}

    def joined(self, port: RemoteNode, member: Member) -> None:
        with self.routing.lock:
            epoch = self.routing.controller.join(member.info, time.monotonic())
            self.routing.epochs[port.name, port.epoch] = epoch
        self.dispatcher.add_node(port)

    def draining(self, name: str) -> None:
        raise AssertionError("nobody drains here")

    def lost(self, name: str, reason: str) -> None:
        with self.routing.lock:
            self.routing.controller.leave(name, time.monotonic(), reason)
        self.dispatcher.lose_node(name, reason)

    def report(self, name: str, epoch: int, report: NodeReport) -> None:
        with self.routing.lock, contextlib.suppress(StaleEpoch):
            known = self.routing.epochs[name, epoch]
            self.routing.controller.report(name, known, report, time.monotonic())

    def deliver(self, name: str, updates: Sequence[SequenceUpdate]) -> Sequence[StopOrder]:
        return self.dispatcher.deliver(name, updates)

    def submit(self, request_id: str, num_tokens: int) -> None:
        params = SamplingParams(max_tokens=num_tokens, detokenize=False)
        one = spec(request_id, NUM_PROMPT, NUM_PROMPT + num_tokens, sampling_params=params)
        output = RequestOutputState(
            request_id,
            params,
            prompt=None,
            prompt_token_ids=one.prompt_token_ids,
            detokenizer=None,
        )
        stream = self.streams[request_id] = []
        self.dispatcher.submit(Submission(request_id, [one], output, stream.append))

    def pid(self, name: str) -> int:
        return next(m.join.node.pid for m in self.membership.members if m.name == name)

    def holds(self, name: str) -> bool:
        """Whether a node has been given something that it still has."""
        with self.routing.lock:
            views = self.routing.controller.snapshot(time.monotonic()).nodes
        return any(view.name == name and view.booked_work for view in views)

    def num_tokens(self, request_id: str) -> int:
        last = self.streams[request_id][-1]
        assert isinstance(last, RequestOutput)
        return len(last.outputs[0].token_ids)

    def check(self) -> None:
        """Every stream is whole: each token once, in order, and one end."""
        for request_id, stream in self.streams.items():
            outputs = [each for each in stream if isinstance(each, RequestOutput)]
            assert outputs == stream, request_id
            assert [output.finished for output in outputs[:-1]] == [False] * (len(outputs) - 1)
            assert outputs[-1].finished
            tokens = [t for output in outputs for t in output.outputs[0].delta_token_ids]
            wanted = outputs[-1].outputs[0].token_ids
            assert tokens == wanted == [NUM_PROMPT + i + 7 for i in range(len(wanted))]
            assert outputs[-1].outputs[0].finish_reason == "length"


@pytest.fixture
def front() -> Iterator[Front]:
    made = Front()
    try:
        yield made
    finally:
        made.membership.close()


def wait_until_all_are_done(front: Front) -> None:
    wait_for(lambda: front.dispatcher.tick() or front.dispatcher.num_live == 0, "all done")
    front.dispatcher.check()
    front.routing.controller.check()
    front.check()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_streams_go_on_when_a_worker_is_lost(front: Front, number: signal.Signals) -> None:
    with (
        worker_process(front.membership.address, pace_s=0.002),
        worker_process(front.membership.address, pace_s=0.002),
    ):
        wait_for(lambda: len(front.membership.members) == 2)
        for i in range(12):
            front.submit(f"r{i}", 200)
        wait_for(lambda: all(len(stream) > 5 for stream in front.streams.values()))
        assert front.holds("hybrid-0") and front.holds("hybrid-1")
        os.kill(front.pid("hybrid-0"), number)
        wait_until_all_are_done(front)
    assert {front.num_tokens(request_id) for request_id in front.streams} == {200}


def test_two_crashes_at_once(front: Front) -> None:
    with contextlib.ExitStack() as stack:
        for _ in range(3):
            stack.enter_context(worker_process(front.membership.address, pace_s=0.002))
        wait_for(lambda: len(front.membership.members) == 3)
        for i in range(12):
            front.submit(f"r{i}", 150)
        wait_for(lambda: all(len(stream) > 5 for stream in front.streams.values()))
        victims = [front.pid("hybrid-0"), front.pid("hybrid-2")]
        for pid in victims:
            os.kill(pid, signal.SIGKILL)
        wait_until_all_are_done(front)
        assert [member.name for member in front.membership.members] == ["hybrid-1"]


def test_streams_wait_out_the_loss_of_everyone(front: Front) -> None:
    with worker_process(front.membership.address):
        wait_for(lambda: front.membership.members)
        for i in range(4):
            front.submit(f"r{i}", 100)
        wait_for(lambda: all(len(stream) > 5 for stream in front.streams.values()))
        os.kill(front.pid("hybrid-0"), signal.SIGKILL)
        wait_for(lambda: not front.membership.members)
    with worker_process(front.membership.address):
        wait_until_all_are_done(front)


def test_a_worker_that_was_stopped_comes_back_and_serves(front: Front) -> None:
    with worker_process(front.membership.address) as process:
        wait_for(lambda: front.membership.members)
        front.submit("r", 150)
        wait_for(lambda: len(front.streams["r"]) > 5)
        process.send_signal(signal.SIGSTOP)
        wait_for(lambda: not front.membership.members)
        process.send_signal(signal.SIGCONT)
        wait_until_all_are_done(front)
        assert [member.epoch for member in front.membership.members] == [2]
