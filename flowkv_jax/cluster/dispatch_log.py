"""Where the dispatcher's events, records and counts go."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from itertools import islice

from flowkv_jax.cluster.dispatch_events import DispatchEvent, DispatchEventKind, SequenceRecord
from flowkv_jax.cluster.tracked_sequence import TrackedSequence
from flowkv_jax.cluster.trouble import Trouble
from flowkv_jax.cluster.turns import Turns
from flowkv_jax.metrics.request_tallies import RequestTallies
from flowkv_jax.outputs import FinishReason
from flowkv_jax.sequence import HandoffReport


class DispatchLog:
    """Tells a listener what happens, counts it, and remembers the latest sequences that ended.

    Attributes:
        tallies: what is counted, for metrics.
    """

    def __init__(
        self, turns: Turns, on_event: Callable[[DispatchEvent], None] | None, num_records: int
    ) -> None:
        self._turns = turns
        self._on_event = on_event
        self.records: deque[SequenceRecord] = deque(maxlen=num_records)
        self.tallies = RequestTallies()
        self._last_number = 0

    def records_since(self, number: int | None, limit: int) -> list[SequenceRecord]:
        """At most `limit` records behind a number, or the newest ones; oldest first."""
        if number is None:
            number = max(0, self._last_number - limit)
        # Numbers have no gaps, so they say where a record is.
        num_passed = len(self.records) - (self._last_number - number)
        begin = max(0, num_passed)
        return list(islice(self.records, begin, begin + limit))

    def tell(
        self,
        kind: DispatchEventKind,
        sequence: TrackedSequence,
        node: str | None,
        now_s: float,
        *,
        report: HandoffReport | None = None,
        reason: str | None = None,
        trouble: Trouble | None = None,
    ) -> None:
        """Something happened to a sequence."""
        self._count(kind, sequence, report, trouble)
        if self._on_event is None:
            return
        request_id = sequence.request.request_id
        event = DispatchEvent(kind, request_id, sequence.sequence_id, node, now_s, report, reason)
        self._turns.call(self._on_event, event)

    def ended(self, sequence: TrackedSequence, finish_reason: FinishReason, now_s: float) -> None:
        """A sequence ends; called while its place is still known."""
        self._last_number += 1
        record = sequence.record(self._last_number, finish_reason, now_s)
        self.records.append(record)
        params, is_first = sequence.spec.sampling_params, sequence.index == 0
        self.tallies.ended(sequence.holder, record, params, is_first=is_first)
        trace = sequence.request.submission.trace
        if trace is not None:
            self._turns.call(trace.sequence_ended, record)
        self.tell(DispatchEventKind.ENDED, sequence, sequence.holder, now_s, reason=finish_reason)

    def _count(
        self,
        kind: DispatchEventKind,
        sequence: TrackedSequence,
        report: HandoffReport | None,
        trouble: Trouble | None,
    ) -> None:
        tallies = self.tallies
        prefill_node, decode_node = sequence.prefill_node, sequence.decode_node
        if kind is DispatchEventKind.PLACED and prefill_node and decode_node:
            is_failover = sequence.num_placements > 1
            tallies.placed(prefill_node, decode_node, is_failover=is_failover)
        elif kind is DispatchEventKind.HANDED_OFF and report is not None:
            tallies.handed_off(report)
        elif kind is DispatchEventKind.LOST_PLACE and trouble is not None:
            tallies.lost_places[trouble] += 1
        elif kind is DispatchEventKind.REDIRECTED and trouble is not None:
            tallies.redirects[trouble] += 1
