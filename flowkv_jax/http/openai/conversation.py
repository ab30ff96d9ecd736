"""A chat request's messages and template variables, as the model's chat template takes them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from flowkv_jax.checks import bad_value
from flowkv_jax.errors import ValidationError
from flowkv_jax.http.openai.requests import (
    MAX_TEMPLATE_VARIABLES,
    MAX_TEMPLATE_VARIABLES_BYTES,
    MAX_TOOLS_BYTES,
    ChatCompletionRequest,
    ChatMessage,
    ToolCall,
)

# They belong to the renderer or to the request; a caller may not speak for them.
_FORBIDDEN_VARIABLES = frozenset(
    {
        "messages",
        "conversation",
        "tools",
        "chat_template",
        "tokenize",
        "add_generation_prompt",
        "continue_final_message",
        "bos_token",
        "eos_token",
        "raise_exception",
        "strftime_now",
        "range",
        "namespace",
        "dict",
    }
)


def messages_of(asked: ChatCompletionRequest) -> list[dict[str, Any]]:
    """The messages as plain dicts, without what was left out.

    Raises:
        ValidationError: a message without content that needs one.
    """
    return [_message(turn, f"messages[{i}]") for i, turn in enumerate(asked.messages)]


def _message(turn: ChatMessage, where: str) -> dict[str, Any]:
    message: dict[str, Any] = {"role": turn.role}
    content = turn.content
    if isinstance(content, list):
        message["content"] = [{"type": "text", "text": part.text} for part in content]
    elif content is not None:
        message["content"] = content
    elif not turn.tool_calls:
        raise ValidationError(
            f"{where}.content is missing; only an assistant's message with tool_calls may be"
            " without",
            parameter=f"{where}.content",
        )
    for name in ("name", "tool_call_id", "reasoning_content"):
        if (value := getattr(turn, name)) is not None:
            message[name] = value
    if turn.tool_calls:
        message["tool_calls"] = [_tool_call(call) for call in turn.tool_calls]
    return message


def _tool_call(call: ToolCall) -> dict[str, Any]:
    """Templates write arguments as JSON themselves, so they get them as values."""
    arguments: Any = call.function.arguments
    try:
        value = msgspec.json.decode(arguments)
    except (msgspec.DecodeError, RecursionError):
        value = None
    if isinstance(value, dict):
        arguments = value
    return {
        "id": call.id,
        "type": "function",
        "function": {"name": call.function.name, "arguments": arguments},
    }


def template_variables(asked: ChatCompletionRequest) -> dict[str, Any]:
    """More names for the template: the tools, and what the caller adds.

    Raises:
        ValidationError: too much, or names that are not the caller's to set.
    """
    variables = dict(_checked_variables(asked.chat_template_kwargs or {}))
    if asked.tools and asked.tool_choice != "none":
        tools = [msgspec.to_builtins(_without_none(tool)) for tool in asked.tools]
        size = len(msgspec.json.encode(tools))
        if size > MAX_TOOLS_BYTES:
            raise bad_value(
                "tools", "[...]", f"are {size} bytes of JSON; at most {MAX_TOOLS_BYTES}"
            )
        variables["tools"] = tools
    return variables


def _without_none(tool: Any) -> dict[str, Any]:
    function = {
        name: value
        for name in ("name", "description", "parameters", "strict")
        if (value := getattr(tool.function, name)) is not None
    }
    return {"type": "function", "function": function}


def _checked_variables(given: Mapping[str, Any]) -> Mapping[str, Any]:
    if len(given) > MAX_TEMPLATE_VARIABLES:
        raise bad_value(
            "chat_template_kwargs",
            "{...}",
            f"has {len(given)} names; at most {MAX_TEMPLATE_VARIABLES}",
        )
    for name in given:
        if name in _FORBIDDEN_VARIABLES or not name.isidentifier() or name.startswith("_"):
            raise bad_value("chat_template_kwargs", name, "is no name that a request may set")
    size = len(msgspec.json.encode(given))
    if size > MAX_TEMPLATE_VARIABLES_BYTES:
        raise bad_value(
            "chat_template_kwargs",
            "{...}",
            f"is {size} bytes of JSON; at most {MAX_TEMPLATE_VARIABLES_BYTES}",
        )
    return given
