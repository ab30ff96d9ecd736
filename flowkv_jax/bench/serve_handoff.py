"""Where a request's time went, and what its hand-off moved.

A client sees a request from outside; how long it queued, prefilled, was handed off and decoded,
only the server knows. Of a disaggregated server a `HandoffSource` says so for each request that was
handed off; of any server the times at the end of each stream tell queue and prefill. A server that
offers no `HandoffSource` has no transfer share, which is not a share of 0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from flowkv_jax.bench.serve_records import RequestRecord
from flowkv_jax.cluster.dispatch_events import SequenceRecord
from flowkv_jax.errors import ServerError
from flowkv_jax.rpc.cluster_view import ClusterView
from flowkv_jax.sequence import HandoffReport


@dataclass(frozen=True, slots=True, kw_only=True)
class HandoffRecord:
    """One hand-off of a request, as the server tells of it.

    Attributes:
        number: rises by one with each of the server's records.
        request_id: as the client gave it.
        queue_s: from arrival until prefill began, and wherever else it waited for room.
        prefill_s: computing the prompt.
        transfer_s: from the first byte asked for to the last one verified.
        runs, calls, data_bytes: moved.
    """

    number: int
    request_id: str
    queue_s: float
    prefill_s: float
    transfer_s: float
    runs: int
    calls: int
    data_bytes: int


class HandoffSource(Protocol):
    """A server's memory of its hand-offs."""

    def fetch(self, since: int) -> Sequence[HandoffRecord]:
        """Records with a `number` of at least `since` that the server still has, by number.

        Raises:
            FlowKVError: the server cannot be asked.
        """
        ...


class ServerHandoffs:
    """The hand-offs that a cluster tells of, read in pages.

    Args:
        cluster: of the server; `Client.cluster`.
    """

    _PAGE = 1000

    def __init__(self, cluster: ClusterView) -> None:
        self._cluster = cluster
        self._next = 1

    def fetch(self, since: int) -> Sequence[HandoffRecord]:
        """See `HandoffSource`. Sequences that were decoded where they were prefilled have none.

        Raises:
            FlowKVError: the server cannot be asked, or it has forgotten some of them; what it still
                has is then given by the next call.
        """
        number = max(since, self._next)
        found: list[HandoffRecord] = []
        while records := self._cluster.records(self._PAGE, after=number - 1):
            missed = records[0].number - number
            if missed and number > 1:
                self._next = records[0].number
                raise ServerError(
                    f"the server has forgotten {missed} requests by now; ask for fewer in a cell"
                )
            found += [_handoff_of(one, one.handoff) for one in records if one.handoff is not None]
            number = records[-1].number + 1
        self._next = number
        return found


def _handoff_of(record: SequenceRecord, handoff: HandoffReport) -> HandoffRecord:
    return HandoffRecord(
        number=record.number,
        request_id=record.request_id,
        queue_s=(record.queue_s or 0.0) + handoff.deferred_s,
        prefill_s=record.prefill_s or 0.0,
        transfer_s=handoff.transfer_s,
        runs=handoff.runs,
        calls=handoff.calls,
        data_bytes=handoff.data_bytes,
    )


@dataclass(frozen=True, slots=True)
class Phases:
    """A request's time from sending to its last token, in seconds; the sum is its E2E.

    Attributes:
        queue_s: until prefill began.
        prefill_s: until the first token.
        transfer_s: the hand-off's transfer; 0 for a request that was not handed off.
        decode_s: the rest, with what network and client took.
    """

    queue_s: float
    prefill_s: float
    transfer_s: float
    decode_s: float


def phases(record: RequestRecord, handoffs: Sequence[HandoffRecord]) -> Phases | None:
    """Where the time of a request went; None if nobody knows.

    Args:
        handoffs: of this request; several if it was moved again.
    """
    if handoffs:
        queue_s = sum(handoff.queue_s for handoff in handoffs)
        prefill_s = sum(handoff.prefill_s for handoff in handoffs)
        transfer_s = sum(handoff.transfer_s for handoff in handoffs)
    else:
        times = record.server
        if times is None or times.scheduled_ts is None or times.first_token_ts is None:
            return None
        queue_s = times.scheduled_ts - times.arrival_time
        prefill_s = times.first_token_ts - times.scheduled_ts
        transfer_s = 0.0
    rest_s = record.e2e_s - queue_s - prefill_s - transfer_s
    return Phases(queue_s, prefill_s, transfer_s, max(0.0, rest_s))


def by_request(handoffs: Sequence[HandoffRecord]) -> Mapping[str, list[HandoffRecord]]:
    """Request id -> its hand-offs."""
    found: dict[str, list[HandoffRecord]] = {}
    for handoff in handoffs:
        found.setdefault(handoff.request_id, []).append(handoff)
    return found
