"""What OpenAI's endpoints take, what they refuse, and what the engine is asked."""

import json
from typing import Any

import jsonschema
import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flowkv_jax.engine.prompts import check_rendered
from flowkv_jax.errors import ContextLengthError, FlowKVError
from flowkv_jax.http.openai.conversation import messages_of, template_variables
from flowkv_jax.http.openai.fields import FieldJudge
from flowkv_jax.http.openai.prompts import prompts_of
from flowkv_jax.http.openai.requests import ChatCompletionRequest, CompletionRequest
from flowkv_jax.http.openai.sampling import chat_params, completion_params
from flowkv_jax.http.openai.tools.calling import tool_use_of
from flowkv_jax.sampling_params import SamplingParams
from flowkv_jax.structured_outputs import StructuredOutputs
from tests.fake_engine import FakeEngine, FakeTokenizer
from tests.openai_http import FINGERPRINT, ask, chat, client_of, complete, refused

COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "ab"}]


async def params_for(path: str, **body: Any) -> SamplingParams:
    """What the engine is asked for a request that is accepted."""
    engine = FakeEngine()
    async with client_of(engine) as client:
        given = {"prompt": "ab"} if path == COMPLETIONS else {"messages": MESSAGES}
        await ask(client, path, **given, **body)
    return engine.received[-1].params


# Whole answers


async def test_completion() -> None:
    async with client_of(FakeEngine()) as client:
        answer = await complete(client, max_tokens=2, request_id="r", user="somebody")
    assert answer.pop("created") > 0
    assert answer == {
        "id": "cmpl-r",
        "object": "text_completion",
        "model": "fake",
        "system_fingerprint": FINGERPRINT,
        "choices": [
            {
                "index": 0,
                "text": "t0 t1 ",
                "logprobs": None,
                "finish_reason": "length",
                "stop_reason": None,
            }
        ],
        "usage": {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5},
    }


async def test_chat() -> None:
    async with client_of(FakeEngine()) as client:
        answer = await chat(client, max_completion_tokens=2, max_tokens=9, stop=["x"])
    assert answer["object"] == "chat.completion"
    assert answer["id"].startswith("chatcmpl-")
    assert answer["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "t0 t1 ", "refusal": None},
            "logprobs": None,
            "finish_reason": "stop",
            "stop_reason": "x",
        }
    ]


async def test_prompts_in_every_form_are_answered_in_order() -> None:
    engine = FakeEngine()
    async with client_of(engine) as client:
        for prompt, asked, lengths in (
            ("ab", ["ab"], 3),
            ([5, 6], [[5, 6]], 2),
            (["a", "bc"], ["a", "bc"], 5),
            ([[5, 6], [7]], [[5, 6], [7]], 3),
        ):
            engine.received.clear()
            answer = await complete(client, prompt=prompt, n=2, max_tokens=1)
            assert [received.prompt for received in engine.received] == asked
            assert [c["index"] for c in answer["choices"]] == list(range(2 * len(asked)))
            assert answer["usage"]["prompt_tokens"] == lengths


async def test_echo_scores_the_prompt_first() -> None:
    engine = FakeEngine()
    async with client_of(engine) as client:
        for max_tokens, text, tokens in ((1, "abt0 ", ["t0 "]), (0, "ab", [])):
            (choice,) = (await complete(client, echo=True, logprobs=0, max_tokens=max_tokens))[
                "choices"
            ]
            assert choice["text"] == text
            logprobs = choice["logprobs"]
            assert logprobs["tokens"] == ["\x01", "token_id:97", "token_id:98", *tokens]
            assert logprobs["token_logprobs"] == [None, -1.0, -1.0, *[-0.5] * max_tokens]
            assert logprobs["top_logprobs"][:2] == [None, {"token_id:97": -1.0}]
            assert logprobs["text_offset"][:2] == [0, 1]
            assert len(logprobs["text_offset"]) == len(logprobs["tokens"])
        answer = await complete(client, echo=True, max_tokens=0)
    assert answer["usage"] == {"prompt_tokens": 3, "completion_tokens": 0, "total_tokens": 3}
    assert answer["choices"][0]["finish_reason"] == "length"


async def test_tokens_as_ids() -> None:
    async with client_of(FakeEngine()) as client:
        more = {"max_tokens": 1, "return_tokens_as_token_ids": True, "return_token_ids": True}
        text = (await complete(client, logprobs=1, **more))["choices"][0]
        answer = await chat(client, logprobs=True, top_logprobs=1, **more)
    assert text["logprobs"]["tokens"] == ["token_id:0"]
    assert text["logprobs"]["top_logprobs"] == [{"token_id:0": -0.5}]
    assert (text["token_ids"], text["prompt_token_ids"]) == ([0], [1, 97, 98])
    assert answer["choices"][0]["logprobs"]["content"][0]["token"] == "token_id:0"
    assert (answer["choices"][0]["token_ids"], answer["prompt_token_ids"]) == ([0], [1, 97, 98])


async def test_prompt_logprobs() -> None:
    async with client_of(FakeEngine()) as client:
        text = await complete(client, prompt_logprobs=0)
        answer = await chat(client, prompt_logprobs=0)
    entry = {"97": {"logprob": -1.0, "rank": 2, "decoded_token": None}}
    assert text["choices"][0]["prompt_logprobs"][:2] == [None, entry]
    assert answer["prompt_logprobs"][:2] == [None, entry]


async def test_hand_off_parameters_go_in_and_come_back() -> None:
    engine = FakeEngine()
    engine.kv_answer = {"remote_block_ids": [3]}
    async with client_of(engine) as client:
        answer = await complete(client, kv_transfer_params={"do_remote_decode": True})
    assert engine.received[0].kv_transfer_params == {"do_remote_decode": True}
    assert answer["kv_transfer_params"] == {"remote_block_ids": [3]}


# Parameters


async def test_parameters_reach_the_engine() -> None:
    given: dict[str, Any] = {
        "n": 2,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 7,
        "min_p": 0.1,
        "presence_penalty": 1,
        "frequency_penalty": -1.5,
        "repetition_penalty": 1.2,
        "allowed_token_ids": [1, 2],
        "bad_words": ["x"],
        "seed": -5,
        "stop": "q",
        "stop_token_ids": [9],
        "include_stop_str_in_output": True,
        "ignore_eos": True,
        "min_tokens": 1,
        "max_tokens": 3,
        "skip_special_tokens": False,
        "truncate_prompt_tokens": 4,
    }
    for path in (COMPLETIONS, CHATS):
        params = await params_for(path, **given, logit_bias={"5": -100})
        assert {name: getattr(params, name) for name in given} == given
        assert params.bias == {5: -100.0}


async def test_bounds_of_answers() -> None:
    assert (await params_for(COMPLETIONS)).max_tokens == 16
    assert (await params_for(COMPLETIONS, max_tokens=None)).max_tokens == 16
    assert (await params_for(CHATS)).max_tokens is None
    assert (await params_for(CHATS, max_tokens=5, max_completion_tokens=4)).max_tokens == 4


async def test_nothing_counts_as_given_that_was_not() -> None:
    """The model's recommendations fill what a request leaves open; null leaves it open."""
    params = await params_for(CHATS, temperature=None, top_p=None, stop=None, logprobs=None)
    assert params.given_fields == {"max_tokens", "output_kind"}


async def test_priority_salt_and_names() -> None:
    engine = FakeEngine()
    async with client_of(engine) as client:
        await complete(client, priority=-3, cache_salt="salt", request_id="mine")
        headers = {"X-Request-Id": "told"}
        answers = [
            await client.post(COMPLETIONS, json={"prompt": "a"}, headers=headers) for _ in range(2)
        ]
    first, *told = engine.received
    assert (first.priority, first.cache_salt, first.request_id) == (-3, "salt", "mine")
    assert [answer.headers["x-request-id"] for answer in answers] == ["told", "told"]
    assert [answer.json()["id"] for answer in answers] == ["cmpl-told", "cmpl-told"]
    names = {one.request_id for one in told}
    assert len(names) == 2 and all(name.startswith("cmpl-told-") for name in names)


@pytest.mark.parametrize(
    ("given", "form"),
    [
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, {"json_object": True}),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "s", "schema": {"type": "object"}, "strict": True},
                }
            },
            {"json": '{"type": "object"}'},
        ),
        ({"structured_outputs": {"regex": "a+"}}, {"regex": "a+"}),
        ({"structured_outputs": {"choice": ["a", "b"]}}, {"choice": ["a", "b"]}),
        ({"structured_outputs": {"grammar": 'start: "a"'}}, {"grammar": 'start: "a"'}),
        ({"structured_outputs": {"json": {"type": "null"}}}, {"json": '{"type": "null"}'}),
    ],
)
async def test_forms(given: dict[str, Any], form: dict[str, Any] | None) -> None:
    for path in (COMPLETIONS, CHATS):
        outputs = (await params_for(path, **given)).structured_outputs
        assert outputs == (None if form is None else StructuredOutputs.from_mapping(form))


# Refusals


REFUSED_EVERYWHERE: list[tuple[dict[str, Any], str]] = [
    ({"guided_json": {}}, "guided_json"),
    ({"guided_anything": "x"}, "guided_anything"),
    ({"logits_processors": ["x"]}, "logits_processors"),
    ({"regex": "a"}, "regex"),
    ({"use_beam_search": True}, "use_beam_search"),
    ({"chat_template": "{{ x }}"}, "chat_template"),
    ({"continue_final_message": True}, "continue_final_message"),
    ({"n": 0}, "n"),
    ({"n": 65}, "n"),
    ({"n": "1"}, "n"),
    ({"n": True}, "n"),
    ({"temperature": "1"}, "temperature"),
    ({"temperature": 3}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"stream": 1}, "stream"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": 1.5}, "max_tokens"),
    ({"stop": ["x"] * 33}, "stop"),
    ({"stop": ["x" * 5000]}, "stop"),
    ({"stop": [""]}, "stop"),
    ({"logit_bias": {"x": 1}}, "logit_bias"),
    ({"logit_bias": {"1": 101}}, "logit_bias"),
    ({"logit_bias": {str(i): 1 for i in range(1025)}}, "logit_bias"),
    ({"cache_salt": ""}, "cache_salt"),
    ({"cache_salt": "a/b"}, "cache_salt"),
    ({"cache_salt": "a\0"}, "cache_salt"),
    ({"cache_salt": "a" * 129}, "cache_salt"),
    ({"request_id": "a\nb"}, "request_id"),
    ({"priority": 1.5}, "priority"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
    ({"response_format": {"type": "json_schema"}}, "response_format"),
    ({"response_format": {"type": "xml"}}, "response_format.type"),
    (
        {"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}},
        "structured_outputs",
    ),
    ({"structured_outputs": {}}, "structured_outputs"),
    ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs"),
    ({"structured_outputs": {"xml": "a"}}, "structured_outputs"),
    ({"bad_words": ["x"] * 65}, "bad_words"),
    ({"min_tokens": 5, "max_tokens": 4}, "min_tokens"),
]


@pytest.mark.parametrize("path", [COMPLETIONS, CHATS])
async def test_refused_everywhere(path: str) -> None:
    given = {"prompt": "ab"} if path == COMPLETIONS else {"messages": MESSAGES}
    engine = FakeEngine()
    async with client_of(engine) as client:
        for body, parameter in REFUSED_EVERYWHERE:
            error = await refused(client, path, **given, **body)
            assert (error["param"] or "").startswith(parameter), (body, error)
    assert engine.received == []


@pytest.mark.parametrize(
    ("body", "parameter"),
    [
        ({}, None),
        ({"prompt": None}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": ["a", 1]}, "prompt"),
        ({"prompt": [1.5]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": ["a"] * 257}, "prompt"),
        ({"prompt": [1] * ((1 << 16) + 1)}, "prompt"),
        ({"prompt": ["a"] * 200, "n": 64}, "n"),
        ({"prompt": "a", "suffix": "b"}, "suffix"),
        ({"prompt": "a", "best_of": 2}, "best_of"),
        ({"prompt": "a", "logprobs": True}, "logprobs"),
        ({"prompt": "a", "logprobs": -1}, "logprobs"),
        ({"prompt": "a", "functions": [{}]}, "functions"),
    ],
)
async def test_refused_completions(body: dict[str, Any], parameter: str | None) -> None:
    async with client_of(FakeEngine()) as client:
        assert (await refused(client, COMPLETIONS, **body))["param"] == (parameter and _place(body))


def _place(body: dict[str, Any]) -> str:
    """Where msgspec or a check says that the fault is."""
    if body.get("prompt") in ([1.5], [-1]):
        return "prompt[0]"
    return next(name for name in reversed(body) if name != "n" or len(body["prompt"]) == 200)


TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
DEEP: Any = "x"
for _ in range(70):
    DEEP = [DEEP]


@pytest.mark.parametrize(
    ("body", "parameter"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"content": "a"}]}, "messages[0]"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": 1}]}, "messages[0].content"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "text": "a"}]}]},
            "messages[0].content[0].type",
        ),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": 2}, "logprobs"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [TOOL, TOOL]}, "tools"),
        ({"tools": [TOOL] * 129}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        (
            {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "g"}}},
            "tool_choice",
        ),
        (
            {
                "tools": [TOOL],
                "tool_choice": "required",
                "response_format": {"type": "json_object"},
            },
            "tool_choice",
        ),
        ({"tools": [TOOL]}, "tools"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"a b": 1}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"x": "a" * (1 << 16)}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {f"x{i}": 1 for i in range(33)}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"x": DEEP}}, None),
        ({"function_call": "auto"}, "function_call"),
    ],
)
async def test_refused_chats(body: dict[str, Any], parameter: str | None) -> None:
    async with client_of(FakeEngine()) as client:
        error = await refused(client, CHATS, **{"messages": MESSAGES, **body})
    assert error["param"] == parameter


async def test_model_must_be_the_served_one() -> None:
    async with client_of(FakeEngine()) as client:
        for model in ("fake", "", None):
            await complete(client, model=model)
        answer = await client.post(COMPLETIONS, json={"prompt": "a", "model": "gpt-4"})
    assert answer.status_code == 404
    assert answer.json()["error"]["code"] == "model_not_found"


async def test_unknown_fields_are_ignored() -> None:
    async with client_of(FakeEngine()) as client:
        await complete(client, service_tier="auto", guided_json=None, use_beam_search=False)
        await chat(client, store=False, metadata={"a": "b"}, parallel_tool_calls=True)


# Conversations and tools


async def test_messages_reach_the_template_as_it_wants_them() -> None:
    engine = FakeEngine()
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    messages: list[dict[str, Any]] = [
        {
            "role": "system",
            "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
        },
        {"role": "user", "content": "hi", "name": "Ann"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "3", "tool_call_id": "c"},
    ]
    async with client_of(engine) as client:
        await chat(client, messages=messages, chat_template_kwargs={"enable_thinking": False})
    [(rendered, variables)] = engine.rendered
    function = {"name": "f", "arguments": {"a": 1}}
    expected = {"role": "assistant", "tool_calls": [{**call, "function": function}]}
    assert rendered == [*messages[:2], expected, messages[3]]
    assert variables == {"enable_thinking": False}


async def test_tools_are_shown_to_the_template_and_calls_are_read() -> None:
    engine = FakeEngine()
    engine.script = [
        "Wait. ",
        "<tool_call>",
        '{"name": "f", ',
        '"arguments": {"a"',
        ": 1}}",
        "</tool_call>",
    ]
    async with client_of(engine, tool_call_parser="hermes") as client:
        answer = await chat(client, tools=[TOOL])
        assert engine.rendered[-1][1] == {"tools": [TOOL]}
        without = await chat(client, tools=[TOOL], tool_choice="none")
        assert engine.rendered[-1][1] == {}
    (choice,) = answer["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] == "Wait."
    (call,) = choice["message"]["tool_calls"]
    assert call.pop("id").startswith("call_")
    assert call == {"type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    assert without["choices"][0]["message"]["content"] == "".join(engine.script)


@pytest.mark.parametrize(
    ("told", "answer"),
    [
        ('{"name": function name, "parameters": ..}', '{"name": "f", "parameters": {}}'),
        ("<tool_call>", '<tool_call>{"name": "f", "arguments": {}}</tool_call>'),
    ],
)
async def test_the_way_of_calling_is_seen_in_the_template(told: str, answer: str) -> None:
    engine = FakeEngine()
    engine.template_text = f"flowkv_probe: {told}"
    engine.script = [answer]
    async with client_of(engine) as client:
        (choice,) = (await chat(client, tools=[TOOL]))["choices"]
        await chat(client, tools=[TOOL])
    assert choice["message"]["content"] is None
    assert choice["message"]["tool_calls"][0]["function"]["name"] == "f"
    assert len(engine.rendered) == 3, "it is looked for once"


async def test_forced_calls() -> None:
    engine = FakeEngine()
    named = {"type": "function", "function": {"name": "f"}}
    async with client_of(engine) as client:
        engine.script = ['{"a"', ": 1}"]
        answer = await chat(client, tools=[TOOL], tool_choice=named)
        first = engine.received[-1].params.structured_outputs
        engine.script = ['[{"name": "f",', ' "arguments": {}}]']
        required = await chat(client, tools=[TOOL], tool_choice="required")
        second = engine.received[-1].params.structured_outputs
    (call,) = answer["choices"][0]["message"]["tool_calls"]
    assert call["function"] == {"name": "f", "arguments": '{"a": 1}'}
    (call,) = required["choices"][0]["message"]["tool_calls"]
    assert call["function"] == {"name": "f", "arguments": "{}"}
    assert first is not None and json.loads(first.text) == {"type": "object"}
    assert second is not None
    jsonschema.validate([{"name": "f", "arguments": {}}], json.loads(second.text))


async def test_parallel_calls_can_be_refused() -> None:
    engine = FakeEngine()
    one = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    engine.script = [one, one]
    async with client_of(engine, tool_call_parser="hermes") as client:
        for is_parallel, count in ((True, 2), (False, 1)):
            answer = await chat(client, tools=[TOOL], parallel_tool_calls=is_parallel)
            assert len(answer["choices"][0]["message"]["tool_calls"]) == count


def test_references_inside_tools_follow_them_into_the_form_of_a_call() -> None:
    point = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}
    tool = {
        "type": "function",
        "function": {
            "name": "f",
            "parameters": {
                "type": "object",
                "properties": {"at": {"$ref": "#/$defs/p"}},
                "required": ["at"],
                "$defs": {"p": point},
            },
        },
    }
    body = {"messages": MESSAGES, "tools": [tool], "tool_choice": "required"}
    form = tool_use_of(msgspec.convert(body, ChatCompletionRequest)).form
    assert form is not None
    validator = jsonschema.Draft202012Validator(form["json"])
    assert validator.is_valid([{"name": "f", "arguments": {"at": {"x": 1}}}])
    assert not validator.is_valid([{"name": "f", "arguments": {"at": {"x": "1"}}}])
    assert not validator.is_valid([{"name": "g", "arguments": {"at": {"x": 1}}}])
    assert not validator.is_valid([])


# Anything at all


_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=5,
)
_names = st.sampled_from(
    sorted({*CompletionRequest.__struct_fields__, *ChatCompletionRequest.__struct_fields__})
)


def read(body: bytes, request_type: type[Any]) -> None:
    """All that is done with a request before the engine hears of it."""
    asked = FieldJudge().read(body, request_type)
    if isinstance(asked, CompletionRequest):
        completion_params(asked)
        prompts_of(asked, 64)
    else:
        chat_params(asked, tool_use_of(asked).form)
        messages_of(asked)
        template_variables(asked)


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.dictionaries(_names, _values, max_size=5), st.booleans())
def test_nothing_but_our_errors(body: dict[str, Any], is_chat: bool) -> None:
    base: dict[str, Any] = {"messages": MESSAGES} if is_chat else {"prompt": "a"}
    try:
        read(
            json.dumps({**base, **body}).encode(),
            (CompletionRequest, ChatCompletionRequest)[is_chat],
        )
    except FlowKVError as error:
        assert len(str(error)) < 3000


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=60) | st.text(max_size=60).map(str.encode))
def test_any_bytes(body: bytes) -> None:
    with pytest.raises(FlowKVError):
        read(body, CompletionRequest)


async def test_described_schemas_accept_what_is_accepted() -> None:
    async with client_of(FakeEngine()) as client:
        document = (await client.get("/openapi.json")).json()
        for path, bodies in (
            (COMPLETIONS, [{"prompt": p} for p in ("a", ["a", "b"], [1, 2], [[1], [2]])]),
            (CHATS, [{"messages": MESSAGES, "tools": [TOOL], "tool_choice": "none"}]),
        ):
            content = document["paths"][path]["post"]["requestBody"]["content"]
            schema = {**content["application/json"]["schema"], "components": document["components"]}
            validator = jsonschema.Draft202012Validator(schema)
            for body in bodies:
                validator.validate(body)
                await ask(client, path, **body)
        assert not validator.is_valid({"messages": []})


def test_a_conversation_is_measured_before_it_is_tokenised() -> None:
    class WideTokens(FakeTokenizer):
        max_token_characters = 1000

    encoder: Any = WideTokens()
    check_rendered("x" * (1 << 16), encoder, max_prompt_tokens=1)
    check_rendered("x" * 200_000, encoder, max_prompt_tokens=100)
    with pytest.raises(ContextLengthError, match="200001 characters"):
        check_rendered("x" * 200_001, encoder, max_prompt_tokens=100)
