"""Start, health, drain, stop; `flowkv serve` as a process with signals."""

import asyncio
import contextlib
import io
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from flowkv_jax.commands.serve import run_serve
from flowkv_jax.config import ServeConfig, ServerConfig
from flowkv_jax.errors import ConfigError, RetryableRequestError
from flowkv_jax.rpc.client import Client
from flowkv_jax.rpc.flowkv.v1 import flowkv_pb2 as pb
from flowkv_jax.rpc.transport import server_options
from flowkv_jax.serving import Server, ServerState
from tests.fake_engine import FakeEngine, serving, stub_of

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
SERVICES = [
    "",
    "flowkv.v1.FlowKV",
    "inference.GRPCInferenceService",
    "vllm.grpc.engine.VllmEngine",
]


@contextlib.asynccontextmanager
async def health_of(server: Server) -> AsyncIterator[Any]:
    async with grpc.aio.insecure_channel(server.address) as channel:
        yield health_pb2_grpc.HealthStub(channel)


def check(service: str = "") -> health_pb2.HealthCheckRequest:
    return health_pb2.HealthCheckRequest(service=service)


async def code_of(call: Any) -> grpc.StatusCode:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value.code()


async def test_health_check() -> None:
    async with serving(FakeEngine()) as server, health_of(server) as health:
        for service in SERVICES:
            assert (await health.Check(check(service))).status == SERVING
        assert await code_of(health.Check(check("other"))) is grpc.StatusCode.NOT_FOUND


async def test_drain_tells_watchers_refuses_new_finishes_running() -> None:
    engine = FakeEngine()
    pause = engine.pause_before(1)
    request = pb.GenerateRequest(text="a", sampling_params=pb.SamplingParams(max_tokens=3))
    async with (
        serving(engine) as server,
        stub_of(server) as stub,
        health_of(server) as health,
    ):
        watches = [health.Watch(check(service)) for service in SERVICES]
        assert [(await watch.read()).status for watch in watches] == [SERVING] * len(SERVICES)
        call = stub.Generate(request)
        await call.read()
        await pause.reached.wait()

        drain = asyncio.create_task(server.drain())
        assert [(await watch.read()).status for watch in watches] == [NOT_SERVING] * len(SERVICES)
        assert server.state is ServerState.DRAINING
        assert await code_of(stub.Generate(request).read()) is grpc.StatusCode.UNAVAILABLE
        assert await code_of(stub.Chat(pb.ChatRequest()).read()) is grpc.StatusCode.UNAVAILABLE
        await stub.GetLoads(pb.GetLoadsRequest())
        second_drain = asyncio.create_task(server.drain())

        pause.released.set()
        rest = []
        while (response := await call.read()) is not grpc.aio.EOF:
            rest.append(response)
        await asyncio.gather(drain, second_drain, server.wait())
    assert [i for r in rest for o in r.outputs for i in o.token_ids] == [1, 2]
    assert rest[-1].finished
    assert await call.code() is grpc.StatusCode.OK
    assert server.state is ServerState.STOPPED


async def test_drain_aborts_what_takes_too_long() -> None:
    engine = FakeEngine()
    pause = engine.pause_before(1)
    async with serving(engine, drain_timeout_s=0.0) as server, stub_of(server) as stub:
        call = stub.Generate(pb.GenerateRequest(text="a"))
        await call.read()
        await pause.reached.wait()
        drain = asyncio.create_task(server.drain())
        assert await code_of(call.read()) is grpc.StatusCode.UNAVAILABLE
        assert "shut down" in await call.details()
        await engine.wait_until_idle()
        await drain


async def test_stop_during_a_drain_is_at_once() -> None:
    engine = FakeEngine()
    pause = engine.pause_before(1)
    async with (
        serving(engine, drain_timeout_s=3600.0) as server,
        stub_of(server) as stub,
        health_of(server) as health,
    ):
        watch = health.Watch(check())
        await watch.read()
        call = stub.Generate(pb.GenerateRequest(text="a"))
        await call.read()
        await pause.reached.wait()
        drain = asyncio.create_task(server.drain())
        assert (await watch.read()).status == NOT_SERVING
        await asyncio.gather(server.stop(), drain)
        assert await code_of(call.read()) is grpc.StatusCode.UNAVAILABLE


async def test_a_dead_engine_is_not_serving() -> None:
    engine = FakeEngine()
    async with (
        serving(engine) as server,
        stub_of(server) as stub,
        health_of(server) as health,
    ):
        watch = health.Watch(check("flowkv.v1.FlowKV"))
        assert (await watch.read()).status == SERVING
        engine.is_healthy = False
        call = stub.Generate(pb.GenerateRequest(text="a"))
        assert await code_of(call.read()) is grpc.StatusCode.UNAVAILABLE
        assert (await watch.read()).status == NOT_SERVING
        assert (await health.Check(check())).status == NOT_SERVING


async def test_an_engine_that_dies_idle_is_noticed_and_so_is_its_return() -> None:
    engine = FakeEngine()
    server = Server(
        engine, ServerConfig(port=None, grpc_port=0), environ={}, health_interval_s=0.01
    )
    await server.start()
    async with health_of(server) as health:
        watch = health.Watch(check())
        assert (await watch.read()).status == SERVING
        engine.is_healthy = False
        assert (await watch.read()).status == NOT_SERVING
        engine.is_healthy = True
        assert (await watch.read()).status == SERVING
    await server.stop()


async def test_reflection_lists_and_describes() -> None:
    async with (
        serving(FakeEngine()) as server,
        grpc.aio.insecure_channel(server.address) as channel,
    ):
        call = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo()
        await call.write(reflection_pb2.ServerReflectionRequest(list_services=""))
        listed = (await call.read()).list_services_response
        symbol = "flowkv.v1.FlowKV"
        await call.write(reflection_pb2.ServerReflectionRequest(file_containing_symbol=symbol))
        files = (await call.read()).file_descriptor_response.file_descriptor_proto
        await call.done_writing()
        call.cancel()
    assert {s.name for s in listed.service} == {
        "flowkv.v1.FlowKV",
        "inference.GRPCInferenceService",
        "vllm.grpc.engine.VllmEngine",
        "grpc.health.v1.Health",
        "grpc.reflection.v1alpha.ServerReflection",
    }
    assert any(b"flowkv/v1/flowkv.proto" in file for file in files)


async def test_reflection_can_be_turned_off() -> None:
    async with (
        serving(FakeEngine(), enable_reflection=False) as server,
        grpc.aio.insecure_channel(server.address) as channel,
    ):
        call = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo()
        assert await code_of(call.read()) is grpc.StatusCode.UNIMPLEMENTED


async def test_a_port_in_use() -> None:
    async with serving(FakeEngine()) as server:
        port = int(server.address.rpartition(":")[2])
        second = Server(FakeEngine(), ServerConfig(port=None, grpc_port=port), environ={})
        with pytest.raises(ConfigError, match=f"127.0.0.1:{port}.*in use") as caught:
            await second.start()
        assert caught.value.parameter == "grpc_port"


async def test_a_unix_socket_and_one_in_use(tmp_path: Path) -> None:
    host = f"unix:{tmp_path}/s.sock"
    async with serving(FakeEngine(), host=host) as server:
        assert server.address == host
        with Client(server.address) as client:
            assert await asyncio.to_thread(client.health)
        with pytest.raises(ConfigError, match="another server"):
            await Server(FakeEngine(), ServerConfig(host=host), environ={}).start()
    (tmp_path / "file").write_text("no socket")
    with pytest.raises(ConfigError):
        taken = ServerConfig(host=f"unix:{tmp_path}/file")
        await Server(FakeEngine(), taken, environ={}).start()
    assert (tmp_path / "file").read_text() == "no socket"


def test_serve_finds_a_taken_port_before_it_builds_the_engine() -> None:
    def never(_: Any) -> Any:
        raise AssertionError("the engine was built")

    with socket.create_server(("127.0.0.1", 0)) as taken:
        config = ServeConfig(server=ServerConfig(port=None, grpc_port=taken.getsockname()[1]))
        with pytest.raises(ConfigError, match="in use"):
            run_serve(config, never, out=io.StringIO())


async def test_a_server_starts_once() -> None:
    server = Server(FakeEngine(), ServerConfig(port=None, grpc_port=0), environ={})
    with pytest.raises(RuntimeError):
        _ = server.address
    await server.stop()
    await server.wait()
    with pytest.raises(RuntimeError, match="STOPPED"):
        await server.start()


def test_channel_settings() -> None:
    """A misspelt name would be passed over in silence by gRPC."""
    options = dict(server_options(1 << 20))
    assert options["grpc.http2.max_ping_strikes"] == 0
    assert options["grpc.http2.min_ping_interval_without_data_ms"] == 10_000
    assert options["grpc.keepalive_permit_without_calls"] == 1
    assert options["grpc.max_receive_message_length"] == 1 << 20
    assert options["grpc.max_send_message_length"] == 1 << 20
    assert options["grpc.so_reuseport"] == 0


CHILD = """
import asyncio, sys
sys.path.insert(0, sys.argv[1])
from tests.fake_engine import FakeEngine
from flowkv_jax.commands.serve import run_serve
from flowkv_jax.config import ServeConfig, ServerConfig

class Waits:
    "Before token 1 it waits for a line on standard input."
    async def wait(self):
        await asyncio.to_thread(sys.stdin.readline)

def make_engine(config):
    global engine
    engine = FakeEngine()
    engine.pauses[1] = Waits()
    return engine

config = ServeConfig(server=ServerConfig(port=0, grpc_port=0, drain_timeout_s=3600.0))
status = run_serve(config, make_engine, out=sys.stdout)
print("shut down:", engine.was_shut_down)
sys.exit(status)
"""


@pytest.fixture
def child() -> Iterator[subprocess.Popen[str]]:
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


def address_of(child: subprocess.Popen[str]) -> str:
    assert child.stdout is not None
    ready = child.stdout.readline().split()
    assert ready[:4] == ["flowkv:", "serving", "fake", "on"]
    assert ready[4].startswith("http://127.0.0.1:") and ready[5:7] == ["gRPC", "on"]
    return ready[7]


def test_sigterm_drains(child: subprocess.Popen[str]) -> None:
    assert child.stdin is not None and child.stdout is not None
    address = address_of(child)
    with Client(address) as client, grpc.insecure_channel(address) as channel:
        stream = client.generate("a", {"max_tokens": 3, "output_kind": "delta"}, stream=True)
        first = next(stream)
        watch = health_pb2_grpc.HealthStub(channel).Watch(check())
        assert next(watch).status == SERVING
        child.send_signal(signal.SIGTERM)
        assert next(watch).status == NOT_SERVING
        with pytest.raises(RetryableRequestError):
            client.generate("b")
        child.stdin.write("\n")
        child.stdin.flush()
        assert first.text + "".join(o.text for o in stream) == "t0 t1 t2 "
        assert child.wait(30) == 0
        assert child.stdout.read() == "shut down: True\n"


def test_a_second_signal_stops_at_once(child: subprocess.Popen[str]) -> None:
    assert child.stdin is not None
    address = address_of(child)
    with Client(address) as client, grpc.insecure_channel(address) as channel:
        stream = client.generate("a", stream=True)
        next(stream)
        watch = health_pb2_grpc.HealthStub(channel).Watch(check())
        assert next(watch).status == SERVING
        child.send_signal(signal.SIGINT)
        assert next(watch).status == NOT_SERVING
        child.send_signal(signal.SIGTERM)
        with pytest.raises(RetryableRequestError, match="shut down"):
            next(stream)
        child.stdin.close()
        assert child.wait(30) == 0
