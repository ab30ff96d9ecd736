"""`inference.GRPCInferenceService` as any client sees it: a stub against a real server."""

import contextlib
import struct
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from flowkv_jax.rpc.inference import kserve_pb2 as pb
from flowkv_jax.rpc.inference import kserve_pb2_grpc as pb_grpc
from flowkv_jax.rpc.server import GrpcServer
from tests.fake_engine import FakeEngine, serving

FOREVER_MS = 60_000.0
FINAL = "triton_final_response"


@contextlib.asynccontextmanager
async def stub_of(server: GrpcServer) -> AsyncIterator[Any]:
    async with grpc.aio.insecure_channel(server.address) as channel:
        yield pb_grpc.GRPCInferenceServiceStub(channel)


def parameters(**values: Any) -> dict[str, pb.InferParameter]:
    fields = {bool: "bool_param", int: "int64_param", float: "double_param", str: "string_param"}
    return {name: pb.InferParameter(**{fields[type(v)]: v}) for name, v in values.items()}


def tensor(name: str, *elements: Any, shape: list[int] | None = None) -> Any:
    is_bool = isinstance(elements[0], bool) if elements else False
    values = [e.encode() if isinstance(e, str) else e for e in elements]
    return pb.ModelInferRequest.InferInputTensor(
        name=name,
        datatype="BOOL" if is_bool else "BYTES",
        shape=[len(elements)] if shape is None else shape,
        contents=pb.InferTensorContents(
            **{"bool_contents" if is_bool else "bytes_contents": values}
        ),
    )


def request(
    *texts: str,
    id: str = "",
    inputs: tuple[Any, ...] = (),
    outputs: tuple[str, ...] = (),
    **values: Any,
) -> pb.ModelInferRequest:
    wanted = [pb.ModelInferRequest.InferRequestedOutputTensor(name=name) for name in outputs]
    return pb.ModelInferRequest(
        model_name="fake",
        id=id,
        parameters=parameters(**values),
        inputs=[tensor("text_input", *(texts or ("hey",))), *inputs],
        outputs=wanted,
    )


def raw(message: pb.ModelInferRequest) -> pb.ModelInferRequest:
    """The same request with its elements as bytes."""
    packed = pb.ModelInferRequest()
    packed.CopyFrom(message)
    for one in packed.inputs:
        if one.datatype == "BOOL":
            content = bytes(one.contents.bool_contents)
        else:
            elements = one.contents.bytes_contents
            content = b"".join(struct.pack("<I", len(e)) + e for e in elements)
        packed.raw_input_contents.append(content)
        one.ClearField("contents")
    return packed


def values_of(response: pb.ModelInferResponse) -> dict[str, list[Any]]:
    """Elements of each output, from either encoding."""
    values: dict[str, list[Any]] = {}
    for index, output in enumerate(response.outputs):
        if not response.raw_output_contents:
            ((_, elements),) = output.contents.ListFields()
            values[output.name] = list(elements)
            continue
        content = response.raw_output_contents[index]
        assert not output.HasField("contents")
        if output.datatype == "UINT32":
            values[output.name] = list(struct.unpack(f"<{len(content) // 4}I", content))
            continue
        values[output.name] = []
        while content:
            (length,) = struct.unpack_from("<I", content)
            values[output.name].append(content[4 : 4 + length])
            content = content[4 + length :]
    return values


async def responses_of(stub: Any, *requests: pb.ModelInferRequest) -> list[Any]:
    return [response async for response in stub.ModelStreamInfer(iter(requests))]


def text_of(responses: list[pb.ModelStreamInferResponse]) -> str:
    outputs = [o for r in responses for o in r.infer_response.outputs if o.name == "text_output"]
    return b"".join(o.contents.bytes_contents[0] for o in outputs).decode()


async def status_of(call: Any) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value.code(), caught.value.details()


@pytest.mark.parametrize("encode", [lambda m: m, raw])
async def test_infer_answers_in_the_encoding_of_the_request(encode: Any) -> None:
    engine = FakeEngine()
    message = encode(request("hey", id="7", max_tokens=3, exclude_input_in_output=True))
    async with serving(engine) as server, stub_of(server) as stub:
        response = await stub.ModelInfer(message)
    assert values_of(response) == {"text_output": [b"t0 t1 t2 "]}
    assert bool(response.raw_output_contents) is bool(message.raw_input_contents)
    assert (response.model_name, response.model_version, response.id) == ("fake", "1", "7")
    (output,) = response.outputs
    assert (output.datatype, list(output.shape)) == ("BYTES", [1])
    (received,) = engine.received
    assert received.prompt == "hey"
    assert received.params.max_tokens == 3
    assert not received.params.echo
    assert received.timeout is None


async def test_stream() -> None:
    engine = FakeEngine()
    async with serving(engine) as server, stub_of(server) as stub:
        responses = await responses_of(stub, request(id="a", stream=True, max_tokens=4))
    assert text_of(responses) == "t0 t1 t2 t3 "
    flags = [r.infer_response.parameters[FINAL].bool_param for r in responses]
    assert flags == [False] * (len(responses) - 1) + [True]
    assert {r.infer_response.id for r in responses} == {"a"}
