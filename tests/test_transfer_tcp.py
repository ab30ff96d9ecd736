"""The TCP backend's streams: what a tampered, cut or foreign one gets, and that they are reused."""

from __future__ import annotations

import os
import select
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack

import numpy as np
import pytest

from tests.transfer_peer import LAYOUT, assert_moved, filled_pool, request
from transfer import wire
from transfer.backends.base import Plan
from transfer.backends.tcp import TcpBackend, _chunks_of, _Receiving, _Sending
from transfer.backends.tcp_streams import Stream
from transfer.config import TransferConfig
from transfer.connection import Connection, dial
from transfer.engine import TransferEngine
from transfer.errors import BackendError, PeerLost, ProtocolError, TransferError
from transfer.pool_access import NumpyPool
from transfer.testing import engine_pair
from transfer.types import (
    BlockRun,
    Candidate,
    PathDecision,
    PathPart,
    PathType,
    TransferRequest,
    Verification,
)

KEY = b"k" * 32
RUNS = (BlockRun(0, 30, 20), BlockRun(40, 2, 3), BlockRun(60, 60, 1))
PLAN = Plan("t", 7, "a", "b", ("a", "b"), RUNS, LAYOUT)


def stream_pair() -> tuple[Stream, Stream]:
    left, right = socket.socketpair()
    ends = []
    for sock, sending in ((left, True), (right, False)):
        connection = Connection(sock, wire.Seal(KEY), wire.Seal(KEY), "tcp", 1000)
        ends.append(Stream("peer", 1, sending, connection))
    return ends[0], ends[1]


@pytest.fixture
def streams() -> Iterator[tuple[Stream, Stream]]:
    pair = stream_pair()
    yield pair
    for stream in pair:
        stream.connection.close()


def receive(stream: Stream, plan: Plan = PLAN) -> None:
    pool = filled_pool(64, 2)
    with pool.open() as memory:
        _Receiving(memory, plan, _chunks_of(plan)).run([stream], lambda: None)


def send_to(stream: Stream, plan: Plan = PLAN) -> None:
    pool = filled_pool(64, 1)
    with pool.open() as memory:
        _Sending(memory, plan, _chunks_of(plan)).run([stream], lambda: None)


class TestFrames:
    def sent(self, plan: Plan = PLAN) -> bytes:
        """What a whole leg looks like on the wire."""
        left, right = stream_pair()
        send_to(left, plan)
        left.connection.close()
        data = b""
        while more := right.sock.recv(1 << 20):
            data += more
        right.connection.close()
        return data

    def fed(self, streams: tuple[Stream, Stream], data: bytes) -> None:
        streams[0].sock.sendall(data)
        streams[0].sock.shutdown(socket.SHUT_WR)
        receive(streams[1])

    def test_what_is_sent_is_understood(self, streams: tuple[Stream, Stream]) -> None:
        self.fed(streams, self.sent())

    def test_headers_cannot_be_changed(self, streams: tuple[Stream, Stream]) -> None:
        data = bytearray(self.sent())
        data[wire.HEADER_BYTES + 15] ^= 1
        with pytest.raises(ProtocolError, match="tag is wrong"):
            self.fed(streams, bytes(data))

    @pytest.mark.parametrize("kept", [10, wire.HEADER_BYTES + 16, 5000, -1])
    def test_a_cut_stream(self, streams: tuple[Stream, Stream], kept: int) -> None:
        with pytest.raises(BackendError, match="ended .* bytes early|chunks never came"):
            self.fed(streams, self.sent()[:kept])

    def test_a_stream_of_another_leg(self, streams: tuple[Stream, Stream]) -> None:
        other = Plan("t", 8, "a", "b", ("a", "b"), RUNS, LAYOUT)
        with pytest.raises(ProtocolError, match="a frame of leg 8 on a stream of leg 7"):
            self.fed(streams, self.sent(other))

    @pytest.mark.parametrize(
        ("index", "size", "text"),
        [
            (99, 24 * LAYOUT.bytes_per_block, "chunk 99 of 1 came again, or is none"),
            (0, 100, "chunk 0 came with 100 bytes"),
            (0, 1 << 30, "exceeds the limit"),
            ((1 << 64) - 1, 0, "1 chunks never came"),
        ],
    )
    def test_chunks_that_do_not_exist(
        self, streams: tuple[Stream, Stream], index: int, size: int, text: str
    ) -> None:
        where = (7).to_bytes(8, "little") + index.to_bytes(8, "little")
        head = wire.Seal(KEY).header(wire.Kind.DATA, size, where) + where
        with pytest.raises(ProtocolError, match=text):
            self.fed(streams, head)


def test_a_large_leg_uses_its_streams_and_the_next_one_the_same() -> None:
    config = TransferConfig(streams=3)
    with engine_pair(config=config) as (source, destination):
        a, b = filled_pool(4000, 1), filled_pool(4000, 2)
        source.register_pool("a", a)
        destination.register_pool("b", b)
        source.connect(destination.listen_address)
        backend = source.backend("tcp")
        assert isinstance(backend, TcpBackend)
        for _ in range(3):
            b.rows[:] = 0
            source.submit(request([(0, 0, 4000)]), backend="tcp").wait(10)
            np.testing.assert_array_equal(a.rows, b.rows)
            assert backend.num_streams == 3
        for _ in range(3):
            destination.submit(request([(0, 0, 4000)], "b", "a"), backend="tcp").wait(10)
            assert backend.num_streams == 6, "the other direction has its own"


def test_a_broken_stream_fails_the_leg_and_is_replaced() -> None:
    with engine_pair() as (source, destination):
        a, b = filled_pool(4000, 1), filled_pool(4000, 2)
        source.register_pool("a", a)
        destination.register_pool("b", b)
        source.connect(destination.listen_address)
        req = request([(0, 0, 4000)])
        source.submit(req, backend="tcp").wait(10)
        backend = source.backend("tcp")
        assert isinstance(backend, TcpBackend)
        backend.peer_lost(destination.engine_id)
        assert backend.num_streams == 0
        source.submit(req, backend="tcp").wait(10)
        assert_moved(a, b, req)


def test_streams_need_the_secret_and_a_purpose() -> None:
    with TransferEngine(secret="right") as engine:
        address = engine.listen()
        options = {"timeout_s": 5.0, "max_frame_bytes": 1000}
        with pytest.raises(TransferError):
            dial(address, b"wrong", "tcp:x:send:1", **options)  # type: ignore[arg-type]
        for purpose in ("tcp:x:sideways:1", "tcp:x:send", "nothing:x:send:1"):
            connection = dial(address, b"right", purpose, **options)  # type: ignore[arg-type]
            with pytest.raises(PeerLost):
                connection.read()
            connection.close()


def test_cancel_wakes_streams_that_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """The destination reads nothing; both halves sit in the socket until they are stopped."""
    from transfer.backends import tcp

    hold = threading.Event()
    monkeypatch.setattr(tcp._Receiving, "_claim", lambda self, i, n: hold.wait(10) and None)
    before = len(os.listdir("/proc/self/fd"))
    with engine_pair() as (source, destination):
        source.register_pool("a", filled_pool(20_000, 1))
        destination.register_pool("b", filled_pool(20_000, 2))
        source.connect(destination.listen_address)
        handle = source.submit(request([(0, 0, 20_000)]), backend="tcp")
        with pytest.raises(TimeoutError):
            handle.wait(0.1)
        handle.cancel()
        hold.set()
        with pytest.raises(TransferError):
            handle.wait(10)
        assert destination.pinned("b", [0, 19_999]) == []
    assert len(os.listdir("/proc/self/fd")) == before


class ThroughX:
    """A selector that always goes over x, if it can."""

    def select(self, req: TransferRequest) -> PathDecision:
        def candidate(kind: PathType, *hops: str) -> Candidate:
            return Candidate(kind, (PathPart(hops, req.data_bytes, req.runs),), 1.0, {}, 1.0)

        relayed = candidate(PathType.CROSS_NODE_RELAY, req.src, "x", req.dst)
        direct = candidate(PathType.DIRECT, req.src, req.dst)
        return PathDecision(req, relayed, (relayed, direct), "set")

    def observe(self, hops: object, data_bytes: int, seconds: float) -> None:
        pass


class TestThroughAThirdEngine:
    @pytest.mark.parametrize("relay_dials", [True, False])
    def test_both_ways(self, relay_dials: bool) -> None:
        config = TransferConfig(inline_bytes=1024)
        with ExitStack() as stack:
            source, relay, destination = (
                stack.enter_context(TransferEngine(config, secret="s", selector=ThroughX()))
                for _ in range(3)
            )
            pools = [filled_pool(3000, seed) for seed in range(3)]
            named = zip("axb", (source, relay, destination), pools, strict=True)
            for node, engine, pool in named:
                engine.register_pool(node, pool)
                engine.listen()
            if relay_dials:
                relay.connect(destination.listen_address)
            else:
                destination.connect(relay.listen_address)
            source.connect(relay.listen_address)
            source.connect(destination.listen_address)
            req = request([(0, 0, 3000)], verification=Verification.CHECKSUM)
            for _ in range(2):
                report = source.submit(req, backend="tcp").wait(20)
                assert (report.path_type, report.retries) == (PathType.CROSS_NODE_RELAY, 0)
            assert_moved(pools[0], pools[2], req)
            assert relay.bytes_passed_on > 2 * req.data_bytes

    def test_where_the_relay_does_not_know_the_destination(self) -> None:
        config = TransferConfig(inline_bytes=1024)
        with (
            TransferEngine(config, selector=ThroughX()) as source,
            TransferEngine(config) as relay,
            TransferEngine(config) as destination,
        ):
            for node, engine in (("a", source), ("x", relay), ("b", destination)):
                engine.register_pool(node, filled_pool(300, 1))
                engine.listen()
            source.connect(relay.listen_address)
            source.connect(destination.listen_address)
            report = source.submit(request([(0, 0, 300)]), backend="tcp").wait(20)
            assert (report.path_type, report.retries) == (PathType.DIRECT, 1)


class TestAFailedLink:
    """Data streams of one path fail while the control channel is well."""

    CONFIG = TransferConfig(inline_bytes=1024, heartbeat_s=0.1, peer_timeout_s=0.4)

    @pytest.fixture
    def pools(self) -> tuple[NumpyPool, NumpyPool]:
        return filled_pool(300, 1), filled_pool(300, 2)

    @pytest.fixture
    def engines(
        self, pools: tuple[NumpyPool, NumpyPool]
    ) -> Iterator[tuple[TransferEngine, TransferEngine]]:
        with (
            TransferEngine(self.CONFIG, selector=ThroughX()) as source,
            TransferEngine(self.CONFIG, selector=ThroughX()) as destination,
        ):
            source.register_pool("a", pools[0])
            destination.register_pool("b", pools[1])
            source.connect(destination.listen())
            yield source, destination

    def fail_path_over_x(self, monkeypatch: pytest.MonkeyPatch, way: str) -> None:
        send = _Sending._send

        def failing(sending: _Sending, stream: Stream) -> None:
            if "x" in sending._plan.hops:
                if way == "broken":
                    stream.sock.shutdown(socket.SHUT_RDWR)
                else:
                    # Says nothing until the leg is stopped, which shuts the socket.
                    select.select([stream.sock], [], [])
            send(sending, stream)

        monkeypatch.setattr(_Sending, "_send", failing)

    @pytest.mark.parametrize("way", ["silent", "broken"])
    @pytest.mark.parametrize("from_dialler", [True, False])
    def test_the_next_path_is_taken(
        self,
        engines: tuple[TransferEngine, TransferEngine],
        pools: tuple[NumpyPool, NumpyPool],
        monkeypatch: pytest.MonkeyPatch,
        way: str,
        from_dialler: bool,
    ) -> None:
        self.fail_path_over_x(monkeypatch, way)
        engine, (src, dst) = (engines[0], "ab") if from_dialler else (engines[1], "ba")
        report = engine.submit(request([(0, 0, 300)], src, dst), backend="tcp").wait(20)
        assert (report.path_type, report.retries) == (PathType.DIRECT, 1)
        assert all(len(engine.peers) == 1 for engine in engines)
        np.testing.assert_array_equal(pools[0].rows, pools[1].rows)

    def test_without_another_path_the_error_tells(
        self, engines: tuple[TransferEngine, TransferEngine], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(
            _Sending, "_send", lambda self, stream: select.select([stream.sock], [], [])
        )
        source, destination = engines
        source.set_selector(None)
        handle = source.submit(request([(0, 0, 300)]), backend="tcp")
        with pytest.raises(BackendError, match="nothing came over a data stream"):
            handle.wait(20)
        assert len(source.peers) == len(destination.peers) == 1
        assert source.pinned("a", [0]) == destination.pinned("b", [0]) == []

    def test_an_address_where_nobody_listens(
        self, engines: tuple[TransferEngine, TransferEngine]
    ) -> None:
        source, _ = engines
        with socket.create_server(("127.0.0.1", 0)) as closed:
            address = closed.getsockname()
        source.add_backend(TcpBackend(self.CONFIG, {("a", "x", "b"): address}))
        report = source.submit(request([(0, 0, 300)]), backend="tcp").wait(20)
        assert (report.path_type, report.retries) == (PathType.DIRECT, 1)
