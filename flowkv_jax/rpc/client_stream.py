"""A client's open calls, as an iterator of outputs.

One prompt: the caller's thread reads the call. Several: each of a bounded number of reader threads
takes the next request, reads its call to the end and puts what it gets into one queue, so outputs
come in the order of their arrival. Whoever leaves early cancels: `close`, the end of a `with`, an
error, and garbage collection all end every open call, and the server aborts their requests.
"""

from __future__ import annotations

import queue
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Self

import grpc

from flowkv_jax.errors import ClientError, FlowKVError, RequestCancelled, ServerError
from flowkv_jax.outputs import RequestOutput
from flowkv_jax.rpc import wire
from flowkv_jax.rpc.client_requests import ClientRequest
from flowkv_jax.rpc.flowkv.v1 import flowkv_pb2 as pb
from flowkv_jax.rpc.merge import OutputMerger
from flowkv_jax.rpc.status import error_of
from flowkv_jax.sampling_params import RequestOutputKind

MAX_CONCURRENT_CALLS = 128


class OpenCall:
    """One streaming call, read as outputs of the request's kind.

    Args:
        timeout: seconds until the deadline of the call; None for none.
        metadata: pairs sent along.

    Raises:
        ClientError: the client is closed.
    """

    def __init__(
        self, request: ClientRequest, timeout: float | None, metadata: Sequence[tuple[str, str]]
    ) -> None:
        self._kind = request.output_kind
        self._wants_logprobs = request.params.logprobs is not None
        try:
            self._call = request.method(request.message, timeout=timeout, metadata=metadata)
        except ValueError as error:  # how gRPC says that the channel is closed
            raise ClientError(f"the call cannot be made: {error}") from error
        self._prompt = pb.Prompt()
        self._merger = OutputMerger()

    def outputs(self) -> Iterator[RequestOutput]:
        """
        Raises:
            FlowKVError: the error that the server reported, or that the connection met.
        """
        is_finished = False
        try:
            for response in self._call:
                is_finished = response.finished
                yield from self._shown(self._delta(response))
        except grpc.RpcError as error:
            raise error_of(error) from error
        finally:
            self.cancel()
        if not is_finished:
            raise ServerError("the server ended the answer before it was finished")

    def cancel(self) -> None:
        """End the call; the server aborts the request. No effect on a call that has ended."""
        self._call.cancel()

    def _delta(self, response: pb.GenerateResponse) -> RequestOutput:
        if response.HasField("prompt"):
            self._prompt.CopyFrom(response.prompt)
        output = wire.response_from_wire(response, self._prompt)
        if self._wants_logprobs:
            answers = [replace(answer, logprobs=answer.logprobs or []) for answer in output.outputs]
            output = replace(output, outputs=answers)
        return output

    def _shown(self, delta: RequestOutput) -> Iterator[RequestOutput]:
        if self._kind is RequestOutputKind.DELTA:
            yield delta
            return
        self._merger.add(delta)
        if self._kind is RequestOutputKind.CUMULATIVE:
            yield _cumulative(self._merger.merged(), delta)
        elif delta.finished:
            yield self._merger.merged()


class OutputStream(Iterator[RequestOutput]):
    """Outputs of one or several requests; those of several are interleaved, told apart by
    `request_id`. The calls begin at once.
    """

    def __init__(
        self,
        requests: Sequence[ClientRequest],
        timeout: float | None,
        metadata: Sequence[tuple[str, str]],
    ) -> None:
        self._calls: _Readers | OpenCall
        if len(requests) == 1:
            self._calls = OpenCall(requests[0], timeout, metadata)
        else:
            self._calls = _Readers(requests, timeout, metadata)
        self._outputs = self._calls.outputs()
        self._is_closed = False

    def __next__(self) -> RequestOutput:
        if self._is_closed:
            raise StopIteration
        try:
            return next(self._outputs)
        except FlowKVError:
            self.close()
            raise

    def close(self) -> None:
        """Cancel what is still open; there are no more outputs. Idempotent."""
        self._is_closed = True
        self._calls.cancel()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        _error_type: type[BaseException] | None,
        _error: BaseException | None,
        _traceback: TracebackType | None,
    ) -> None:
        self.close()

    def __del__(self, is_exiting: Callable[[], bool] = sys.is_finalizing) -> None:
        # Absent if __init__ failed.
        if not is_exiting() and hasattr(self, "_calls"):
            self._calls.cancel()


def collect(
    requests: Sequence[ClientRequest],
    timeout: float | None,
    metadata: Sequence[tuple[str, str]],
) -> Iterator[RequestOutput]:
    """The final output of each request, in the order of the requests; they run concurrently.

    Raises:
        FlowKVError: of the first request, in that order, that failed; the others are cancelled.
    """
    waiting = deque(requests)
    open_calls: deque[OpenCall] = deque()
    try:
        while waiting or open_calls:
            while waiting and len(open_calls) < MAX_CONCURRENT_CALLS:
                request = waiting.popleft()
                params = request.params.replace(output_kind=RequestOutputKind.FINAL_ONLY)
                open_calls.append(OpenCall(replace(request, params=params), timeout, metadata))
            (output,) = open_calls[0].outputs()
            open_calls.popleft()
            yield output
    finally:
        for call in open_calls:
            call.cancel()


class _Readers:
    """The threads behind an interleaved stream.

    The queue is not bounded: what waits in it is bounded by what the requests may generate. A
    thread ends when there is no request left, or after `cancel`, which fails the call it reads.
    """

    def __init__(
        self,
        requests: Sequence[ClientRequest],
        timeout: float | None,
        metadata: Sequence[tuple[str, str]],
    ) -> None:
        self._waiting = deque(requests)
        self._timeout = timeout
        self._metadata = metadata
        # Reentrant: a collection that starts while it is held may close the stream itself.
        self._lock = threading.RLock()
        self._open: set[OpenCall] = set()
        self._is_cancelled = False
        self._num_unfinished = len(requests)
        self._arrived: queue.SimpleQueue[RequestOutput | BaseException | None] = queue.SimpleQueue()
        for _ in range(min(len(requests), MAX_CONCURRENT_CALLS)):
            threading.Thread(target=self._read, name="flowkv-client-reader", daemon=True).start()

    def outputs(self) -> Iterator[RequestOutput]:
        while self._num_unfinished:
            item = self._arrived.get()
            if item is None:
                self._num_unfinished -= 1
            elif isinstance(item, BaseException):
                raise item
            else:
                yield item

    def cancel(self) -> None:
        with self._lock:
            self._is_cancelled = True
            open_calls = list(self._open)
        for call in open_calls:
            call.cancel()
        self._arrived.put(RequestCancelled("the stream was closed"))

    def _read(self) -> None:
        try:
            while (call := self._next_call()) is not None:
                if self._is_cancelled:  # by that collection: it did not see this call
                    call.cancel()
                for output in call.outputs():
                    self._arrived.put(output)
                self._arrived.put(None)
                with self._lock:
                    self._open.discard(call)
        except BaseException as error:
            # Raised again in the thread that iterates, which would wait for ever otherwise.
            self._arrived.put(error)

    def _next_call(self) -> OpenCall | None:
        with self._lock:
            if self._is_cancelled or not self._waiting:
                return None
            call = OpenCall(self._waiting.popleft(), self._timeout, self._metadata)
            self._open.add(call)
            return call


def _cumulative(so_far: RequestOutput, delta: RequestOutput) -> RequestOutput:
    """`so_far` with the delta fields of `delta`."""
    news = {answer.index: answer for answer in delta.outputs}
    outputs = []
    for answer in so_far.outputs:
        new = news.get(answer.index)
        outputs.append(
            replace(
                answer,
                delta_text=new.delta_text if new is not None else "",
                delta_token_ids=new.delta_token_ids if new is not None else [],
            )
        )
    return replace(so_far, outputs=outputs)
