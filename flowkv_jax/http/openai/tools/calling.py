"""What a chat request's tools ask for: the form of the answer, and who reads calls out of it.

tool_choice    form                  parser
none           as the request's      none; the model is not told of the tools
auto           as the request's      the model's own way of writing calls
required       a list of calls       of that form
a function     its arguments         of that form
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from flowkv_jax.checks import bad_value
from flowkv_jax.config import ToolCallParserName
from flowkv_jax.errors import ValidationError
from flowkv_jax.http.openai.requests import ChatCompletionRequest, NamedToolChoice
from flowkv_jax.http.openai.tools.events import ToolParser
from flowkv_jax.http.openai.tools.forced import (
    NamedCallParser,
    RequiredCallsParser,
    form_of_function,
    form_of_required,
)
from flowkv_jax.http.openai.tools.hermes import HermesParser
from flowkv_jax.http.openai.tools.llama3_json import Llama3JsonParser


@dataclass(frozen=True, slots=True)
class ToolUse:
    """Attributes:
    new_parser: for each answer; None where answers are text only.
    form: `structured_outputs` that the choice forces; None for none.
    is_parallel: an answer may have more than one call.
    needs_model_way: `new_parser` has to come from `parser_named`.
    """

    new_parser: Callable[[], ToolParser] | None = None
    form: Mapping[str, Any] | None = None
    is_parallel: bool = True
    needs_model_way: bool = False


def tool_use_of(asked: ChatCompletionRequest) -> ToolUse:
    """
    Raises:
        ValidationError: a choice without tools, or of a tool that is not there; names given twice.
    """
    choice = asked.tool_choice
    is_parallel = asked.parallel_tool_calls is not False
    if not asked.tools:
        if choice is not None and choice != "none":
            raise ValidationError("tool_choice needs tools", parameter="tool_choice")
        return ToolUse()
    functions = {tool.function.name: tool.function for tool in asked.tools}
    if len(functions) < len(asked.tools):
        raise ValidationError("two tools have the same name", parameter="tools")
    if choice == "none":
        return ToolUse()
    if choice == "required":
        form = form_of_required(list(functions.values()), is_parallel=is_parallel)
        return ToolUse(RequiredCallsParser, form, is_parallel)
    if isinstance(choice, NamedToolChoice):
        name = choice.function.name
        if name not in functions:
            raise bad_value("tool_choice", name, "is none of the tools")
        return ToolUse(lambda: NamedCallParser(name), form_of_function(functions[name]))
    return ToolUse(is_parallel=is_parallel, needs_model_way=True)


def parser_named(
    name: ToolCallParserName, asked: ChatCompletionRequest
) -> Callable[[], ToolParser]:
    """Makes parsers of the model's own way of writing calls."""
    if name == "hermes":
        return HermesParser
    names = [tool.function.name for tool in asked.tools or ()]
    return lambda: Llama3JsonParser(names)


PROBE_TOOL: Mapping[str, Any] = {
    "type": "function",
    "function": {
        "name": "flowkv_probe",
        "description": "None.",
        "parameters": {"type": "object", "properties": {}},
    },
}
"""What a template is shown to see how it tells the model to write calls."""


def parser_evident_in(rendered: str) -> ToolCallParserName | None:
    """The parser that a prompt asks for which shows `PROBE_TOOL` to the model; None if it tells
    of no tools, or asks for none of the known ways."""
    if "flowkv_probe" not in rendered:
        return None
    if "<tool_call>" in rendered:
        return "hermes"
    instructed = '{"name": function name, "parameters":'
    if instructed in rendered or "<|python_tag|>" in rendered:
        return "llama3_json"
    return None
