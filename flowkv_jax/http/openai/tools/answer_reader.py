"""One answer with tools: text as it comes, told in OpenAI's words."""

from __future__ import annotations

import uuid
from typing import Any

from msgspec import UNSET

from flowkv_jax.http.openai.responses import AnswerMessage, FunctionCall, ToolCallAnswer
from flowkv_jax.http.openai.tools.calling import ToolUse
from flowkv_jax.http.openai.tools.events import CallBegins, Text, ToolEvent, gathered

_PIECE_CHARACTERS = 4096
"""A whole answer is fed in pieces of this: a parser copies what is left of a piece for every call
in it."""


class AnswerReader:
    """Feeds a parser of its own.

    Args:
        tools: with a parser.
    """

    def __init__(self, tools: ToolUse) -> None:
        if tools.new_parser is None:
            raise RuntimeError("these tools ask for no parser")
        self._parser = tools.new_parser()
        self._is_parallel = tools.is_parallel
        self._has_calls = False

    def read(self, text: str, *, is_over: bool) -> list[dict[str, Any]]:
        """The deltas that `text` makes, as members of a message."""
        deltas: list[dict[str, Any]] = []
        for event in self._events(text, is_over=is_over):
            if isinstance(event, Text):
                deltas.append({"content": event.text})
            elif isinstance(event, CallBegins):
                call = {
                    "index": event.index,
                    "id": _new_id(),
                    "type": "function",
                    "function": {"name": event.name, "arguments": ""},
                }
                deltas.append({"tool_calls": [call]})
            else:
                call = {"index": event.index, "function": {"arguments": event.text}}
                deltas.append({"tool_calls": [call]})
        return deltas

    def message(self, text: str) -> AnswerMessage:
        """The message of a whole answer."""
        answer = gathered(self._events(text, is_over=True))
        calls = [
            ToolCallAnswer(id=_new_id(), function=FunctionCall(name=c.name, arguments=c.arguments))
            for c in answer.calls
        ]
        content = answer.text or (None if calls else "")
        return AnswerMessage(content=content, tool_calls=calls or UNSET)

    def finish_reason(self, reason: str | None) -> str | None:
        """An answer that ended by itself and has calls ended for them."""
        return "tool_calls" if reason == "stop" and self._has_calls else reason

    def _events(self, text: str, *, is_over: bool) -> list[ToolEvent]:
        events: list[ToolEvent] = []
        for start in range(0, len(text), _PIECE_CHARACTERS):
            events += self._parser.feed(text[start : start + _PIECE_CHARACTERS])
        if is_over:
            events += self._parser.finish()
        if not self._is_parallel:
            events = [one for one in events if isinstance(one, Text) or one.index == 0]
        self._has_calls = self._has_calls or any(isinstance(one, CallBegins) for one in events)
        return events


def _new_id() -> str:
    return f"call_{uuid.uuid4().hex[:24]}"
