"""What `flowkv top` knows of a cluster at one moment, and how it comes to know it."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from flowkv_jax.cluster.dispatch_events import SequenceRecord
from flowkv_jax.controller.decision_log import Decision, DecisionKind
from flowkv_jax.controller.snapshot import ClusterSnapshot
from flowkv_jax.rpc.cluster_view import ClusterView

RATE_WINDOW_S = 10.0
"""Rates are of the requests that ended within so many seconds."""

_NUM_RECORDS = 1000
_NUM_DECISIONS = 100


@dataclass(frozen=True, slots=True)
class Picture:
    """A cluster at one moment; times are the server's.

    Attributes:
        target, model: the server, and what it serves.
        decisions, records: the latest ones, oldest first.
        requests_per_s, tokens_per_s: sequences that ended, and what they put out, over
            `RATE_WINDOW_S`.
    """

    target: str
    model: str
    snapshot: ClusterSnapshot
    decisions: Sequence[Decision]
    records: Sequence[SequenceRecord]
    requests_per_s: float
    tokens_per_s: float

    def to_dict(self) -> dict[str, Any]:
        return {
            "target": self.target,
            "model": self.model,
            "requests_per_s": self.requests_per_s,
            "tokens_per_s": self.tokens_per_s,
            "cluster": self.snapshot.to_dict(),
            "decisions": [decision.to_dict() for decision in self.decisions],
            "requests": [asdict(record) for record in self.records],
        }

    def handoffs(self, limit: int) -> list[SequenceRecord]:
        """The latest records of sequences that were handed off, latest first."""
        handed_off = [record for record in reversed(self.records) if record.handoff is not None]
        return handed_off[:limit]

    def notable_decisions(self, limit: int) -> list[Decision]:
        """The latest decisions, latest first. Routes are many: half of the room is kept for others,
        as far as there are any."""
        others = [one for one in self.decisions if one.kind is not DecisionKind.ROUTE]
        routes = [one for one in self.decisions if one.kind is DecisionKind.ROUTE]
        num_others = min(len(others), max(limit - len(routes), (limit + 1) // 2))
        num_routes = min(len(routes), limit - num_others)
        chosen = others[len(others) - num_others :] + routes[len(routes) - num_routes :]
        return sorted(chosen, key=lambda one: one.number, reverse=True)


class Observer:
    """Asks a cluster again and again, and for its records only once each."""

    def __init__(self, cluster: ClusterView, target: str, model: str) -> None:
        self._cluster = cluster
        self._target = target
        self._model = model
        self._records: deque[SequenceRecord] = deque(maxlen=_NUM_RECORDS)

    def look(self) -> Picture:
        """
        Raises:
            FlowKVError: the server does not answer, or offers no cluster.
        """
        snapshot = self._cluster.snapshot()
        decisions = self._cluster.decisions(_NUM_DECISIONS)
        self._follow_records()
        ended = [r for r in self._records if r.ended_s > snapshot.now_s - RATE_WINDOW_S]
        span_s = RATE_WINDOW_S
        if len(ended) == len(self._records) == _NUM_RECORDS:  # there were more in the window
            span_s = max(snapshot.now_s - ended[0].ended_s, 1e-3)
        return Picture(
            target=self._target,
            model=self._model,
            snapshot=snapshot,
            decisions=decisions,
            records=tuple(self._records),
            requests_per_s=len(ended) / span_s,
            tokens_per_s=sum(record.num_output_tokens for record in ended) / span_s,
        )

    def _follow_records(self) -> None:
        if self._records:
            last = self._records[-1].number
            found = self._cluster.records(_NUM_RECORDS, after=last)
            if found:
                self._records.extend(found)
                return
            newest = self._cluster.records(1)
            if newest and newest[0].number >= last:
                return
            self._records.clear()  # another server has taken the place: its numbers start over
        self._records.extend(self._cluster.records(_NUM_RECORDS))
