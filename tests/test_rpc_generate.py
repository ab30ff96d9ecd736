"""The service as any gRPC client sees it: a generated stub against a real server on loopback."""

import logging
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_status import _async as rich_status

from flowkv_jax.errors import QueueOverflowError
from flowkv_jax.rpc.flowkv.v1 import flowkv_pb2 as pb
from tests.fake_engine import METRICS, FakeEngine, serving, stub_of

FOREVER_MS = 60_000.0


def generate_request(text: str = "hello", **params: Any) -> pb.GenerateRequest:
    return pb.GenerateRequest(text=text, sampling_params=pb.SamplingParams(**params))


async def read_all(call: Any) -> list[pb.GenerateResponse]:
    responses = []
    while (response := await call.read()) is not grpc.aio.EOF:
        responses.append(response)
    return responses


async def status_of_call(call: Any) -> tuple[grpc.StatusCode, str]:
    """The status a call of either kind ends with; it must not be OK."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await (read_all(call) if hasattr(call, "read") else call)
    return caught.value.code(), caught.value.details()


def text_of(responses: list[pb.GenerateResponse], index: int = 0) -> str:
    return "".join(o.text for r in responses for o in r.outputs if o.index == index)


def ids_of(responses: list[pb.GenerateResponse], index: int = 0) -> list[int]:
    return [i for r in responses for o in r.outputs if o.index == index for i in o.token_ids]


async def test_deltas_prompt_first_usage_last() -> None:
    engine = FakeEngine()
    async with serving(engine) as server, stub_of(server) as stub:
        responses = await read_all(stub.Generate(generate_request("hey", max_tokens=5)))
    assert text_of(responses) == "t0 t1 t2 t3 t4 "
    assert ids_of(responses) == [0, 1, 2, 3, 4]
    assert [r.finished for r in responses] == [False] * (len(responses) - 1) + [True]
    assert list(responses[0].prompt.token_ids) == [1, *map(ord, "hey")]
    assert responses[0].prompt.text == "hey"
    assert not any(r.HasField("prompt") for r in responses[1:])
    assert not any(r.HasField("usage") or r.HasField("metrics") for r in responses[:-1])
    last = responses[-1]
    assert last.usage == pb.Usage(prompt_tokens=4, completion_tokens=5, cached_tokens=1)
    assert last.metrics.first_token_ts == METRICS.first_token_ts
    assert last.outputs[0].finish_reason == pb.FINISH_REASON_LENGTH
    assert {r.request_id for r in responses} == {engine.received[0].request_id}


async def test_token_ids_and_options_reach_the_engine() -> None:
    engine = FakeEngine()
    request = pb.GenerateRequest(
        token_ids=pb.TokenIds(ids=[5, 6]),
        options=pb.RequestOptions(request_id="a", priority=-3, cache_salt="", timeout_s=90.0),
    )
    async with serving(engine) as server, stub_of(server) as stub:
        responses = await read_all(stub.Generate(request))
    (received,) = engine.received
    assert received.prompt == [5, 6]
    assert (received.request_id, received.priority, received.cache_salt) == ("a", -3, "")
    assert received.timeout == 90.0
    assert received.params.max_tokens == 16
    assert list(responses[0].prompt.token_ids) == [5, 6]


async def test_chat_fills_the_context_unless_told_otherwise() -> None:
    engine = FakeEngine()
    turns = [pb.ChatMessage(role="system", content="Be brief."), pb.ChatMessage(role="user")]
    async with serving(engine) as server, stub_of(server) as stub:
        await read_all(stub.Chat(pb.ChatRequest(messages=turns)))
        bounded = pb.SamplingParams(max_tokens=2)
        short = await read_all(stub.Chat(pb.ChatRequest(messages=turns, sampling_params=bounded)))
    messages, _ = engine.rendered[0]
    assert messages == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": ""},
    ]
    assert [r.params.max_tokens for r in engine.received] == [None, 2]
    assert text_of(short) == "t0 t1 "


async def test_first_token_at_once_and_the_rest_merged() -> None:
    engine = FakeEngine()
    second = engine.pause_before(1)
    async with (
        serving(engine, stream_interval_ms=FOREVER_MS) as server,
        stub_of(server) as stub,
    ):
        call = stub.Generate(generate_request(max_tokens=4, n=2, logprobs=0))
        first = await call.read()
        second.released.set()
        rest = await read_all(call)
    assert ids_of([first]) == ids_of([first], index=1) == [0]
    (last,) = rest
    assert [(o.index, o.text, list(o.token_ids)) for o in last.outputs] == [
        (0, "t1 t2 t3 ", [1, 2, 3]),
        (1, "t1 t2 t3 ", [1, 2, 3]),
    ]
    assert [p.entries[0].token_id for p in last.outputs[0].logprobs] == [1, 2, 3]
    assert last.outputs[1].cumulative_logprob == -2.0
    assert last.usage.completion_tokens == 8


async def test_without_streaming_there_is_one_message() -> None:
    engine = FakeEngine()
    request = generate_request(max_tokens=7, stop=["END"])
    request.options.stream = False
    async with serving(engine) as server, stub_of(server) as stub:
        (only,) = await read_all(stub.Generate(request))
    assert ids_of([only]) == list(range(7))
    assert only.finished and only.HasField("prompt") and only.usage.completion_tokens == 7
    assert only.outputs[0].finish_reason == pb.FINISH_REASON_STOP
    assert only.outputs[0].stop_string == "END"


async def test_prompt_logprobs_come_once() -> None:
    async with serving(FakeEngine()) as server, stub_of(server) as stub:
        request = generate_request("ab", max_tokens=3, prompt_logprobs=0)
        responses = await read_all(stub.Generate(request))
    positions = [list(p.entries) for r in responses for p in r.prompt.logprobs]
    assert positions[0] == []
    assert [entries[0].token_id for entries in positions[1:]] == [ord("a"), ord("b")]
    assert not positions[1][0].HasField("decoded_token")


@pytest.mark.parametrize(
    ("field", "zero"),
    [
        ("temperature", 0.0),
        ("top_k", 0),
        ("min_p", 0.0),
        ("seed", 0),
        ("logprobs", 0),
        ("prompt_logprobs", 0),
        ("skip_special_tokens", False),
        ("spaces_between_special_tokens", False),
    ],
)
async def test_zero_is_not_unset(field: str, zero: float) -> None:
    engine = FakeEngine()
    async with serving(engine) as server, stub_of(server) as stub:
        await read_all(stub.Generate(generate_request(**{field: zero})))
        await read_all(stub.Generate(generate_request()))
    set_to_zero, unset = engine.received
    assert getattr(set_to_zero.params, field) == zero
    assert field in set_to_zero.params.given_fields
    assert field not in unset.params.given_fields


@pytest.mark.parametrize(
    ("params", "parameter"),
    [
        ({"top_p": 0.0}, "top_p"),
        ({"repetition_penalty": 0.0}, "repetition_penalty"),
        ({"n": 0}, "n"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"temperature": -1.0}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"stop": [""]}, "stop"),
        ({"allowed_token_ids": pb.TokenIds()}, "allowed_token_ids"),
        ({"max_tokens": 3, "fill_context": True}, "max_tokens"),
        ({"stop_token_ids": [-1]}, "stop_token_ids"),
    ],
)
async def test_bad_values_name_their_parameter(params: dict[str, Any], parameter: str) -> None:
    async with serving(FakeEngine()) as server, stub_of(server) as stub:
        call = stub.Generate(generate_request(**params))
        code, _ = await status_of_call(call)
        status = await rich_status.from_call(call)
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    bad_request = error_details_pb2.BadRequest()
    assert any(detail.Unpack(bad_request) for detail in status.details)
    assert bad_request.field_violations[0].field == parameter


@pytest.mark.parametrize(
    "options",
    [
        {"request_id": "x" * 257},
        {"request_id": "a\nb"},
        {"timeout_s": 0.0},
        {"timeout_s": float("inf")},
    ],
)
async def test_bad_options(options: dict[str, Any]) -> None:
    request = pb.GenerateRequest(text="hi", options=pb.RequestOptions(**options))
    async with serving(FakeEngine()) as server, stub_of(server) as stub:
        code, message = await status_of_call(stub.Generate(request))
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert next(iter(options)) in message


async def test_a_prompt_is_required() -> None:
    async with serving(FakeEngine()) as server, stub_of(server) as stub:
        code, message = await status_of_call(stub.Generate(pb.GenerateRequest()))
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert "prompt" in message


@pytest.mark.parametrize("token", [0, 2])
async def test_cancel_ends_the_request_in_the_engine(token: int) -> None:
    engine = FakeEngine()
    pause = engine.pause_before(token)
    async with serving(engine) as server, stub_of(server) as stub:
        call = stub.Generate(generate_request())
        for _ in range(min(token, 1)):
            await call.read()
        await pause.reached.wait()
        assert len(engine.live) == 1
        call.cancel()
        await engine.wait_until_idle()


async def test_lost_connection_ends_the_request_in_the_engine() -> None:
    engine = FakeEngine()
    pause = engine.pause_before(1)
    async with serving(engine) as server:
        async with stub_of(server) as stub:
            call = stub.Generate(generate_request())
            await call.read()
            await pause.reached.wait()
        await engine.wait_until_idle()


async def test_deadline_of_the_call_reaches_the_engine() -> None:
    engine = FakeEngine()
    engine.pause_before(1)
    async with serving(engine) as server, stub_of(server) as stub:
        code, _ = await status_of_call(stub.Generate(generate_request(), timeout=1.0))
        await engine.wait_until_idle()
    assert code is grpc.StatusCode.DEADLINE_EXCEEDED
    assert engine.received[0].timeout is not None
    assert 0 < engine.received[0].timeout < 2


async def test_timeout_of_the_request() -> None:
    engine = FakeEngine()
    engine.pause_before(1)
    request = generate_request()
    request.options.timeout_s = 0.05
    async with serving(engine) as server, stub_of(server) as stub:
        call = stub.Generate(request, timeout=60)
        assert ids_of([await call.read()]) == [0]
        code, _ = await status_of_call(call)
    assert code is grpc.StatusCode.DEADLINE_EXCEEDED


async def test_abort_ends_a_stream_with_its_reason() -> None:
    engine = FakeEngine()
    pause = engine.pause_before(1)
    request = generate_request()
    request.options.request_id = "victim"
    async with serving(engine) as server, stub_of(server) as stub:
        call = stub.Generate(request)
        await call.read()
        await pause.reached.wait()
        answer = await stub.Abort(pb.AbortRequest(request_ids=["victim", "nobody"]))
        rest = await read_all(call)
        again = await status_of_call(stub.Abort(pb.AbortRequest(request_ids=["victim"])))
    assert answer == pb.AbortResponse(num_aborted=1, unknown_request_ids=["nobody"])
    assert rest[-1].outputs[0].finish_reason == pb.FINISH_REASON_ABORT
    assert again == (grpc.StatusCode.NOT_FOUND, "no live request has the id 'victim'")


async def test_abort_needs_an_id() -> None:
    async with serving(FakeEngine()) as server, stub_of(server) as stub:
        code, _ = await status_of_call(stub.Abort(pb.AbortRequest()))
    assert code is grpc.StatusCode.INVALID_ARGUMENT


async def test_duplicate_id_leaves_the_first_alone() -> None:
    engine = FakeEngine()
    pause = engine.pause_before(1)
    request = generate_request(max_tokens=3)
    request.options.request_id = "twin"
    async with serving(engine) as server, stub_of(server) as stub:
        first = stub.Generate(request)
        begun = await first.read()
        await pause.reached.wait()
        code, _ = await status_of_call(stub.Generate(request))
        pause.released.set()
        rest = await read_all(first)
    assert code is grpc.StatusCode.ALREADY_EXISTS
    assert ids_of([begun, *rest]) == [0, 1, 2]


async def test_oversized_message_is_refused_and_the_server_lives() -> None:
    engine = FakeEngine()
    async with serving(engine, max_message_bytes=4096) as server, stub_of(server) as stub:
        code, _ = await status_of_call(stub.Generate(generate_request("x" * 8192)))
        responses = await read_all(stub.Generate(generate_request(max_tokens=1)))
    assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert text_of(responses) == "t0 "
    assert len(engine.received) == 1


async def test_an_error_in_mid_stream_comes_after_the_tokens_before_it() -> None:
    engine = FakeEngine()
    engine.failures[3] = QueueOverflowError("full", retry_after_s=2.5)
    async with (
        serving(engine, stream_interval_ms=FOREVER_MS) as server,
        stub_of(server) as stub,
    ):
        call = stub.Generate(generate_request(max_tokens=5))
        received = [await call.read()]
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            while True:
                received.append(await call.read())
    assert ids_of(received) == [0, 1, 2]
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_a_bug_says_nothing_of_the_inside(caplog: pytest.LogCaptureFixture) -> None:
    engine = FakeEngine()
    engine.failures[0] = KeyError("secret detail")
    async with serving(engine) as server, stub_of(server) as stub:
        code, message = await status_of_call(stub.Generate(generate_request()))
    assert code is grpc.StatusCode.INTERNAL
    assert "secret" not in message
    assert "secret detail" in caplog.text


async def test_an_answer_that_stops_too_soon_is_an_error() -> None:
    engine = FakeEngine()

    async def nothing(*_: Any, **__: Any) -> Any:
        for output in ():
            yield output

    engine.async_generate = nothing  # type: ignore[method-assign]
    async with serving(engine) as server, stub_of(server) as stub:
        code, _ = await status_of_call(stub.Generate(generate_request()))
    assert code is grpc.StatusCode.INTERNAL


async def test_logs_have_the_id_and_not_the_prompt(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, logger="flowkv_jax")
    request = generate_request("my secret prompt", max_tokens=2)
    request.options.request_id = "r-17"
    bad = generate_request("my secret prompt", max_tokens=2, stop=["secret stop"], n=0)
    async with serving(FakeEngine()) as server, stub_of(server) as stub:
        await read_all(stub.Generate(request))
        await status_of_call(stub.Generate(bad))
    assert "request_id='r-17' status=OK" in caplog.text
    assert "prompt_tokens=17 completion_tokens=2" in caplog.text
    assert "status=INVALID_ARGUMENT" in caplog.text
    assert "secret" not in caplog.text


async def test_unary_methods() -> None:
    async with serving(FakeEngine()) as server, stub_of(server) as stub:
        info = await stub.GetModelInfo(pb.GetModelInfoRequest())
        loads = await stub.GetLoads(pb.GetLoadsRequest())
        with_bos = await stub.Tokenize(pb.TokenizeRequest(text="ab"))
        bare = await stub.Tokenize(pb.TokenizeRequest(text="ab", add_special_tokens=False))
        text = await stub.Detokenize(pb.DetokenizeRequest(token_ids=[1, 97, 98]))
        bad_id = await status_of_call(stub.Detokenize(pb.DetokenizeRequest(token_ids=[1000])))
    assert (info.served_model_name, list(info.eos_token_ids)) == ("fake", [2, 3])
    assert (loads.num_free_blocks, loads.kv_cache_usage) == (75, 0.25)
    assert list(with_bos.token_ids) == [1, 97, 98]
    assert with_bos.max_model_len == 64
    assert list(bare.token_ids) == [97, 98]
    assert text.text == "ab"
    assert bad_id == (grpc.StatusCode.INVALID_ARGUMENT, "token_ids=1000 is not in [0, 1000)")
