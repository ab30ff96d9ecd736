"""Chat templates: what they may do, and that they can neither reach out, run on, nor grow."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import pytest

from flowkv_jax.chat_template import (
    MAX_OUTPUT_CHARS,
    MAX_TEMPLATE_CHARS,
    ChatTemplate,
    checked_messages,
)
from flowkv_jax.errors import ValidationError

HELLO = [{"role": "user", "content": "hello"}]


def render(source: str, messages: Any = HELLO, **variables: Any) -> str:
    template = ChatTemplate(source, now=lambda: datetime(2026, 1, 31))
    return template.render(
        messages, bos_token="<s>", eos_token="</s>", add_generation_prompt=True, variables=variables
    )


def test_blocks_leave_no_blank_lines() -> None:
    lines = (
        "{% for m in messages %}",
        "  {% if true %}",
        "{{ m.role }}: {{ m['content'] }}",
        "  {% endif %}",
        "{% endfor %}",
        "",
    )
    assert render("\n".join(lines)) == "user: hello\n"


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{{ bos_token }}{{ eos_token }}{{ add_generation_prompt }}", "<s></s>True"),
        ("{{ strftime_now('%d %b %Y') }}", "31 Jan 2026"),
        ("{{ {'a': '<é>'} | tojson }}", '{"a": "<é>"}'),
        ("{{ [1] | tojson(indent=2) }}", "[\n  1\n]"),
        ("{% generation %}x{% endgeneration %}", "x"),
        ("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "01"),
        ("{% for x in 'abc' %}{{ loop.index }}/{{ loop.length }}{{ loop.last }} {% endfor %}",
         "1/3False 2/3False 3/3True "),
        ("{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}"
         "{% endfor %}{{ ns.n }}", "1"),
        ("{{ messages | selectattr('role', 'equalto', 'user') | list | length }}", "1"),
        ("{{ messages | map(attribute='content') | join('-') }}", "hello"),
        ("{{ 'a b'.split(' ') | join('+') }}{{ 'aXa' | replace('X', '--') }}", "a+ba--a"),
        ("{{ 'a\nb' | indent(2) }}|{{ 'a\nb' | indent(2, true) }}", "a\n  b|  a\n  b"),
        ("{{ ' x '.strip() ~ 7 % 4 }}{{ 'ell' in messages[0].content }}", "x3True"),
        ("{% macro f(x) %}[{{ x }}]{% endmacro %}{{ f(1) }}{{ f('a') }}", "[1][a]"),
        ("{{ unknown }}{{ messages[::-1][0]['role'] }}{{ 'x' if tools is defined }}", "user"),
    ],
)  # fmt: skip
def test_what_templates_use(source: str, expected: str) -> None:
    assert render(source) == expected


def test_variables_reach_the_template() -> None:
    assert render("{{ tools[0].name }}{{ flag }}", tools=[{"name": "f"}], flag=None) == "fNone"


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("a\nb{% if %}", "chat template line 2: Expected an expression"),
        ("a\n\n{{ x | nope }}", "chat template line 3: No filter named 'nope'"),
        ("{{ " + "(" * 9000 + ")" * 9000 + " }}", "it nests too deeply"),
        ("{{ " + "-" * 9000 + "1 }}", "it nests too deeply"),
    ],
)
def test_malformed_templates_name_the_line(source: str, message: str) -> None:
    with pytest.raises(ValidationError, match=message) as caught:
        ChatTemplate(source)
    assert caught.value.parameter == "chat_template"


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("a\n{{ nope.x.y }}", "line 2: 'nope' is undefined"),
        ("a\nb\n{{ 'x' + 1 }}", "line 3: "),
        ("{% for m in messages %}\n{{ m.content.nope() }}\n{% endfor %}", "line 2: "),
        ("{% include 'x' %}", "line 1: no loader"),
    ],
)
def test_failing_templates_name_the_line(source: str, message: str) -> None:
    with pytest.raises(ValidationError, match=f"chat template {message}"):
        render(source)


def test_a_template_may_refuse_a_conversation() -> None:
    with pytest.raises(ValidationError, match="refuses this conversation: roles must alternate"):
        render("{{ raise_exception('roles must alternate') }}")


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update(role='x') }}",
        "{{ raise_exception.__globals__['sys'] }}",
        "{{ range.__call__.__self__ }}",
        "{{ lipsum.__globals__ }}",
        "{{ cycler('a').next() }}",
        "{{ ('{0.__class__}').format(1) }}",
        "{{ '{:1000000000}'.format(1) }}",
        "{{ ['{:1000000000}'] | map('format', 1) | list }}",
        "{{ '%1000000000d' % 1 }}",
        "{{ 'x'.center(1000000000) }}",
        "{{ 'x' | center(1000000000) }}",
        "{{ strftime_now('%1000000000Y') }}",
        "{{ [1] | tojson(indent=1000000000) }}",
    ],
)
def test_templates_cannot_reach_out(source: str) -> None:
    with pytest.raises(ValidationError):
        render(source)


GROW = (
    "{{% set ns = namespace(x={start}) %}}"
    "{{% for i in range(80) %}}{{% set ns.x = {next} %}}{{% endfor %}}"
)


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(10 ** 30) %}{% endfor %}",
        "{% for i in range(3000000) %}{% endfor %}",
        "{% for i in range(9999) %}{% for j in range(9999) %}{% endfor %}{% endfor %}",
        "{% macro f(n) %}{{ f(n) }}{% endmacro %}{{ f(0) }}",
        "{% macro f(n) %}{% if n < 90 %}{{ f(n + 1) }}{{ f(n + 1) }}{% endif %}{% endmacro %}"
        "{{ f(0) }}",
        "{% for x in messages recursive %}{{ loop(messages) }}{% endfor %}",
        "{{ 'a' * 10 ** 12 }}",
        "{{ [1] * 10 ** 12 }}",
        "{{ 10 ** 100000 }}",
        GROW.format(start="'aaaa'", next="ns.x ~ ns.x"),
        GROW.format(start="'aaaa'", next="ns.x + ns.x"),
        GROW.format(start="['aaaa']", next="ns.x + ns.x"),
        GROW.format(start="'aaaa'", next="ns.x | replace('a', 'aaaa')"),
        GROW.format(start="'aaaa'", next="ns.x.replace('a', 'aaaa')"),
        GROW.format(start="'aaaa'", next="ns.x.join(['', '', ''])"),
        GROW.format(start="'aaaa'", next="['', '', ''] | join(ns.x)"),
        GROW.format(start="'a\n'", next="ns.x | indent(1000) ~ ns.x"),
        GROW.format(start="7", next="ns.x * ns.x"),
        GROW.format(start="['a']", next="[ns.x, ns.x]") + "{{ ns.x | tojson }}",
        "{{ ['a' * 1000000] * 1000000 }}",
        "{{ (['a' * 1000000] * 1000000) ~ '' }}",
        "{{ ['a' * 1000000] * 1000000 | string }}",
        "{{ (['a' * 1000000] * 1000000) | map('upper') | list | length }}",
    ],
)
def test_templates_cannot_run_on_or_grow(source: str) -> None:
    with pytest.raises(ValidationError):
        render(source)


def test_sizes_are_bounded() -> None:
    with pytest.raises(ValidationError, match=f"exceeds {MAX_TEMPLATE_CHARS}"):
        ChatTemplate("x" * (MAX_TEMPLATE_CHARS + 1))
    with pytest.raises(ValidationError, match=f"output exceeds {MAX_OUTPUT_CHARS} characters"):
        render("{% for i in range(1000) %}{{ text }}{% endfor %}", text="x" * 10_000)


def test_a_budget_is_for_one_rendering_only() -> None:
    template = ChatTemplate("{% for i in range(900000) %}{% endfor %}ok")
    assert [template.render(HELLO) for _ in range(3)] == ["ok"] * 3


def test_text_parts_are_joined() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert checked_messages([{"role": "user", "content": parts}]) == [
        {"role": "user", "content": "a\nb"}
    ]


def test_tool_calls_may_stand_without_content() -> None:
    call = {"role": "assistant", "content": None, "tool_calls": [{"name": "f", "arguments": {}}]}
    assert checked_messages([call]) == [{**call, "content": ""}]


@pytest.mark.parametrize(
    ("messages", "parameter"),
    [
        ("hello", "messages"),
        ({"role": "user", "content": "x"}, "messages"),
        ([], "messages"),
        (None, "messages"),
        (["x"], "messages[0]"),
        ([{"content": "x"}], "messages[0].role"),
        ([{"role": "", "content": "x"}], "messages[0].role"),
        ([*HELLO, {"role": "user"}], "messages[1].content"),
        ([{"role": "user", "content": 3}], "messages[0].content"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "messages[0].content[0]"),
        ([{"role": "user", "content": ["x"]}], "messages[0].content[0]"),
        ([{"role": "user", "content": "x", "extra": object()}], "messages[0]"),
    ],
)
def test_malformed_messages_are_named(messages: Any, parameter: str) -> None:
    with pytest.raises(ValidationError) as caught:
        render("x", messages)
    assert caught.value.parameter == parameter


def test_malformed_variables_are_named() -> None:
    nested: Any = []
    for _ in range(100):
        nested = [nested]
    for variables, message in (
        ({"bos_token": "x"}, "'bos_token' is reserved"),
        ({"tools": print}, "tools: a builtin_function_or_method is not a plain JSON value"),
        ({"tools": nested}, "tools nests over 32 deep"),
    ):
        with pytest.raises(ValidationError, match=message):
            ChatTemplate("x").render(HELLO, variables=variables)
