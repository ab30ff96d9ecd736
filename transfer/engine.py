"""`TransferEngine`: pools, peers, and transfers between them. Imports no JAX.

    engine = TransferEngine(secret=...)             one a process
    engine.register_pool("host0/gpu0", pool)
    engine.listen("127.0.0.1", 0)                   or engine.connect(address)
    handle = engine.submit(TransferRequest(...))    where the source's pool is
    handle.wait()

The source's engine drives (`sender`, `outgoing`), the destination's answers (`receiver`). Engines
meet and part in `peering`, and say `notifications` to each other for their programs. One thread
accepts connections, one for each peer reads what it says, one keeps time; halves of legs run in
two bounded groups of workers, one for each direction, so that senders that wait for each other's
receivers cannot use up the threads those receivers need. `close` ends them all.
"""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from transfer import messages
from transfer.arrival import Arrival
from transfer.backends.base import LinkBackend
from transfer.backends.defaults import default_backends
from transfer.backends.local import LocalBackend
from transfer.callbacks import call_back
from transfer.channel import Channel, layout_differences
from transfer.config import TransferConfig
from transfer.connection import Address
from transfer.dialler import Dialler
from transfer.errors import EngineClosed, HandshakeMismatch, NoPath, PeerLost, RequestError
from transfer.events import EventLog
from transfer.handle import TransferHandle
from transfer.host import host_id
from transfer.listener import Listener
from transfer.notifications import Notification, PeerLoss
from transfer.peering import Peering
from transfer.peers import Peers
from transfer.pins import Pins
from transfer.pool_access import PoolAccess, block_ids, check_bounds
from transfer.receiver import Receiver
from transfer.route import Way, routes_for
from transfer.runtime import RegisteredPool, Runtime, Selector, check_generations
from transfer.sender import Sender
from transfer.strategies import Strategy
from transfer.timekeeper import Timekeeper
from transfer.transfer_metrics import TransferMetrics
from transfer.types import TransferRequest

if TYPE_CHECKING:
    import jax


def _ignore(_: object) -> None:
    pass


class TransferEngine:
    """Moves blocks between registered pools, here and at connected peers.

    Args:
        config: how.
        secret: shared with every peer. Without one, the engine listens on loopback only.
        selector: chooses paths; None for the direct path always.
        backends: those that cross processes; None for the ones that need nothing but this machine.
        on_arrival: called for each transfer into a pool here that is final; for one within this
            engine that may be before `submit` returns.
        on_notify: called for each message that another engine, or this one, sends to a pool here
            with `notify`; see `notifications` for order and losses.
        on_peer_lost: called when a connected engine is gone; see `notifications`.
        clock: monotonic seconds. With one of their own, tests call `tick` themselves.

    The three callbacks are called by threads that serve whole peers, so they must be quick; they
    may use the engine, but not `connect`. What they raise is logged.
    """

    def __init__(
        self,
        config: TransferConfig | None = None,
        *,
        secret: str | bytes = b"",
        selector: Selector | None = None,
        backends: Iterable[LinkBackend] | None = None,
        on_arrival: Callable[[Arrival], object] = _ignore,
        on_notify: Callable[[Notification], object] = _ignore,
        on_peer_lost: Callable[[PeerLoss], object] = _ignore,
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
            peers=Peers(self.engine_id, host_id()),
            metrics=self.metrics,
            events=self.events,
            local=LocalBackend(self._relays, config.chunk_bytes),
            senders=ThreadPoolExecutor(config.workers, "transfer-send"),
            receivers=ThreadPoolExecutor(config.workers, "transfer-receive"),
            engine_id=self.engine_id,
            on_arrival=on_arrival,
        )
        self._on_notify = on_notify
        self._dialler = Dialler(self.engine_id, self._secret, config, self._runtime.peers)
        for backend in default_backends(config) if backends is None else backends:
            self.add_backend(backend)
        self._sender = Sender(self._runtime)
        self._receiver = Receiver(self._runtime)
        self._peering = Peering(
            self._runtime,
            self._dialler,
            self._sender,
            self._receiver,
            self._on_message,
            on_peer_lost,
        )
        self._closing = threading.Lock()
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

    def unregister_pool(self, node: str) -> None:
        """Make a pool unknown again, here and to every peer. Its memory is used no more.

        Raises:
            UnknownNode: no such pool here.
            BlocksBusy: transfers use it; wait for them, or cancel them.
        """
        pool = self._runtime.pool(node)
        pool.pins.retire()
        with self._runtime.lock:
            if self._runtime.pools.get(node) is pool:
                del self._runtime.pools[node]
        for channel in self._runtime.peers.all():
            channel.try_send(messages.Unregistered([node]))

    def register_relay(self, node: str, device: jax.Device) -> None:
        """Let paths within this process go through `device` under this name."""
        self._relays[node] = device

    def listen(self, host: str = "127.0.0.1", port: int = 0) -> Address:
        """Accept peers; returns the address, with the port that was chosen for 0.

        Raises:
            RequestError: not a loopback address and no secret, or the engine listens already.
        """
        if self._peering.listener is not None:
            raise RequestError(f"the engine listens on {self.listen_address} already")
        self._peering.listener = Listener(
            (host, port), self._secret, self.config, self._peering.on_connection, self.events
        )
        return self.listen_address

    def connect(self, address: Address) -> list[str]:
        """Connect to an engine that listens, unless we are; returns the names of its nodes.

        Raises:
            AuthenticationFailed, HandshakeMismatch, PeerLost: see `transfer.errors`.
        """
        if self._is_closed:
            raise EngineClosed("the engine is closed")
        return [node.name for node in self._peering.connect(address).peer.nodes]

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
        return self._sender.start(request, strategy, routes, engine_id)

    def notify(self, node: str, payload: bytes) -> None:
        """Send bytes to the program at the engine that holds the pool `node`; never blocks.

        For a pool of this engine, `on_notify` is called here and now.

        Raises:
            RequestError: longer than `max_notification_bytes`.
            UnknownNode: no engine is known to hold the node.
            PeerLost: the one that does is not connected any more, or has stopped reading.
            EngineClosed: this one is closed.
        """
        if self._is_closed:
            raise EngineClosed("the engine is closed")
        if len(payload) > self.config.max_notification_bytes:
            raise RequestError(
                f"a payload of {len(payload)} bytes, at most max_notification_bytes="
                f"{self.config.max_notification_bytes} are carried"
            )
        if self.holds(node):
            call_back(self._on_notify, Notification(node, self.engine_id, bytes(payload)))
        else:
            self._runtime.peers.notify(node, messages.Notify(node, payload))

    def holds(self, node: str) -> bool:
        """Whether the pool is registered at this engine."""
        with self._runtime.lock:
            return node in self._runtime.pools

    def peer_of(self, node: str) -> str | None:
        """Engine id of the connected peer that holds the pool; None where there is none."""
        return self._runtime.peers.holder_of(node)

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
        if self._peering.listener is None:
            raise RequestError("the engine does not listen")
        return self._peering.listener.address

    @property
    def bytes_passed_on(self) -> int:
        """Bytes of other engines' streams that went through this one."""
        return self._peering.bytes_passed_on

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
        self._sender.tick()
        self._peering.tick()

    def close(self) -> None:
        """End every transfer, tell every peer, and leave no thread or socket. Idempotent."""
        with self._closing:
            if self._is_closed:
                return
            self._is_closed = True
        error = EngineClosed("the engine was closed")
        self._peering.stop_meeting()
        self._sender.close(error)
        self._receiver.close(error)
        self._sender.wait_still(self.config.settle_timeout_s)
        self._receiver.wait_still(self.config.settle_timeout_s)
        if self._timekeeper is not None:
            self._timekeeper.close()
        self._peering.close(error)
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

    def _on_message(self, channel: Channel, message: messages.Message) -> None:
        match message:
            case messages.Offer():
                self._receiver.on_offer(channel, message)
            case (
                messages.Note(to_source=True)
                | messages.Accept()
                | messages.Moved()
                | messages.Done()
                | messages.Failed()
            ):
                self._sender.on_answer(message)
            case messages.Ended():
                self._sender.on_ended(message)
            case messages.Notify():
                self._notified(channel, message)
            case messages.Ping():
                channel.try_send(messages.Pong())
            case messages.Nodes():
                self._runtime.peers.add_nodes(channel, message.nodes)
            case messages.Unregistered():
                self._runtime.peers.remove_nodes(channel, message.names)
            case messages.Bye():
                channel.may_return = False
            case _:
                self._receiver.on_message(channel, message)

    def _notified(self, channel: Channel, message: messages.Notify) -> None:
        channel.has_notified = True
        if self.holds(message.node):
            notification = Notification(message.node, channel.peer.engine_id, message.payload)
            call_back(self._on_notify, notification)
        else:
            self.events.add(message.node, "notify-refused", "the pool is not registered here")
