"""`vllm.grpc.engine.VllmEngine` as a router sees it: a stub against a real server."""

import asyncio
import contextlib
import hashlib
import io
import json
import zipfile
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from smg_grpc_proto.generated import common_pb2 as common
from smg_grpc_proto.generated import vllm_engine_pb2 as pb
from smg_grpc_proto.generated import vllm_engine_pb2_grpc as pb_grpc

from flowkv_jax import __version__
from flowkv_jax.errors import (
    EngineDeadError,
    GenerationError,
    QueueOverflowError,
    RetryableRequestError,
)
from flowkv_jax.kv_transfer.info import KVTransferInfo
from flowkv_jax.outputs import RequestOutput
from flowkv_jax.rpc import vllm_servicer
from flowkv_jax.serving import Server
from tests.fake_engine import LOAD, MODEL_INFO, FakeEngine, Pause, serving

FOREVER_MS = 60_000.0
TRANSFER = KVTransferInfo(
    connector="NixlConnector",
    role="kv_producer",
    engine_id="engine-1",
    host="127.0.0.1",
    port=14579,
    block_size=16,
    cache_dtype="bfloat16",
    tensor_parallel_size=1,
    pairing_protocol="flowkv/1:block-major:00ff",
)


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


def chunks_of(responses: list[Any], index: int = 0) -> list[pb.GenerateStreamChunk]:
    chunks = [r.chunk for r in responses if r.HasField("chunk")]
    return [chunk for chunk in chunks if chunk.index == index]


def completes_of(responses: list[Any]) -> list[pb.GenerateComplete]:
    return [r.complete for r in responses if r.HasField("complete")]


async def status_of(call: Any) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await (read_all(call) if hasattr(call, "read") else call)
    return caught.value.code(), caught.value.details()


class SlowToAdmit(FakeEngine):
    """Knows a request only once `admission` has let it in."""

    def __init__(self) -> None:
        super().__init__()
        self.admission = Pause()

    async def async_generate(self, *args: Any, **options: Any) -> AsyncIterator[RequestOutput]:
        await self.admission.wait()
        async for output in super().async_generate(*args, **options):
            yield output


class TestGenerate:
    async def test_stream_of_deltas_and_a_complete(self) -> None:
        engine = FakeEngine()
        async with serving(engine) as server, stub_of(server) as stub:
            responses = await read_all(stub.Generate(request(5, 6, request_id="a", max_tokens=4)))
        chunks, (complete,) = chunks_of(responses), completes_of(responses)
        assert responses[-1].HasField("complete")
        assert [i for chunk in chunks for i in chunk.token_ids] == [0, 1, 2, 3]
        assert [len(chunk.token_ids) for chunk in chunks] == [c.completion_tokens for c in chunks]
        assert {(c.prompt_tokens, c.cached_tokens) for c in chunks} == {(2, 1)}
        assert list(complete.output_ids) == [0, 1, 2, 3]
        assert (complete.prompt_tokens, complete.completion_tokens) == (2, 4)
        assert (complete.finish_reason, complete.cached_tokens) == ("length", 1)
        assert complete.WhichOneof("matched_stop") is None
        assert not complete.HasField("kv_transfer_params_json")
        (received,) = engine.received
        assert (received.prompt, received.request_id) == ([5, 6], "a")
        assert (received.timeout, received.kv_transfer_params) == (None, None)

    async def test_without_stream_there_are_only_completes(self) -> None:
        engine = FakeEngine()
        asked = request(stream=False, n=2, max_tokens=3, stop=["END"], logprobs=0)
        async with serving(engine) as server, stub_of(server) as stub:
            responses = await read_all(stub.Generate(asked))
        completes = completes_of(responses)
        assert len(responses) == len(completes) == 2
        assert [c.index for c in completes] == [0, 1]
        for complete in completes:
            assert list(complete.output_ids) == [0, 1, 2]
            assert (complete.finish_reason, complete.matched_stop_str) == ("stop", "END")
            assert list(complete.output_logprobs.token_ids) == [0, 1, 2]

    async def test_first_token_at_once_and_the_rest_merged_by_index(self) -> None:
        engine = FakeEngine()
        second = engine.pause_before(1)
        asked = request(n=2, max_tokens=4, logprobs=1, prompt_logprobs=0, temperature=1)
        async with (
            serving(engine, stream_interval_ms=FOREVER_MS) as server,
            stub_of(server) as stub,
        ):
            call = aiter(stub.Generate(asked))
            responses = [await anext(call)]
            second.released.set()
            responses += [response async for response in call]
        for index in (0, 1):
            chunks = chunks_of(responses, index)
            assert [list(c.token_ids) for c in chunks] == [[0], [1, 2, 3]]
            assert [list(c.output_logprobs.token_ids) for c in chunks] == [[0], [1, 2, 3]]
            assert list(chunks[0].input_logprobs.token_ids) == [5, 6]
            assert not chunks[1].HasField("input_logprobs")
        completes = completes_of(responses)
        assert [(c.index, list(c.output_ids)) for c in completes] == [
            (0, [0, 1, 2, 3]),
            (1, [0, 1, 2, 3]),
        ]
        assert not any(c.HasField("output_logprobs") for c in completes)

    async def test_text_goes_in_too(self) -> None:
        engine = FakeEngine()
        asked = request(max_tokens=1)
        asked.text = "hello"
        async with serving(engine) as server, stub_of(server) as stub:
            await read_all(stub.Generate(asked))
        assert engine.received[0].prompt == "hello"
        assert engine.received[0].request_id.startswith("req-")

    async def test_kv_transfer_params_both_ways(self) -> None:
        engine = FakeEngine()
        engine.kv_answer = {"do_remote_prefill": True, "remote_block_ids": [1, 2]}
        asked = request(max_tokens=1)
        asked.kv_transfer_params_json = '{"do_remote_decode": true}'
        async with serving(engine) as server, stub_of(server) as stub:
            responses = await read_all(stub.Generate(asked))
        assert engine.received[0].kv_transfer_params == {"do_remote_decode": True}
        (complete,) = completes_of(responses)
        assert json.loads(complete.kv_transfer_params_json) == engine.kv_answer

    async def test_deadline(self) -> None:
        engine = FakeEngine()
        engine.pause_before(0)
        async with serving(engine) as server, stub_of(server) as stub:
            code, _ = await status_of(stub.Generate(request(), timeout=0.05))
        assert code is grpc.StatusCode.DEADLINE_EXCEEDED
        assert all(received.timeout < 1 for received in engine.received)

    async def test_a_client_that_leaves_ends_its_request(self) -> None:
        engine = FakeEngine()
        pause = engine.pause_before(1)
        async with serving(engine) as server, stub_of(server) as stub:
            call = stub.Generate(request(request_id="a"))
            await call.read()
            await pause.reached.wait()
            call.cancel()
            await engine.wait_until_idle()
            # Its id is free again.
            pause.released.set()
            await read_all(stub.Generate(request(request_id="a")))

    @pytest.mark.parametrize(
        "error, code",
        [
            (QueueOverflowError, "RESOURCE_EXHAUSTED"),
            (RetryableRequestError, "UNAVAILABLE"),
            (EngineDeadError, "UNAVAILABLE"),
            (GenerationError, "INTERNAL"),
        ],
    )
    async def test_errors_of_the_engine(self, error: type[Exception], code: str) -> None:
        engine = FakeEngine()
        engine.failures[1] = error("why")
        async with serving(engine) as server, stub_of(server) as stub:
            call = stub.Generate(request())
            given, message = await status_of(call)
        assert (given.name, message) == (code, "why")

    @pytest.mark.parametrize("is_second_older", [False, True])
    async def test_an_id_in_use(self, is_second_older: bool) -> None:
        engine = FakeEngine() if is_second_older else SlowToAdmit()
        pause = engine.admission if isinstance(engine, SlowToAdmit) else engine.pause_before(1)
        async with serving(engine) as server, stub_of(server) as stub:
            call = stub.Generate(request(request_id="a", max_tokens=3))
            await pause.reached.wait()
            code, message = await status_of(stub.Generate(request(request_id="a")))
            assert code is grpc.StatusCode.ALREADY_EXISTS and "'a'" in message
            pause.released.set()
            (complete,) = completes_of(await read_all(call))
        assert complete.completion_tokens == 3

    @pytest.mark.parametrize(
        "change, code, words",
        [
            ({"tokenized": None}, "INVALID_ARGUMENT", "input is missing"),
            ({"request_id": "a" * 257}, "INVALID_ARGUMENT", "request_id"),
            ({"request_id": "a\nb"}, "INVALID_ARGUMENT", "request_id"),
            ({"kv_transfer_params_json": "{"}, "INVALID_ARGUMENT", "no JSON"),
            ({"kv_transfer_params_json": "[" * 99999}, "INVALID_ARGUMENT", "no JSON"),
            ({"kv_transfer_params_json": "[]"}, "INVALID_ARGUMENT", "JSON object"),
            ({"kv_transfer_params_json": " " * (1 << 20) + "{}"}, "INVALID_ARGUMENT", "at most"),
            (
                {"kv_transfer_params": pb.KvTransferParams(remote_host="x", remote_port=1)},
                "FAILED_PRECONDITION",
                "kv_transfer_params_json",
            ),
            ({"mm_inputs": pb.MultimodalInputs()}, "FAILED_PRECONDITION", "mm_inputs"),
            ({"extra_mm_inputs": [pb.MultimodalInputs()]}, "FAILED_PRECONDITION", "mm_inputs"),
            ({"media_refs": pb.MediaRefs()}, "FAILED_PRECONDITION", "media_refs"),
            ({"data_parallel_rank": 1}, "FAILED_PRECONDITION", "data_parallel_rank=1"),
            ({"sampling_params": {"temperature": -1}}, "INVALID_ARGUMENT", "temperature=-1"),
            ({"sampling_params": {"n": 65}}, "INVALID_ARGUMENT", "n=65"),
            ({"sampling_params": {"max_tokens": 0}}, "INVALID_ARGUMENT", "max_tokens=0"),
            ({"sampling_params": {"structural_tag": "x"}}, "FAILED_PRECONDITION", "structural"),
            (
                {"tokenized": {"input_ids": [1] * ((1 << 16) + 1)}},
                "INVALID_ARGUMENT",
                "65537 entries",
            ),
        ],
    )
    async def test_refused_by_name(self, change: dict[str, Any], code: str, words: str) -> None:
        engine = FakeEngine()
        fields = {"tokenized": {"input_ids": [5]}, "stream": True, **change}
        asked = pb.GenerateRequest(**{k: v for k, v in fields.items() if v is not None})
        async with serving(engine) as server, stub_of(server) as stub:
            given_code, message = await status_of(stub.Generate(asked))
        assert (given_code.name, words in message) == (code, True), message
        assert len(message) < 400
        assert engine.received == []


class TestAbort:
    async def test_ends_the_request_and_says_so(self) -> None:
        engine = FakeEngine()
        pause = engine.pause_before(1)
        async with serving(engine) as server, stub_of(server) as stub:
            call = stub.Generate(request(request_id="a"))
            await pause.reached.wait()
            await stub.Abort(pb.AbortRequest(request_ids=["a"]))
            (complete,) = completes_of(await read_all(call))
        assert complete.finish_reason == "abort"

    async def test_is_idempotent_and_knows_no_unknown_ids(self) -> None:
        async with serving(FakeEngine()) as server, stub_of(server) as stub:
            for ids in ([], ["nobody"], ["nobody", "nobody", ""]):
                await stub.Abort(pb.AbortRequest(request_ids=ids))
            await read_all(stub.Generate(request(request_id="a", max_tokens=1)))
            await stub.Abort(pb.AbortRequest(request_ids=["a"]))
            too_many = [str(i) for i in range(vllm_servicer.MAX_ABORT_IDS + 1)]
            code, _ = await status_of(stub.Abort(pb.AbortRequest(request_ids=too_many)))
        assert code is grpc.StatusCode.INVALID_ARGUMENT

    async def test_overtakes_its_request(self) -> None:
        engine = SlowToAdmit()
        async with serving(engine) as server, stub_of(server) as stub:
            call = stub.Generate(request(request_id="a"))
            await engine.admission.reached.wait()
            await stub.Abort(pb.AbortRequest(request_ids=["a"]))
            code, _ = await status_of(call)
            engine.admission.released.set()
        assert code is grpc.StatusCode.CANCELLED
        assert engine.received == []

    @settings(max_examples=25, deadline=None)
    @given(
        steps=st.lists(
            st.tuples(st.sampled_from(["generate", "abort", "leave"]), st.integers(0, 2)),
            min_size=1,
            max_size=12,
        ),
        is_slow=st.booleans(),
    )
    def test_whatever_comes_between_nothing_stays(
        self, steps: list[tuple[str, int]], is_slow: bool
    ) -> None:
        """Every call ends, with a `complete` or a status that fits, and the engine is left idle
        (`serving` sees to that)."""
        fitting = {
            grpc.StatusCode.OK,
            grpc.StatusCode.CANCELLED,
            grpc.StatusCode.ALREADY_EXISTS,
        }

        async def run() -> None:
            engine = SlowToAdmit() if is_slow else FakeEngine()
            pause = engine.admission if isinstance(engine, SlowToAdmit) else engine.pause_before(1)
            calls: list[Any] = []
            async with serving(engine) as server, stub_of(server) as stub:
                for step, number in steps:
                    name = f"r{number}"
                    if step == "generate":
                        calls.append(stub.Generate(request(request_id=name, max_tokens=3)))
                    elif step == "abort":
                        await stub.Abort(pb.AbortRequest(request_ids=[name]))
                    elif calls:
                        calls[number % len(calls)].cancel()
                await stub.HealthCheck(pb.HealthCheckRequest())
                pause.released.set()
                for call in calls:
                    with contextlib.suppress(grpc.aio.AioRpcError, asyncio.CancelledError):
                        responses = await read_all(call)
                        assert len(completes_of(responses)) == 1
                    assert await call.code() in fitting
            assert engine.live == {}

        asyncio.run(run())


class TestAsking:
    async def test_model_info(self) -> None:
        async with serving(FakeEngine()) as server, stub_of(server) as stub:
            info = await stub.GetModelInfo(pb.GetModelInfoRequest())
        assert info == pb.GetModelInfoResponse(
            model_path="models/fake.gguf",
            is_generation=True,
            max_context_length=64,
            vocab_size=1000,
            served_model_name="fake",
            model_type="llama",
            architectures=["LlamaForCausalLM"],
            eos_token_ids=[2, 3],
            bos_token_id=1,
            max_req_input_len=64,
            default_sampling_params_json='{"temperature": 0.5}',
        )

    async def test_server_info(self) -> None:
        engine = FakeEngine()
        pause = engine.pause_before(1)
        async with serving(engine) as server, stub_of(server) as stub:
            idle = await stub.GetServerInfo(pb.GetServerInfoRequest())
            engine.kv_info = TRANSFER
            call = stub.Generate(request(max_tokens=2))
            await pause.reached.wait()
            busy = await stub.GetServerInfo(pb.GetServerInfoRequest())
            pause.released.set()
            await read_all(call)
        assert (idle.active_requests, busy.active_requests) == (0, 1)
        assert idle.last_receive_timestamp == 0 < busy.last_receive_timestamp
        assert not idle.is_paused and idle.uptime_seconds >= 0
        assert (idle.kv_connector, idle.kv_role, idle.pairing_protocol) == ("", "", "")
        assert (idle.block_size, idle.max_num_seqs, idle.data_parallel_size) == (16, 8, 1)
        assert (idle.kv_cache_dtype, idle.model_dtype) == ("float32", "float32")
        assert (busy.kv_connector, busy.kv_role) == ("NixlConnector", "kv_producer")
        assert (busy.kv_engine_id, busy.pairing_protocol) == ("engine-1", TRANSFER.pairing_protocol)
        assert (busy.kv_cache_dtype, busy.model_dtype) == ("bfloat16", "float32")

    async def test_loads(self) -> None:
        async with serving(FakeEngine()) as server, stub_of(server) as stub:
            loads = await stub.GetLoads(pb.GetLoadsRequest())
        (load,) = loads.loads
        assert (loads.version, loads.dp_rank_count, load.dp_rank) == (__version__, 1, 0)
        assert load.num_running_reqs == LOAD.num_requests_running
        assert load.num_waiting_reqs == LOAD.num_requests_waiting + LOAD.num_requests_swapped
        assert load.num_total_reqs == 6
        assert (load.num_used_tokens, load.max_total_num_tokens) == (400, 1600)
        assert (load.token_usage, load.cache_hit_rate, load.utilization) == (0.25, 0.5, 0.75)
        assert (load.max_running_requests, load.num_waiting_uncached_tokens) == (8, 4)

    async def test_health(self) -> None:
        engine = FakeEngine()
        async with serving(engine) as server, stub_of(server) as stub:
            assert (await stub.HealthCheck(pb.HealthCheckRequest())).healthy
            engine.is_healthy = False
            answer = await stub.HealthCheck(pb.HealthCheckRequest())
        assert not answer.healthy and "no request" in answer.message

    async def test_what_is_not_served(self) -> None:
        async with serving(FakeEngine()) as server, stub_of(server) as stub:
            events = stub.SubscribeKvEvents(common.SubscribeKvEventsRequest())
            for call in (stub.Embed(pb.EmbedRequest()), events):
                code, message = await status_of(call)
                assert code is grpc.StatusCode.UNIMPLEMENTED and message

    async def test_tokenizer_archive(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("flowkv_jax.rpc.vllm_tokenizer._CHUNK_BYTES", 100)
        digests = set()
        async with serving(FakeEngine()) as server, stub_of(server) as stub:
            for _ in range(2):
                call = stub.GetTokenizer(common.GetTokenizerRequest())
                pieces = [piece async for piece in call]
                data = b"".join(piece.data for piece in pieces)
                assert len(pieces) == -(-len(data) // 100) > 1
                assert not any(piece.sha256 for piece in pieces[:-1])
                assert pieces[-1].sha256 == hashlib.sha256(data).hexdigest()
                digests.add(pieces[-1].sha256)
        assert len(digests) == 1
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            assert archive.namelist() == ["tokenizer.json", "tokenizer_config.json"]
            assert json.loads(archive.read("tokenizer.json")) == {"model": "fake"}
            config = json.loads(archive.read("tokenizer_config.json"))
        assert config["chat_template"] == "{{ messages }}"
        assert (config["bos_token"], config["eos_token"]) == ("<s>", "</s>")
        assert config["model_max_length"] == MODEL_INFO.max_model_len


class TestSteering:
    async def test_flush(self) -> None:
        engine = FakeEngine()
        pause = engine.pause_before(1)
        async with serving(engine) as server, stub_of(server) as stub:
            assert (await stub.FlushCache(common.FlushCacheRequest())).success
            call = stub.Generate(request(max_tokens=2))
            await pause.reached.wait()
            refused = await stub.FlushCache(common.FlushCacheRequest())
            assert not refused.success and "in use" in refused.message
            waiting = asyncio.ensure_future(stub.FlushCache(common.FlushCacheRequest(timeout_s=60)))
            pause.released.set()
            await read_all(call)
            assert (await waiting).success
            for timeout_s in (-1.0, float("nan"), 601.0):
                asked = stub.FlushCache(common.FlushCacheRequest(timeout_s=timeout_s))
                assert (await status_of(asked))[0] is grpc.StatusCode.INVALID_ARGUMENT

    async def test_profile(self) -> None:
        engine = FakeEngine()
        async with serving(engine) as server, stub_of(server) as stub:
            code, _ = await status_of(stub.StopProfile(common.StopProfileRequest()))
            assert code is grpc.StatusCode.FAILED_PRECONDITION
            chosen = common.StartProfileRequest(output_dir="/elsewhere", num_steps=2)
            code, message = await status_of(stub.StartProfile(chosen))
            assert code is grpc.StatusCode.FAILED_PRECONDITION
            assert "output_dir, num_steps cannot be chosen" in message
            assert (await stub.StartProfile(common.StartProfileRequest())).success
            assert engine.profiles == [vllm_servicer.MAX_PROFILE_S]
            assert (await stub.StopProfile(common.StopProfileRequest())).success

    async def test_needs_leave(self) -> None:
        async with serving(FakeEngine(), enable_admin=False) as server, stub_of(server) as stub:
            for call in (
                stub.FlushCache(common.FlushCacheRequest()),
                stub.StartProfile(common.StartProfileRequest()),
                stub.StopProfile(common.StopProfileRequest()),
            ):
                code, message = await status_of(call)
                assert code is grpc.StatusCode.FAILED_PRECONDITION
                assert "--enable-admin" in message


class TestDrain:
    async def test_running_requests_finish_and_new_ones_are_refused(self) -> None:
        engine = FakeEngine()
        pause = engine.pause_before(1)
        async with serving(engine) as server, stub_of(server) as stub:
            call = stub.Generate(request(max_tokens=3))
            await pause.reached.wait()
            drain = asyncio.create_task(server.drain())
            while (await stub.HealthCheck(pb.HealthCheckRequest())).healthy:
                await asyncio.sleep(0)
            assert (await stub.GetServerInfo(pb.GetServerInfoRequest())).is_paused
            code, _ = await status_of(stub.Generate(request()))
            assert code is grpc.StatusCode.UNAVAILABLE
            pause.released.set()
            (complete,) = completes_of(await read_all(call))
            await drain
        assert list(complete.output_ids) == [0, 1, 2]

    async def test_what_takes_too_long_is_ended(self) -> None:
        engine = FakeEngine()
        pause = engine.pause_before(1)
        async with serving(engine, drain_timeout_s=0.0) as server, stub_of(server) as stub:
            call = stub.Generate(request())
            await pause.reached.wait()
            await server.drain()
            code, message = await status_of(call)
        assert code is grpc.StatusCode.UNAVAILABLE and "shut down" in message
