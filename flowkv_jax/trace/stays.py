"""Where a sequence was, and what was done with it there, from its record.

    front       arrival                                                           end
                | queue | to the first token | tokens ........................... |
    prefill     scheduled
                | prefill ........ |   | transfer |
    decode                             | receive  | decode .................... |
                                   first token    handed off

All times are of the dispatcher's clock: when it heard of a thing. They are brought into order where
news overtook each other, so that what is drawn never overlaps. A placement that failed ends where
it was lost, and the next one begins there.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from flowkv_jax.cluster.dispatch_events import LostPlace, SequenceRecord
from flowkv_jax.sequence import HandoffReport

FRONT = ""
"""In the place of a node's name."""


@dataclass(frozen=True, slots=True)
class Phase:
    """What was done from `start_s` to `end_s`. `handoff` is set where K/V move."""

    name: str
    start_s: float
    end_s: float
    handoff: HandoffReport | None = None


@dataclass(frozen=True, slots=True)
class Stay:
    """A time at one node. Phases are in order, apart, and inside it.

    Attributes:
        node: its name, or `FRONT`.
        lost: why it ended, if it failed.
    """

    node: str
    start_s: float
    end_s: float
    phases: tuple[Phase, ...]
    lost: LostPlace | None = None


@dataclass(frozen=True, slots=True)
class _Times:
    """Moments of a record, in order."""

    arrival_s: float
    scheduled_s: float | None
    first_token_s: float | None
    last_token_s: float | None
    ended_s: float


@dataclass(frozen=True, slots=True)
class _Placement:
    begin_s: float
    end_s: float
    prefill_node: str
    decode_node: str
    lost: LostPlace | None


def stays_of(record: SequenceRecord) -> list[Stay]:
    """At the front first, then at nodes in the order of their beginnings."""
    times = _times(record)
    stays = [_at_front(times)]
    for placement in _placements(record, times):
        stays += _at_nodes(record, placement, times)
    return stays


def _times(record: SequenceRecord) -> _Times:
    arrival_s, ended_s = record.arrival_s, max(record.ended_s, record.arrival_s)
    moments: list[float | None] = []
    latest_s: float | None = arrival_s
    for span_s in (record.queue_s, record.prefill_s, record.decode_s):
        if span_s is None or latest_s is None:
            latest_s = None
        else:
            latest_s = min(latest_s + max(span_s, 0.0), ended_s)
        moments.append(latest_s)
    return _Times(arrival_s, moments[0], moments[1], moments[2], ended_s)


def _at_front(times: _Times) -> Stay:
    edges = (times.arrival_s, times.scheduled_s, times.first_token_s, times.last_token_s)
    phases = []
    for name, start_s, end_s in zip(
        ("queue", "to the first token", "tokens"), edges, edges[1:], strict=False
    ):
        if start_s is None:
            break
        phases.append(Phase(name, start_s, times.ended_s if end_s is None else end_s))
    return Stay(FRONT, times.arrival_s, times.ended_s, tuple(phases))


def _placements(record: SequenceRecord, times: _Times) -> Iterator[_Placement]:
    """Those that ran."""
    begin_s = times.scheduled_s
    if begin_s is None:
        return
    for lost in record.lost_places:
        end_s = min(lost.time_s, times.ended_s)
        if begin_s < end_s:
            yield _Placement(begin_s, end_s, lost.prefill_node, lost.decode_node, lost)
            begin_s = end_s
    if record.prefill_node is not None and record.decode_node is not None:
        yield _Placement(begin_s, times.ended_s, record.prefill_node, record.decode_node, None)


def _at_nodes(record: SequenceRecord, placement: _Placement, times: _Times) -> list[Stay]:
    begin_s, end_s, lost = placement.begin_s, placement.end_s, placement.lost
    handoff, handed_off_s = record.handoff, record.handed_off_s
    last_s = end_s if times.last_token_s is None or lost else min(times.last_token_s, end_s)
    last_s = max(last_s, begin_s)
    first_s = end_s if times.first_token_s is None else min(times.first_token_s, end_s)
    if handoff is not None and handed_off_s is not None and begin_s <= handed_off_s <= end_s:
        return _handed_off(placement, handoff, handed_off_s, first_s, last_s)
    decode_node = placement.decode_node
    if lost is not None and lost.node == decode_node != placement.prefill_node and first_s < end_s:
        # It had been handed off, and only its end is known.
        split_s = max(first_s, begin_s)
        source = Stay(placement.prefill_node, begin_s, split_s, _prefill(begin_s, split_s))
        decode = Phase("decode", split_s, end_s)
        return [source, Stay(decode_node, split_s, end_s, (decode,), lost)]
    phases = _prefill(begin_s, first_s)
    if last_s > max(first_s, begin_s):
        phases = (*phases, Phase("decode", max(first_s, begin_s), last_s))
    return [Stay(placement.prefill_node, begin_s, max(last_s, first_s), phases, lost)]


def _handed_off(
    placement: _Placement, handoff: HandoffReport, arrived_s: float, first_s: float, last_s: float
) -> list[Stay]:
    """At the source until the acknowledgement, and at the destination from the reservation on."""
    begin_s = placement.begin_s
    prefill = _prefill(begin_s, min(first_s, arrived_s))
    ready_s = prefill[-1].end_s if prefill else begin_s
    moving_s = min(max(ready_s, arrived_s - max(handoff.total_s, 0.0)), arrived_s)
    transfer = Phase("transfer", moving_s, arrived_s, handoff)
    last_s = max(last_s, arrived_s)
    receive = Phase("receive", moving_s, arrived_s, handoff)
    decode = Phase("decode", arrived_s, last_s)
    return [
        Stay(handoff.src, begin_s, arrived_s, (*prefill, transfer)),
        Stay(handoff.dst, moving_s, last_s, (receive, decode), placement.lost),
    ]


def _prefill(begin_s: float, end_s: float) -> tuple[Phase, ...]:
    """Nothing where it had its first token from an earlier placement: when the tokens known then
    were computed again, nobody told."""
    return (Phase("prefill", begin_s, end_s),) if end_s > begin_s else ()
