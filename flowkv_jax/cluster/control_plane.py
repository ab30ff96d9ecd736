"""Membership, controller, dispatcher and fleet as one: what the front process runs. No JAX.

    workers ──> membership ──joined, lost, report──> controller    under the dispatcher's lock
                    └──────────deliver, lost───────> dispatcher
    the ticker, ten times a second: waiting requests, what the controller wants done, dead workers

The membership's epoch is the controller's. A worker that is lost and does not end by itself is
killed, if it is one of ours; the fleet starts it again.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future

from flowkv_jax.cluster.dispatcher import Dispatcher
from flowkv_jax.cluster.membership import Membership, MembershipConfig
from flowkv_jax.cluster.messages import ErrandKind
from flowkv_jax.cluster.node_port import StopOrder
from flowkv_jax.cluster.remote_node import RemoteNode
from flowkv_jax.cluster.roster import Member
from flowkv_jax.config import ServeConfig
from flowkv_jax.controller.actions import Action, AddNode, RemoveNode, SwitchRole
from flowkv_jax.controller.controller import Controller, StaleEpoch
from flowkv_jax.controller.snapshot import NodeReport
from flowkv_jax.errors import EngineDeadError, NotFoundError, ServerError
from flowkv_jax.load import NodeLoad
from flowkv_jax.sequence import SequenceUpdate
from flowkv_jax.worker.fleet import Fleet, SlotState

logger = logging.getLogger(__name__)

_TICK_S = 0.1
_LAST_RITES_S = 1.0
"""How long a worker that is lost may take to end, or to come back, before it is killed."""


class ControlPlane:
    """Drives the workers of one front; a `MembershipListener`.

    Args:
        version: of flowkv; workers must have the same.
        secret: shared with the workers.
        wanted: what the front knows of the model; workers that differ are refused (see `Roster`).

    Attributes:
        controller: decides; called through `Dispatcher.exclusively` only.
        dispatcher: takes requests in.
        membership: lets workers in; its address is where they join.

    Raises:
        ConfigError: workers may not join at the configured address without a secret.
        OSError: it cannot be listened on.
    """

    def __init__(
        self,
        config: ServeConfig,
        *,
        version: str,
        secret: bytes,
        wanted: Mapping[str, object] | None = None,
    ) -> None:
        engine = config.engine
        self.controller = Controller(engine.controller)
        self.dispatcher = Dispatcher(
            self.controller,
            kv_load_failure_policy=engine.handoff.kv_load_failure_policy,
            max_waiting_requests=engine.scheduler.max_waiting_requests,
            max_waiting_tokens=engine.scheduler.max_waiting_tokens,
            hash_block_size=engine.cache.block_size,
        )
        self._drain_timeout_s = config.server.drain_timeout_s
        self._start_timeout_s = config.cluster.start_timeout_s
        self._fleet: Fleet | None = None
        self._nodes: dict[str, _Node] = {}
        self._lost_s: dict[str, float] = {}
        self._inhabited_s = time.monotonic()
        self._changed = threading.Condition()
        self._stopping = threading.Event()
        self.membership = Membership(
            (config.cluster.cluster_host, config.cluster.cluster_port),
            secret,
            self,
            version=version,
            config=MembershipConfig(
                lease_s=config.cluster.lease_s, heartbeat_s=config.cluster.heartbeat_s
            ),
            wanted=wanted,
        )
        self._has_begun = False
        self._ticker = threading.Thread(target=self._tick, name="flowkv-control")

    def start(self, fleet: Fleet | None) -> None:
        """Begin to act.

        Args:
            fleet: starts workers, and is ours from now on; None where they come by themselves.
        """
        self._fleet = fleet
        self._ticker.start()

    def close(self) -> None:
        """End every request and every worker of the fleet. Idempotent."""
        self._stopping.set()
        if self._ticker.is_alive():
            self._ticker.join()
        self.dispatcher.close(EngineDeadError("the server was shut down"))
        if self._fleet is not None:
            self._fleet.close()
        self.membership.close()

    def run_errand(self, kind: ErrandKind, duration_s: float = 0.0) -> dict[str, Future[bool]]:
        """Have every node do something for an administrator; see `RemoteNode.run_errand`."""
        with self._changed:
            ports = {name: node.port for name, node in self._nodes.items()}
        return {name: port.run_errand(kind, duration_s) for name, port in ports.items()}

    # What it shows

    @property
    def members(self) -> list[Member]:
        """Nodes that are there, in the order they joined."""
        with self._changed:
            return [node.member for node in self._nodes.values()]

    @property
    def loads(self) -> list[NodeLoad]:
        """As the nodes reported last."""
        with self._changed:
            return [node.load for node in self._nodes.values() if node.load is not None]

    @property
    def is_alive(self) -> bool:
        """A node is there, or one is being started."""
        if self._nodes:
            return True
        slots = self._fleet.slots if self._fleet is not None else []
        return any(slot.state in (SlotState.RUNNING, SlotState.BACKING_OFF) for slot in slots)

    def wait_for_change(self, timeout_s: float) -> None:
        """Until a node came or went, or the time is up."""
        with self._changed:
            self._changed.wait(timeout_s)

    # `MembershipListener`

    def joined(self, port: RemoteNode, member: Member) -> None:
        join = self.controller.join
        self.dispatcher.exclusively(join, member.info, time.monotonic(), member.epoch)
        with self._changed:
            self._nodes[member.name] = _Node(port, member)
            self._lost_s.pop(member.name, None)
            self._changed.notify_all()
        self.dispatcher.add_node(port)
        if self._has_begun:  # as its loss was told
            logger.warning("worker %s (epoch %d) has joined", member.name, member.epoch)

    def draining(self, name: str) -> None:
        node = self._nodes.get(name)
        if node is not None:
            node.leaves_by_itself = True
        with contextlib.suppress(NotFoundError):
            drain = self.controller.request_drain
            self.dispatcher.exclusively(drain, name, time.monotonic())
        self.dispatcher.migrate(name)

    def lost(self, name: str, reason: str) -> None:
        with self._changed:
            self._nodes.pop(name, None)
            self._lost_s[name] = time.monotonic()
            self._changed.notify_all()
        leave = self.controller.leave
        self.dispatcher.exclusively(leave, name, time.monotonic(), reason)
        self.dispatcher.lose_node(name, reason)

    def report(self, name: str, epoch: int, report: NodeReport) -> None:
        take_in = self.controller.report
        with contextlib.suppress(StaleEpoch):
            self.dispatcher.exclusively(take_in, name, epoch, report, time.monotonic())
        node = self._nodes.get(name)
        if node is not None and node.port.epoch == epoch:
            node.load = report.load

    def deliver(self, name: str, updates: Sequence[SequenceUpdate]) -> Sequence[StopOrder]:
        return self.dispatcher.deliver(name, updates)

    def begin_policy(self) -> None:
        """From now on roles and numbers of nodes may change: who was to come is here."""
        self._has_begun = True

    # The ticker's thread

    def _tick(self) -> None:
        while not self._stopping.wait(_TICK_S):
            try:
                self._look_after_everything()
            except Exception:
                logger.exception("the control plane could not do its round")

    def _look_after_everything(self) -> None:
        now_s = time.monotonic()
        self.dispatcher.tick()
        if self._has_begun:
            for action in self.dispatcher.exclusively(self.controller.tick, now_s):
                self._carry_out(action)
        if self._fleet is None:
            self._wait_for_workers(now_s)
            return
        with self._changed:
            overdue = {n: at_s for n, at_s in self._lost_s.items() if now_s - at_s > _LAST_RITES_S}
            for name in overdue:
                del self._lost_s[name]
        for name, lost_s in overdue.items():
            self._fleet.kill(name, started_before_s=lost_s)
        self._fleet.tick()
        if not self.is_alive:
            self.dispatcher.fail_all(EngineDeadError("every worker is given up; see the log"))

    def _wait_for_workers(self, now_s: float) -> None:
        """Requests wait for workers that come by themselves, but not for ever."""
        if self._nodes:
            self._inhabited_s = now_s
        elif now_s - self._inhabited_s > self._start_timeout_s:
            why = f"no worker has been there for {self._start_timeout_s:g} s (start_timeout_s)"
            self.dispatcher.fail_all(EngineDeadError(why))

    def _carry_out(self, action: Action) -> None:
        if isinstance(action, AddNode):
            self._add_node(action)
            return
        node = self._nodes.get(action.node)
        if node is None or node.port.epoch != action.epoch:
            return
        if isinstance(action, SwitchRole):
            node.port.set_role(action.role)
        else:
            self._remove_node(node, action)

    def _add_node(self, action: AddNode) -> None:
        if self._fleet is None:
            logger.warning(
                "one more %s node is wanted (%s); start one: flowkv worker --controller %s:%d "
                "--role %s",
                *(action.role.value, action.reason, *self.membership.address, action.role.value),
            )
            return
        with contextlib.suppress(ServerError):  # it is being closed
            self._fleet.add(action.role, taken=set(self._nodes))

    def _remove_node(self, node: _Node, action: RemoveNode) -> None:
        if node.leaves_by_itself:
            return
        ours = {slot.name for slot in self._fleet.slots} if self._fleet is not None else set()
        if self._fleet is not None and action.node in ours:
            self._fleet.retire(action.node)
        else:
            node.port.drain(self._drain_timeout_s)


class _Node:
    """One membership, as the front sees it.

    Attributes:
        load: None before the first report.
        leaves_by_itself: it said so; nobody has to send it away.
    """

    __slots__ = ("leaves_by_itself", "load", "member", "port")

    def __init__(self, port: RemoteNode, member: Member) -> None:
        self.port = port
        self.member = member
        self.load: NodeLoad | None = None
        self.leaves_by_itself = False
