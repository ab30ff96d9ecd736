"""Wakes those who sleep on an event loop, all that have something new at once. No JAX.

    a node's thread                          the loop
    inbox a: put(item)  ┐
    inbox b: put(item)  ├ doorbell.ring  ->  wakes whoever sleeps at a, b, c
    inbox c: put(item)  ┘

To be woken for each of many streams alone costs more than what is then done for it: the thread that
delivers and the loop would take the interpreter from each other at every item.
"""

from __future__ import annotations

import asyncio
import weakref
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

_Item = TypeVar("_Item")


class Doorbell:
    """Of one event loop. `ring` may be called from any thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = weakref.ref(loop)  # kept by who keeps doorbells by their loops
        self._filled: deque[Callable[[], None]] = deque()
        self.ring: Callable[[], None] = self._ring  # one object, told apart by identity

    def leave(self, wake: Callable[[], None]) -> None:
        """To be called on the loop after the next `ring`. Any thread."""
        self._filled.append(wake)

    def _ring(self) -> None:
        loop = self._loop()
        try:
            if loop is not None:
                loop.call_soon_threadsafe(self._wake_all)
        except RuntimeError:  # the loop was closed; nobody listens any more
            self._filled.clear()

    def _wake_all(self) -> None:
        while self._filled:
            self._filled.popleft()()


class Inbox(Generic[_Item]):
    """Items from any thread for one reader on the loop."""

    __slots__ = ("_doorbell", "_items", "_loop", "_waiter")

    def __init__(self, doorbell: Doorbell) -> None:
        self._doorbell = doorbell
        self._items: deque[_Item] = deque()
        self._loop = asyncio.get_running_loop()
        self._waiter: asyncio.Future[None] | None = None

    def put(self, item: _Item) -> Callable[[], None]:
        """Any thread. Returns what has to be called to have the reader hear of it."""
        self._items.append(item)
        self._doorbell.leave(self._wake)
        return self._doorbell.ring

    async def get(self) -> _Item:
        while not self._items:
            self._waiter = self._loop.create_future()
            await self._waiter
        return self._items.popleft()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
