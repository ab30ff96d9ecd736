"""What strangers send: too much, too slowly, too deep, twice, or nothing."""

import asyncio
import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import Annotated, Any

import httpx
import msgspec
import pytest
import uvicorn
from hypothesis import given, settings
from hypothesis import strategies as st
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.server import ServerState

from flowkv_jax.config import ServerConfig
from flowkv_jax.errors import ValidationError
from flowkv_jax.http.errors import ClientGone
from flowkv_jax.http.json_body import MAX_DEPTH, _structure, decode_json
from flowkv_jax.http.protocol import protocol_factory
from flowkv_jax.http.request import Request
from flowkv_jax.http.response import Response, json_response
from flowkv_jax.http.route import Route
from flowkv_jax.http.surroundings import Surroundings
from tests.http_wire import Answer, answering, connect, exchange, request


class Body(msgspec.Struct, frozen=True):
    count: Annotated[int, msgspec.Meta(ge=0)] = 0
    names: list[str] = []
    free: Any = None


async def echo(request: Request, _surroundings: Surroundings) -> Response:
    return json_response(await request.json(Body))


async def plain(request: Request, _surroundings: Surroundings) -> Response:
    return Response(
        b"ok", content_type=b"text/plain", headers=((b"x-path", request.path.encode()),)
    )


ROUTES = [Route("POST", "/echo", echo), Route("GET", "/plain", plain)]
JSON = {"Content-Type": "application/json"}


# JSON


def refusal(body: bytes) -> ValidationError:
    with pytest.raises(ValidationError) as caught:
        decode_json(body, Body)
    assert len(str(caught.value)) <= 500
    return caught.value


@pytest.mark.parametrize(
    ("body", "parameter"),
    [
        (b'{"count": "1"}', "count"),
        (b'{"count": 1.5}', "count"),
        (b'{"count": true}', "count"),
        (b'{"count": -1}', "count"),
        (b'{"names": ["a", 1]}', "names[1]"),
        (b'{"names": {"a": 1}}', "names"),
        (b"[]", None),
        (b"", None),
        (b"{", None),
        (b'{"count": 1} x', None),
        (b'{"count": 1}{}', None),
        (b'{"count": NaN}', None),
        (b'{"count": 1, "count": 2}', None),
        (b'{"free": "\xff"}', None),
        (b'\xef\xbb\xbf{"count": 1}', None),
    ],
)
def test_what_is_no_such_value(body: bytes, parameter: str | None) -> None:
    assert refusal(body).parameter == parameter


def test_what_is() -> None:
    assert decode_json(b' {"count": 3, "other": {"count": 1}} ', Body) == Body(count=3)
    assert decode_json(b'{"free": {"a": 1, "b": [{"a": 1}, {"a": 2}]}}', Body).free["a"] == 1
    tricky = {"free": '{"a" : [[[ \\', "names": ['"', "\\", '\\"', ":", "{" * 1000]}
    assert decode_json(json.dumps(tricky).encode(), Body).names == tricky["names"]


@pytest.mark.parametrize("opening", [b"[", b'{"a":'])
def test_depth(opening: bytes) -> None:
    closing = b"]" if opening == b"[" else b"}"

    def nested(depth: int) -> bytes:
        return b'{"free":' + opening * depth + b"1" + closing * depth + b"}"

    assert decode_json(nested(MAX_DEPTH - 1), Body).free is not None
    assert "deep" in str(refusal(nested(MAX_DEPTH)))
    assert "deep" in str(refusal(nested(1_000_000)))


def test_errors_do_not_repeat_much_of_the_input() -> None:
    assert len(str(refusal(b'{"count": "' + b"x" * 1_000_000 + b'"}'))) < 300
    assert len(str(refusal(b'{"' + b"x" * 1_000_000 + b'": 1, "count": "a"}'))) < 300
    deep_path = b'{"names": [' + b'"a",' * 100_000 + b"1]}"
    assert refusal(deep_path).parameter == "names[100000]"


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(st.sampled_from('ab"\\{}[]:,\n')),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(st.sampled_from('ab"\\:{')), inner),
    max_leaves=20,
)


def depth_of(value: Any) -> int:
    if isinstance(value, dict):
        return 1 + max((depth_of(v) for v in value.values()), default=0)
    if isinstance(value, list):
        return 1 + max((depth_of(v) for v in value), default=0)
    return 0


@settings(max_examples=100)
@given(value=st.dictionaries(st.text(st.sampled_from('ab"\\:{')), json_values))
def test_structure_of_any_json(value: dict[str, Any]) -> None:
    found = _structure(json.dumps(value).encode())
    assert (found.depth, found.num_members) == (depth_of(value), len(value))


async def test_json_needs_its_content_type() -> None:
    async with answering(ROUTES) as url, httpx.AsyncClient(base_url=url) as client:
        for content_type, status in [
            ("application/json", 200),
            ("application/json; charset=utf-8", 200),
            ("Application/JSON", 200),
            ("text/plain", 415),
            ("application/x-www-form-urlencoded", 415),
            ("", 415),
        ]:
            headers = {"content-type": content_type}
            answer = await client.post("/echo", content=b'{"count": 1}', headers=headers)
            assert answer.status_code == status, content_type


# Bodies


async def test_a_body_that_is_too_large_is_refused_by_its_announcement() -> None:
    async with answering(ROUTES, max_body_bytes=1024) as url:
        announced = request("POST", "/echo", {**JSON, "Content-Length": "1025"})
        assert (await exchange(url, announced)).status == 413
        body = b'{"count": 1}' + b" " * 1012
        assert (await exchange(url, request("POST", "/echo", JSON, body))).status == 200


async def test_a_chunked_body_that_grows_too_large() -> None:
    async with answering(ROUTES, max_body_bytes=1024) as url:
        head = request("POST", "/echo", {**JSON, "Transfer-Encoding": "chunked"})
        chunk = b"400\r\n" + b" " * 1024 + b"\r\n"
        answer = await exchange(url, head + chunk + chunk + b"0\r\n\r\n")
        assert answer.status == 413
        assert "1024" in answer.error["message"]


async def test_a_body_that_does_not_come() -> None:
    async with answering(ROUTES, body_timeout_s=0.1) as url:
        answer = await exchange(url, request("POST", "/echo", {**JSON, "Content-Length": "10"}))
        assert answer.status == 408


async def test_the_rest_of_a_refused_body_is_dropped_and_the_connection_goes_on() -> None:
    async with answering(ROUTES, max_body_bytes=1024) as url:
        reader, writer = await connect(url)
        large = request("POST", "/echo", JSON, b" " * 5000).replace(b"Connection: close\r\n", b"")
        writer.write(large[:2000])
        head = await reader.readuntil(b"\r\n\r\n")
        assert b" 413 " in head
        writer.write(large[2000:] + request("GET", "/plain"))
        rest = await reader.read()
        assert b" 200 OK" in rest
        writer.close()


# Heads


async def test_heads_that_are_too_large() -> None:
    async with answering(ROUTES, max_header_bytes=2048, max_header_count=10) as url:
        fits = {f"X-{i}": "v" for i in range(8)}
        assert (await exchange(url, request("GET", "/plain", fits))).status == 200
        many = {f"X-{i}": "v" for i in range(9)}
        assert (await exchange(url, request("GET", "/plain", many))).status == 431
        for long in (
            request("GET", "/plain", {"X-Long": "v" * 2048}),
            request("GET", "/plain?" + "q" * 2048),
            request("GET", "/plain", {"X-" + "n" * 2048: "v"}),
            b"GET /plain HTTP/1.1\r\nX-Endless: " + b"v" * 4096,
            b"GET /" + b"p" * 4096,
        ):
            answer = await exchange(url, long)
            assert answer.status == 431
            assert answer.error["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    "data",
    [
        b"nonsense\r\n\r\n",
        b"GET /plain HTTP/1.1\r\nHost x\r\n\r\n",
        b"GET http:// HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET /pl\xff HTTP/1.1\r\nHost: x\r\n\r\n",
        b"CONNECT x:80 HTTP/1.1\r\nHost: x\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"POST /echo HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n",
        b"POST /echo HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n",
        b"GET /plain HTTP/1.1\r\nHost: x\r\nX: a\r\n b\x00\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    ],
)
async def test_what_is_no_request(data: bytes) -> None:
    async with answering(ROUTES) as url:
        answer = await exchange(url, data)
        assert answer.status == 400 and answer.error["code"] is None


@pytest.mark.parametrize("first", [b"", b"GET /plain HT", b"GET /plain HTTP/1.1\r\nX: ", b"\r\n"])
async def test_a_head_that_does_not_come_ends_the_connection(first: bytes) -> None:
    async with answering(ROUTES, header_timeout_s=0.1) as url:
        reader, writer = await connect(url)
        writer.write(first)
        assert await asyncio.wait_for(reader.read(), 20) == b""
        writer.close()


@pytest.mark.parametrize("first", [b"", b"GET", b"\r\n"])
async def test_an_idle_connection_ends(first: bytes) -> None:
    async with answering(ROUTES, keep_alive_timeout_s=0.1, header_timeout_s=0.1) as url:
        reader, writer = await connect(url)
        writer.write(request("GET", "/plain").replace(b"Connection: close\r\n", b""))
        await reader.readuntil(b"\r\n\r\nok")
        writer.write(first)
        assert await asyncio.wait_for(reader.read(), 20) == b""
        writer.close()


async def test_pipelined_requests_are_answered_in_order() -> None:
    async with answering(ROUTES) as url:
        one = request("GET", "/plain").replace(b"Connection: close\r\n", b"")
        reader, writer = await connect(url)
        writer.write(one * 3 + request("POST", "/echo", JSON, b'{"count": 5}'))
        got = await asyncio.wait_for(reader.read(), 20)
        assert got.count(b"\r\n\r\nok") == 3
        assert b'"count":5' in got.rpartition(b"\r\n\r\n")[2]
        writer.close()


async def test_head_and_http_1_0() -> None:
    async with answering(ROUTES) as url:
        answer = await exchange(url, request("HEAD", "/plain"))
        assert (answer.status, answer.body) == (200, b"")
        assert answer.headers["content-length"] == "2"
        old = Answer(await raw(url, b"GET /plain HTTP/1.0\r\n\r\n"))
        assert (old.status, old.body) == (200, b"ok")


async def raw(url: str, data: bytes) -> bytes:
    reader, writer = await connect(url)
    writer.write(data)
    got = await asyncio.wait_for(reader.read(), 20)
    writer.close()
    return got


async def test_a_client_that_does_not_read_is_cut_off() -> None:
    ended = asyncio.Event()

    async def endless(request: Request, _surroundings: Surroundings) -> None:
        try:
            async with request.cancel_on_disconnect(), request.events() as events:
                while True:
                    await events.send(b"data: " + b"x" * 65536 + b"\n\n")
        finally:
            ended.set()

    async with answering([Route("GET", "/endless", endless)], write_timeout_s=0.1) as url:
        reader, writer = await connect(url)
        writer.write(request("GET", "/endless"))
        await reader.readexactly(1)
        await asyncio.wait_for(ended.wait(), 20)
        writer.close()


class Outgoing:
    """A transport and a loop, as far as a paused writer sees them."""

    def __init__(self) -> None:
        self.unread_bytes = 1000
        self.was_aborted = False
        self.timers: list[tuple[float, Callable[[], None]]] = []

    def get_write_buffer_size(self) -> int:
        return self.unread_bytes

    def abort(self) -> None:
        self.was_aborted = True

    def pause_reading(self) -> None: ...

    def call_later(self, delay_s: float, callback: Callable[[], None]) -> Any:
        self.timers.append((delay_s, callback))
        return SimpleNamespace(cancel=self.timers.clear)

    def wait(self) -> None:
        """Until the next timer."""
        _, callback = self.timers.pop()
        callback()


async def test_a_client_that_reads_slowly_is_not() -> None:
    config = uvicorn.Config(echo, log_config=None)
    protocol = protocol_factory(config, ServerState(), ServerConfig(write_timeout_s=7.0))()
    outgoing = protocol.transport = protocol.loop = Outgoing()
    protocol.flow = FlowControl(outgoing)
    protocol.pause_writing()
    for outgoing.unread_bytes in (900, 899, 1):
        assert [delay_s for delay_s, _ in outgoing.timers] == [7.0]
        outgoing.wait()
        assert not outgoing.was_aborted
    protocol.resume_writing()
    assert outgoing.timers == []
    protocol.pause_writing()
    outgoing.wait()
    assert outgoing.was_aborted


# Those who leave


async def test_a_client_that_leaves_ends_its_handler() -> None:
    began, ended = asyncio.Event(), asyncio.Event()

    async def wait(request: Request, _surroundings: Surroundings) -> Response:
        try:
            async with request.cancel_on_disconnect():
                began.set()
                await asyncio.Event().wait()
        except ClientGone:
            ended.set()
            raise
        return Response()

    async with answering([Route("GET", "/wait", wait)]) as url:
        _, writer = await connect(url)
        writer.write(request("GET", "/wait"))
        await asyncio.wait_for(began.wait(), 20)
        writer.close()
        await asyncio.wait_for(ended.wait(), 20)


async def test_a_handler_that_ends_in_time_is_not_cancelled() -> None:
    async def quick(request: Request, _surroundings: Surroundings) -> Response:
        async with request.cancel_on_disconnect():
            await asyncio.sleep(0)
        return Response(b"ok")

    async with answering([Route("GET", "/quick", quick)]) as url:
        assert (await exchange(url, request("GET", "/quick"))).body == b"ok"


async def test_silence_is_filled_with_comments() -> None:
    async def slow(request: Request, _surroundings: Surroundings) -> None:
        async with request.events() as events:
            await asyncio.sleep(0.3)
            await events.send(b"data: 1\n\n")

    async with (
        answering([Route("GET", "/slow", slow)], sse_keep_alive_s=0.1) as url,
        httpx.AsyncClient(base_url=url) as client,
    ):
        answer = await client.get("/slow", headers={"x-request-id": "abc"})
    *comments, event, end = answer.text.split("\n\n")
    assert comments and set(comments) == {": keep-alive"}
    assert (event, end) == ("data: 1", "")
    assert answer.headers["cache-control"] == "no-cache"
    assert answer.headers["x-accel-buffering"] == "no"
    assert answer.headers["x-request-id"] == "abc"
