"""Both front doors begin and end together."""

import asyncio
import contextlib
import json
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import grpc
import httpx
import pytest

from flowkv_jax.config import ServerConfig
from flowkv_jax.errors import ConfigError, RetryableRequestError
from flowkv_jax.rpc.flowkv.v1 import flowkv_pb2 as pb
from flowkv_jax.serving import Server, ServerState
from tests.fake_engine import FakeEngine, serving, stub_of
from tests.test_rpc_lifecycle import CHILD

BODY = {"prompt": "a", "max_tokens": 3, "stream": True}


@contextlib.asynccontextmanager
async def client_of(server: Server) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=server.http_address or "") as client:
        yield client


@contextlib.asynccontextmanager
async def streaming(client: httpx.AsyncClient) -> AsyncIterator[AsyncIterator[str]]:
    """The lines behind the first chunk of an answer."""
    async with client.stream("POST", "/v1/completions", json=BODY) as answer:
        assert answer.status_code == 200
        lines = answer.aiter_lines()
        assert (await anext(lines)).startswith("data: ")
        yield lines


def texts(lines: list[str]) -> list[str]:
    chunks = [json.loads(x[6:]) for x in lines if x.startswith("data: {")]
    return [choice["text"] for chunk in chunks for choice in chunk.get("choices", ())]


async def test_both_doors_serve_one_engine() -> None:
    async with serving(FakeEngine(), port=0) as server, client_of(server) as client:
        assert server.description == f" on {server.http_address}; gRPC on {server.address}"
        answer = await client.post("/v1/completions", json={**BODY, "stream": False})
        assert answer.json()["choices"][0]["text"] == "t0 t1 t2 "
        async with stub_of(server) as stub:
            request = pb.GenerateRequest(text="a", sampling_params=pb.SamplingParams(max_tokens=3))
            assert [r async for r in stub.Generate(request)][-1].finished


async def test_drain_refuses_new_and_finishes_running() -> None:
    engine = FakeEngine()
    pause = engine.pause_before(1)
    async with (
        serving(engine, port=0) as server,
        client_of(server) as client,
        stub_of(server) as stub,
        streaming(client) as lines,
    ):
        await pause.reached.wait()
        assert (await client.get("/ready")).status_code == 200
        drain = asyncio.create_task(server.drain())
        while server.state is not ServerState.DRAINING:
            await asyncio.sleep(0)
        assert (await client.get("/ready")).status_code == 503
        assert (await client.get("/health")).status_code == 200
        assert (await client.get("/v1/models")).status_code == 200
        refused = await client.post("/v1/completions", json=BODY)
        assert refused.status_code == 503
        assert refused.headers["retry-after"] == "1"
        assert refused.json()["error"]["code"] == "service_unavailable"
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Generate(pb.GenerateRequest(text="b")).read()
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        pause.released.set()
        rest = [line async for line in lines]
        await asyncio.wait_for(drain, 20)
    assert "".join(texts(rest)) == "t1 t2 "
    assert rest[-2:] == ["data: [DONE]", ""]


async def test_what_takes_too_long_ends_with_an_error() -> None:
    engine = FakeEngine()
    pause = engine.pause_before(1)
    async with (
        serving(engine, port=0, drain_timeout_s=0.0) as server,
        client_of(server) as client,
        streaming(client) as lines,
    ):
        await pause.reached.wait()
        drain = asyncio.create_task(server.drain())
        rest = [line async for line in lines]
        await engine.wait_until_idle()
        await asyncio.wait_for(drain, 20)
        with pytest.raises(httpx.ConnectError):
            await client.get("/health")
    errors = [json.loads(x[6:]) for x in rest if x.startswith("data: {")]
    assert errors[-1]["error"]["code"] == "service_unavailable"
    assert "shut down" in errors[-1]["error"]["message"]
    assert rest[-2:] == ["data: [DONE]", ""]


async def test_an_answer_that_had_not_begun_is_a_503() -> None:
    engine = FakeEngine()
    pause = engine.pause_before(0)
    async with serving(engine, port=0) as server, client_of(server) as client:
        for body in (BODY, {**BODY, "stream": False}):
            asked = asyncio.create_task(client.post("/v1/completions", json=body))
            await pause.reached.wait()
            server._live.stop_all(RetryableRequestError("the server shut down"))
            answer = await asked
            assert answer.status_code == 503 and "retry-after" in answer.headers
            pause.reached.clear()


async def test_a_client_that_leaves_aborts_its_request() -> None:
    engine = FakeEngine()
    pause = engine.pause_before(1)
    async with serving(engine, port=0) as server, client_of(server) as client:
        async with streaming(client):
            await pause.reached.wait()
        await engine.wait_until_idle()
        whole = asyncio.create_task(client.post("/v1/completions", json={**BODY, "stream": False}))
        await asyncio.sleep(0)
        pause.reached.clear()
        await pause.reached.wait()
        whole.cancel()
        await engine.wait_until_idle()


async def test_an_engine_that_dies_is_told_to_health() -> None:
    engine = FakeEngine()
    async with serving(engine, port=0) as server, client_of(server) as client:
        engine.is_healthy = False
        answer = await client.post("/v1/completions", json=BODY)
        assert answer.status_code == 503
        assert answer.json()["error"]["code"] == "engine_dead"
        assert (await client.get("/health")).status_code == 503


async def test_idle_connections_and_endless_streams_hold_nothing_up() -> None:
    async with serving(FakeEngine(), port=0) as server, client_of(server) as client:
        await client.get("/version")
        await asyncio.wait_for(server.drain(), 20)
        assert server.state is ServerState.STOPPED


async def test_a_port_that_cannot_be_had_closes_the_others() -> None:
    async with serving(FakeEngine(), port=0) as first:
        assert first.http_address is not None
        port = int(first.http_address.rpartition(":")[2])
        second = Server(FakeEngine(), ServerConfig(port=port, grpc_port=0), environ={})
        with pytest.raises(ConfigError) as caught:
            await second.start()
        assert caught.value.parameter == "port"
        assert second.state is ServerState.STOPPED
        await second.stop()


@pytest.fixture
def child() -> Iterator[subprocess.Popen[str]]:
    """`flowkv serve` over the fake engine, which waits for a line before its second token."""
    process = subprocess.Popen(
        [sys.executable, "-c", CHILD, str(Path(__file__).parent)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    with process:
        yield process
        process.kill()


@pytest.mark.parametrize("times", [1, 2])
def test_signals(child: subprocess.Popen[str], times: int) -> None:
    assert child.stdin is not None and child.stdout is not None
    url = child.stdout.readline().split()[4].rstrip(";")
    with (
        httpx.Client(base_url=url) as client,
        client.stream("POST", "/v1/completions", json=BODY) as answer,
    ):
        lines = answer.iter_lines()
        next(lines)
        child.send_signal(signal.SIGTERM)
        while client.get("/ready").status_code != 503:
            pass
        if times == 2:
            child.send_signal(signal.SIGINT)
        else:
            child.stdin.write("\n")
            child.stdin.flush()
        rest = list(lines)
    assert rest[-2:] == ["data: [DONE]", ""]
    assert ("service_unavailable" in "".join(rest)) is (times == 2)
    child.stdin.close()
    assert child.wait(30) == 0
    assert child.stdout.read() == "shut down: True\n"
