"""Calls into the program that uses the engine. Imports no JAX.

An engine's threads serve every transfer and every peer, so nothing that a callback raises may
reach them. And a callback may call the engine again, from any thread, and wait for that thread:
so none is called while a lock of the engine is held.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import TypeVar

_T = TypeVar("_T")
_log = logging.getLogger("transfer")


def call_back(callback: Callable[[_T], object], value: _T) -> None:
    """Call it; an exception is logged and goes no further."""
    try:
        callback(value)
    except Exception:
        _log.exception("a callback raised: %r", callback)


class DeferringLock:
    """A reentrant lock, and work that waits until its holder has let go of it."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._depth = 0
        self._deferred: list[Callable[[], None]] = []

    def defer(self, work: Callable[[], None]) -> None:
        """Do this, in this thread, as soon as the lock is free of it. Lock held."""
        self._deferred.append(work)

    def __enter__(self) -> None:
        self._lock.acquire()
        self._depth += 1

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        work: list[Callable[[], None]] = []
        if self._depth == 0 and self._deferred:
            work, self._deferred = self._deferred, []
        self._lock.release()
        for each in work:
            each()
