"""The timeline of requests: by the rules of the trace format, over records of any kind."""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import replace
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from flowkv_jax.cluster.dispatch_events import LostPlace, SequenceRecord
from flowkv_jax.controller.snapshot import ClusterSnapshot
from flowkv_jax.trace.chrome import FRONT_PID, chrome_trace
from flowkv_jax.trace.history import ClusterHistory, Marks, Memory
from flowkv_jax.trace.stays import FRONT, stays_of
from tests.recorded_cluster import (
    HANDOFF,
    LOST_PLACE,
    MOVED,
    NEVER_RAN,
    RECORD,
    ROUTE,
    SNAPSHOT,
    SWITCH,
    RecordedView,
)


def memory_of(*records: SequenceRecord, decisions: Any = (), num_looks: int = 0) -> Memory:
    view = RecordedView()
    view.all_records = [replace(record, number=n) for n, record in enumerate(records, 1)]
    view.all_decisions = list(decisions)
    history = ClusterHistory(view)
    for second in range(num_looks):
        view.snapshot_now = replace(SNAPSHOT, now_s=991.0 + second)
        history.look()
    memory = history.since(Marks())
    return replace(memory, records=view.all_records, decisions=view.all_decisions)


def check_rules(trace: dict[str, Any]) -> list[dict[str, Any]]:
    """Raise unless a viewer reads it as it is meant; returns the events but metadata."""
    json.dumps(trace, allow_nan=False)
    events = [event for event in trace["traceEvents"] if event["ph"] != "M"]
    named = {e["pid"] for e in trace["traceEvents"] if e["name"] == "process_name"}
    threads = {(e["pid"], e["tid"]) for e in trace["traceEvents"] if e["name"] == "thread_name"}
    assert [event["ts"] for event in events] == sorted(event["ts"] for event in events)
    open_slices: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
    flows: dict[int, list[tuple[str, int]]] = defaultdict(list)
    enclosing: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
    for event in events:
        assert event["ph"] in ("X", "i", "C", "s", "f")
        assert isinstance(event["ts"], int) and event["ts"] >= 0
        assert event["pid"] in named
        where = event["pid"], event["tid"]
        if event["ph"] != "C":
            assert where in threads
        if event["ph"] == "X":
            start, end = event["ts"], event["ts"] + event["dur"]
            assert event["dur"] >= 1
            stack = open_slices[where]
            while stack and stack[-1][1] <= start:
                stack.pop()
            assert not stack or end <= stack[-1][1], "slices of a thread overlap"
            stack.append((start, end))
            enclosing[where].append((start, end))
        elif event["ph"] in "sf":
            flows[event["id"]].append((event["ph"], event["ts"]))
            assert any(start <= event["ts"] < end for start, end in enclosing[where]) or any(
                e["ph"] == "X" and (e["pid"], e["tid"]) == where and e["ts"] == event["ts"]
                for e in events
            ), "an arrow is bound to no slice"
    for ends in flows.values():
        assert [kind for kind, _ in ends] == ["s", "f"]
        assert ends[0][1] <= ends[1][1]
    return events


def slices(events: list[dict[str, Any]], pid: int) -> list[tuple[str, int, int]]:
    return [(e["name"], e["ts"], e["ts"] + e["dur"]) for e in events
            if e["ph"] == "X" and e["pid"] == pid]  # fmt: skip


class TestOneRequest:
    def test_phases_are_where_they_happened_and_an_arrow_joins_them(self) -> None:
        trace = chrome_trace(memory_of(RECORD))
        events = check_rules(trace)
        names = {e["args"]["name"]: e["pid"] for e in trace["traceEvents"]
                 if e["name"] == "process_name"}  # fmt: skip
        assert names == {"front": FRONT_PID, "decode-0": 2, "prefill-0": 3}
        second = 1_000_000
        assert slices(events, 1) == [
            ("req-1", 0, 5 * second),
            ("queue", 0, second // 2),
            ("to the first token", second // 2, 3 * second // 2),
            ("tokens", 3 * second // 2, 5 * second),
        ]
        assert slices(events, 3) == [
            ("req-1", 500_000, 1_510_000),
            ("prefill", 500_000, 1_500_000),
            ("transfer", 1_506_000, 1_510_000),
        ]
        assert slices(events, 2) == [
            ("req-1", 1_506_000, 5_000_000),
            ("receive", 1_506_000, 1_510_000),
            ("decode", 1_510_000, 5_000_000),
        ]
        arrow = [(e["ph"], e["pid"], e["ts"]) for e in events if e["ph"] in "sf"]
        assert arrow == [("s", 3, 1_506_000), ("f", 2, 1_510_000)]

    def test_what_a_hand_off_moved_is_told(self) -> None:
        events = check_rules(chrome_trace(memory_of(RECORD)))
        (transfer,) = [event for event in events if event["name"] == "transfer"]
        assert transfer["args"] == {
            "src": "prefill-0", "dst": "decode-0", "path": "Direct", "backend": "shared_memory",
            "runs": 2, "calls": 1, "data_bytes": 14 << 20, "num_blocks": 19,
            "num_reused_blocks": 6, "deferred_s": 0.001, "transfer_s": 0.0025, "total_s": 0.004,
            "request_id": "req-1",
        }  # fmt: skip
        request = next(event for event in events if event["name"] == "req-1")
        assert request["args"]["prompt_tokens"] == 300
        assert request["args"]["output_tokens"] == 24

    def test_without_a_hand_off_it_stays(self) -> None:
        record = replace(RECORD, handoff=None, handed_off_s=None, decode_node="prefill-0")
        front, stay = stays_of(record)
        assert (front.node, stay.node) == (FRONT, "prefill-0")
        assert [phase.name for phase in stay.phases] == ["prefill", "decode"]
        assert (stay.start_s, stay.end_s) == (990.5, 995.0)

    def test_one_that_never_ran_is_at_the_front_only(self) -> None:
        (front,) = stays_of(NEVER_RAN)
        assert [(one.name, one.start_s, one.end_s) for one in front.phases] == [
            ("queue", 990.0, 995.0)
        ]

    def test_news_that_overtook_each_other_are_put_in_order(self) -> None:
        early = replace(RECORD, handed_off_s=991.0)  # heard before the first token
        _, source, target = stays_of(early)
        assert [one.name for one in source.phases] == ["prefill", "transfer"]
        assert source.phases[0].end_s == source.end_s == 991.0
        assert target.phases[1].start_s == 991.0
        check_rules(chrome_trace(memory_of(early)))


class TestFailures:
    def test_failed_placements_end_where_they_were_lost(self) -> None:
        lost = LostPlace("prefill-0", "decode-1", "decode-1", 992.0, "its process ended")
        record = replace(RECORD, lost_places=(lost,), num_placements=2, handed_off_s=993.0)
        _, source, failed, again, target = stays_of(record)
        assert [one.node for one in (source, failed, again, target)] == [
            "prefill-0", "decode-1", "prefill-0", "decode-0",
        ]  # fmt: skip
        assert (failed.end_s, failed.lost) == (992.0, lost)
        assert again.start_s == 992.0
        assert [one.name for one in again.phases] == ["transfer"]

    def test_failovers_are_instants_at_the_node_that_failed(self) -> None:
        trace = chrome_trace(memory_of(MOVED))
        events = check_rules(trace)
        instants = [(e["name"], e["pid"], e["ts"]) for e in events if e["ph"] == "i"]
        pid = next(e["pid"] for e in trace["traceEvents"] if e["args"].get("name") == "decode-1")
        assert instants == [("failover", pid, 2_000_000), ("failover", FRONT_PID, 2_000_000)]
        assert events[[e["ph"] for e in events].index("i")]["args"]["reason"] == LOST_PLACE.reason


class TestSurroundings:
    def test_changes_of_roles_are_instants_and_routes_are_not(self) -> None:
        switch = replace(SWITCH, number=9, time_s=992.0)
        events = check_rules(chrome_trace(memory_of(RECORD, decisions=[ROUTE, switch])))
        (instant,) = [event for event in events if event["ph"] == "i"]
        assert (instant["name"], instant["pid"]) == ("role: hybrid", 2)
        assert instant["args"]["busy_load"] == 0.77

    def test_samples_are_counters_of_their_nodes(self) -> None:
        events = check_rules(chrome_trace(memory_of(RECORD, num_looks=3)))
        counters = [event for event in events if event["ph"] == "C"]
        assert len(counters) == 3 * (1 + 2 * len(SNAPSHOT.nodes))
        (use,) = [e for e in counters if e["name"] == "KV use, %" and e["ts"] == 1_000_000
                  and e["pid"] == 3]  # fmt: skip
        assert use["args"] == {"held": 72.0}

    def test_nothing_is_no_error(self) -> None:
        assert check_rules(chrome_trace(memory_of())) == []


times = st.floats(0, 50, allow_nan=False)
names = st.sampled_from(["p0", "p1", "d0", "d1"])
spans = st.none() | st.floats(0, 5)


@st.composite
def records(draw: st.DrawFn) -> SequenceRecord:
    src, dst = draw(names), draw(names)
    handoff = draw(st.none() | st.just(replace(HANDOFF, src=src, dst=dst,
                                               total_s=draw(st.floats(0, 2)))))  # fmt: skip
    lost = draw(st.lists(st.builds(LostPlace, names, names, st.none() | names, times,
                                   st.just("gone")), max_size=3))  # fmt: skip
    arrival_s = draw(times)
    return replace(
        RECORD,
        sequence_id=draw(st.text(max_size=3)),
        prefill_node=draw(st.none() | st.just(src)),
        decode_node=draw(st.none() | st.just(dst)),
        arrival_s=arrival_s,
        ended_s=arrival_s + draw(st.floats(0, 10)),
        queue_s=draw(spans),
        prefill_s=draw(spans),
        decode_s=draw(spans),
        handoff=handoff,
        handed_off_s=None if handoff is None else draw(times),
        lost_places=tuple(sorted(lost, key=lambda one: one.time_s)),
    )


@given(st.lists(records(), max_size=12))
@settings(max_examples=150, deadline=None)
def test_any_records_make_a_trace_by_the_rules(drawn: list[SequenceRecord]) -> None:
    memory = memory_of(*drawn)
    events = check_rules(chrome_trace(memory))
    requests = [e for e in events if e["ph"] == "X" and e["cat"] == "request"]
    assert len([e for e in requests if e["pid"] == FRONT_PID]) == len(drawn)
    for record in memory.records:
        for stay in stays_of(record):
            edges = [stay.start_s]
            for phase in stay.phases:
                edges += [phase.start_s, phase.end_s]
            edges.append(stay.end_s)
            assert edges == sorted(edges)
            assert record.arrival_s <= stay.start_s and stay.end_s <= record.ended_s


class TestHistory:
    def test_a_reader_gets_what_came_after_his_marks(self) -> None:
        view = RecordedView()
        history = ClusterHistory(view)
        history.look()
        first = history.since(Marks())
        assert [one.number for one in first.records] == [4, 5, 6, 7, 8]
        assert [one.number for one in first.decisions] == [3, 4, 5, 6, 7]
        assert first.marks == Marks(1, 8, 7)
        view.all_records.append(replace(RECORD, number=9))
        history.look()
        news = history.since(first.marks)
        assert ([one.number for one in news.samples], [one.number for one in news.records]) == (
            [2], [9],
        )  # fmt: skip
        assert news.decisions == []
        assert isinstance(news.latest, ClusterSnapshot)

    def test_what_is_counted_elsewhere_comes_with_the_samples(self) -> None:
        counts = iter([(1, 0), (1, 3)])
        history = ClusterHistory(RecordedView(), lambda: next(counts))
        history.look()
        history.look()
        assert [one.token_gaps for one in history.since(Marks()).samples] == [(1, 0), (1, 3)]

    def test_routes_do_not_push_other_decisions_out(self) -> None:
        view = RecordedView()
        view.all_decisions = [replace(SWITCH, number=1)]
        view.all_decisions += [replace(ROUTE, number=n) for n in range(2, 50)]
        history = ClusterHistory(view, num_routes=3)
        history.look()
        assert [one.number for one in history.since(Marks()).decisions] == [1, 47, 48, 49]
        assert [one.number for one in history.since(Marks(), limit=2).decisions] == [1, 48, 49]
