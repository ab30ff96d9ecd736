"""What the parsers share: a call under way, and text whose end may belong to what follows."""

from __future__ import annotations

from flowkv_jax.http.openai.tools.call_reader import CallReader
from flowkv_jax.http.openai.tools.events import CallArguments, CallBegins, Text, ToolEvent


class CallListener:
    """Reads one call after another and says what is known of each.

    Args:
        names: what may be called; None for anything.
    """

    def __init__(self, names: frozenset[str] | None = None) -> None:
        self._names = names
        self._reader = CallReader()
        self._raw: list[str] = []
        self._num_begun = 0
        self._has_begun = False
        self._is_refused = False

    @property
    def num_begun(self) -> int:
        """Calls so far."""
        return self._num_begun

    @property
    def has_begun(self) -> bool:
        """It is known to be a call."""
        return self._has_begun

    @property
    def is_over(self) -> bool:
        """The call has ended; what follows is no part of it."""
        return self._reader.is_over or (self._has_begun and self._reader.is_broken)

    @property
    def is_refused(self) -> bool:
        """It is no call: `written` is what it is."""
        return not self._has_begun and (self._reader.is_broken or self._is_refused)

    @property
    def written(self) -> str:
        """What was read before it was known to be a call."""
        return "" if self._has_begun else "".join(self._raw)

    def next_call(self) -> None:
        """Another one begins."""
        self._reader = CallReader()
        self._raw = []
        self._has_begun = self._is_refused = False

    def read(self, text: str, start: int, events: list[ToolEvent]) -> int:
        """Read on from `text[start]`; returns where it stopped."""
        stop = self._reader.feed(text, start)
        if not self._has_begun:
            self._raw.append(text[start:stop])
            name = self._reader.name
            if name is None:
                return stop
            if self._names is not None and name not in self._names:
                self._is_refused = True
                return stop
            self._has_begun = True
            events.append(CallBegins(self._num_begun, name))
            self._num_begun += 1
        arguments = self._reader.take_arguments()
        if arguments:
            events.append(CallArguments(self._num_begun - 1, arguments))
        return stop


class HeldText:
    """Text whose trailing space is held back until something follows it that is text, too."""

    def __init__(self) -> None:
        self._space: list[str] = []

    def say(self, text: str, events: list[ToolEvent]) -> None:
        body = text.rstrip()
        if body:
            events.append(Text("".join(self._space) + body))
            self._space = []
        if len(body) < len(text):
            self._space.append(text[len(body) :])

    def drop_space(self) -> None:
        self._space = []

    def flush(self, events: list[ToolEvent]) -> None:
        if self._space:
            events.append(Text("".join(self._space)))
            self._space = []


def partial_tag_length(text: str, tag: str) -> int:
    """How much of the end of `text` may be the beginning of `tag`."""
    for length in range(min(len(tag) - 1, len(text)), 0, -1):
        if text.endswith(tag[:length]):
            return length
    return 0
