"""Messages over one opened connection, read by a thread of its own. No JAX.

Who sends never waits, and never hears of a broken link in the middle of something else: `send`
gives False, the reader meets the same end, and tells the owner once through `on_end`. So owners
may send while they hold locks.

A garbage collection may close a caller's stream anywhere, in the middle of a `send` too, and that
sends as well. Frames are numbered, so a nested one would go out of turn: it is left to the outer
`send`, as is what another thread sends meanwhile.
"""

from __future__ import annotations

import logging
import socket
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Generic, TypeVar

from flowkv_jax.cluster.messages import Message, encode
from transfer.connection import Connection
from transfer.errors import PeerLost, TransferError

logger = logging.getLogger(__name__)

MessageT = TypeVar("MessageT")


class Link(Generic[MessageT]):
    """One side of a membership's connection.

    Args:
        connection: opened; owned from now on.
        decode: a frame's body to a message; raises `ProtocolError`.
    """

    def __init__(self, connection: Connection, decode: Callable[[bytes], MessageT]) -> None:
        self._connection = connection
        self._decode = decode
        self._outgoing: deque[bytes] = deque()
        self._is_sending = threading.Lock()
        self._end_lock = threading.RLock()
        self._reason: str | None = None
        self._reader: threading.Thread | None = None

    @property
    def is_open(self) -> bool:
        """False once either side has ended it."""
        return self._reason is None

    def start(
        self, on_message: Callable[[MessageT], None], on_end: Callable[[str], None], name: str
    ) -> None:
        """Read from now on. Both are called by the reader, `on_end` once and last.

        Whatever `on_message` raises ends this link alone.
        """
        self._reader = threading.Thread(target=self._read, args=(on_message, on_end), name=name)
        self._reader.start()

    def send(self, message: Message) -> bool:
        """Whether it is on its way; never blocks.

        Raises:
            TypeError: it holds what cannot be sent.
        """
        body = encode(message)
        if self._reason is not None:
            return False
        self._outgoing.append(body)
        # Whoever sends looks here again after it has let go, so nothing is left behind.
        while self._outgoing and self._is_sending.acquire(blocking=False):
            try:
                while self._outgoing:
                    self._connection.send(self._outgoing.popleft())
            except PeerLost as error:
                self._outgoing.clear()
                self.end(str(error))
            finally:
                self._is_sending.release()
        return self._reason is None

    def receive(self, timeout_s: float) -> MessageT:
        """The next message, before `start`.

        Raises:
            TransferError: the connection ended, or said what it may not.
            TimeoutError: nothing came.
        """
        self._connection.sock.settimeout(timeout_s)
        try:
            return self._decode(self._connection.read())
        finally:
            with suppress(OSError):
                self._connection.sock.settimeout(None)

    def end(self, reason: str) -> None:
        """End it from here; any thread, no waiting. The first reason stands."""
        with self._end_lock:
            if self._reason is not None:
                return
            self._reason = reason
        with suppress(OSError):
            self._connection.sock.shutdown(socket.SHUT_RDWR)

    def flush(self, timeout_s: float) -> None:
        """Wait until the operating system has all that was sent, or the time is up."""
        self._connection.flush(timeout_s)

    def close(self) -> None:
        """End it, and wait for its threads unless called from one of them. Idempotent."""
        self.end("closed here")
        if self._reader is None:
            self._connection.close()
        elif self._reader is not threading.current_thread():
            self._reader.join()

    def _read(self, on_message: Callable[[MessageT], None], on_end: Callable[[str], None]) -> None:
        try:
            while True:
                on_message(self._decode(self._connection.read()))
        except TransferError as error:
            self.end(str(error))
        except Exception as error:
            logger.exception("a message could not be handled; its connection is closed")
            self.end(f"{type(error).__name__}: {error}")
        finally:
            self._connection.close()
            on_end(self._reason or "closed")
