"""One engine behind all gRPC protocols: a real one, on a tiny model, answers alike over each."""

import contextlib
import io
import zipfile
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
from smg_grpc_proto.generated import common_pb2 as common
from smg_grpc_proto.generated import vllm_engine_pb2 as vllm_pb
from smg_grpc_proto.generated import vllm_engine_pb2_grpc as vllm_grpc

from flowkv_jax import Engine
from flowkv_jax.config import ServerConfig
from flowkv_jax.rpc.flowkv.v1 import flowkv_pb2 as pb
from flowkv_jax.rpc.flowkv.v1 import flowkv_pb2_grpc as pb_grpc
from flowkv_jax.rpc.inference import kserve_pb2 as kserve_pb
from flowkv_jax.rpc.inference import kserve_pb2_grpc as kserve_grpc
from flowkv_jax.serving import Server
from flowkv_jax.tokenizer import Tokenizer

PROMPT = "the quick brown fox"
NUM_TOKENS = 20


@contextlib.asynccontextmanager
async def channel_to(engine: Engine) -> AsyncIterator[Any]:
    config = ServerConfig(port=None, grpc_port=0, stream_interval_ms=0.0)
    server = Server(engine, config, environ={})
    await server.start()
    try:
        async with grpc.aio.insecure_channel(server.address) as channel:
            yield channel
    finally:
        await server.stop()


async def over_flowkv(channel: Any) -> tuple[list[int], str]:
    params = pb.SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    call = pb_grpc.FlowKVStub(channel).Generate(
        pb.GenerateRequest(text=PROMPT, sampling_params=params)
    )
    answers = [answer async for response in call for answer in response.outputs]
    return [i for a in answers for i in a.token_ids], "".join(a.text for a in answers)


async def over_kserve(channel: Any, *, is_stream: bool) -> str:
    request = kserve_pb.ModelInferRequest(model_name="gqa_tied")
    tensor = request.inputs.add(name="text_input", datatype="BYTES", shape=[1])
    tensor.contents.bytes_contents.append(PROMPT.encode())
    request.parameters["temperature"].double_param = 0.0
    request.parameters["max_tokens"].int64_param = NUM_TOKENS
    request.parameters["ignore_eos"].bool_param = True
    request.parameters["exclude_input_in_output"].bool_param = True
    request.parameters["stream"].bool_param = is_stream
    stub = kserve_grpc.GRPCInferenceServiceStub(channel)
    if is_stream:
        call = stub.ModelStreamInfer(iter([request]))
        responses = [response.infer_response async for response in call]
    else:
        responses = [await stub.ModelInfer(request)]
    return b"".join(r.outputs[0].contents.bytes_contents[0] for r in responses).decode()


async def over_vllm(channel: Any, ids: list[int], **params: Any) -> list[list[int]]:
    """Token ids of the deltas, joined, and of the `complete`."""
    request = vllm_pb.GenerateRequest(
        tokenized=vllm_pb.TokenizedInput(input_ids=ids),
        sampling_params=vllm_pb.SamplingParams(**params),
        stream=True,
    )
    deltas, whole = [], []
    async for response in vllm_grpc.VllmEngineStub(channel).Generate(request):
        deltas.extend(response.chunk.token_ids)
        whole.extend(response.complete.output_ids)
    return [deltas, whole]


async def test_protocols_answer_alike(
    make_engine: Callable[..., Engine], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    engine = make_engine()
    tokenizer = engine.get_tokenizer()
    prompt_ids = tokenizer.encode(PROMPT)
    async with channel_to(engine) as channel:
        ids, text = await over_flowkv(channel)
        assert len(ids) == NUM_TOKENS
        greedy = {"temperature": 0, "max_tokens": NUM_TOKENS, "ignore_eos": True}
        assert await over_vllm(channel, prompt_ids, **greedy) == [ids, ids]
        assert await over_kserve(channel, is_stream=False) == text
        assert await over_kserve(channel, is_stream=True) == text

        choice = vllm_pb.ChoiceConstraint(choices=["a fox", "a dog"])
        chosen, _ = await over_vllm(channel, prompt_ids, temperature=0, choice=choice)
        assert tokenizer.decode(chosen) in ("a fox", "a dog")

        outside = engine.model_info().vocab_size
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await over_vllm(channel, [5, outside])
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert str(outside) in caught.value.details()
        assert await over_vllm(channel, prompt_ids, **greedy) == [ids, ids]

        call = vllm_grpc.VllmEngineStub(channel).GetTokenizer(common.GetTokenizerRequest())
        data = b"".join([piece.data async for piece in call])
    zipfile.ZipFile(io.BytesIO(data)).extractall(tmp_path)
    theirs = Tokenizer.from_folder(tmp_path)
    assert theirs.encode(PROMPT) == prompt_ids
    assert (theirs.bos_token, theirs.eos_token) == (tokenizer.bos_token, tokenizer.eos_token)
    assert theirs.chat_template == engine.chat_template
    assert [r for r in caplog.records if r.exc_info] == []
