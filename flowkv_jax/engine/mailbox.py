"""Messages to a thread, and the thread that waits for the device so that it need not."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from flowkv_jax.engine.model_runner import InFlightStep, StepResult
from flowkv_jax.errors import EngineDeadError
from transfer.urgency import make_urgent

logger = logging.getLogger(__name__)

_Result = TypeVar("_Result")
_Message = tuple[Callable[[], Any], "Future[Any]"]


class Mailbox:
    """Functions to be run by the thread that owns it."""

    def __init__(self) -> None:
        self._messages: queue.SimpleQueue[_Message] = queue.SimpleQueue()

    def post(self, function: Callable[[], _Result]) -> Future[_Result]:
        """Leave a function. Any thread."""
        future: Future[_Result] = Future()
        self._messages.put((function, future))
        return future

    def wake(self) -> None:
        """Let a `take` that waits return. Any thread."""
        self._messages.put((_nothing, Future()))

    def take(self, timeout_s: float | None = None) -> None:
        """Run one function, waiting for it if need be. An exception goes to its future; one that
        is no `Exception` (the thread is to end) goes on as well."""
        try:
            function, future = self._messages.get(timeout=timeout_s)
        except queue.Empty:
            return
        if not future.set_running_or_notify_cancel():
            return
        try:
            result = function()
        except BaseException as error:
            future.set_exception(error)
            if not isinstance(error, Exception):
                raise
        else:
            future.set_result(result)

    def take_all(self) -> None:
        """Run what is there."""
        while not self._messages.empty():
            self.take()

    def refuse_all(self, error: Exception) -> None:
        """Answer what is there with `error`."""
        while not self._messages.empty():
            _, future = self._messages.get()
            if future.set_running_or_notify_cancel():
                future.set_exception(error)


class Collector:
    """Waits for the device on a thread of its own, and wakes the mailbox when a step is done."""

    def __init__(self, name: str, mailbox: Mailbox, *, is_urgent: bool = False) -> None:
        self._mailbox = mailbox
        self._is_urgent = is_urgent
        self._steps: queue.SimpleQueue[tuple[InFlightStep, Future[StepResult]] | None] = (
            queue.SimpleQueue()
        )
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def collect(self, step: InFlightStep) -> Future[StepResult]:
        """The step's result, in future."""
        future: Future[StepResult] = Future()
        self._steps.put((step, future))
        return future

    def close(self) -> None:
        """End the thread once it has collected what it was given, and wait for that."""
        self._steps.put(None)
        self._thread.join()

    def _run(self) -> None:
        if self._is_urgent:
            make_urgent()
        while (item := self._steps.get()) is not None:
            step, future = item
            try:
                future.set_result(step.collect())
            except BaseException as error:
                future.set_exception(error)
            self._mailbox.wake()


def failed(error: Exception) -> Future[Any]:
    """The answer to a message that nobody will read."""
    future: Future[Any] = Future()
    future.set_exception(error)
    return future


def _nothing() -> None:
    return


def log_failure(done: Future[object]) -> None:
    """For the future of a message that nobody waits for."""
    error = None if done.cancelled() else done.exception()
    if error is not None and not isinstance(error, EngineDeadError):
        logger.error("a message to the node failed", exc_info=error)
