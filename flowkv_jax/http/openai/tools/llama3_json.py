"""As Llama 3 writes calls: the answer is {"name": .., "parameters": ..}, or several of them with
; between.

An answer that is no object, or one that names no tool, is text: models asked for JSON answer with
objects, too.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable

from flowkv_jax.http.openai.tools.call_listener import CallListener, HeldText
from flowkv_jax.http.openai.tools.events import ToolEvent

_TAG = "<|python_tag|>"
"""Before a call; a special token, so mostly no part of the text."""
_SPACE = " \t\r\n"


class _Place(enum.Enum):
    BEGINNING = enum.auto()
    """Nothing but space, or part of the tag, so far."""
    CALL = enum.auto()
    BEHIND = enum.auto()
    """Behind a call, where another may follow."""
    TEXT = enum.auto()


class Llama3JsonParser:
    """See the module.

    Args:
        tool_names: what may be called.
    """

    def __init__(self, tool_names: Iterable[str]) -> None:
        self._place = _Place.BEGINNING
        self._held = ""
        self._text = HeldText()
        self._calls = CallListener(frozenset(tool_names))

    def feed(self, text: str) -> list[ToolEvent]:
        """See `ToolParser`."""
        events: list[ToolEvent] = []
        rest = text
        while rest:
            if self._place is _Place.CALL:
                rest = self._in_call(rest, events)
            elif self._place is _Place.TEXT:
                self._text.say(rest, events)
                rest = ""
            elif self._place is _Place.BEGINNING:
                rest = self._at_beginning(rest, events)
            else:
                rest = self._behind_call(rest)
        return events

    def finish(self) -> list[ToolEvent]:
        """See `ToolParser`."""
        events: list[ToolEvent] = []
        if self._place is _Place.CALL:
            self._text.say(self._calls.written, events)
        self._text.say(self._held, events)
        if self._calls.num_begun == 0:
            self._text.flush(events)
        return events

    def _at_beginning(self, text: str, events: list[ToolEvent]) -> str:
        begin = 0
        if not self._held:
            body = text.lstrip(_SPACE)
            begin = len(text) - len(body)
            self._text.say(text[:begin], events)
        rest, self._held = self._held + text[begin:], ""
        if rest.startswith(_TAG):
            rest = rest[len(_TAG) :]
            self._begin_call()
        elif _TAG.startswith(rest):
            self._held, rest = rest, ""
        elif rest.startswith("{"):
            self._begin_call()
        else:
            self._place = _Place.TEXT
        return rest

    def _begin_call(self) -> None:
        self._place = _Place.CALL
        self._calls.next_call()

    def _in_call(self, text: str, events: list[ToolEvent]) -> str:
        stop = self._calls.read(text, 0, events)
        if self._calls.is_refused:
            self._place = _Place.TEXT
            self._text.say(self._calls.written, events)
        elif self._calls.is_over:
            self._place = _Place.BEHIND
            self._text.drop_space()
        return text[stop:]

    def _behind_call(self, text: str) -> str:
        rest = text.lstrip(_SPACE + ";")
        if rest.startswith("{"):
            self._begin_call()
        elif rest:
            self._place = _Place.TEXT
        return rest
