"""`Client`: the Engine's calls, answered by a server elsewhere.

    with Client("127.0.0.1:50051") as client:
        [output] = client.generate("Once upon a time", SamplingParams(max_tokens=32))
        for output in client.generate("Once upon a time", stream=True):
            print(output.outputs[0].delta_text, end="")

Safe to share between threads. Errors are those the engine would have raised; what the connection
adds is `RetryableRequestError` (no server, or one that is shutting down) and `ClientError` (the
token is missing or unknown).
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Literal, Self, overload

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from flowkv_jax.checks import check_real
from flowkv_jax.engine.prompts import PromptType, as_request_ids
from flowkv_jax.errors import ClientError
from flowkv_jax.load import ModelInfo, NodeLoad
from flowkv_jax.outputs import RequestOutput
from flowkv_jax.rpc import wire
from flowkv_jax.rpc.auth import API_KEY_VARIABLE, check_key
from flowkv_jax.rpc.client_requests import (
    ClientRequest,
    CommonArguments,
    Params,
    chat_requests,
    generate_requests,
)
from flowkv_jax.rpc.client_stream import OutputStream, collect
from flowkv_jax.rpc.cluster_client import ClusterClient
from flowkv_jax.rpc.flowkv.v1 import flowkv_pb2 as pb
from flowkv_jax.rpc.flowkv.v1 import flowkv_pb2_grpc as pb_grpc
from flowkv_jax.rpc.status import error_of
from flowkv_jax.rpc.transport import SERVICE, channel_credentials, channel_options

DEFAULT_MAX_MESSAGE_BYTES = 64 << 20

Conversation = Sequence[Mapping[str, Any]]


class Client:
    """A connection to a FlowKV server. Opened when first used; close it, or use it in a `with`.

    Args:
        target: `HOST:PORT` or `unix:/path`.
        api_key: bearer token; None takes the environment variable FLOWKV_API_KEY, if set.
        tls: use TLS, with the system's authorities unless `tls_ca_file` is given.
        tls_ca_file: PEM file of the authorities the server's certificate may come from.
        tls_cert_file, tls_key_file: PEM files that identify this client.
        timeout: seconds a call may take if it says nothing else; None for no bound.
        max_message_bytes: largest message accepted and sent.

    Raises:
        ValidationError: a TLS file cannot be used, the key cannot travel in a header, or `timeout`
            is not positive.
    """

    def __init__(
        self,
        target: str = "127.0.0.1:50051",
        *,
        api_key: str | None = None,
        tls: bool = False,
        tls_ca_file: str | None = None,
        tls_cert_file: str | None = None,
        tls_key_file: str | None = None,
        timeout: float | None = None,
        max_message_bytes: int = DEFAULT_MAX_MESSAGE_BYTES,
    ) -> None:
        self._timeout = _checked_timeout(timeout)
        key = api_key if api_key is not None else os.environ.get(API_KEY_VARIABLE)
        if key is not None:
            check_key(key, "api_key", "api_key")
        self._metadata = (("authorization", f"Bearer {key}"),) if key is not None else ()
        credentials = channel_credentials(tls_ca_file, tls_cert_file, tls_key_file)
        if credentials is None and tls:
            credentials = grpc.ssl_channel_credentials()
        options = channel_options(target, max_message_bytes)
        if credentials is None:
            self._channel = grpc.insecure_channel(target, options=options)
        else:
            self._channel = grpc.secure_channel(target, credentials, options=options)
        self._stub = pb_grpc.FlowKVStub(self._channel)  # type: ignore[no-untyped-call]
        self._health = health_pb2_grpc.HealthStub(self._channel)
        self._cluster = ClusterClient(self._channel, self._call)

    @overload
    def generate(
        self, prompts: PromptType | Sequence[PromptType],
        sampling_params: Params | Sequence[Params] | None = ..., *,
        stream: Literal[False] = ..., request_id: str | Sequence[str] | None = ...,
        priority: int | Sequence[int] = ..., cache_salt: str | None = ...,
        timeout: float | None = ..., use_tqdm: bool = ...,
    ) -> list[RequestOutput]: ...  # fmt: skip

    @overload
    def generate(
        self, prompts: PromptType | Sequence[PromptType],
        sampling_params: Params | Sequence[Params] | None = ..., *,
        stream: Literal[True], request_id: str | Sequence[str] | None = ...,
        priority: int | Sequence[int] = ..., cache_salt: str | None = ...,
        timeout: float | None = ..., use_tqdm: bool = ...,
    ) -> OutputStream: ...  # fmt: skip

    def generate(
        self,
        prompts: PromptType | Sequence[PromptType],
        sampling_params: Params | Sequence[Params] | None = None,
        *,
        stream: bool = False,
        request_id: str | Sequence[str] | None = None,
        priority: int | Sequence[int] = 0,
        cache_salt: str | None = None,
        timeout: float | None = None,
        use_tqdm: bool = False,
    ) -> list[RequestOutput] | OutputStream:
        """Complete prompts.

        Args:
            prompts: a prompt (text, token ids, or a dict of either) or a list of prompts.
            sampling_params: for all prompts, or one each.
            stream: return an iterator of outputs, as `SamplingParams.output_kind` wants them;
                several prompts are interleaved. Leaving it early aborts the requests.
            request_id: for a single prompt, or a list with one each.
            priority: lower runs first; for all, or one each.
            cache_salt: share cached prompt blocks only with requests of this salt.
            timeout: seconds each request may take.
            use_tqdm: show a progress bar on stderr (not with `stream`).

        Returns:
            Final outputs in the order of the prompts, or the iterator.

        Raises:
            FlowKVError: as the engine would; with `stream`, from the iterator.
        """
        common = CommonArguments(sampling_params, request_id, priority, cache_salt, stream)
        requests = generate_requests(self._stub.Generate, prompts, common)
        return self._answers(requests, stream=stream, timeout=timeout, use_tqdm=use_tqdm)

    def stream_generate(
        self,
        prompts: PromptType | Sequence[PromptType],
        sampling_params: Any = None,
        **arguments: Any,
    ) -> OutputStream:
        """`generate` with `stream=True`."""
        return self.generate(prompts, sampling_params, stream=True, **arguments)

    @overload
    def chat(
        self, messages: Conversation | Sequence[Conversation],
        sampling_params: Params | Sequence[Params] | None = ..., *,
        stream: Literal[False] = ..., request_id: str | Sequence[str] | None = ...,
        priority: int | Sequence[int] = ..., cache_salt: str | None = ...,
        timeout: float | None = ..., use_tqdm: bool = ...,
    ) -> list[RequestOutput]: ...  # fmt: skip

    @overload
    def chat(
        self, messages: Conversation | Sequence[Conversation],
        sampling_params: Params | Sequence[Params] | None = ..., *,
        stream: Literal[True], request_id: str | Sequence[str] | None = ...,
        priority: int | Sequence[int] = ..., cache_salt: str | None = ...,
        timeout: float | None = ..., use_tqdm: bool = ...,
    ) -> OutputStream: ...  # fmt: skip

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        sampling_params: Params | Sequence[Params] | None = None,
        *,
        stream: bool = False,
        request_id: str | Sequence[str] | None = None,
        priority: int | Sequence[int] = 0,
        cache_salt: str | None = None,
        timeout: float | None = None,
        use_tqdm: bool = False,
    ) -> list[RequestOutput] | OutputStream:
        """Answer a conversation, or several. The rest is as in `generate`.

        Args:
            messages: `[{"role": "user", "content": "..."}, ...]`, or a list of such lists.
            sampling_params: without `max_tokens` the answer may fill the context.
        """
        common = CommonArguments(sampling_params, request_id, priority, cache_salt, stream)
        requests = chat_requests(self._stub.Chat, messages, common)
        return self._answers(requests, stream=stream, timeout=timeout, use_tqdm=use_tqdm)

    def abort(self, request_id: str | Sequence[str], *, timeout: float | None = None) -> int:
        """Abort live requests by id. Returns how many were aborted.

        Raises:
            NotFoundError: none of the ids names a live request.
        """
        ids = as_request_ids(request_id)
        message = pb.AbortRequest()
        wire.assign(message, "request_ids", ids)
        count: int = self._call(self._stub.Abort, message, timeout).num_aborted
        return count

    def model_info(self, *, timeout: float | None = None) -> ModelInfo:
        """The served model."""
        response = self._call(self._stub.GetModelInfo, pb.GetModelInfoRequest(), timeout)
        return wire.model_info_from_wire(response)

    def get_loads(self, *, timeout: float | None = None) -> NodeLoad:
        """The server's load at this moment."""
        return wire.loads_from_wire(self._call(self._stub.GetLoads, pb.GetLoadsRequest(), timeout))

    def tokenize(
        self, text: str, *, add_special_tokens: bool = True, timeout: float | None = None
    ) -> list[int]:
        """Text -> token ids."""
        message = pb.TokenizeRequest(add_special_tokens=add_special_tokens)
        wire.assign(message, "text", text)
        return list(self._call(self._stub.Tokenize, message, timeout).token_ids)

    def detokenize(
        self,
        token_ids: Sequence[int],
        *,
        skip_special_tokens: bool = True,
        timeout: float | None = None,
    ) -> str:
        """Token ids -> text."""
        message = pb.DetokenizeRequest(skip_special_tokens=skip_special_tokens)
        wire.assign(message, "token_ids", token_ids)
        text: str = self._call(self._stub.Detokenize, message, timeout).text
        return text

    @property
    def cluster(self) -> ClusterClient:
        """The server's nodes: what they do, what was decided, and what became of requests."""
        return self._cluster

    def health(self, *, timeout: float | None = None) -> bool:
        """Whether the server takes requests; False while it drains or its engine is dead.

        Raises:
            RetryableRequestError: there is no server.
        """
        request = health_pb2.HealthCheckRequest(service=SERVICE)
        status = self._call(self._health.Check, request, timeout).status
        return bool(status == health_pb2.HealthCheckResponse.SERVING)

    def close(self) -> None:
        """Close the connection; open streams end with `RequestCancelled`. Idempotent."""
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        _error_type: type[BaseException] | None,
        _error: BaseException | None,
        _traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _answers(
        self, requests: list[ClientRequest], *, stream: bool, timeout: float | None, use_tqdm: bool
    ) -> list[RequestOutput] | OutputStream:
        timeout = _checked_timeout(timeout) or self._timeout
        if stream:
            return OutputStream(requests, timeout, self._metadata)
        outputs = collect(requests, timeout, self._metadata)
        return list(_with_progress(outputs, len(requests)) if use_tqdm else outputs)

    def _call(self, method: Any, message: Any, timeout: float | None) -> Any:
        timeout = _checked_timeout(timeout) or self._timeout
        try:
            return method(message, timeout=timeout, metadata=self._metadata)
        except grpc.RpcError as error:
            raise error_of(error) from error
        except ValueError as error:  # how gRPC says that the channel is closed
            raise ClientError(f"the call cannot be made: {error}") from error


def _checked_timeout(timeout: float | None) -> float | None:
    if timeout is not None:
        check_real("timeout", timeout, 0.0, low_open=True)
    return timeout


def _with_progress(outputs: Iterable[RequestOutput], total: int) -> Iterator[RequestOutput]:
    from rich.console import Console
    from rich.progress import track

    console = Console(stderr=True)
    yield from track(outputs, description="requests", total=total, console=console)
