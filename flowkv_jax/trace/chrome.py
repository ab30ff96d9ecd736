"""A history as Chrome trace JSON, which Perfetto (ui.perfetto.dev) and chrome://tracing open.

    process 1      the front: requests from arrival to end
    process 2..    a worker each: the sequences it held, with their phases as nested slices
      thread 0     instants: failovers, changes of role, nodes that came and went
      thread 1..   lanes: a sequence takes the lowest one that is free, so that slices of a thread
                   nest or are apart, as the format wants it
      counters     use of the pool, queue lengths
    flows          from the transfer at a hand-off's source to the decoding at its destination

Times are whole microseconds from the first event on. Lasting less counts as one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from typing import Any

from flowkv_jax.cluster.dispatch_events import SequenceRecord
from flowkv_jax.controller.decision_log import Decision, DecisionKind
from flowkv_jax.trace.history import Memory, Sample
from flowkv_jax.trace.stays import FRONT, Phase, Stay, stays_of

Event = dict[str, Any]

FRONT_PID = 1
_EVENTS_TID = 0


def chrome_trace(memory: Memory) -> dict[str, Any]:
    """Events of the records, and samples and decisions of the time they span; of all times where
    there are no records. Plain values, ready for JSON."""
    stays = [(record, stay) for record in memory.records for stay in stays_of(record)]
    begin_s = min((stay.start_s for _, stay in stays), default=None)
    samples = [one for one in memory.samples if begin_s is None or one.time_s >= begin_s]
    decisions = [
        one
        for one in memory.decisions
        if one.kind is not DecisionKind.ROUTE and (begin_s is None or one.time_s >= begin_s)
    ]
    starts = [begin_s] if begin_s is not None else []
    starts += [one.time_s for one in samples[:1]] + [one.time_s for one in decisions[:1]]
    clock = _Clock(min(starts, default=0.0))
    pids = _pids(memory, stays)
    events = [
        *_slices(stays, pids, clock),
        *_failovers(memory.records, pids, clock),
        *_instants(decisions, pids, clock),
        *_counters(samples, pids, clock),
    ]
    # An outer slice comes before what it encloses.
    events.sort(key=lambda event: (event["ts"], -event.get("dur", 0)))
    threads = sorted({(event["pid"], event["tid"]) for event in events if event["ph"] != "C"})
    return {
        "displayTimeUnit": "ms",
        "otherData": {"origin_monotonic_s": clock.origin_s, "num_requests": len(memory.records)},
        "traceEvents": [*_names(memory, pids, threads), *events],
    }


class _Clock:
    """Seconds to whole microseconds since the origin."""

    def __init__(self, origin_s: float) -> None:
        self.origin_s = origin_s

    def us(self, time_s: float) -> int:
        return max(0, round((time_s - self.origin_s) * 1e6))


def _pids(memory: Memory, stays: Iterable[tuple[SequenceRecord, Stay]]) -> dict[str, int]:
    names = {stay.node for _, stay in stays}
    names |= {node.name for sample in memory.samples for node in sample.nodes}
    names |= {lost.node for record in memory.records for lost in record.lost_places if lost.node}
    names.discard(FRONT)
    return {FRONT: FRONT_PID} | {name: pid for pid, name in enumerate(sorted(names), 2)}


def _names(
    memory: Memory, pids: dict[str, int], threads: Iterable[tuple[int, int]]
) -> Iterator[Event]:
    roles = {node.name: node.role.value for sample in memory.samples for node in sample.nodes}
    for name, pid in pids.items():
        role = f" ({roles[name]})" if name in roles else ""
        yield _metadata("process_name", pid, {"name": f"{name}{role}" if name else "front"})
        yield _metadata("process_sort_index", pid, {"sort_index": pid})
    for pid, tid in threads:
        lane = f"lane {tid}" if tid != _EVENTS_TID else "events"
        yield _metadata("thread_name", pid, {"name": lane}, tid)
        yield _metadata("thread_sort_index", pid, {"sort_index": tid}, tid)


def _metadata(name: str, pid: int, args: Event, tid: int = 0) -> Event:
    return {"name": name, "ph": "M", "pid": pid, "tid": tid, "ts": 0, "args": args}


def _slices(
    stays: Sequence[tuple[SequenceRecord, Stay]], pids: dict[str, int], clock: _Clock
) -> Iterator[Event]:
    busy_us: dict[str, list[int]] = {}
    for record, stay in sorted(stays, key=lambda one: (one[1].start_s, one[0].number)):
        spans = _spans(stay, clock)
        start_us = clock.us(stay.start_s)
        end_us = max([clock.us(stay.end_s), start_us + 1, *(end for _, _, end in spans)])
        lanes = busy_us.setdefault(stay.node, [])
        lane = next((i for i, until_us in enumerate(lanes) if until_us <= start_us), len(lanes))
        lanes[lane : lane + 1] = [end_us]
        where = {"pid": pids[stay.node], "tid": lane + 1}
        args = _args(record, stay)
        yield _slice(record.sequence_id, "request", start_us, end_us, args, where)
        for phase, phase_start_us, phase_end_us in spans:
            args = {} if phase.handoff is None else asdict(phase.handoff)
            args["request_id"] = record.request_id
            yield _slice(phase.name, "phase", phase_start_us, phase_end_us, args, where)
            flow = {"name": "hand-off", "cat": "hand-off", "id": record.number, **where}
            if phase.name == "transfer":
                yield flow | {"ph": "s", "ts": phase_start_us}
            elif phase.name == "decode" and stay.phases[0].handoff is not None:
                yield flow | {"ph": "f", "bp": "e", "ts": phase_start_us}


def _spans(stay: Stay, clock: _Clock) -> list[tuple[Phase, int, int]]:
    """Phases in microseconds: none is empty, none begins before the one before it has ended."""
    spans = []
    free_us = clock.us(stay.start_s)
    for phase in stay.phases:
        start_us = max(clock.us(phase.start_s), free_us)
        free_us = max(clock.us(phase.end_s), start_us + 1)
        spans.append((phase, start_us, free_us))
    return spans


def _slice(
    name: str, category: str, start_us: int, end_us: int, args: Event, where: Event
) -> Event:
    return {
        "name": name,
        "cat": category,
        "ph": "X",
        "ts": start_us,
        "dur": end_us - start_us,
        "args": args,
        **where,
    }


def _args(record: SequenceRecord, stay: Stay) -> Event:
    args: Event = {
        "request_id": record.request_id,
        "prompt_tokens": record.num_prompt_tokens,
        "cached_tokens": record.num_cached_tokens,
        "output_tokens": record.num_output_tokens,
        "preemptions": record.num_preemptions,
        "placements": record.num_placements,
        "finish_reason": record.finish_reason,
    }
    if stay.lost is not None:
        args["lost"] = stay.lost.reason
    return args


def _failovers(
    records: Iterable[SequenceRecord], pids: dict[str, int], clock: _Clock
) -> Iterator[Event]:
    for record in records:
        for lost in record.lost_places:
            args = {
                "sequence_id": record.sequence_id,
                "reason": lost.reason,
                "prefill_node": lost.prefill_node,
                "decode_node": lost.decode_node,
            }
            yield _instant("failover", lost.node or FRONT, lost.time_s, args, pids, clock)


def _instants(
    decisions: Iterable[Decision], pids: dict[str, int], clock: _Clock
) -> Iterator[Event]:
    for decision in decisions:
        args = {"subject": decision.subject, "reason": decision.reason, **decision.terms}
        name = f"{decision.kind.value}: {decision.chosen}"
        yield _instant(name, decision.subject, decision.time_s, args, pids, clock)


def _instant(
    name: str, node: str, time_s: float, args: Event, pids: dict[str, int], clock: _Clock
) -> Event:
    """On the node's track, or the front's where the node has none."""
    return {
        "name": name,
        "cat": "event",
        "ph": "i",
        "s": "p",
        "ts": clock.us(time_s),
        "pid": pids.get(node, FRONT_PID),
        "tid": _EVENTS_TID,
        "args": args,
    }


def _counters(samples: Iterable[Sample], pids: dict[str, int], clock: _Clock) -> Iterator[Event]:
    for sample in samples:
        ts = clock.us(sample.time_s)
        loads = {"prefill": sample.prefill_load, "decode": sample.decode_load}
        yield _counter("load of roles", FRONT_PID, ts, loads)
        for node in sample.nodes:
            pid = pids[node.name]
            yield _counter("KV use, %", pid, ts, {"held": round(node.kv_cache_usage * 100, 2)})
            queues = {
                "running": node.num_running,
                "waiting": node.num_waiting,
                "sending": node.num_sending,
                "receiving": node.num_receiving,
            }
            yield _counter("sequences", pid, ts, queues)


def _counter(name: str, pid: int, ts: int, values: Event) -> Event:
    return {"name": name, "ph": "C", "pid": pid, "tid": 0, "ts": ts, "args": values}
