"""A worker's node: an engine's node that takes its name from each membership, with its hand-offs.

the member's threads                         the node's thread        the connector
enter / leave  ──> rename, abandon ──────>   nothing is held
start, stop, redirect, release ──────────>   as `Node` says
peer_joined / peer_left ─────────────────────────────────────────>    dials, hangs up
report ──> asked of the node; what it said last, where it is busy
errands ─────────────────────────────────>   caches; profiles have a thread of their own
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Sequence
from concurrent.futures import Future, TimeoutError

from flowkv_jax.cluster.messages import ErrandKind, Peer
from flowkv_jax.cluster.node_port import SequenceKey, StopOrder
from flowkv_jax.controller.role import Role
from flowkv_jax.controller.snapshot import NodeReport
from flowkv_jax.engine.node import Node
from flowkv_jax.engine.profiler import Profiler
from flowkv_jax.errors import EngineDeadError
from flowkv_jax.handoff.agent import HandoffAgent
from flowkv_jax.handoff.exchange import Exchange
from flowkv_jax.sequence import SequenceSpec
from flowkv_jax.worker.peer_links import PeerLinks
from transfer.pool_access import PoolAccess

logger = logging.getLogger(__name__)

_REPORT_WAIT_S = 0.05
"""A node takes messages between two steps and while the device works; longer than this and it
compiles, and the front hears what it said last."""
_IDLE_WAIT_S = 1.0


class MemberNode(Node):
    """A node whose name changes, and that starts over empty, from one membership to the next."""

    def rename(self, name: str) -> None:
        """Another name from now on; for a node that holds nothing."""
        self._name = name

    def abandon(self) -> Future[None]:
        """End every sequence without an update: nobody is left to hear of it."""
        return self.call(self._abandon)

    def _abandon(self) -> None:
        for served in self._served.all():
            self._end(served, "abort", None)
        self._kv.restart_prefix_events()
        self._load = self._scheduler.load()


class EngineNode:
    """A `LocalNode` over a node of this process.

    Args:
        node: nothing else may start sequences on it.
        handoffs: its hand-offs, attached to it.
        links: to the other workers; ours from now on.
        exchange: whose transfer engine the node's pool is registered with, under its name; ours
            likewise.
        pool: that pool.
        profiler: of this process.
    """

    def __init__(
        self,
        node: MemberNode,
        handoffs: HandoffAgent,
        links: PeerLinks,
        exchange: Exchange,
        pool: PoolAccess,
        profiler: Profiler | None = None,
    ) -> None:
        self._node = node
        self._handoffs = handoffs
        self._links = links
        self._exchange = exchange
        self._pool = pool
        self._profiler = profiler or Profiler(None)
        self._attached = ""
        self._report: NodeReport | None = None
        self._asked: Future[NodeReport] | None = None

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
            peers = self._links.names
            self._node.call(lambda: self._handoffs.lost(peers)).result()
        self._links.forget()

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

    def run_errand(self, kind: ErrandKind, duration_s: float) -> Future[bool]:
        """See `LocalNode.run_errand`."""
        match kind:
            case ErrandKind.RESET_PREFIX_CACHE:
                return self._node.reset_prefix_cache()
            case ErrandKind.START_PROFILE:
                return self._profiler.start(self._node.name, duration_s)
            case ErrandKind.STOP_PROFILE:
                return self._profiler.stop()

    def peer_joined(self, peer: Peer) -> None:
        """See `LocalNode.peer_joined`."""
        self._links.want(peer)

    def peer_left(self, peer: Peer) -> None:
        """See `LocalNode.peer_left`."""
        self._links.drop(peer)
        self._node.release(peer.name)

    def report(self) -> NodeReport:
        """See `LocalNode.report`."""
        if self._asked is None:
            self._asked = self._node.report()
        try:
            report = self._asked.result(_REPORT_WAIT_S)
        except (TimeoutError, EngineDeadError):
            if self._report is not None:
                return self._report
            return NodeReport(
                load=self._node.load, step_tokens=self._node.step_tokens, prefixes_cleared=True
            )
        self._asked = None
        links = self._exchange.link_loads(self._node.name, self._links.names)
        report = dataclasses.replace(report, link_loads=links)
        # What is new in the cache is told once.
        self._report = NodeReport(
            load=report.load,
            device_utilisation=report.device_utilisation,
            memory_bandwidth_utilisation=report.memory_bandwidth_utilisation,
            pool_map=report.pool_map,
            link_loads=report.link_loads,
            step_tokens=report.step_tokens,
        )
        return report

    def close(self) -> None:
        """End the node and its connections. Idempotent."""
        self._profiler.close()
        self._links.close()
        self._node.shutdown()
        self._exchange.close()
