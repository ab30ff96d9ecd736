"""`inference.GRPCInferenceService` as any client sees it: a stub against a real server."""

import asyncio
import contextlib
import json
import logging
import struct
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from flowkv_jax import __version__
from flowkv_jax.errors import EngineDeadError, GenerationError, QueueOverflowError
from flowkv_jax.rpc import kserve_requests, kserve_servicer
from flowkv_jax.rpc.inference import kserve_pb2 as pb
from flowkv_jax.rpc.inference import kserve_pb2_grpc as pb_grpc
from flowkv_jax.serving import Server
from tests.fake_engine import FakeEngine, serving

FOREVER_MS = 60_000.0
FINAL = "triton_final_response"


@contextlib.asynccontextmanager
async def stub_of(server: Server) -> AsyncIterator[Any]:
    async with grpc.aio.insecure_channel(server.address) as channel:
        yield pb_grpc.GRPCInferenceServiceStub(channel)


def tensor(name: str, *elements: str | bytes | bool, shape: list[int] | None = None) -> Any:
    contents = pb.InferTensorContents()
    is_bool = isinstance(elements[0], bool)
    for element in elements:
        if isinstance(element, bool):
            contents.bool_contents.append(element)
        else:
            contents.bytes_contents.append(
                element.encode() if isinstance(element, str) else element
            )
    return pb.ModelInferRequest.InferInputTensor(
        name=name,
        datatype="BOOL" if is_bool else "BYTES",
        shape=[len(elements)] if shape is None else shape,
        contents=contents,
    )


def sampling(**values: Any) -> Any:
    return tensor("sampling_parameters", json.dumps(values))


def request(
    *inputs: Any, id: str = "", outputs: tuple[str, ...] = (), **parameters: Any
) -> pb.ModelInferRequest:
    """A request with `text_input` "hey" in front of other inputs, or with these only. The prompt
    is not echoed unless the parameters say so (None leaves one out)."""
    names = [one.name for one in inputs]
    message = pb.ModelInferRequest(
        model_name="fake",
        id=id,
        inputs=inputs if "text_input" in names else [tensor("text_input", "hey"), *inputs],
        outputs=[pb.ModelInferRequest.InferRequestedOutputTensor(name=name) for name in outputs],
    )
    fields = {bool: "bool_param", int: "int64_param", float: "double_param", str: "string_param"}
    parameters = {"exclude_input_in_output": True, **parameters}
    for name, value in parameters.items():
        if value is None or name in names:
            continue
        setattr(message.parameters[name], fields[type(value)], value)
    return message


def raw(message: pb.ModelInferRequest) -> pb.ModelInferRequest:
    """The same request with its elements as bytes."""
    packed = pb.ModelInferRequest()
    packed.CopyFrom(message)
    for one in packed.inputs:
        content = bytes(one.contents.bool_contents)
        for element in one.contents.bytes_contents:
            content += struct.pack("<I", len(element)) + element
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


async def responses_to(stub: Any, *requests: pb.ModelInferRequest) -> list[Any]:
    return [response async for response in stub.ModelStreamInfer(iter(requests))]


def text_of(responses: list[pb.ModelStreamInferResponse]) -> str:
    outputs = [o for r in responses for o in r.infer_response.outputs if o.name == "text_output"]
    return b"".join(o.contents.bytes_contents[0] for o in outputs).decode()


def finals_of(responses: list[pb.ModelStreamInferResponse]) -> list[bool]:
    return [r.infer_response.parameters[FINAL].bool_param for r in responses]


async def status_of(call: Any) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value.code(), caught.value.details()


class TestAsking:
    async def test_live_ready_and_metadata(self) -> None:
        engine = FakeEngine()
        async with serving(engine) as server, stub_of(server) as stub:
            assert (await stub.ServerLive(pb.ServerLiveRequest())).live
            assert (await stub.ServerReady(pb.ServerReadyRequest())).ready
            for name, version, is_here in (
                ("fake", "", 1),
                ("fake", "1", 1),
                ("fake", "2", 0),
                ("x", "", 0),
            ):
                asked = pb.ModelReadyRequest(name=name, version=version)
                assert (await stub.ModelReady(asked)).ready == bool(is_here), (name, version)
            about = await stub.ServerMetadata(pb.ServerMetadataRequest())
            model = await stub.ModelMetadata(pb.ModelMetadataRequest(name="fake"))
            index = await stub.RepositoryIndex(pb.RepositoryIndexRequest())
            assert (about.name, about.version) == ("flowkv-jax", __version__)
            assert (model.name, list(model.versions)) == ("fake", ["1"])
            assert {t.name: t.datatype for t in model.inputs} == kserve_requests.INPUTS
            assert {t.name: t.datatype for t in model.outputs} == kserve_requests.OUTPUTS
            assert [(m.name, m.version, m.state) for m in index.models] == [("fake", "1", "READY")]
            engine.is_healthy = False
            assert not (await stub.ServerReady(pb.ServerReadyRequest())).ready
            assert not (await stub.ModelReady(pb.ModelReadyRequest(name="fake"))).ready
            index = await stub.RepositoryIndex(pb.RepositoryIndexRequest())
            assert [m.state for m in index.models] == ["UNAVAILABLE"]
            assert not (await stub.RepositoryIndex(pb.RepositoryIndexRequest(ready=True))).models

    async def test_another_model_is_not_found(self) -> None:
        async with serving(FakeEngine()) as server, stub_of(server) as stub:
            for asked in (
                stub.ModelMetadata(pb.ModelMetadataRequest(name="x")),
                stub.ModelInfer(pb.ModelInferRequest(model_name="x")),
                stub.ModelInfer(pb.ModelInferRequest(model_name="fake", model_version="9")),
            ):
                code, message = await status_of(asked)
                assert code is grpc.StatusCode.NOT_FOUND
                assert "'fake', version '1' is" in message


class TestInfer:
    @pytest.mark.parametrize("encode", [lambda message: message, raw])
    async def test_answer_in_the_encoding_of_the_request(self, encode: Any) -> None:
        engine = FakeEngine()
        message = request(
            tensor("exclude_input_in_output", True),
            tensor("return_num_output_tokens", True),
            sampling(max_tokens=3),
            id="7",
        )
        async with serving(engine) as server, stub_of(server) as stub:
            response = await stub.ModelInfer(encode(message))
        assert values_of(response) == {"text_output": [b"t0 t1 t2 "], "num_output_tokens": [3]}
        assert bool(response.raw_output_contents) is (encode is raw)
        assert (response.model_name, response.model_version, response.id) == ("fake", "1", "7")
        assert [(o.datatype, list(o.shape)) for o in response.outputs] == [
            ("BYTES", [1]),
            ("UINT32", [1]),
        ]
        (received,) = engine.received
        assert received.prompt == "hey"
        assert (received.params.max_tokens, received.params.echo) == (3, False)
        assert (received.timeout, received.priority, received.cache_salt) == (None, 0, None)

    async def test_the_prompt_stays_in_front_unless_excluded_or_streamed(self) -> None:
        engine = FakeEngine()
        cases: list[tuple[dict[str, Any], bool]] = [
            ({"exclude_input_in_output": None}, True),
            ({"exclude_input_in_output": False}, True),
            ({"exclude_input_in_output": True}, False),
            ({"exclude_input_in_output": None, "stream": True}, False),
            ({"stream": True, "exclude_input_in_output": False}, True),
        ]
        async with serving(engine) as server, stub_of(server) as stub:
            for parameters, _ in cases:
                await responses_to(stub, request(**parameters))
        assert [received.params.echo for received in engine.received] == [echo for _, echo in cases]

    async def test_parameters_in_every_spelling(self) -> None:
        engine = FakeEngine()
        strings = sampling(
            temperature="0.5", max_tokens="7", ignore_eos="True", stop="END", seed="3",
            stop_token_ids="[4, 5]", logit_bias='{"7": 1}', top_k=5,
        )  # fmt: skip
        asked = request(strings, top_p=0.25, n=2, priority=3, timeout=2_500_000, cache_salt="salt")
        as_text = request(sampling_parameters='{"max_new_tokens": "9"}', temperature="0.75")
        as_text.parameters["seed"].uint64_param = 8
        async with serving(engine) as server, stub_of(server) as stub:
            await stub.ModelInfer(asked)
            await stub.ModelInfer(as_text)
        first, second = engine.received
        params = first.params
        assert (params.temperature, params.max_tokens, params.ignore_eos) == (0.5, 7, True)
        assert (params.stop_strings, params.seed, params.top_k) == (("END",), 3, 5)
        assert (params.stop_ids, params.bias) == ({4, 5}, {7: 1.0})
        assert (params.top_p, params.n) == (0.25, 2)
        assert (first.priority, first.timeout, first.cache_salt) == (3, 2.5, "salt")
        assert (second.params.max_tokens, second.params.temperature) == (9, 0.75)
        assert second.params.seed == 8

    async def test_all_outputs_and_their_choice(self) -> None:
        async with serving(FakeEngine()) as server, stub_of(server) as stub:
            names = tuple(kserve_requests.OUTPUTS)
            every = await stub.ModelInfer(request(outputs=names, max_tokens=2))
            one = await stub.ModelInfer(request(outputs=("finish_reason",), max_tokens=2))
        assert values_of(every) == {
            "text_output": [b"t0 t1 "],
            "finish_reason": [b"length"],
            "num_input_tokens": [4],
            "num_output_tokens": [2],
        }
        assert values_of(one) == {"finish_reason": [b"length"]}

    async def test_several_answers_and_several_prompts(self) -> None:
        engine = FakeEngine()
        prompts = tensor("text_input", "a", "bb", "ccc", shape=[3, 1])
        async with serving(engine) as server, stub_of(server) as stub:
            answers = await stub.ModelInfer(request(n=2, max_tokens=1))
            batch = await stub.ModelInfer(
                request(prompts, max_tokens=2, return_num_input_tokens=True)
            )
            code, message = await status_of(stub.ModelInfer(request(prompts, n=2)))
        assert values_of(answers) == {"text_output": [b"t0 ", b"t0 "]}
        assert list(answers.outputs[0].shape) == [2]
        assert values_of(batch) == {"text_output": [b"t0 t1 "] * 3, "num_input_tokens": [2, 3, 4]}
        assert list(batch.outputs[0].shape) == [3, 1]
        ids = [received.request_id for received in engine.received[1:]]
        assert [received.prompt for received in engine.received[1:]] == ["a", "bb", "ccc"]
        assert ids == [ids[0], f"{ids[0]}-1", f"{ids[0]}-2"]
        assert code is grpc.StatusCode.INVALID_ARGUMENT and "n=2" in message

    async def test_one_prompt_of_several_fails_all(self) -> None:
        engine = FakeEngine()
        engine.failures[1] = QueueOverflowError("full")
        async with serving(engine) as server, stub_of(server) as stub:
            prompts = tensor("text_input", "a", "b")
            code, message = await status_of(stub.ModelInfer(request(prompts)))
        assert (code, message) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "full")

    async def test_the_shorter_of_timeout_and_deadline(self) -> None:
        engine = FakeEngine()
        engine.pause_before(1)
        async with serving(engine) as server, stub_of(server) as stub:
            code, _ = await status_of(stub.ModelInfer(request(timeout=20_000), timeout=60))
            assert code is grpc.StatusCode.DEADLINE_EXCEEDED
            code, _ = await status_of(stub.ModelInfer(request(timeout=60_000_000), timeout=0.05))
            assert code is grpc.StatusCode.DEADLINE_EXCEEDED
        assert [received.timeout for received in engine.received[:1]] == [0.02]
        # gRPC rounds what is left, and a busy machine may have used it up before the engine.
        assert all(received.timeout < 1 for received in engine.received[1:])

    async def test_a_client_that_leaves_ends_its_requests(self) -> None:
        engine = FakeEngine()
        pause = engine.pause_before(1)
        async with serving(engine) as server, stub_of(server) as stub:
            call = stub.ModelInfer(request(tensor("text_input", "a", "b")))
            await pause.reached.wait()
            assert len(engine.live) == 2
            call.cancel()
            await engine.wait_until_idle()


REFUSED: list[tuple[pb.ModelInferRequest, str, str]] = [
    (request(stream=True), "INVALID_ARGUMENT", "ModelStreamInfer"),
    (pb.ModelInferRequest(model_name="fake"), "INVALID_ARGUMENT", "text_input is missing"),
    (request(tensor("text_input", "a", shape=[2])), "INVALID_ARGUMENT", "1 were sent"),
    (request(tensor("text_input", "a", shape=[1] * 9)), "INVALID_ARGUMENT", "at most 8 sizes"),
    (request(tensor("text_input", "a", shape=[-1])), "INVALID_ARGUMENT", "at most 8 sizes"),
    (request(tensor("text_input", *["a"] * 65)), "INVALID_ARGUMENT", "65 elements"),
    (request(tensor("text_input", b"\xff")), "INVALID_ARGUMENT", "no UTF-8"),
    (request(tensor("text_input", "a"), tensor("text_input", "a")), "INVALID_ARGUMENT", "twice"),
    (request(tensor("text_input", True)), "INVALID_ARGUMENT", "must be BYTES"),
    (request(tensor("stream", "yes")), "INVALID_ARGUMENT", "must be BOOL"),
    (request(tensor("stream", True, False)), "INVALID_ARGUMENT", "2 elements"),
    (request(tensor("image", "x")), "FAILED_PRECONDITION", "'image' is not served"),
    (request(outputs=("logits",)), "FAILED_PRECONDITION", "'logits' is not served"),
    (request(tensor("sampling_parameters", "{")), "INVALID_ARGUMENT", "no JSON"),
    (request(tensor("sampling_parameters", "[" * 100_000)), "INVALID_ARGUMENT", "no JSON"),
    (request(tensor("sampling_parameters", "[1]")), "INVALID_ARGUMENT", "JSON object"),
    (request(tensor("sampling_parameters", " " * (1 << 20) + "{}")), "INVALID_ARGUMENT", "bytes"),
    (request(sampling(temperature="hot")), "INVALID_ARGUMENT", "temperature='hot'"),
    (request(sampling(temperature=-1)), "INVALID_ARGUMENT", "temperature=-1"),
    (request(sampling(max_tokens=1), max_tokens=2), "INVALID_ARGUMENT", "contradicts"),
    (request(no_such=1), "INVALID_ARGUMENT", "unknown sampling parameter 'no_such'"),
    (request(sequence_id=1), "INVALID_ARGUMENT", "unknown sampling parameter 'sequence_id'"),
    (request(logits_processors="x"), "FAILED_PRECONDITION", "logits_processors"),
    (request(exclude_input_in_output=1), "INVALID_ARGUMENT", "must be true or false"),
    (request(priority="high"), "INVALID_ARGUMENT", "priority='high'"),
    (request(timeout=-1), "INVALID_ARGUMENT", "timeout=-1"),
    (request(cache_salt=1), "INVALID_ARGUMENT", "cache_salt=1"),
    (request(**{f"p{i}": 1 for i in range(256)}), "INVALID_ARGUMENT", "257 entries"),
]  # fmt: skip


@pytest.mark.parametrize("index", range(len(REFUSED)))
async def test_refused_by_name_in_a_call_and_in_a_stream(index: int) -> None:
    message, code, words = REFUSED[index]
    engine = FakeEngine()
    async with serving(engine) as server, stub_of(server) as stub:
        given_code, given_words = await status_of(stub.ModelInfer(message))
        assert (given_code.name, words in given_words) == (code, True), given_words
        assert len(given_words) < 400
        if "stream" not in message.parameters:
            (response,) = await responses_to(stub, message)
            assert words in response.error_message
    assert engine.received == []


async def test_tensors_that_are_not_what_they_say() -> None:
    no_value, shared, described, mixed = request(), request(), request(), raw(request())
    no_value.parameters["top_p"].ClearField("double_param")
    shared.inputs[0].parameters["shared_memory_region"].string_param = "x"
    described.inputs[0].parameters["binary_data_size"].int64_param = 7
    mixed.inputs[0].contents.bytes_contents.append(b"x")
    fewer, wrong_field = raw(request(sampling())), request()
    fewer.raw_input_contents.pop()
    wrong_field.inputs[0].contents.int_contents.append(1)
    cut = raw(request())
    cut.raw_input_contents[0] = cut.raw_input_contents[0][:-1]
    output = request(outputs=("text_output",))
    output.outputs[0].parameters["classification"].int64_param = 3
    async with serving(FakeEngine()) as server, stub_of(server) as stub:
        await stub.ModelInfer(described)
        for message, words in (
            (no_value, "'top_p' has no value"),
            (shared, "'shared_memory_region' of input text_input"),
            (mixed, "contents beside raw ones"),
            (fewer, "1 entries for 2 inputs"),
            (wrong_field, "int_contents"),
            (cut, "end inside element 0"),
            (output, "'classification' of output text_output"),
        ):
            code, given = await status_of(stub.ModelInfer(message))
            assert words in given
            assert code.name in ("INVALID_ARGUMENT", "FAILED_PRECONDITION")


class TestStream:
    async def test_deltas_and_the_final_mark(self) -> None:
        engine = FakeEngine()
        async with serving(engine) as server, stub_of(server) as stub:
            asked = request(id="a", stream=True, max_tokens=4, return_finish_reason=True)
            responses = await responses_to(stub, asked)
        assert text_of(responses) == "t0 t1 t2 t3 "
        assert finals_of(responses) == [False] * (len(responses) - 1) + [True]
        reasons = [values_of(r.infer_response)["finish_reason"] for r in responses]
        assert reasons == [[b""]] * (len(responses) - 1) + [[b"length"]]
        assert {r.infer_response.id for r in responses} == {"a"}

    @pytest.mark.parametrize("is_stream", [True, False])
    async def test_an_empty_final_response_when_asked_for(self, is_stream: bool) -> None:
        asked = request(stream=is_stream, max_tokens=2, triton_enable_empty_final_response=True)
        async with serving(FakeEngine()) as server, stub_of(server) as stub:
            responses = await responses_to(stub, asked)
        assert text_of(responses) == "t0 t1 "
        assert finals_of(responses) == [False] * (len(responses) - 1) + [True]
        assert not responses[-1].infer_response.outputs
        assert is_stream or len(responses) == 2

    async def test_first_token_at_once_and_the_rest_merged(self) -> None:
        engine = FakeEngine()
        second = engine.pause_before(1)
        async with (
            serving(engine, stream_interval_ms=FOREVER_MS) as server,
            stub_of(server) as stub,
        ):
            call = stub.ModelStreamInfer(iter([raw(request(stream=True, n=2, max_tokens=4))]))
            responses = aiter(call)
            first = await anext(responses)
            second.released.set()
            rest = [response async for response in responses]
        one = values_of(first.infer_response)["text_output"]
        assert one in ([b"t0 ", b""], [b"t0 ", b"t0 "])
        (last,) = [values_of(r.infer_response)["text_output"] for r in rest]
        assert [a + b for a, b in zip(one, last, strict=True)] == [b"t0 t1 t2 t3 "] * 2

    async def test_requests_are_answered_beside_one_another(self) -> None:
        engine = FakeEngine()
        pause = engine.pause_before(3)
        asked: asyncio.Queue[pb.ModelInferRequest | None] = asyncio.Queue()

        async def requests() -> AsyncIterator[pb.ModelInferRequest]:
            while (message := await asked.get()) is not None:
                yield message

        async with serving(engine) as server, stub_of(server) as stub:
            call = stub.ModelStreamInfer(requests())
            asked.put_nowait(request(id="long", stream=True, max_tokens=4))
            await pause.reached.wait()
            asked.put_nowait(request(id="bad", temperature=9))
            asked.put_nowait(request(id="short", stream=True, max_tokens=2))
            ended: dict[str, str] = {}
            texts: dict[str, str] = {}
            async for response in call:
                its = response.infer_response
                texts[its.id] = texts.get(its.id, "") + text_of([response])
                if its.parameters[FINAL].bool_param:
                    ended[its.id] = response.error_message
                if list(ended) == ["bad", "short"] and not pause.released.is_set():
                    pause.released.set()
                    asked.put_nowait(None)
        assert list(ended) == ["bad", "short", "long"]
        assert "temperature=9" in ended["bad"]
        assert texts == {"long": "t0 t1 t2 t3 ", "bad": "", "short": "t0 t1 "}

    async def test_an_error_after_tokens_ends_the_request_alone(self) -> None:
        engine = FakeEngine()
        engine.failures[2] = GenerationError("the step failed")
        async with serving(engine) as server, stub_of(server) as stub:
            responses = await responses_to(
                stub,
                request(id="a", stream=True, max_tokens=4),
                request(id="b", stream=True, max_tokens=2),
            )
        of_a = [r for r in responses if r.infer_response.id == "a"]
        of_b = [r for r in responses if r.infer_response.id == "b"]
        assert text_of(of_a) == text_of(of_b) == "t0 t1 "
        assert [r.error_message for r in of_a if r.error_message] == ["the step failed"]
        assert finals_of(of_a)[-1] and finals_of(of_b)[-1]

    async def test_what_is_no_error_of_ours_says_nothing_of_the_inside(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        engine = FakeEngine()
        engine.failures[0] = KeyError("secret")
        async with serving(engine) as server, stub_of(server) as stub:
            (response,) = await responses_to(stub, request(stream=True))
        assert "internal error" in response.error_message
        assert "secret" not in response.error_message
        assert any(record.exc_info for record in caplog.records)

    async def test_several_prompts_are_refused(self) -> None:
        async with serving(FakeEngine()) as server, stub_of(server) as stub:
            (response,) = await responses_to(stub, request(tensor("text_input", "a", "b")))
        assert "answers one prompt a request" in response.error_message

    async def test_a_bounded_number_is_under_way(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(kserve_servicer, "MAX_REQUESTS_OF_A_STREAM", 2)
        engine = FakeEngine()
        pause = engine.pause_before(0)
        async with serving(engine) as server, stub_of(server) as stub:
            reading = asyncio.create_task(
                responses_to(stub, *(request(id=str(i), max_tokens=1) for i in range(5)))
            )
            await pause.reached.wait()
            # A call of its own is answered all the same, so the loop has gone round.
            await stub.ServerLive(pb.ServerLiveRequest())
            await stub.ServerLive(pb.ServerLiveRequest())
            assert len(engine.received) <= 2
            pause.released.set()
            assert len(await reading) == 5

    async def test_a_client_that_leaves_ends_its_requests(self) -> None:
        engine = FakeEngine()
        pause = engine.pause_before(1)
        async with serving(engine) as server, stub_of(server) as stub:
            asked = [request(id=name, stream=True) for name in "ab"]
            call = stub.ModelStreamInfer(iter(asked))
            await anext(aiter(call))
            await pause.reached.wait()
            call.cancel()
            await engine.wait_until_idle()

    async def test_a_dead_engine(self) -> None:
        engine = FakeEngine()
        engine.failures[0] = EngineDeadError("dead")
        async with serving(engine) as server, stub_of(server) as stub:
            (response,) = await responses_to(stub, request(stream=True))
        assert response.error_message == "dead"


class TestDrain:
    async def test_running_requests_finish_and_new_ones_are_refused(self) -> None:
        engine = FakeEngine()
        pause = engine.pause_before(1)
        more = asyncio.Event()

        async def requests() -> AsyncIterator[pb.ModelInferRequest]:
            yield request(id="first", stream=True, max_tokens=3)
            await more.wait()
            yield request(id="late", stream=True)

        async with serving(engine) as server, stub_of(server) as stub:
            call = aiter(stub.ModelStreamInfer(requests()))
            responses = [await anext(call)]
            await pause.reached.wait()
            drain = asyncio.create_task(server.drain())
            while (await stub.ServerReady(pb.ServerReadyRequest())).ready:
                await asyncio.sleep(0)
            code, _ = await status_of(stub.ModelInfer(request()))
            assert code is grpc.StatusCode.UNAVAILABLE
            more.set()
            responses.append(await anext(call))
            assert "shutting down" in responses[-1].error_message
            pause.released.set()
            responses += [response async for response in call]
            await drain
        assert text_of([r for r in responses if r.infer_response.id == "first"]) == "t0 t1 t2 "

    async def test_an_idle_stream_does_not_hold_it_up(self) -> None:
        async with serving(FakeEngine()) as server, stub_of(server) as stub:
            call = stub.ModelStreamInfer()
            await call.write(request(max_tokens=1))
            await call.read()
            await server.drain()
            code, _ = await status_of(call.read())
            assert code is grpc.StatusCode.UNAVAILABLE

    async def test_what_takes_too_long_is_ended(self) -> None:
        engine = FakeEngine()
        pause = engine.pause_before(1)
        async with serving(engine, drain_timeout_s=0.0) as server, stub_of(server) as stub:
            reading = asyncio.create_task(responses_to(stub, request(id="a", stream=True)))
            await pause.reached.wait()
            await server.drain()
            responses = await reading
        assert "the server shut down" in responses[-1].error_message


async def test_each_request_is_logged_without_its_text(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="flowkv_jax.rpc")
    async with serving(FakeEngine()) as server, stub_of(server) as stub:
        asked = request(tensor("text_input", "secret words"), max_tokens=2)
        await stub.ModelInfer(asked)
        await responses_to(stub, asked, request(temperature=9))
    lines = [r.getMessage() for r in caplog.records if "status=" in r.getMessage()]
    kinds = sorted((line.split()[0], line.split("status=")[1].split()[0]) for line in lines)
    assert kinds == [
        ("ModelInfer", "OK"),
        ("ModelStreamInfer", "OK"),
        ("ModelStreamInfer.request", "INVALID_ARGUMENT"),
        ("ModelStreamInfer.request", "OK"),
    ]
    assert sum("prompt_tokens=13 completion_tokens=2" in line for line in lines) == 2
    assert "secret" not in caplog.text
