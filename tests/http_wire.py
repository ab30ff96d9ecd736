"""HTTP as bytes, for what no client library would send; and servers of made-up handlers."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

from flowkv_jax.config import ServerConfig
from flowkv_jax.http.app import make_app
from flowkv_jax.http.route import Route
from flowkv_jax.http.server import HttpServer
from flowkv_jax.http.surroundings import Surroundings
from flowkv_jax.rpc.auth import ApiKeys
from flowkv_jax.rpc.live_requests import LiveRequests
from tests.fake_engine import FakeEngine


@contextlib.asynccontextmanager
async def answering(
    routes: Sequence[Route] | None = None,
    *,
    engine: FakeEngine | None = None,
    keys: Sequence[str] = (),
    **settings: Any,
) -> AsyncIterator[str]:
    """The URL of an HTTP port that answers these routes, or all of them."""
    config = ServerConfig(**settings)
    surroundings = Surroundings(
        engine=engine or FakeEngine(),
        config=config,
        live=LiveRequests(),
        api_keys=ApiKeys(keys),
        version="1.2.3",
        started_unix_s=7,
    )
    server = HttpServer(make_app(surroundings, routes), config, "127.0.0.1:0", "port")
    await server.start()
    try:
        yield server.address
    finally:
        await server.close()


class Answer:
    """A parsed answer."""

    def __init__(self, data: bytes) -> None:
        head, _, self.body = data.partition(b"\r\n\r\n")
        first, *lines = head.decode("latin-1").split("\r\n")
        self.status = int(first.split()[1])
        pairs = [(name, value) for name, _, value in (line.partition(": ") for line in lines)]
        self.headers: dict[str, str] = dict(pairs)
        assert len(self.headers) == len(pairs), "a header came twice"

    @property
    def error(self) -> Any:
        assert self.headers["content-type"] == "application/json"
        body = json.loads(self.body)
        assert list(body) == ["error"]
        assert list(body["error"]) == ["message", "type", "param", "code"]
        return body["error"]


async def connect(url: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, _, port = url.removeprefix("http://").rpartition(":")
    return await asyncio.open_connection(host, int(port))


async def exchange(url: str, data: bytes) -> Answer:
    """Send bytes, read until the server closes."""
    reader, writer = await connect(url)
    writer.write(data)
    async with asyncio.timeout(20):
        got = await reader.read()
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()
    return Answer(got)


def request(
    method: str,
    path: str,
    headers: Mapping[str, str] | None = None,
    body: bytes = b"",
) -> bytes:
    """One request, after which the connection is to be closed."""
    given = {"Host": "x", "Connection": "close", **(headers or {})}
    if body:
        given.setdefault("Content-Length", str(len(body)))
    lines = [f"{method} {path} HTTP/1.1", *(f"{k}: {v}" for k, v in given.items()), "", ""]
    return "\r\n".join(lines).encode("latin-1") + body
