"""How every protocol's handlers let the engine answer one request.

When the client goes away or the deadline passes, gRPC cancels the handler, and leaving
`Answering.generate` ends what the engine does for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from typing import Any

from flowkv_jax.checks import bad_value
from flowkv_jax.errors import (
    DeadlineExceeded,
    EngineDeadError,
    ValidationError,
)
from flowkv_jax.metrics.spans import Operation, arrive
from flowkv_jax.rpc.call_log import CallLog
from flowkv_jax.rpc.engine_protocol import PromptInput, ServingEngine
from flowkv_jax.rpc.generation import Generation, RequestOptions, answers_to
from flowkv_jax.rpc.limits import MAX_REQUEST_ID_CHARACTERS
from flowkv_jax.rpc.live_requests import LiveRequests
from flowkv_jax.sampling_params import SamplingParams

MIN_PROMPT_IDS_READ = 1 << 16
"""Lists are read on the event loop, where every other call waits."""


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

    @contextlib.asynccontextmanager
    async def generate(
        self, prompts: Sequence[PromptInput], params: SamplingParams, options: RequestOptions
    ) -> AsyncIterator[Generation]:
        """What the engine answers to prompts, to be taken. Leaving ends the requests."""
        generation = Generation(
            answers_to(self.engine, prompts, params, options),
            self.live,
            min_interval_s=self._stream_interval_s,
            is_whole=not options.is_stream,
        )
        try:
            async with generation:
                yield generation
        except EngineDeadError:
            self._on_engine_dead()
            raise


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
