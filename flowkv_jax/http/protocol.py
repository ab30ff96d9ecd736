"""uvicorn's connection, with bounds on clients that send too much or do too little.

    accepted ─── head ───> request ─── body ────> answer ──────> idle ─── head ──> ..
           header_timeout_s   body_timeout_s   write_timeout_s   keep_alive_timeout_s
                              (`Request`'s)                      (uvicorn's)

The parser keeps an unfinished header to itself, so bytes are counted where they arrive and headers
where they are complete. An answer may be given before its request's body has come; the rest is read
and dropped for a moment, as closing at once would take the answer from the client too.
"""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol
from uvicorn.server import ServerState

from flowkv_jax.config import ServerConfig
from flowkv_jax.http.error_answer import error_body
from flowkv_jax.http.errors import HttpError

_DROP_BODY_S = 2.0


class BoundedHttpProtocol(HttpToolsProtocol):
    """One connection of a server with these bounds."""

    def __init__(self, config: Config, server_state: ServerState, bounds: ServerConfig) -> None:
        super().__init__(config, server_state, app_state={})
        self._bounds = bounds
        self._is_in_head = True
        self._has_completed = False
        self._head_bytes = 0
        self._refusal: HttpError | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._arm(self._bounds.header_timeout_s)

    def connection_lost(self, exc: Exception | None) -> None:
        self._disarm()
        self._disarm_writing()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        was_in_head = self._is_in_head
        self._has_completed = False
        super().data_received(data)
        is_head = was_in_head and self._is_in_head and not self._has_completed
        if is_head and not self.transport.is_closing():
            self._head_bytes += len(data)
            if self._head_bytes > self._bounds.max_header_bytes:
                self._refusal = self._too_large()
                self.send_400_response("")
            elif self._timer is None:
                self._arm(self._bounds.header_timeout_s)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._head_bytes = 0
        if self._timer is None:
            self._arm(self._bounds.header_timeout_s)

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        self._count(len(url))

    def on_header(self, name: bytes, value: bytes) -> None:
        super().on_header(name, value)
        self._count(len(name) + len(value) + 4)

    def on_headers_complete(self) -> None:
        self._disarm()
        self._is_in_head = False
        self._head_bytes = 0
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._is_in_head = self._has_completed = True
        if self.cycle.response_complete:
            self._disarm()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if not self._is_in_head and not self.transport.is_closing():
            self._arm(_DROP_BODY_S)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_writing()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._disarm_writing()

    def timeout_keep_alive_handler(self) -> None:
        if self.transport.get_write_buffer_size():
            self.transport.abort()
        else:
            super().timeout_keep_alive_handler()

    def send_400_response(self, msg: str) -> None:
        """Refuse what is no request, with the same kind of body as everything else."""
        if self.transport.is_closing():
            return
        self._disarm()
        refusal = self._refusal or HttpError(400, "this is no valid HTTP request")
        body = msgspec.json.encode(error_body(refusal))
        head = (
            b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n"
            % len(body)
        )
        self.transport.write(STATUS_LINE[refusal.status] + head + body)
        self.transport.close()

    def _count(self, num_bytes: int) -> None:
        self._head_bytes += num_bytes
        is_too_large = (
            self._head_bytes > self._bounds.max_header_bytes
            or len(self.headers) > self._bounds.max_header_count
        )
        if is_too_large:
            self._refusal = self._too_large()
            raise self._refusal  # the parser stops, and uvicorn asks for a refusal

    def _too_large(self) -> HttpError:
        bounds = self._bounds
        return HttpError(
            431,
            f"the request's head has more than max_header_bytes={bounds.max_header_bytes} bytes "
            f"or max_header_count={bounds.max_header_count} headers",
        )

    def _arm(self, timeout_s: float) -> None:
        self._disarm()
        self._timer = self.loop.call_later(timeout_s, self._on_timeout)

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _watch_writing(self) -> None:
        """Cut the client off unless it has read something by then."""
        unread_bytes = self.transport.get_write_buffer_size()

        def look() -> None:
            if self.transport.get_write_buffer_size() < unread_bytes:
                self._watch_writing()
            else:
                self.transport.abort()

        self._write_timer = self.loop.call_later(self._bounds.write_timeout_s, look)

    def _disarm_writing(self) -> None:
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None

    def _on_timeout(self) -> None:
        self._timer = None
        if not self.transport.is_closing():
            self.transport.close()


def protocol_factory(config: Config, state: ServerState, bounds: ServerConfig) -> Any:
    """What makes a connection's protocol."""
    return lambda: BoundedHttpProtocol(config, state, bounds)
