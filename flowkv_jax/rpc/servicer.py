"""The handlers of `flowkv.v1.FlowKV`."""

from __future__ import annotations

import asyncio
from typing import Any

from flowkv_jax.checks import bad_value, check_real
from flowkv_jax.errors import NotFoundError, ValidationError
from flowkv_jax.rpc import wire
from flowkv_jax.rpc.answering import (
    Answering,
    check_count,
    checked_request_id,
    prompt_ids,
    time_left_s,
)
from flowkv_jax.rpc.call_log import CallLog
from flowkv_jax.rpc.engine_protocol import PromptInput
from flowkv_jax.rpc.flowkv.v1 import flowkv_pb2 as pb
from flowkv_jax.rpc.flowkv.v1 import flowkv_pb2_grpc as pb_grpc
from flowkv_jax.rpc.generation import Generation, RequestOptions
from flowkv_jax.rpc.limits import (
    MAX_DETOKENIZE_IDS,
    MAX_MESSAGES,
    MAX_REQUEST_ID_CHARACTERS,
    MAX_TOKENIZE_CHARACTERS,
)

MAX_ABORT_IDS = 128
"""Lists are read on the event loop, where every other call waits; an abort waits for a step."""


class FlowKVServicer(pb_grpc.FlowKVServicer):
    """Answers calls by asking the engine of `answering`."""

    def __init__(self, answering: Answering) -> None:
        self._answering = answering
        self._engine = answering.engine
        self._live = answering.live

    async def Generate(self, request: pb.GenerateRequest, context: Any) -> None:
        async with self._answering.log(context, "Generate") as log:
            self._live.check_accepting()
            options = _checked_options(request.options, context, log)
            prompt = _prompt_of(request, self._engine.model_info().max_model_len)
            params = wire.sampling_params_from_wire(request.sampling_params)
            async with self._answering.generate([prompt], params, options) as generation:
                await _write_all(generation, context, log)

    async def Chat(self, request: pb.ChatRequest, context: Any) -> None:
        async with self._answering.log(context, "Chat") as log:
            self._live.check_accepting()
            options = _checked_options(request.options, context, log)
            check_count("messages", request.messages, MAX_MESSAGES)
            messages = [{"role": turn.role, "content": turn.content} for turn in request.messages]
            params = wire.sampling_params_from_wire(request.sampling_params)
            if "max_tokens" not in params.given_fields:  # then it may fill the context
                params = params.replace(max_tokens=None)
            # Templates and tokenising take milliseconds.
            prompt = await asyncio.to_thread(self._engine.render_chat, messages)
            async with self._answering.generate([prompt], params, options) as generation:
                await _write_all(generation, context, log)

    async def Abort(self, request: pb.AbortRequest, context: Any) -> pb.AbortResponse:
        async with self._answering.log(context, "Abort") as log:
            if not request.request_ids:
                raise ValidationError("request_ids is empty", parameter="request_ids")
            check_count("request_ids", request.request_ids, MAX_ABORT_IDS)
            log.name(request.request_ids)
            counts = await self._answering.abort(request.request_ids)
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
        async with self._answering.log(context, "GetModelInfo"):
            return wire.model_info_to_wire(self._engine.model_info())

    async def GetLoads(self, _request: pb.GetLoadsRequest, context: Any) -> pb.GetLoadsResponse:
        async with self._answering.log(context, "GetLoads"):
            return wire.loads_to_wire(self._engine.get_loads())

    async def Tokenize(self, request: pb.TokenizeRequest, context: Any) -> pb.TokenizeResponse:
        async with self._answering.log(context, "Tokenize") as log:
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
        async with self._answering.log(context, "Detokenize") as log:
            check_count("token_ids", request.token_ids, MAX_DETOKENIZE_IDS)
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


async def _write_all(generation: Generation, context: Any, log: CallLog) -> None:
    is_first = True
    while (output := await generation.take_one()) is not None:
        response = wire.response_to_wire(output, is_first=is_first)
        is_first = False
        log.count(output)
        if output.finished:
            response.usage.prompt_tokens = log.num_prompt_tokens
            response.usage.completion_tokens = log.num_completion_tokens
            response.usage.cached_tokens = output.num_cached_tokens
        await context.write(response)


def _checked_options(options: pb.RequestOptions, context: Any, log: CallLog) -> RequestOptions:
    request_id = checked_request_id(options.request_id, log)
    timeout_s: float | None = None
    if options.HasField("timeout_s"):
        check_real("timeout_s", options.timeout_s, 0.0, low_open=True)
        timeout_s = options.timeout_s
    return RequestOptions(
        request_id=request_id,
        priority=options.priority,
        cache_salt=options.cache_salt if options.HasField("cache_salt") else None,
        timeout_s=time_left_s(context, timeout_s),
        is_stream=options.stream or not options.HasField("stream"),
    )


def _prompt_of(request: pb.GenerateRequest, max_model_len: int) -> PromptInput:
    match request.WhichOneof("prompt"):
        case "text":
            return request.text
        case "token_ids":
            is_truncated = request.sampling_params.HasField("truncate_prompt_tokens")
            return prompt_ids(
                "prompt_token_ids", request.token_ids.ids, max_model_len, is_truncated=is_truncated
            )
        case _:
            raise ValidationError("prompt is missing: set text or token_ids", parameter="prompt")
