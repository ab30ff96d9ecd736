"""Frames and messages: what is sealed, what is refused, and that sizes are checked first."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import threading

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from transfer import messages, wire
from transfer.connection import Connection, answer, dial
from transfer.errors import (
    AuthenticationFailed,
    FrameTooLarge,
    HandshakeMismatch,
    PeerLost,
    ProtocolError,
    TransferError,
    TruncatedStream,
)
from transfer.types import BlockRun

KEY = b"k" * 32


def connected(max_frame_bytes: int = 1 << 16) -> tuple[Connection, Connection]:
    left, right = socket.socketpair()
    a = Connection(left, wire.Seal(KEY), wire.Seal(b"back"), "control", max_frame_bytes)
    b = Connection(right, wire.Seal(b"back"), wire.Seal(KEY), "control", max_frame_bytes)
    return a, b


class TestSeal:
    def test_frames_that_were_touched_are_refused(self) -> None:
        frame = wire.Seal(KEY).frame(wire.Kind.MESSAGE, b"body")
        for i in range(8, len(frame)):
            bad = bytearray(frame)
            bad[i] ^= 1
            with pytest.raises(ProtocolError, match="tag is wrong"):
                wire.Seal(KEY).check(
                    bytes(bad[: wire.HEADER_BYTES]), bytes(bad[wire.HEADER_BYTES :])
                )

    def test_repeated_dropped_and_reflected_frames_are_refused(self) -> None:
        out, into = wire.Seal(KEY), wire.Seal(KEY)
        heads = [out.header(wire.Kind.MESSAGE, 0) for _ in range(3)]
        into.check(heads[0])
        with pytest.raises(ProtocolError, match="frame 0 came where 1 was due"):
            into.check(heads[0])
        with pytest.raises(ProtocolError, match="frame 2 came where 1 was due"):
            into.check(heads[2])
        with pytest.raises(ProtocolError, match="tag is wrong"):
            wire.Seal(b"other direction").check(heads[0])

    def test_headers(self) -> None:
        head = wire.Seal(KEY).header(wire.Kind.DATA, 1000)
        assert wire.parse_header(head, 1000) == (wire.Kind.DATA, 1000)
        with pytest.raises(FrameTooLarge, match="1000 bytes exceeds the limit of 999"):
            wire.parse_header(head, 999)
        with pytest.raises(ProtocolError, match="starts? with b'GET '"):
            wire.parse_header(b"GET / HTTP/1.1\r\n".ljust(wire.HEADER_BYTES), 999)
        with pytest.raises(ProtocolError, match="unknown kind of frame 99"):
            wire.parse_header(b"FKV1" + bytes([99]) + bytes(wire.HEADER_BYTES), 999)


class TestConnection:
    @given(st.lists(st.binary(max_size=3000), min_size=1, max_size=5))
    def test_messages_arrive_whole_and_in_order(self, bodies: list[bytes]) -> None:
        a, b = connected()
        for body in bodies:
            a.send(body)
        assert [b.read() for _ in bodies] == bodies
        a.close()
        with pytest.raises(PeerLost, match="closed the connection"):
            b.read()
        b.close()

    def test_large_frames_wait_for_a_slow_reader(self) -> None:
        a, b = connected(max_frame_bytes=8 << 20)
        bodies = [bytes([i]) * (3 << 20) for i in range(4)]
        for body in bodies:
            a.send(body)
        assert [b.read() for _ in bodies] == bodies
        a.wait_writable(1)
        a.flush(1)
        a.close()
        b.close()

    def test_too_large_frames_are_refused_before_their_body(self) -> None:
        a, b = connected(max_frame_bytes=100)
        a.send(bytes(101))
        with pytest.raises(FrameTooLarge):
            b.read()
        a.close()
        b.close()

    @pytest.mark.parametrize("kept", [1, wire.HEADER_BYTES - 1, wire.HEADER_BYTES, 60])
    def test_truncated(self, kept: int) -> None:
        left, right = socket.socketpair()
        b = Connection(right, wire.Seal(KEY), wire.Seal(KEY), "control", 1000)
        left.sendall(wire.Seal(KEY).frame(wire.Kind.MESSAGE, bytes(50))[:kept])
        left.close()
        with pytest.raises(TruncatedStream):
            b.read()
        b.close()

    def test_close_wakes_a_reader(self) -> None:
        a, b = connected()
        timer = threading.Timer(0.02, b.close)
        timer.start()
        with pytest.raises(PeerLost):
            b.read()
        timer.join()
        with pytest.raises(PeerLost):
            b.send(b"x")
        a.close()


class TestOpening:
    def meet(self, ours: bytes, theirs: bytes) -> tuple[object, object]:
        """What dialler and listener get: a connection, or an error."""
        listener = socket.create_server(("127.0.0.1", 0))
        got: list[object] = []

        def listen() -> None:
            sock, _ = listener.accept()
            try:
                got.append(answer(sock, theirs, timeout_s=5, max_frame_bytes=1000))
            except TransferError as error:
                got.append(error)

        thread = threading.Thread(target=listen)
        thread.start()
        mine: object
        try:
            mine = dial(listener.getsockname(), ours, "control", timeout_s=5, max_frame_bytes=1000)
        except TransferError as error:
            mine = error
        thread.join()
        listener.close()
        return mine, got[0]

    @pytest.mark.parametrize("secret", [b"", b"shared"])
    def test_with_the_same_secret(self, secret: bytes) -> None:
        dialler, listener = self.meet(secret, secret)
        assert isinstance(dialler, Connection) and isinstance(listener, Connection)
        assert listener.purpose == "control"
        dialler.send(b"there")
        listener.send(b"back")
        assert (listener.read(), dialler.read()) == (b"there", b"back")
        dialler.close()
        listener.close()

    @pytest.mark.parametrize(("ours", "theirs"), [(b"one", b"two"), (b"", b"two"), (b"one", b"")])
    def test_with_different_secrets_both_sides_say_so(self, ours: bytes, theirs: bytes) -> None:
        dialler, listener = self.meet(ours, theirs)
        for error in (dialler, listener):
            assert isinstance(error, AuthenticationFailed)
            assert "same `secret`" in str(error)

    def test_the_listener_proves_nothing_to_a_stranger(self) -> None:
        left, right = socket.socketpair()
        thread = threading.Thread(target=self._answer_quietly, args=(right,))
        thread.start()
        hello = wire.Hello(wire.PROTOCOL_VERSION, "control", os.urandom(32))
        left.sendall(wire.opening_frame(wire.Kind.HELLO, msgspec.msgpack.encode(hello)))
        left.sendall(wire.opening_frame(wire.Kind.PROOF, bytes(32)))
        thread.join()
        received = left.recv(1 << 16)
        assert len(received) == wire.HEADER_BYTES + len(msgspec.msgpack.encode(hello)) - 7
        assert left.recv(1) == b""
        left.close()

    @pytest.mark.parametrize(
        ("sent", "error"),
        [
            (b"GET / HTTP/1.1\r\nHost: x\r\n\r\n".ljust(80), ProtocolError),
            (struct.pack(">4sB3xIQ", b"FKV1", 1, 1 << 30, 0) + bytes(32), FrameTooLarge),
            (wire.opening_frame(wire.Kind.HELLO, b"\xc1"), ProtocolError),
            (wire.opening_frame(wire.Kind.PROOF, bytes(32)), ProtocolError),
            (
                wire.opening_frame(
                    wire.Kind.HELLO, msgspec.msgpack.encode(wire.Hello(99, "", bytes(32)))
                ),
                HandshakeMismatch,
            ),
            (
                wire.opening_frame(
                    wire.Kind.HELLO,
                    msgspec.msgpack.encode(wire.Hello(wire.PROTOCOL_VERSION, "", b"short")),
                ),
                ProtocolError,
            ),
            (b"", TruncatedStream),
        ],
    )
    def test_strangers(self, sent: bytes, error: type[Exception]) -> None:
        left, right = socket.socketpair()
        left.sendall(sent)
        left.shutdown(socket.SHUT_WR)
        with pytest.raises(error):
            answer(right, b"secret", timeout_s=1, max_frame_bytes=1000)
        assert right.fileno() == -1
        left.close()

    def test_silence(self) -> None:
        left, right = socket.socketpair()
        with pytest.raises(PeerLost, match="did not open"):
            answer(right, b"secret", timeout_s=0.05, max_frame_bytes=1000)
        left.close()

    def test_one_byte_at_a_time(self) -> None:
        """The opening as a whole has a time limit, not each of its bytes."""
        left, right = socket.socketpair()
        stop = threading.Event()

        def drip() -> None:
            while not stop.wait(0.01):
                with contextlib.suppress(OSError):
                    left.send(b"F")

        thread = threading.Thread(target=drip)
        thread.start()
        with pytest.raises(PeerLost, match="did not open: timed out"):
            answer(right, b"secret", timeout_s=0.1, max_frame_bytes=1000)
        stop.set()
        thread.join()
        left.close()

    def test_nobody_there(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            address = listener.getsockname()
        with pytest.raises(PeerLost, match="cannot connect"):
            dial(address, b"", "control", timeout_s=1, max_frame_bytes=1000)

    def _answer_quietly(self, sock: socket.socket) -> None:
        with pytest.raises(AuthenticationFailed):
            answer(sock, b"secret", timeout_s=5, max_frame_bytes=1000)


class TestMessages:
    @pytest.mark.parametrize("count", [1, 16, 17, 1000])
    def test_runs(self, count: int) -> None:
        runs = tuple(BlockRun(3 * i, 5 * i, 1 + i) for i in range(count))
        assert messages.unpack_runs(messages.pack_runs(runs)) == runs

    @pytest.mark.parametrize("count", [1, 20])
    @pytest.mark.parametrize("bad", [BlockRun(-1, 0, 1), BlockRun(0, -1, 1), BlockRun(0, 0, 0)])
    def test_bad_runs(self, bad: BlockRun, count: int) -> None:
        with pytest.raises(ProtocolError, match="negative start, or a run without blocks"):
            messages.unpack_runs(messages.pack_runs((BlockRun(0, 0, 1),) * (count - 1) + (bad,)))

    @pytest.mark.parametrize("packed", [b"", b"x" * 23, b"x" * 25])
    def test_what_is_no_list_of_runs(self, packed: bytes) -> None:
        with pytest.raises(ProtocolError, match="24 a run"):
            messages.unpack_runs(packed)

    @given(st.binary(max_size=200))
    def test_noise_is_no_message(self, noise: bytes) -> None:
        with contextlib.suppress(ProtocolError):
            wire.decode(noise, messages.decoder)
