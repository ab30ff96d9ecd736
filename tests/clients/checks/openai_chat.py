"""`/v1/chat/completions` and `/v1/models` through the `openai` package."""

from __future__ import annotations

import asyncio
import json
from typing import Any, Literal

import openai
from checklist import (
    num_unfinished,
    require,
    require_equal,
    run_checks,
    surroundings,
    wait_until,
)
from pydantic import BaseModel

MODEL = surroundings.model
CLIENT = openai.OpenAI(
    base_url=f"{surroundings.http}/v1", api_key="not needed", max_retries=0, timeout=120
)
QUESTION: list[dict[str, Any]] = [
    {"role": "user", "content": "What is the capital of France? Answer in one sentence."}
]
GREEDY: dict[str, Any] = {
    "model": MODEL,
    "messages": QUESTION,
    "temperature": 0,
    "max_tokens": 24,
}
WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather in a city.",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "maxLength": 20},
                "unit": {"type": "string", "enum": ["celsius", "fahrenheit"]},
            },
            "required": ["city", "unit"],
            "additionalProperties": False,
        },
    },
}


class Verdict(BaseModel):
    """What a structured answer is parsed into."""

    mood: Literal["good", "bad", "mixed"]
    score: Literal[1, 2, 3, 4, 5]
    is_certain: bool


def check_models() -> None:
    cards = CLIENT.models.list().data
    require_equal([card.id for card in cards], [MODEL], "the list of models")
    card = CLIENT.models.retrieve(MODEL)
    require_equal((card.id, card.object), (MODEL, "model"), "the model's card")
    require(card.created > 0 and card.owned_by, "the card lacks created or owned_by")
    max_model_len = (card.model_extra or {}).get("max_model_len")
    require(isinstance(max_model_len, int), f"max_model_len is {max_model_len!r}")


def check_unknown_model_is_not_found() -> None:
    for call in (
        lambda: CLIENT.models.retrieve("no-such-model"),
        lambda: CLIENT.chat.completions.create(**{**GREEDY, "model": "no-such-model"}),
    ):
        try:
            call()
        except openai.NotFoundError as error:
            require_equal(error.code, "model_not_found", "the error's code")
            require("no-such-model" in error.message, f"the message names no model: {error}")
        else:
            require(False, "an unknown model was served")


def check_answer_is_whole_and_the_same_twice() -> None:
    answer = CLIENT.chat.completions.create(**GREEDY)
    again = CLIENT.chat.completions.create(**GREEDY)
    (choice,) = answer.choices
    require_equal(answer.object, "chat.completion", "object")
    require_equal(answer.model, MODEL, "model")
    require_equal(choice.message.role, "assistant", "role")
    require("Paris" in (choice.message.content or ""), f"answer: {choice.message.content!r}")
    require(choice.finish_reason in ("stop", "length"), f"finished by {choice.finish_reason!r}")
    require_equal(again.choices[0].message.content, choice.message.content, "the second answer")
    require(answer.id != again.id, "two answers have one id")
    usage = answer.usage
    require(usage and usage.prompt_tokens > 5 and usage.completion_tokens > 3, f"usage: {usage}")
    require_equal(
        usage.total_tokens, usage.prompt_tokens + usage.completion_tokens, "usage.total_tokens"
    )


def check_stream_is_the_answer_in_pieces() -> None:
    whole = CLIENT.chat.completions.create(**GREEDY)
    chunks = list(CLIENT.chat.completions.create(**GREEDY, stream=True))
    require_equal({chunk.object for chunk in chunks}, {"chat.completion.chunk"}, "object")
    require_equal(len({chunk.id for chunk in chunks}), 1, "the number of ids in a stream")
    first = chunks[0].choices[0].delta
    require_equal((first.role, first.content), ("assistant", ""), "the first chunk's delta")
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    require_equal(text, whole.choices[0].message.content, "the streamed text")
    reasons = [chunk.choices[0].finish_reason for chunk in chunks]
    require_equal(reasons[-1], whole.choices[0].finish_reason, "the last finish_reason")
    require(not any(reasons[:-1]), f"finish_reason before the end: {reasons}")
    require(all(chunk.usage is None for chunk in chunks), "usage was sent unasked")


def check_usage_chunk() -> None:
    whole = CLIENT.chat.completions.create(**GREEDY)
    chunks = list(
        CLIENT.chat.completions.create(
            **GREEDY, stream=True, stream_options={"include_usage": True}
        )
    )
    require_equal(chunks[-1].choices, [], "the last chunk's choices")
    require_equal(
        chunks[-1].usage.completion_tokens, whole.usage.completion_tokens, "completion_tokens"
    )
    require_equal(chunks[-1].usage.prompt_tokens, whole.usage.prompt_tokens, "prompt_tokens")
    require(all(chunk.usage is None for chunk in chunks[:-1]), "usage before the last chunk")
    require(chunks[-2].choices[0].finish_reason, "no finish_reason before the usage chunk")


def check_continuous_usage() -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = list(CLIENT.chat.completions.create(**GREEDY, stream=True, stream_options=options))
    require(all(chunk.usage is not None for chunk in chunks), "a chunk without usage")
    counts = [chunk.usage.completion_tokens for chunk in chunks]
    require_equal(counts, sorted(counts), "completion_tokens over the stream")
    require(counts[-1] > 0, "no tokens were counted")


def check_cached_tokens_are_told() -> None:
    long = [{"role": "user", "content": "Say yes. " * 60}]
    usages = [
        CLIENT.chat.completions.create(**{**GREEDY, "messages": long, "max_tokens": 2}).usage
        for _ in range(2)
    ]
    details = usages[1].prompt_tokens_details
    require(details and details.cached_tokens, f"the second time nothing was cached: {details}")


def check_content_parts_and_roles() -> None:
    plain = CLIENT.chat.completions.create(**GREEDY)
    text = QUESTION[0]["content"]
    parts = [{"type": "text", "text": text[:10]}, {"type": "text", "text": text[10:]}]
    for pieces in ([{"type": "text", "text": text}], parts):
        turn = {"role": "user", "content": pieces}
        answer = CLIENT.chat.completions.create(**{**GREEDY, "messages": [turn]})
        require(answer.choices[0].message.content, f"no answer to {len(pieces)} parts")
    with_system = [{"role": "system", "content": "You are terse."}, *QUESTION]
    other = CLIENT.chat.completions.create(**{**GREEDY, "messages": with_system})
    require(other.usage.prompt_tokens != plain.usage.prompt_tokens, "the system turn was lost")
    turns = [
        *with_system,
        {"role": "assistant", "content": "Paris."},
        {"role": "user", "content": "And of Italy?"},
    ]
    CLIENT.chat.completions.create(**{**GREEDY, "messages": turns})


def check_logprobs() -> None:
    answer = CLIENT.chat.completions.create(**GREEDY, logprobs=True, top_logprobs=3)
    (choice,) = answer.choices
    tokens = choice.logprobs.content
    require_equal(len(tokens), answer.usage.completion_tokens, "tokens with logprobs")
    text = b"".join(bytes(token.bytes or ()) for token in tokens).decode()
    require(text.startswith(choice.message.content), f"the tokens' bytes spell {text!r}")
    for token in tokens:
        require(token.logprob <= 0, f"logprob {token.logprob}")
        require_equal(len(token.top_logprobs), 3, "top_logprobs")
        require_equal(token.top_logprobs[0].token, token.token, "the most likely token")
    chunks = CLIENT.chat.completions.create(**GREEDY, logprobs=True, top_logprobs=3, stream=True)
    streamed = [
        (token.token, round(token.logprob, 2))
        for chunk in chunks
        if chunk.choices[0].logprobs
        for token in chunk.choices[0].logprobs.content or ()
    ]
    require_equal(
        streamed, [(token.token, round(token.logprob, 2)) for token in tokens], "streamed logprobs"
    )


def check_several_answers() -> None:
    sampled: dict[str, Any] = {**GREEDY, "temperature": 1.0, "seed": 7, "n": 3}
    answer = CLIENT.chat.completions.create(**sampled)
    require_equal([choice.index for choice in answer.choices], [0, 1, 2], "indexes")
    texts = [choice.message.content for choice in answer.choices]
    require(len(set(texts)) > 1, f"three samples are one text: {texts}")
    pieces = ["", "", ""]
    reasons: list[str | None] = [None] * 3
    for chunk in CLIENT.chat.completions.create(**sampled, stream=True):
        for choice in chunk.choices:
            pieces[choice.index] += choice.delta.content or ""
            reasons[choice.index] = choice.finish_reason or reasons[choice.index]
    require_equal(pieces, texts, "the same seed's streamed texts")
    require(all(reasons), f"finish reasons: {reasons}")


def check_stop_and_length() -> None:
    plain = CLIENT.chat.completions.create(**GREEDY).choices[0].message.content
    stopped = CLIENT.chat.completions.create(**GREEDY, stop=["Paris"]).choices[0]
    require_equal(stopped.finish_reason, "stop", "finish_reason at a stop string")
    require_equal(stopped.message.content, plain.split("Paris")[0], "the text before the stop")
    require_equal(stopped.model_extra.get("stop_reason"), "Paris", "stop_reason")
    cut = CLIENT.chat.completions.create(**{**GREEDY, "max_tokens": 3})
    require_equal(cut.choices[0].finish_reason, "length", "finish_reason at the limit")
    require_equal(cut.usage.completion_tokens, 3, "completion_tokens")
    both = CLIENT.chat.completions.create(**{**GREEDY, "max_tokens": 9}, max_completion_tokens=4)
    require_equal(both.usage.completion_tokens, 4, "tokens with max_completion_tokens")


def check_extra_fields() -> None:
    plain = CLIENT.chat.completions.create(**GREEDY).choices[0].message.content
    hot: dict[str, Any] = {**GREEDY, "temperature": 1.5}
    for extra in ({"top_k": 1}, {"min_p": 1.0}):
        text = CLIENT.chat.completions.create(**hot, extra_body=extra).choices[0].message.content
        require_equal(text, plain, f"with {extra}, which leaves one token, the text")
    more = {"ignore_eos": True, "repetition_penalty": 1.1, "min_tokens": 5, "priority": 1}
    answer = CLIENT.chat.completions.create(
        **{**GREEDY, "max_tokens": 60}, extra_body={**more, "cache_salt": "mine"}
    )
    require_equal(answer.usage.completion_tokens, 60, "tokens with ignore_eos")
    biased = CLIENT.chat.completions.create(
        **{**GREEDY, "max_tokens": 4}, logit_bias={"33": 100}, extra_body={"ignore_eos": True}
    )
    require_equal(len(set(biased.choices[0].message.content)), 1, "tokens under a bias of 100")


def check_unknown_constraint_fields_are_refused() -> None:
    for extra in ({"guided_json": {"type": "object"}}, {"guided_regex": "a+"}):
        try:
            CLIENT.chat.completions.create(**GREEDY, extra_body=extra)
        except openai.BadRequestError:
            continue
        require(False, f"{extra} was ignored")


def check_bad_requests_name_their_parameter() -> None:
    for parameter, value in (
        ("temperature", -1),
        ("temperature", "hot"),
        ("top_p", 2),
        ("n", 0),
        ("max_tokens", -5),
        ("messages", []),
        ("messages", "hi"),
        ("top_logprobs", 3),
        ("logit_bias", {"x": 1}),
        ("stop", [""] * 9),
        ("stream_options", {"include_usage": True}),
    ):
        try:
            CLIENT.chat.completions.create(**{**GREEDY, parameter: value})
        except openai.BadRequestError as error:
            require_equal(error.type, "invalid_request_error", f"type for {parameter}={value!r}")
            require(error.message, f"no message for {parameter}={value!r}")
            require(
                str(error.param or "").startswith(parameter),
                f"param is {error.param!r} for {parameter}={value!r}",
            )
        else:
            require(False, f"{parameter}={value!r} was accepted")


def check_too_long_a_conversation() -> None:
    turns = [{"role": "user", "content": "word " * 20_000}]
    try:
        CLIENT.chat.completions.create(**{**GREEDY, "messages": turns})
    except openai.BadRequestError as error:
        require_equal(error.code, "context_length_exceeded", "the error's code")
        require(len(str(error)) < 2000, f"an error of {len(str(error))} characters")
    else:
        require(False, "20,000 words were accepted")


def check_request_id_is_echoed() -> None:
    raw = CLIENT.chat.completions.with_raw_response.create(
        **GREEDY, extra_headers={"X-Request-Id": "mine-17"}
    )
    require_equal(raw.headers.get("x-request-id"), "mine-17", "X-Request-Id")
    unnamed = CLIENT.chat.completions.with_raw_response.create(**GREEDY)
    require(unnamed.headers.get("x-request-id"), "no X-Request-Id unless one is sent")


def check_headers_of_a_stream() -> None:
    with CLIENT.chat.completions.with_streaming_response.create(**GREEDY, stream=True) as raw:
        headers = raw.headers
        require(headers["content-type"].startswith("text/event-stream"), f"{headers}")
        require_equal(headers.get("cache-control"), "no-cache", "Cache-Control")
        require_equal(headers.get("x-accel-buffering"), "no", "X-Accel-Buffering")
        lines = [line for line in raw.iter_lines() if line]
    require_equal(lines[-1], "data: [DONE]", "the last line")


def check_answer_in_a_schema() -> None:
    question = [{"role": "user", "content": "Review: 'I loved it.' Give mood, score, certainty."}]
    parsed = CLIENT.chat.completions.parse(
        model=MODEL, messages=question, max_tokens=100, response_format=Verdict, seed=1
    )
    require(isinstance(parsed.choices[0].message.parsed, Verdict), f"{parsed.choices[0]}")
    with CLIENT.chat.completions.stream(
        model=MODEL, messages=question, max_tokens=100, response_format=Verdict, seed=2
    ) as stream:
        final = stream.get_final_completion()
    require(isinstance(final.choices[0].message.parsed, Verdict), f"streamed: {final.choices[0]}")


def check_answer_as_a_json_object() -> None:
    answer = CLIENT.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "Give a JSON object with the key a. Be short."}],
        response_format={"type": "json_object"},
        max_tokens=400,
        temperature=0,
    )
    (choice,) = answer.choices
    require(choice.message.content.startswith("{"), f"answer: {choice.message.content[:80]!r}")
    if choice.finish_reason == "stop":
        require(isinstance(json.loads(choice.message.content), dict), "the answer is no object")


def check_bad_schema_is_refused() -> None:
    broken = {"name": "x", "schema": {"type": "strnig"}, "strict": True}
    try:
        CLIENT.chat.completions.create(
            **GREEDY, response_format={"type": "json_schema", "json_schema": broken}
        )
    except openai.BadRequestError as error:
        require(len(str(error)) < 2000, f"an error of {len(str(error))} characters")
    else:
        require(False, "a schema with an unknown type was accepted")


def check_named_tool_is_called() -> None:
    question = [{"role": "user", "content": "What is the weather in Paris, in celsius?"}]
    for choice in ({"type": "function", "function": {"name": "get_weather"}}, "required"):
        answer = CLIENT.chat.completions.create(
            model=MODEL,
            messages=question,
            tools=[WEATHER],
            tool_choice=choice,
            max_tokens=120,
            temperature=0,
        )
        message = answer.choices[0].message
        require(message.tool_calls, f"tool_choice={choice!r}: no call, but {message.content!r}")
        _require_weather_call(message.tool_calls[0].function, message.tool_calls[0].id)
        if choice == "required":
            require_equal(answer.choices[0].finish_reason, "tool_calls", "finish_reason")


def check_tool_call_streams() -> None:
    name, arguments, call_id, reasons = "", "", "", []
    for chunk in CLIENT.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "What is the weather in Paris, in celsius?"}],
        tools=[WEATHER],
        tool_choice="required",
        parallel_tool_calls=False,
        max_tokens=120,
        temperature=0,
        stream=True,
    ):
        reasons.append(chunk.choices[0].finish_reason)
        for call in chunk.choices[0].delta.tool_calls or ():
            require_equal(call.index, 0, "the call's index")
            call_id = call_id or call.id or ""
            name += call.function.name or ""
            arguments += call.function.arguments or ""
    require_equal(reasons[-1], "tool_calls", "the last finish_reason")
    require_equal(name, "get_weather", "the name over all chunks")
    require(call_id, "the call has no id")
    require_equal(set(json.loads(arguments)), {"city", "unit"}, "the arguments' names")


def check_tools_and_their_results_in_a_conversation() -> None:
    call = {
        "id": "call_1",
        "type": "function",
        "function": {"name": "get_weather", "arguments": '{"city": "Paris", "unit": "celsius"}'},
    }
    turns = [
        {"role": "user", "content": "Weather in Paris?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "18 degrees, sunny"},
    ]
    for choice in ("auto", "none"):
        answer = CLIENT.chat.completions.create(
            model=MODEL, messages=turns, tools=[WEATHER], tool_choice=choice, max_tokens=30
        )
        require(answer.choices[0].message, f"no answer with tool_choice={choice!r}")
        if choice == "none":
            require(not answer.choices[0].message.tool_calls, "a call in spite of none")


def check_client_that_leaves_frees_its_request() -> None:
    long: dict[str, Any] = {**GREEDY, "max_tokens": 1500}
    stream = CLIENT.chat.completions.create(**long, stream=True, extra_body={"ignore_eos": True})
    for _, _ in zip(range(3), stream, strict=False):
        pass
    wait_until(lambda: num_unfinished(surroundings.http) > 0, "/v1/loads shows the request", 5)
    stream.close()
    wait_until(lambda: num_unfinished(surroundings.http) == 0, "the request is gone", 10)


def check_waiting_client_that_leaves_frees_its_request() -> None:
    impatient = CLIENT.with_options(timeout=1.0)
    try:
        impatient.chat.completions.create(
            **{**GREEDY, "max_tokens": 1500}, extra_body={"ignore_eos": True}
        )
    except openai.APITimeoutError:
        pass
    else:
        require(False, "1,500 tokens came within a second")
    wait_until(lambda: num_unfinished(surroundings.http) == 0, "the request is gone", 10)


def check_many_at_once() -> None:
    async def ask(client: openai.AsyncOpenAI, number: int) -> int:
        stream = await client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": f"Tell of the number {number}."}],
            max_tokens=16,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"ignore_eos": True},
        )
        usage = None
        async for chunk in stream:
            usage = chunk.usage or usage
        return usage.completion_tokens if usage else -1

    async def ask_all() -> list[int]:
        async with openai.AsyncOpenAI(
            base_url=f"{surroundings.http}/v1", api_key="none", max_retries=0, timeout=120
        ) as client:
            return await asyncio.gather(*(ask(client, number) for number in range(24)))

    require_equal(asyncio.run(ask_all()), [16] * 24, "tokens of 24 requests at once")


def _require_weather_call(function: Any, call_id: str) -> None:
    require_equal(function.name, "get_weather", "the called function")
    require(call_id, "the call has no id")
    arguments = json.loads(function.arguments)
    require_equal(set(arguments), {"city", "unit"}, "the arguments' names")
    require(arguments["unit"] in ("celsius", "fahrenheit"), f"arguments: {arguments}")


if __name__ == "__main__":
    run_checks(__name__)
