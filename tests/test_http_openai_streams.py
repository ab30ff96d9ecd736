"""Streams as they go over the wire, byte for byte but for id's and times."""

import asyncio

import httpx
import pytest

from flowkv_jax.errors import (
    DeadlineExceeded,
    GenerationError,
    QueueOverflowError,
    RetryableRequestError,
    ValidationError,
)
from tests.fake_engine import FakeEngine
from tests.openai_http import client_of, events, joined, transcript

MESSAGES = [{"role": "user", "content": "ab"}]
PATHS = ("/v1/completions", "/v1/chat/completions")


def body_for(path: str, **more: object) -> dict[str, object]:
    asked = {"prompt": "ab"} if path == "/v1/completions" else {"messages": MESSAGES}
    return {**asked, "max_tokens": 3, "request_id": "r", "stream": True, **more}


async def stream_slowly(engine: FakeEngine, client: httpx.AsyncClient, path: str, **more) -> str:
    """The text of a stream, each token of which is given only when the one before has come."""
    pauses = [engine.pause_before(token) for token in range(1, 3)]
    text = ""
    async with client.stream("POST", path, json=body_for(path, **more)) as answer:
        assert answer.status_code == 200
        assert answer.headers["content-type"] == "text/event-stream"
        assert answer.headers["cache-control"] == "no-cache"
        assert answer.headers["x-accel-buffering"] == "no"
        pieces = answer.aiter_text()
        for token, pause in enumerate(pauses):
            while f"t{token} " not in text:
                text += await anext(pieces)
            pause.released.set()
        async for piece in pieces:
            text += piece
    return text


COMPLETION = [
    'data: {"id":"cmpl-r","object":"text_completion","model":"fake","choices":[{"index":0,'
    '"text":"t0 ","logprobs":null,"finish_reason":null}]}',
    'data: {"id":"cmpl-r","object":"text_completion","model":"fake","choices":[{"index":0,'
    '"text":"t1 ","logprobs":null,"finish_reason":null}]}',
    'data: {"id":"cmpl-r","object":"text_completion","model":"fake","choices":[{"index":0,'
    '"text":"t2 ","logprobs":null,"finish_reason":"length","stop_reason":null}]}',
    "data: [DONE]",
]
CHAT = [
    'data: {"id":"chatcmpl-r","object":"chat.completion.chunk","model":"fake","choices":[{'
    '"index":0,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}]}',
    'data: {"id":"chatcmpl-r","object":"chat.completion.chunk","model":"fake","choices":[{'
    '"index":0,"delta":{"content":"t0 "},"logprobs":null,"finish_reason":null}]}',
    'data: {"id":"chatcmpl-r","object":"chat.completion.chunk","model":"fake","choices":[{'
    '"index":0,"delta":{"content":"t1 "},"logprobs":null,"finish_reason":null}]}',
    'data: {"id":"chatcmpl-r","object":"chat.completion.chunk","model":"fake","choices":[{'
    '"index":0,"delta":{"content":"t2 "},"logprobs":null,"finish_reason":"length",'
    '"stop_reason":null}]}',
    "data: [DONE]",
]


def with_usage(lines: list[str], usages: list[str]) -> list[str]:
    """The lines, each with the usage that goes with it."""
    shown = [
        f'{line.removesuffix("}")},"usage":{usage}}}'
        for line, usage in zip(lines[:-1], usages, strict=True)
    ]
    return [*shown, lines[-1]]


def usage(num_completion: int) -> str:
    total = 3 + num_completion
    return f'{{"prompt_tokens":3,"completion_tokens":{num_completion},"total_tokens":{total}}}'


@pytest.mark.parametrize(("path", "lines"), [(PATHS[0], COMPLETION), (PATHS[1], CHAT)])
async def test_plain(path: str, lines: list[str]) -> None:
    engine = FakeEngine()
    async with client_of(engine) as client:
        assert transcript(await stream_slowly(engine, client, path)) == lines


@pytest.mark.parametrize(("path", "lines"), [(PATHS[0], COMPLETION), (PATHS[1], CHAT)])
async def test_usage_chunk(path: str, lines: list[str]) -> None:
    engine = FakeEngine()
    async with client_of(engine) as client:
        text = await stream_slowly(engine, client, path, stream_options={"include_usage": True})
    *chunks, last, done = transcript(text)
    assert [*chunks, done] == with_usage(lines, ["null"] * (len(lines) - 1))
    begin, _, _ = lines[0].partition('"choices"')
    assert last == f'{begin}"choices":[],"usage":{usage(3)}}}'


@pytest.mark.parametrize(
    ("path", "lines", "counts"), [(PATHS[0], COMPLETION, (1, 2, 3)), (PATHS[1], CHAT, (1, 1, 2, 3))]
)
async def test_continuous_usage(path: str, lines: list[str], counts: tuple[int, ...]) -> None:
    engine = FakeEngine()
    options = {"include_usage": True, "continuous_usage_stats": True}
    async with client_of(engine) as client:
        text = await stream_slowly(engine, client, path, stream_options=options)
    *chunks, last, done = transcript(text)
    assert [*chunks, done] == with_usage(lines, [usage(count) for count in counts])
    assert last.endswith(f'"choices":[],"usage":{usage(3)}}}')


async def test_cached_tokens_are_told_only_where_the_server_is_told_to() -> None:
    engine = FakeEngine()
    async with client_of(engine, enable_prompt_tokens_details=True) as client:
        body = body_for(PATHS[0], stream_options={"include_usage": True})
        chunks = events((await client.post(PATHS[0], json=body)).text)
    assert chunks[-1]["usage"]["prompt_tokens_details"] == {"cached_tokens": 1}


async def test_choices_of_several_prompts_and_answers() -> None:
    engine = FakeEngine()
    async with client_of(engine) as client:
        body = body_for(PATHS[0], prompt=["a", "bcd"], n=2, stream_options={"include_usage": True})
        chunks = events((await client.post(PATHS[0], json=body)).text)
    assert [joined(chunks, index) for index in range(4)] == ["t0 t1 t2 "] * 4
    assert sorted(received.prompt for received in engine.received) == ["a", "bcd"]
    assert sorted(received.request_id for received in engine.received) == ["r", "r-1"]
    ends = [
        choice["index"]
        for chunk in chunks
        for choice in chunk["choices"]
        if choice["finish_reason"]
    ]
    assert sorted(ends) == [0, 1, 2, 3]
    assert chunks[-1]["usage"] == {
        "prompt_tokens": 2 + 4,
        "completion_tokens": 12,
        "total_tokens": 18,
    }


async def test_every_choice_of_a_chat_begins_with_its_role() -> None:
    async with client_of(FakeEngine()) as client:
        chunks = events((await client.post(PATHS[1], json=body_for(PATHS[1], n=2))).text)
    roles = [(c["choices"][0]["index"], c["choices"][0]["delta"].get("role")) for c in chunks[:2]]
    assert roles == [(0, "assistant"), (1, "assistant")]
    assert [joined(chunks, index) for index in range(2)] == ["t0 t1 t2 "] * 2


async def test_log_probabilities() -> None:
    engine = FakeEngine()
    async with client_of(engine) as client:
        chat = await stream_slowly(engine, client, PATHS[1], logprobs=True, top_logprobs=1)
        engine.pauses = {}
        text = await stream_slowly(engine, client, PATHS[0], logprobs=1)
    entry = {"token": "t1 ", "logprob": -0.5, "bytes": [116, 49, 32]}
    assert events(chat)[2]["choices"][0]["logprobs"] == {
        "content": [{**entry, "top_logprobs": [entry]}]
    }
    assert events(text)[1]["choices"][0]["logprobs"] == {
        "text_offset": [3],
        "token_logprobs": [-0.5],
        "tokens": ["t1 "],
        "top_logprobs": [{"t1 ": -0.5}],
    }


async def test_token_ids() -> None:
    async with client_of(FakeEngine()) as client:
        more = {"return_token_ids": True, "max_tokens": 1}
        (text,) = events((await client.post(PATHS[0], json=body_for(PATHS[0], **more))).text)
        role, chunk = events((await client.post(PATHS[1], json=body_for(PATHS[1], **more))).text)
    assert text["choices"][0]["token_ids"] == [0]
    assert text["choices"][0]["prompt_token_ids"] == [1, 97, 98]
    assert role["prompt_token_ids"] == [1, 97, 98]
    assert chunk["choices"][0]["token_ids"] == [0]


async def test_tokens_that_wait_share_a_chunk() -> None:
    async with client_of(FakeEngine(), stream_interval_ms=60_000.0) as client:
        body = body_for(PATHS[0], max_tokens=30)
        chunks = events((await client.post(PATHS[0], json=body)).text)
    assert joined(chunks) == "".join(f"t{i} " for i in range(30))
    assert len(chunks) <= 2


@pytest.mark.parametrize("path", PATHS)
async def test_silence_is_filled_with_comments(path: str) -> None:
    engine = FakeEngine()
    pause = engine.pause_before(0)
    text = ""
    async with (
        client_of(engine, sse_keep_alive_s=0.1) as client,
        client.stream("POST", path, json=body_for(path)) as answer,
    ):
        assert answer.status_code == 200
        async for piece in answer.aiter_text():
            text += piece
            if text.count(": keep-alive\n\n") >= 2:
                pause.released.set()
    assert joined(events(text.replace(": keep-alive\n\n", ""))) == "t0 t1 t2 "


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("is_stream", [True, False])
@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (QueueOverflowError("full", retry_after_s=2.5), 429, "rate_limit_exceeded"),
        (RetryableRequestError("no node"), 503, "service_unavailable"),
        (ValidationError("no grammar", parameter="structured_outputs"), 400, None),
        (DeadlineExceeded("late"), 504, "deadline_exceeded"),
        (GenerationError("broken"), 500, "generation_failed"),
    ],
)
async def test_refused_before_the_first_byte(
    path: str, is_stream: bool, error: Exception, status: int, code: str | None
) -> None:
    engine = FakeEngine()
    engine.failures[0] = error
    async with client_of(engine) as client:
        answer = await client.post(path, json=body_for(path, stream=is_stream))
    assert answer.status_code == status
    assert answer.headers["content-type"] == "application/json"
    assert answer.json()["error"]["code"] == code
    assert ("retry-after" in answer.headers) == (status in (429, 503))


@pytest.mark.parametrize("path", PATHS)
async def test_no_part_of_an_answer_that_failed_is_a_whole_answer(path: str) -> None:
    engine = FakeEngine()
    engine.failures[2] = GenerationError("the device is gone")
    async with client_of(engine) as client:
        answer = await client.post(path, json=body_for(path, stream=False))
    assert (answer.status_code, answer.json()["error"]["code"]) == (500, "generation_failed")


@pytest.mark.parametrize("path", PATHS)
async def test_failure_in_a_stream(path: str) -> None:
    engine = FakeEngine()
    engine.failures[2] = GenerationError("the device is gone")
    async with client_of(engine) as client:
        answer = await client.post(path, json=body_for(path, n=2))
    assert answer.status_code == 200
    *chunks, first, second, error = events(answer.text)
    assert joined(chunks, 0) == joined(chunks, 1) == "t0 t1 "
    ends = [chunk["choices"][0] for chunk in (first, second)]
    assert [(end["index"], end["finish_reason"]) for end in ends] == [(0, "error"), (1, "error")]
    assert error["error"]["message"] == "the device is gone"
    assert error["error"]["code"] == "generation_failed"


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("is_stream", [True, False])
@pytest.mark.parametrize("token", [0, 1])
async def test_client_that_leaves_ends_the_request(path: str, is_stream: bool, token: int) -> None:
    engine = FakeEngine()
    pause = engine.pause_before(token)
    async with client_of(engine) as client:
        body = body_for(path, stream=is_stream)
        call = asyncio.create_task(client.post(path, json=body))
        await pause.reached.wait()
        call.cancel()
        await asyncio.wait([call])
        await engine.wait_until_idle()


@pytest.mark.parametrize("path", PATHS)
async def test_a_failure_before_the_first_token_of_a_stream_that_was_kept_alive(path: str) -> None:
    engine = FakeEngine()
    pause = engine.pause_before(0)
    text = ""
    async with (
        client_of(engine, sse_keep_alive_s=0.1) as client,
        client.stream("POST", path, json=body_for(path)) as answer,
    ):
        engine.failures[0] = GenerationError("no node came back")
        pause.released.set()
        async for piece in answer.aiter_text():
            text += piece
    end, error = events(text.replace(": keep-alive\n\n", ""))
    assert end["choices"][0]["finish_reason"] == "error"
    assert error["error"]["code"] == "generation_failed"


async def test_one_prompt_that_fails_ends_the_others() -> None:
    engine = FakeEngine()
    pause = engine.pause_before(0)
    async with client_of(engine) as client:
        body = body_for(PATHS[0], prompt=["a", "b"], request_id="taken")
        first = asyncio.create_task(client.post(PATHS[0], json={**body, "prompt": "a"}))
        await pause.reached.wait()
        answer = await client.post(PATHS[0], json=body)
        assert answer.status_code == 409
        assert list(engine.live) == ["taken"]
        pause.released.set()
        assert (await first).status_code == 200


async def test_an_answer_that_is_aborted_says_so() -> None:
    engine = FakeEngine()
    pause = engine.pause_before(1)
    async with client_of(engine) as client:
        call = asyncio.create_task(client.post(PATHS[1], json=body_for(PATHS[1])))
        await pause.reached.wait()
        assert engine.abort("r") == 1
        chunks = events((await call).text)
    assert chunks[-1]["choices"][0]["finish_reason"] == "abort"


async def test_a_long_answer_outlives_the_time_for_heads() -> None:
    engine = FakeEngine()
    pause = engine.pause_before(0)
    async with client_of(engine, header_timeout_s=0.1) as client:
        call = asyncio.create_task(client.post(PATHS[0], json=body_for(PATHS[0], stream=False)))
        await pause.reached.wait()
        await asyncio.sleep(0.3)
        pause.released.set()
        assert (await call).status_code == 200


async def test_tool_calls_as_they_come() -> None:
    engine = FakeEngine()
    engine.script = [
        "Hm. ",
        "<tool_call>",
        '{"name": "f", "argu',
        'ments": {"a',
        '": 1}}',
        "</tool_call>",
    ]
    pauses = [engine.pause_before(token) for token in range(1, 6)]
    tool = {"type": "function", "function": {"name": "f"}}
    body = body_for(PATHS[1], tools=[tool], max_tokens=20)
    async with client_of(engine, tool_call_parser="hermes") as client:
        call = asyncio.create_task(client.post(PATHS[1], json=body))
        for pause in pauses:
            await pause.reached.wait()
            await asyncio.sleep(0.01)
            pause.released.set()
        chunks = events((await call).text)
    choices = [chunk["choices"][0] for chunk in chunks]
    begun = choices[2]["delta"]["tool_calls"][0]
    assert begun.pop("id").startswith("call_")
    assert [choice["delta"] for choice in choices] == [
        {"role": "assistant", "content": ""},
        {"content": "Hm."},
        {
            "tool_calls": [
                {"index": 0, "type": "function", "function": {"name": "f", "arguments": ""}}
            ]
        },
        {"tool_calls": [{"index": 0, "function": {"arguments": '{"a'}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": '": 1}'}}]},
        {},
    ]
    assert [choice["finish_reason"] for choice in choices] == [None] * 5 + ["tool_calls"]
