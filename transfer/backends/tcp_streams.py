"""Data streams of the TCP backend: opened by the side that had dialled, kept, and lent to legs.

A stream that breaks or falls silent is a `BackendError`, not the loss of the peer: the control
channel may go over another link, and only its own silence says that the peer is gone. So the leg
is tried again on the next path or backend.

The receiving half judges silence. It begins once the sending half has the same streams, so bytes
are due from then on; the sending half may rightly wait for long, for a peer that has all its
workers busy. It is woken when the receiving half has told the engines of its failure.
"""

from __future__ import annotations

import itertools
import math
import socket
import struct
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from transfer.backends.base import Link, Peer
from transfer.connection import Address, Connection
from transfer.dialler import Dialler
from transfer.errors import BackendError, PeerLost, TransferError
from transfer.wire import Seal

Key = tuple[str, int]
"""(engine id of the peer, number of the stream: unique for its dialler)"""


@dataclass
class Stream:
    """An opened connection that carries chunks one way.

    Attributes:
        peer: engine id. number: unique for the stream's dialler.
        relay: the engine that passes it on; None for none.
        address: where we dialled the peer; None for a stream that it, or a relay, has dialled.
        silence_s: see `limit_silence`.
    """

    peer: str
    number: int
    sending: bool
    connection: Connection
    relay: str | None = None
    address: Address | None = None
    in_use: bool = False
    silence_s: float = math.inf

    @property
    def sock(self) -> socket.socket:
        return self.connection.sock

    @property
    def out(self) -> Seal:
        return self.connection.out

    @property
    def into(self) -> Seal:
        return self.connection.into

    def limit_silence(self, seconds: float) -> None:
        """From now on `receive` raises when nothing has come for so long."""
        self.silence_s = seconds
        # In the kernel: a time-out of Python's own would cost a poll before every call.
        limit = struct.pack("ll", int(seconds), int(seconds % 1 * 1e6))
        self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)

    def send(self, buffers: list[memoryview]) -> None:
        """Send everything. Raises `BackendError` where the stream breaks."""
        while buffers:
            try:
                count = self.sock.sendmsg(buffers)
            except BlockingIOError:
                # The connection's own limit for sending: see the module's text.
                continue
            except OSError as error:
                raise BackendError(f"a data stream broke: {error}") from None
            buffers = _after(buffers, count)

    def receive(self, buffers: list[memoryview]) -> None:
        """Fill the buffers. Raises `BackendError` where the stream breaks, ends or is silent."""
        while buffers:
            try:
                count = self.sock.recvmsg_into(buffers)[0]
            except BlockingIOError:
                raise BackendError(
                    f"nothing came over a data stream for peer_timeout_s={self.silence_s} s"
                ) from None
            except OSError as error:
                raise BackendError(f"a data stream broke: {error}") from None
            if count == 0:
                raise BackendError(f"a data stream ended {sum(map(len, buffers))} bytes early")
            buffers = _after(buffers, count)


def _after(buffers: list[memoryview], count: int) -> list[memoryview]:
    """What is left of the buffers after `count` bytes."""
    for i, buffer in enumerate(buffers):
        if count < len(buffer):
            return [buffer[count:], *buffers[i + 1 :]]
        count -= len(buffer)
    return []


class StreamLease:
    """Streams that one leg has for itself."""

    def __init__(self, owner: TcpStreams, streams: list[Stream]) -> None:
        self.streams = streams
        self._owner = owner
        self._lock = threading.Lock()
        self._is_over = False
        self._was_stopped = False

    @property
    def numbers(self) -> list[int]:
        return [stream.number for stream in self.streams]

    def stop(self) -> None:
        """Wake whoever blocks on a stream; no effect once the lease is over."""
        with self._lock:
            if self._is_over:
                return
            self._was_stopped = True
            for stream in self.streams:
                with suppress(OSError):
                    stream.sock.shutdown(socket.SHUT_RDWR)

    def end(self, *, clean: bool) -> None:
        """Make the streams idle; after a leg that failed or was stopped, close them."""
        with self._lock:
            if self._is_over:
                return
            self._is_over = True
        self._owner.give_back(self.streams, clean=clean and not self._was_stopped)


class TcpStreams:
    """All data streams of one engine.

    Args:
        name: of the backend: first word of a stream's purpose.
        wait_s: how long to wait for a stream that the peer says it has opened.
        silence_s: see `Stream.limit_silence`.
        addresses: where to dial for streams of a path, by its hops; for any other path it is
            where the engine has dialled the peer.
    """

    def __init__(
        self,
        name: str,
        wait_s: float,
        silence_s: float,
        addresses: Mapping[tuple[str, ...], Address],
    ) -> None:
        self._name = name
        self._wait_s = wait_s
        self._silence_s = silence_s
        self._addresses = dict(addresses)
        self._lock = threading.Condition()
        self._streams: dict[Key, Stream] = {}
        self._numbers = itertools.count(1)
        self._dialler: Dialler | None = None
        self._is_closed = False

    def __len__(self) -> int:
        return len(self._keys())

    def attach(self, dialler: Dialler) -> None:
        """The engine's way to open them."""
        self._dialler = dialler

    def lease(self, peer: Peer, hops: Sequence[str], count: int, *, sending: bool) -> StreamLease:
        """Idle streams to a peer that we had dialled, and new ones where they do not suffice.

        Args:
            hops: node names of the path; it may lead through another engine.
        """
        relay = None if self._dialler is None else self._dialler.relay_of(hops, peer.engine_id)
        address = None if relay else self._addresses.get(tuple(hops), peer.address)
        wanted = (peer.engine_id, sending, relay, address)
        with self._lock:
            idle = [
                stream
                for stream in self._streams.values()
                if (stream.peer, stream.sending, stream.relay, stream.address) == wanted
                and not stream.in_use
            ][:count]
            for stream in idle:
                stream.in_use = True
        try:
            while len(idle) < count:
                idle.append(self._open(peer.engine_id, sending, relay, address))
        except TransferError:
            self.give_back(idle, clean=True)
            raise
        return StreamLease(self, idle)

    def take(self, engine_id: str, numbers: list[int], link: Link) -> StreamLease:
        """The streams that the peer, which had dialled, has chosen; waits for new ones."""
        keys = [(engine_id, number) for number in numbers]

        def ready() -> bool:
            found = [self._streams.get(key) for key in keys]
            return all(stream is not None and not stream.in_use for stream in found)

        if not numbers or len(set(numbers)) != len(numbers):
            raise BackendError(f"the peer chose streams {numbers}")
        with self._lock:
            if not self._lock.wait_for(lambda: self._is_closed or ready(), self._wait_s):
                link.check()
                raise BackendError(f"streams {numbers} of the peer did not arrive")
            link.check()
            if self._is_closed:
                raise BackendError("the backend is closed")
            streams = [self._streams[key] for key in keys]
            for stream in streams:
                stream.in_use = True
        return StreamLease(self, streams)

    def accept(self, connection: Connection) -> bool:
        """A stream that a peer has opened. False where its purpose is not one."""
        words = connection.purpose.split(":")
        if len(words) != 4 or words[2] not in ("send", "receive") or not words[3].isdecimal():
            return False
        _, engine_id, direction, number = words
        stream = Stream(engine_id, int(number), direction == "receive", connection)
        stream.limit_silence(self._silence_s)
        with self._lock:
            if self._is_closed or (engine_id, stream.number) in self._streams:
                return False
            self._streams[engine_id, stream.number] = stream
            self._lock.notify_all()
        return True

    def give_back(self, streams: list[Stream], *, clean: bool) -> None:
        """Make streams idle, or close them after a leg that failed."""
        ended = []
        with self._lock:
            for stream in streams:
                stream.in_use = False
                key = (stream.peer, stream.number)
                if not clean:
                    self._streams.pop(key, None)
                if self._streams.get(key) is not stream:
                    ended.append(stream)
            self._lock.notify_all()
        for stream in ended:
            stream.connection.close()

    def drop(self, engine_id: str) -> None:
        """Close a peer's streams; a leg that still uses one fails."""
        self._close_all([key for key in self._keys() if key[0] == engine_id])

    def close(self) -> None:
        """Close every stream."""
        with self._lock:
            self._is_closed = True
            self._lock.notify_all()
        self._close_all(self._keys())

    def _keys(self) -> list[Key]:
        with self._lock:
            return list(self._streams)

    def _close_all(self, keys: list[Key]) -> None:
        for key in keys:
            with self._lock:
                stream = self._streams.pop(key, None)
                if stream is None:
                    continue
                with suppress(OSError):
                    stream.sock.shutdown(socket.SHUT_RDWR)
                # One in use is closed by its leg: its descriptor must not be reused under it.
                in_use = stream.in_use
            if not in_use:
                stream.connection.close()

    def _open(
        self, engine_id: str, sending: bool, relay: str | None, address: Address | None
    ) -> Stream:
        if self._dialler is None or (relay is None and address is None):
            raise BackendError("no way to open a data stream to the peer")
        number = next(self._numbers)
        direction = "send" if sending else "receive"
        purpose = f"{self._name}:{self._dialler.engine_id}:{direction}:{number}"
        try:
            if address is not None:
                connection = self._dialler.dial(address, purpose)
            else:
                assert relay is not None
                connection = self._dialler.dial_through(relay, engine_id, purpose)
        except PeerLost as error:
            raise BackendError(f"cannot open a data stream: {error}") from None
        stream = Stream(engine_id, number, sending, connection, relay, address, in_use=True)
        stream.limit_silence(self._silence_s)
        with self._lock:
            self._streams[engine_id, number] = stream
        return stream
