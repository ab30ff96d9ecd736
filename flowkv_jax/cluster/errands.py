"""Errands that a node was sent on and has not come back from. Pure, any thread."""

from __future__ import annotations

import itertools
import threading
from concurrent.futures import Future

from flowkv_jax.cluster.error_wire import WireError, error_from_wire
from flowkv_jax.errors import FlowKVError


class Errands:
    """Of one membership. Each ends once: by the node's answer, or by its loss."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._futures: dict[int, Future[bool]] = {}
        self._loss: FlowKVError | None = None

    def __len__(self) -> int:
        return len(self._futures)

    def open(self) -> tuple[int, Future[bool]]:
        """The number of a new one, and what will hold its result; that fails at once after
        `fail_all`."""
        future: Future[bool] = Future()
        future.set_running_or_notify_cancel()
        with self._lock:
            number = next(self._numbers)
            if self._loss is None:
                self._futures[number] = future
            else:
                future.set_exception(self._loss)
        return number, future

    def end(self, number: int, result: bool, error: WireError | None) -> None:
        """Unknown numbers are passed over."""
        with self._lock:
            future = self._futures.pop(number, None)
        if future is None:
            return
        if error is None:
            future.set_result(result)
        else:
            future.set_exception(error_from_wire(error))

    def fail_all(self, error: FlowKVError) -> None:
        """Nobody will answer any more."""
        with self._lock:
            self._loss = error
            futures, self._futures = list(self._futures.values()), {}
        for future in futures:
            future.set_exception(error)
