"""The Open Inference Protocol over HTTP: health, metadata, and its generate extension for text."""

from __future__ import annotations

import uuid
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from flowkv_jax.errors import GenerationError, ValidationError
from flowkv_jax.http.event_stream import event
from flowkv_jax.http.request import Request
from flowkv_jax.http.response import Response, json_response
from flowkv_jax.http.route import Handler, Route
from flowkv_jax.http.status_routes import check_model, health, ready
from flowkv_jax.http.surroundings import Surroundings
from flowkv_jax.outputs import FinishReason
from flowkv_jax.rpc.generation import Generation, PromptOutput, RequestOptions, answers_to
from flowkv_jax.rpc.kserve_servicer import MODEL_VERSION, SERVER_NAME
from flowkv_jax.rpc.limits import MAX_REQUEST_ID_CHARACTERS
from flowkv_jax.sampling_params import SamplingParams

_OWN_PARAMETERS = ("stream", "details")


class TensorMetadata(msgspec.Struct, frozen=True):
    """An input or output; a shape of 1 is one text."""

    name: str
    datatype: Literal["BYTES"] = "BYTES"
    shape: tuple[int, ...] = (1,)


class ModelMetadata(msgspec.Struct, frozen=True):
    """The served model."""

    name: str
    versions: list[str]
    inputs: list[TensorMetadata]
    outputs: list[TensorMetadata]
    platform: str = SERVER_NAME


class ServerMetadata(msgspec.Struct, frozen=True):
    """This server; `generate` is what it can do beside health and metadata."""

    version: str
    name: str = SERVER_NAME
    extensions: tuple[str, ...] = ("generate",)


class GenerateRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Attributes:
    id: comes back with the answer.
    parameters: sampling parameters; and `details`, to be told why the answer ended.
    """

    text_input: Annotated[str, Meta(min_length=1)]
    id: Annotated[str, Meta(max_length=MAX_REQUEST_ID_CHARACTERS)] | None = None
    parameters: dict[str, Any] | None = None


class GenerateDetails(msgspec.Struct, frozen=True):
    """Attributes:
    finish_reason: null while the answer goes on.
    """

    finish_reason: FinishReason | None
    num_input_tokens: int
    num_output_tokens: int


class GenerateResponse(msgspec.Struct, frozen=True, omit_defaults=True):
    """Attributes:
    text_output: the answer, or what is new of it.
    details: where they were asked for.
    """

    model_name: str
    text_output: str
    model_version: str | None = None
    id: str | None = None
    details: GenerateDetails | None = None


def routes() -> list[Route]:
    model = "/v2/models/{model}"
    return [
        Route("GET", "/v2", server_metadata, answer=ServerMetadata),
        Route("GET", "/v2/health/live", health, is_open=True, answer_type="", statuses=(503,)),
        Route("GET", "/v2/health/ready", ready, is_open=True, answer_type="", statuses=(503,)),
        Route("GET", model, model_metadata, answer=ModelMetadata, statuses=(404,)),
        Route("GET", model + "/ready", model_ready, answer_type="", statuses=(404, 503)),
        _generate_route(model + "/generate", generate),
        _generate_route(model + "/generate_stream", generate_stream, has_events=True),
    ]


def _generate_route(path: str, handler: Handler, *, has_events: bool = False) -> Route:
    return Route(
        "POST",
        path,
        handler,
        body=GenerateRequest,
        answer=None if has_events else GenerateResponse,
        answer_type="text/event-stream" if has_events else "application/json",
        statuses=(404, 409, 422, 429, 499, 503, 504),
    )


async def server_metadata(_request: Request, surroundings: Surroundings) -> Response:
    """Name and version of the server."""
    return json_response(ServerMetadata(surroundings.version))


async def model_metadata(request: Request, surroundings: Surroundings) -> Response:
    """Inputs and outputs of the model."""
    name = _model_of(request, surroundings)
    inputs, outputs = [TensorMetadata("text_input")], [TensorMetadata("text_output")]
    return json_response(ModelMetadata(name, [MODEL_VERSION], inputs, outputs))


async def model_ready(request: Request, surroundings: Surroundings) -> Response:
    """Whether a request to the model would be served now."""
    _model_of(request, surroundings)
    return await ready(request, surroundings)


async def generate(request: Request, surroundings: Surroundings) -> Response:
    """Answer a text, whole."""
    asked = _Asked(await request.json(GenerateRequest), request, surroundings)
    async with request.cancel_on_disconnect(), asked.generation(is_whole=True) as generation:
        return json_response(asked.told(await generation.take_whole()))


async def generate_stream(request: Request, surroundings: Surroundings) -> None:
    """Answer a text, as events that each tell what is new."""
    asked = _Asked(await request.json(GenerateRequest), request, surroundings)
    async with (
        request.cancel_on_disconnect(),
        asked.generation(is_whole=False) as generation,
        request.events() as events,
    ):
        while taken := await generation.take():
            await events.send(event(msgspec.json.encode(asked.told(taken))))


class _Asked:
    """One request, checked, and how far its answer is.

    Raises:
        ModelNotFoundError, ValidationError, UnprocessableError: see `SamplingParams.from_mapping`.
        RetryableRequestError: the server is draining.
    """

    def __init__(self, body: GenerateRequest, request: Request, surroundings: Surroundings) -> None:
        surroundings.live.check_accepting()
        self._model = _model_of(request, surroundings)
        self._body = body
        self._request = request
        self._surroundings = surroundings
        parameters = body.parameters or {}
        self._wants_details = _flag(parameters, "details")
        _flag(parameters, "stream")  # the path says it, and wins
        given = {k: v for k, v in parameters.items() if k not in _OWN_PARAMETERS}
        self._params = SamplingParams.from_mapping({**given, "output_kind": "delta"})
        if self._params.n != 1:
            raise ValidationError(f"n={self._params.n}: one answer fits a response", parameter="n")

    def generation(self, *, is_whole: bool) -> Generation:
        surroundings, request_id = self._surroundings, self._request.request_id
        name = f"generate-{request_id}-{uuid.uuid4().hex[:8]}"
        options, prompts = RequestOptions(name), [self._body.text_input]
        return Generation(
            answers_to(surroundings.engine, prompts, self._params, options),
            surroundings.live,
            min_interval_s=surroundings.config.stream_interval_ms / 1000,
            is_whole=is_whole,
            names=(request_id, name),
        )

    def told(self, taken: list[PromptOutput]) -> GenerateResponse:
        """What is new, and the books of the log."""
        request, text = self._request, ""
        finish_reason: FinishReason | None = None
        for _, output in taken:
            [delta] = output.outputs
            text += delta.delta_text
            finish_reason = delta.finish_reason
            request.num_prompt_tokens = len(output.prompt_token_ids)
            request.num_completion_tokens += len(delta.delta_token_ids)
        if not taken:
            raise GenerationError("the engine gave no answer")
        details = GenerateDetails(
            finish_reason, request.num_prompt_tokens, request.num_completion_tokens
        )
        return GenerateResponse(
            self._model,
            text,
            MODEL_VERSION,
            self._body.id,
            details if self._wants_details else None,
        )


def _flag(parameters: dict[str, Any], name: str) -> bool:
    value = parameters.get(name, False)
    if not isinstance(value, bool):
        raise ValidationError(f"{name}={value!r:.100} must be true or false", parameter=name)
    return value


def _model_of(request: Request, surroundings: Surroundings) -> str:
    """
    Raises:
        ModelNotFoundError: the path names another.
    """
    info = surroundings.engine.model_info()
    check_model(request.path_parameters["model"], info)
    return info.served_model_name
