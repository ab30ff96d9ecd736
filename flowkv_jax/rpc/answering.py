"""How every protocol's handlers let the engine answer one request.

An answer has two tasks. The pump reads the engine into an `OutputBuffer` and alone owns the
engine's iterator: whatever ends it, the iterator is closed, which aborts the request. The handler
takes from the buffer and writes. When the client goes away or the deadline passes, gRPC cancels
the handler, and leaving `Answering.reading` cancels the pump.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass
from typing import Any

from flowkv_jax.checks import bad_value
from flowkv_jax.errors import (
    DeadlineExceeded,
    EngineDeadError,
    GenerationError,
    RequestCancelled,
    ValidationError,
)
from flowkv_jax.metrics.spans import Operation, arrive
from flowkv_jax.outputs import RequestOutput
from flowkv_jax.rpc.call_log import CallLog
from flowkv_jax.rpc.engine_protocol import PromptInput, ServingEngine
from flowkv_jax.rpc.live_requests import LiveRequests, LiveStream
from flowkv_jax.rpc.output_buffer import OutputBuffer
from flowkv_jax.sampling_params import SamplingParams

MAX_REQUEST_ID_CHARACTERS = 256
MIN_PROMPT_IDS_READ = 1 << 16
"""Lists are read on the event loop, where every other call waits."""


@dataclass(frozen=True, slots=True)
class RequestOptions:
    """What a request says beside prompt and sampling parameters, checked.

    Attributes:
        timeout_s: time left, the call's deadline folded in; None for none.
        kv_transfer_params: of a hand-off that a router drives; None where none does.
        is_stream: deltas as they come, instead of one answer at the end.
    """

    request_id: str
    priority: int = 0
    cache_salt: str | None = None
    timeout_s: float | None = None
    kv_transfer_params: dict[str, Any] | None = None
    is_stream: bool = True

    def engine_arguments(self) -> dict[str, Any]:
        arguments: dict[str, Any] = {
            "request_id": self.request_id,
            "priority": self.priority,
            "cache_salt": self.cache_salt,
            "timeout": self.timeout_s,
        }
        if self.kv_transfer_params is not None:
            arguments["kv_transfer_params"] = self.kv_transfer_params
        return arguments


class Answering:
    """What the servicers of one server share; every call's event loop is the server's.

    Args:
        live: where answers are registered while they last.
        stream_interval_s: least time between two messages of a stream.
        on_engine_dead: called when a request met a dead engine.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        engine: ServingEngine,
        live: LiveRequests,
        *,
        stream_interval_s: float,
        on_engine_dead: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.engine = engine
        self.live = live
        self.clock = clock
        self._stream_interval_s = stream_interval_s
        self._on_engine_dead = on_engine_dead

    @property
    def is_ready(self) -> bool:
        """Requests are taken, and can be served."""
        return self.live.is_accepting and self.engine.is_healthy

    def log(self, context: Any, method: str) -> CallLog:
        """What surrounds a call's handler; called by its own task, before anything else."""
        operation: Operation = "chat" if method == "Chat" else "text_completion"
        arrive(operation, context.invocation_metadata() or ())
        return CallLog(context, method, self.clock)

    async def abort(self, request_ids: Iterable[str]) -> dict[str, int]:
        """How many requests of each id were aborted."""

        def abort_each(names: list[str]) -> dict[str, int]:
            return {name: self.engine.abort(name) for name in names}

        # The engine answers between two steps; the event loop does not wait for it.
        return await asyncio.to_thread(abort_each, list(request_ids))

    def generate(
        self, prompt: PromptInput, params: SamplingParams, options: RequestOptions
    ) -> contextlib.AbstractAsyncContextManager[OutputBuffer]:
        """`reading` of the engine's answer to a prompt."""
        outputs = self.engine.async_generate(prompt, params, **options.engine_arguments())
        return self.reading(outputs, is_stream=options.is_stream)

    @contextlib.asynccontextmanager
    async def reading(
        self, outputs: AsyncIterator[RequestOutput], *, is_stream: bool
    ) -> AsyncIterator[OutputBuffer]:
        """A buffer that fills with what the engine yields. Leaving ends the request."""
        buffer = OutputBuffer(
            min_interval_s=self._stream_interval_s, clock=self.clock, whole=not is_stream
        )
        stream = LiveStream(buffer, asyncio.create_task(_pump(outputs, buffer)))
        self.live.add(stream)
        try:
            yield buffer
        except EngineDeadError:
            self._on_engine_dead()
            raise
        finally:
            stream.pump.cancel()
            try:
                await asyncio.wait([stream.pump])
            finally:
                self.live.discard(stream)


async def _pump(outputs: AsyncIterator[RequestOutput], buffer: OutputBuffer) -> None:
    error: Exception | None = RequestCancelled("the request was cancelled")
    is_finished = False
    try:
        async with contextlib.AsyncExitStack() as stack:
            if hasattr(outputs, "aclose"):
                stack.push_async_callback(outputs.aclose)
            async for output in outputs:
                buffer.put(output)
                is_finished = output.finished
        unfinished = GenerationError("the engine ended the answer before it was finished")
        error = None if is_finished else unfinished
    except Exception as caught:
        error = caught
    finally:
        buffer.close(error)


def checked_request_id(given: str, log: CallLog) -> str:
    """The id a request brought, or one made up. It is `log`'s from now on.

    Raises:
        ValidationError: too long, or not printable.
    """
    request_id = given or f"req-{uuid.uuid4().hex}"
    log.request_id = request_id[:MAX_REQUEST_ID_CHARACTERS]
    if len(request_id) > MAX_REQUEST_ID_CHARACTERS or not request_id.isprintable():
        raise bad_value(
            "request_id",
            request_id,
            f"must be printable, and at most {MAX_REQUEST_ID_CHARACTERS} characters",
        )
    return request_id


def time_left_s(context: Any, asked_s: float | None = None) -> float | None:
    """The shorter of what was asked for and what is left of the call's deadline.

    Raises:
        DeadlineExceeded: the deadline has passed.
    """
    remaining_s = context.time_remaining()
    if remaining_s is None or not math.isfinite(remaining_s):
        return asked_s
    if remaining_s <= 0:
        raise DeadlineExceeded("the call's deadline had passed when it arrived")
    return float(remaining_s) if asked_s is None else min(asked_s, float(remaining_s))


def check_count(name: str, values: Any, most: int) -> None:
    """
    Raises:
        ValidationError: there are more than `most` values.
    """
    if len(values) > most:
        raise ValidationError(f"{name} has {len(values)} entries; at most {most}", parameter=name)


def prompt_ids(name: str, ids: Any, max_model_len: int, *, is_truncated: bool) -> list[int]:
    """A repeated field of token ids as a prompt.

    Args:
        is_truncated: the request keeps only the end of a prompt that is too long.

    Raises:
        ValidationError: far more ids than any prompt may have.
    """
    most = max(max_model_len, MIN_PROMPT_IDS_READ)
    if not is_truncated:
        check_count(name, ids, most)
    # No prompt is longer, and truncation keeps the end.
    return list(ids[-most:])
