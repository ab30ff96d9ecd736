"""Forms of answers: their bounds, what they compile to, and which tokens may follow, by oracle."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import tokenizers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flowkv_jax.engine import grammar, grammar_cache
from flowkv_jax.engine.grammar import mask_words
from flowkv_jax.engine.grammar_cache import GrammarCache
from flowkv_jax.engine.grammar_matcher import GrammarMatcher
from flowkv_jax.errors import UnprocessableError, ValidationError
from flowkv_jax.sampling_params import SamplingParams
from flowkv_jax.structured_outputs import MAX_SCHEMA_DEPTH, StructuredOutputs
from flowkv_jax.tokenizer import Tokenizer
from tests.tiny_models import EOS_TOKEN_ID, SPECIAL_TOKENS, VOCAB_SIZE, write_tiny_tokenizer

NUM_LOGITS = VOCAB_SIZE + 37  # a model may have more than its tokenizer has tokens


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("tokenizer")
    write_tiny_tokenizer(folder)
    return Tokenizer.from_folder(folder)


@pytest.fixture(scope="module")
def cache(tokenizer: Tokenizer) -> GrammarCache:
    return make_cache(tokenizer)


@pytest.fixture(scope="module", params=["byte-level", "SentencePiece"])
def vocabulary(request: pytest.FixtureRequest, tokenizer: Tokenizer) -> Tokenizer:
    if request.param == "byte-level":
        return tokenizer
    pieces = [
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "▁",
        *"abthe.é",
        "ab",
        "▁the",
        "th",
        "he",
    ]
    vocab = {piece: number for number, piece in enumerate([*SPECIAL_TOKENS, *pieces])}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=[]))
    backend.decoder = tokenizers.decoders.Sequence(
        [tokenizers.decoders.Replace("▁", " "), tokenizers.decoders.ByteFallback()]
    )
    backend.add_special_tokens(list(SPECIAL_TOKENS))
    return Tokenizer(backend)


def make_cache(tokenizer: Tokenizer) -> GrammarCache:
    return GrammarCache(tokenizer, vocab_size=NUM_LOGITS, eos_token_ids=(EOS_TOKEN_ID,))


def allowed(matcher: GrammarMatcher) -> set[int]:
    row = np.zeros(mask_words(NUM_LOGITS), np.uint32)
    matcher.fill(row)
    return set(np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")).tolist())


def deep(levels: int) -> Any:
    schema: Any = True
    for _ in range(levels):
        schema = {"items": schema}
    return schema


def either(name: str) -> Any:
    """One of eight properties: eight such are 16,777,216 ways to be right."""
    keys = [f"{name}{number}" for number in range(8)]
    return {"anyOf": [{"properties": {key: {"type": "null"}}, "required": [key]} for key in keys]}


class TestValue:
    @pytest.mark.parametrize(
        "mapping",
        [
            {"json": {"type": "object", "properties": {"ä": {"type": "null"}}}},
            {"json": True},
            {"json": '{"type": "integer"}'},
            {"regex": r"\d+"},
            {"choice": ["yes", "no"]},
            {"grammar": 'start: "a"'},
            {"json_object": True},
            {"regex": "a", "json": None, "json_object": None, "disable_fallback": True},
        ],
    )
    def test_comes_back_from_its_mapping(self, mapping: dict[str, Any]) -> None:
        form = StructuredOutputs.from_mapping(mapping)
        again = json.loads(json.dumps(form.to_mapping()))
        assert StructuredOutputs.from_mapping(again) == form
        params = SamplingParams.from_mapping({"structured_outputs": mapping})
        assert params.structured_outputs == form
        assert SamplingParams.from_mapping(params.to_mapping()) == params

    def test_a_schema_keeps_the_order_of_its_keys_and_not_its_dict(self) -> None:
        schema = {"type": "object", "properties": {"b": True, "a": True}}
        form = StructuredOutputs(json=schema)
        schema["type"] = "array"
        assert form.text == '{"type": "object", "properties": {"b": true, "a": true}}'

    @pytest.mark.parametrize(
        ("key", "value", "kind"),
        [
            ("json_schema", '{"type": "null"}', "json"),
            ("regex", "a+", "regex"),
            ("ebnf", 'root ::= "a"', "grammar"),
        ],
    )
    def test_other_engines_spellings(self, key: str, value: str, kind: str) -> None:
        params = SamplingParams.from_mapping({key: value})
        assert params.structured_outputs == StructuredOutputs(**{kind: value})

    def test_two_that_differ_contradict(self) -> None:
        with pytest.raises(ValidationError, match="contradicts"):
            SamplingParams.from_mapping({"regex": "a", "structured_outputs": {"regex": "b"}})

    def test_an_end_that_is_ignored_contradicts_a_form(self) -> None:
        with pytest.raises(ValidationError, match="ignore_eos"):
            SamplingParams(ignore_eos=True, structured_outputs=StructuredOutputs(regex="a"))
        with pytest.raises(ValidationError, match="must be a StructuredOutputs"):
            SamplingParams(structured_outputs={"regex": "a"})  # type: ignore[arg-type]

    @pytest.mark.parametrize(
        ("mapping", "message"),
        [
            ({}, "it has none"),
            ({"regex": "a", "choice": ["b"]}, "it has regex and choice"),
            ({"json_object": False}, "it has none"),
            ({"json_object": 1}, "must be true or false"),
            ({"json": 5}, "must be a JSON schema"),
            ({"json": "{"}, "is no JSON"),
            ({"json": "[" * 50_000}, "nested too deep"),
            ({"json": {"const": float("nan")}}, "is no JSON"),
            ({"json": {"const": {1, 2}}}, "is no JSON"),
            ({"json": deep(MAX_SCHEMA_DEPTH)}, "nested too deep"),
            ({"json": {"enum": ["x" * 70_000]}}, "at most 65536"),
            ({"json": {"enum": list(range(70_000))}}, "too large"),
            ({"regex": ""}, "is empty"),
            ({"regex": "a\0"}, "NUL"),
            ({"regex": "a" * 9000}, "has 9000 bytes; at most 8192"),
            ({"regex": "\ud800"}, "UTF-8"),
            ({"regex": ["a"]}, "must be text"),
            ({"grammar": "start: " + "a " * 40_000}, "at most 65536"),
            ({"grammar": 'root ::= "a"' + " " * 9000}, "at most 8192"),
            ({"choice": []}, "from 1 to 1024"),
            ({"choice": ["a"] * 1025}, "from 1 to 1024"),
            ({"choice": ["a", ""]}, "not empty"),
            ({"choice": "yes"}, "list of strings"),
            ({"choice": ["a" * 70_000]}, "at most 65536"),
            ({"xgrammar": "a"}, "unknown key 'xgrammar'"),
            ("regex", "must map"),
        ],
    )
    def test_refusals_are_bounded(self, mapping: Any, message: str) -> None:
        with pytest.raises(ValidationError, match=message) as caught:
            StructuredOutputs.from_mapping(mapping)
        assert len(str(caught.value)) < 400

    def test_an_option_that_is_not_served_is_refused_by_name(self) -> None:
        with pytest.raises(UnprocessableError, match="structural_tag"):
            StructuredOutputs.from_mapping({"structural_tag": {}})


# Languages of few words, each with a form that means it.


def words_of_choices() -> st.SearchStrategy[tuple[StructuredOutputs, frozenset[str]]]:
    words = st.text(st.sampled_from('abthe ."\\\n é🙂'), min_size=1, max_size=6)
    return st.lists(words, min_size=1, max_size=6).map(
        lambda given: (StructuredOutputs(choice=given), frozenset(given))
    )


@st.composite
def words_of_expressions(draw: st.DrawFn) -> tuple[StructuredOutputs, frozenset[str]]:
    Part = tuple[str, frozenset[str]]

    def joined(parts: tuple[Part, Part]) -> Part:
        (left, left_words), (right, right_words) = parts
        return f"(?:{left})(?:{right})", frozenset(a + b for a in left_words for b in right_words)

    def either(parts: tuple[Part, Part]) -> Part:
        (left, left_words), (right, right_words) = parts
        return f"(?:{left})|(?:{right})", left_words | right_words

    def perhaps(part: Part) -> Part:
        return f"(?:{part[0]})?", part[1] | {""}

    def twice(part: Part) -> Part:
        words = frozenset(a + b for a in part[1] for b in part[1])
        return f"(?:{part[0]}){{1,2}}", part[1] | words

    leaves: st.SearchStrategy[Part] = st.sampled_from(
        [("[ab]", frozenset("ab")), ("the", frozenset({"the"})), ("é", frozenset("é"))]
    )
    expression, words = draw(
        st.recursive(
            leaves,
            lambda part: st.one_of(
                st.tuples(part, part).map(joined),
                st.tuples(part, part).map(either),
                part.map(perhaps),
                part.map(twice),
            ),
            max_leaves=4,
        )
    )
    return StructuredOutputs(regex=expression), words


@settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(language=st.one_of(words_of_choices(), words_of_expressions()), data=st.data())
def test_a_token_may_follow_iff_the_text_can_still_become_a_word(
    vocabulary: Tokenizer,
    language: tuple[StructuredOutputs, frozenset[str]],
    data: st.DataObject,
) -> None:
    form, words = language
    spelt = {word.encode() for word in words}
    token_bytes = [vocabulary.token_bytes(token) for token in range(vocabulary.vocab_size)]
    text = b""
    matcher = make_cache(vocabulary).matcher(form)
    for _ in range(40):
        goals = [word for word in spelt if word.startswith(text)]
        expected = {
            token
            for token, piece in enumerate(token_bytes)
            if token >= len(SPECIAL_TOKENS) and any(word.startswith(text + piece) for word in goals)
        }
        if text in spelt:
            expected.add(EOS_TOKEN_ID)
        found = allowed(matcher)
        assert matcher.failure is None
        if len({word[len(text) : len(text) + 1] for word in goals}) == 1:
            # Where only one text can follow, it is spelt as the tokenizer would spell it.
            assert found and found <= expected
        else:
            assert found == expected
        assert matcher.is_complete == (expected == {EOS_TOKEN_ID})
        token = data.draw(st.sampled_from(sorted(found)))
        if token == EOS_TOKEN_ID:
            assert text in spelt
            return
        matcher.accept(token)
        text += token_bytes[token]
    raise AssertionError("no word is that long")


JSON_TEXTS = [
    ({"type": "object"}, '{"a": [1, 2.5e3, null, true], "b": {"c": "\\n"}}', True),
    ({"type": "object"}, "[1]", False),
    ({"type": "integer", "minimum": 3, "maximum": 12}, "12", True),
    ({"type": "integer", "minimum": 3, "maximum": 12}, "13", False),
    ({"type": "array", "maxItems": 2, "items": {"enum": ["a", 1]}}, '["a",\n    1]', True),
    ({"type": "array", "maxItems": 2, "items": {"enum": ["a", 1]}}, '["a", 1, 1]', False),
    ({"type": "object"}, '{"a":' + " " * 32 + "1}", True),
    ({"type": "object"}, '{"a":' + " " * 33 + "1}", False),
    ({"const": "<|im_end|>"}, '"<|im_end|>"', True),
]


@pytest.mark.parametrize(("schema", "text", "is_right"), JSON_TEXTS)
def test_texts_that_a_schema_allows(
    cache: GrammarCache, tokenizer: Tokenizer, schema: Any, text: str, is_right: bool
) -> None:
    matcher = cache.matcher(StructuredOutputs(json=schema))
    allowed(matcher)
    for token in tokenizer.literal_encoder()(text):
        matcher.accept(token)
    assert (matcher.failure is None and EOS_TOKEN_ID in allowed(matcher)) == is_right


def test_an_interrupt_is_no_refusal(cache: GrammarCache, monkeypatch: pytest.MonkeyPatch) -> None:
    form = StructuredOutputs(regex="interrupted|not")

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("flowkv_jax.engine.grammar_cache.Grammar", interrupt)
        with pytest.raises(KeyboardInterrupt):
            cache.check(form)
    cache.check(form)


def test_special_tokens_never_pass(cache: GrammarCache) -> None:
    everything = cache.matcher(StructuredOutputs(regex="(?s:.)*"))
    specials = set(range(len(SPECIAL_TOKENS)))
    assert allowed(everything) & specials == {EOS_TOKEN_ID}
    assert max(allowed(everything)) < VOCAB_SIZE
    named = cache.matcher(StructuredOutputs(grammar='start: "a" <|im_start|>'))
    (first,) = allowed(named)
    named.accept(first)
    assert len(allowed(named)) == 32 * mask_words(NUM_LOGITS)  # no use any more, and it says so
    assert named.failure == "the grammar leaves no token that may be sampled"
    with pytest.raises(ValidationError, match="no text can begin it"):
        cache.check(StructuredOutputs(grammar="start: <|im_start|>"))


@pytest.mark.parametrize(
    "form",
    [
        {"regex": "("},
        {"regex": "(?=a)b"},
        {"regex": "((.*a.{12}b.*)&(.*c.{11}d.*)|(((a{99}){99}){99}){99}"},
        {"grammar": "start: nothing"},
        {"grammar": "not a grammar"},
        {"grammar": 'root ::= "a'},
        {"grammar": "root ::= " + "(" * 8000},
        {"grammar": 'other ::= "a"'},
        {"grammar": "start: " + " | ".join(f'"w{i}"' for i in range(4000))},
        {"json": False},
        {"json": {"type": "colour"}},
        {"json": {"$ref": "#/$defs/missing"}},
        {"json": {"$ref": "#"}},
        {"json": {"$ref": "http://localhost/schema.json"}},
        {"json": {"type": "array", "uniqueItems": True}},
        {"json": {"not": {"type": "string"}}},
        {"json": {"type": "string", "pattern": "(?<!a)b"}},
        {"json": {"type": "integer", "multipleOf": 999_999_937}},
        {"json": {"type": "object", "allOf": [either(f"p{i}") for i in range(8)]}},
    ],
)
def test_what_means_nothing_or_too_much_is_refused(
    cache: GrammarCache, form: dict[str, Any]
) -> None:
    made = StructuredOutputs(**form)
    for _ in range(2):
        with pytest.raises(ValidationError, match="cannot be served") as caught:
            cache.check(made)
        assert len(str(caught.value)) < 400
        assert "backtrace" not in str(caught.value)
    matcher = cache.matcher(made)
    allowed(matcher)
    assert matcher.failure == str(caught.value)


class TestCache:
    def test_compiles_once_for_a_text(
        self, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        made = []

        class Counted(grammar.Grammar):
            def __init__(self, *arguments: Any) -> None:
                made.append(arguments)
                super().__init__(*arguments)

        monkeypatch.setattr(grammar_cache, "Grammar", Counted)
        cache = make_cache(tokenizer)
        for _ in range(3):
            cache.check(StructuredOutputs(regex="a+"))
            allowed(cache.matcher(StructuredOutputs(regex="a+")))
        cache.check(StructuredOutputs(choice=["a+"]))
        assert len(made) == 2

    def test_is_bounded_by_number_and_bytes(
        self, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(grammar_cache, "MAX_GRAMMARS", 3)
        monkeypatch.setattr(grammar_cache, "MAX_TEXT_BYTES", 100)
        cache = make_cache(tokenizer)
        for number in range(10):
            cache.check(StructuredOutputs(regex=f"a{number}"))
        assert (len(cache), cache.num_bytes) == (3, 6)
        cache.check(StructuredOutputs(regex="a" * 97))
        assert (len(cache), cache.num_bytes) == (2, 99)
        cache.check(StructuredOutputs(regex="a" * 101))  # compiled, and not kept
        assert (len(cache), cache.num_bytes) == (0, 0)

    def test_a_model_without_an_end_token_serves_no_forms(self, tokenizer: Tokenizer) -> None:
        cache = GrammarCache(tokenizer, vocab_size=NUM_LOGITS, eos_token_ids=())
        cache.prepare_soon()
        with pytest.raises(UnprocessableError, match="no end token"):
            cache.check(StructuredOutputs(regex="a"))


@pytest.fixture
def few_states(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], None]]:
    yield lambda number: monkeypatch.setattr(grammar, "_MAX_LEXER_STATES", number)


def test_a_sequence_outlives_the_states_it_shares(
    tokenizer: Tokenizer, few_states: Callable[[int], None]
) -> None:
    """Each follows texts of its own through one lexer, until that is full; none notices."""
    few_states(120)
    cache = make_cache(tokenizer)
    form = StructuredOutputs(regex="(a|b)*a(a|b){12}[.]")
    random = np.random.default_rng(0)
    renewed = 0
    for _ in range(40):
        matcher = cache.matcher(form)
        before = len(cache)
        for _ in range(60):
            tokens = sorted(allowed(matcher) - {EOS_TOKEN_ID})
            assert matcher.failure is None
            if matcher.is_complete:
                break
            matcher.accept(int(random.choice(tokens)))
        renewed += len(cache) < before
    assert renewed


def test_tokens_known_beforehand_are_followed_first(
    cache: GrammarCache, tokenizer: Tokenizer
) -> None:
    form = StructuredOutputs(json={"type": "object"})
    step_by_step, at_once = cache.matcher(form), cache.matcher(form)
    for token in tokenizer.encode('{"a": [', add_special_tokens=False):
        assert token in allowed(step_by_step)
        step_by_step.accept(token)
        at_once.accept(token)
    assert allowed(at_once) == allowed(step_by_step)
    wrong = cache.matcher(form)
    wrong.accept(tokenizer.encode("]", add_special_tokens=False)[0])
    allowed(wrong)
    assert wrong.failure is not None
    assert "doesn't satisfy the grammar" in wrong.failure


def test_a_token_that_the_form_forbids_says_what_left_no_other(
    cache: GrammarCache, tokenizer: Tokenizer
) -> None:
    matcher = cache.matcher(StructuredOutputs(choice=["yes", "no"]))
    allowed(matcher)
    matcher.accept(tokenizer.encode("x", add_special_tokens=False)[0])
    assert matcher.failure is not None
    assert "allowed_token_ids, bad_words and logit_bias leave" in matcher.failure


def test_a_tokenizer_that_does_not_tell_bytes_serves_no_forms() -> None:
    """A word-level tokenizer does not tell its tokens' bytes."""
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "[UNK]": 1}, "[UNK]"))
    cache = GrammarCache(Tokenizer(backend), vocab_size=2, eos_token_ids=(1,))
    with pytest.raises(UnprocessableError, match="neither byte-level nor SentencePiece"):
        cache.check(StructuredOutputs(regex="a"))
