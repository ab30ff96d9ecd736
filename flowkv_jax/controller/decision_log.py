"""What was decided, with the terms it was decided by; the newest, up to a bound."""

from __future__ import annotations

import enum
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


class DecisionKind(enum.Enum):
    ROUTE = "route"
    ROLE = "role"
    SCALE = "scale"
    REGIME = "regime"
    NODE = "node"


@dataclass(frozen=True, slots=True)
class Candidate:
    """One choice that was weighed.

    Attributes:
        name: of the node.
        purpose: "prefill", "decode", or what a policy weighed it for.
        cost_s: what was minimised.
        terms: what it is made of, by name; units are in the names.
    """

    name: str
    purpose: str
    cost_s: float
    terms: Mapping[str, float]

    def to_dict(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "purpose": self.purpose,
            "cost_s": self.cost_s,
            "terms": dict(self.terms),
        }


@dataclass(frozen=True, slots=True)
class Decision:
    """One entry of the log.

    Attributes:
        number: rises by one with each decision.
        time_s: on the caller's clock.
        kind: what was decided.
        subject: the sequence or node it is about, or "cluster".
        chosen: what was chosen.
        reason: in words.
        candidates: the best of those weighed, best first within each purpose.
        terms: further figures, by name.
    """

    number: int
    time_s: float
    kind: DecisionKind
    subject: str
    chosen: str
    reason: str
    candidates: tuple[Candidate, ...] = ()
    terms: Mapping[str, float] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        return {
            "number": self.number,
            "time_s": self.time_s,
            "kind": self.kind.value,
            "subject": self.subject,
            "chosen": self.chosen,
            "reason": self.reason,
            "candidates": [candidate.to_dict() for candidate in self.candidates],
            "terms": dict(self.terms),
        }


class DecisionLog:
    """The newest `max_entries` decisions.

    Attributes:
        counts: of all so far, by kind.
    """

    def __init__(self, max_entries: int) -> None:
        self._entries: deque[Decision] = deque(maxlen=max_entries)
        self._next = 1
        self.counts: Counter[DecisionKind] = Counter()

    def __len__(self) -> int:
        return len(self._entries)

    def add(
        self,
        time_s: float,
        kind: DecisionKind,
        subject: str,
        chosen: str,
        reason: str,
        candidates: Sequence[Candidate] = (),
        terms: Mapping[str, float] | None = None,
    ) -> Decision:
        """Append a decision; the oldest goes if there are too many."""
        entry = Decision(
            self._next, time_s, kind, subject, chosen, reason, tuple(candidates), terms or {}
        )
        self._next += 1
        self.counts[kind] += 1
        self._entries.append(entry)
        return entry

    def newest(self, limit: int, after: int | None = None) -> list[Decision]:
        """At most `limit` decisions, oldest first.

        With `after`, the first ones behind that number, for a reader who follows; else the newest.

        Raises:
            ValueError: `limit` is negative.
        """
        if limit < 0:
            raise ValueError(f"{limit=} must not be negative")
        entries = self._entries
        if after is None:
            return list(entries)[len(entries) - min(limit, len(entries)) :]
        found = []
        for entry in reversed(entries):
            if entry.number <= after:
                break
            found.append(entry)
        found.reverse()
        return found[:limit]
