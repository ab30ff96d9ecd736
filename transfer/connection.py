"""A socket with the opening of `wire` behind it: sealed frames in both directions.

Sending never blocks: what the socket does not take at once waits in an outbox that a writer
thread, started when first needed, empties. So a thread that reads a connection can always answer,
and two engines that answer each other at the same time cannot deadlock.
"""

from __future__ import annotations

import os
import socket
import struct
import threading
import time
from collections import deque
from contextlib import suppress

import msgspec

from transfer.errors import (
    AuthenticationFailed,
    PeerLost,
    ProtocolError,
    TransferError,
    TruncatedStream,
)
from transfer.wire import (
    HEADER_BYTES,
    MAX_OPENING_BYTES,
    NONCE_BYTES,
    PROTOCOL_VERSION,
    Hello,
    Kind,
    Seal,
    check_proof,
    opening_frame,
    parse_header,
    proof,
    read_hello,
    seals,
)

Address = tuple[str, int]

_BUFFER_BYTES = 1 << 18
_OUTBOX_BYTES = 64 << 20


class Connection:
    """An opened connection.

    Args:
        sock: connected; owned from now on.
        out, into: seals of the two directions.
        purpose: what the dialler said it is for.
        max_frame_bytes: longest frame that `read` accepts.
    """

    def __init__(
        self, sock: socket.socket, out: Seal, into: Seal, purpose: str, max_frame_bytes: int
    ) -> None:
        self.sock = sock
        self.purpose = purpose
        self.out = out
        self.into = into
        self._max_frame_bytes = max_frame_bytes
        self._buffer = bytearray(_BUFFER_BYTES)
        self._start = self._stop = 0
        self._lock = threading.Condition()
        self._outbox: deque[memoryview] = deque()
        self._outbox_bytes = 0
        self._writer: threading.Thread | None = None
        self._closed = False

    def send(self, body: bytes) -> None:
        """Send a message; never blocks.

        Raises:
            PeerLost: the connection is closed, or the peer has stopped reading.
        """
        with self._lock:
            if self._closed:
                raise PeerLost("the connection is closed")
            rest = memoryview(self.out.frame(Kind.MESSAGE, body))
            if not self._outbox:
                sent = 0
                try:
                    sent = self.sock.send(rest, socket.MSG_DONTWAIT)
                except BlockingIOError:
                    pass
                except OSError as error:
                    raise PeerLost(f"cannot send to the peer: {error}") from None
                if sent == len(rest):
                    return
                rest = rest[sent:]
            if self._outbox_bytes > _OUTBOX_BYTES:
                raise PeerLost(f"the peer does not read: {self._outbox_bytes} bytes wait for it")
            self._outbox.append(rest)
            self._outbox_bytes += len(rest)
            if self._writer is None:
                self._writer = threading.Thread(target=self._write, name="transfer-writer")
                self._writer.start()
            self._lock.notify_all()

    def wait_writable(self, timeout_s: float) -> None:
        """Wait until the outbox is nearly empty: back-pressure for whoever starts transfers."""
        with self._lock:
            self._lock.wait_for(
                lambda: self._closed or self._outbox_bytes < _OUTBOX_BYTES // 8, timeout_s
            )

    def read(self) -> bytes:
        """The next message.

        Raises:
            PeerLost: the connection ended between two frames.
            ProtocolError, FrameTooLarge, TruncatedStream: what came is no frame.
        """
        head = self._take(HEADER_BYTES, between_frames=True)
        kind, length = parse_header(head, self._max_frame_bytes)
        if kind is not Kind.MESSAGE:
            raise ProtocolError(f"a {kind.name} frame where a message was due")
        body = self._take(length)
        self.into.check(head, body)
        return body

    def close(self) -> None:
        """Close the socket and wait for the writer. Idempotent; wakes a blocked `read`."""
        with self._lock:
            self._closed = True
            self._outbox.clear()
            self._lock.notify_all()
        with suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)
        if self._writer is not None and self._writer is not threading.current_thread():
            self._writer.join()
        self.sock.close()

    def flush(self, timeout_s: float) -> None:
        """Wait until everything is handed to the operating system, or the time is up."""
        with self._lock:
            self._lock.wait_for(lambda: self._closed or not self._outbox, timeout_s)

    def _take(self, length: int, *, between_frames: bool = False) -> bytes:
        if length > _BUFFER_BYTES:
            return self._take_large(length)
        while self._stop - self._start < length:
            if self._start + length > _BUFFER_BYTES:
                held = self._buffer[self._start : self._stop]
                self._buffer[: len(held)] = held
                self._start, self._stop = 0, len(held)
            view = memoryview(self._buffer)[self._stop :]
            count = _receive(self.sock, view)
            if count == 0:
                if between_frames and self._stop == self._start:
                    raise PeerLost("the peer closed the connection")
                raise TruncatedStream("the connection ended in the middle of a frame")
            self._stop += count
        taken = bytes(self._buffer[self._start : self._start + length])
        self._start += length
        if self._start == self._stop:
            self._start = self._stop = 0
        return taken

    def _take_large(self, length: int) -> bytes:
        body = bytearray(length)
        held = min(length, self._stop - self._start)
        body[:held] = self._buffer[self._start : self._start + held]
        self._start += held
        read_exactly(self.sock, memoryview(body)[held:])
        return bytes(body)

    def _write(self) -> None:
        while True:
            with self._lock:
                self._lock.wait_for(lambda: self._closed or bool(self._outbox))
                if self._closed:
                    return
                first = self._outbox[0]
            try:
                sent = self.sock.send(first)
            except OSError:
                # The reader sees the same end of the connection and reports it.
                return
            with self._lock:
                if not self._outbox:
                    return
                self._outbox_bytes -= sent
                if sent == len(first):
                    self._outbox.popleft()
                else:
                    self._outbox[0] = first[sent:]
                self._lock.notify_all()


def dial(
    address: Address, secret: bytes, purpose: str, *, timeout_s: float, max_frame_bytes: int
) -> Connection:
    """Connect to a listener and open the connection as its dialler.

    Raises:
        PeerLost: nobody listens there, or it does not answer in time.
        AuthenticationFailed: the secrets differ.
        HandshakeMismatch: another protocol version.
    """
    try:
        sock = socket.create_connection(address, timeout=timeout_s)
    except OSError as error:
        raise PeerLost(f"cannot connect to {address[0]}:{address[1]}: {error}") from None
    try:
        return _open(sock, secret, purpose, max_frame_bytes, f"{address[0]}:{address[1]}")
    except TransferError:
        sock.close()
        raise


def open_through(
    outer: Connection, secret: bytes, purpose: str, *, timeout_s: float, max_frame_bytes: int
) -> Connection:
    """Open a connection to whoever `outer`, just dialled, is passed on to; takes its socket over.

    Raises what `dial` does.
    """
    outer.sock.settimeout(timeout_s)
    try:
        return _open(outer.sock, secret, purpose, max_frame_bytes, "the peer behind the relay")
    except TransferError:
        outer.close()
        raise


def _open(
    sock: socket.socket, secret: bytes, purpose: str, max_frame_bytes: int, name: str
) -> Connection:
    """The dialler's side of the opening; the socket's time-out is for all of it."""
    ends_s = time.monotonic() + (sock.gettimeout() or 0.0)
    try:
        here = Hello(PROTOCOL_VERSION, purpose, os.urandom(NONCE_BYTES))
        sock.sendall(opening_frame(Kind.HELLO, msgspec.msgpack.encode(here)))
        there = read_hello(_read_opening(sock, Kind.HELLO, ends_s))
        sock.sendall(opening_frame(Kind.PROOF, proof(secret, "dialler", here, there)))
        try:
            given = _read_opening(sock, Kind.PROOF, ends_s)
        except TruncatedStream:
            raise AuthenticationFailed(
                f"{name} refused the proof; give both engines the same `secret`"
            ) from None
        check_proof(given, secret, "listener", here, there)
        _tune(sock)
    except OSError as error:
        raise PeerLost(f"{name} did not open: {error}") from None
    outward, inward = seals(secret, here, there)
    return Connection(sock, outward, inward, purpose, max_frame_bytes)


def answer(
    sock: socket.socket, secret: bytes, *, timeout_s: float, max_frame_bytes: int
) -> Connection:
    """Open an accepted connection as its listener. Closes `sock` where it raises.

    Raises:
        AuthenticationFailed, HandshakeMismatch, ProtocolError, PeerLost: who came is no peer.
    """
    ends_s = time.monotonic() + timeout_s
    try:
        there = read_hello(_read_opening(sock, Kind.HELLO, ends_s))
        here = Hello(PROTOCOL_VERSION, "", os.urandom(NONCE_BYTES))
        sock.sendall(opening_frame(Kind.HELLO, msgspec.msgpack.encode(here)))
        check_proof(_read_opening(sock, Kind.PROOF, ends_s), secret, "dialler", there, here)
        sock.sendall(opening_frame(Kind.PROOF, proof(secret, "listener", there, here)))
        _tune(sock)
    except OSError as error:
        sock.close()
        raise PeerLost(f"a connection did not open: {error}") from None
    except TransferError:
        sock.close()
        raise
    inward, outward = seals(secret, there, here)
    return Connection(sock, outward, inward, there.purpose, max_frame_bytes)


def read_exactly(sock: socket.socket, view: memoryview) -> None:
    """Fill `view`. Raises `TruncatedStream` where the connection ends before that."""
    while view:
        count = _receive(sock, view)
        if count == 0:
            raise TruncatedStream(f"the connection ended {len(view)} bytes early")
        view = view[count:]


def _read_opening(sock: socket.socket, kind: Kind, ends_s: float) -> bytes:
    """The body of a frame of the opening, which as a whole has until `ends_s`."""
    head = bytearray(HEADER_BYTES)
    _read_until(sock, memoryview(head), ends_s)
    got, length = parse_header(bytes(head), MAX_OPENING_BYTES)
    if got is not kind:
        raise ProtocolError(f"a {got.name} frame where {kind.name} was due")
    body = bytearray(length)
    _read_until(sock, memoryview(body), ends_s)
    return bytes(body)


def _read_until(sock: socket.socket, view: memoryview, ends_s: float) -> None:
    """`read_exactly` against a sender of single bytes: time is for all of them together."""
    while view:
        left_s = ends_s - time.monotonic()
        if left_s <= 0:
            raise TimeoutError("timed out")
        sock.settimeout(left_s)
        count = _receive(sock, view)
        if count == 0:
            raise TruncatedStream(f"the connection ended {len(view)} bytes early")
        view = view[count:]


def _receive(sock: socket.socket, view: memoryview) -> int:
    try:
        return sock.recv_into(view)
    except TimeoutError:
        raise
    except OSError as error:
        raise PeerLost(f"the connection broke: {error}") from None


def _tune(sock: socket.socket) -> None:
    """No more time-outs for reading, no delay for small frames; a peer that vanished is noticed."""
    sock.settimeout(None)
    if sock.family != socket.AF_UNIX:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", 30, 0))
