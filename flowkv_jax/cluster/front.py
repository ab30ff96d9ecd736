"""`ClusterEngine`: worker processes as one engine, for the gRPC front door. No JAX.

Text is made here, nodes deal in token ids. Seeds of requests that bring none are counted here, so
answers do not depend on how many nodes there are.
"""

from __future__ import annotations

import asyncio
import dataclasses
import math
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from typing import Any

from flowkv_jax.cluster.control_plane import ControlPlane
from flowkv_jax.cluster.dispatch_view import DispatchView
from flowkv_jax.cluster.messages import ErrandKind
from flowkv_jax.cluster.submission import Submission
from flowkv_jax.config import ServeConfig
from flowkv_jax.engine.async_answer import answer
from flowkv_jax.engine.grammar_cache import GrammarCache
from flowkv_jax.engine.intake import CallOptions, Intake, Messages, ParamsType
from flowkv_jax.engine.prompts import PromptType, as_request_ids
from flowkv_jax.errors import EngineDeadError, RetryableRequestError, ServerError
from flowkv_jax.kv_transfer.info import KVTransferInfo
from flowkv_jax.load import ModelInfo, NodeLoad, total_load
from flowkv_jax.metrics.reading import ServedModel
from flowkv_jax.metrics.serving_metrics import ServingMetrics
from flowkv_jax.metrics.spans import Tracing
from flowkv_jax.models.description import ModelDescription
from flowkv_jax.outputs import RequestOutput
from flowkv_jax.sampling_params import SamplingParams
from flowkv_jax.tokenizer import Tokenizer
from flowkv_jax.worker.fleet import Fleet

_ERRAND_TIMEOUT_S = 60.0
"""For what nodes do for administrators; writing a long profile takes longest."""


class NotReady(ServerError):
    """Workers did not come in time, or cannot be started."""


class ClusterEngine:
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
        self._config = config
        self._model = model
        self._control = control
        self._fleet = fleet
        control.dispatcher.trace_with(Tracing(model.served_model_name))
        self._view = DispatchView(control.dispatcher, control.controller)
        self._intake: Intake | None = None
        self._model_info: ModelInfo | None = None
        self._metrics: ServingMetrics | None = None

    def wait_until_ready(self, say: Callable[[str], None]) -> None:
        """Until as many workers have joined as nodes are asked for.

        Args:
            say: told of each that joins.

        Raises:
            NotReady: the time is up, or a worker could not be started. Those that come by
                themselves are waited for without end.
        """
        control, fleet = self._control, self._fleet
        roles, ends_s = self._config.engine.nodes.roles, math.inf
        if fleet is not None:
            for role in roles:
                fleet.add(role)
            ends_s = time.monotonic() + self._config.cluster.start_timeout_s
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
        self._settle()
        control.begin_policy()

    def _require_hope(self, ends_s: float, num_missing: int) -> None:
        slots = self._fleet.slots if self._fleet is not None else []
        for slot in slots:
            if slot.last_death:
                raise NotReady(f"worker {slot.name} did not start: {slot.last_death}")
        if time.monotonic() > ends_s:
            raise NotReady(
                f"{num_missing} workers have not joined within start_timeout_s="
                f"{self._config.cluster.start_timeout_s:g}"
            )

    def _settle(self) -> None:
        """Take from the workers what only they know."""
        members = self._control.members
        if not members:
            raise NotReady("every worker was lost while it joined")
        facts = members[0].join.model
        nodes = [member.join.node for member in members]
        self._model_info = self._model.info(facts.layout, nodes[0].num_blocks)
        self._metrics = ServingMetrics(
            self._view.reading, ServedModel.of(self._model_info, self._config.engine.cache)
        )
        self._intake = Intake(
            self._model_info,
            self._model.tokenizer,
            # A sequence may come to any of them.
            max_request_tokens=min(node.max_request_tokens for node in nodes),
            max_logprobs=self._config.engine.runtime.max_logprobs,
            seed=self._config.engine.model.seed,
            chat_template=self._model.chat_template,
            generation_defaults=self._model.generation_defaults,
            grammars=GrammarCache.of(self._model.tokenizer, self._model_info),
        )

    # `ServingEngine`

    def async_generate(
        self,
        prompt: PromptType,
        sampling_params: ParamsType | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
        timeout: float | None = None,
        kv_transfer_params: Mapping[str, Any] | None = None,
    ) -> AsyncIterator[RequestOutput]:
        """See `ServingEngine`."""
        intake = self._ready_intake()
        options = CallOptions(request_id, priority, cache_salt, timeout, kv_transfer_params)
        return answer(
            lambda sink: intake.prepare(prompt, sampling_params, options, sink),
            self._submit,
            self._control.dispatcher.withdraw,
        )

    async def async_chat(
        self, messages: Messages, sampling_params: ParamsType | None = None, **options: Any
    ) -> AsyncIterator[RequestOutput]:
        """See `ServingEngine`."""
        intake = self._ready_intake()
        prompt = await asyncio.to_thread(intake.chat_prompt, messages)
        stream = self.async_generate(prompt, intake.chat_params(sampling_params), **options)
        try:
            async for output in stream:
                yield output
        finally:
            await stream.aclose()  # type: ignore[attr-defined]

    def render_chat(
        self, messages: Messages, template_variables: Mapping[str, Any] | None = None
    ) -> list[int]:
        """See `ServingEngine`."""
        ids: list[int] = self._ready_intake().chat_prompt(messages, template_variables)[
            "prompt_token_ids"
        ]
        return ids

    def abort(self, request_id: str | Sequence[str]) -> int:
        """See `ServingEngine`."""
        return self._control.dispatcher.abort(as_request_ids(request_id))

    def get_tokenizer(self) -> Tokenizer:
        return self._model.tokenizer

    @property
    def chat_template(self) -> str | None:
        """See `ServingEngine`."""
        return self._model.chat_template

    def get_default_sampling_params(self) -> SamplingParams:
        """See `ServingEngine`."""
        return self._ready_intake().params(None)

    @property
    def max_num_seqs(self) -> int:
        """See `ServingEngine`."""
        engine = self._config.engine
        return engine.scheduler.max_num_seqs * engine.nodes.num_decoding

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
        waiting = total.num_requests_waiting + self._control.dispatcher.num_pending
        return dataclasses.replace(total, num_requests_waiting=waiting)

    def model_info(self) -> ModelInfo:
        """The served model; `num_blocks` is one node's."""
        if self._model_info is None:
            raise RuntimeError("the cluster is not ready")
        return self._model_info

    def kv_transfer_info(self) -> KVTransferInfo | None:
        """None: servers with worker processes take no part in hand-offs between servers."""
        return None

    @property
    def metrics(self) -> ServingMetrics:
        """What it tells Prometheus."""
        if self._metrics is None:
            raise RuntimeError("the cluster is not ready")
        return self._metrics

    @property
    def cluster(self) -> DispatchView:
        """Its nodes: what they do, what was decided, and what became of requests."""
        return self._view

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

    def _ready_intake(self) -> Intake:
        if self._intake is None:
            raise RuntimeError("the cluster is not ready")
        return self._intake

    def _submit(self, submission: Submission) -> Future[None]:
        """`Dispatcher.submit`, or `EngineDeadError` where nobody will ever serve it."""
        if self._fleet is None or self._control.is_alive:
            return self._control.dispatcher.submit(submission)
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
