"""A worker's node: an engine's node that takes its name from each membership, with its hand-offs.

the member's threads                         the node's thread        the connector
enter / leave  ──> rename, abandon ──────>   nothing is held
start, stop, redirect, release ──────────>   as `Node` says
peer_joined / peer_left ─────────────────────────────────────────>    dials, hangs up
report ──> asked of the node; what it said last, where it is busy
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, TimeoutError

from flowkv_jax.cluster.messages import Peer
from flowkv_jax.cluster.node_port import SequenceKey, StopOrder
from flowkv_jax.controller.role import Role
from flowkv_jax.controller.snapshot import NodeReport
from flowkv_jax.engine.node import Node
from flowkv_jax.errors import EngineDeadError
from flowkv_jax.handoff.agent import HandoffAgent
from flowkv_jax.handoff.exchange import Exchange
from flowkv_jax.sequence import SequenceSpec
from transfer.errors import TransferError
from transfer.pool_access import PoolAccess

logger = logging.getLogger(__name__)

_REPORT_WAIT_S = 0.05
"""A node takes messages between two steps and while the device works; longer than this and it
compiles, and the front hears what it said last."""
_IDLE_WAIT_S = 1.0
_DIAL_ATTEMPTS = 5
_DIAL_PAUSE_S = 0.2


class MemberNode(Node):
    """A node whose name changes, and that starts over empty, from one membership to the next."""

    def rename(self, name: str) -> None:
        """Another name from now on; for a node that holds nothing."""
        self._name = name

    def abandon(self) -> Future[None]:
        """End every sequence without an update: nobody is left to hear of it."""
        return self.call(self._abandon)

    def _abandon(self) -> None:
        for served in list(self._served.values()):
            self._end(served, "abort", None)
        self._kv.restart_prefix_events()
        self._load = self._scheduler.load()


class EngineNode:
    """A `LocalNode` over a node of this process.

    Args:
        node: nothing else may start sequences on it.
        handoffs: its hand-offs, attached to it.
        exchange: whose transfer engine the node's pool is registered with, under its name.
        pool: that pool.
    """

    def __init__(
        self, node: MemberNode, handoffs: HandoffAgent, exchange: Exchange, pool: PoolAccess
    ) -> None:
        self._node = node
        self._handoffs = handoffs
        self._exchange = exchange
        self._pool = pool
        self._attached = ""
        self._peers: set[str] = set()
        self._report: NodeReport | None = None
        self._asked: Future[NodeReport] | None = None
        self._connector = _Connector(exchange)

    @property
    def is_alive(self) -> bool:
        """See `LocalNode.is_alive`."""
        return self._node.is_alive

    @property
    def is_idle(self) -> bool:
        """See `LocalNode.is_idle`. Asked on the node's thread, which tells of a sequence's end
        before it takes the next message."""
        node, handoffs = self._node, self._handoffs
        asked = node.call(lambda: node.scheduler.has_work or len(handoffs) > 0)
        try:
            return not asked.result(_IDLE_WAIT_S)
        except TimeoutError:
            return False
        except EngineDeadError:
            return True

    def enter(self, name: str, epoch: int, role: Role) -> None:
        """See `LocalNode.enter`."""
        if name != self._attached:
            if self._attached:
                self._exchange.detach(self._attached)
            self._node.rename(name)
            self._exchange.attach(name, self._handoffs, self._pool)
            self._attached = name
        self._report = self._asked = None

    def leave(self) -> None:
        """See `LocalNode.leave`."""
        with contextlib.suppress(EngineDeadError):
            self._node.abandon().result()
            # What others were about to bring here.
            peers = list(self._peers)
            self._node.call(lambda: self._handoffs.lost(peers)).result()
        self._peers.clear()
        self._connector.forget_all()

    def start(self, specs: Sequence[SequenceSpec]) -> Future[None]:
        """See `NodePort.start`."""
        return self._node.start(specs)

    def stop(self, orders: Sequence[StopOrder]) -> None:
        """See `NodePort.stop`."""
        self._node.stop(orders)

    def redirect(self, key: SequenceKey, decode_node: str | None) -> None:
        """See `NodePort.redirect`."""
        self._node.redirect(key, decode_node)

    def release(self, node: str) -> None:
        """See `NodePort.release`."""
        self._node.release(node)

    def set_role(self, role: Role) -> None:
        """See `LocalNode.set_role`. A node can do everything at any time: what it is given to do is
        the front's matter."""
        logger.info("%s: %s from now on", self._node.name, role.value)

    def peer_joined(self, peer: Peer) -> None:
        """See `LocalNode.peer_joined`."""
        self._peers.add(peer.name)
        self._connector.want(peer)

    def peer_left(self, peer: Peer) -> None:
        """See `LocalNode.peer_left`."""
        self._peers.discard(peer.name)
        self._connector.drop(peer)
        self._node.release(peer.name)

    def report(self) -> NodeReport:
        """See `LocalNode.report`."""
        if self._asked is None:
            self._asked = self._node.report()
        try:
            report = self._asked.result(_REPORT_WAIT_S)
        except TimeoutError:
            if self._report is not None:
                return self._report
            return NodeReport(load=self._node.load, prefixes_cleared=True)
        self._asked = None
        # What is new in the cache is told once.
        self._report = NodeReport(
            load=report.load,
            device_utilisation=report.device_utilisation,
            memory_bandwidth_utilisation=report.memory_bandwidth_utilisation,
        )
        return report

    def close(self) -> None:
        """End the node and its connections. Idempotent."""
        self._connector.close()
        self._node.shutdown()
        self._exchange.close()


class _Connector:
    """Connects to the workers that are there, and hangs up on those that are not, on a thread of
    its own: to dial may take seconds."""

    def __init__(self, exchange: Exchange, pause: Callable[[float], None] = time.sleep) -> None:
        self._exchange = exchange
        self._pause = pause
        self._wanted: dict[str, Peer] = {}
        self._lock = threading.Lock()
        self._tasks: queue.SimpleQueue[tuple[Peer, bool] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="flowkv-connector", daemon=True)
        self._thread.start()

    def want(self, peer: Peer) -> None:
        with self._lock:
            self._wanted[peer.name] = peer
        self._tasks.put((peer, True))

    def drop(self, peer: Peer) -> None:
        with self._lock:
            known = self._wanted.get(peer.name)
            if known is None or known.epoch > peer.epoch:
                return
            del self._wanted[peer.name]
        self._tasks.put((peer, False))

    def forget_all(self) -> None:
        with self._lock:
            self._wanted.clear()

    def close(self) -> None:
        self.forget_all()
        self._tasks.put(None)

    def _run(self) -> None:
        while (task := self._tasks.get()) is not None:
            peer, is_wanted = task
            try:
                if is_wanted:
                    self._connect(peer)
                else:
                    self._hang_up(peer)
            except Exception:
                logger.exception("the connection to %s could not be changed", peer.name)

    def _connect(self, peer: Peer) -> None:
        if peer.transfer_address is None:
            return
        trouble = ""
        for _ in range(_DIAL_ATTEMPTS):
            with self._lock:
                if self._wanted.get(peer.name) is not peer:
                    return
            try:
                self._exchange.transfers.connect(peer.transfer_address)
                return
            except TransferError as error:
                trouble = f"{type(error).__name__}: {error}"
            self._pause(_DIAL_PAUSE_S)
        logger.warning(
            "no connection to %s at %s:%d: %s", peer.name, *peer.transfer_address, trouble
        )

    def _hang_up(self, peer: Peer) -> None:
        with self._lock:
            if peer.name in self._wanted:  # it has come anew
                return
        engine_id = self._exchange.transfers.peer_of(peer.name)
        if engine_id is not None:
            self._exchange.transfers.disconnect(engine_id)
