"""The nodes of one process, with the dispatcher and the controller that drive them.

The same dispatcher, controller and hand-off serve worker processes; here a node is reached by a
call, and blocks move between pools of one address space.
"""

from __future__ import annotations

import logging
import threading
import time
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from functools import partial

from flowkv_jax.cluster.dispatch_view import DispatchView
from flowkv_jax.cluster.dispatcher import Dispatcher
from flowkv_jax.cluster.submission import Submission
from flowkv_jax.config import EngineConfig
from flowkv_jax.controller.controller import Controller, StaleEpoch
from flowkv_jax.controller.role import Role
from flowkv_jax.controller.snapshot import NUM_POOL_CELLS, NodeInfo, NodeReport
from flowkv_jax.engine.build import BuiltEngine, NodeParts
from flowkv_jax.engine.node import Node
from flowkv_jax.engine.transfer_backends import transfer_backends
from flowkv_jax.errors import ConfigError, EngineDeadError
from flowkv_jax.handoff.agent import HandoffAgent
from flowkv_jax.handoff.exchange import Exchange
from flowkv_jax.kv_transfer.connector import KVConnector
from flowkv_jax.load import NodeLoad, total_load
from flowkv_jax.worker.fingerprint import model_facts
from transfer.config import TransferConfig

REPORT_INTERVAL_S = 0.1
_ENGINE_ID_CHARACTERS = 8
_logger = logging.getLogger(__name__)


class LocalCluster:
    """Starts one node for each of the parts of `built`.

    Args:
        secret: shared with other servers; see `KVTransferConfig`.

    Attributes:
        dispatcher: takes requests in.
        controller: decides; called through `Dispatcher.exclusively` only.
        nodes: by name.
        view: what others may see and steer of it.
    """

    def __init__(self, config: EngineConfig, built: BuiltEngine, secret: bytes = b"") -> None:
        roles = config.nodes.roles
        self._is_single = is_single = len(roles) == 1
        self.controller = Controller(config.controller)
        self.dispatcher = Dispatcher(
            self.controller,
            kv_load_failure_policy=config.handoff.kv_load_failure_policy,
            max_waiting_requests=config.scheduler.max_waiting_requests,
            max_waiting_tokens=config.scheduler.max_waiting_tokens,
            hash_block_size=None if is_single else built.layout.block_size,
        )
        self._connector: KVConnector | None = None
        self._exchange: Exchange | None = None
        if config.kv_transfer.kv_role is not None:
            self._exchange = _exchange_with_servers(config, secret)
            self._connector = self._connect(config, built, self._exchange)
        elif not is_single:
            self._exchange = Exchange(links=config.handoff.handoff_links)
        self._epochs: dict[str, int] = {}
        self.nodes: dict[str, Node] = {}
        names = _names(roles, "" if self._connector is None else self._connector.engine_id)
        self._pools = {
            name: parts.kv.allocator for name, parts in zip(names, built.nodes, strict=True)
        }
        for name, role, parts in zip(names, roles, built.nodes, strict=True):
            self.nodes[name] = self._start(name, role, config, built, parts)
        refresh = self._report_loads if is_single else None
        connector = self._connector
        self.view = DispatchView(
            self.dispatcher,
            self.controller,
            refresh=refresh,
            num_expired_holds=None if connector is None else lambda: connector.num_expired_holds,
        )
        self._stopping = threading.Event()
        self._ticker: threading.Thread | None = None
        if self._exchange is not None:
            self._ticker = threading.Thread(
                target=self._tick, name="flowkv-controller", daemon=True
            )
            self._ticker.start()
        if self._connector is not None:
            try:
                self._connector.open()
            except ConfigError:
                self.shutdown()
                raise

    @property
    def is_alive(self) -> bool:
        """Some node can serve."""
        return any(node.is_alive for node in self.nodes.values())

    def submit(self, submission: Submission) -> Future[None]:
        """`Dispatcher.submit`, or `EngineDeadError` where nobody is left to serve it."""
        if self.is_alive and submission.kv_transfer is not None and self._connector is not None:
            return self._connector.submit(submission)
        if self.is_alive:
            return self.dispatcher.submit(submission)
        refused: Future[None] = Future()
        refused.set_exception(next(iter(self.nodes.values())).death)
        return refused

    @property
    def connector(self) -> KVConnector | None:
        """Its part in hand-offs between servers."""
        return self._connector

    @property
    def load(self) -> NodeLoad:
        """Of all nodes together."""
        return total_load([node.load for node in self.nodes.values()])

    def stats(self) -> dict[str, float]:
        """Steps of all nodes, and the largest of their median host times of a step, ms."""
        each = [node.stats() for node in self.nodes.values()]
        return {
            "num_steps": sum(stats["num_steps"] for stats in each),
            "host_ms_per_step": max(stats["host_ms_per_step"] for stats in each),
        }

    def shutdown(self) -> None:
        """Abort what runs and end every thread. Idempotent."""
        self._stopping.set()
        if self._ticker is not None and self._ticker is not threading.current_thread():
            self._ticker.join()
        self.dispatcher.close(EngineDeadError("the engine was shut down"))
        if self._connector is not None:
            self._connector.close()
        for node in self.nodes.values():
            node.shutdown()
        if self._exchange is not None:
            self._exchange.close()

    def _start(
        self, name: str, role: Role, config: EngineConfig, built: BuiltEngine, parts: NodeParts
    ) -> Node:
        node = Node(
            name,
            parts.runner,
            parts.scheduler,
            parts.kv,
            vocab_size=built.model_info.vocab_size,
            eos_token_ids=built.model_info.eos_token_ids,
            deliver=(self._connector or self.dispatcher).deliver,
            grammars=built.grammars,
            on_death=lambda error: self._on_death(name, error),
            enable_overlap=config.runtime.enable_overlap,
            is_urgent=self._connector is not None,
            debug=config.runtime.debug,
        )
        if self._exchange is not None:
            connector, holds = self._connector, None
            if connector is not None:
                holds = connector.make_holds(name, parts.kv)
                connector.add_node(name, node, holds)
            agent = HandoffAgent(
                node, self._exchange.transfers, built.layout, config.handoff, holds
            )
            node.attach(agent)
            self._exchange.attach(name, agent, parts.pool.access)
        info = NodeInfo(
            name=name,
            role=role,
            num_blocks=parts.kv.num_blocks,
            block_size=built.layout.block_size,
            max_num_seqs=config.scheduler.max_num_seqs,
            max_num_batched_tokens=config.scheduler.max_num_batched_tokens,
            block_bytes=built.layout.bytes_per_block,
        )
        join = self.controller.join
        self._epochs[name] = self.dispatcher.exclusively(join, info, time.monotonic())
        self.dispatcher.add_node(node)
        return node

    def _on_death(self, name: str, error: EngineDeadError) -> None:
        self.dispatcher.exclusively(self.controller.leave, name, time.monotonic(), str(error))
        self.dispatcher.lose_node(name, str(error))
        if not self.is_alive:
            self.dispatcher.fail_all(error)
            self.dispatcher.close(error)

    def _tick(self) -> None:
        """Carry reports to the controller and its actions out, until shut down."""
        while not self._stopping.wait(REPORT_INTERVAL_S):
            try:
                if self._connector is not None:
                    self._connector.tick()
                if not self._is_single:
                    self._tend_nodes()
                self.dispatcher.tick()
            except Exception:  # the next time may go better, and requests go on meanwhile
                _logger.exception("the controller failed")

    def _tend_nodes(self) -> None:
        for name, node in self.nodes.items():
            if node.is_alive:
                node.report().add_done_callback(partial(self._take_report, name))
        # Nodes neither come nor go here: roles are all that can change.
        self.dispatcher.exclusively(self.controller.tick, time.monotonic())

    def _connect(self, config: EngineConfig, built: BuiltEngine, exchange: Exchange) -> KVConnector:
        description = built.description
        return KVConnector(
            config.kv_transfer,
            exchange,
            self.dispatcher,
            model_facts(
                description.architecture, description.config, built.weights_path, built.layout
            ),
            fails_without_kv=config.handoff.kv_load_failure_policy == "fail",
            tensor_parallel_size=config.runtime.tensor_parallel_size,
        )

    def _report_loads(self) -> None:
        """A lone node is steered by nobody, and its load is told only when somebody looks."""
        now_s = time.monotonic()
        for name, node in self.nodes.items():
            pool_map = self._pools[name].used_map(NUM_POOL_CELLS)
            report = NodeReport(load=node.load, pool_map=pool_map, step_tokens=node.step_tokens)
            epoch = self._epochs[name]
            with suppress(StaleEpoch):
                self.dispatcher.exclusively(self.controller.report, name, epoch, report, now_s)

    def _take_report(self, name: str, done: Future[NodeReport]) -> None:
        """On the node's thread."""
        if done.cancelled() or isinstance(done.exception(), EngineDeadError):
            return
        report, take_in = done.result(), self.controller.report
        if self._exchange is not None:
            links = self._exchange.link_loads(name, self.nodes)
            report = replace(report, link_loads=links)
        with suppress(StaleEpoch):
            self.dispatcher.exclusively(take_in, name, self._epochs[name], report, time.monotonic())


def _exchange_with_servers(config: EngineConfig, secret: bytes) -> Exchange:
    transfer = TransferConfig(urgent_readers=True)
    return Exchange(
        transfer,
        secret=secret,
        links=config.handoff.handoff_links,
        backends=transfer_backends(transfer, config.handoff.handoff_backend),
    )


def _names(roles: list[Role], engine_id: str) -> list[str]:
    """Names of the nodes; with an engine id such that no node of another server has one of them."""
    suffix = f".{engine_id[:_ENGINE_ID_CHARACTERS]}" if engine_id else ""
    counts: dict[Role, int] = {}
    names = []
    for role in roles:
        names.append(f"{role.value}-{counts.get(role, 0)}{suffix}")
        counts[role] = counts.get(role, 0) + 1
    return names
