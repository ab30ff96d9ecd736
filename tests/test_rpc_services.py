"""What holds for every service of the gRPC port, whichever protocol it belongs to."""

import subprocess
import sys
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor_pool import Default
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from tests.fake_engine import FakeEngine, serving
from tests.recorded_cluster import RecordedView

KEY = "correct-horse"
TOKEN = (("authorization", f"Bearer {KEY}"),)
SERVICES = {
    "flowkv.v1.FlowKV",
    "flowkv.v1.Cluster",
    "inference.GRPCInferenceService",
    "vllm.grpc.engine.VllmEngine",
    "grpc.health.v1.Health",
    "grpc.reflection.v1alpha.ServerReflection",
}
OPEN_SERVICES = {"grpc.health.v1.Health"}


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


async def services_of(channel: Any) -> list[str]:
    """As the server itself lists them."""
    call = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(metadata=TOKEN)
    await call.write(reflection_pb2.ServerReflectionRequest(list_services=""))
    answer = await call.read()
    await call.done_writing()
    assert await call.read() is grpc.aio.EOF
    return [service.name for service in answer.list_services_response.service]


async def test_every_service_is_described(engine: FakeEngine) -> None:
    async with (
        serving(engine) as server,
        grpc.aio.insecure_channel(server.address) as channel,
    ):
        call = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo()
        for service in SERVICES - {"flowkv.v1.Cluster"}:
            request = reflection_pb2.ServerReflectionRequest(file_containing_symbol=service)
            await call.write(request)
            files = (await call.read()).file_descriptor_response.file_descriptor_proto
            package, _, name = service.rpartition(".")
            assert any(package.encode() in file and name.encode() in file for file in files)
        await call.done_writing()
        assert await call.read() is grpc.aio.EOF


async def code_of(channel: Any, service: str, method: Any, metadata: Any) -> grpc.StatusCode:
    """The status of a call with an empty request."""
    kinds = {
        (False, False): channel.unary_unary,
        (False, True): channel.unary_stream,
        (True, False): channel.stream_unary,
        (True, True): channel.stream_stream,
    }
    make = kinds[method.client_streaming, method.server_streaming]
    requests = iter([b""]) if method.client_streaming else b""
    call = make(f"/{service}/{method.name}")(requests, metadata=metadata, timeout=30)
    try:
        if method.server_streaming:
            async for _ in call:
                break
            call.cancel()
        else:
            await call
    except grpc.aio.AioRpcError as error:
        return error.code()
    return grpc.StatusCode.OK


async def test_every_method_of_every_service_wants_a_token(engine: FakeEngine) -> None:
    engine.cluster = RecordedView()
    environ = {"FLOWKV_API_KEY": KEY}
    num_methods = 0
    async with (
        serving(engine, environ) as server,
        grpc.aio.insecure_channel(server.address) as channel,
    ):
        services = await services_of(channel)
        assert set(services) == SERVICES
        for service in services:
            for method in Default().FindServiceByName(service).methods:
                num_methods += 1
                for metadata in ((), (("authorization", "Bearer wrong"),)):
                    code = await code_of(channel, service, method, metadata)
                    is_refused = code is grpc.StatusCode.UNAUTHENTICATED
                    assert is_refused is (service not in OPEN_SERVICES), (service, method.name)
                code = await code_of(channel, service, method, TOKEN)
                assert code is not grpc.StatusCode.UNAUTHENTICATED, (service, method.name)
    assert num_methods > 25


async def test_names_that_do_not_exist_tell_nothing_without_a_token(engine: FakeEngine) -> None:
    environ = {"FLOWKV_API_KEY": KEY}
    async with (
        serving(engine, environ) as server,
        grpc.aio.insecure_channel(server.address) as channel,
    ):
        for path in ("/vllm.grpc.engine.VllmEngine/Nothing", "/no.Service/Method"):
            for metadata, code in ((), "UNAUTHENTICATED"), (TOKEN, "UNIMPLEMENTED"):
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await channel.unary_unary(path)(b"", metadata=metadata)
                assert caught.value.code().name == code


def test_only_a_server_loads_the_protocols_of_others() -> None:
    """Help must be fast, and a process can have our `inference` stubs or tritonclient's."""
    others = ("smg_grpc_proto", "flowkv_jax.rpc.inference")
    script = f"""
import contextlib, io, sys
from flowkv_jax.cli import main
with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
    main(["serve", "--help"])
import flowkv_jax.rpc.client
loaded = [name for name in sys.modules if name.startswith({others!r})]
assert not loaded, loaded
import flowkv_jax.rpc.server
assert all(any(name.startswith(other) for name in sys.modules) for other in {others!r})
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)


def test_files_have_names_of_their_own() -> None:
    """Two files of one name cannot live in one process."""
    for service, file in (
        ("inference.GRPCInferenceService", "inference/kserve.proto"),
        ("vllm.grpc.engine.VllmEngine", "vllm_engine.proto"),
        ("flowkv.v1.FlowKV", "flowkv/v1/flowkv.proto"),
    ):
        assert Default().FindServiceByName(service).file.name == file
