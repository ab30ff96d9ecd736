"""What happened to transfers and peers, most recent last, bounded. Imports no JAX."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Event:
    """One thing that happened.

    Attributes:
        time_s: on the engine's clock.
        subject: a transfer's name, or an engine's id.
        what: one word: "submitted", "offered", "retry", "completed", "failed", "peer-lost", ...
        detail: for people; `str` of it says it.
    """

    time_s: float
    subject: str
    what: str
    detail: object = ""


class EventLog:
    """The last `max_events` events. Any thread may call."""

    def __init__(self, max_events: int, clock: Callable[[], float]) -> None:
        self._events: deque[Event] = deque(maxlen=max_events)
        self._clock = clock

    def add(self, subject: str, what: str, detail: object = "") -> None:
        self._events.append(Event(self._clock(), subject, what, detail))

    def snapshot(self, subject: str | None = None) -> list[Event]:
        """All events, or those of one subject; oldest first."""
        return [e for e in self._events.copy() if subject is None or e.subject == subject]
