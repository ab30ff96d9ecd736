"""An open-loop client: every request is sent at its own time, whatever became of those before.

One event loop, one connection, one task a request. Messages are made before the first is sent, and
times are taken when a message has been received. The loop that sends also receives, so a client
that cannot keep up shows it: requests are sent late, and `RequestRecord.lateness_s` says how much.

A refused request (`RetryableRequestError`: no server, a full queue) may be sent again after the
delay that the server names, while none of its tokens has come; its times count from the first
sending. Nothing else is repeated, and the connection's own retries are off: what is retried is
counted.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import grpc
import grpc.aio

from flowkv_jax.bench.serve_records import Outcome, RequestRecord
from flowkv_jax.bench.serve_workload import PlannedRequest
from flowkv_jax.errors import (
    FlowKVError,
    GenerationError,
    RequestCancelled,
    RetryableRequestError,
    ServerError,
)
from flowkv_jax.outputs import RequestMetrics
from flowkv_jax.rpc import wire
from flowkv_jax.rpc.client_requests import ClientRequest, CommonArguments, generate_requests
from flowkv_jax.rpc.flowkv.v1 import flowkv_pb2 as pb
from flowkv_jax.rpc.flowkv.v1 import flowkv_pb2_grpc as pb_grpc
from flowkv_jax.rpc.status import error_of
from flowkv_jax.rpc.transport import channel_credentials, channel_options
from flowkv_jax.sampling_params import SamplingParams

_FIRST_RETRY_S = 0.5
"""Doubled each time, where the server names no delay."""
_MAX_MESSAGE_BYTES = 64 << 20


class IncompleteAnswer(ServerError):
    """An answer that the server called finished has fewer or more tokens than it should."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asking:
    """How requests are asked.

    Attributes:
        temperature: 0 is greedy.
        ignore_eos: answers have exactly the planned number of tokens; another is a failure.
        timeout_s: each call's deadline.
        max_retries: times a refused request is sent again.
        max_concurrency: calls open at once; None for no bound.
    """

    temperature: float = 0.0
    ignore_eos: bool = True
    timeout_s: float = 600.0
    max_retries: int = 0
    max_concurrency: int | None = None


@dataclass(slots=True)
class Counts:
    """How far a cell has come."""

    sent: int = 0
    completed: int = 0
    failed: int = 0


@dataclass(slots=True)
class _Received:
    """What has come of one call."""

    arrivals: list[tuple[float, int]] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    usage: pb.Usage | None = None
    finish_reason: int = pb.FINISH_REASON_UNSPECIFIED
    metrics: RequestMetrics | None = None


class LoadClient:
    """Sends planned requests to one server. Made by `open_client`."""

    def __init__(
        self,
        stub: Any,
        metadata: Sequence[tuple[str, str]],
        asking: Asking,
        clock: Callable[[], float] = perf_counter,
    ) -> None:
        self._stub = stub
        self._metadata = metadata
        self._asking = asking
        self._clock = clock

    async def send_all(
        self,
        plans: Sequence[PlannedRequest],
        name: str,
        records: list[RequestRecord],
        counts: Counts,
    ) -> None:
        """Send each request at its time, and wait for all.

        Args:
            plans: by time of sending.
            name: unique among runs against the server. Request ids begin with it, and it is the
                salt of the requests' cached blocks: they share prefixes with each other only.
            records: one is added for each request that was sent, when it has ended. Complete also
                if this is cancelled: what is open is given up, and recorded so.
        """
        requests = self._requests(plans, name)
        limit = self._asking.max_concurrency
        slots = asyncio.Semaphore(limit) if limit is not None else None
        tasks: list[asyncio.Task[None]] = []
        begin = self._clock()

        async def ask_one(index: int) -> None:
            record = await self._ask(index, plans[index], requests[index], begin, slots, counts)
            if record is not None:
                records.append(record)

        try:
            for index, plan in enumerate(plans):
                await asyncio.sleep(max(0.0, begin + plan.send_at_s - self._clock()))
                tasks.append(asyncio.create_task(ask_one(index)))
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            records.sort(key=lambda record: record.index)

    async def answer(self, plan: PlannedRequest, name: str) -> tuple[int, ...]:
        """One request by itself: the token ids of its answer.

        Raises:
            FlowKVError: it failed.
        """
        [request] = self._requests([plan], name)
        received = _Received()
        await self._call(request, received, self._clock())
        self._check_complete(received, request)
        return tuple(received.token_ids)

    def _requests(self, plans: Sequence[PlannedRequest], name: str) -> list[ClientRequest]:
        params = [
            SamplingParams(
                temperature=self._asking.temperature,
                max_tokens=plan.max_tokens,
                ignore_eos=self._asking.ignore_eos,
                seed=index if self._asking.temperature > 0 else None,
            )
            for index, plan in enumerate(plans)
        ]
        ids = [f"{name}-{index}" for index in range(len(plans))]
        common = CommonArguments(params, ids, 0, name, is_stream=True)
        prompts = [{"prompt_token_ids": list(plan.prompt_token_ids)} for plan in plans]
        return generate_requests(self._stub.Generate, prompts, common)

    async def _ask(
        self,
        index: int,
        plan: PlannedRequest,
        request: ClientRequest,
        begin: float,
        slots: asyncio.Semaphore | None,
        counts: Counts,
    ) -> RequestRecord | None:
        """None if it was given up before it was sent."""
        ready = self._clock()
        received, retries = _Received(), 0
        error: FlowKVError | None = None
        outcome = Outcome.COMPLETED
        sent: float | None = None
        try:
            async with slots or nullcontext():
                sent = self._clock()
                counts.sent += 1
                while (error := await self._attempt(request, received, begin)) is not None:
                    if retries >= self._asking.max_retries or not _may_retry(error, received):
                        break
                    retries += 1
                    await asyncio.sleep(_retry_delay_s(error, retries))
                    # The server may not have forgotten the id that it refused.
                    request.message.options.request_id = (
                        f"{request.message.options.request_id}-again"
                    )
        except asyncio.CancelledError:
            if sent is None:
                return None
            outcome = Outcome.INTERRUPTED
        if error is not None and outcome is Outcome.COMPLETED:
            outcome = Outcome.FAILED
        counts.completed += outcome is Outcome.COMPLETED
        counts.failed += outcome is Outcome.FAILED
        return RequestRecord(
            index=index,
            request_id=request.message.options.request_id,
            group=plan.group,
            num_prompt_tokens=len(plan.prompt_token_ids),
            scheduled_s=plan.send_at_s,
            sent_s=sent - begin,
            held_s=sent - ready if slots is not None else 0.0,
            ended_s=self._clock() - begin,
            outcome=outcome,
            arrivals=tuple(received.arrivals),
            token_ids=tuple(received.token_ids),
            error=type(error).__name__ if outcome is Outcome.FAILED else None,
            error_text=str(error) if outcome is Outcome.FAILED else None,
            num_retries=retries,
            num_cached_tokens=received.usage.cached_tokens if received.usage else 0,
            server=received.metrics,
        )

    async def _attempt(
        self, request: ClientRequest, received: _Received, begin: float
    ) -> FlowKVError | None:
        """Call once; what went wrong, if something did."""
        try:
            await self._call(request, received, begin)
            self._check_complete(received, request)
        except FlowKVError as error:
            return error
        return None

    async def _call(self, request: ClientRequest, received: _Received, begin: float) -> None:
        """
        Raises:
            FlowKVError: what the server reported, or the connection met.
        """
        call = request.method(
            request.message, timeout=self._asking.timeout_s, metadata=self._metadata
        )
        is_finished = False
        try:
            async for response in call:
                now = self._clock()
                for delta in response.outputs:
                    if delta.token_ids:
                        received.arrivals.append((now - begin, len(delta.token_ids)))
                        received.token_ids.extend(delta.token_ids)
                    received.finish_reason = delta.finish_reason or received.finish_reason
                if response.finished:
                    is_finished = True
                    received.usage = response.usage
                    received.metrics = wire.response_from_wire(response, pb.Prompt()).metrics
        except grpc.RpcError as error:
            raise error_of(error) from error
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            # How grpc.aio spells a server's own CANCELLED.
            raise RequestCancelled("the server cancelled the request") from None
        finally:
            call.cancel()
        if not is_finished:
            raise ServerError("the server ended the answer before it was finished")

    def _check_complete(self, received: _Received, request: ClientRequest) -> None:
        """
        Raises:
            RequestCancelled, GenerationError: it was finished by an abort or an error.
            IncompleteAnswer: tokens are missing, or too many.
        """
        if received.finish_reason == pb.FINISH_REASON_ABORT:
            raise RequestCancelled("the server aborted the request")
        if received.finish_reason == pb.FINISH_REASON_ERROR:
            raise GenerationError("the server finished the answer with an error")
        found, wanted = len(received.token_ids), request.message.sampling_params.max_tokens
        said = received.usage.completion_tokens if received.usage else 0
        if found != said:
            raise IncompleteAnswer(f"{found} tokens came, and the server says it sent {said}")
        if self._asking.ignore_eos and found != wanted:
            raise IncompleteAnswer(f"{found} tokens came of the {wanted} that were asked for")


@asynccontextmanager
async def open_client(
    target: str,
    asking: Asking,
    *,
    api_key: str | None = None,
    tls: bool = False,
    tls_ca_file: str | None = None,
) -> AsyncIterator[LoadClient]:
    """A client on a connection of its own; arguments as of `flowkv_jax.Client`, but that `api_key`
    is not looked for in the environment.

    Raises:
        ValidationError: the TLS file cannot be used.
    """
    options = [*channel_options(target, _MAX_MESSAGE_BYTES), ("grpc.enable_retries", 0)]
    credentials = channel_credentials(tls_ca_file, None, None)
    if credentials is None and tls:
        credentials = grpc.ssl_channel_credentials()
    if credentials is None:
        channel = grpc.aio.insecure_channel(target, options=options)
    else:
        channel = grpc.aio.secure_channel(target, credentials, options=options)
    metadata = (("authorization", f"Bearer {api_key}"),) if api_key is not None else ()
    async with channel:
        stub = pb_grpc.FlowKVStub(channel)  # type: ignore[no-untyped-call]
        yield LoadClient(stub, metadata, asking)


def _may_retry(error: FlowKVError, received: _Received) -> bool:
    return isinstance(error, RetryableRequestError) and not received.token_ids


def _retry_delay_s(error: FlowKVError, retries: int) -> float:
    named_s = error.retry_after_s if isinstance(error, RetryableRequestError) else None
    return named_s if named_s is not None else _FIRST_RETRY_S * 2.0 ** (retries - 1)
