"""Calls that a request forces, by the form the answer must have.

required     [{"name": "f", "arguments": {..}}, ..]     at least one of the tools
a function   {..}                                       its arguments alone
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from typing import Any

from flowkv_jax.http.openai.requests import FunctionDefinition
from flowkv_jax.http.openai.tools.call_listener import CallListener
from flowkv_jax.http.openai.tools.events import CallArguments, CallBegins, Text, ToolEvent

_ANY_OBJECT: Mapping[str, Any] = {"type": "object"}
_MAX_CALLS = 32


def form_of_function(function: FunctionDefinition) -> dict[str, Any]:
    """`structured_outputs` for a call of this function."""
    return {"json": dict(function.parameters or _ANY_OBJECT)}


def form_of_required(
    functions: Sequence[FunctionDefinition], *, is_parallel: bool
) -> dict[str, Any]:
    """`structured_outputs` for a call of any of these functions, or with `is_parallel` several."""
    definitions: dict[str, Any] = {}
    calls: list[dict[str, Any]] = []
    for number, function in enumerate(functions):
        place = f"tool_{number}"
        parameters = function.parameters or _ANY_OBJECT
        definitions[place] = _moved(dict(parameters), f"#/$defs/{place}")
        calls.append(
            {
                "type": "object",
                "properties": {
                    "name": {"const": function.name},
                    "arguments": {"$ref": f"#/$defs/{place}"},
                },
                "required": ["name", "arguments"],
                "additionalProperties": False,
            }
        )
    return {
        "json": {
            "type": "array",
            "minItems": 1,
            "maxItems": _MAX_CALLS if is_parallel else 1,
            "items": {"anyOf": calls},
            "$defs": definitions,
        }
    }


def _moved(schema: Any, place: str) -> Any:
    """The schema with references into itself, for when it stands at `place` of a larger one."""
    if isinstance(schema, list):
        return [_moved(item, place) for item in schema]
    if not isinstance(schema, dict):
        return schema
    moved = {key: _moved(value, place) for key, value in schema.items()}
    reference = moved.get("$ref")
    if isinstance(reference, str) and reference.startswith("#"):
        moved["$ref"] = place + reference[1:]
    return moved


class NamedCallParser:
    """The answer is the arguments of one call."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._has_begun = False

    def feed(self, text: str) -> list[ToolEvent]:
        """See `ToolParser`."""
        events: list[ToolEvent] = []
        if not text:
            return events
        if not self._has_begun:
            self._has_begun = True
            events.append(CallBegins(0, self._name))
        events.append(CallArguments(0, text))
        return events

    def finish(self) -> list[ToolEvent]:
        """See `ToolParser`."""
        return []


class _Place(enum.Enum):
    OUTSIDE = enum.auto()
    """Before, between and behind the calls."""
    CALL = enum.auto()
    TEXT = enum.auto()


class RequiredCallsParser:
    """The answer is a list of calls. Anything else, which the form rules out, is text."""

    def __init__(self) -> None:
        self._place = _Place.OUTSIDE
        self._calls = CallListener()

    def feed(self, text: str) -> list[ToolEvent]:
        """See `ToolParser`."""
        events: list[ToolEvent] = []
        rest = text
        while rest:
            if self._place is _Place.CALL:
                stop = self._calls.read(rest, 0, events)
                rest = rest[stop:]
                if self._calls.is_refused:
                    self._place = _Place.TEXT
                    events.append(Text(self._calls.written))
                elif self._calls.is_over:
                    self._place = _Place.OUTSIDE
            elif self._place is _Place.TEXT:
                events.append(Text(rest))
                rest = ""
            else:
                rest = rest.lstrip(" \t\r\n[,]")
                if rest.startswith("{"):
                    self._place = _Place.CALL
                    self._calls.next_call()
                elif rest:
                    self._place = _Place.TEXT
        return events

    def finish(self) -> list[ToolEvent]:
        """See `ToolParser`."""
        if self._place is _Place.CALL and self._calls.written:
            return [Text(self._calls.written)]
        return []
