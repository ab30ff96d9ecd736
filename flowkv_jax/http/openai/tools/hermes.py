"""As Hermes and Qwen write calls: <tool_call>{"name": .., "arguments": ..}</tool_call>, many times.

Space around calls is no text of the answer. What stands between the tags and is no call is text,
tags and all.
"""

from __future__ import annotations

import enum

from flowkv_jax.http.openai.tools.call_listener import (
    CallListener,
    HeldText,
    partial_tag_length,
)
from flowkv_jax.http.openai.tools.events import ToolEvent

_OPENS = "<tool_call>"
_CLOSES = "</tool_call>"


class _Place(enum.Enum):
    TEXT = enum.auto()
    CALL = enum.auto()
    BEHIND = enum.auto()
    """Behind a call's object, where its closing tag belongs."""


class HermesParser:
    """See the module."""

    def __init__(self) -> None:
        self._place = _Place.TEXT
        self._partial = ""
        self._text = HeldText()
        self._calls = CallListener()

    def feed(self, text: str) -> list[ToolEvent]:
        """See `ToolParser`."""
        events: list[ToolEvent] = []
        rest = text
        while rest:
            if self._place is _Place.CALL:
                rest = self._in_call(rest, events)
                continue
            rest, self._partial = self._partial + rest, ""
            if self._place is _Place.TEXT:
                rest = self._in_text(rest, events)
            else:
                rest = self._behind_call(rest)
        return events

    def finish(self) -> list[ToolEvent]:
        """See `ToolParser`."""
        events: list[ToolEvent] = []
        if self._place is _Place.CALL and not self._calls.has_begun:
            self._text.say(_OPENS + self._calls.written, events)
        elif self._place is _Place.TEXT:
            self._text.say(self._partial, events)
        if self._calls.num_begun == 0:
            self._text.flush(events)
        return events

    def _in_text(self, text: str, events: list[ToolEvent]) -> str:
        before, tag, behind = text.partition(_OPENS)
        if not tag:
            held = partial_tag_length(text, _OPENS)
            self._partial = text[len(text) - held :]
            before = text[: len(text) - held]
        self._text.say(before, events)
        if tag:
            self._place = _Place.CALL
            self._calls.next_call()
        return behind

    def _in_call(self, text: str, events: list[ToolEvent]) -> str:
        stop = self._calls.read(text, 0, events)
        if self._calls.is_refused:
            self._place = _Place.TEXT
            self._text.say(_OPENS + self._calls.written, events)
        elif self._calls.is_over:
            self._place = _Place.BEHIND
            self._text.drop_space()
        return text[stop:]

    def _behind_call(self, text: str) -> str:
        text = text.lstrip()
        if text.startswith(_CLOSES):
            self._place = _Place.TEXT
            return text[len(_CLOSES) :]
        if _CLOSES.startswith(text):
            self._partial = text
            return ""
        self._place = _Place.TEXT
        return text
