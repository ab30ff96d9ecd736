"""One request of a front door as some engine requests, and their outputs in one mailbox.

    engine's pace   pump, pump, ..   a task a prompt; each alone owns its engine iterator
    wire's pace     take .. take     the handler

A pump puts what its iterator yields into the mailbox; `take` gives everything that came since the
last one, the first at once and later ones at least `min_interval_s` apart. Whatever ends the
generation (all said, an error of one prompt, `stop`, the handler leaving the block), every iterator
is closed before it is over, which ends the requests in the engine.

Per token this costs one wake-up of a pump and one of the handler: no task, no timer, no structure.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from flowkv_jax.errors import FlowKVError, GenerationError, RequestCancelled
from flowkv_jax.outputs import RequestOutput
from flowkv_jax.rpc.engine_protocol import PromptInput, ServingEngine
from flowkv_jax.rpc.live_requests import LiveRequests
from flowkv_jax.rpc.merge import OutputMerger
from flowkv_jax.sampling_params import SamplingParams

PromptOutput = tuple[int, RequestOutput]
"""Number of the prompt, and what is new of it."""


@dataclass(frozen=True, slots=True)
class RequestOptions:
    """What a request says beside prompts and sampling parameters, checked.

    Attributes:
        request_id: the engine's name for it; prompts behind the first have a number, too.
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

    def engine_arguments(self, number: int = 0) -> dict[str, Any]:
        """For the prompt of this number."""
        return {
            "request_id": self.request_id if number == 0 else f"{self.request_id}-{number}",
            "priority": self.priority,
            "cache_salt": self.cache_salt,
            "timeout": self.timeout_s,
            "kv_transfer_params": self.kv_transfer_params,
        }


def answers_to(
    engine: ServingEngine,
    prompts: Sequence[PromptInput],
    params: SamplingParams,
    options: RequestOptions,
) -> list[AsyncIterator[RequestOutput]]:
    """The engine's iterators, one a prompt."""
    return [
        engine.async_generate(prompt, params, **options.engine_arguments(number))
        for number, prompt in enumerate(prompts)
    ]


class Generation:
    """Entering the block starts the engine's requests; leaving it ends them.

    Args:
        answers: the engine's iterators, one a prompt. Outputs are deltas.
        live: where it is registered while it lasts, by `names`.
        min_interval_s: least time between two takes.
        is_whole: nothing can be taken before everything is there.
    """

    def __init__(
        self,
        answers: Sequence[AsyncIterator[RequestOutput]],
        live: LiveRequests,
        *,
        min_interval_s: float,
        is_whole: bool,
        names: tuple[str, ...] = (),
    ) -> None:
        self._answers = answers
        self._live = live
        self._names = names
        self._min_interval_s = min_interval_s
        self._due_s = math.inf if is_whole else -math.inf
        self._pending: list[PromptOutput] = []
        self._num_open = len(answers)
        self._error: BaseException | None = None
        self._is_closed = False
        self._waiter: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._loop = asyncio.get_running_loop()
        self._pumps: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Self:
        self._live.add(self, *self._names)
        self._pumps = [
            self._loop.create_task(self._pump(index, answer))
            for index, answer in enumerate(self._answers)
        ]
        return self

    async def __aexit__(
        self,
        _error_type: type[BaseException] | None,
        _error: BaseException | None,
        _traceback: TracebackType | None,
    ) -> None:
        self._close(None)
        if self._timer is not None:
            self._timer.cancel()
        try:
            await asyncio.wait(self._pumps)
        finally:
            self._live.discard(self)

    def stop(self, error: FlowKVError) -> None:
        """End the requests in the engine, and `take` with `error`."""
        self._close(error)

    async def take(self) -> list[PromptOutput]:
        """What is new, in the order it came; empty when everything was said.

        Raises:
            Exception: what an engine's iterator, or `stop`, said, once all before it was taken.
        """
        while not self._is_due():
            self._waiter = self._loop.create_future()
            if self._pending:
                self._set_timer()
            await self._waiter
        if self._pending:
            taken, self._pending = self._pending, []
            self._due_s = self._loop.time() + self._min_interval_s
            return taken
        if self._error is not None:
            raise self._error
        return []

    async def take_whole(self) -> list[PromptOutput]:
        """All that was said, of a generation with `is_whole`.

        Raises:
            Exception: as `take`; also where something was said before.
        """
        taken = await self.take()
        if await self.take():
            raise RuntimeError("not everything came at once")
        return taken

    async def take_one(self) -> RequestOutput | None:
        """`take` for a single prompt: what is new as one output; None when everything was said."""
        taken = await self.take()
        return merged(taken)[0][1] if taken else None

    def _is_due(self) -> bool:
        return self._is_closed or (bool(self._pending) and self._loop.time() >= self._due_s)

    async def _pump(self, index: int, answer: AsyncIterator[RequestOutput]) -> None:
        is_finished = False
        error: Exception | None = RequestCancelled("the request was cancelled")
        try:
            async for output in answer:
                is_finished = output.finished
                self._put((index, output))
            unfinished = GenerationError("the engine ended the answer before it was finished")
            error = None if is_finished else unfinished
        except Exception as caught:
            error = caught
        finally:
            try:
                if hasattr(answer, "aclose"):
                    await answer.aclose()
            finally:
                self._num_open -= 1
                if error is not None or self._num_open == 0:
                    self._close(error)

    def _put(self, output: PromptOutput) -> None:
        if self._is_closed:
            return
        self._pending.append(output)
        if self._waiter is None or self._waiter.done():
            return
        if self._loop.time() >= self._due_s:
            self._waiter.set_result(None)
        elif self._timer is None:
            self._set_timer()

    def _set_timer(self) -> None:
        if self._timer is None and math.isfinite(self._due_s):
            self._timer = self._loop.call_at(self._due_s, self._wake)

    def _wake(self) -> None:
        self._timer = None
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _close(self, error: BaseException | None) -> None:
        """The first call wins. Pumps that still run end by being cancelled."""
        if self._is_closed:
            return
        self._is_closed = True
        self._error = error
        for pump in self._pumps:
            if pump is not asyncio.current_task():
                pump.cancel()
        self._wake()


def merged(taken: list[PromptOutput]) -> list[PromptOutput]:
    """One output a prompt, which says what all of its outputs say."""
    if len(taken) == 1:
        return taken
    mergers: dict[int, OutputMerger] = {}
    for index, output in taken:
        mergers.setdefault(index, OutputMerger()).add(output)
    return [(index, merger.take()) for index, merger in sorted(mergers.items())]
