"""Workers and a front in one process, over real sockets."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from flowkv_jax.cluster.membership import Membership
from flowkv_jax.cluster.messages import (
    MAX_FRAME_BYTES,
    PROTOCOL,
    PURPOSE,
    Expelled,
    Join,
    Leaving,
    Message,
    Ping,
    Report,
    ToWorker,
    Updates,
    Welcome,
    decode_at_front,
    decode_at_worker,
    encode,
)
from flowkv_jax.cluster.node_port import SequenceKey, StopOrder
from flowkv_jax.cluster.sequence_wire import WireUpdate
from flowkv_jax.controller.role import Role
from flowkv_jax.controller.snapshot import NodeReport
from flowkv_jax.errors import (
    ConfigError,
    DuplicateRequestError,
    EngineDeadError,
    FlowKVError,
    UnprocessableError,
    ValidationError,
)
from flowkv_jax.worker.application import Application
from flowkv_jax.worker.member import FrontNotFound, Member, State
from flowkv_jax.worker.member_config import MemberConfig
from tests.cluster_fakes import (
    SECRET,
    VERSION,
    CountingNode,
    RecordingListener,
    application,
    load,
    model_facts,
    node_facts,
    spec,
    wait_for,
)
from transfer.config import TransferConfig
from transfer.connection import Connection, dial
from transfer.errors import PeerLost
from transfer.events import EventLog
from transfer.listener import Listener

QUICK = MemberConfig(first_backoff_s=0.01, max_backoff_s=0.05, join_timeout_s=60)


class Worker:
    """A member with its node, run by a thread."""

    def __init__(
        self,
        front: Membership | Listener,
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


class RawLink:
    """A connection to the front, to say over it what no worker would."""

    def __init__(self, cluster: Cluster) -> None:
        self.connection = dial(
            cluster.front.address, SECRET, PURPOSE, timeout_s=60, max_frame_bytes=MAX_FRAME_BYTES
        )

    def send(self, message: Message) -> None:
        self.connection.send(encode(message))

    def receive(self) -> ToWorker:
        self.connection.sock.settimeout(60)
        return decode_at_worker(self.connection.read())


@contextlib.contextmanager
def raw_link(cluster: Cluster) -> Iterator[RawLink]:
    link = RawLink(cluster)
    try:
        yield link
    finally:
        link.connection.close()


@contextlib.contextmanager
def raw_member(cluster: Cluster) -> Iterator[RawLink]:
    """Of name "raw"; each is the same worker."""
    with raw_link(cluster) as link:
        link.send(
            Join(
                PROTOCOL,
                VERSION,
                "instance",
                "raw",
                False,
                0,
                Role.HYBRID,
                model_facts(),
                node_facts(),
            )
        )
        assert isinstance(link.receive(), Welcome)
        yield link


class HandClock:
    """Moves when told to."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def pass_time(cluster: Cluster, clock: HandClock, seconds: float) -> None:
    """With a look at the leases every half second."""
    for _ in range(round(seconds / 0.5)):
        clock.now_s += 0.5
        cluster.front.tick()


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


class TestJoining:
    def test_names_are_chosen_and_peers_told(self, cluster: Cluster) -> None:
        first = cluster.worker(application(Role.PREFILL))
        cluster.listener.port("prefill-0")
        second = cluster.worker(application(Role.PREFILL))
        cluster.listener.port("prefill-1")
        third = cluster.worker(application(Role.DECODE, name="big"))
        cluster.listener.port("big")
        wait_for(lambda: set(first.node.peers) == {"prefill-1", "big"})
        wait_for(lambda: set(second.node.peers) == {"prefill-0", "big"})
        wait_for(lambda: set(third.node.peers) == {"prefill-0", "prefill-1"})
        assert third.node.peers["prefill-0"].transfer_address == ("127.0.0.1", 1)
        second.close()
        wait_for(lambda: set(first.node.peers) == {"big"})
        wait_for(lambda: set(third.node.peers) == {"prefill-0"})

    def test_what_it_says_of_itself_reaches_the_controller(self, cluster: Cluster) -> None:
        cluster.worker(application(Role.PREFILL))
        cluster.listener.port("prefill-0")
        (member,) = cluster.front.members
        assert member.info.role is Role.PREFILL
        assert (member.info.num_blocks, member.info.block_size) == (64, 16)
        assert member.info.block_bytes == model_facts().layout.bytes_per_block

    def test_an_engine_that_listens_everywhere_is_reached_where_its_worker_came_from(
        self, cluster: Cluster
    ) -> None:
        cluster.worker(application(node=node_facts(transfer_address=("0.0.0.0", 77))))
        cluster.listener.port("hybrid-0")
        (member,) = cluster.front.members
        assert member.peer.transfer_address == ("127.0.0.1", 77)

    def test_reports_arrive_under_the_epoch(self, cluster: Cluster) -> None:
        cluster.worker()
        wait_for(lambda: len(cluster.listener.reports) > 2)
        names, epochs, reports = zip(*cluster.listener.reports, strict=True)
        assert set(names) == {"hybrid-0"} and set(epochs) == {1}
        assert [r.prefixes_cleared for r in reports[:3]] == [True, False, False]

    def test_two_of_the_same_name_at_once(self, cluster: Cluster) -> None:
        told = application(name="twin")
        twins = [cluster.worker(told), cluster.worker(told)]
        cluster.listener.port("twin")
        (member,) = cluster.front.members
        wait_for(lambda: sorted(twin.member.epoch for twin in twins) == [0, 1])
        # The other one waits for the name, and gets it.
        holder, other = sorted(twins, key=lambda twin: -twin.member.epoch)
        holder.close()
        wait_for(lambda: other.member.epoch == 2)
        assert cluster.listener.port("twin").epoch == 2
        assert member.epoch == 1

    @pytest.mark.parametrize(
        ("told", "named"),
        [
            ({"version": "1.2.4"}, ["flowkv version 1.2.3 in the cluster, 1.2.4 at the worker"]),
            (
                {"model": model_facts(dtype="bfloat16", dtype_bytes=2)},
                ["dtype float32 in the cluster, bfloat16 at the worker"],
            ),
            (
                {"model": model_facts(block_size=32, num_layers=3)},
                [
                    "block_size 16 in the cluster, 32 at the worker",
                    "num_layers 2 in the cluster, 3 at the worker",
                ],
            ),
            (
                {"model": msgspec.structs.replace(model_facts(), weights_digest="w1")},
                ["weights w0 in the cluster, w1 at the worker"],
            ),
        ],
    )
    def test_each_difference_is_named(
        self, cluster: Cluster, told: dict[str, Any], named: list[str]
    ) -> None:
        cluster.worker()
        cluster.listener.port("hybrid-0")
        outcome = cluster.worker(application(**told)).wait()
        assert isinstance(outcome, UnprocessableError)
        assert all(text in str(outcome) for text in named), outcome
        assert "num_kv_heads" not in str(outcome)
        assert [member.name for member in cluster.front.members] == ["hybrid-0"]

    def test_the_front_may_know_the_model(self) -> None:
        wanted = {"block_size": 8}
        with contextlib.closing(Cluster(wanted=wanted)) as cluster:
            outcome = cluster.worker().wait()
            assert isinstance(outcome, UnprocessableError)
            assert "block_size 8 in the cluster, 16 at the worker" in str(outcome)

    def test_wrong_secret(self, cluster: Cluster, caplog: pytest.LogCaptureFixture) -> None:
        outcome = cluster.worker(secret=b"guessed").wait()
        assert isinstance(outcome, UnprocessableError) and "secret" in str(outcome)
        assert cluster.listener.events == []
        refused = "a connection was refused: AuthenticationFailed"
        wait_for(lambda: refused in caplog.text, "the front says so")  # after the worker knows

    def test_a_secret_is_needed_beyond_loopback(self) -> None:
        with pytest.raises(ConfigError, match="without a secret"):
            Membership(("0.0.0.0", 0), b"", RecordingListener(), version=VERSION)

    def test_nobody_there(self) -> None:
        with contextlib.closing(Cluster()) as cluster:
            cluster.front.close()
            config = MemberConfig(join_timeout_s=0.05, first_backoff_s=0.01)
            outcome = cluster.worker(config=config).wait()
        assert isinstance(outcome, FrontNotFound) and "cannot connect" in str(outcome)

    def test_told_to_leave_before_it_joined(self) -> None:
        with contextlib.closing(Cluster()) as cluster:
            cluster.front.close()
            worker = cluster.worker()
            worker.member.drain()
            assert worker.wait() == "told to stop"


class TestEnds:
    def test_a_silent_worker_is_lost_by_the_clock(self) -> None:
        clock = HandClock()
        with contextlib.closing(Cluster(clock=clock, tick_s=None)) as cluster:
            with raw_member(cluster) as link:
                cluster.listener.port("raw")
                pass_time(cluster, clock, 3.0)
                assert cluster.front.members != []
                link.send(Report(NodeReport(load=load())))
                assert isinstance(link.receive(), Ping)
                pass_time(cluster, clock, 3.0)
                assert cluster.front.members != []
                pass_time(cluster, clock, 0.5)
                assert cluster.listener.seen("lost", "raw") == [
                    "silent for 3.5 s; its lease is 3 s"
                ]
                # It wakes up, and what it says is not heard; it is told instead.
                link.send(Updates([WireUpdate("s", 0, token_ids=(1,))]))
                answer = link.receive()
                assert isinstance(answer, Expelled) and "silent for" in answer.reason
                with pytest.raises(PeerLost):
                    link.receive()
            assert cluster.listener.updates == {}

    def test_a_front_that_stood_still_blames_nobody(self) -> None:
        clock = HandClock()
        with contextlib.closing(Cluster(clock=clock, tick_s=None)) as cluster, raw_member(cluster):
            cluster.listener.port("raw")
            clock.now_s += 600
            cluster.front.tick()
            pass_time(cluster, clock, 3.0)
            assert cluster.front.members != []
            pass_time(cluster, clock, 0.5)
            assert cluster.front.members == []

    def test_whoever_does_not_join_is_let_go(self) -> None:
        clock = HandClock()
        with (
            contextlib.closing(Cluster(clock=clock, tick_s=None)) as cluster,
            raw_link(cluster) as link,
        ):
            wait_for(lambda: cluster.front.num_connections == 1)
            pass_time(cluster, clock, 3.5)
            with pytest.raises(PeerLost):
                link.receive()

    def test_the_same_worker_joins_again_over_another_connection(self, cluster: Cluster) -> None:
        with raw_member(cluster) as first, raw_member(cluster) as second:
            wait_for(lambda: cluster.listener.seen("joined", "raw") == [1, 2])
            assert cluster.listener.seen("lost", "raw") == ["it joined anew"]
            assert isinstance(first.receive(), Expelled)
            second.send(Updates([WireUpdate("s", 0, token_ids=(1,))]))
            wait_for(lambda: cluster.listener.tokens("s") == [1])

    @pytest.mark.parametrize(
        "body",
        [
            b"",
            b"\xc1garbage",
            msgspec.msgpack.encode(["nonsense", 1]),
            msgspec.msgpack.encode(["updates", [["s", -1]]]),
            msgspec.msgpack.encode(["updates", [["s", 0, 0, [2**40]]]]),
            b"\x91" * 100_000,
        ],
    )
    def test_garbage_ends_one_connection(
        self, cluster: Cluster, caplog: pytest.LogCaptureFixture, body: bytes
    ) -> None:
        cluster.worker(pace_s=0.001)
        cluster.listener.port("hybrid-0").start([spec("s", total=10**6)])
        with raw_member(cluster) as link:
            cluster.listener.port("raw")
            link.connection.send(body)
            (reason,) = wait_for(lambda: cluster.listener.seen("lost", "raw"))
            assert "cannot be read" in str(reason)
        num_tokens = len(cluster.listener.tokens("s"))
        wait_for(lambda: len(cluster.listener.tokens("s")) > num_tokens)
        assert cluster.listener.seen("lost", "hybrid-0") == []
        assert "worker raw (epoch 1) is gone: a message that cannot be read" in caplog.text

    def test_bytes_that_are_no_frames(self, cluster: Cluster) -> None:
        with raw_member(cluster) as link:
            cluster.listener.port("raw")
            link.connection.sock.sendall(b"GET / HTTP/1.1\r\n" * 10)
            wait_for(lambda: cluster.listener.seen("lost", "raw"))
        with socket.create_connection(cluster.front.address, timeout=60) as stranger:
            stranger.sendall(b"GET / HTTP/1.1\r\nHost: front.example\r\n\r\n" + bytes(64))
            with contextlib.suppress(ConnectionResetError):
                assert stranger.recv(1) == b""
        cluster.worker()
        cluster.listener.port("hybrid-0")

    @pytest.mark.parametrize("message", [Ping(), Leaving("x", False)])
    def test_orders_are_for_the_front_to_give(self, cluster: Cluster, message: Message) -> None:
        with raw_link(cluster) as link:
            link.send(message)
            with pytest.raises(PeerLost):
                link.receive()
        assert cluster.listener.events == []

    def test_a_listener_that_fails_costs_one_connection(self, cluster: Cluster) -> None:
        cluster.worker()
        cluster.listener.port("hybrid-0")

        def deliver(name: str, updates: object) -> list[StopOrder]:
            raise KeyError("a bug")

        cluster.listener.deliver = deliver  # type: ignore[method-assign, assignment]
        with raw_member(cluster) as link:
            link.send(Updates([WireUpdate("s", 0)]))
            (reason,) = wait_for(lambda: cluster.listener.seen("lost", "raw"))
        assert "a bug" in str(reason)
        assert [member.name for member in cluster.front.members] == ["hybrid-0"]

    def test_a_worker_that_does_not_read_holds_nobody_up(self, cluster: Cluster) -> None:
        cluster.worker()
        good = cluster.listener.port("hybrid-0")
        with raw_member(cluster):
            slow = cluster.listener.port("raw")
            # 64 MiB wait for it at most; then it is given up.
            long = [spec(f"{i}", 1_000_000, 1_000_001) for i in range(3)]
            for attempt in range(100):
                if slow.start([replace(each, attempt=attempt) for each in long]).exception(0):
                    break
            wait_for(lambda: cluster.listener.seen("lost", "raw"))
            assert good.start([spec("s")]).result(0) is None
            assert cluster.listener.finished("s").finish_reason == "length"

    def test_too_long_for_a_message(
        self, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("flowkv_jax.cluster.remote_node.MAX_FRAME_BYTES", 10_000)
        cluster.worker()
        port = cluster.listener.port("hybrid-0")
        refused = port.start([spec("s", 20_000, 20_001)])
        assert isinstance(refused.exception(0), UnprocessableError)
        assert port.start([spec("s")]).result(0) is None
        cluster.listener.finished("s")

    def test_a_node_that_dies_takes_its_worker_along(self, cluster: Cluster) -> None:
        worker = cluster.worker()
        cluster.listener.port("hybrid-0")
        worker.node.is_alive = False
        assert isinstance(worker.wait(), EngineDeadError)
        wait_for(lambda: cluster.listener.seen("lost", "hybrid-0") == ["it left: its node died"])

    def test_a_front_that_falls_silent_is_left(self) -> None:
        joins: list[Join] = []
        mute: list[Connection] = []

        def welcome_and_no_more(connection: Connection) -> None:
            mute.append(connection)
            join = decode_at_front(connection.read())
            assert isinstance(join, Join)
            joins.append(join)
            connection.send(encode(Welcome("w", 1 + join.epoch, Role.HYBRID, 3.0, 0.01, [])))

        config = MemberConfig(front_timeout_s=0.1, first_backoff_s=0.01)
        events = EventLog(8, time.monotonic)
        door = Listener(("127.0.0.1", 0), SECRET, TransferConfig(), welcome_and_no_more, events)
        worker = Worker(door, config=config)
        wait_for(lambda: len(joins) >= 3)
        worker.close()
        door.close()
        for connection in mute:
            connection.close()
        assert [join.epoch for join in joins[:3]] == [0, 1, 2]
        assert worker.node.calls[:3] == [
            ("enter", ("w", 1, Role.HYBRID)),
            ("leave", "w"),
            ("enter", ("w", 2, Role.HYBRID)),
        ]


class TestRefusals:
    @pytest.mark.parametrize("name", ["a b", "a\n", "\x1b[2J", "x" * 65])
    def test_names_are_plain(self, name: str) -> None:
        with pytest.raises(ConfigError, match="letters") as caught:
            application(name=name)
        assert caught.value.parameter == "name"

    def test_what_the_node_refuses_comes_as_updates(self, cluster: Cluster) -> None:
        cluster.worker(pace_s=0.05)
        port = cluster.listener.port("hybrid-0")
        port.start([spec("s", total=1000)])
        assert port.start([spec("s", total=1000), spec("t")]).result(0) is None
        error = wait_for(lambda: cluster.listener.updates.get("t"))[0].error
        assert isinstance(error, DuplicateRequestError)

    def test_parameters_that_cannot_be_read(self, cluster: Cluster) -> None:
        worker = cluster.worker()
        port = cluster.listener.port("hybrid-0")
        bad = spec("s")
        object.__setattr__(bad.sampling_params, "temperature", 17.0)
        port.start([bad])
        error = cluster.listener.finished("s").error
        assert isinstance(error, ValidationError) and error.parameter == "temperature"
        assert worker.member.state is State.MEMBER


def test_a_message_that_is_sent_within_another_follows_it(cluster: Cluster) -> None:
    """As where a collection closes a stream in the middle of a send."""
    worker = cluster.worker()
    port = cluster.listener.port("hybrid-0")
    with cluster.front._lock:
        (guest,) = cluster.front._guests
    connection = guest.link._connection
    plain = connection.send

    def send(body: bytes) -> None:
        connection.send = plain  # type: ignore[method-assign]
        port.release("inner")
        plain(body)

    connection.send = send  # type: ignore[method-assign]
    port.release("outer")
    wait_for(lambda: len(worker.node.calls) == 3)
    assert worker.node.calls[1:] == [("release", "outer"), ("release", "inner")]
