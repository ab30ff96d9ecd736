"""What engines have alike that give their requests to a dispatcher in their own process. No JAX."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from flowkv_jax.cluster.dispatch_view import DispatchView
from flowkv_jax.cluster.dispatcher import Dispatcher
from flowkv_jax.cluster.submission import OutputSink, Submission
from flowkv_jax.config import EngineConfig
from flowkv_jax.engine.async_answer import answer
from flowkv_jax.engine.doorbell import Doorbell
from flowkv_jax.engine.grammar_cache import GrammarCache
from flowkv_jax.engine.intake import CallOptions, Intake, Messages, ParamsType
from flowkv_jax.engine.prompts import PromptType, as_request_ids
from flowkv_jax.load import ModelInfo
from flowkv_jax.metrics.reading import ServedModel
from flowkv_jax.metrics.serving_metrics import ServingMetrics
from flowkv_jax.metrics.spans import Tracing
from flowkv_jax.models.description import ModelDescription
from flowkv_jax.outputs import RequestOutput
from flowkv_jax.sampling_params import RequestOutputKind, SamplingParams
from flowkv_jax.tokenizer import Tokenizer


class _Settled(NamedTuple):
    """What is known once the nodes are there."""

    info: ModelInfo
    intake: Intake
    metrics: ServingMetrics


class DispatchingEngine(ABC):
    """The caller's side of an engine. Subclasses have the nodes, and call `_settle` when these are
    there: before, requests and most questions raise `RuntimeError`.

    Args:
        view: of `dispatcher`.

    Attributes:
        config: settings of the engine.
    """

    def __init__(
        self,
        config: EngineConfig,
        model: ModelDescription,
        dispatcher: Dispatcher,
        view: DispatchView,
    ) -> None:
        self.config = config
        self._model = model
        self._dispatcher = dispatcher
        self._view = view
        self._settled: _Settled | None = None
        self._doorbells: WeakKeyDictionary[asyncio.AbstractEventLoop, Doorbell] = (
            WeakKeyDictionary()
        )
        dispatcher.trace_with(Tracing(model.served_model_name))

    def _settle(self, info: ModelInfo, grammars: GrammarCache, *, max_request_tokens: int) -> None:
        """
        Args:
            max_request_tokens: prompt plus output that every node can hold.
        """
        intake = Intake(
            info,
            self._model.tokenizer,
            max_request_tokens=max_request_tokens,
            max_logprobs=self.config.runtime.max_logprobs,
            seed=self.config.model.seed,
            chat_template=self._model.chat_template,
            generation_defaults=self._model.generation_defaults,
            kv_role=self.config.kv_transfer.kv_role,
            grammars=grammars,
        )
        served = ServedModel.of(info, self.config.cache)
        self._settled = _Settled(info, intake, ServingMetrics(self._view.reading, served))

    @property
    def _ready(self) -> _Settled:
        if self._settled is None:
            raise RuntimeError("the engine's nodes are not there yet")
        return self._settled

    # Generating

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
        """Answer one prompt as an asynchronous iterator. Closing it aborts the request.

        Args:
            kv_transfer_params: of a router that has prompts computed and decoded on two servers;
                see `flowkv_jax.kv_transfer`.

        Raises:
            As `Engine.generate`, at the first step of the iteration.
        """
        options = CallOptions(request_id, priority, cache_salt, timeout, kv_transfer_params)
        return answer(
            lambda sink: self._prepare(prompt, sampling_params, options, sink),
            self._submit,
            self._withdraw,
            self._doorbells,
        )

    async def async_chat(
        self, messages: Messages, sampling_params: ParamsType | None = None, **options: Any
    ) -> AsyncIterator[RequestOutput]:
        """Answer one conversation with the model's own template, as an asynchronous iterator.

        Raises:
            As `Engine.chat`, at the first step of the iteration.
        """
        intake = self._ready.intake
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
        """A conversation in the model's own template, as token ids.

        Args:
            template_variables: more names for the template (`tools`, for one).

        Raises:
            ValidationError: malformed messages or template.
            UnprocessableError: the model has no chat template.
        """
        prompt = self._ready.intake.chat_prompt(messages, template_variables)
        ids: list[int] = prompt["prompt_token_ids"]
        return ids

    def abort(self, request_id: str | Sequence[str]) -> int:
        """End requests with finish_reason "abort". Unknown ids are passed over.

        Returns:
            How many were alive.
        """
        return self._dispatcher.abort(as_request_ids(request_id))

    # Asking

    def get_tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return self._model.tokenizer

    @property
    def chat_template(self) -> str | None:
        """Jinja text of the template that chats are rendered with."""
        return self._model.chat_template

    @property
    def max_num_seqs(self) -> int:
        """Sequences that are decoded at once, at most, by all nodes together."""
        return self.config.scheduler.max_num_seqs * self.config.nodes.num_decoding

    def get_default_sampling_params(self) -> SamplingParams:
        """What a request gets that brings no parameters: the model's own recommendations."""
        return self._ready.intake.params(None)

    @property
    def cluster(self) -> DispatchView:
        """Its nodes: what they do, what was decided, and what became of requests."""
        return self._view

    @property
    def metrics(self) -> ServingMetrics:
        """What it tells Prometheus."""
        return self._ready.metrics

    def model_info(self) -> ModelInfo:
        """The served model; `num_blocks` is one node's."""
        return self._ready.info

    # Inside

    @abstractmethod
    def _submit(self, submission: Submission) -> Future[None]:
        """`Dispatcher.submit`, or `EngineDeadError` where nobody will ever serve it."""

    def _prepare(
        self,
        prompt: PromptType,
        params: ParamsType | None,
        options: CallOptions,
        sink: OutputSink,
        *,
        kind: RequestOutputKind | None = None,
    ) -> Submission:
        """`Intake.prepare`."""
        return self._ready.intake.prepare(prompt, params, options, sink, kind=kind)

    def _withdraw(self, submissions: Sequence[Submission]) -> None:
        # A method of the engine, so that an engine lives as long as its streams.
        self._dispatcher.withdraw(submissions)
