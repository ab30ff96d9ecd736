"""One change of a shared state at a time, and calls to others only between changes.

    take(change)     runs it now, once the lock is free
    post(change)     runs it now if the lock is free, else whoever holds the lock runs it afterwards
    call(function)   within a change: call this once the change is complete; and what it returns, if
                     that can be called, after all of them, once if several return the same

Whoever is called may come back at once with a change of his own: calls happen only where the state
is whole, in the order they were asked for, under the lock. A garbage collection may close a stream
at any point, also in the middle of a change, and on a thread that holds locks of its own: such
changes are posted, which never waits for a lock.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

logger = logging.getLogger(__name__)

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


class Turns:
    """Serialises changes of its owner's state. Safe from several threads."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._calls: deque[tuple[Callable[..., object], tuple[Any, ...]]] = deque()
        self._posted: deque[tuple[Callable[..., object], tuple[Any, ...]]] = deque()
        self._is_changing = False
        self._is_calling = False

    def take(
        self,
        change: Callable[_Arguments, _Result],
        *args: _Arguments.args,
        **kwargs: _Arguments.kwargs,
    ) -> _Result:
        """Carry out a change and the calls it asks for.

        Raises:
            RuntimeError: asked for in the middle of another change.
            What `change` raises; its calls are then made after the next change.
        """
        with self._lock:
            if self._is_changing:
                raise RuntimeError(f"{change!r} in the middle of another change")
            self._is_changing = True
            try:
                result = change(*args, **kwargs)
            finally:
                self._is_changing = False
            if self._calls and not self._is_calling:
                self._settle()
        if self._posted:
            self._take_posted()
        return result

    def post(self, change: Callable[..., object], *args: Any) -> None:
        """Have a change carried out by whoever holds the lock, or now; never waits."""
        self._posted.append((change, args))
        self._take_posted()

    def call(self, function: Callable[..., object], *args: Any) -> None:
        """Within a change: call somebody outside once it is complete. Errors are logged."""
        self._calls.append((function, args))

    def _take_posted(self) -> None:
        # A holder of the lock looks here again after it has let go, so nothing is left behind.
        while self._posted and self._lock.acquire(blocking=False):
            try:
                if self._is_changing or self._is_calling:
                    return  # further up on this very thread, which goes on with what was posted
                self._settle()
            finally:
                self._lock.release()

    def _settle(self) -> None:
        """Make the calls, and the posted changes, until there are none."""
        self._is_calling = True
        afterwards: dict[Callable[[], object], None] = {}
        try:
            while self._calls or self._posted:
                if self._calls:
                    function, args = self._calls.popleft()
                else:
                    function, args = self._posted.popleft()
                    self._is_changing = True
                try:
                    result = function(*args)
                    if callable(result):
                        afterwards[result] = None
                except Exception:
                    logger.exception("%r failed", function)
                finally:
                    self._is_changing = False
        finally:
            self._is_calling = False
        for function in afterwards:
            function()
