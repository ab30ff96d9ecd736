"""Errors as HTTP answers: OpenAI's error object, the status, and what a client may do about it.

    {"error": {"message": ..., "type": ..., "param": ..., "code": ...}}

openai-python tries again after 408, 409, 429 and 5xx, waits for `retry-after-ms` or `retry-after`,
and obeys `x-should-retry`.
"""

from __future__ import annotations

import math
from typing import Annotated

import msgspec

from flowkv_jax.errors import (
    DEFAULT_RETRY_AFTER_S,
    AuthenticationError,
    FlowKVError,
    HttpStatus,
    RetryableRequestError,
    ValidationError,
    http_status,
)
from flowkv_jax.http.errors import HttpError
from flowkv_jax.http.json_body import bounded
from flowkv_jax.http.response import Headers, Response, json_response

_MAX_PARAMETER_CHARACTERS = 200
_INSIDE = "internal error; the server's log has the cause"


class ErrorObject(msgspec.Struct, frozen=True):
    """OpenAI's error object.

    Attributes:
        param: the offending parameter, as the client spelt it.
    """

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(msgspec.Struct, frozen=True):
    """Body of every answer that is no success."""

    error: ErrorObject


RetryAfter = Annotated[int, msgspec.Meta(ge=1)]


def error_body(error: BaseException) -> ErrorBody:
    """What is said of an error; of a bug nothing but that there is one."""
    if isinstance(error, HttpError):
        kind = "invalid_request_error" if error.status < 500 else "server_error"
        return ErrorBody(ErrorObject(bounded(str(error)), kind, None, error.code))
    status = http_status(error)
    is_ours = isinstance(error, FlowKVError)
    parameter = error.parameter if isinstance(error, ValidationError) else None
    return ErrorBody(
        ErrorObject(
            bounded(str(error)) if is_ours else _INSIDE,
            status.type,
            parameter[:_MAX_PARAMETER_CHARACTERS] if parameter is not None else None,
            status.code,
        )
    )


def error_event(error: BaseException) -> bytes:
    """The same as the data of an event, for answers that have begun."""
    return msgspec.json.encode(error_body(error))


def error_response(error: BaseException) -> Response:
    """The whole answer."""
    if isinstance(error, HttpError):
        return json_response(error_body(error), error.status, error.headers)
    status = http_status(error)
    return json_response(error_body(error), status.status, _headers(error, status))


def _headers(error: BaseException, status: HttpStatus) -> Headers:
    headers: list[tuple[bytes, bytes]] = []
    if isinstance(error, AuthenticationError):
        headers.append((b"www-authenticate", b"Bearer"))
    if status.status in (429, 503):
        wanted_s = error.retry_after_s if isinstance(error, RetryableRequestError) else None
        wait_s = DEFAULT_RETRY_AFTER_S if wanted_s is None else wanted_s
        headers.append((b"retry-after", str(max(1, math.ceil(wait_s))).encode()))
        headers.append((b"retry-after-ms", str(max(1, math.ceil(wait_s * 1000))).encode()))
    if status.can_retry is not None:
        headers.append((b"x-should-retry", b"true" if status.can_retry else b"false"))
    return tuple(headers)
