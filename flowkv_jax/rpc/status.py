"""Errors as gRPC statuses with details, and back to the same class.

The status comes from `flowkv_jax.errors.grpc_status_name`. The details (google.rpc messages in
`grpc-status-details-bin`) carry what a status cannot: an ErrorInfo whose reason is the class, a
BadRequest with the offending parameter, a RetryInfo with the time to wait. A server that answers
without them (a proxy, gRPC itself) is understood by its status alone.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import grpc
from google.protobuf import any_pb2
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from flowkv_jax import errors
from flowkv_jax.errors import (
    DEFAULT_RETRY_AFTER_S,
    FlowKVError,
    RetryableRequestError,
    ValidationError,
)

DOMAIN = "flowkv.v1"

# Status message and details travel in headers, of which clients accept 8 KiB by default; the
# message is in there twice, percent-encoded (up to 3x) and base64 (4/3, with its field violation).
_MAX_MESSAGE_BYTES = 1024


def _tree(root: type[FlowKVError]) -> Iterator[type[FlowKVError]]:
    yield root
    for cls in root.__subclasses__():
        yield from _tree(cls)


def _reason_of(cls: type[FlowKVError]) -> str:
    """`QueueOverflowError` -> `QUEUE_OVERFLOW_ERROR`, as google.rpc.ErrorInfo wants it."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", cls.__name__).upper()


_CLASS_OF_REASON = {
    _reason_of(cls): cls for cls in _tree(FlowKVError) if cls.__module__ == errors.__name__
}

_CLASS_OF_CODE: dict[grpc.StatusCode, type[FlowKVError]] = {
    grpc.StatusCode.INVALID_ARGUMENT: errors.ValidationError,
    grpc.StatusCode.OUT_OF_RANGE: errors.ValidationError,
    grpc.StatusCode.NOT_FOUND: errors.NotFoundError,
    grpc.StatusCode.ALREADY_EXISTS: errors.DuplicateRequestError,
    grpc.StatusCode.FAILED_PRECONDITION: errors.UnprocessableError,
    grpc.StatusCode.UNIMPLEMENTED: errors.UnprocessableError,
    grpc.StatusCode.UNAUTHENTICATED: errors.AuthenticationError,
    grpc.StatusCode.PERMISSION_DENIED: errors.AuthenticationError,
    # Without our details this is gRPC itself: a message above a size limit.
    grpc.StatusCode.RESOURCE_EXHAUSTED: errors.UnprocessableError,
    grpc.StatusCode.CANCELLED: errors.RequestCancelled,
    grpc.StatusCode.DEADLINE_EXCEEDED: errors.DeadlineExceeded,
    grpc.StatusCode.UNAVAILABLE: errors.RetryableRequestError,
}


def status_of(error: BaseException) -> status_pb2.Status:
    """The status for `error`. Outside the tree it is INTERNAL and says nothing of the inside."""
    code = grpc.StatusCode[errors.grpc_status_name(error)]
    status = status_pb2.Status(code=code.value[0])
    if not isinstance(error, FlowKVError):
        status.message = "internal error; the server's log has the cause"
        return status
    status.message = _shortened(str(error))
    known = next(cls for cls in type(error).__mro__ if cls in _CLASS_OF_REASON.values())
    info = error_details_pb2.ErrorInfo(reason=_reason_of(known), domain=DOMAIN)
    _attach(status, info)
    if isinstance(error, ValidationError) and error.parameter is not None:
        violation = error_details_pb2.BadRequest.FieldViolation(
            field=error.parameter[:100], description=status.message
        )
        _attach(status, error_details_pb2.BadRequest(field_violations=[violation]))
    retry_after_s = _retry_after_s(error, code)
    if retry_after_s is not None:
        retry = error_details_pb2.RetryInfo()
        retry.retry_delay.FromMilliseconds(round(retry_after_s * 1000))
        _attach(status, retry)
    return status


def error_of(call: Any) -> FlowKVError:
    """The error a failed call stands for. `call` is a `grpc.RpcError` with the call's methods."""
    code, message = call.code(), call.details() or ""
    status = rpc_status.from_call(call)
    cls = _CLASS_OF_CODE.get(code, errors.ServerError)
    parameter: str | None = None
    retry_after_s: float | None = None
    for detail in status.details if status is not None else ():
        info = error_details_pb2.ErrorInfo()
        bad_request = error_details_pb2.BadRequest()
        retry = error_details_pb2.RetryInfo()
        if detail.Unpack(info) and info.domain == DOMAIN:
            cls = _CLASS_OF_REASON.get(info.reason, cls)
        elif detail.Unpack(bad_request) and bad_request.field_violations:
            parameter = bad_request.field_violations[0].field
        elif detail.Unpack(retry):
            retry_after_s = retry.retry_delay.ToMilliseconds() / 1000
    text = message or code.name
    if issubclass(cls, ValidationError):
        return cls(text, parameter=parameter)
    if issubclass(cls, RetryableRequestError):
        return cls(text, retry_after_s=retry_after_s)
    return cls(text)


def _retry_after_s(error: FlowKVError, code: grpc.StatusCode) -> float | None:
    if not isinstance(error, RetryableRequestError):
        return None
    if error.retry_after_s is None and code is grpc.StatusCode.RESOURCE_EXHAUSTED:
        return DEFAULT_RETRY_AFTER_S
    return error.retry_after_s


def _attach(status: status_pb2.Status, detail: Any) -> None:
    packed = any_pb2.Any()
    packed.Pack(detail)
    status.details.append(packed)


def _shortened(message: str) -> str:
    encoded = message.encode("utf-8", errors="replace")
    if len(encoded) <= _MAX_MESSAGE_BYTES:
        return encoded.decode("utf-8")
    return encoded[: _MAX_MESSAGE_BYTES - 3].decode("utf-8", errors="ignore") + "..."
