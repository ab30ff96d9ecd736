"""How an engine meets others, and how it parts from them. Imports no JAX.

Whoever dials introduces itself first; both sides take the channel in, unless `peers` refuses it,
and start its reader. A reader that ends reports its channel as lost. If that was the last one to
the engine, and we had dialled it, and transfers to it are in flight, it is dialled once more, to
ask what became of them. Then the program is told of the loss, whether the engine was reached
again or not: on the other side it has been told of ours.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress

from transfer import messages
from transfer.callbacks import call_back
from transfer.channel import Channel
from transfer.connection import Address, Connection
from transfer.dialler import Dialler
from transfer.errors import PeerLost, TransferError
from transfer.host import host_id
from transfer.listener import Listener
from transfer.notifications import PeerLoss
from transfer.outgoing import Outgoing
from transfer.receiver import Receiver
from transfer.relay import PURPOSE as RELAY
from transfer.relay import ConnectionRelays
from transfer.runtime import Runtime
from transfer.sender import Sender
from transfer.urgency import make_urgent

CONTROL = "control"


class Peering:
    """Connections of one engine.

    Args:
        on_message: gets every message but those of the handshake, in the reader's thread.
        on_peer_lost: see `notifications`.
    """

    def __init__(
        self,
        runtime: Runtime,
        dialler: Dialler,
        sender: Sender,
        receiver: Receiver,
        on_message: Callable[[Channel, messages.Message], None],
        on_peer_lost: Callable[[PeerLoss], object],
    ) -> None:
        self._runtime = runtime
        self._dialler = dialler
        self._sender = sender
        self._receiver = receiver
        self._on_message = on_message
        self._on_peer_lost = on_peer_lost
        self._started_ns = time.time_ns()
        self._connecting = threading.Lock()
        self._passed_on = ConnectionRelays()
        self._is_closed = False
        self.listener: Listener | None = None

    @property
    def bytes_passed_on(self) -> int:
        return self._passed_on.num_bytes

    def connect(self, address: Address) -> Channel:
        """The channel to the engine that listens there; a new one unless there is one.

        Raises:
            AuthenticationFailed, HandshakeMismatch, PeerLost: see `transfer.errors`.
        """
        with self._connecting:
            for channel in self._runtime.peers.all():
                if channel.address == address and channel.is_open:
                    return channel
            channel, here = self._dial(address)
            self._take_in(channel, here)
            self._wait_ready(channel)
            return channel

    def on_connection(self, connection: Connection) -> None:
        """A peer, or a data stream of one, has proved itself at the listener."""
        if connection.purpose == CONTROL:
            channel = Channel(connection, None)
            here = self._introduction()
            channel.introduce(here, self._runtime.config.handshake_timeout_s)
            self._take_in(channel, here)
            return
        word, _, rest = connection.purpose.partition(":")
        if word == RELAY:
            to = self._runtime.peers.channel(rest)
            onward = None if to is None else to.listens
            is_taken = onward is not None and self._passed_on.pass_on(
                connection, onward, self._runtime.config.handshake_timeout_s
            )
        else:
            backend = self._runtime.backends.get(word)
            is_taken = backend is not None and backend.accept_stream(connection)
        if not is_taken:
            connection.close()

    def tick(self) -> None:
        """Probe peers that are silent, and drop those that stay so."""
        config, now = self._runtime.config, self._runtime.clock()
        for channel in self._runtime.peers.all():
            silent_s = now - channel.last_heard_s
            if silent_s >= config.peer_timeout_s:
                channel.shut(PeerLost(f"nothing came from the peer for {silent_s:.1f} s"))
            elif silent_s >= config.heartbeat_s:
                channel.try_send(messages.Ping())

    def stop_meeting(self) -> None:
        """Accept nobody any more, and tell of no loss."""
        self._is_closed = True
        self._runtime.peers.close()
        if self.listener is not None:
            self.listener.close()

    def close(self, error: TransferError) -> None:
        """Say goodbye to every peer, and wait for the threads of all connections."""
        for channel in self._runtime.peers.not_ended():
            channel.try_send(messages.Bye())
            channel.close(error, flush_s=1.0)
        self._passed_on.close()

    def _nodes(self) -> list[messages.NodeInfo]:
        with self._runtime.lock:
            return [
                messages.NodeInfo(name, pool.access.layout, pool.access.num_blocks)
                for name, pool in self._runtime.pools.items()
            ]

    def _introduction(self) -> messages.Introduction:
        with self._runtime.lock:
            hellos = {name: b.hello() for name, b in self._runtime.backends.items()}
        return messages.Introduction(
            engine_id=self._runtime.engine_id,
            host_id=host_id(),
            nodes=self._nodes(),
            backends={name: hello for name, hello in hellos.items() if hello is not None},
            started_ns=self._started_ns,
            partings=self._runtime.peers.partings,
            port=None if self.listener is None else self.listener.address[1],
        )

    def _dial(self, address: Address) -> tuple[Channel, messages.Introduction]:
        channel = Channel(self._dialler.dial(address, CONTROL), address)
        here = self._introduction()
        channel.introduce(here, self._runtime.config.handshake_timeout_s)
        return channel, here

    def _take_in(self, channel: Channel, here: messages.Introduction) -> None:
        def start() -> None:
            self._runtime.events.add(channel.peer.engine_id, "connected")
            channel.start(self._on_message, self._on_lost, self._runtime.clock, self._prepare)

        timeout_s = self._runtime.config.handshake_timeout_s
        try:
            self._runtime.peers.add(channel, here, start, timeout_s)
        except TransferError as error:
            channel.close(error)
            raise
        self._tell_news(channel, {node.name for node in here.nodes})

    def _tell_news(self, channel: Channel, told: set[str]) -> None:
        """Pools that came and went since the introduction was written."""
        nodes = self._nodes()
        if missed := [node for node in nodes if node.name not in told]:
            channel.try_send(messages.Nodes(missed))
        if gone := told - {node.name for node in nodes}:
            channel.try_send(messages.Unregistered(sorted(gone)))

    def _wait_ready(self, channel: Channel) -> None:
        try:
            channel.wait_ready(self._runtime.config.handshake_timeout_s)
        except PeerLost as error:
            channel.close(error)
            raise

    def _prepare(self) -> None:
        """In each reader's thread, first."""
        if self._runtime.config.urgent_readers and (why_not := make_urgent()):
            self._runtime.events.add("readers", "not-urgent", why_not)

    def _on_lost(self, channel: Channel, error: TransferError) -> None:
        """A connection ended; in its reader's thread."""
        engine_id = channel.peer.engine_id
        left = self._runtime.peers.remove(channel)
        self._receiver.channel_lost(channel, error)
        transfers = self._sender.to(engine_id)
        for transfer in transfers:
            transfer.channel_lost(channel, error)
        if left and channel.has_notified:
            for other in left:
                other.shut(error)
        elif left:
            for transfer in transfers:
                transfer.query()
        else:
            self._part(channel, transfers, error)

    def _part(self, channel: Channel, transfers: list[Outgoing], error: TransferError) -> None:
        """The last connection to an engine ended."""
        self._runtime.events.add(channel.peer.engine_id, "peer-lost", str(error))
        can_ask = channel.address is not None and channel.may_return and not self._is_closed
        if transfers and can_ask:
            with suppress(RuntimeError):
                self._runtime.senders.submit(self._ask_again, channel, transfers, error)
                return
        self._lose(channel, transfers, error)

    def _lose(self, channel: Channel, transfers: list[Outgoing], error: TransferError) -> None:
        """The engine will answer no more."""
        for transfer in transfers:
            transfer.peer_lost(error)
        for backend in list(self._runtime.backends.values()):
            backend.peer_lost(channel.peer.engine_id)
        self._tell(channel, error)

    def _tell(self, channel: Channel, error: TransferError) -> None:
        peer = channel.peer
        if not self._is_closed:
            nodes = tuple(node.name for node in peer.nodes)
            call_back(self._on_peer_lost, PeerLoss(peer.engine_id, nodes, error))
        self._runtime.peers.forget(peer.engine_id)

    def _ask_again(self, lost: Channel, transfers: list[Outgoing], error: TransferError) -> None:
        """Connect once more, to learn what became of the transfers in flight."""
        assert lost.address is not None
        try:
            channel, here = self._dial(lost.address)
        except TransferError:
            self._lose(lost, transfers, error)
            return
        is_same = channel.peer.engine_id == lost.peer.engine_id
        if is_same:
            self._tell(lost, error)
        else:
            self._lose(lost, transfers, error)
        left = transfers if is_same else []
        try:
            self._take_in(channel, here)
            self._wait_ready(channel)
        except TransferError:
            for transfer in left:
                transfer.peer_lost(error)
            return
        for transfer in left:
            transfer.query()
