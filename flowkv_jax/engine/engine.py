"""`Engine`: the Python API.

    with Engine("smollm2-135m-instruct") as engine:
        for output in engine.generate(["Hello", "The sea is"], SamplingParams(max_tokens=20)):
            print(output.text)

Calls may come from any thread and any event loop at once; their requests are batched. With
`Engine(model, prefill_nodes=1, decode_nodes=1)` prompts are computed on one node and handed off to
another; answers are the same.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Literal, TypedDict, Unpack, overload

from flowkv_jax.cluster.messages import MAX_PROFILE_S
from flowkv_jax.cluster.secret import read_secret
from flowkv_jax.cluster.submission import OutputSink, Submission
from flowkv_jax.config import EngineConfig, load_config
from flowkv_jax.engine.build import build_engine
from flowkv_jax.engine.dispatching_engine import DispatchingEngine
from flowkv_jax.engine.intake import CallOptions, Messages, ParamsType
from flowkv_jax.engine.local_cluster import LocalCluster
from flowkv_jax.engine.output_stream import OutputStream
from flowkv_jax.engine.profiler import Profiler
from flowkv_jax.engine.prompts import PromptType, as_batch, spread
from flowkv_jax.errors import FlowKVError, ValidationError
from flowkv_jax.kv_transfer.info import KVTransferInfo
from flowkv_jax.load import NodeLoad
from flowkv_jax.outputs import RequestOutput
from flowkv_jax.sampling_params import RequestOutputKind


class GenerateOptions(TypedDict, total=False):
    """Keyword arguments of `Engine.generate` beside `stream`."""

    input_ids: Sequence[int] | Sequence[Sequence[int]] | None
    request_id: str | Sequence[str] | None
    priority: int | Sequence[int]
    cache_salt: str | None
    timeout: float | None
    kv_transfer_params: Mapping[str, object] | None
    use_tqdm: bool


class Engine(DispatchingEngine):
    """A model, and the nodes of this process that serve it: one, unless told otherwise.

    Args:
        model: a known name, a GGUF file or a Hugging Face folder; None takes the configuration's.
        config: the whole configuration; None for defaults.
        load_progress: called with (weights loaded, weights in all).
        cluster_secret: shared with the servers that it exchanges K/V with (`kv_role`); None for
            that of the environment, FLOWKV_CLUSTER_SECRET.
        **overrides: single settings by name, such as `max_num_seqs=8`; they win over `config`.

    Raises:
        ConfigError: unknown or impossible setting.
        NotFoundError, ModelFormatError: the model is missing or broken.
    """

    def __init__(
        self,
        model: str | None = None,
        *,
        config: EngineConfig | None = None,
        load_progress: Callable[[int, int], None] | None = None,
        cluster_secret: bytes | None = None,
        **overrides: Any,
    ) -> None:
        if model is not None:
            overrides["model"] = model
        config = load_config(EngineConfig, base=config, overrides=overrides)
        num_nodes = len(config.nodes.roles)
        parts = build_engine(
            config,
            load_progress,
            num_nodes=num_nodes,
            records_prefix_events=num_nodes > 1,
        )
        self._runners = [node.runner for node in parts.nodes]
        if cluster_secret is None:
            cluster_secret = read_secret(None, os.environ)
        self._cluster = LocalCluster(config, parts, cluster_secret)
        super().__init__(config, parts.description, self._cluster.dispatcher, self._cluster.view)
        self._settle(parts.model_info, parts.grammars, max_request_tokens=parts.max_request_tokens)
        self._profiler = Profiler(self.config.runtime.profile_dir)
        # An engine that is dropped ends its threads. At exit its nodes see to it.
        weakref.finalize(self, _shut_down_elsewhere, self._cluster).atexit = False

    @classmethod
    def from_config(cls, config: EngineConfig | str | Path) -> Engine:
        """An engine from a configuration, or from a YAML file."""
        if isinstance(config, EngineConfig):
            return cls(config=config)
        return cls(config=load_config(EngineConfig, config))

    # Generating

    @overload
    def generate(
        self,
        prompts: PromptType | Sequence[PromptType] | None = ...,
        sampling_params: ParamsType | Sequence[ParamsType] | None = ...,
        *,
        stream: Literal[False] = ...,
        **options: Unpack[GenerateOptions],
    ) -> list[RequestOutput]: ...

    @overload
    def generate(
        self,
        prompts: PromptType | Sequence[PromptType] | None = ...,
        sampling_params: ParamsType | Sequence[ParamsType] | None = ...,
        *,
        stream: Literal[True],
        **options: Unpack[GenerateOptions],
    ) -> Iterator[RequestOutput]: ...

    @overload
    def generate(
        self,
        prompts: PromptType | Sequence[PromptType] | None = ...,
        sampling_params: ParamsType | Sequence[ParamsType] | None = ...,
        *,
        stream: bool,
        **options: Unpack[GenerateOptions],
    ) -> list[RequestOutput] | Iterator[RequestOutput]: ...

    def generate(
        self,
        prompts: PromptType | Sequence[PromptType] | None = None,
        sampling_params: ParamsType | Sequence[ParamsType] | None = None,
        *,
        input_ids: Sequence[int] | Sequence[Sequence[int]] | None = None,
        stream: bool = False,
        request_id: str | Sequence[str] | None = None,
        priority: int | Sequence[int] = 0,
        cache_salt: str | None = None,
        timeout: float | None = None,
        kv_transfer_params: Mapping[str, Any] | None = None,
        use_tqdm: bool = False,
    ) -> list[RequestOutput] | Iterator[RequestOutput]:
        """Answer one prompt or many.

        Args:
            prompts: text, token ids, a dict, or a list of these. A list of ints is one prompt.
            sampling_params: for all, or one a prompt; dicts are accepted. None takes the model's
                recommendations.
            input_ids: SGLang's spelling of `prompts` for token ids.
            stream: return an iterator of outputs as they come, interleaved over the prompts.
                Leaving it early (break, close) aborts what still runs.
            request_id: one a prompt; None makes them up.
            priority: lower runs first, with scheduling_policy="priority".
            cache_salt: share cached prompt beginnings only with requests of the same salt.
            timeout: seconds until `DeadlineExceeded`.
            kv_transfer_params: as for `async_generate`; for a single prompt.
            use_tqdm: show a progress bar on stderr.

        Returns:
            A list in prompt order (also for a single prompt), or the iterator.

        Raises:
            ValidationError: before anything runs.
            DeadlineExceeded, GenerationError, QueueOverflowError, EngineDeadError.
        """
        if (prompts is None) == (input_ids is None):
            raise ValidationError(
                "give either prompts or input_ids", parameter="prompts", value=prompts
            )
        batch = as_batch(prompts if prompts is not None else input_ids)  # type: ignore[arg-type]
        if kv_transfer_params is not None and len(batch) != 1:
            raise ValidationError(
                f"kv_transfer_params belong to one prompt, got {len(batch)}",
                parameter="kv_transfer_params",
                value=kv_transfer_params,
            )
        calls = zip(
            batch,
            spread("sampling_params", sampling_params, len(batch)),
            spread("request_id", request_id, len(batch)),
            spread("priority", priority, len(batch)),
            strict=True,
        )
        kind = None if stream else RequestOutputKind.FINAL_ONLY
        outputs = OutputStream(self._withdraw)
        for index, (one, params, its_id, its_priority) in enumerate(calls):
            options = CallOptions(its_id, its_priority, cache_salt, timeout, kv_transfer_params)
            sink = outputs.sink(index)
            outputs.watch(index, self._prepare(one, params, options, sink, kind=kind))
        outputs.start(self._submit)
        return outputs if stream else outputs.gather(show_progress=use_tqdm)

    def stream_generate(
        self,
        prompts: PromptType | Sequence[PromptType],
        sampling_params: ParamsType | Sequence[ParamsType] | None = None,
        **options: Unpack[GenerateOptions],
    ) -> Iterator[RequestOutput]:
        """`generate(..., stream=True)`, as MLX spells it."""
        return self.generate(prompts, sampling_params, stream=True, **options)

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: ParamsType | Sequence[ParamsType] | None = None,
        *,
        stream: bool = False,
        **options: Unpack[GenerateOptions],
    ) -> list[RequestOutput] | Iterator[RequestOutput]:
        """Answer one conversation or many with the model's own template.

        Args:
            messages: a list of {"role": ..., "content": ...}, or a list of such lists.
            sampling_params: as for `generate`; without max_tokens the answer may fill the context.
            **options: as for `generate`.

        Raises:
            ValidationError: malformed messages or template.
            UnprocessableError: the model has no chat template.
        """
        is_list = isinstance(messages, Sequence) and not isinstance(messages, str)
        is_many = is_list and bool(messages) and not isinstance(messages[0], Mapping)
        conversations: Sequence[Messages] = messages if is_many else [messages]  # type: ignore[assignment,list-item]
        intake = self._ready.intake
        prompts = [intake.chat_prompt(conversation) for conversation in conversations]
        params = [
            intake.chat_params(given)
            for given in spread("sampling_params", sampling_params, len(prompts))
        ]
        return self.generate(prompts, params, stream=stream, **options)

    # Asking

    def get_loads(self) -> NodeLoad:
        """Queues and KV use after the latest step, of all nodes together."""
        return self._cluster.load

    def kv_transfer_info(self) -> KVTransferInfo | None:
        """Its part in hand-offs between servers that a router drives; None where it has none."""
        connector = self._cluster.connector
        return None if connector is None else connector.info

    def stats(self) -> dict[str, float]:
        """Steps so far and the median host time of a step in milliseconds."""
        return self._cluster.stats()

    @property
    def is_healthy(self) -> bool:
        """False once the engine can serve no request any more."""
        return self._cluster.is_alive

    # Managing

    def warmup(self, progress: Callable[[int, int], None] | None = None) -> int:
        """Compile every shape a step may use, so that no request waits for a compilation.

        Args:
            progress: called with (shapes done, shapes in all).

        Returns:
            The number of shapes.
        """
        # Nodes share their programs: what one has compiled, all have.
        node = next(iter(self._cluster.nodes.values()))
        default = self.get_default_sampling_params()
        return node.call(lambda: self._runners[0].warmup(default, progress)).result()

    def start_profile(self, duration_s: float = MAX_PROFILE_S) -> None:
        """Record a profile of JAX into `profile_dir`, until `stop_profile` or for `duration_s`.

        Raises:
            UnprocessableError: there is no `profile_dir`, or a profile is being recorded.
        """
        self._profiler.start("engine", duration_s).result()

    def stop_profile(self) -> None:
        """Write the profile; takes seconds.

        Raises:
            UnprocessableError: none is being recorded.
        """
        self._profiler.stop().result()

    def reset_prefix_cache(self) -> bool:
        """Forget cached prompts. False if some are in use (they are forgotten once let go)."""
        asked = [node.reset_prefix_cache() for node in self._cluster.nodes.values()]
        return all(answer.result() for answer in asked)

    def shutdown(self) -> None:
        """Abort what runs and end the engine's threads. Idempotent."""
        self._profiler.close()
        self._cluster.shutdown()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *exception: object) -> None:
        self.shutdown()

    # Inside

    def _prepare(
        self,
        prompt: PromptType,
        params: ParamsType | None,
        options: CallOptions,
        sink: OutputSink,
        *,
        kind: RequestOutputKind | None = None,
    ) -> Submission:
        """`Intake.prepare`; who holds the prompt's K/V is told of a request that is refused."""
        try:
            return super()._prepare(prompt, params, options, sink, kind=kind)
        except FlowKVError:
            if self._cluster.connector is not None:
                self._cluster.connector.refused(options.kv_transfer_params)
            raise

    def _submit(self, submission: Submission) -> Future[None]:
        return self._cluster.submit(submission)


def _shut_down_elsewhere(cluster: LocalCluster) -> None:
    """Not here: a garbage collection may come upon an engine on a thread of its own nodes."""
    threading.Thread(target=cluster.shutdown, name="flowkv-shutdown").start()
