"""The handlers of `inference.GRPCInferenceService`, for the one model there is.

A call of `ModelStreamInfer` carries many requests at once. Each is a request like any other: it is
admitted, logged and ended for itself, its responses carry its id, and its error ends only it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from flowkv_jax import __version__
from flowkv_jax.errors import NotFoundError, ValidationError
from flowkv_jax.outputs import CompletionOutput, RequestOutput
from flowkv_jax.rpc.answering import Answering, checked_request_id, time_left_s
from flowkv_jax.rpc.call_log import CallLog
from flowkv_jax.rpc.generation import RequestOptions, merged
from flowkv_jax.rpc.inference import kserve_pb2 as pb
from flowkv_jax.rpc.inference import kserve_pb2_grpc as pb_grpc
from flowkv_jax.rpc.kserve_requests import INPUTS, OUTPUTS, TextRequest, read_request
from flowkv_jax.rpc.kserve_tensors import Tensor, write_tensors
from flowkv_jax.rpc.status import status_of

KSERVE_SERVICE = "inference.GRPCInferenceService"
SERVER_NAME = "flowkv-jax"
MODEL_VERSION = "1"
MAX_REQUESTS_OF_A_STREAM = 256
"""Under way at once; the next one is read when one of them has ended."""

_FINAL = "triton_final_response"

_Write = Callable[[pb.ModelInferResponse], Awaitable[None]]


class KServeServicer(pb_grpc.GRPCInferenceServiceServicer):
    """Answers calls by asking the engine of `answering`."""

    def __init__(self, answering: Answering) -> None:
        self._answering = answering
        self._engine = answering.engine

    async def ServerLive(
        self, _request: pb.ServerLiveRequest, context: Any
    ) -> pb.ServerLiveResponse:
        async with self._answering.log(context, "ServerLive"):
            return pb.ServerLiveResponse(live=True)

    async def ServerReady(
        self, _request: pb.ServerReadyRequest, context: Any
    ) -> pb.ServerReadyResponse:
        async with self._answering.log(context, "ServerReady"):
            return pb.ServerReadyResponse(ready=self._answering.is_ready)

    async def ModelReady(
        self, request: pb.ModelReadyRequest, context: Any
    ) -> pb.ModelReadyResponse:
        async with self._answering.log(context, "ModelReady"):
            # Of a model that is not here, the answer is no, as Triton's.
            is_here = self._is_served(request.name, request.version)
            return pb.ModelReadyResponse(ready=is_here and self._answering.is_ready)

    async def ServerMetadata(
        self, _request: pb.ServerMetadataRequest, context: Any
    ) -> pb.ServerMetadataResponse:
        async with self._answering.log(context, "ServerMetadata"):
            return pb.ServerMetadataResponse(name=SERVER_NAME, version=__version__)

    async def ModelMetadata(
        self, request: pb.ModelMetadataRequest, context: Any
    ) -> pb.ModelMetadataResponse:
        async with self._answering.log(context, "ModelMetadata"):
            self._check_model(request.name, request.version)
            tensor = pb.ModelMetadataResponse.TensorMetadata
            return pb.ModelMetadataResponse(
                name=request.name,
                versions=[MODEL_VERSION],
                platform=SERVER_NAME,
                inputs=[
                    tensor(name=name, datatype=kind, shape=[-1 if name == "text_input" else 1])
                    for name, kind in INPUTS.items()
                ],
                outputs=[
                    tensor(name=name, datatype=kind, shape=[-1]) for name, kind in OUTPUTS.items()
                ],
            )

    async def RepositoryIndex(
        self, request: pb.RepositoryIndexRequest, context: Any
    ) -> pb.RepositoryIndexResponse:
        async with self._answering.log(context, "RepositoryIndex"):
            is_ready = self._answering.is_ready
            model = pb.RepositoryIndexResponse.ModelIndex(
                name=self._engine.model_info().served_model_name,
                version=MODEL_VERSION,
                state="READY" if is_ready else "UNAVAILABLE",
            )
            models = [model] if is_ready or not request.ready else []
            return pb.RepositoryIndexResponse(models=models)

    async def ModelInfer(
        self, request: pb.ModelInferRequest, context: Any
    ) -> pb.ModelInferResponse:
        async with self._answering.log(context, "ModelInfer") as log:
            text, options = self._admitted(request, context, log)
            if text.is_stream:
                raise ValidationError(
                    "stream=true is answered by ModelStreamInfer only", parameter="stream"
                )
            async with self._answering.generate(text.prompts, text.params, options) as generation:
                outputs = [output for _, output in merged(await generation.take_whole())]
            for output in outputs:
                log.count(output)
            return _response(request, text, outputs)

    async def ModelStreamInfer(
        self, requests: AsyncIterator[pb.ModelInferRequest], context: Any
    ) -> None:
        # Tasks share the call, and gRPC takes one message of a call at a time.
        is_free = asyncio.Lock()

        async def write(response: pb.ModelStreamInferResponse) -> None:
            async with is_free:
                await context.write(response)

        async with self._answering.log(context, "ModelStreamInfer"):
            slots = asyncio.Semaphore(MAX_REQUESTS_OF_A_STREAM)
            async with asyncio.TaskGroup() as tasks:
                async for request in requests:
                    await slots.acquire()
                    task = tasks.create_task(self._answer_in_stream(request, context, write))
                    task.add_done_callback(lambda _task: slots.release())

    async def _answer_in_stream(
        self,
        request: pb.ModelInferRequest,
        context: Any,
        write: Callable[[pb.ModelStreamInferResponse], Awaitable[None]],
    ) -> None:
        async def write_response(response: pb.ModelInferResponse) -> None:
            await write(pb.ModelStreamInferResponse(infer_response=response))

        log = self._answering.log(context, "ModelStreamInfer.request")
        try:
            text, options = self._admitted(request, context, log)
            if len(text.prompts) > 1:
                raise ValidationError(
                    f"text_input has {len(text.prompts)} elements; ModelStreamInfer answers one "
                    "prompt a request (ModelInfer several)",
                    parameter="text_input",
                )
            await self._stream(request, text, options, write_response, log)
        except Exception as error:
            log.end(error)
            response = pb.ModelStreamInferResponse(error_message=status_of(error).message)
            response.infer_response.CopyFrom(_empty_response(request, is_final=True))
            await write(response)
        except BaseException as error:
            log.end(error)
            raise
        else:
            log.end(None)

    async def _stream(
        self,
        request: pb.ModelInferRequest,
        text: TextRequest,
        options: RequestOptions,
        write: _Write,
        log: CallLog,
    ) -> None:
        """Write what the engine answers to one prompt, as it comes."""
        async with self._answering.generate(text.prompts, text.params, options) as generation:
            while (output := await generation.take_one()) is not None:
                log.count(output)
                response = _response(request, text, [output])
                is_end = output.finished and not text.wants_empty_final
                response.parameters[_FINAL].bool_param = is_end
                await write(response)
        if text.wants_empty_final:
            await write(_empty_response(request, is_final=True))

    def _admitted(
        self, request: pb.ModelInferRequest, context: Any, log: CallLog
    ) -> tuple[TextRequest, RequestOptions]:
        self._answering.live.check_accepting()
        # Clients number their requests from 0 or 1: an id names one only to its client.
        request_id = checked_request_id("", log)
        self._check_model(request.model_name, request.model_version)
        text = read_request(request)
        return text, RequestOptions(
            request_id=request_id,
            priority=text.priority,
            cache_salt=text.cache_salt,
            timeout_s=time_left_s(context, text.timeout_s),
            is_stream=text.is_stream,
        )

    def _is_served(self, name: str, version: str) -> bool:
        is_model = name == self._engine.model_info().served_model_name
        return is_model and version in ("", MODEL_VERSION)

    def _check_model(self, name: str, version: str) -> None:
        if not self._is_served(name, version):
            asked = f"{name[:100]!r}, version {version[:100]!r}" if version else f"{name[:100]!r}"
            served = self._engine.model_info().served_model_name
            raise NotFoundError(
                f"model {asked} is not served here; {served!r}, version {MODEL_VERSION!r} is"
            )


def _empty_response(request: pb.ModelInferRequest, *, is_final: bool) -> pb.ModelInferResponse:
    response = pb.ModelInferResponse(
        model_name=request.model_name, model_version=MODEL_VERSION, id=request.id
    )
    response.parameters[_FINAL].bool_param = is_final
    return response


def _response(
    request: pb.ModelInferRequest, text: TextRequest, outputs: list[RequestOutput]
) -> pb.ModelInferResponse:
    """What is new of the answers to the prompts, as tensors."""
    answers = [answer for output in outputs for answer in _all_answers(output, text.params.n)]
    shape = text.shape if text.params.n == 1 else (text.params.n,)
    tensors = [
        Tensor(name, OUTPUTS[name], shape, _elements(name, answers, outputs))
        for name in text.output_names
    ]
    response = pb.ModelInferResponse(
        model_name=request.model_name, model_version=MODEL_VERSION, id=request.id
    )
    write_tensors(response, tensors, is_raw=text.is_raw)
    return response


def _all_answers(output: RequestOutput, n: int) -> list[CompletionOutput]:
    """Of each index, also those with nothing new."""
    known = {answer.index: answer for answer in output.outputs}
    return [known.get(index) or CompletionOutput(index, "", []) for index in range(n)]


def _elements(
    name: str, answers: list[CompletionOutput], outputs: list[RequestOutput]
) -> list[Any]:
    match name:
        case "text_output":
            return [answer.delta_text.encode() for answer in answers]
        case "finish_reason":
            return [(answer.finish_reason or "").encode() for answer in answers]
        case "num_input_tokens":
            each = len(answers) // len(outputs)
            return [len(output.prompt_token_ids) for output in outputs for _ in range(each)]
        case "num_output_tokens":
            return [len(answer.delta_token_ids) for answer in answers]
        case _:
            raise ValueError(f"no output {name}")
