"""One request: what came, and how to answer it.

Bodies are read by `read_body` (bounded in bytes and time) or `json` (bounded and strictly typed).
While an answer is generated, `cancel_on_disconnect` watches the connection.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, MutableMapping, Sequence
from typing import Any, TypeVar
from urllib.parse import parse_qs

from flowkv_jax.config import ServerConfig
from flowkv_jax.http.errors import ClientGone, HttpError
from flowkv_jax.http.event_stream import EventStream
from flowkv_jax.http.json_body import decode_json

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

BodyT = TypeVar("BodyT")

_JSON_TYPES = ("application/json", "text/json")


class Request:
    """Attributes:
    method, path: as they came; the path is neither decoded nor normalised.
    path_parameters: see `Route.path`.
    request_id: the client's X-Request-Id, or one made here; it is echoed.
    num_prompt_tokens, num_completion_tokens: for the log; handlers fill them in.
    event_stream: the answer under way, if it is one of events.
    acts_on: for the audit log of the admin port: what is steered, and how.
    """

    __slots__ = (
        "_config",
        "_receive",
        "_send",
        "acts_on",
        "event_stream",
        "method",
        "num_completion_tokens",
        "num_prompt_tokens",
        "path",
        "path_parameters",
        "request_id",
        "scope",
    )

    def __init__(
        self, scope: Scope, receive: Receive, send: Send, request_id: str, config: ServerConfig
    ) -> None:
        self.scope = scope
        self.method: str = scope["method"]
        self.path: str = scope["raw_path"].decode("latin-1")
        self.path_parameters: Mapping[str, str] = {}
        self.request_id = request_id
        self.num_prompt_tokens = 0
        self.num_completion_tokens = 0
        self.event_stream: EventStream | None = None
        self.acts_on: Sequence[str] = ()
        self._receive = receive
        self._send = send
        self._config = config

    def header(self, name: bytes) -> str | None:
        """A header's value; the name is given in lower case.

        Raises:
            HttpError: 400, it came more than once: which one counts would be a guess.
        """
        found: str | None = None
        for key, value in self.scope["headers"]:
            if key == name:
                if found is not None:
                    raise HttpError(400, f"the header {name.decode()} came more than once")
                found = value.decode("latin-1")
        return found

    def query(self) -> dict[str, str]:
        """The query's parameters.

        Raises:
            HttpError: 400, a parameter came more than once, there are too many, or it is no UTF-8.
        """
        try:
            given = parse_qs(
                self.scope["query_string"].decode("ascii"),
                keep_blank_values=True,
                max_num_fields=32,
                errors="strict",
            )
        except ValueError as error:
            raise HttpError(400, "the query cannot be read") from error
        for name, values in given.items():
            if len(values) > 1:
                raise HttpError(400, f"the query parameter {name[:50]!r} came more than once")
        return {name: values[0] for name, values in given.items()}

    async def read_body(self) -> bytes:
        """The whole body.

        Raises:
            HttpError: 413 above `max_body_bytes`, 408 where it does not come in time.
            ClientGone: it will never be complete.
        """
        limit = self._config.max_body_bytes
        length = self.header(b"content-length")
        if length is not None and length.isdigit() and int(length) > limit:
            raise _too_large(limit)
        chunks: list[bytes] = []
        size = 0
        try:
            async with asyncio.timeout(self._config.body_timeout_s):
                while True:
                    message = await self._receive()
                    if message["type"] == "http.disconnect":
                        raise ClientGone
                    chunk = message.get("body", b"")
                    size += len(chunk)
                    if size > limit:
                        raise _too_large(limit)
                    chunks.append(chunk)
                    if not message.get("more_body", False):
                        break
        except TimeoutError:
            raise HttpError(
                408, f"the body did not arrive within {self._config.body_timeout_s:g} s"
            ) from None
        return chunks[0] if len(chunks) == 1 else b"".join(chunks)

    async def json(self, body_type: type[BodyT]) -> BodyT:
        """The body as a value of this msgspec type, strictly: nothing is converted.

        Raises:
            HttpError: as `json_bytes`.
            ValidationError: it is no JSON, or no such value; the text names the place.
        """
        return decode_json(await self.json_bytes(), body_type)

    async def json_bytes(self) -> bytes:
        """The body, for `decode_json`.

        Raises:
            HttpError: 415 if it does not come as JSON; and as `read_body`.
        """
        content_type = self.header(b"content-type") or ""
        if content_type.partition(";")[0].strip().lower() not in _JSON_TYPES:
            raise HttpError(415, "the body must come with Content-Type: application/json")
        return await self.read_body()

    @contextlib.asynccontextmanager
    async def cancel_on_disconnect(self) -> AsyncIterator[None]:
        """Surrounds what is of no use without a reader, after the body has been read.

        Raises:
            ClientGone: the client went away; what was awaited inside was cancelled.
        """
        task = asyncio.current_task()
        if task is None:
            raise RuntimeError("needs a task")
        is_gone = False

        async def watch() -> None:
            nonlocal is_gone
            while (await self._receive())["type"] != "http.disconnect":
                pass
            is_gone = True
            task.cancel()

        watcher = asyncio.get_running_loop().create_task(watch())
        try:
            yield
        except asyncio.CancelledError:
            # As asyncio.timeout does: only our own cancellation becomes an exception of its own.
            if is_gone and task.uncancel() == 0:
                raise ClientGone from None
            raise
        finally:
            watcher.cancel()

    def events(self) -> EventStream:
        """Answer with server-sent events: `async with request.events() as events`. Status and
        headers leave with the first event, or the first keep-alive."""
        self.event_stream = EventStream(
            self._send, request_id=self.request_id, keep_alive_s=self._config.sse_keep_alive_s
        )
        return self.event_stream


def _too_large(limit: int) -> HttpError:
    return HttpError(413, f"the body has more than max_body_bytes={limit} bytes")
