"""A Jinja sandbox with a budget: templates from strangers can neither reach Python nor run on.

Jinja's immutable sandbox keeps a template from reaching Python objects; it does not keep it from
running or growing for ever. So a template's syntax tree is rewritten before it is compiled, and
everything that takes time or memory is paid from one budget of work per rendering:

    a turn of a loop, a call, a list item  a fixed price
    a filter, a test for membership        the length of what it reads
    printing, joining, repeating, adding   the length of what it makes, in whole or part in advance

Functions whose result can be far larger than their arguments (padding, formatting) are not there.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

MAX_WORK = 1 << 26
_TURN_WORK = 32
_CALL_WORK = 512
_MAX_INT_BITS = 4096
_MAX_JSON_INDENT = 16

_GROWING_FILTERS = ("center", "format", "wordwrap", "batch", "slice", "urlize", "xmlattr")
_GROWING_STR_METHODS = frozenset(
    {"center", "ljust", "rjust", "zfill", "expandtabs", "format", "format_map", "translate"}
)
# Filters that look at the items of a list but not inside them. The others may write out every item,
# and a short list can hold one long text many times.
_SHALLOW_FILTERS = frozenset(
    {"length", "count", "first", "last", "list", "select", "reject", "selectattr"}
    | {"rejectattr", "sort", "unique", "reverse", "items", "dictsort", "groupby", "default", "d"}
    | {"sum", "min", "max", "attr"}
)


class BudgetError(SecurityError):
    """The template works or grows past its budget."""


class TemplateRefusal(Exception):
    """Raised by a template itself, through `raise_exception`."""


def compile_template(source: str, now: Callable[[], datetime]) -> jinja2.Template:
    """A template whose every rendering starts with a budget of `MAX_WORK`.

    Args:
        now: what `strftime_now` reads.

    Raises:
        jinja2.TemplateSyntaxError: it is not valid Jinja.
        RecursionError, SyntaxError, MemoryError: it nests too deeply for Python.
    """
    environment = _environment(now)
    tree = _Meter(environment).visit(environment.parse(source))
    template: jinja2.Template = environment.from_string(tree)
    return template


class _MeteredContext(Context):
    """The names of one rendering, and what is left of its budget."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._purse = [MAX_WORK]

    def derived(self, locals: dict[str, Any] | None = None) -> Context:
        inner = super().derived(locals)
        if isinstance(inner, _MeteredContext):
            inner._purse = self._purse
        return inner

    def pay(self, work: int) -> None:
        self._purse[0] -= work
        if self._purse[0] < 0:
            raise BudgetError(f"it exceeds its budget of {MAX_WORK} units of work")


class _Environment(ImmutableSandboxedEnvironment):
    """The sandbox, with calls and operators on the budget of the context they run in."""

    intercepted_binops = frozenset({"*", "**", "%"})
    context_class = _MeteredContext

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        if isinstance(obj, str) and attr in _GROWING_STR_METHODS:
            return False
        return super().is_safe_attribute(obj, attr, value)

    def wrap_str_format(self, value: Any) -> None:
        if isinstance(getattr(value, "__self__", None), str) and value.__name__ in (
            "format",
            "format_map",
        ):
            raise SecurityError("str.format is not available")

    def call(self, context: Context, obj: Any, *args: Any, **kwargs: Any) -> Any:
        _pay(context, _CALL_WORK)
        owner = getattr(obj, "__self__", None)
        if isinstance(owner, str):
            _pay_for_str_method(context, owner, getattr(obj, "__name__", ""), args)
        return super().call(context, obj, *args, **kwargs)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        for one, other in ((left, right), (right, left)):
            if isinstance(one, str | list | tuple):
                if operator != "*":
                    raise SecurityError(f"{operator} on text is not available")
                if isinstance(other, int):
                    _pay(context, len(one) * max(other, 0))
        if isinstance(left, int) and isinstance(right, int):
            bits = left.bit_length() * (abs(right) if operator == "**" else 1) + right.bit_length()
            if bits > _MAX_INT_BITS:
                raise BudgetError(f"an integer exceeds {_MAX_INT_BITS} bits")
        return super().call_binop(context, operator, left, right)


class _Meter(NodeTransformer):
    """Rewrites a syntax tree so that loops, filters, joins and printing pay."""

    def __init__(self, environment: jinja2.Environment) -> None:
        self._environment = environment

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        node.iter = self._through("_turns", node.iter)
        return node

    def visit_Output(self, node: nodes.Output) -> nodes.Node:
        self.generic_visit(node)
        node.nodes = [
            child if isinstance(child, nodes.TemplateData) else self._through("_writes", child)
            for child in node.nodes
        ]
        return node

    def visit_Filter(self, node: nodes.Filter) -> nodes.Node:
        self.generic_visit(node)
        if node.node is not None:
            meter = "_reads" if node.name in _SHALLOW_FILTERS else "_writes"
            node.node = self._through(meter, node.node)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        node.nodes = [self._through("_writes", child) for child in node.nodes]
        return node

    def visit_Add(self, node: nodes.Add) -> nodes.Node:
        self.generic_visit(node)
        return self._through("_reads", node)

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:
        self.generic_visit(node)
        for operand in node.ops:
            if operand.op in ("in", "notin"):
                operand.expr = self._through("_reads", operand.expr)
        return node

    def _through(self, filter_name: str, expression: nodes.Node) -> nodes.Expr:
        wrapped = nodes.Filter(expression, filter_name, [], [], None, None)
        wrapped.set_lineno(expression.lineno)
        wrapped.set_environment(self._environment)
        return wrapped


def _pay(context: Context, work: int) -> None:
    assert isinstance(context, _MeteredContext)
    context.pay(work)


def _pay_for_text(context: Context, value: Any) -> None:
    """Pay for every character that writing `value` out would take, and for every item visited."""
    if isinstance(value, str):
        _pay(context, len(value))
    elif isinstance(value, Mapping):
        for key, item in value.items():
            _pay_for_text(context, key)
            _pay_for_text(context, item)
    elif isinstance(value, Sequence) and not isinstance(value, range):
        for item in value:
            _pay_for_text(context, item)
    _pay(context, _TURN_WORK)


def _pay_for_str_method(
    context: Context, owner: str, name: str, arguments: tuple[Any, ...]
) -> None:
    _pay(context, len(owner))
    if name == "replace" and len(arguments) >= 2:
        _pay_for_replace(context, owner, arguments[0], arguments[1])
    elif name == "join" and arguments and isinstance(arguments[0], Sequence):
        _pay(context, len(owner) * len(arguments[0]))
        _pay_for_text(context, arguments[0])


def _pay_for_replace(context: Context, text: str, old: Any, new: Any) -> None:
    _pay(context, len(text) + text.count(str(old)) * len(str(new)))


@jinja2.pass_context
def _turns(context: Context, items: Iterable[Any]) -> Iterator[Any]:
    for item in items:
        _pay(context, _TURN_WORK)
        yield item


@jinja2.pass_context
def _reads(context: Context, value: Any) -> Any:
    _pay(context, len(value) if isinstance(value, Sequence | Mapping) else 1)
    return value


@jinja2.pass_context
def _writes(context: Context, value: Any) -> Any:
    _pay_for_text(context, value)
    return value


@jinja2.pass_context
def _range(context: Context, *bounds: int) -> range:
    numbers = range(*bounds)
    # Tested first because len() of a longer range overflows.
    if numbers and abs(numbers[-1] - numbers[0]) > MAX_WORK * abs(numbers.step):
        raise BudgetError(f"a range is longer than {MAX_WORK}")
    _pay(context, len(numbers))
    return numbers


@jinja2.pass_context
def _replace(context: Context, text: Any, old: str, new: str, count: int = -1) -> str:
    _pay_for_replace(context, str(text), old, new)
    return str(text).replace(str(old), str(new), count)


@jinja2.pass_context
def _join(context: Context, items: Iterable[Any], d: str = "", attribute: Any = None) -> str:
    if attribute is not None:
        items = (context.environment.getitem(item, attribute) for item in items)
    pieces = []
    for item in items:
        _pay_for_text(context, item)
        _pay(context, len(d))
        pieces.append(str(item))
    return d.join(pieces)


@jinja2.pass_context
def _indent(
    context: Context, text: Any, width: int | str = 4, first: bool = False, blank: bool = False
) -> str:
    lines = str(text).splitlines(keepends=True)
    _pay(context, (width if isinstance(width, int) else len(width)) * len(lines))
    margin = " " * width if isinstance(width, int) else width
    return "".join(
        line if (i == 0 and not first) or not (blank or line.strip()) else margin + line
        for i, line in enumerate(lines)
    )


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON without HTML escapes, as the templates of transformers expect."""
    if indent is not None and not 0 <= indent <= _MAX_JSON_INDENT:
        raise BudgetError(f"tojson indent={indent} must be in [0, {_MAX_JSON_INDENT}]")
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: Any) -> None:
    raise TemplateRefusal(f"{message!s:.1000}")


class _GenerationTag(Extension):
    """`{% generation %}`: marks the assistant's text for training; here it is only its body."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment(now: Callable[[], datetime]) -> _Environment:
    def strftime_now(format: str) -> str:
        # Field widths are an extension of the C library that could make gigabytes.
        if len(format) > 100 or re.search(r"%[^a-zA-Z%]*\d", format):
            raise SecurityError(f"date format {format!r:.100} is not available")
        return now().strftime(format)

    environment = _Environment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=["jinja2.ext.loopcontrols", _GenerationTag],
        # Constant folding would run filters at compile time, outside any budget.
        optimized=False,
    )
    for name in _GROWING_FILTERS:
        del environment.filters[name]
    environment.filters.update(
        _turns=_turns,
        _reads=_reads,
        _writes=_writes,
        replace=_replace,
        join=_join,
        indent=_indent,
        tojson=_tojson,
    )
    environment.globals = {name: environment.globals[name] for name in ("dict", "namespace")}
    environment.globals.update(
        range=_range, raise_exception=_raise_exception, strftime_now=strftime_now
    )
    return environment
