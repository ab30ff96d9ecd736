"""What a parser says, and what a parser is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Text:
    """For the reader, outside of calls."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegins:
    """Calls are numbered from 0."""

    index: int
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """More of the JSON text of a call's arguments."""

    index: int
    text: str


ToolEvent = Text | CallBegins | CallArguments


class ToolParser(Protocol):
    """For one answer."""

    def feed(self, text: str) -> list[ToolEvent]:
        """What is certain now."""
        ...

    def finish(self) -> list[ToolEvent]:
        """What was held back, as the answer is over."""
        ...


@dataclass(frozen=True, slots=True)
class ParsedCall:
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class ParsedAnswer:
    text: str
    calls: tuple[ParsedCall, ...]


def gathered(events: list[ToolEvent]) -> ParsedAnswer:
    """All that a parser said of one answer, put together."""
    texts: list[str] = []
    names: list[str] = []
    arguments: list[list[str]] = []
    for event in events:
        if isinstance(event, Text):
            texts.append(event.text)
        elif isinstance(event, CallBegins):
            names.append(event.name)
            arguments.append([])
        else:
            arguments[event.index].append(event.text)
    calls = zip(names, map("".join, arguments), strict=True)
    return ParsedAnswer("".join(texts), tuple(ParsedCall(*call) for call in calls))
