"""One HTTP request as some engine requests, and their outputs in one mailbox.

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
from types import TracebackType
from typing import Self

from flowkv_jax.errors import FlowKVError, GenerationError
from flowkv_jax.outputs import RequestOutput
from flowkv_jax.rpc.live_requests import LiveRequests

PromptOutput = tuple[int, RequestOutput]
"""Number of the prompt, and what is new of it."""


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

    def _is_due(self) -> bool:
        return self._is_closed or (bool(self._pending) and self._loop.time() >= self._due_s)

    async def _pump(self, index: int, answer: AsyncIterator[RequestOutput]) -> None:
        is_finished = False
        error: Exception | None = None
        try:
            async for output in answer:
                is_finished = output.finished
                self._put((index, output))
            if not is_finished:
                error = GenerationError("the engine ended the answer before it was finished")
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
