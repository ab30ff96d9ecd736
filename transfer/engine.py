"""`TransferEngine`: pools, peers, and transfers between them. Imports no JAX.

    engine = TransferEngine(secret=...)             one a process
    engine.register_pool("host0/gpu0", pool)
    engine.listen("127.0.0.1", 0)                   or engine.connect(address)
    handle = engine.submit(TransferRequest(...))    where the source's pool is
    handle.wait()

The source's engine drives (`outgoing`), the destination's answers (`receiver`). One thread
accepts connections, one for each peer reads what it says, one keeps time; halves of legs run in
two bounded groups of workers, one for each direction, so that senders that wait for each other's
receivers cannot use up the threads those receivers need. `close` ends them all.
"""

from __future__ import annotations

import itertools
import threading
import time
import uuid
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TYPE_CHECKING

from transfer import messages
from transfer.arrival import Arrival
from transfer.backends.base import LinkBackend
from transfer.backends.defaults import default_backends
from transfer.backends.local import LocalBackend
from transfer.channel import Channel, layout_differences
from transfer.config import TransferConfig
from transfer.connection import Address, Connection
from transfer.dialler import Dialler
from transfer.errors import (
    EngineClosed,
    HandshakeMismatch,
    NoPath,
    PeerLost,
    RequestError,
    TransferError,
)
from transfer.events import EventLog
from transfer.handle import TransferHandle
from transfer.host import host_id
from transfer.listener import Listener
from transfer.outgoing import Outgoing
from transfer.peers import Peers
from transfer.pins import Pins
from transfer.pool_access import PoolAccess, block_ids, check_bounds
from transfer.receiver import Receiver
from transfer.relay import PURPOSE as RELAY
from transfer.relay import ConnectionRelays
from transfer.route import Way, routes_for
from transfer.runtime import RegisteredPool, Runtime, Selector, check_generations
from transfer.strategies import Strategy
from transfer.timekeeper import Timekeeper
from transfer.transfer_metrics import TransferMetrics
from transfer.types import TransferRequest

if TYPE_CHECKING:
    import jax

CONTROL = "control"


def _ignore(_: object) -> None:
    pass


class TransferEngine:
    """Moves blocks between registered pools, here and at connected peers.

    Args:
        config: how.
        secret: shared with every peer. Without one, the engine listens on loopback only.
        selector: chooses paths; None for the direct path always.
        backends: those that cross processes; None for the ones that need nothing but this machine.
        on_arrival: called, in a thread of the engine, for each transfer into a pool here that is
            final. Must be quick; what it raises is logged.
        clock: monotonic seconds. With one of their own, tests call `tick` themselves.
    """

    def __init__(
        self,
        config: TransferConfig | None = None,
        *,
        secret: str | bytes = b"",
        selector: Selector | None = None,
        backends: Iterable[LinkBackend] | None = None,
        on_arrival: Callable[[Arrival], object] = _ignore,
        clock: Callable[[], float] | None = None,
    ) -> None:
        self.config = config = config or TransferConfig()
        self.engine_id = uuid.uuid4().hex
        self._secret = secret.encode() if isinstance(secret, str) else secret
        self._relays: dict[str, jax.Device] = {}
        now = clock or time.monotonic
        self.events = EventLog(config.max_events, now)
        self.metrics = TransferMetrics()
        self._runtime = Runtime(
            config=config,
            clock=now,
            selector=selector,
            peers=Peers(host_id()),
            metrics=self.metrics,
            events=self.events,
            local=LocalBackend(self._relays, config.chunk_bytes),
            senders=ThreadPoolExecutor(config.workers, "transfer-send"),
            receivers=ThreadPoolExecutor(config.workers, "transfer-receive"),
            engine_id=self.engine_id,
            on_arrival=on_arrival,
        )
        peers = self._runtime.peers
        self._dialler = Dialler(self.engine_id, self._secret, config, peers)
        self._passed_on = ConnectionRelays()
        for backend in default_backends(config) if backends is None else backends:
            self.add_backend(backend)
        self._receiver = Receiver(self._runtime)
        self._lock = threading.Condition()
        self._connecting = threading.Lock()
        self._outgoing: dict[str, Outgoing] = {}
        self._by_leg: dict[int, Outgoing] = {}
        self._numbers = itertools.count(1)
        self._listener: Listener | None = None
        self._is_closed = False
        self._timekeeper = Timekeeper(self.tick, config.heartbeat_s / 2) if clock is None else None

    def add_backend(self, backend: LinkBackend) -> None:
        """Add, or replace, a backend. Peers that connect later hear of it."""
        with self._runtime.lock:
            self._runtime.backends[backend.name] = backend
        backend.attach(self._dialler)

    def register_pool(self, node: str, access: PoolAccess) -> None:
        """Make a pool known, here and to every peer, under the name of its topology node."""
        with self._runtime.lock:
            if node in self._runtime.pools:
                raise RequestError(f"node {node!r} is registered already")
            pins = Pins(node, access.num_blocks)
            self._runtime.pools[node] = RegisteredPool(access, pins)
        info = messages.NodeInfo(node, access.layout, access.num_blocks)
        for channel in self._runtime.peers.all():
            channel.try_send(messages.Nodes([info]))

    def register_relay(self, node: str, device: jax.Device) -> None:
        """Let paths within this process go through `device` under this name."""
        self._relays[node] = device

    def listen(self, host: str = "127.0.0.1", port: int = 0) -> Address:
        """Accept peers; returns the address, with the port that was chosen for 0.

        Raises:
            RequestError: not a loopback address and no secret, or the engine listens already.
        """
        if self._listener is not None:
            raise RequestError(f"the engine listens on {self._listener.address} already")
        self._listener = Listener(
            (host, port), self._secret, self.config, self._on_connection, self.events
        )
        return self._listener.address

    def connect(self, address: Address) -> list[str]:
        """Connect to an engine that listens, unless we are; returns the names of its nodes.

        Raises:
            AuthenticationFailed, HandshakeMismatch, PeerLost: see `transfer.errors`.
        """
        with self._connecting:
            for channel in self._runtime.peers.all():
                if channel.address == address and channel.is_open:
                    return [node.name for node in channel.peer.nodes]
            channel = Channel(self._dialler.dial(address, CONTROL), address)
            self._introduce(channel)
            try:
                channel.wait_ready(self.config.handshake_timeout_s)
            except PeerLost as error:
                channel.close(error)
                raise
        return [node.name for node in channel.peer.nodes]

    def disconnect(self, engine_id: str) -> None:
        """End the connection to a peer. A transfer in flight is asked after once more, by a new
        connection, if we had made this one. Idempotent."""
        for channel in self._runtime.peers.all():
            if channel.peer.engine_id == engine_id:
                channel.close(PeerLost("disconnected"))

    def submit(
        self,
        request: TransferRequest,
        *,
        backend: str | None = None,
        strategy: Strategy = Strategy.ALIGNED_RUNS,
    ) -> TransferHandle:
        """Start a transfer from a pool of this engine.

        Args:
            request: with `runs`, and `block_bytes` of the pools' layout.
            backend: name of the backend to use; None to choose.
            strategy: grain of the calls.

        Raises:
            UnknownNode, PoolBoundsError, BlocksBusy, StaleGeneration, NoPath, RequestError: what
                is asked for cannot be done; nothing has begun.
            HandshakeMismatch: the two pools' layouts differ.
            PeerLost: the destination's engine is not connected any more.
        """
        if self._is_closed:
            raise EngineClosed("the engine is closed")
        engine_id = self._check(request)
        runtime = self._runtime
        candidates = []
        if runtime.selector is not None:
            decision = runtime.selector.select(request)
            candidates = [decision.chosen, *decision.fallbacks]
        peer = None if engine_id is None else runtime.peers.view(engine_id)
        way = Way(peer, runtime.backends, runtime.pool(request.src).access)
        routes = routes_for(request, candidates, way, backend)
        if engine_id is not None and (channel := runtime.peers.channel(engine_id)) is not None:
            channel.wait_writable(self.config.peer_timeout_s)
        name = f"{self.engine_id[:12]}-{next(self._numbers)}"
        transfer = Outgoing(
            runtime, name, request, strategy, routes, engine_id, self._add_leg, self._on_final
        )
        with self._lock:
            if self._is_closed:
                raise EngineClosed("the engine is closed")
            self._outgoing[name] = transfer
        try:
            transfer.start()
        except TransferError:
            with self._lock:
                self._outgoing.pop(name, None)
            raise
        return transfer.handle

    def pinned(self, node: str, block_ids: list[int]) -> list[int]:
        """Those of the blocks that a transfer is using: they must not be freed yet."""
        return self._runtime.pool(node).pins.pinned(block_ids)

    def set_selector(self, selector: Selector | None) -> None:
        """Choose paths of later transfers with this selector; None for the direct path always."""
        self._runtime.selector = selector

    def backend(self, name: str) -> LinkBackend:
        """A backend by name. Raises `NoPath` where there is none."""
        found = self._runtime.backends.get(name)
        if found is None:
            raise NoPath(f"no backend {name!r} here; there are {sorted(self._runtime.backends)}")
        return found

    @property
    def listen_address(self) -> Address:
        """Where peers connect. Raises `RequestError` where the engine does not listen."""
        if self._listener is None:
            raise RequestError("the engine does not listen")
        return self._listener.address

    @property
    def bytes_passed_on(self) -> int:
        """Bytes of other engines' streams that went through this one."""
        return self._passed_on.num_bytes

    @property
    def peers(self) -> dict[str, list[str]]:
        """Connected engines and their nodes."""
        return {
            channel.peer.engine_id: [node.name for node in channel.peer.nodes]
            for channel in self._runtime.peers.all()
        }

    def lose(self, is_lost: Callable[[messages.Message], bool]) -> None:
        """For tests: do not send messages for which `is_lost` says so."""
        self._runtime.peers.is_lost = is_lost

    def tick(self) -> None:
        """Look after deadlines, silent peers and late answers; the engine's own thread calls it."""
        now = self._runtime.clock()
        with self._lock:
            transfers = list(self._outgoing.values())
        for transfer in transfers:
            error = transfer.tick(now)
            if error is not None and transfer.engine_id is not None:
                channel = self._runtime.peers.channel(transfer.engine_id)
                if channel is not None:
                    channel.close(error)
        for channel in self._runtime.peers.all():
            silent_s = now - channel.last_heard_s
            if silent_s >= self.config.peer_timeout_s:
                channel.close(PeerLost(f"nothing came from the peer for {silent_s:.1f} s"))
            elif silent_s >= self.config.heartbeat_s:
                channel.try_send(messages.Ping())

    def close(self) -> None:
        """End every transfer, tell every peer, and leave no thread or socket. Idempotent."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            transfers = list(self._outgoing.values())
        error = EngineClosed("the engine was closed")
        if self._listener is not None:
            self._listener.close()
        for transfer in transfers:
            transfer.cancel(error)
        self._receiver.close(error)
        with self._lock:
            self._lock.wait_for(lambda: not self._outgoing, self.config.settle_timeout_s)
        self._receiver.wait_still(self.config.settle_timeout_s)
        if self._timekeeper is not None:
            self._timekeeper.close()
        for channel in self._runtime.peers.not_ended():
            channel.try_send(messages.Bye())
            channel.close(error, flush_s=1.0)
        self._passed_on.close()
        self._runtime.senders.shutdown()
        self._runtime.receivers.shutdown()
        for backend in self._runtime.backends.values():
            backend.close()
        self._runtime.local.close()

    def __enter__(self) -> TransferEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check(self, request: TransferRequest) -> str | None:
        """Refuse what cannot be done. Returns the destination's engine; None for this one."""
        if not request.runs:
            raise RequestError("the request names no runs: it can be selected for, not executed")
        source = self._runtime.pool(request.src).access
        if request.block_bytes != source.layout.bytes_per_block:
            raise RequestError(
                f"block_bytes={request.block_bytes}, but a block of {request.src} has "
                f"{source.layout.bytes_per_block} bytes"
            )
        check_bounds(
            request.src,
            source.num_blocks,
            [(run.src_start, run.num_blocks) for run in request.runs],
        )
        if request.src_generations:
            ids = block_ids(request.runs, of_source=True)
            check_generations(request.src, source, ids, request.src_generations)
        with self._runtime.lock:
            here = self._runtime.pools.get(request.dst)
        engine_id = None
        if here is not None:
            layout, num_blocks = here.access.layout, here.access.num_blocks
        else:
            engine_id, info = self._runtime.peers.holder(request.dst)
            layout, num_blocks = info.layout, info.num_blocks
        if differences := layout_differences(layout, source.layout):
            raise HandshakeMismatch(f"{request.dst} and {request.src} differ: {differences}")
        check_bounds(
            request.dst, num_blocks, [(run.dst_start, run.num_blocks) for run in request.runs]
        )
        return engine_id

    def _add_leg(self, transfer: Outgoing) -> int:
        number = next(self._numbers)
        with self._lock:
            self._by_leg[number] = transfer
        return number

    def _on_final(self, transfer: Outgoing) -> None:
        with self._lock:
            self._outgoing.pop(transfer.name, None)
            for leg in transfer.leg_numbers:
                self._by_leg.pop(leg, None)
            self._lock.notify_all()

    def _introduction(self) -> messages.Introduction:
        with self._runtime.lock:
            pools = self._runtime.pools
            nodes = [
                messages.NodeInfo(name, pool.access.layout, pool.access.num_blocks)
                for name, pool in pools.items()
            ]
            hellos = {name: b.hello() for name, b in self._runtime.backends.items()}
        known = {name: hello for name, hello in hellos.items() if hello is not None}
        port = None if self._listener is None else self._listener.address[1]
        return messages.Introduction(self.engine_id, host_id(), nodes, known, port)

    def _introduce(self, channel: Channel) -> None:
        channel.introduce(self._introduction(), self.config.handshake_timeout_s)
        with self._lock:
            if self._is_closed:
                closed = EngineClosed("the engine is closed")
                channel.close(closed)
                raise closed
            self._runtime.peers.add(channel)
        self.events.add(channel.peer.engine_id, "connected")
        channel.start(self._on_message, self._on_lost, self._runtime.clock)

    def _on_connection(self, connection: Connection) -> None:
        """A peer, or a data stream of one, has proved itself at the listener."""
        if connection.purpose == CONTROL:
            self._introduce(Channel(connection, None))
            return
        word, _, rest = connection.purpose.partition(":")
        if word == RELAY:
            channel = self._runtime.peers.channel(rest)
            onward = None if channel is None else channel.listens
            is_taken = onward is not None and self._passed_on.pass_on(
                connection, onward, self.config.handshake_timeout_s
            )
        else:
            backend = self._runtime.backends.get(word)
            is_taken = backend is not None and backend.accept_stream(connection)
        if not is_taken:
            connection.close()

    def _on_message(self, channel: Channel, message: messages.Message) -> None:
        match message:
            case messages.Offer():
                self._receiver.on_offer(channel, message)
            case messages.Note(to_source=True) | messages.Accept() | messages.Moved():
                self._to_source(message.leg, message)
            case messages.Done() | messages.Failed():
                self._to_source(message.leg, message)
            case messages.Ended():
                with self._lock:
                    transfer = self._outgoing.get(message.transfer)
                if transfer is not None:
                    transfer.on_ended(message.state)
            case messages.Ping():
                channel.try_send(messages.Pong())
            case messages.Nodes():
                channel.peer.nodes.extend(message.nodes)
                self._runtime.peers.add_nodes(channel, message.nodes)
            case messages.Bye():
                channel.said_bye = True
            case _:
                self._receiver.on_message(channel, message)

    def _to_source(self, leg: int, message: messages.Message) -> None:
        with self._lock:
            transfer = self._by_leg.get(leg)
        if transfer is not None:
            transfer.on_message(leg, message)

    def _on_lost(self, channel: Channel, error: TransferError) -> None:
        """A connection ended; in its reader's thread."""
        engine_id = channel.peer.engine_id
        is_replaced = not self._runtime.peers.remove(channel)
        self._receiver.channel_lost(channel, error)
        with self._lock:
            left = [t for t in self._outgoing.values() if t.engine_id == engine_id]
        for transfer in left:
            transfer.channel_lost(channel, error)
            if is_replaced:
                transfer.query()
        if is_replaced:
            return
        self.events.add(engine_id, "peer-lost", str(error))
        if left and channel.address is not None and not (self._is_closed or channel.said_bye):
            with suppress(RuntimeError):
                self._runtime.senders.submit(self._ask_again, channel.address, left, error)
                return
        for transfer in left:
            transfer.peer_lost(error)
        for backend in list(self._runtime.backends.values()):
            backend.peer_lost(engine_id)

    def _ask_again(self, address: Address, transfers: list[Outgoing], error: TransferError) -> None:
        """Connect once more, only to learn what became of the transfers in flight."""
        engine_id = transfers[0].engine_id
        assert engine_id is not None
        with suppress(TransferError):
            self.connect(address)
        same_process = self._runtime.peers.channel(engine_id) is not None
        for transfer in transfers:
            if same_process:
                transfer.query()
            else:
                transfer.peer_lost(error)
        if not same_process:
            for backend in list(self._runtime.backends.values()):
                backend.peer_lost(engine_id)
