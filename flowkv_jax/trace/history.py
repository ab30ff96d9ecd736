"""What a cluster did lately: a bounded memory over a `ClusterView`.

A view shows the present, and its logs only the newest entries, of which most are routes. Whoever
looks in regularly has more: samples of loads and queues over time, and the decisions other than
routes for as long as they matter. Each kind is numbered from 1 on without a gap, so that a reader
asks for what came after the last number he has.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from flowkv_jax.cluster.dispatch_events import SequenceRecord
from flowkv_jax.controller.decision_log import Decision, DecisionKind
from flowkv_jax.controller.role import Role
from flowkv_jax.controller.snapshot import ClusterSnapshot, NodeView, Regime
from flowkv_jax.rpc.cluster_view import ClusterView

NUM_SAMPLES = 900
NUM_RECORDS = 2048
NUM_ROUTES = 256
NUM_OTHER_DECISIONS = 512

_MAX_PER_LOOK = 4096
"""Decisions and records that one look takes in, at most."""


@dataclass(frozen=True, slots=True)
class NodeSample:
    """A node at one moment; counts are 0 and the share is 0 before its first report.

    Attributes:
        prefill_load, decode_load: C by the weights of each role.
        kv_cache_usage: share of blocks that live requests hold, in [0, 1].
    """

    name: str
    role: Role
    prefill_load: float
    decode_load: float
    kv_cache_usage: float
    num_running: int
    num_waiting: int
    num_sending: int
    num_receiving: int


@dataclass(frozen=True, slots=True)
class Sample:
    """A cluster at one moment, on the view's clock. `number` rises by one with each.

    Attributes:
        token_gaps: times from a token to the next, since the start, by `buckets.INTER_TOKEN_S`;
            empty if nobody counts them.
    """

    number: int
    time_s: float
    regime: Regime
    prefill_load: float
    decode_load: float
    nodes: tuple[NodeSample, ...]
    token_gaps: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Marks:
    """The last numbers a reader has; None for nothing yet."""

    sample: int | None = None
    record: int | None = None
    decision: int | None = None


@dataclass(frozen=True, slots=True)
class Memory:
    """What is remembered, or what came after some marks; oldest first.

    Attributes:
        latest: the cluster as it was last seen; None before the first look.
        marks: the last numbers there are; 0 where there is nothing yet.
    """

    latest: ClusterSnapshot | None
    samples: Sequence[Sample]
    records: Sequence[SequenceRecord]
    decisions: Sequence[Decision]
    marks: Marks


class _Numbered(Protocol):
    @property
    def number(self) -> int: ...


_T = TypeVar("_T", bound=_Numbered)


class ClusterHistory:
    """See the module. Any thread may read while one looks.

    Args:
        count_gaps: tells `Sample.token_gaps`.
        num_samples, num_records, num_routes, num_other_decisions: how many are remembered.
    """

    def __init__(
        self,
        view: ClusterView,
        count_gaps: Callable[[], tuple[int, ...]] = tuple,
        *,
        num_samples: int = NUM_SAMPLES,
        num_records: int = NUM_RECORDS,
        num_routes: int = NUM_ROUTES,
        num_other_decisions: int = NUM_OTHER_DECISIONS,
    ) -> None:
        self._view = view
        self._count_gaps = count_gaps
        self._lock = threading.Lock()
        self._looking = threading.Lock()
        self._latest: ClusterSnapshot | None = None
        self._samples: deque[Sample] = deque(maxlen=num_samples)
        self._records: deque[SequenceRecord] = deque(maxlen=num_records)
        self._routes: deque[Decision] = deque(maxlen=num_routes)
        self._others: deque[Decision] = deque(maxlen=num_other_decisions)
        self._last_sample = 0
        self._last_record = 0
        self._last_decision = 0

    def look(self) -> None:
        """Take in how the cluster stands and what happened since the last look. May wait for the
        view's lock, and for another thread's look.

        Raises:
            FlowKVError: the view is of a server that does not answer.
        """
        with self._looking:
            self._look()

    def _look(self) -> None:
        snapshot = self._view.snapshot()
        records = self._view.records(_MAX_PER_LOOK, after=self._last_record)
        gaps = self._count_gaps()
        decisions = self._view.decisions(_MAX_PER_LOOK, after=self._last_decision)
        with self._lock:
            self._latest = snapshot
            self._last_sample += 1
            self._samples.append(_sample(self._last_sample, snapshot, gaps))
            if records:
                self._last_record = records[-1].number
                self._records.extend(records)
            for decision in decisions:
                self._last_decision = decision.number
                is_route = decision.kind is DecisionKind.ROUTE
                (self._routes if is_route else self._others).append(decision)

    def since(self, marks: Marks, *, limit: int = NUM_RECORDS) -> Memory:
        """What came after `marks`: of each kind the newest `limit`."""
        with self._lock:
            others = _behind(self._others, marks.decision, limit)
            decisions = [*_behind(self._routes, marks.decision, limit), *others]
            decisions.sort(key=lambda one: one.number)
            return Memory(
                self._latest,
                _behind(self._samples, marks.sample, limit),
                _behind(self._records, marks.record, limit),
                decisions,
                Marks(self._last_sample, self._last_record, self._last_decision),
            )


def _behind(entries: deque[_T], number: int | None, limit: int) -> list[_T]:
    """The newest `limit` entries above a number, oldest first."""
    found: list[_T] = []
    for entry in reversed(entries):
        if len(found) >= limit or (number is not None and entry.number <= number):
            break
        found.append(entry)
    found.reverse()
    return found


def _sample(number: int, snapshot: ClusterSnapshot, gaps: tuple[int, ...]) -> Sample:
    return Sample(
        number,
        snapshot.now_s,
        snapshot.regime,
        snapshot.prefill_load,
        snapshot.decode_load,
        tuple(_node_samples(snapshot.nodes)),
        gaps,
    )


def _node_samples(nodes: Iterable[NodeView]) -> Iterable[NodeSample]:
    for node in nodes:
        load = node.load
        yield NodeSample(
            node.name,
            node.role,
            node.prefill_load,
            node.decode_load,
            load.kv_cache_usage if load else 0.0,
            load.num_requests_running if load else 0,
            load.num_requests_waiting if load else 0,
            load.num_requests_sending if load else 0,
            load.num_requests_receiving if load else 0,
        )
