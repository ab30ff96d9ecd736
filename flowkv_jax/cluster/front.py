"""`ClusterEngine`: worker processes as one engine, for the gRPC front door. No JAX.

Text is made here, nodes deal in token ids. Seeds of requests that bring none are counted here, so
answers do not depend on how many nodes there are.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable
from concurrent.futures import Future, wait

from flowkv_jax.cluster.control_plane import ControlPlane
from flowkv_jax.cluster.dispatch_view import DispatchView
from flowkv_jax.cluster.messages import ErrandKind
from flowkv_jax.cluster.submission import Submission
from flowkv_jax.config import ServeConfig
from flowkv_jax.engine.dispatching_engine import DispatchingEngine
from flowkv_jax.engine.grammar_cache import GrammarCache
from flowkv_jax.errors import EngineDeadError, RetryableRequestError, ServerError
from flowkv_jax.kv_transfer.info import KVTransferInfo
from flowkv_jax.load import NodeLoad, total_load
from flowkv_jax.models.description import ModelDescription
from flowkv_jax.worker.fleet import Fleet

_ERRAND_TIMEOUT_S = 60.0
"""For what nodes do for administrators; writing a long profile takes longest."""


class NotReady(ServerError):
    """Workers did not come in time, or cannot be started."""


class ClusterEngine(DispatchingEngine):
    """A `ServingEngine` over workers. Ready once `wait_until_ready` has returned.

    Args:
        model: as the front reads it; workers must serve the same.
        control: ours from now on.
        fleet: what starts workers; None where they come by themselves.
    """

    def __init__(
        self,
        config: ServeConfig,
        model: ModelDescription,
        control: ControlPlane,
        fleet: Fleet | None,
    ) -> None:
        view = DispatchView(control.dispatcher, control.controller)
        super().__init__(config.engine, model, control.dispatcher, view)
        self._start_timeout_s = config.cluster.start_timeout_s
        self._control = control
        self._fleet = fleet

    def wait_until_ready(self, say: Callable[[str], None]) -> None:
        """Until as many workers have joined as nodes are asked for.

        Args:
            say: told of each that joins.

        Raises:
            NotReady: the time is up, or a worker could not be started. Those that come by
                themselves are waited for without end.
        """
        control, fleet = self._control, self._fleet
        roles, ends_s = self.config.nodes.roles, math.inf
        if fleet is not None:
            for role in roles:
                fleet.add(role)
            ends_s = time.monotonic() + self._start_timeout_s
        control.start(fleet)
        greeted: list[str] = []
        while True:
            names = [member.name for member in control.members]
            for name in names:
                if name not in greeted:
                    greeted.append(name)
                    say(f"{name} has joined ({len(greeted)} of {len(roles)})")
            if len(names) >= len(roles):
                break
            self._require_hope(ends_s, len(roles) - len(names))
            control.wait_for_change(0.2)
        self._learn_from_workers()
        control.begin_policy()

    def _require_hope(self, ends_s: float, num_missing: int) -> None:
        slots = self._fleet.slots if self._fleet is not None else []
        for slot in slots:
            if slot.last_death:
                raise NotReady(f"worker {slot.name} did not start: {slot.last_death}")
        if time.monotonic() > ends_s:
            raise NotReady(
                f"{num_missing} workers have not joined within start_timeout_s="
                f"{self._start_timeout_s:g}"
            )

    def _learn_from_workers(self) -> None:
        """Take from the workers what only they know."""
        members = self._control.members
        if not members:
            raise NotReady("every worker was lost while it joined")
        facts = members[0].join.model
        nodes = [member.join.node for member in members]
        info = self._model.info(facts.layout, nodes[0].num_blocks)
        # A sequence may come to any of them.
        max_request_tokens = min(node.max_request_tokens for node in nodes)
        grammars = GrammarCache.of(self._model.tokenizer, info)
        self._settle(info, grammars, max_request_tokens=max_request_tokens)

    # `ServingEngine`

    def reset_prefix_cache(self) -> bool:
        """See `ServingEngine`."""
        return self._run_errand(ErrandKind.RESET_PREFIX_CACHE)

    def start_profile(self, duration_s: float) -> None:
        """See `ServingEngine`."""
        self._run_errand(ErrandKind.START_PROFILE, duration_s)

    def stop_profile(self) -> None:
        """See `ServingEngine`."""
        self._run_errand(ErrandKind.STOP_PROFILE)

    def _run_errand(self, kind: ErrandKind, duration_s: float = 0.0) -> bool:
        """Whether all nodes say yes. All are waited for before the first failure is raised."""
        asked = self._control.run_errand(kind, duration_s)
        _, late = wait(asked.values(), _ERRAND_TIMEOUT_S)
        for name, future in asked.items():
            if future in late:
                raise RetryableRequestError(
                    f"node {name} has not answered to {kind.value} within {_ERRAND_TIMEOUT_S:g} s"
                )
        results = [future.result() for future in asked.values()]
        return all(results)

    def get_loads(self) -> NodeLoad:
        """Of all nodes together, as they reported last; what waits for a node counts as waiting."""
        loads = self._control.loads or [_NO_LOAD]
        total = total_load(loads)
        waiting = total.num_requests_waiting + self._dispatcher.num_pending
        return dataclasses.replace(total, num_requests_waiting=waiting)

    def kv_transfer_info(self) -> KVTransferInfo | None:
        """None: servers with worker processes take no part in hand-offs between servers."""
        return None

    @property
    def is_healthy(self) -> bool:
        """A node is there, or the fleet is starting one; requests wait for it meanwhile."""
        return self._control.is_alive

    @property
    def description(self) -> str:
        """Where workers join, and who is there, for people."""
        host, port = self._control.membership.address
        names = ", ".join(f"{m.name} ({m.role.value})" for m in self._control.members)
        return f"workers join at {host}:{port}; nodes: {names}"

    def shutdown(self) -> None:
        """End every request and worker. Idempotent."""
        self._control.close()

    def _submit(self, submission: Submission) -> Future[None]:
        """`Dispatcher.submit`, or `EngineDeadError` where nobody will ever serve it."""
        if self._fleet is None or self._control.is_alive:
            return self._dispatcher.submit(submission)
        refused: Future[None] = Future()
        refused.set_exception(EngineDeadError("every worker is given up; see the server's log"))
        return refused


_NO_LOAD = NodeLoad(
    num_requests_running=0,
    num_requests_waiting=0,
    num_requests_swapped=0,
    num_waiting_tokens=0,
    kv_cache_usage=0.0,
    num_blocks=0,
    num_free_blocks=0,
    fragmentation=0.0,
    prefix_cache_queries=0,
    prefix_cache_hits=0,
    num_preemptions=0,
    token_budget_used=0.0,
)
