"""Tool-call parsers: what they read, and that where an answer is cut changes nothing."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowkv_jax.http.openai.tools.events import (
    CallArguments,
    CallBegins,
    ParsedAnswer,
    ParsedCall,
    Text,
    ToolEvent,
    gathered,
)
from flowkv_jax.http.openai.tools.forced import NamedCallParser, RequiredCallsParser
from flowkv_jax.http.openai.tools.hermes import HermesParser
from flowkv_jax.http.openai.tools.llama3_json import Llama3JsonParser

PARSERS = {
    "hermes": HermesParser,
    "llama3_json": lambda: Llama3JsonParser(["f", "g"]),
    "required": RequiredCallsParser,
    "named": lambda: NamedCallParser("f"),
}


def read(kind: str, *pieces: str) -> ParsedAnswer:
    parser = PARSERS[kind]()
    events: list[ToolEvent] = []
    for piece in pieces:
        events += parser.feed(piece)
    return gathered(events + parser.finish())


CALL_F = ParsedCall("f", '{"a": 1}')
CASES = {
    "text": ("hermes", "Hello there. \n", ParsedAnswer("Hello there. \n", ())),
    "one": ("hermes", '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>', CALL_F),
    "other order": ("hermes", '<tool_call>{"arguments":{"a": 1},"name":"f"}</tool_call>', CALL_F),
    "other word": ("hermes", '<tool_call>{"parameters":{"a": 1},"name":"f"}</tool_call>', CALL_F),
    "more members": (
        "hermes",
        '<tool_call>{"id": "}", "x": [{"y": "]"}], "name": "f", "arguments": {"a": 1}}</tool_call>',
        CALL_F,
    ),
    "arguments as text": (
        "hermes",
        '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>',
        CALL_F,
    ),
    "no arguments": (
        "hermes",
        '<tool_call>{"name": "f"}</tool_call>',
        ParsedCall("f", "{}"),
    ),
    "escaped name": (
        "hermes",
        '<tool_call>{"n\\u0061me": 0, "name": "\\u0066", "arguments": {"a": 1}}</tool_call>',
        CALL_F,
    ),
    "text before": (
        "hermes",
        'Let me see.\n<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>',
        ParsedAnswer("Let me see.", (CALL_F,)),
    ),
    "two": (
        "hermes",
        '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>\n'
        '<tool_call>{"name": "g", "arguments": {"t": "</tool_call>{\\"}"}}</tool_call>\n',
        ParsedAnswer("", (CALL_F, ParsedCall("g", '{"t": "</tool_call>{\\"}"}'))),
    ),
    "no closing tag": ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1}}', CALL_F),
    "text behind": (
        "hermes",
        '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call> and so on',
        ParsedAnswer(" and so on", (CALL_F,)),
    ),
    "cut off": (
        "hermes",
        '<tool_call>{"name": "f", "arguments": {"a": 1',
        ParsedCall("f", '{"a": 1'),
    ),
    "cut off before the name": (
        "hermes",
        '<tool_call>{"arguments": {"a": 1',
        ParsedAnswer('<tool_call>{"arguments": {"a": 1', ()),
    ),
    "no call in tags": (
        "hermes",
        "<tool_call>f(1)</tool_call>",
        ParsedAnswer("<tool_call>f(1)</tool_call>", ()),
    ),
    "a nameless object in tags": (
        "hermes",
        '<tool_call>{"a": 1}</tool_call>!',
        ParsedAnswer('<tool_call>{"a": 1}</tool_call>!', ()),
    ),
    "part of a tag": ("hermes", "a <tool_ca", ParsedAnswer("a <tool_ca", ())),
    "a tag alone": ("hermes", "a <tool_call>", ParsedAnswer("a <tool_call>", ())),
    "llama": ("llama3_json", '{"name": "f", "parameters": {"a": 1}}', CALL_F),
    "llama with its tag": (
        "llama3_json",
        '<|python_tag|>{"type": "function", "name": "f", "parameters": {"a": 1}}',
        CALL_F,
    ),
    "llama two": (
        "llama3_json",
        '{"name": "f", "parameters": {"a": 1}}; {"name": "g", "parameters": {}}',
        ParsedAnswer("", (CALL_F, ParsedCall("g", "{}"))),
    ),
    "llama text": ("llama3_json", " Hi {x} ", ParsedAnswer(" Hi {x} ", ())),
    "llama other object": (
        "llama3_json",
        '{"name": "Ann", "age": 3} ',
        ParsedAnswer('{"name": "Ann", "age": 3} ', ()),
    ),
    "llama part of its tag": ("llama3_json", "<|pyth", ParsedAnswer("<|pyth", ())),
    "required": (
        "required",
        '[{"name": "f", "arguments": {"a": 1}}, {"name":"g","arguments":{}}]',
        ParsedAnswer("", (CALL_F, ParsedCall("g", "{}"))),
    ),
    "required cut off": ("required", '[{"nam', ParsedAnswer('{"nam', ())),
    "named": ("named", '{"a": 1}', CALL_F),
}


@pytest.mark.parametrize("case", CASES)
def test_reads(case: str) -> None:
    kind, text, expected = CASES[case]
    if isinstance(expected, ParsedCall):
        expected = ParsedAnswer("", (expected,))
    assert read(kind, text) == expected
    assert read(kind, *text) == expected


def test_a_call_is_told_as_it_comes() -> None:
    parser = HermesParser()
    told = [
        parser.feed(piece)
        for piece in (
            "Hm. <tool",
            '_call>{"name": "f',
            '", "argum',
            'ents": {"a": "x',
            'y"}}',
            "</",
        )
    ]
    assert told == [
        [Text("Hm.")],
        [],
        [CallBegins(0, "f")],
        [CallArguments(0, '{"a": "x')],
        [CallArguments(0, 'y"}')],
        [],
    ]


_fragments = st.lists(
    st.sampled_from(
        ["<tool_call>", "</tool_call>", "<tool", "{", "}", '"', "\\", ":", ",", ";", "[", "]", " "]
        + ['"name"', '"arguments"', '"f"', '{"name": "f", "parameters": {"a": [1, "}"]}}', "é\n"]
        + ["<|python_tag|>", "x"]
    ),
    max_size=20,
).map("".join)


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(sorted(PARSERS)), _fragments, st.data())
def test_any_cut_gives_the_same(kind: str, text: str, data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    edges = [0, *cuts, len(text)]
    pieces = [text[a:b] for a, b in zip(edges, edges[1:], strict=False)]
    assert read(kind, *pieces) == read(kind, text)


_arguments = st.dictionaries(
    st.text(max_size=6),
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(max_size=8),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
        max_leaves=6,
    ),
    max_size=4,
)


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from("fg"), _arguments), min_size=1, max_size=4), st.booleans()
)
def test_what_was_written_is_read(calls: list[tuple[str, dict]], is_ascii: bool) -> None:
    written = [
        json.dumps({"name": name, "arguments": arguments}, ensure_ascii=is_ascii)
        for name, arguments in calls
    ]
    answers = {
        "hermes": "\n".join(f"<tool_call>\n{one}\n</tool_call>" for one in written),
        "llama3_json": "; ".join(written),
        "required": f"[{', '.join(written)}]",
    }
    for kind, text in answers.items():
        answer = read(kind, text)
        assert answer.text == ""
        assert [(c.name, json.loads(c.arguments)) for c in answer.calls] == calls


def test_time_is_linear_in_what_is_held_back() -> None:
    """Held back text is neither joined nor searched again for each piece: 200,000 pieces would
    take minutes."""
    for kind in ("hermes", "llama3_json"):
        assert read(kind, *(" " * 200_000)).text == " " * 200_000
    for piece in ("<", "{", '<tool_call>{"x":"', '"'):
        read("hermes", *([piece] * 30_000))
