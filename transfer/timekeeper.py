"""A thread that calls a function again and again until it is closed."""

from __future__ import annotations

import threading
from collections.abc import Callable


class Timekeeper:
    """Calls `tick` every `interval_s` seconds, but no more than `_FINEST_S` late for a deadline.

    Deadlines are looked at this often; what waits for something itself keeps its own time.
    """

    def __init__(self, tick: Callable[[], None], interval_s: float) -> None:
        self._tick = tick
        self._interval_s = min(interval_s, _FINEST_S)
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="transfer-clock")
        self._thread.start()

    def close(self) -> None:
        """End the thread and wait for it. Idempotent."""
        self._closed.set()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _run(self) -> None:
        while not self._closed.wait(self._interval_s):
            self._tick()


_FINEST_S = 0.05
