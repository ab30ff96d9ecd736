"""`flowkv bench serve` without a server: workloads, figures, reports, comparisons, pictures."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowkv_jax.bench import serve_plots
from flowkv_jax.bench.serve import ServeRun
from flowkv_jax.bench.serve_compare import compare, comparison_table, differences, read_report
from flowkv_jax.bench.serve_figures import Slo, cell_figures, summary
from flowkv_jax.bench.serve_handoff import HandoffRecord, phases
from flowkv_jax.bench.serve_records import AnswerCheck, CellRun, Outcome, RequestRecord
from flowkv_jax.bench.serve_report import figures_of, notes, number, tables
from flowkv_jax.bench.serve_trace import BLOCK_TOKENS, TraceWorkload, read_trace
from flowkv_jax.bench.serve_workload import (
    LONG,
    SHORT,
    InterferenceWorkload,
    RandomWorkload,
    TokenSource,
    arrival_times,
)
from flowkv_jax.errors import NotFoundError, ValidationError
from flowkv_jax.outputs import RequestMetrics
from tests.fake_engine import MODEL_INFO

MODEL = replace(MODEL_INFO, max_model_len=4096, vocab_size=5000, eos_token_ids=(600, 2))


class TestArrivals:
    def test_the_mean_rate_is_exact_and_gaps_are_exponential(self) -> None:
        times = arrival_times(20_000, 50.0, 1.0, seed=3)
        gaps = np.diff(times)
        assert times == sorted(times) and times[0] >= 0 and times[-1] < 400
        assert np.mean(gaps) == pytest.approx(1 / 50, rel=0.001)
        assert np.std(gaps) / np.mean(gaps) == pytest.approx(1, rel=0.05)
        # Of an exponential distribution, exp(-1) is longer than the mean.
        assert np.mean(gaps > 1 / 50) == pytest.approx(math.exp(-1), abs=0.02)

    @pytest.mark.parametrize("burstiness", [0.25, 4.0])
    def test_burstiness_is_the_shape_of_a_gamma_distribution(self, burstiness: float) -> None:
        gaps = np.diff(arrival_times(20_000, 1.0, burstiness, seed=0))
        assert np.std(gaps) / np.mean(gaps) == pytest.approx(burstiness**-0.5, rel=0.05)

    def test_rates_scale_the_same_times(self) -> None:
        slow, fast = (arrival_times(30, rate, 1.0, seed=9) for rate in (0.5, 2.0))
        assert np.allclose(np.array(slow) / 4, fast)
        assert arrival_times(30, 0.5, 1.0, seed=9) == slow != arrival_times(30, 0.5, 1.0, seed=8)

    def test_infinite_rate_sends_all_at_once(self) -> None:
        assert arrival_times(3, math.inf, 1.0, seed=0) == [0.0] * 3


def random_workload(**settings: Any) -> RandomWorkload:
    defaults = {"input_lens": (8, 16), "output_len": 4, "request_rates": (1.0,), "num_prompts": 6}
    return RandomWorkload(**{**defaults, **settings})


class TestRandomWorkload:
    def test_a_cell_for_each_length_and_rate(self) -> None:
        cells = random_workload(request_rates=(0.5, 2.0)).cells(MODEL)
        assert [cell.name for cell in cells] == ["8 @ 0.5/s", "8 @ 2/s", "16 @ 0.5/s", "16 @ 2/s"]
        for cell in cells:
            assert [len(r.prompt_token_ids) for r in cell.requests] == [cell.input_len] * 6
            assert len({r.prompt_token_ids for r in cell.requests}) == 6
            assert {r.max_tokens for r in cell.requests} == {4}

    def test_a_seed_repeats_it(self) -> None:
        assert random_workload(seed=5).cells(MODEL) == random_workload(seed=5).cells(MODEL)
        assert random_workload(seed=5).cells(MODEL) != random_workload(seed=6).cells(MODEL)

    def test_no_special_tokens(self) -> None:
        ids = set(TokenSource(MODEL).draw(100_000, 0))
        assert min(ids) == 500 and max(ids) == 4499
        assert 600 not in ids and len(ids) == 3999

    def test_prefixes_are_used_in_turn(self) -> None:
        [cell] = random_workload(input_lens=(16,), prefix_len=10, num_prefixes=2).cells(MODEL)
        prompts = [request.prompt_token_ids for request in cell.requests]
        assert len({prompt[:10] for prompt in prompts}) == 2
        assert prompts[0][:10] == prompts[2][:10] != prompts[1][:10]
        assert len({prompt[10:] for prompt in prompts}) == 6

    @pytest.mark.parametrize(
        ("settings", "message"),
        [
            ({"input_lens": ()}, "input_len"),
            ({"input_lens": (0,)}, "input_len=0 must be at least 1"),
            ({"output_len": 0}, "output_len=0"),
            ({"request_rates": ()}, "request_rate"),
            ({"request_rates": (-1.0,)}, "request_rate=-1.0 must be above 0"),
            ({"request_rates": (math.nan,)}, "request_rate=nan must be above 0"),
            ({"num_prompts": 0}, "num_prompts=0"),
            ({"burstiness": 0.0}, "burstiness=0.0 must be above 0"),
            ({"seed": -1}, "seed=-1"),
            ({"prefix_len": 9}, r"prefix_len=9 must be in \[0, 8\]"),
        ],
    )
    def test_bad_values(self, settings: dict[str, Any], message: str) -> None:
        with pytest.raises(ValidationError, match=message):
            random_workload(**settings)

    def test_what_does_not_fit_the_model(self) -> None:
        with pytest.raises(ValidationError, match="input_len=4093 .* max_model_len=4096"):
            random_workload(input_lens=(8, 4093)).cells(MODEL)


def test_interference_mixes_two_groups() -> None:
    workload = InterferenceWorkload(
        input_len=8, output_len=50, request_rates=(2.0, math.inf), num_prompts=10,
        long_input_len=100, long_output_len=1, long_interval_s=1.5, num_long_prompts=3,
    )  # fmt: skip
    cells = workload.cells(MODEL)
    assert [cell.name for cell in cells] == ["8 @ 2/s + 100", "8 @ inf + 100"]
    for cell in cells:
        times = [request.send_at_s for request in cell.requests]
        assert times == sorted(times)
        long = [request for request in cell.requests if request.group == LONG]
        short = [request for request in cell.requests if request.group == SHORT]
        assert [request.send_at_s for request in long] == [1.5, 3.0, 4.5]
        assert {(len(r.prompt_token_ids), r.max_tokens) for r in long} == {(100, 1)}
        assert {(len(r.prompt_token_ids), r.max_tokens) for r in short} == {(8, 50)}
        assert len(short) == 10


Entry = tuple[int, list[int]]


@st.composite
def trace_entries(draw: st.DrawFn) -> list[Entry]:
    """(input length, hash ids) of requests in a tree of prefixes: children of block b are named
    after their path, as a trace's ids are."""
    names: dict[tuple[int, ...], int] = {}
    entries = []
    for _ in range(draw(st.integers(2, 6))):
        path = draw(st.lists(st.integers(0, 1), min_size=1, max_size=5))
        ids = [names.setdefault(tuple(path[: i + 1]), len(names)) for i in range(len(path))]
        last = draw(st.integers(1, BLOCK_TOKENS))
        entries.append(((len(ids) - 1) * BLOCK_TOKENS + last, ids))
    return entries


def write_trace(path: Path, entries: Sequence[Entry], gap_ms: int = 1000) -> Path:
    lines = [
        {"timestamp": i * gap_ms, "input_length": n, "output_length": 100, "hash_ids": ids}
        for i, (n, ids) in enumerate(entries)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def trace_workload(path: Path, **settings: Any) -> TraceWorkload:
    return TraceWorkload(**{"path": path, "num_prompts": 100, **settings})


class TestTrace:
    @given(entries=trace_entries(), scale=st.sampled_from([1.0, 0.5, 0.1, 0.02]))
    def test_prompts_share_the_prefixes_that_the_trace_shared(
        self, entries: list[Entry], scale: float, tmp_path_factory: pytest.TempPathFactory
    ) -> None:
        path = write_trace(tmp_path_factory.mktemp("trace") / "trace.jsonl", entries)
        [cell] = trace_workload(path, length_scale=scale).cells(MODEL)
        block = round(BLOCK_TOKENS * scale)
        prompts = [request.prompt_token_ids for request in cell.requests]
        for (length, _), prompt in zip(entries, prompts, strict=True):
            # Rounding a block down loses less than a token for each block.
            assert length * scale - 6 <= len(prompt) <= max(1, length * scale + 1)
        for (_, ids), prompt in zip(entries, prompts, strict=True):
            for (_, others), other in zip(entries, prompts, strict=True):
                same = sum(1 for a, b in zip(ids, others, strict=False) if a == b) * block
                shared = min(same, len(prompt), len(other))
                assert prompt[:shared] == other[:shared]
                rest = slice(same, same + block)
                if min(len(prompt), len(other)) >= same + 8:
                    assert prompt[rest] != other[rest]

    def test_times_and_rates(self, tmp_path: Path) -> None:
        path = write_trace(tmp_path / "trace.jsonl", [(600, [0, i + 1]) for i in range(11)])
        [own] = trace_workload(path).cells(MODEL)
        assert [r.send_at_s for r in own.requests] == [float(i) for i in range(11)]
        assert own.request_rate == 1.0
        [faster] = trace_workload(path, rate_scale=4.0).cells(MODEL)
        assert faster.requests[-1].send_at_s == 2.5 and faster.request_rate == 4.0
        cells = trace_workload(path, request_rates=(0.5, 20.0, math.inf), num_prompts=6).cells(
            MODEL
        )
        assert [len(cell.requests) for cell in cells] == [6] * 3
        assert [cell.requests[-1].send_at_s for cell in cells] == [10.0, 0.25, 0.0]
        assert [cell.name for cell in cells] == ["trace @ 0.5/s", "trace @ 20/s", "trace @ inf"]

    def test_long_requests_are_clipped_and_it_says_so(self, tmp_path: Path) -> None:
        path = write_trace(tmp_path / "trace.jsonl", [(5000, list(range(10))), (100, [0])])
        [cell] = trace_workload(path).cells(MODEL)
        assert [len(r.prompt_token_ids) for r in cell.requests] == [3996, 100]
        assert "1 of 2 requests were longer than the model takes" in cell.notes[1]
        assert cell.notes[0] == "9% of the trace's prompt blocks had been seen before in the cell."

    def test_no_rate_for_requests_that_came_at_once(self, tmp_path: Path) -> None:
        path = write_trace(tmp_path / "trace.jsonl", [(10, [0]), (10, [1])], gap_ms=0)
        assert trace_workload(path).cells(MODEL)[0].request_rate == math.inf
        with pytest.raises(ValidationError, match="cannot be reached"):
            trace_workload(path, request_rates=(1.0,)).cells(MODEL)
        with pytest.raises(ValidationError, match="contradicts"):
            trace_workload(path, request_rates=(1.0,), rate_scale=2.0)

    @pytest.mark.parametrize(
        "line",
        [
            "no JSON",
            "[]",
            '{"timestamp": 0, "input_length": 5, "output_length": 1}',
            '{"timestamp": 0, "input_length": 513, "output_length": 1, "hash_ids": [1]}',
            '{"timestamp": 0, "input_length": 0, "output_length": 1, "hash_ids": [1]}',
            '{"timestamp": 0, "input_length": 5, "output_length": 1, "hash_ids": [-1]}',
            '{"timestamp": 0, "input_length": "x", "output_length": 1, "hash_ids": [1]}',
        ],
    )
    def test_a_broken_line_is_named(self, tmp_path: Path, line: str) -> None:
        path = tmp_path / "trace.jsonl"
        path.write_text(line + "\n")
        with pytest.raises(ValidationError, match=r"trace\.jsonl:1"):
            list(read_trace(path, 1))

    def test_no_file_and_an_empty_one(self, tmp_path: Path) -> None:
        with pytest.raises(NotFoundError, match="there is no file"):
            trace_workload(tmp_path / "none").cells(MODEL)
        (tmp_path / "empty").touch()
        with pytest.raises(ValidationError, match="has no request"):
            trace_workload(tmp_path / "empty").cells(MODEL)


# Figures


def record(index: int = 0, sent_s: float = 1.0, **values: Any) -> RequestRecord:
    """First token 0.2 s after sending, then 1, 2 and 1 tokens; the end 0.01 s after the last."""
    arrivals = ((sent_s + 0.2, 1), (sent_s + 0.25, 1), (sent_s + 0.35, 2), (sent_s + 0.4, 1))
    defaults = {
        "index": index,
        "request_id": f"r{index}",
        "group": "",
        "num_prompt_tokens": 10,
        "scheduled_s": sent_s - 0.001,
        "sent_s": sent_s,
        "ended_s": sent_s + 0.41,
        "outcome": Outcome.COMPLETED,
        "arrivals": arrivals,
        "token_ids": (1, 2, 3, 4, 5),
    }
    return RequestRecord(**{**defaults, **values})


def failed(index: int, error: str = "ServerError", text: str = "it broke") -> RequestRecord:
    return record(index, outcome=Outcome.FAILED, error=error, error_text=text)


def cell_run(records: Sequence[RequestRecord], **values: Any) -> CellRun:
    defaults = {"name": "10 @ 1/s", "input_len": 10, "request_rate": 1.0}
    return CellRun(**{**defaults, "records": records, "num_planned": len(records), **values})


def figures(run: CellRun, slo: Slo | None = None, **values: Any) -> dict[str, Any]:
    return cell_figures(run, (50, 99), slo or Slo(), values.get("handoffs"))


def handoff(index: int, transfer_s: float, number: int = 0) -> HandoffRecord:
    return HandoffRecord(
        number=number, request_id=f"r{index}", queue_s=0.01, prefill_s=0.1, transfer_s=transfer_s,
        runs=1, calls=2, data_bytes=1 << 20,
    )  # fmt: skip


class TestFigures:
    def test_latencies_of_one_request(self) -> None:
        one = record()
        assert one.ttft_s == pytest.approx(0.2)
        assert one.tpot_s == pytest.approx(0.2 / 4)
        assert one.itls_s == pytest.approx([0.05, 0.1, 0.05])  # two tokens at once: one entry
        assert one.e2e_s == pytest.approx(0.41)
        assert one.lateness_s == pytest.approx(0.001)

    def test_an_answer_of_one_token_has_no_tpot(self) -> None:
        one = record(arrivals=((1.2, 1),), token_ids=(1,))
        assert one.tpot_s is None and one.itls_s == []
        found = figures(cell_run([one]))["latencies_ms"]
        assert found["tpot"] is None and found["ttft"]["p50"] == pytest.approx(200)

    @given(st.lists(st.floats(0, 1e6), min_size=1, max_size=50), st.floats(0, 100))
    def test_percentiles(self, values: list[float], percentile: float) -> None:
        found = summary(values, (percentile,))
        assert found is not None
        ordered = sorted(values)
        place = percentile / 100 * (len(values) - 1)
        low, high = ordered[math.floor(place)], ordered[math.ceil(place)]
        between = low + (high - low) * (place - math.floor(place))
        assert found[f"p{percentile:g}"] == pytest.approx(between, rel=1e-6, abs=1e-6)
        assert found["max"] == ordered[-1]
        assert found["mean"] == pytest.approx(sum(values) / len(values))
        assert summary([], (50,)) is None

    def test_throughput_counts_completed_requests_over_the_whole_time(self) -> None:
        found = figures(cell_run([record(0, 1.0), record(1, 2.59), failed(2)]))
        assert found["duration_s"] == pytest.approx(2.0)
        assert found["output_throughput"] == pytest.approx(5.0)
        assert found["request_throughput"] == pytest.approx(1.0)
        assert (found["completed"], found["failed"], found["interrupted"]) == (2, 1, 0)
        assert found["tokens_per_message"] == pytest.approx(10 / 8)

    def test_goodput(self) -> None:
        slow = record(1, ended_s=9.0)
        run = cell_run([record(0), slow, failed(2)])
        assert figures(run, Slo(ttft_ms=300))["good"] == 2
        assert figures(run, Slo(ttft_ms=300, e2el_ms=500))["good"] == 1
        assert figures(run, Slo(ttft_ms=300, e2el_ms=500))["goodput"] == pytest.approx(1 / 8)
        assert figures(run, Slo(tpot_ms=40))["good"] == 0
        assert figures(run)["goodput"] is None

    def test_failures_are_counted_by_class_and_are_in_no_latency(self) -> None:
        run = cell_run([record(0), failed(1), failed(2, text="again"), failed(3, "Other")])
        found = figures(run)
        assert found["errors"] == {
            "ServerError": {"count": 2, "example": "it broke"},
            "Other": {"count": 1, "example": "it broke"},
        }
        assert found["latencies_ms"] == figures(cell_run([record(0)]))["latencies_ms"]

    def test_nothing_completed(self) -> None:
        found = figures(cell_run([failed(0)]), Slo(ttft_ms=1))
        assert set(found["latencies_ms"].values()) == {None}
        assert found["goodput"] == 0 and found["phases"] is None
        assert figures(cell_run([], num_planned=3))["request_throughput"] is None

    def test_groups(self) -> None:
        records = [record(0, group=SHORT), record(1, 2.0, group=LONG, ended_s=3.0)]
        found = figures(cell_run(records))["groups"]
        assert found[SHORT]["latencies_ms"]["e2el"]["p50"] == pytest.approx(410)
        assert found[LONG]["latencies_ms"]["e2el"]["p50"] == pytest.approx(1000)
        assert figures(cell_run([record(0)]))["groups"] == {}

    @pytest.mark.parametrize("word", ["ttft", "ttft:", "ttft:x", "ttft:0", "ttft:nan", "itl:5"])
    def test_what_is_no_bound(self, word: str) -> None:
        with pytest.raises(ValidationError, match="goodput"):
            Slo.parse([word])
        with pytest.raises(ValidationError, match="each once"):
            Slo.parse(["tpot:1", "tpot:2"])

    def test_bounds(self) -> None:
        slo = Slo.parse(["ttft:200", "e2el:1e3"])
        assert slo == Slo(ttft_ms=200, e2el_ms=1000)
        assert str(slo) == "TTFT <= 200 ms, E2E <= 1000 ms" and slo and not Slo()


class TestPhases:
    SERVER = RequestMetrics(
        arrival_time=5.0, queued_ts=5.0, scheduled_ts=5.05, first_token_ts=5.19, last_token_ts=5.4
    )

    def test_of_a_server_that_does_not_tell_of_hand_offs(self) -> None:
        found = phases(record(server=self.SERVER), ())
        assert found is not None
        assert (found.queue_s, found.prefill_s) == pytest.approx((0.05, 0.14))
        assert found.decode_s == pytest.approx(0.41 - 0.19) and found.transfer_s == 0
        run = cell_run([record(server=self.SERVER)])
        assert figures(run)["phases"]["share"]["transfer"] is None
        assert figures(run)["handoffs"] is None

    def test_with_hand_offs(self) -> None:
        run = cell_run([record(0), record(1, server=self.SERVER), record(2)])
        told = [handoff(0, 0.02), handoff(0, 0.03), handoff(7, 9.0)]
        found = figures(run, handoffs=told)
        # r0 was moved twice; r1 not at all; of r2 nothing is known.
        assert found["phases"]["requests"] == 2
        assert found["phases"]["mean_ms"]["transfer"] == pytest.approx(25)
        assert found["phases"]["share"]["transfer"] == pytest.approx(0.05 / 0.82)
        assert sum(found["phases"]["share"].values()) == pytest.approx(1)
        moved = found["handoffs"]
        assert (moved["requests"], moved["handoffs"]) == (1, 2)
        assert (moved["runs_per_request"], moved["calls_per_request"]) == (2, 4)
        assert moved["data_bytes_per_request"] == 2 << 20
        assert moved["transfer_ms"]["max"] == pytest.approx(30)

    def test_a_server_with_no_hand_off_yet(self) -> None:
        found = figures(cell_run([record(server=self.SERVER)]), handoffs=[])
        assert found["phases"]["share"]["transfer"] == 0
        assert found["handoffs"]["requests"] == 0
        assert found["handoffs"]["calls_per_request"] is None


# Reports


def document(
    runs: Sequence[CellRun], slo: Slo | None = None, label: str = "a", **values: Any
) -> dict[str, Any]:
    run = ServeRun(MODEL, list(runs), **values)
    whole = {
        "benchmark": "serve",
        "label": label,
        "target": "host:1",
        "commit": None,
        "versions": {"python": "3", "grpcio": "1", "flowkv-jax": "0"},
        "host": {"cores": 2, "load_average": [0.5, 0, 0]},
        "settings": {
            "dataset": "random",
            "seed": 0,
            "workload": {"num_prompts": 1},
            "asking": {"temperature": 0.0, "max_concurrency": None},
            "num_warmups": 0,
        },
        **figures_of(run, (50, 99), slo or Slo()),
    }
    read_back: dict[str, Any] = json.loads(json.dumps(whole, allow_nan=False))
    return read_back


class TestReport:
    def test_tables(self) -> None:
        run = cell_run(
            [record(0), record(1, 2.59), failed(2)],
            answers=AnswerCheck(2, 1, {"r1": "token 3: 5 under load, 6 alone"}),
        )
        found = {table.title.split(",")[0].split(";")[0]: table for table in tables(
            document([run], Slo(ttft_ms=300), handoffs=[handoff(0, 0.01), handoff(1, 0.02)])
        )}  # fmt: skip
        assert list(found) == [
            "Requests",
            "Latency",
            "Where the time of a request went",
            "Hand-offs: transfer in ms",
            "Failed requests",
            "Answers under load against the same prompts alone",
        ]
        for table in found.values():
            assert {len(row) for row in table.rows} == {len(table.headings)}
        rows = {title: table.rows[0] for title, table in found.items()}
        assert rows["Requests"] == (
            "10 @ 1/s", "2", "1", "2.0", "1.00", "5.00", "1.00", "67%", "200", "50.0", "100", "410"
        )  # fmt: skip
        assert [row[:3] for row in found["Latency"].rows] == [
            ("10 @ 1/s", "TTFT", "200"),
            ("", "TPOT", "50.0"),
            ("", "ITL", "66.7"),
            ("", "E2E", "410"),
        ]
        assert rows["Where the time of a request went"][-1] == "3.66%"
        assert rows["Hand-offs: transfer in ms"][1:] == (
            "2 of 2", "15.0", "19.9", "1.00", "2.00", "1.00"
        )  # fmt: skip
        assert rows["Failed requests"] == ("10 @ 1/s", "ServerError", "1", "it broke")
        assert rows["Answers under load against the same prompts alone"][1:] == (
            "2", "1", "r1: token 3: 5 under load, 6 alone"
        )  # fmt: skip

    def test_what_a_reader_must_know(self) -> None:
        late = [record(i, scheduled_s=0.5) for i in range(3)]
        held = [record(i, scheduled_s=0.0, held_s=1.0) for i in range(3)]
        runs = [
            cell_run(late, name="late", num_planned=5, notes=("of the workload",)),
            cell_run(
                held, name="held", server_change={
                    "prefix_cache_queries": 30, "prefix_cache_hits": 15, "num_preemptions": 2
                },
            ),
            cell_run([record(0, outcome=Outcome.INTERRUPTED)], name="cut"),
        ]  # fmt: skip
        text = "\n".join(notes(document(runs, Slo(ttft_ms=5), handoff_error="gone")))
        for part in (
            "the client did not keep up in late: requests were sent 500.0 ms late",
            "2 requests of late were not sent: time was up.",
            "In held requests waited for one of the client's slots for up to 1.0 s",
            "1 requests of cut were given up",
            "of the workload",
            "held: 50% of prompt tokens were cached.",
            "held: 2 preemptions.",
            "hand-offs are missing: gone",
            "TTFT <= 5 ms",
        ):
            assert part in text
        assert "keep up in held" not in text and "INTERRUPTED" not in text
        assert "INTERRUPTED" in notes(document(runs, is_interrupted=True))[0]

    def test_nothing_was_measured(self) -> None:
        empty = document([], is_interrupted=True)
        assert tables(empty) == [] and "INTERRUPTED" in notes(empty)[0]

    @pytest.mark.parametrize(
        ("value", "text"),
        [(None, "-"), (0.0, "0.00"), (1.234, "1.23"), (12.34, "12.3"), (1234.5, "1,234")],
    )
    def test_numbers(self, value: float | None, text: str) -> None:
        assert number(value) == text


class TestCompare:
    def test_ratios_are_to_the_first_report_that_has_the_cell(self) -> None:
        base = document([cell_run([record(0)])])
        other = document(
            [cell_run([record(0, ended_s=1.82)]), cell_run([record(0)], name="new")], label="b"
        )
        rows = compare([base, other])
        assert [(row["cell"], row["label"]) for row in rows] == [
            ("10 @ 1/s", "a"), ("10 @ 1/s", "b"), ("new", "b")
        ]  # fmt: skip
        assert rows[0]["ratios"] is None and rows[2]["ratios"] is None
        assert rows[1]["ratios"]["E2E p50 ms"] == pytest.approx(2)
        assert rows[1]["ratios"]["TTFT p50 ms"] == pytest.approx(1)
        assert rows[1]["ratios"]["goodput req/s"] is None
        table = comparison_table([base, other])
        assert {len(row) for row in table.rows} == {len(table.headings)}
        assert "820 (2.00x)" in table.rows[1] and table.rows[1][0] == ""

    def test_groups_are_compared_apart(self) -> None:
        runs = [cell_run([record(0, group=SHORT), record(1, group=LONG)])]
        rows = compare([document(runs), document(runs, label="b")])
        assert [row["cell"] for row in rows] == ["10 @ 1/s short"] * 2 + ["10 @ 1/s long"] * 2

    def test_different_experiments_are_pointed_out(self) -> None:
        base, other = document([cell_run([record(0)])]), document([cell_run([record(0)])])
        assert differences([base, other]) == []
        other["settings"]["seed"] = 1
        other["settings"]["workload"]["num_prompts"] = 7
        other["model"]["dtype"] = "bfloat16"
        other["slo"] = "TTFT <= 1 ms"
        text = "\n".join(differences([base, other]))
        for part in ("seed=1", "num_prompts=7 not 1", "dtype='bfloat16'", "goodput='TTFT"):
            assert part in text

    def test_what_is_no_report(self, tmp_path: Path) -> None:
        path = tmp_path / "a.json"
        with pytest.raises(NotFoundError):
            read_report(path)
        for text in ("{", "[]", '{"benchmark": "transfer"}'):
            path.write_text(text)
            with pytest.raises(ValidationError, match=r"a\.json is no JSON"):
                read_report(path)


class FakePanel:
    def __init__(self) -> None:
        self.lines: list[tuple[Any, Any]] = []
        self.bars: dict[str, list[float]] = {}
        self.texts: list[str] = []

    def plot(self, x: Sequence[str], y: Sequence[float], *style: str, **more: Any) -> None:
        if style:
            self.lines.append((list(x), list(y)))

    def barh(self, names: Sequence[str], widths: list[float], **more: Any) -> None:
        self.bars[more["label"]] = widths

    def text(self, x: float, y: float, text: str, **more: Any) -> None:
        self.texts.append(text.strip())

    def __getattr__(self, name: str) -> Any:
        return lambda *arguments, **more: None


class FakePicture:
    """Of matplotlib's Figure and SubFigure as much as is used."""

    made: list[FakePicture] = []

    def __init__(self, **settings: Any) -> None:
        self.panels: list[FakePanel] = []
        self.made.append(self)

    def subfigures(self, rows: int, columns: int, **settings: Any) -> list[FakePicture]:
        return [FakePicture() for _ in range(rows * columns)]

    def subplots(self, rows: int = 1, columns: int = 1) -> Any:
        self.panels = [FakePanel() for _ in range(rows * columns)]
        return SimpleNamespace(flat=self.panels) if rows * columns > 1 else self.panels[0]

    def savefig(self, path: Path, **settings: Any) -> None:
        path.write_bytes(b"picture")


def test_a_plot_shows_every_cell(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(FakePicture, "made", [])
    monkeypatch.setattr(serve_plots, "check_plotting", lambda: FakePicture)
    runs = [cell_run([record(0)]), cell_run([record(0)], name="all", request_rate=math.inf)]
    documents = [
        document(runs, Slo(ttft_ms=300), handoffs=[handoff(0, 0.041)]),
        document(runs[:1], label="b", handoffs=[handoff(0, 0.0)]),
    ]
    serve_plots.plot_serve(documents, tmp_path / "picture.png")
    assert (tmp_path / "picture.png").exists()
    _, upper, lower = FakePicture.made
    ttft, _, _, _, tokens, goodput = (panel.lines for panel in upper.panels)
    assert [x for x, _ in ttft] == [["1/s", "inf"]] * 2 + [["1/s"]] * 2
    assert ttft[0][1] == pytest.approx([200, 200])
    assert len(tokens) == 2 and len(goodput) == 1
    [bars] = lower.panels
    assert bars.bars["transfer"] == pytest.approx([41, 0, 41])
    assert bars.bars["decode"] == pytest.approx([259, 300, 259])
    assert bars.texts == ["transfer 10.00%", "transfer 0.00%", "transfer 10.00%"]
