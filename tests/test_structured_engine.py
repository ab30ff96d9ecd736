"""Answers that must have a form, from engines on tiny random models: they have it, and end."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from flowkv_jax import Engine, RequestOutput, SamplingParams
from flowkv_jax.errors import UnprocessableError, ValidationError
from flowkv_jax.structured_outputs import StructuredOutputs
from tests.random_schemas import random_schema
from tests.tiny_models import EOS_TOKEN_ID

MakeEngine = Callable[..., Engine]
NUM_SCHEMAS = 200
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 4, "maxLength": 12},
        "age": {"type": "integer", "minimum": 10, "maximum": 99},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "minItems": 2, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}


def held(form: dict[str, Any], **params: Any) -> SamplingParams:
    settings = {"temperature": 1.0, "seed": 7, "max_tokens": 200, **params}
    return SamplingParams(structured_outputs=StructuredOutputs.from_mapping(form), **settings)


def answer(output: RequestOutput) -> tuple[str, str | None]:
    return output.outputs[0].text, output.outputs[0].finish_reason


@pytest.fixture(scope="module")
def engine(tiny_model: Callable[[str], Path], xla_cache: Path) -> Iterator[Engine]:
    with Engine(
        str(tiny_model("gqa_tied")),
        max_num_seqs=2,  # few shapes to compile
        max_num_batched_tokens=128,
        num_blocks=128,
        max_model_len=512,
        compilation_cache_dir=str(xla_cache),
        debug=True,
    ) as engine:
        yield engine


def test_every_answer_to_a_random_schema_validates(make_engine: MakeEngine) -> None:
    engine = make_engine(num_blocks=256, max_model_len=1024)
    tokenizer = engine.get_tokenizer()
    blanks = [t for t in range(3, tokenizer.vocab_size) if not tokenizer.token_bytes(t).strip()]
    schemas = [random_schema(seed) for seed in range(NUM_SCHEMAS)]
    params = [
        held(
            {"json": schema},
            seed=seed,
            temperature=0.7 + 0.01 * (seed % 50),
            logit_bias=dict.fromkeys(blanks, -2.0 * (seed % 4)),  # random models love them
            max_tokens=None,
        )
        for seed, schema in enumerate(schemas)
    ]
    prompts = [f"The {seed} answer: " for seed in range(NUM_SCHEMAS)]
    for schema, output in zip(schemas, engine.generate(prompts, params), strict=True):
        text, finish_reason = answer(output)
        assert finish_reason == "stop", (schema, text)
        jsonschema.Draft202012Validator(schema).validate(json.loads(text))


FORMS: list[tuple[dict[str, Any], Callable[[str], object]]] = [
    ({"regex": r"[a-f]{3,6}-\d{2}"}, lambda text: re.fullmatch(r"[a-f]{3,6}-\d{2}", text)),
    ({"choice": ["yes", "no", "möglich 🙂"]}, lambda text: text in ("yes", "no", "möglich 🙂")),
    ({"grammar": 'start: "a" ("b" | "c"){2,4} "d"'}, lambda t: re.fullmatch("a[bc]{2,4}d", t)),
    ({"grammar": 'root ::= "x" ("y" | "z") "w"'}, lambda text: text in ("xyw", "xzw")),
    ({"json": {"enum": [1, "two", None]}}, lambda text: json.loads(text) in (1, "two", None)),
]


def test_forms_of_every_kind_beside_free_answers(engine: Engine) -> None:
    """One batch: forms, none, penalties, filters, logprobs; free answers are as alone."""
    free = SamplingParams(temperature=1.0, seed=3, max_tokens=20, ignore_eos=True)
    alone = engine.generate("one two", free)[0].outputs[0].token_ids
    extra: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"top_k": 4, "repetition_penalty": 1.3, "frequency_penalty": 0.5, "logprobs": 3},
    ]
    cases = [(held(form, **more), fits) for form, fits in FORMS for more in extra]
    params = [params for params, _ in cases]
    outputs = engine.generate(["one two"] * (len(cases) + 2), [free, *params, free])
    assert [outputs[i].outputs[0].token_ids for i in (0, -1)] == [alone, alone]
    for (_, fits), output in zip(cases, outputs[1:-1], strict=True):
        text, finish_reason = answer(output)
        assert fits(text), text
        assert finish_reason == "stop"
        assert output.outputs[0].stop_reason is None
        logprobs = output.outputs[0].logprobs
        if logprobs is not None:
            assert len(logprobs) == len(output.outputs[0].token_ids)


def test_logprobs_are_of_the_model_not_of_the_form(engine: Engine) -> None:
    params = held({"choice": ["zebra"]}, temperature=0, logprobs=2)
    completion = engine.generate("the quick brown", params)[0].outputs[0]
    free = SamplingParams(temperature=0, max_tokens=1, logprobs=2)
    (first,) = engine.generate("the quick brown", free)[0].outputs[0].logprobs or ()
    assert completion.logprobs is not None
    assert list(completion.logprobs[0].values())[1:] == list(first.values())[:2]
    assert completion.logprobs[0][completion.token_ids[0]].rank > 1


def test_bounds_that_leave_the_form_no_token_are_the_callers_mistake(engine: Engine) -> None:
    other = engine.get_tokenizer().encode("x", add_special_tokens=False)
    for bounds in ({"allowed_token_ids": other}, {"bad_words": ["yes"]}):
        with pytest.raises(UnprocessableError, match="holds no token that the form allows"):
            engine.generate("a", held({"choice": ["yes"]}, **bounds))
    assert answer(engine.generate("a", held({"choice": ["yes"]}))[0]) == ("yes", "stop")


class TestEnds:
    def test_an_answer_ends_when_nothing_can_follow(self, engine: Engine) -> None:
        output = engine.generate("a", held({"choice": ["ab"]}, max_tokens=9))[0]
        assert answer(output) == ("ab", "stop")
        assert EOS_TOKEN_ID not in output.outputs[0].token_ids

    def test_also_with_the_last_token_it_may_have(self, engine: Engine) -> None:
        whole = engine.generate("a", held({"regex": "[xyz]{6}"}))[0].outputs[0]
        size = len(whole.token_ids)
        just = engine.generate("a", held({"regex": "[xyz]{6}"}, max_tokens=size))[0]
        assert answer(just) == (whole.text, "stop")
        cut = engine.generate("a", held({"regex": "[xyz]{6}"}, max_tokens=size - 1))[0]
        assert cut.outputs[0].finish_reason == "length"
        assert whole.text.startswith(cut.outputs[0].text)

    def test_an_end_token_comes_only_where_the_form_is_complete(self, engine: Engine) -> None:
        wish = {"logit_bias": {EOS_TOKEN_ID: 100}}
        output = engine.generate("a", held({"regex": "ab(cd)*"}, **wish))[0]
        assert answer(output) == ("ab", "stop")
        assert output.outputs[0].token_ids[-1] == EOS_TOKEN_ID

    def test_min_tokens_lengthens_what_can_be_longer_and_nothing_else(self, engine: Engine) -> None:
        wish = {"logit_bias": {EOS_TOKEN_ID: 100}, "min_tokens": 5}
        longer = engine.generate("a", held({"regex": "a*"}, **wish))[0].outputs[0]
        assert len(longer.token_ids) == 6
        assert set(longer.text) == {"a"}
        assert answer(engine.generate("a", held({"choice": ["a"]}, **wish))[0]) == ("a", "stop")

    def test_stop_strings_end_it_before(self, engine: Engine) -> None:
        output = engine.generate("a", held({"regex": "x{3}y{3}"}, stop=["xy"]))[0]
        assert answer(output) == ("xx", "stop")
        assert output.outputs[0].stop_reason == "xy"

    def test_each_of_n_answers_goes_its_own_way(self, engine: Engine) -> None:
        (output,) = engine.generate("a", held({"regex": "[a-z]{8}"}, n=6))
        texts = [completion.text for completion in output.outputs]
        assert all(re.fullmatch("[a-z]{8}", text) for text in texts)
        assert len(set(texts)) > 3

    def test_streams_give_the_same_piece_by_piece(self, engine: Engine) -> None:
        whole = answer(engine.generate("a", held({"json": PERSON}))[0])
        pieces = [o.outputs[0] for o in engine.generate("a", held({"json": PERSON}), stream=True)]
        assert ("".join(piece.delta_text for piece in pieces), pieces[-1].finish_reason) == whole


def gathered(
    engine: Engine, *cases: SamplingParams | dict[str, Any]
) -> list[RequestOutput | BaseException]:
    async def one(params: SamplingParams | dict[str, Any]) -> RequestOutput:
        return [output async for output in engine.async_generate("a", params)][-1]

    async def all_of_them() -> list[RequestOutput | BaseException]:
        return await asyncio.gather(*map(one, cases), return_exceptions=True)

    return asyncio.run(all_of_them())


class TestFailures:
    def test_a_bad_form_fails_its_own_request(self, engine: Engine) -> None:
        good = held({"regex": "[xyz]{30}"})
        first, bad, second = gathered(
            engine, good, {"structured_outputs": {"regex": "("}, "max_tokens": 5}, good
        )
        assert isinstance(bad, ValidationError)
        assert bad.parameter == "structured_outputs.regex"
        for output in (first, second):
            assert isinstance(output, RequestOutput)
            assert re.fullmatch("[xyz]{30}", output.outputs[0].text)

    def test_nothing_left_to_sample_fails_its_own_request(self, engine: Engine) -> None:
        tokenizer = engine.get_tokenizer()
        (other,) = tokenizer.encode("q", add_special_tokens=False)
        good = held({"regex": "[xyz]{30}"})
        bad = held({"regex": "[xyz]{30}"}, allowed_token_ids=[other])
        named = held({"grammar": 'start: "x" <|im_start|>'})
        outputs = gathered(engine, good, bad, named, good)
        for output in (outputs[0], outputs[3]):
            assert isinstance(output, RequestOutput)
            assert re.fullmatch("[xyz]{30}", output.outputs[0].text)
        assert isinstance(outputs[1], UnprocessableError)
        assert "structured_outputs failed after 0 tokens" in str(outputs[1])
        assert isinstance(outputs[2], UnprocessableError)
        assert "failed after 1 tokens" in str(outputs[2])
        load = engine.get_loads()
        assert load.num_free_blocks == load.num_blocks


PROMPTS = [f"The {number} quick brown fox" for number in ("first", "second", "third", "last")]
FORMS_OF_BATCH: list[dict[str, Any]] = [
    {"json": PERSON},
    {"regex": "[a-z]{60,80}"},
    {"json": {"type": "array", "items": PERSON}},
    {"json": {"type": "string", "minLength": 60}},
]
BATCH = [held(form, temperature=0, max_tokens=60) for form in FORMS_OF_BATCH]


@pytest.mark.parametrize(
    "overrides",
    [
        {"enable_overlap": False, "max_num_batched_tokens": 16},
        {"num_blocks": 13, "preemption_mode": "swap"},
        {"num_blocks": 13, "preemption_mode": "recompute"},
        {"prefill_nodes": 1, "decode_nodes": 1},
        {"tensor_parallel_size": 2},
    ],
    ids=lambda value: "-".join(map(str, value.values())),
)
def test_same_answers_whatever_the_engine(
    engine: Engine, make_engine: MakeEngine, overrides: dict[str, Any]
) -> None:
    expected = [o.outputs[0].token_ids for o in engine.generate(PROMPTS, BATCH)]
    other = make_engine(**overrides)
    assert [o.outputs[0].token_ids for o in other.generate(PROMPTS, BATCH)] == expected
    if "num_blocks" in overrides:
        assert other.get_loads().num_preemptions > 0


def test_same_answers_after_the_death_of_the_node_that_decodes(
    engine: Engine, make_engine: MakeEngine
) -> None:
    """Another goes on within the form, from the tokens that were given out."""
    long = held({"regex": "[a-z]{300,400}"}, temperature=0, max_tokens=300)
    expected = answer(engine.generate(PROMPTS[0], long)[0])
    nodes = make_engine(prefill_nodes=1, decode_nodes=1, hybrid_nodes=1)
    answers = []
    for number, output in enumerate(nodes.generate(PROMPTS[0], long, stream=True)):
        answers.append(answer(output))
        if number == 8:
            (busy,) = [n for n in nodes._cluster.nodes.values() if n.load.num_requests_running]
            busy.call(_die)
    assert answers[-1] == expected
    assert not busy.is_alive


def _die() -> None:
    raise SystemExit("injected")
