"""The `openai` package against the HTTP front door of a fake engine.

`make test-clients` does more of this, and with other clients, against a real model.
"""

import contextlib
from collections.abc import AsyncIterator
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel

from flowkv_jax.errors import EngineDeadError, GenerationError, QueueOverflowError
from tests.fake_engine import FakeEngine
from tests.http_wire import answering

CHAT: dict[str, Any] = {
    "model": "fake",
    "messages": [{"role": "user", "content": "ab"}],
    "max_tokens": 3,
}


class Verdict(BaseModel):
    mood: Literal["good", "bad"]
    score: int


@contextlib.asynccontextmanager
async def client_of(
    engine: FakeEngine, *, api_key: str = "none", max_retries: int = 0, **settings: Any
) -> AsyncIterator[openai.AsyncOpenAI]:
    """A client of a server of this engine, which must hold nothing afterwards."""
    async with (
        answering(engine=engine, **{"stream_interval_ms": 0.0, **settings}) as url,
        openai.AsyncOpenAI(
            base_url=f"{url}/v1", api_key=api_key, max_retries=max_retries, timeout=20
        ) as client,
    ):
        yield client
        await engine.wait_until_idle()


async def test_models() -> None:
    async with client_of(FakeEngine()) as client:
        assert [card.id async for card in client.models.list()] == ["fake"]
        card = await client.models.retrieve("fake")
        assert card.object == "model"
        assert card.model_extra is not None and card.model_extra["max_model_len"] == 64
        with pytest.raises(openai.NotFoundError) as raised:
            await client.models.retrieve("other")
        assert raised.value.code == "model_not_found"


async def test_chat_whole_and_streamed() -> None:
    async with client_of(FakeEngine()) as client:
        whole = await client.chat.completions.create(**CHAT)
        assert whole.choices[0].message.content == "t0 t1 t2 "
        assert whole.choices[0].finish_reason == "length"
        assert whole.usage is not None
        assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (3, 3)
        stream = await client.chat.completions.create(
            **CHAT, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
    assert chunks[0].choices[0].delta.role == "assistant"
    texts = [choice.delta.content or "" for chunk in chunks for choice in chunk.choices]
    assert "".join(texts) == "t0 t1 t2 "
    assert chunks[-1].choices == [] and chunks[-1].usage == whole.usage


async def test_completions_of_several_prompts_and_samples() -> None:
    async with client_of(FakeEngine()) as client:
        whole = await client.completions.create(
            model="fake", prompt=["a", "b"], n=2, max_tokens=2, logprobs=1
        )
        assert [choice.index for choice in whole.choices] == [0, 1, 2, 3]
        assert {choice.text for choice in whole.choices} == {"t0 t1 "}
        assert whole.choices[3].logprobs is not None
        assert whole.choices[3].logprobs.token_logprobs == [-0.5, -0.5]
        scored = await client.completions.create(
            model="fake", prompt=[[97, 98]], echo=True, max_tokens=1, logprobs=0
        )
        assert scored.choices[0].logprobs is not None
        assert scored.choices[0].logprobs.token_logprobs == [None, -1.0, -0.5]


async def test_structured_answer_is_parsed() -> None:
    engine = FakeEngine()
    engine.script = ['{"mood": "good", ', '"score": 4}']
    async with client_of(engine) as client:
        answer = await client.chat.completions.parse(
            **{**CHAT, "max_tokens": 20}, response_format=Verdict
        )
    assert answer.choices[0].message.parsed == Verdict(mood="good", score=4)
    asked = engine.received[0].params.structured_outputs
    assert asked is not None and asked.json is not None


@pytest.mark.parametrize("is_stream", [False, True])
async def test_tool_call(is_stream: bool) -> None:
    engine = FakeEngine()
    engine.script = ['[{"name": "add", "argu', 'ments": {"a": 1', "}}]"]
    parameters = {"type": "object", "properties": {"a": {"type": "integer"}}}
    tool = {"type": "function", "function": {"name": "add", "parameters": parameters}}
    asked: dict[str, Any] = {**CHAT, "max_tokens": 20, "tools": [tool], "tool_choice": "required"}
    async with client_of(engine) as client:
        if is_stream:
            async with client.chat.completions.stream(**asked) as stream:
                answer: Any = await stream.get_final_completion()
        else:
            answer = await client.chat.completions.create(**asked)
    assert answer.choices[0].finish_reason == "tool_calls"
    (call,) = answer.choices[0].message.tool_calls
    assert (call.function.name, call.function.arguments) == ("add", '{"a": 1}')


@pytest.mark.parametrize(
    ("failure", "error_type", "status"),
    [
        (QueueOverflowError("full"), openai.RateLimitError, 429),
        (EngineDeadError("dead"), openai.InternalServerError, 503),
        (GenerationError("lost"), openai.InternalServerError, 500),
    ],
)
@pytest.mark.parametrize("is_stream", [False, True])
async def test_errors_before_the_first_byte(
    failure: Exception, error_type: type[openai.APIStatusError], status: int, is_stream: bool
) -> None:
    engine = FakeEngine()
    engine.failures[0] = failure
    async with client_of(engine) as client:
        with pytest.raises(error_type) as raised:
            await client.chat.completions.create(**CHAT, stream=is_stream)
    assert raised.value.status_code == status
    assert ("retry-after" in raised.value.response.headers) == (status in (429, 503))


async def test_a_refused_request_is_sent_again_and_served() -> None:
    engine = FakeEngine()
    engine.failures[0] = QueueOverflowError("full")
    statuses: list[int] = []

    async def after(response: Any) -> None:
        statuses.append(response.status_code)
        engine.failures.clear()

    async with (
        client_of(engine) as refused,
        openai.DefaultAsyncHttpxClient(event_hooks={"response": [after]}) as watched,
    ):
        client = refused.with_options(max_retries=2, http_client=watched)
        answer = await client.chat.completions.create(**CHAT)
    assert answer.choices[0].message.content == "t0 t1 t2 "
    assert statuses == [429, 200]


async def test_a_stream_that_fails_midway_raises() -> None:
    engine = FakeEngine()
    engine.failures[2] = GenerationError("lost")
    texts = []
    async with client_of(engine) as client:
        stream = await client.chat.completions.create(**CHAT, stream=True)
        with pytest.raises(openai.APIError, match="lost"):
            async for chunk in stream:
                texts += [choice.delta.content for choice in chunk.choices]
    assert "".join(text or "" for text in texts) == "t0 t1 "


@pytest.mark.parametrize(
    "change",
    [{"temperature": -1}, {"n": "two"}, {"messages": []}, {"extra_body": {"guided_json": {}}}],
    ids=str,
)
async def test_bad_requests(change: dict[str, Any]) -> None:
    async with client_of(FakeEngine()) as client:
        with pytest.raises(openai.BadRequestError) as raised:
            await client.chat.completions.create(**{**CHAT, **change})
    assert raised.value.type == "invalid_request_error"
    (name,) = change.get("extra_body", change)
    assert raised.value.param == name


async def test_keys() -> None:
    async with answering(keys=["right"]) as url:
        for key, is_right in (("right", True), ("wrong", False)):
            async with openai.AsyncOpenAI(
                base_url=f"{url}/v1", api_key=key, max_retries=0
            ) as client:
                if is_right:
                    await client.models.retrieve("fake")
                else:
                    with pytest.raises(openai.AuthenticationError) as raised:
                        await client.models.retrieve("fake")
                    assert raised.value.code == "invalid_api_key"


async def test_request_id_and_extra_fields() -> None:
    engine = FakeEngine()
    async with client_of(engine) as client:
        answer = await client.chat.completions.with_raw_response.create(
            **CHAT,
            extra_headers={"X-Request-Id": "mine"},
            extra_body={"top_k": 4, "min_p": 0.1, "ignore_eos": True, "priority": 3},
        )
    assert answer.headers["x-request-id"] == "mine"
    (received,) = engine.received
    assert (received.params.top_k, received.params.min_p) == (4, 0.1)
    assert received.params.ignore_eos and received.priority == 3


async def test_a_client_that_leaves_ends_its_request() -> None:
    engine = FakeEngine()
    engine.pause_before(2)
    async with client_of(engine) as client:
        stream = await client.chat.completions.create(**CHAT, stream=True)
        text = ""
        async for chunk in stream:
            text += chunk.choices[0].delta.content or ""
            if text == "t0 t1 ":
                break
        await stream.close()
        await engine.wait_until_idle()
