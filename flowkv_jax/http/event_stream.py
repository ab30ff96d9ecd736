"""An answer of server-sent events.

The connection's head leaves with the first event, so what is refused before has a status of its
own. A client or proxy that hears nothing for long gives up; a comment line keeps it waiting.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from types import TracebackType
from typing import Any, Self

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"

_HEADERS = [
    (b"content-type", b"text/event-stream"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


def event(data: bytes) -> bytes:
    """One event; `data` has no line ends, as JSON from msgspec has none."""
    return b"data: " + data + b"\n\n"


class EventStream:
    """Made by `Request.events`. Leaving the block ends the answer.

    An error that leaves the block before anything was sent has its status as usual; afterwards
    whoever handles it may still `send`, and `end`s the stream.

    Attributes:
        has_started: status and headers have left.
        has_ended: nothing can be sent any more.
    """

    __slots__ = (
        "_is_sending",
        "_keep_alive_s",
        "_keeper",
        "_last_s",
        "_loop",
        "_request_id",
        "_send",
        "has_ended",
        "has_started",
    )

    def __init__(
        self,
        send: Callable[[MutableMapping[str, Any]], Awaitable[None]],
        *,
        request_id: str,
        keep_alive_s: float,
    ) -> None:
        self._send = send
        self._request_id = request_id
        self._keep_alive_s = keep_alive_s
        self.has_started = False
        self.has_ended = False
        self._is_sending = False
        self._last_s = 0.0
        self._loop = asyncio.get_running_loop()
        self._keeper: asyncio.Task[None] | None = None

    async def send(self, chunk: bytes) -> None:
        """Whole events, as many as are ready: one chunk costs the same for one as for ten."""
        self._is_sending = True
        if not self.has_started:
            await self._start()
        self._last_s = self._loop.time()
        await self._send({"type": "http.response.body", "body": chunk, "more_body": True})
        self._is_sending = False

    async def end(self) -> None:
        """Nothing more comes. Idempotent."""
        if self._keeper is not None:
            self._keeper.cancel()
        if self.has_ended:
            return
        if not self.has_started:
            await self._start()
        self.has_ended = True
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    async def __aenter__(self) -> Self:
        self._last_s = self._loop.time()
        self._keeper = self._loop.create_task(self._keep_alive())
        return self

    async def __aexit__(
        self,
        _error_type: type[BaseException] | None,
        error: BaseException | None,
        _traceback: TracebackType | None,
    ) -> None:
        if self._keeper is not None:
            self._keeper.cancel()
        if error is None:
            await self.end()

    async def _start(self) -> None:
        self.has_started = True
        headers = [*_HEADERS, (b"x-request-id", self._request_id.encode("latin-1"))]
        await self._send({"type": "http.response.start", "status": 200, "headers": headers})

    async def _keep_alive(self) -> None:
        while True:
            silent_s = self._loop.time() - self._last_s
            if silent_s >= self._keep_alive_s:
                # One that is being sent waits for the client to read; a comment would, too.
                if not self._is_sending:
                    await self.send(KEEP_ALIVE)
                silent_s = 0.0
            await asyncio.sleep(self._keep_alive_s - silent_s)
