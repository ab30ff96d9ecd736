"""The control connection between two engines. Imports no JAX.

Both sides introduce themselves (engine, host, pools, backends) before anything else is said. If
both have pools and no pool of one could exchange blocks with any of the other, the connection is
refused on both sides with the differences named, and no byte has moved. A pair of pools that do
not fit, in engines that otherwise do, fails the one transfer that asks for them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import fields

from pallas_kernels.kv_layout import KVLayout
from transfer import messages
from transfer.connection import Address, Connection
from transfer.errors import HandshakeMismatch, PeerLost, ProtocolError, TransferError
from transfer.messages import Introduction, Message, NodeInfo, Ping
from transfer.wire import decode


def layout_differences(there: KVLayout, here: KVLayout) -> str:
    """What keeps blocks of two pools apart, such as "dtype float32 there, bfloat16 here"."""
    if there == here:
        return ""
    return ", ".join(
        f"{field.name} {getattr(there, field.name)} there, {getattr(here, field.name)} here"
        for field in fields(KVLayout)
        if getattr(there, field.name) != getattr(here, field.name)
    )


def check_nodes_fit(there: Sequence[NodeInfo], here: Sequence[NodeInfo]) -> None:
    """Raise `HandshakeMismatch` if both have pools and no two of them fit."""
    pairs = [(a, b) for a in there for b in here]
    found = [layout_differences(a.layout, b.layout) for a, b in pairs]
    if found and all(found):
        a, b = pairs[0]
        raise HandshakeMismatch(f"{a.name} and {b.name} cannot exchange blocks: {found[0]}")


class Channel:
    """An introduced connection, with the thread that reads it.

    Attributes:
        peer: what the other engine said of itself; `nodes` grows as it registers pools.
        address: where we dialled it; None where it dialled us.
        listens: where it can be dialled; None where it cannot.
        last_heard_s: when its last message came, by the engine's clock.
        may_return: once it is lost, the same engine may still be reached by another one.
        acquaintance: which one of the two engines, counted from 0, it belongs to; see `peers`.
        has_notified: a notification has gone over it, in either direction.
    """

    def __init__(self, connection: Connection, address: Address | None) -> None:
        self.address = address
        self.listens: Address | None = None
        self.last_heard_s = 0.0
        self.is_open = True
        self.may_return = True
        self.acquaintance = 0
        self.has_notified = False
        self._is_shut = False
        self._heard = threading.Event()
        self._connection = connection
        self._reader: threading.Thread | None = None
        self._error: TransferError = PeerLost("the peer closed the connection")
        self.peer: Introduction

    def introduce(self, here: Introduction, timeout_s: float) -> None:
        """Exchange introductions.

        Raises:
            HandshakeMismatch: see `check_nodes_fit`.
            PeerError: the other side said something else, or nothing.
        """
        sock = self._connection.sock
        try:
            self._connection.send(messages.encode(here))
            sock.settimeout(timeout_s)
            there = decode(self._connection.read(), messages.decoder)
            sock.settimeout(None)
            if not isinstance(there, Introduction):
                raise ProtocolError(f"a {type(there).__name__} where an introduction was due")
            check_nodes_fit(there.nodes, here.nodes)
        except TimeoutError:
            self._connection.close()
            raise PeerLost("the peer did not introduce itself in time") from None
        except TransferError:
            # The other side, which comes to the same verdict, must be able to read why.
            self._connection.flush(timeout_s)
            self._connection.close()
            raise
        self.peer = there
        if self.address is not None:
            self.listens = self.address
        elif there.port is not None:
            self.listens = (self._connection.sock.getpeername()[0], there.port)

    def start(
        self,
        on_message: Callable[[Channel, Message], None],
        on_lost: Callable[[Channel, TransferError], None],
        clock: Callable[[], float],
        prepare: Callable[[], None],
    ) -> None:
        """Read messages in a thread of their own, which calls `prepare` first, until the
        connection ends."""
        self.last_heard_s = clock()

        def read() -> None:
            error: TransferError
            prepare()
            try:
                while not self._is_shut:
                    message = decode(self._connection.read(), messages.decoder)
                    self.last_heard_s = clock()
                    on_message(self, message)
                    self._heard.set()
                error = self._error
            except TransferError as caught:
                error = caught
            except Exception as caught:
                # A bug of ours must not leave transfers that nobody answers for.
                error = TransferError(f"{type(caught).__name__}: {caught}")
            self.is_open = False
            ours = self._is_shut or isinstance(error, PeerLost)
            on_lost(self, self._error if ours else error)
            self._connection.close()
            self._heard.set()

        name = f"transfer-reader-{self.peer.engine_id[:8]}"
        self._reader = threading.Thread(target=read, name=name)
        self._reader.start()

    @property
    def has_ended(self) -> bool:
        """Whether the connection is gone and so is the thread that read it."""
        return not self.is_open and (self._reader is None or not self._reader.is_alive())

    def send(self, message: Message) -> None:
        """Send; never blocks. Raises `PeerLost` where the connection is closed."""
        self._connection.send(messages.encode(message))

    def try_send(self, message: Message) -> None:
        """Send, unless the connection is closed: then its reader reports the loss."""
        try:
            self.send(message)
        except PeerLost:
            self.is_open = False

    def wait_ready(self, timeout_s: float) -> None:
        """Wait until the peer answers, and so has taken us in.

        Raises:
            PeerLost: it does not.
        """
        self.try_send(Ping())
        if not self._heard.wait(timeout_s) or not self.is_open:
            raise PeerLost("the peer closed the connection, or does not answer")

    def wait_writable(self, timeout_s: float) -> None:
        self._connection.wait_writable(timeout_s)

    def shut(self, error: TransferError) -> None:
        """End the connection; `error` is what the engine learns. Its reader, which is not waited
        for, takes no message any more and then reports the loss."""
        self._error = error
        self.is_open = False
        self._is_shut = True
        self._connection.close()

    def close(self, error: TransferError, *, flush_s: float = 0.0) -> None:
        """End the connection as `shut` does, and wait for the reader."""
        if flush_s:
            self._connection.flush(flush_s)
        self.shut(error)
        if self._reader is not None and self._reader is not threading.current_thread():
            self._reader.join()
