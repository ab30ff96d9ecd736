"""Passing a connection on to another peer: how a path goes through a third engine.

    source ══ connection "relay:<destination's id>" ══> relay ══ plain socket ══> destination
    source ── opening and frames of a data stream, sealed for the destination ──>

The relay has proved to the source that it knows the secret, and the other way round. After that it
copies bytes, in both directions, and understands none of them: the stream inside is opened between
source and destination, who seal and check its frames. What the relay holds of a connection is one
buffer a direction; a destination that reads slowly slows the source down.
"""

from __future__ import annotations

import socket
import threading
from contextlib import suppress

from transfer.connection import Address, Connection

PURPOSE = "relay"
_BUFFER_BYTES = 1 << 20


def purpose_for(engine_id: str) -> str:
    """Purpose of a connection that is to be passed on to that engine."""
    return f"{PURPOSE}:{engine_id}"


class ConnectionRelays:
    """Connections that this engine passes on.

    Attributes:
        num_bytes: passed on so far, both directions.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._threads: dict[threading.Thread, tuple[socket.socket, socket.socket]] = {}
        self._is_closed = False
        self.num_bytes = 0

    def pass_on(self, connection: Connection, address: Address, timeout_s: float) -> bool:
        """Copy bytes between the connection and whoever listens at the address, until either ends.

        Returns:
            False where nobody listens there; the connection is the caller's to close then.
        """
        try:
            onward = socket.create_connection(address, timeout=timeout_s)
        except OSError:
            return False
        onward.settimeout(None)
        onward.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with self._lock:
            if self._is_closed:
                onward.close()
                return False
            ends = (connection.sock, onward)
            for source, destination in (ends, ends[::-1]):
                thread = threading.Thread(
                    target=self._copy, args=(source, destination), name="transfer-relay"
                )
                self._threads[thread] = ends
                thread.start()
        return True

    def close(self) -> None:
        """End every connection and its threads. Idempotent."""
        with self._lock:
            self._is_closed = True
            threads = dict(self._threads)
        for ends in threads.values():
            _shut(*ends)
        for thread in threads:
            thread.join()

    def _copy(self, source: socket.socket, destination: socket.socket) -> None:
        buffer = memoryview(bytearray(_BUFFER_BYTES))
        with suppress(OSError):
            while count := source.recv_into(buffer):
                destination.sendall(buffer[:count])
                with self._lock:
                    self.num_bytes += count
        _shut(source, destination)
        with self._lock:
            ends = self._threads.pop(threading.current_thread())
            is_last = ends not in self._threads.values()
        if is_last:
            for sock in ends:
                sock.close()


def _shut(*socks: socket.socket) -> None:
    for sock in socks:
        with suppress(OSError):
            sock.shutdown(socket.SHUT_RDWR)
