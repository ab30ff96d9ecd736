"""Every error a user can meet, as one tree, and the two tables from error to wire status.

    FlowKVError
    ├── ClientError                    the caller can fix it
    │   ├── ValidationError            a parameter has a value it may not have (also a ValueError)
    │   │   ├── ConfigError            the same for configuration; names the key and the file
    │   │   └── ContextLengthError     the prompt leaves no room for an answer
    │   ├── NotFoundError              unknown model, request id or file
    │   │   └── ModelNotFoundError     the model is not the one that is served
    │   ├── DuplicateRequestError      request id already in use
    │   ├── AuthenticationError        no token, or one that is not known
    │   ├── ModelFormatError           a model file is broken, or of a kind that is not served
    │   └── UnprocessableError         well-formed, but this server cannot do it
    ├── RequestCancelled               aborted by its caller
    ├── DeadlineExceeded               ran past its deadline (also a TimeoutError)
    └── ServerError                    the caller did nothing wrong
        ├── RetryableRequestError      try again, here or elsewhere
        │   ├── QueueOverflowError     too many requests wait
        │   └── MaxQueuedTokensError   too many prompt tokens wait
        ├── GenerationError            one request failed inside the engine
        └── EngineDeadError            the engine thread ended; no request can be served

Front ends never invent a status: they look up `grpc_status_name(error)` or `http_status(error)`.
"""

from __future__ import annotations

from typing import Any, NamedTuple


class FlowKVError(Exception):
    """Root of the tree."""


class ClientError(FlowKVError):
    """The caller can fix it."""


class ValidationError(ClientError, ValueError):
    """A parameter has a value it may not have.

    Attributes:
        parameter: name of the offending parameter, as the caller spelt it; None if no single one.
        value: what was given.
    """

    def __init__(self, message: str, *, parameter: str | None = None, value: Any = None) -> None:
        super().__init__(message)
        self.parameter = parameter
        self.value = value


class ConfigError(ValidationError):
    """Configuration is wrong. `parameter` is the key; the message names the file, if any."""


class ContextLengthError(ValidationError):
    """The prompt leaves no room in the context, or in the cache, for one token of an answer."""


class NotFoundError(ClientError):
    """Unknown model, request id or file."""


class ModelNotFoundError(NotFoundError):
    """A request names a model that this server does not serve."""


class DuplicateRequestError(ClientError):
    """The request id is in use by a request that has not ended."""


class AuthenticationError(ClientError):
    """The server wants a token, and got none or one it does not know."""


class ModelFormatError(ClientError):
    """A model file is truncated, inconsistent, or of an architecture or type that is not served."""


class UnprocessableError(ClientError):
    """Well-formed, but this server cannot do it."""


class RequestCancelled(FlowKVError):
    """The request was aborted by its caller."""


class DeadlineExceeded(FlowKVError, TimeoutError):
    """The request ran past its deadline."""


class ServerError(FlowKVError):
    """The caller did nothing wrong."""


DEFAULT_RETRY_AFTER_S = 1.0
"""What a refused client is told to wait when the engine has no better idea."""


class RetryableRequestError(ServerError):
    """Try again. `retry_after_s` says when, if known."""

    def __init__(self, message: str, *, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class QueueOverflowError(RetryableRequestError):
    """Too many requests wait."""


class MaxQueuedTokensError(RetryableRequestError):
    """Too many prompt tokens wait."""


class GenerationError(ServerError):
    """One request failed inside the engine."""


class EngineDeadError(ServerError):
    """The engine ended; no request can be served any more."""


# Most specific class wins, looked up along the error's MRO, in both tables.
_GRPC_STATUS: dict[type[BaseException], str] = {
    ValidationError: "INVALID_ARGUMENT",
    ModelFormatError: "INVALID_ARGUMENT",
    NotFoundError: "NOT_FOUND",
    DuplicateRequestError: "ALREADY_EXISTS",
    AuthenticationError: "UNAUTHENTICATED",
    UnprocessableError: "FAILED_PRECONDITION",
    ClientError: "INVALID_ARGUMENT",
    RequestCancelled: "CANCELLED",
    DeadlineExceeded: "DEADLINE_EXCEEDED",
    QueueOverflowError: "RESOURCE_EXHAUSTED",
    MaxQueuedTokensError: "RESOURCE_EXHAUSTED",
    RetryableRequestError: "UNAVAILABLE",
    EngineDeadError: "UNAVAILABLE",
    ServerError: "INTERNAL",
    FlowKVError: "INTERNAL",
}


class HttpStatus(NamedTuple):
    """How an error looks over HTTP.

    Attributes:
        status: 499 is nginx's, for a request that its own side gave up.
        type: of OpenAI's error object.
        code: of OpenAI's error object; its spelling where OpenAI has one.
        can_retry: None leaves it to the client, which tries again after 408, 409, 429 and 5xx.
    """

    status: int
    type: str
    code: str | None
    can_retry: bool | None = None


_INVALID, _BUSY, _SERVER = "invalid_request_error", "rate_limit_error", "server_error"

_HTTP_STATUS: dict[type[BaseException], HttpStatus] = {
    ValidationError: HttpStatus(400, _INVALID, None),
    ContextLengthError: HttpStatus(400, _INVALID, "context_length_exceeded"),
    ModelFormatError: HttpStatus(400, _INVALID, None),
    NotFoundError: HttpStatus(404, _INVALID, "not_found"),
    ModelNotFoundError: HttpStatus(404, _INVALID, "model_not_found"),
    DuplicateRequestError: HttpStatus(409, _INVALID, "duplicate_request_id", can_retry=False),
    AuthenticationError: HttpStatus(401, _INVALID, "invalid_api_key"),
    UnprocessableError: HttpStatus(422, _INVALID, "unprocessable"),
    ClientError: HttpStatus(400, _INVALID, None),
    RequestCancelled: HttpStatus(499, _INVALID, "request_cancelled", can_retry=False),
    DeadlineExceeded: HttpStatus(504, _SERVER, "deadline_exceeded", can_retry=False),
    QueueOverflowError: HttpStatus(429, _BUSY, "rate_limit_exceeded"),
    MaxQueuedTokensError: HttpStatus(429, _BUSY, "rate_limit_exceeded"),
    RetryableRequestError: HttpStatus(503, _SERVER, "service_unavailable"),
    EngineDeadError: HttpStatus(503, _SERVER, "engine_dead"),
    GenerationError: HttpStatus(500, _SERVER, "generation_failed"),
    ServerError: HttpStatus(500, _SERVER, "internal_error"),
    FlowKVError: HttpStatus(500, _SERVER, "internal_error"),
}


def is_expected(error: BaseException) -> bool:
    """It happens while all is well: the caller's doing, or a time that was up."""
    return isinstance(error, ClientError | RequestCancelled | TimeoutError)


def grpc_status_name(error: BaseException) -> str:
    """Name of the gRPC status code for `error`; "INTERNAL" for anything outside the tree."""
    for cls in type(error).__mro__:
        if cls in _GRPC_STATUS:
            return _GRPC_STATUS[cls]
    return "INTERNAL"


def http_status(error: BaseException) -> HttpStatus:
    """HTTP's status for `error`; that of a bug for anything outside the tree. A full queue is 429,
    as it is RESOURCE_EXHAUSTED over gRPC; a server that ends or lost its nodes is 503."""
    for cls in type(error).__mro__:
        if cls in _HTTP_STATUS:
            return _HTTP_STATUS[cls]
    return _HTTP_STATUS[FlowKVError]
