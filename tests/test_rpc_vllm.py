"""`vllm.grpc.engine.VllmEngine` as a router sees it: a stub against a real server."""

import contextlib
from collections.abc import AsyncIterator
from typing import Any

import grpc
from smg_grpc_proto.generated import vllm_engine_pb2 as pb
from smg_grpc_proto.generated import vllm_engine_pb2_grpc as pb_grpc

from flowkv_jax.serving import Server
from tests.fake_engine import FakeEngine, serving


@contextlib.asynccontextmanager
async def stub_of(server: Server) -> AsyncIterator[Any]:
    async with grpc.aio.insecure_channel(server.address) as channel:
        yield pb_grpc.VllmEngineStub(channel)


def request(
    *input_ids: int, request_id: str = "", stream: bool = True, **params: Any
) -> pb.GenerateRequest:
    return pb.GenerateRequest(
        request_id=request_id,
        tokenized=pb.TokenizedInput(input_ids=input_ids or (5, 6)),
        sampling_params=pb.SamplingParams(**params),
        stream=stream,
    )


async def read_all(call: Any) -> list[pb.GenerateResponse]:
    return [response async for response in call]


async def test_stream_of_deltas_and_a_complete() -> None:
    engine = FakeEngine()
    async with serving(engine) as server, stub_of(server) as stub:
        responses = await read_all(stub.Generate(request(5, 6, request_id="a", max_tokens=4)))
    chunks = [r.chunk for r in responses if r.HasField("chunk")]
    (complete,) = [r.complete for r in responses if r.HasField("complete")]
    assert responses[-1].HasField("complete")
    assert [i for chunk in chunks for i in chunk.token_ids] == [0, 1, 2, 3]
    assert [len(chunk.token_ids) for chunk in chunks] == [c.completion_tokens for c in chunks]
    assert {c.prompt_tokens for c in chunks} == {2}
    assert list(complete.output_ids) == [0, 1, 2, 3]
    assert (complete.prompt_tokens, complete.completion_tokens) == (2, 4)
    assert complete.finish_reason == "length"
    (received,) = engine.received
    assert received.prompt == [5, 6]
    assert received.request_id == "a"
    assert not received.params.detokenize
