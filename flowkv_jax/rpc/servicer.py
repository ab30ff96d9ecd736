"""The handlers of `flowkv.v1.FlowKV`.

A streaming call has two tasks. The pump reads the engine into an `OutputBuffer` and alone owns the
engine's iterator: whatever ends it, the iterator is closed, which aborts the request. The handler
takes from the buffer and writes. When the client goes away or the deadline passes, gRPC cancels
the handler, and the handler cancels the pump.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
import uuid
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

from flowkv_jax.checks import bad_value, check_real
from flowkv_jax.errors import (
    DeadlineExceeded,
    EngineDeadError,
    GenerationError,
    NotFoundError,
    RequestCancelled,
    ValidationError,
)
from flowkv_jax.outputs import RequestOutput
from flowkv_jax.rpc import wire
from flowkv_jax.rpc.call_log import CallLog
from flowkv_jax.rpc.engine_protocol import PromptInput, ServingEngine
from flowkv_jax.rpc.flowkv.v1 import flowkv_pb2 as pb
from flowkv_jax.rpc.flowkv.v1 import flowkv_pb2_grpc as pb_grpc
from flowkv_jax.rpc.live_requests import LiveRequests, LiveStream
from flowkv_jax.rpc.output_buffer import OutputBuffer

MAX_REQUEST_ID_CHARACTERS = 256
MAX_TOKENIZE_CHARACTERS = 1 << 20
"""Longest text `Tokenize` takes: it runs on a thread, but nothing can stop it once it runs."""
MAX_DETOKENIZE_IDS = 1 << 20
MAX_CHAT_MESSAGES = 1 << 14
MIN_PROMPT_IDS_READ = 1 << 16
MAX_ABORT_IDS = 128
"""Lists are read on the event loop, where every other call waits; an abort waits for a step."""


@dataclass(frozen=True, slots=True)
class _Options:
    """`RequestOptions`, checked, with the call's deadline folded in."""

    request_id: str
    priority: int
    cache_salt: str | None
    timeout_s: float | None
    is_stream: bool

    def engine_arguments(self) -> dict[str, Any]:
        return {
            "request_id": self.request_id,
            "priority": self.priority,
            "cache_salt": self.cache_salt,
            "timeout": self.timeout_s,
        }


class FlowKVServicer(pb_grpc.FlowKVServicer):
    """Answers calls by asking `engine`; every call's event loop is the server's.

    Args:
        live: where streams are registered while they last.
        stream_interval_s: least time between two messages of a stream.
        on_engine_dead: called when a request met a dead engine.
    """

    def __init__(
        self,
        engine: ServingEngine,
        live: LiveRequests,
        *,
        stream_interval_s: float,
        on_engine_dead: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engine = engine
        self._live = live
        self._stream_interval_s = stream_interval_s
        self._on_engine_dead = on_engine_dead
        self._clock = clock

    async def Generate(self, request: pb.GenerateRequest, context: Any) -> None:
        async with CallLog(context, "Generate", self._clock) as log:
            self._live.check_accepting()
            options = _checked_options(request.options, context, log)
            prompt = _prompt_of(request, self._engine.model_info().max_model_len)
            params = wire.sampling_params_from_wire(request.sampling_params)
            outputs = self._engine.async_generate(prompt, params, **options.engine_arguments())
            await self._stream(outputs, options, context, log)

    async def Chat(self, request: pb.ChatRequest, context: Any) -> None:
        async with CallLog(context, "Chat", self._clock) as log:
            self._live.check_accepting()
            options = _checked_options(request.options, context, log)
            _check_count("messages", request.messages, MAX_CHAT_MESSAGES)
            messages = [{"role": turn.role, "content": turn.content} for turn in request.messages]
            params = wire.sampling_params_from_wire(request.sampling_params)
            outputs = self._engine.async_chat(messages, params, **options.engine_arguments())
            await self._stream(outputs, options, context, log)

    async def Abort(self, request: pb.AbortRequest, context: Any) -> pb.AbortResponse:
        async with CallLog(context, "Abort", self._clock) as log:
            if not request.request_ids:
                raise ValidationError("request_ids is empty", parameter="request_ids")
            _check_count("request_ids", request.request_ids, MAX_ABORT_IDS)
            log.request_id = ",".join(request.request_ids)[:MAX_REQUEST_ID_CHARACTERS]
            # The engine answers between two steps; the event loop does not wait for it.
            counts = await asyncio.to_thread(self._abort_each, list(request.request_ids))
            unknown = [name for name, count in counts.items() if count == 0]
            if len(unknown) == len(counts):
                names = ", ".join(repr(name[:MAX_REQUEST_ID_CHARACTERS]) for name in unknown[:5])
                raise NotFoundError(f"no live request has the id {names}")
            return pb.AbortResponse(
                num_aborted=sum(counts.values()), unknown_request_ids=sorted(unknown)
            )

    async def GetModelInfo(
        self, _request: pb.GetModelInfoRequest, context: Any
    ) -> pb.GetModelInfoResponse:
        async with CallLog(context, "GetModelInfo", self._clock):
            return wire.model_info_to_wire(self._engine.model_info())

    async def GetLoads(self, _request: pb.GetLoadsRequest, context: Any) -> pb.GetLoadsResponse:
        async with CallLog(context, "GetLoads", self._clock):
            return wire.loads_to_wire(self._engine.get_loads())

    async def Tokenize(self, request: pb.TokenizeRequest, context: Any) -> pb.TokenizeResponse:
        async with CallLog(context, "Tokenize", self._clock) as log:
            if len(request.text) > MAX_TOKENIZE_CHARACTERS:
                raise ValidationError(
                    f"text has {len(request.text)} characters; "
                    f"at most {MAX_TOKENIZE_CHARACTERS} are tokenized in one call",
                    parameter="text",
                )
            add_special = request.add_special_tokens or not request.HasField("add_special_tokens")
            token_ids = await asyncio.to_thread(
                self._engine.get_tokenizer().encode, request.text, add_special_tokens=add_special
            )
            log.num_prompt_tokens = len(token_ids)
            return pb.TokenizeResponse(
                token_ids=token_ids, max_model_len=self._engine.model_info().max_model_len
            )

    async def Detokenize(
        self, request: pb.DetokenizeRequest, context: Any
    ) -> pb.DetokenizeResponse:
        async with CallLog(context, "Detokenize", self._clock) as log:
            _check_count("token_ids", request.token_ids, MAX_DETOKENIZE_IDS)
            vocab_size = self._engine.model_info().vocab_size
            for token_id in request.token_ids:
                if not 0 <= token_id < vocab_size:
                    raise bad_value("token_ids", token_id, f"is not in [0, {vocab_size})")
            skip = request.skip_special_tokens or not request.HasField("skip_special_tokens")
            log.num_prompt_tokens = len(request.token_ids)
            text = await asyncio.to_thread(
                self._engine.get_tokenizer().decode,
                list(request.token_ids),
                skip_special_tokens=skip,
            )
            return pb.DetokenizeResponse(text=text)

    def _abort_each(self, request_ids: list[str]) -> dict[str, int]:
        return {name: self._engine.abort(name) for name in request_ids}

    async def _stream(
        self,
        outputs: AsyncIterator[RequestOutput],
        options: _Options,
        context: Any,
        log: CallLog,
    ) -> None:
        buffer = OutputBuffer(
            min_interval_s=self._stream_interval_s, clock=self._clock, whole=not options.is_stream
        )
        stream = LiveStream(buffer, asyncio.create_task(_pump(outputs, buffer)))
        self._live.add(stream)
        try:
            await _write_all(buffer, context, log)
        except EngineDeadError:
            self._on_engine_dead()
            raise
        finally:
            stream.pump.cancel()
            try:
                await asyncio.wait([stream.pump])
            finally:
                self._live.discard(stream)


async def _pump(outputs: AsyncIterator[RequestOutput], buffer: OutputBuffer) -> None:
    error: Exception | None = RequestCancelled("the request was cancelled")
    is_finished = False
    try:
        async with contextlib.AsyncExitStack() as stack:
            if hasattr(outputs, "aclose"):
                stack.push_async_callback(outputs.aclose)
            async for output in outputs:
                buffer.put(output)
                is_finished = output.finished
        unfinished = GenerationError("the engine ended the answer before it was finished")
        error = None if is_finished else unfinished
    except Exception as caught:
        error = caught
    finally:
        buffer.close(error)


async def _write_all(buffer: OutputBuffer, context: Any, log: CallLog) -> None:
    is_first = True
    while (output := await buffer.take()) is not None:
        response = wire.response_to_wire(output, is_first=is_first)
        is_first = False
        log.num_prompt_tokens = len(output.prompt_token_ids)
        log.num_completion_tokens += sum(len(c.delta_token_ids) for c in output.outputs)
        if output.finished:
            response.usage.prompt_tokens = log.num_prompt_tokens
            response.usage.completion_tokens = log.num_completion_tokens
            response.usage.cached_tokens = output.num_cached_tokens
        await context.write(response)


def _checked_options(options: pb.RequestOptions, context: Any, log: CallLog) -> _Options:
    request_id = options.request_id or f"req-{uuid.uuid4().hex}"
    log.request_id = request_id[:MAX_REQUEST_ID_CHARACTERS]
    if len(request_id) > MAX_REQUEST_ID_CHARACTERS or not request_id.isprintable():
        raise bad_value(
            "request_id",
            request_id,
            f"must be printable, and at most {MAX_REQUEST_ID_CHARACTERS} characters",
        )
    timeouts_s: list[float] = []
    if options.HasField("timeout_s"):
        check_real("timeout_s", options.timeout_s, 0.0, low_open=True)
        timeouts_s.append(options.timeout_s)
    remaining_s = context.time_remaining()
    if remaining_s is not None and math.isfinite(remaining_s):
        if remaining_s <= 0:
            raise DeadlineExceeded("the call's deadline had passed when it arrived")
        timeouts_s.append(remaining_s)
    return _Options(
        request_id=request_id,
        priority=options.priority,
        cache_salt=options.cache_salt if options.HasField("cache_salt") else None,
        timeout_s=min(timeouts_s, default=None),
        is_stream=options.stream or not options.HasField("stream"),
    )


def _check_count(name: str, values: Any, most: int) -> None:
    if len(values) > most:
        raise ValidationError(f"{name} has {len(values)} entries; at most {most}", parameter=name)


def _prompt_of(request: pb.GenerateRequest, max_model_len: int) -> PromptInput:
    most = max(max_model_len, MIN_PROMPT_IDS_READ)
    match request.WhichOneof("prompt"):
        case "text":
            return request.text
        case "token_ids":
            ids = request.token_ids.ids
            if not request.sampling_params.HasField("truncate_prompt_tokens"):
                _check_count("prompt_token_ids", ids, most)
            # No prompt is longer, and truncation keeps the end.
            return list(ids[-most:])
        case _:
            raise ValidationError("prompt is missing: set text or token_ids", parameter="prompt")
