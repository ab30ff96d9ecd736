"""A scripted engine behind a real server on loopback.

The fake answers every prompt with the tokens 0, 1, 2, .. and the texts "t0 ", "t1 ", .., or with
the texts of a `script`. A test that needs an order of events puts a `Pause` in front of a token and
waits for `reached`.
"""

import asyncio
import contextlib
import queue
import threading
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc.aio

from flowkv_jax.config import CacheConfig, ServerConfig
from flowkv_jax.controller.snapshot import ClusterSnapshot, Regime
from flowkv_jax.errors import (
    DeadlineExceeded,
    DuplicateRequestError,
    EngineDeadError,
    UnprocessableError,
)
from flowkv_jax.kv_transfer.info import KVTransferInfo
from flowkv_jax.load import ModelInfo, NodeLoad
from flowkv_jax.metrics.reading import Reading, ServedModel
from flowkv_jax.metrics.serving_metrics import ServingMetrics
from flowkv_jax.outputs import (
    CompletionOutput,
    FinishReason,
    Logprob,
    RequestMetrics,
    RequestOutput,
)
from flowkv_jax.rpc.cluster_view import ClusterView
from flowkv_jax.rpc.flowkv.v1 import flowkv_pb2_grpc as pb_grpc
from flowkv_jax.sampling_params import SamplingParams
from flowkv_jax.serving import Server

MODEL_INFO = ModelInfo(
    model="models/fake.gguf",
    served_model_name="fake",
    architecture="LlamaForCausalLM",
    dtype="float32",
    max_model_len=64,
    vocab_size=1000,
    eos_token_ids=(2, 3),
    num_layers=2,
    num_kv_heads=3,
    head_dim=4,
    block_size=16,
    num_blocks=100,
    has_chat_template=True,
)
LOAD = NodeLoad(
    num_requests_running=1,
    num_requests_waiting=2,
    num_requests_swapped=3,
    num_waiting_tokens=4,
    kv_cache_usage=0.25,
    num_blocks=100,
    num_free_blocks=75,
    fragmentation=0.5,
    prefix_cache_queries=10,
    prefix_cache_hits=5,
    num_preemptions=1,
    token_budget_used=0.75,
)
NO_NODES = ClusterSnapshot(
    now_s=0.0,
    regime=Regime.NORMAL,
    prefill_load=0.0,
    decode_load=0.0,
    prefill_demand_nodes=0.0,
    nodes=(),
    role_load_low=0.25,
    role_load_high=0.6,
)
METRICS = RequestMetrics(
    arrival_time=0.0,
    queued_ts=0.0,
    scheduled_ts=1.0,
    first_token_ts=2.0,
    last_token_ts=3.5,
    num_preemptions=1,
)


class FakeTokenizer:
    """One token a character: its code point, below the vocabulary size."""

    bos_token: str | None = "<s>"
    eos_token: str | None = "</s>"
    bos_token_id: int | None = 1
    has_token_bytes = True

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([token_id % 256])

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [1] * add_special_tokens + [ord(character) for character in text]

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return "".join(chr(i) for i in token_ids if i > 3 or not skip_special_tokens)

    def to_json(self) -> str:
        return '{"model": "fake"}'


class Pause:
    """A place where every request of the fake waits."""

    def __init__(self) -> None:
        self.reached = asyncio.Event()
        self.released = asyncio.Event()

    async def wait(self) -> None:
        self.reached.set()
        await self.released.wait()


@dataclass
class Received:
    """What the engine was asked."""

    prompt: Any
    params: SamplingParams
    request_id: str
    priority: int
    cache_salt: str | None
    timeout: float | None
    kv_transfer_params: Mapping[str, Any] | None = None
    aborted: asyncio.Event = field(default_factory=asyncio.Event)
    loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.get_running_loop)


class FakeEngine:
    """See the module. `failures` maps the number of tokens sent before it to an error."""

    def __init__(self) -> None:
        self.received: list[Received] = []
        self.live: dict[str, Received] = {}
        self.pauses: dict[int, Pause] = {}
        self.failures: dict[int, BaseException] = {}
        self.is_healthy = True
        self.cluster: ClusterView | None = None
        self.was_shut_down = False
        self.profiles: list[float] = []
        self.chat_template: str | None = "{{ messages }}"
        self.max_num_seqs = 8
        self.metrics = ServingMetrics(
            lambda: Reading(snapshot=NO_NODES), ServedModel.of(MODEL_INFO, CacheConfig())
        )
        self.kv_info: KVTransferInfo | None = None
        self.kv_answer: dict[str, Any] | None = None
        self.script: list[str] | None = None
        """Texts of the tokens of every answer, which stops by itself behind the last."""
        self.rendered: list[tuple[list[Any], Mapping[str, Any] | None]] = []
        """Conversations and template variables."""
        self.template_text = ""
        """What the template writes in front of a conversation."""
        self._idle = asyncio.Event()
        self._idle.set()

    def pause_before(self, token: int) -> Pause:
        return self.pauses.setdefault(token, Pause())

    async def wait_until_idle(self) -> None:
        async with asyncio.timeout(20):
            await self._idle.wait()

    async def async_generate(
        self,
        prompt: str | list[int] | Mapping[str, Any],
        sampling_params: SamplingParams,
        *,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
        timeout: float | None = None,
        kv_transfer_params: Mapping[str, Any] | None = None,
    ) -> AsyncIterator[RequestOutput]:
        if request_id is None:
            raise TypeError("the server names every request")
        if request_id in self.live:
            raise DuplicateRequestError(f"request_id={request_id!r} is in use")
        if not self.is_healthy:
            raise EngineDeadError("the engine is dead")
        request = Received(
            prompt, sampling_params, request_id, priority, cache_salt, timeout, kv_transfer_params
        )
        self.received.append(request)
        self.live[request_id] = request
        self._idle.clear()
        try:
            async with asyncio.timeout(timeout):
                async for output in self._answer(request):
                    yield output
        except DeadlineExceeded:
            raise
        except TimeoutError:
            raise DeadlineExceeded(f"ran past its {timeout} s") from None
        finally:
            del self.live[request_id]
            if not self.live:
                self._idle.set()

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        template_variables: Mapping[str, Any] | None = None,
    ) -> list[int]:
        self.rendered.append((list(messages), template_variables))
        turns = "|".join(str(turn.get("content")) for turn in messages)
        return FakeTokenizer().encode(self.template_text + turns)

    def abort(self, request_id: str | Sequence[str]) -> int:
        ids = [request_id] if isinstance(request_id, str) else request_id
        known = [self.live[name] for name in ids if name in self.live]
        for request in known:
            request.loop.call_soon_threadsafe(request.aborted.set)
        return len(known)

    def get_tokenizer(self) -> FakeTokenizer:
        return FakeTokenizer()

    def get_default_sampling_params(self) -> SamplingParams:
        return SamplingParams(temperature=0.5)

    def get_loads(self) -> NodeLoad:
        return LOAD

    def start_profile(self, duration_s: float) -> None:
        self.profiles.append(duration_s)

    def stop_profile(self) -> None:
        if not self.profiles:
            raise UnprocessableError("no profile is being recorded")
        self.profiles.clear()

    def reset_prefix_cache(self) -> bool:
        return not self.live

    def model_info(self) -> ModelInfo:
        return MODEL_INFO

    def kv_transfer_info(self) -> KVTransferInfo | None:
        return self.kv_info

    def shutdown(self) -> None:
        self.was_shut_down = True

    async def _answer(self, request: Received) -> AsyncIterator[RequestOutput]:
        params = request.params
        prompt_ids = request.prompt
        if not isinstance(prompt_ids, list):
            prompt_ids = FakeTokenizer().encode(str(prompt_ids))
        prompt = request.prompt if isinstance(request.prompt, str) else None
        if params.echo and prompt is None:
            prompt = FakeTokenizer().decode(prompt_ids)
        num_tokens = MODEL_INFO.max_model_len if params.max_tokens is None else params.max_tokens
        ending: FinishReason = "stop" if params.stop_strings else "length"
        if self.script is not None and len(self.script) <= num_tokens:
            num_tokens, ending = len(self.script), "stop"
        for token in range(num_tokens):
            if token in self.pauses:
                await _first(self.pauses[token].wait(), request.aborted.wait())
            if token in self.failures:
                raise self.failures[token]
            is_aborted = request.aborted.is_set()
            is_last = is_aborted or token == num_tokens - 1
            text = f"t{token} " if self.script is None else self.script[token]
            if params.echo and token == 0:
                text = f"{prompt}{text}"
            reason = None if not is_last else "abort" if is_aborted else ending
            for index in range(params.n):
                yield RequestOutput(
                    request_id=request.request_id,
                    prompt=prompt,
                    prompt_token_ids=prompt_ids,
                    outputs=[_delta(params, index, token, text, reason)],
                    finished=is_last and index == params.n - 1,
                    prompt_logprobs=_prompt_logprobs(params, prompt_ids),
                    num_cached_tokens=1,
                    metrics=METRICS,
                    kv_transfer_params=self.kv_answer if is_last else None,
                )
            if is_aborted:
                return


def _delta(
    params: SamplingParams, index: int, token: int, text: str, reason: FinishReason | None
) -> CompletionOutput:
    wants_logprobs = params.logprobs is not None
    return CompletionOutput(
        index=index,
        text=text,
        token_ids=[token],
        delta_text=text,
        delta_token_ids=[token],
        cumulative_logprob=-0.5 * (token + 1) if wants_logprobs else None,
        logprobs=[{token: Logprob(-0.5, 1, f"t{token} ")}] if wants_logprobs else None,
        finish_reason=reason,
        stop_reason=params.stop_strings[0] if reason == "stop" and params.stop_strings else None,
    )


def _prompt_logprobs(params: SamplingParams, prompt_ids: list[int]) -> Any:
    if params.prompt_logprobs is None:
        return None
    return [None, *({i: Logprob(-1.0, 2)} for i in prompt_ids[1:])]


async def _first(*waits: Any) -> None:
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@contextlib.asynccontextmanager
async def serving(
    engine: FakeEngine, environ: Mapping[str, str] | None = None, **settings: Any
) -> AsyncIterator[Server]:
    """A started server on free loopback ports, HTTP's if `port=0` is given; afterwards the engine
    must hold nothing."""
    defaults: dict[str, Any] = {"port": None, "grpc_port": 0, "stream_interval_ms": 0.0}
    config = ServerConfig(**{**defaults, **settings})
    server = Server(engine, config, environ=environ or {}, health_interval_s=60)
    await server.start()
    try:
        yield server
    finally:
        await server.stop()
        await engine.wait_until_idle()
    assert server.num_live_requests == 0


@contextlib.contextmanager
def served(
    engine: FakeEngine, environ: Mapping[str, str] | None = None, **settings: Any
) -> Iterator[str]:
    """The address of a server with an event loop and a thread of its own."""
    started: queue.SimpleQueue[Any] = queue.SimpleQueue()

    async def serve() -> None:
        ended = asyncio.Event()
        async with serving(engine, environ, **settings) as server:
            loop = asyncio.get_running_loop()
            started.put((server.address, lambda: loop.call_soon_threadsafe(ended.set)))
            await ended.wait()

    errors: list[BaseException] = []

    def run() -> None:
        try:
            asyncio.run(serve())
        except BaseException as error:
            errors.append(error)
            started.put(error)

    thread = threading.Thread(target=run)
    thread.start()
    address, end = started.get(timeout=30)
    try:
        yield address
    finally:
        end()
        thread.join(30)
    assert not thread.is_alive() and errors == []


@contextlib.asynccontextmanager
async def stub_of(server: Server, **options: Any) -> AsyncIterator[Any]:
    """A plain generated stub, as any client has it."""
    async with grpc.aio.insecure_channel(server.address, **options) as channel:
        yield pb_grpc.FlowKVStub(channel)
