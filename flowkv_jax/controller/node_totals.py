"""What nodes counted since they began, over all their lives.

A node that starts again counts from nothing. What its last life had reported is kept and added, so
that a name's totals only ever rise.
"""

from __future__ import annotations

from dataclasses import dataclass

from flowkv_jax.controller.snapshot import NodeReport
from flowkv_jax.metrics.distribution import Histogram

MAX_NAMES = 256
"""Names that left whose totals are kept; those that left first go first."""


@dataclass(frozen=True, slots=True)
class NodeTotals:
    """Totals of one name; see `NodeLoad` and `NodeReport` for what they count."""

    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0
    num_preemptions: int = 0
    step_tokens: Histogram = Histogram()

    def __add__(self, other: NodeTotals) -> NodeTotals:
        return NodeTotals(
            self.prefix_cache_queries + other.prefix_cache_queries,
            self.prefix_cache_hits + other.prefix_cache_hits,
            self.num_preemptions + other.num_preemptions,
            self.step_tokens + other.step_tokens,
        )

    @classmethod
    def of(cls, report: NodeReport | None) -> NodeTotals:
        """Of one life, as reported last; None if it has not reported."""
        if report is None:
            return cls()
        load = report.load
        return cls(
            load.prefix_cache_queries,
            load.prefix_cache_hits,
            load.num_preemptions,
            report.step_tokens,
        )


class PastLives:
    """Totals of lives that have ended, by name. One owner."""

    def __init__(self) -> None:
        self._totals: dict[str, NodeTotals] = {}

    def ended(self, name: str, report: NodeReport | None) -> None:
        """A life is over, and this was its last report."""
        # At the end of the order, so that it is forgotten last.
        self._totals[name] = self._totals.pop(name, NodeTotals()) + NodeTotals.of(report)
        if len(self._totals) > MAX_NAMES:
            del self._totals[next(iter(self._totals))]

    def with_present(self, name: str, report: NodeReport | None) -> NodeTotals:
        """All lives together, the present one as reported last."""
        return self._totals.get(name, NodeTotals()) + NodeTotals.of(report)
