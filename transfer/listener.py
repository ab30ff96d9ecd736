"""Accepts connections, and lets only those in that prove themselves."""

from __future__ import annotations

import ipaddress
import socket
import threading
from collections.abc import Callable
from contextlib import suppress

from transfer.config import TransferConfig
from transfer.connection import Address, Connection, answer
from transfer.errors import RequestError, TransferError
from transfer.events import EventLog

MAX_OPENING = 32
"""Connections that may be in their opening at once: strangers cannot use up all the threads."""


class Listener:
    """A listening socket and the thread that accepts.

    Args:
        address: port 0 for any free one.
        secret: empty for none; then `address` must be loopback.
        on_connection: called with each opened connection, in a thread of its own; owns it.

    Raises:
        RequestError: another address than loopback, without a secret.
    """

    def __init__(
        self,
        address: Address,
        secret: bytes,
        config: TransferConfig,
        on_connection: Callable[[Connection], None],
        events: EventLog,
    ) -> None:
        if not secret and not is_loopback(address[0]):
            raise RequestError(
                f"listening on {address[0]!r} without a secret would let anyone write into the "
                "pools: give a `secret`, or listen on 127.0.0.1"
            )
        self._secret = secret
        self._config = config
        self._on_connection = on_connection
        self._events = events
        self._lock = threading.Lock()
        self._opening: dict[threading.Thread, socket.socket] = {}
        self._is_closed = False
        family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        self._sock = socket.create_server(address, family=family, backlog=64)
        self.address: Address = self._sock.getsockname()[:2]
        self._thread = threading.Thread(target=self._accept, name="transfer-accept")
        self._thread.start()

    def close(self) -> None:
        """Stop accepting; waits for openings to end. Idempotent."""
        with self._lock:
            self._is_closed = True
            opening = dict(self._opening)
        with suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()
        self._thread.join()
        for thread, sock in opening.items():
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            thread.join()

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._sock.accept()
            except OSError:
                if self._is_closed:
                    return
                continue
            thread = threading.Thread(target=self._open, args=(sock,), name="transfer-opening")
            with self._lock:
                if self._is_closed or len(self._opening) >= MAX_OPENING:
                    sock.close()
                    continue
                self._opening[thread] = sock
            thread.start()

    def _open(self, sock: socket.socket) -> None:
        try:
            connection = answer(
                sock,
                self._secret,
                timeout_s=self._config.handshake_timeout_s,
                max_frame_bytes=self._config.max_frame_bytes,
            )
            self._on_connection(connection)
        except TransferError as error:
            self._events.add("listener", "refused", f"{type(error).__name__}: {error}")
        finally:
            with self._lock:
                self._opening.pop(threading.current_thread(), None)


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach an address; no name but localhost is known to be one."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
