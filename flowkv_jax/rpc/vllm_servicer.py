"""The handlers of `vllm.grpc.engine.VllmEngine`: tokens in, tokens out, for routers such as smg.

A router that loses its client says so with `Abort`, on another call than the request's. It may
overtake the request on its way into the engine, so requests under way are known here by their ids:
one that the engine does not know yet is ended before it gets there. An abort of an unknown id is
no error: its answer may just have ended.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
from smg_grpc_proto.generated import common_pb2 as common
from smg_grpc_proto.generated import vllm_engine_pb2 as pb
from smg_grpc_proto.generated import vllm_engine_pb2_grpc as pb_grpc

from flowkv_jax.checks import check_real
from flowkv_jax.cluster.messages import MAX_PROFILE_S
from flowkv_jax.errors import (
    DuplicateRequestError,
    RequestCancelled,
    UnprocessableError,
    ValidationError,
)
from flowkv_jax.rpc import vllm_wire
from flowkv_jax.rpc.answering import (
    Answering,
    check_count,
    checked_request_id,
    prompt_ids,
    time_left_s,
)
from flowkv_jax.rpc.call_log import CallLog
from flowkv_jax.rpc.engine_protocol import PromptInput
from flowkv_jax.rpc.generation import Generation, RequestOptions
from flowkv_jax.rpc.vllm_tokenizer import TokenizerArchive, tokenizer_archive

VLLM_SERVICE = "vllm.grpc.engine.VllmEngine"
SERVER_TYPE = "flowkv-jax"
MAX_ABORT_IDS = 128
"""An abort may wait for a step."""
MAX_FLUSH_TIMEOUT_S = 600.0
_FLUSH_INTERVAL_S = 0.1


class VllmServicer(pb_grpc.VllmEngineServicer):  # type: ignore[misc]
    """Answers calls by asking the engine of `answering`.

    Args:
        is_admin: callers may flush caches and take profiles.
        unix_clock: seconds since 1970.
    """

    def __init__(
        self,
        answering: Answering,
        *,
        is_admin: bool,
        unix_clock: Callable[[], float] = time.time,
    ) -> None:
        self._answering = answering
        self._engine = answering.engine
        self._is_admin = is_admin
        self._unix_clock = unix_clock
        self._started_s = answering.clock()
        self._last_request_unix_s = 0.0
        self._under_way: dict[str, Generation] = {}
        self._archive: TokenizerArchive | None = None
        self._archive_is_free = asyncio.Lock()

    async def Generate(self, request: pb.GenerateRequest, context: Any) -> None:
        async with self._answering.log(context, "VllmEngine.Generate") as log:
            self._answering.live.check_accepting()
            self._last_request_unix_s = self._unix_clock()
            request_id = checked_request_id(request.request_id, log)
            vllm_wire.check_served(request)
            info = self._engine.model_info()
            prompt = _prompt_of(request, info.max_model_len)
            kv_transfer_params = vllm_wire.kv_transfer_params_from_wire(request)
            params = vllm_wire.sampling_params_from_wire(
                request.sampling_params,
                decodes_elsewhere=bool((kv_transfer_params or {}).get("do_remote_decode")),
            )
            options = RequestOptions(
                request_id=request_id,
                timeout_s=time_left_s(context),
                kv_transfer_params=kv_transfer_params,
                is_stream=request.stream,
            )
            if request_id in self._under_way:
                raise DuplicateRequestError(f"request_id={request_id!r} is in use")
            writer = vllm_wire.AnswerWriter(params, info.vocab_size, is_stream=request.stream)
            async with self._answering.generate([prompt], params, options) as generation:
                self._under_way[request_id] = generation
                try:
                    await _write_all(generation, writer, context, log)
                finally:
                    del self._under_way[request_id]

    async def Abort(self, request: pb.AbortRequest, context: Any) -> pb.AbortResponse:
        async with self._answering.log(context, "VllmEngine.Abort") as log:
            check_count("request_ids", request.request_ids, MAX_ABORT_IDS)
            log.name(request.request_ids)
            # Not what comes under these ids after the abort.
            known = {name: self._under_way.get(name) for name in request.request_ids}
            counts = await self._answering.abort(known)
            for request_id, generation in known.items():
                if counts[request_id] == 0 and generation is not None:
                    generation.stop(RequestCancelled("the request was aborted"))
            return pb.AbortResponse()

    async def Embed(self, _request: pb.EmbedRequest, context: Any) -> None:
        unimplemented = grpc.StatusCode.UNIMPLEMENTED
        await context.abort(unimplemented, "the model served here embeds nothing")

    async def HealthCheck(
        self, _request: pb.HealthCheckRequest, context: Any
    ) -> pb.HealthCheckResponse:
        async with self._answering.log(context, "VllmEngine.HealthCheck"):
            if not self._engine.is_healthy:
                message = "the engine can serve no request"
            elif not self._answering.live.is_accepting:
                message = "the server is shutting down"
            else:
                message = "healthy"
            return pb.HealthCheckResponse(healthy=self._answering.is_ready, message=message)

    async def GetModelInfo(
        self, _request: pb.GetModelInfoRequest, context: Any
    ) -> pb.GetModelInfoResponse:
        async with self._answering.log(context, "VllmEngine.GetModelInfo"):
            info = self._engine.model_info()
            tokenizer = self._engine.get_tokenizer()
            bos_token_id = tokenizer.bos_token_id
            # No tokenizer_path: the files of `GetTokenizer` are the ones that are served, wherever
            # the caller is.
            return pb.GetModelInfoResponse(
                model_path=info.model,
                is_generation=True,
                max_context_length=info.max_model_len,
                vocab_size=info.vocab_size,
                served_model_name=info.served_model_name,
                model_type=info.architecture.removesuffix("ForCausalLM").lower(),
                architectures=[info.architecture],
                eos_token_ids=info.eos_token_ids,
                bos_token_id=0 if bos_token_id is None else bos_token_id,
                max_req_input_len=info.max_model_len,
                default_sampling_params_json=vllm_wire.default_params_to_wire(
                    self._engine.get_default_sampling_params()
                ),
            )

    async def GetServerInfo(
        self, _request: pb.GetServerInfoRequest, context: Any
    ) -> pb.GetServerInfoResponse:
        async with self._answering.log(context, "VllmEngine.GetServerInfo"):
            info = self._engine.model_info()
            message = pb.GetServerInfoResponse(
                active_requests=len(self._answering.live),
                is_paused=not self._answering.live.is_accepting,
                last_receive_timestamp=self._last_request_unix_s,
                uptime_seconds=self._answering.clock() - self._started_s,
                server_type=SERVER_TYPE,
                data_parallel_size=1,
                kv_cache_dtype=info.dtype,
                block_size=info.block_size,
                model_dtype=info.dtype,
                max_num_seqs=self._engine.max_num_seqs,
                constrained_decoding_start="first_token",
            )
            transfer = self._engine.kv_transfer_info()
            if transfer is not None:
                message.kv_connector = transfer.connector
                message.kv_role = transfer.role
                message.kv_engine_id = transfer.engine_id
                message.kv_cache_dtype = transfer.cache_dtype
                message.pairing_protocol = transfer.pairing_protocol
            return message

    async def GetLoads(self, _request: pb.GetLoadsRequest, context: Any) -> pb.GetLoadsResponse:
        async with self._answering.log(context, "VllmEngine.GetLoads"):
            return vllm_wire.loads_to_wire(
                self._engine.get_loads(),
                block_size=self._engine.model_info().block_size,
                max_num_seqs=self._engine.max_num_seqs,
            )

    async def GetTokenizer(
        self, _request: common.GetTokenizerRequest, context: Any
    ) -> AsyncIterator[common.GetTokenizerChunk]:
        async with self._answering.log(context, "VllmEngine.GetTokenizer"):
            async with self._archive_is_free:
                if self._archive is None:
                    self._archive = await asyncio.to_thread(self._make_archive)
            for chunk in self._archive.chunks():
                yield chunk

    async def SubscribeKvEvents(
        self, _request: common.SubscribeKvEventsRequest, context: Any
    ) -> None:
        unimplemented = grpc.StatusCode.UNIMPLEMENTED
        await context.abort(unimplemented, "KV cache events are not published; poll GetLoads")

    async def FlushCache(
        self, request: common.FlushCacheRequest, context: Any
    ) -> common.FlushCacheResponse:
        async with self._answering.log(context, "VllmEngine.FlushCache"):
            self._check_admin()
            check_real("timeout_s", request.timeout_s, 0.0, MAX_FLUSH_TIMEOUT_S)
            ends_s = self._answering.clock() + request.timeout_s
            while not await asyncio.to_thread(self._engine.reset_prefix_cache):
                left_s = ends_s - self._answering.clock()
                if left_s <= 0:
                    return common.FlushCacheResponse(
                        success=False, message="cached prompts are in use by requests"
                    )
                await asyncio.sleep(min(_FLUSH_INTERVAL_S, left_s))
            return common.FlushCacheResponse(success=True, message="cached prompts are forgotten")

    async def StartProfile(
        self, request: common.StartProfileRequest, context: Any
    ) -> common.ProfileResponse:
        async with self._answering.log(context, "VllmEngine.StartProfile"):
            self._check_admin()
            given = [descriptor.name for descriptor, _ in request.ListFields()]
            if given:
                raise UnprocessableError(
                    f"{', '.join(given)} cannot be chosen by a call; the server's profile_dir says "
                    "where profiles are written"
                )
            await asyncio.to_thread(self._engine.start_profile, MAX_PROFILE_S)
            return common.ProfileResponse(success=True, message="a profile is being recorded")

    async def StopProfile(
        self, _request: common.StopProfileRequest, context: Any
    ) -> common.ProfileResponse:
        async with self._answering.log(context, "VllmEngine.StopProfile"):
            self._check_admin()
            await asyncio.to_thread(self._engine.stop_profile)
            return common.ProfileResponse(success=True, message="the profile is written")

    def _make_archive(self) -> TokenizerArchive:
        return tokenizer_archive(
            self._engine.get_tokenizer(),
            chat_template=self._engine.chat_template,
            max_model_len=self._engine.model_info().max_model_len,
        )

    def _check_admin(self) -> None:
        if not self._is_admin:
            raise UnprocessableError(
                "this server takes no administration over gRPC; start it with --enable-admin"
            )


async def _write_all(
    generation: Generation, writer: vllm_wire.AnswerWriter, context: Any, log: CallLog
) -> None:
    while (output := await generation.take_one()) is not None:
        log.count(output)
        for message in writer.messages(output):
            await context.write(message)


def _prompt_of(request: pb.GenerateRequest, max_model_len: int) -> PromptInput:
    match request.WhichOneof("input"):
        case "text":
            return str(request.text)
        case "tokenized":
            is_truncated = request.sampling_params.HasField("truncate_prompt_tokens")
            ids = request.tokenized.input_ids
            return prompt_ids("input_ids", ids, max_model_len, is_truncated=is_truncated)
        case _:
            raise ValidationError("input is missing: set tokenized or text", parameter="input")
