"""Errors as HTTP statuses and OpenAI's error object."""

import json
import logging
from typing import Any

import httpx
import msgspec
import pytest

from flowkv_jax import errors
from flowkv_jax.errors import (
    AuthenticationError,
    ContextLengthError,
    DeadlineExceeded,
    DuplicateRequestError,
    EngineDeadError,
    FlowKVError,
    GenerationError,
    ModelNotFoundError,
    QueueOverflowError,
    RetryableRequestError,
    ValidationError,
    grpc_status_name,
    http_status,
)
from flowkv_jax.http.error_answer import error_body, error_response
from flowkv_jax.http.errors import HttpError
from flowkv_jax.http.request import Request
from flowkv_jax.http.response import Response
from flowkv_jax.http.route import Route
from flowkv_jax.http.surroundings import Surroundings
from tests.http_wire import answering


def tree(root: type[FlowKVError] = FlowKVError) -> list[type[FlowKVError]]:
    children = [cls for cls in root.__subclasses__() if cls.__module__ == errors.__name__]
    return [root, *(found for cls in children for found in tree(cls))]


# What each class means over HTTP; a class that is missing here has no place in the table yet.
EXPECTED = {
    "FlowKVError": (500, "internal_error"),
    "ClientError": (400, None),
    "ValidationError": (400, None),
    "ConfigError": (400, None),
    "ContextLengthError": (400, "context_length_exceeded"),
    "NotFoundError": (404, "not_found"),
    "ModelNotFoundError": (404, "model_not_found"),
    "DuplicateRequestError": (409, "duplicate_request_id"),
    "AuthenticationError": (401, "invalid_api_key"),
    "ModelFormatError": (400, None),
    "UnprocessableError": (422, "unprocessable"),
    "RequestCancelled": (499, "request_cancelled"),
    "DeadlineExceeded": (504, "deadline_exceeded"),
    "ServerError": (500, "internal_error"),
    "RetryableRequestError": (503, "service_unavailable"),
    "QueueOverflowError": (429, "rate_limit_exceeded"),
    "MaxQueuedTokensError": (429, "rate_limit_exceeded"),
    "GenerationError": (500, "generation_failed"),
    "EngineDeadError": (503, "engine_dead"),
}

_GRPC_OF_HTTP = {
    400: {"INVALID_ARGUMENT"},
    401: {"UNAUTHENTICATED"},
    404: {"NOT_FOUND"},
    409: {"ALREADY_EXISTS"},
    422: {"FAILED_PRECONDITION"},
    429: {"RESOURCE_EXHAUSTED"},
    499: {"CANCELLED"},
    500: {"INTERNAL"},
    503: {"UNAVAILABLE"},
    504: {"DEADLINE_EXCEEDED"},
}


@pytest.mark.parametrize("cls", tree(), ids=lambda cls: cls.__name__)
def test_every_error_has_a_status_that_agrees_with_grpc(cls: type[FlowKVError]) -> None:
    error = cls("what happened")
    status = http_status(error)
    assert (status.status, status.code) == EXPECTED[cls.__name__]
    assert grpc_status_name(error) in _GRPC_OF_HTTP[status.status]
    response = error_response(error)
    headers = dict(response.headers)
    assert response.status == status.status
    assert (b"retry-after" in headers) == (status.status in (429, 503))
    assert (b"retry-after-ms" in headers) == (status.status in (429, 503))
    assert error_body(error).error.message == "what happened"


def test_the_table_is_complete() -> None:
    assert {cls.__name__ for cls in tree()} == set(EXPECTED)


def test_a_bug_says_nothing_of_the_inside() -> None:
    body = error_body(KeyError("/secret/path"))
    assert http_status(KeyError()).status == 500
    assert body.error.type == "server_error"
    assert "secret" not in msgspec.json.encode(body).decode()


def test_long_texts_and_parameters_are_cut() -> None:
    error = ValidationError("x" * 100_000, parameter="p" * 100_000)
    assert len(error_response(error).body) < 3000


@pytest.mark.parametrize(
    ("retry_after_s", "seconds", "milliseconds"),
    [(None, b"1", b"1000"), (0.25, b"1", b"250"), (2.5, b"3", b"2500"), (0.0, b"1", b"1")],
)
def test_when_to_come_again(
    retry_after_s: float | None, seconds: bytes, milliseconds: bytes
) -> None:
    response = error_response(QueueOverflowError("full", retry_after_s=retry_after_s))
    headers = dict(response.headers)
    assert headers[b"retry-after"] == seconds
    assert headers[b"retry-after-ms"] == milliseconds


@pytest.mark.parametrize("cls", [DuplicateRequestError, DeadlineExceeded])
def test_where_a_retry_cannot_help_clients_are_told(cls: type[FlowKVError]) -> None:
    assert (b"x-should-retry", b"false") in error_response(cls("no")).headers
    assert b"x-should-retry" not in dict(error_response(RetryableRequestError("no")).headers)


ERRORS: dict[str, Exception] = {
    "/validation": ValidationError("n=0 must be positive", parameter="n"),
    "/length": ContextLengthError("too long", parameter="prompt"),
    "/model": ModelNotFoundError("not served"),
    "/key": AuthenticationError("no"),
    "/busy": QueueOverflowError("full"),
    "/dead": EngineDeadError("dead"),
    "/failed": GenerationError("failed"),
    "/http": HttpError(415, "JSON, please"),
    "/bug": KeyError("/secret"),
}


async def _raise(request: Request, _surroundings: Surroundings) -> Response:
    raise ERRORS[request.path]


async def test_errors_over_the_wire(caplog: pytest.LogCaptureFixture) -> None:
    routes = [Route("GET", path, _raise) for path in ERRORS]
    with caplog.at_level(logging.INFO, "flowkv_jax.http.app"):
        async with answering(routes) as url, httpx.AsyncClient(base_url=url) as client:
            got = {path: await client.get(path) for path in ERRORS}
    told: dict[str, Any] = {path: answer.json()["error"] for path, answer in got.items()}
    assert [answer.status_code for answer in got.values()] == [
        400, 400, 404, 401, 429, 503, 500, 415, 500,
    ]  # fmt: skip
    assert told["/validation"] == {
        "message": "n=0 must be positive",
        "type": "invalid_request_error",
        "param": "n",
        "code": None,
    }
    assert told["/length"]["code"] == "context_length_exceeded"
    assert told["/model"]["code"] == "model_not_found"
    assert got["/key"].headers["www-authenticate"] == "Bearer"
    assert "secret" not in json.dumps(told["/bug"])
    assert "/secret" in caplog.text and "Traceback" in caplog.text
    lines = [r.message for r in caplog.records if "status=" in r.message]
    assert len(lines) == len(ERRORS)
    assert "full" not in "".join(lines) and "error=QueueOverflowError" in lines[4]


async def test_an_error_behind_the_first_event_is_an_event() -> None:
    async def begin(request: Request, _surroundings: Surroundings) -> None:
        async with request.events() as events:
            await events.send(b"data: 1\n\n")
            raise RetryableRequestError("the server shut down")

    async def refuse(request: Request, _surroundings: Surroundings) -> None:
        async with request.events():
            raise RetryableRequestError("the server shut down")

    routes = [Route("GET", "/begun", begin), Route("GET", "/refused", refuse)]
    async with answering(routes) as url, httpx.AsyncClient(base_url=url) as client:
        begun = await client.get("/begun")
        refused = await client.get("/refused")
    assert begun.status_code == 200
    assert begun.headers["content-type"] == "text/event-stream"
    first, second, third, last = begun.text.split("\n\n")
    assert (first, third, last) == ("data: 1", "data: [DONE]", "")
    assert json.loads(second.removeprefix("data: "))["error"]["code"] == "service_unavailable"
    assert refused.status_code == 503 and refused.headers["retry-after"] == "1"
