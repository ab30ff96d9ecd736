"""`flowkv bench serve` against a scripted engine behind a real server on loopback."""

from __future__ import annotations

import asyncio
import io
import json
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flowkv_jax import cli
from flowkv_jax.bench.serve import ServeBench, Server, run_serve_benchmark
from flowkv_jax.bench.serve_client import Asking
from flowkv_jax.bench.serve_figures import Slo
from flowkv_jax.bench.serve_handoff import HandoffRecord
from flowkv_jax.bench.serve_report import figures_of
from flowkv_jax.bench.serve_workload import RandomWorkload
from flowkv_jax.cluster.dispatch_events import SequenceRecord
from flowkv_jax.commands import Context
from flowkv_jax.errors import (
    GenerationError,
    QueueOverflowError,
    RequestCancelled,
    ServerError,
    ValidationError,
)
from flowkv_jax.outputs import RequestOutput
from tests.fake_engine import FakeEngine, Received, served
from tests.recorded_cluster import RECORD, RecordedView
from tests.test_rpc_security import Authority

ROOT = Path(__file__).resolve().parents[1]
FAST = ("--request-rate", "200", "--input-len", "8", "--output-len", "4", "--num-warmups", "0")


def bench(address: str, *argv: str, target: str = "serve") -> tuple[int, str, str]:
    """Exit status, standard output and error of the command, in this process."""
    stdout, stderr = io.StringIO(), io.StringIO()
    context = Context(stdin=io.StringIO(), stdout=stdout, stderr=stderr)
    where = ["--target", address] if target == "serve" else []
    status = cli.main(["bench", target, *where, *argv], context)
    return status, stdout.getvalue(), stderr.getvalue()


def report(address: str, *argv: str) -> tuple[int, dict[str, Any]]:
    status, stdout, _ = bench(address, *argv, "--json", "-")
    document: dict[str, Any] = json.loads(stdout)
    return status, document


class ChangingEngine(FakeEngine):
    """`change` makes of each request (and its number) the parameters that it is answered with, or
    raises."""

    def __init__(self, change: Callable[[int, Received], Received]) -> None:
        super().__init__()
        self.change = change
        self.most_live = 0

    async def _answer(self, request: Received) -> AsyncIterator[RequestOutput]:
        self.most_live = max(self.most_live, len(self.live))
        changed = self.change(len(self.received) - 1, request)
        async for output in super()._answer(changed):
            yield output
            await asyncio.sleep(0)


def unchanged(number: int, request: Received) -> Received:
    return request


class TestSending:
    def test_every_request_is_sent_as_planned(self) -> None:
        engine = FakeEngine()
        with served(engine) as address:
            status, document = report(
                address, "--input-len", "8,16", "--request-rate", "100,inf", "--output-len", "4",
                "--num-prompts", "5", "--num-warmups", "3", "--seed", "7", "--save-detailed",
                "--goodput", "ttft:60000", "--label", "mine",
            )  # fmt: skip
        assert status == 0 and document["label"] == "mine"
        names = ["8 @ 100/s", "8 @ inf", "16 @ 100/s", "16 @ inf"]
        assert [cell["name"] for cell in document["cells"]] == names
        for cell in document["cells"]:
            assert (cell["planned"], cell["sent"], cell["completed"], cell["failed"]) == (
                5,
            ) * 3 + (0,)
            assert (cell["good"], cell["output_tokens"]) == (5, 20)
            assert [request["num_output_tokens"] for request in cell["requests"]] == [4] * 5
            assert cell["cached_tokens"] == 5 and cell["retries"] == 0
        workload = RandomWorkload(
            input_lens=(8, 16), output_len=4, request_rates=(100.0, float("inf")), num_prompts=5,
            seed=7,
        )  # fmt: skip
        cells = workload.cells(engine.model_info())
        sent = engine.received[6:]  # two lengths were warmed up by three requests each
        planned = [list(r.prompt_token_ids) for cell in cells for r in cell.requests]
        assert sorted(r.prompt for r in sent) == sorted(planned)
        assert {(r.params.max_tokens, r.params.ignore_eos, r.params.temperature) for r in sent} == {
            (4, True, 0.0)
        }

    def test_prompts_of_a_cell_share_cached_blocks_with_no_others(self) -> None:
        engine = FakeEngine()
        with served(engine) as address:
            for _ in range(2):
                report(address, *FAST, "--num-prompts", "3", "--num-warmups", "1")
        salts = [request.cache_salt for request in engine.received]
        assert [len({*part}) for part in (salts[1:4], salts[5:8])] == [1, 1]
        assert len(set(salts)) == 4 and None not in salts
        assert len({request.request_id for request in engine.received}) == 8

    def test_slow_answers_do_not_delay_requests(self) -> None:
        engine = FakeEngine()
        pause = engine.pause_before(1)
        engine_sees_all = threading.Event()

        def count(number: int, request: Received) -> Received:
            if number == 19:
                engine_sees_all.set()
                pause.released.set()
            return request

        counting = ChangingEngine(count)
        counting.pauses = engine.pauses
        with served(counting) as address:
            status, document = report(address, *FAST, "--num-prompts", "20")
        # None had a second token before the last was sent.
        assert status == 0 and counting.most_live == 20
        assert engine_sees_all.is_set() and document["cells"][0]["completed"] == 20

    def test_a_bound_on_calls_at_once(self) -> None:
        engine = ChangingEngine(unchanged)
        with served(engine) as address:
            status, document = report(
                address, *FAST, "--num-prompts", "12", "--max-concurrency", "2"
            )
        assert status == 0 and engine.most_live <= 2
        assert document["cells"][0]["completed"] == 12
        assert document["cells"][0]["held_ms"]["max"] >= 0

    def test_time_is_up(self) -> None:
        with served(FakeEngine()) as address:
            status, stdout, _ = bench(
                address, *FAST, "--num-prompts", "4000", "--max-duration", "0.05"
            )
        assert status == 0
        assert "requests of 8 @ 200/s were not sent: time was up." in stdout

    def test_a_token_from_the_environment(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("FLOWKV_API_KEY", raising=False)
        key = "k" * 32
        with served(FakeEngine(), {"FLOWKV_API_KEY": key}) as address:
            status, stdout, _ = bench(address, *FAST, "--json")
            assert status == 2
            assert json.loads(stdout)["error"]["type"] == "AuthenticationError"
            monkeypatch.setenv("FLOWKV_API_KEY", key)
            assert bench(address, *FAST, "--num-prompts", "2")[0] == 0

    def test_tls(self, tmp_path: Path) -> None:
        authority = Authority(tmp_path, "ours")
        certificate, key = authority.issue("server")
        files = {"ssl_certfile": certificate, "ssl_keyfile": key}
        with served(FakeEngine(), **files) as address:
            flags = ("--tls-ca-file", authority.ca_file, "--num-prompts", "2")
            assert bench(address, *FAST, *flags)[0] == 0
            assert bench(address, *FAST, "--num-prompts", "2")[0] == 1

    def test_interference(self) -> None:
        with served(FakeEngine()) as address:
            status, stdout, _ = bench(
                address, *FAST, "--dataset-name", "interference", "--num-prompts", "4",
                "--long-input-len", "40", "--long-interval", "0.01", "--num-long-prompts", "2",
            )  # fmt: skip
        assert status == 0
        assert "8 @ 200/s + 40 short" in stdout and "8 @ 200/s + 40 long" in stdout


class TestFailures:
    def test_refused_requests_are_counted_and_said(self) -> None:
        engine = FakeEngine()
        engine.failures[0] = QueueOverflowError("too many wait", retry_after_s=0.001)
        with served(engine) as address:
            flags = (*FAST, "--num-prompts", "3", "--goodput", "ttft:60000")
            status, document = report(address, *flags, "--max-retries", "2")
            assert status == 1 and len(engine.received) == 9
            [cell] = document["cells"]
            assert (cell["failed"], cell["completed"], cell["retries"]) == (3, 0, 6)
            assert cell["errors"] == {
                "QueueOverflowError": {"count": 3, "example": "too many wait"}
            }
            assert cell["good"] == 0 and cell["goodput"] == 0
            status, stdout, _ = bench(address, *flags, "--allow-failures")
        assert status == 0
        assert "QueueOverflowError" in stdout and "too many wait" in stdout

    def test_a_refused_request_may_succeed_later(self) -> None:
        def refuse_first(number: int, request: Received) -> Received:
            if number < 2:
                raise QueueOverflowError("wait", retry_after_s=0.001)
            return request

        engine = ChangingEngine(refuse_first)
        with served(engine) as address:
            status, document = report(address, *FAST, "--num-prompts", "2", "--max-retries", "5")
        assert status == 0
        [cell] = document["cells"]
        assert (cell["completed"], cell["failed"], cell["retries"]) == (2, 0, 2)

    def test_nothing_is_repeated_once_tokens_came(self) -> None:
        engine = FakeEngine()
        engine.failures[2] = QueueOverflowError("late", retry_after_s=0.001)
        with served(engine) as address:
            status, document = report(address, *FAST, "--num-prompts", "2", "--max-retries", "5")
        assert status == 1 and len(engine.received) == 2
        assert document["cells"][0]["retries"] == 0

    @pytest.mark.parametrize("kind", [GenerationError, RequestCancelled, ServerError])
    def test_a_stream_that_breaks_off(self, kind: type[Exception]) -> None:
        engine = FakeEngine()
        engine.failures[2] = kind("it broke")
        with served(engine) as address:
            status, document = report(address, *FAST, "--num-prompts", "2", "--save-detailed")
        assert status == 1
        [cell] = document["cells"]
        assert (cell["failed"], cell["interrupted"]) == (2, 0)
        assert cell["errors"][kind.__name__]["count"] == 2
        assert [request["num_output_tokens"] for request in cell["requests"]] == [2, 2]

    def test_missing_tokens_are_a_failure(self) -> None:
        def shorten(number: int, request: Received) -> Received:
            request.params = request.params.replace(max_tokens=3)
            return request

        with served(ChangingEngine(shorten)) as address:
            status, document = report(address, *FAST, "--num-prompts", "1")
            assert status == 1
            assert document["cells"][0]["errors"]["IncompleteAnswer"]["example"] == (
                "3 tokens came of the 4 that were asked for"
            )
            assert report(address, *FAST, "--num-prompts", "1", "--no-ignore-eos")[0] == 0

    def test_a_warm_up_that_fails_ends_it_at_once(self) -> None:
        engine = FakeEngine()
        engine.failures[0] = GenerationError("no weights")
        with served(engine) as address:
            status, _, stderr = bench(address, *FAST, "--num-warmups", "3")
        assert status == 1 and "no weights" in stderr and len(engine.received) == 1

    def test_no_server(self) -> None:
        with served(FakeEngine()) as address:
            pass
        status, stdout, stderr = bench(address, "--json")
        assert status == 1
        assert f"no server answers at {address}" in stderr and "--target" in stderr
        assert json.loads(stdout)["error"]["type"] == "RetryableRequestError"

    def test_interrupted(self) -> None:
        """Ctrl-C while one answer is complete and others are not."""
        engine = FakeEngine()

        def interrupt(number: int, request: Received) -> Received:
            if number == 3:
                engine_changed.pause_before(2)
                signal.pthread_kill(main_thread, signal.SIGINT)
            return request

        main_thread = threading.get_ident()
        engine_changed = ChangingEngine(interrupt)
        engine_changed.failures = engine.failures
        with served(engine_changed) as address:
            status, document = report(
                address, *FAST, "--num-prompts", "10", "--max-concurrency", "1"
            )
        assert status == 130 and document["is_interrupted"]
        [cell] = document["cells"]
        assert (cell["completed"], cell["interrupted"], cell["failed"]) == (3, 1, 0)
        assert (cell["sent"], cell["planned"]) == (4, 10)


class TestAnswers:
    def test_equal(self) -> None:
        engine = FakeEngine()
        with served(engine) as address:
            status, document = report(address, *FAST, "--num-prompts", "6", "--check-answers", "4")
            assert status == 0
            assert document["cells"][0]["answers"] == {"asked": 4, "equal": 4, "different": {}}
            assert len(engine.received) == 10
            report(address, *FAST, "--num-prompts", "6", "--check-answers")
        assert len(engine.received) == 22
        assert [r.prompt for r in engine.received[16:]] == [
            r.prompt for r in engine.received[10:16]
        ]

    def test_different(self) -> None:
        class Moody(FakeEngine):
            async def _answer(self, request: Received) -> AsyncIterator[RequestOutput]:
                is_again = "check" in request.request_id
                async for output in super()._answer(request):
                    [answer] = output.outputs
                    if is_again and answer.delta_token_ids == [2]:
                        answer.delta_token_ids[0] = 77
                    yield output

        with served(Moody()) as address:
            status, stdout, _ = bench(address, *FAST, "--num-prompts", "2", "--check-answers")
        assert status == 1
        assert "token 2: 2 under load, 77 alone" in stdout

    def test_asked_again_it_fails(self) -> None:
        def fail_again(number: int, request: Received) -> Received:
            if "check" in request.request_id:
                raise GenerationError("worn out")
            return request

        with served(ChangingEngine(fail_again)) as address:
            status, stdout, _ = bench(address, *FAST, "--num-prompts", "2", "--check-answers")
        assert status == 1 and "asked again, it failed: worn out" in stdout


class TestHandoffs:
    def run(self, engine: FakeEngine, source: Any) -> dict[str, Any]:
        workload = RandomWorkload(
            input_lens=(8, 16), output_len=4, request_rates=(200.0,), num_prompts=3
        )
        asked = ServeBench(workload=workload, asking=Asking(), num_warmups=1)
        with served(engine) as address:
            run = run_serve_benchmark(asked, Server(target=address), handoffs=source)
        return figures_of(run, (50,), Slo())

    def test_each_is_fetched_once_and_those_of_other_requests_are_left_out(self) -> None:
        engine = FakeEngine()

        class Source:
            asked_since: list[int] = []

            def fetch(self, since: int) -> Sequence[HandoffRecord]:
                self.asked_since.append(since)
                return [
                    HandoffRecord(
                        number=number, request_id=request.request_id, queue_s=0.0, prefill_s=0.0,
                        transfer_s=1e-6, runs=1, calls=1, data_bytes=100,
                    )
                    for number, request in enumerate(engine.received)
                ][since:]  # fmt: skip

        found = self.run(engine, Source())
        # Two warm-up requests, then three in each cell.
        assert Source.asked_since == [0, 2, 5]
        for cell in found["cells"]:
            assert cell["handoffs"]["requests"] == cell["handoffs"]["handoffs"] == 3
            assert cell["handoffs"]["data_bytes_per_request"] == 100
            assert 0 < cell["phases"]["share"]["transfer"] < 1

    def test_a_source_that_fails_is_a_remark(self) -> None:
        class Source:
            def fetch(self, since: int) -> Sequence[HandoffRecord]:
                raise ServerError("controller is gone")

        found = self.run(FakeEngine(), Source())
        assert found["handoff_error"] == "controller is gone"
        assert [cell["completed"] for cell in found["cells"]] == [3, 3]

    def test_the_command_asks_a_server_that_shows_its_cluster(self) -> None:
        engine = FakeEngine()

        class View(RecordedView):
            def records(self, limit: int, after: int | None = None) -> list[SequenceRecord]:
                self.all_records = [
                    replace(RECORD, number=number, request_id=request.request_id)
                    for number, request in enumerate(engine.received, start=1)
                ]
                return super().records(limit, after)

        engine.cluster = View()
        with served(engine) as address:
            status, document = report(address, *FAST, "--num-prompts", "3")
        (cell,) = document["cells"]
        assert status == 0 and document["handoff_error"] is None
        assert cell["handoffs"]["requests"] == cell["handoffs"]["handoffs"] == 3
        assert cell["handoffs"]["data_bytes_per_request"] == 14 << 20


class TestCommand:
    def test_reports_side_by_side(self, tmp_path: Path) -> None:
        paths = [tmp_path / name for name in ("a.json", "b.json")]
        with served(FakeEngine()) as address:
            flags = (*FAST, "--num-prompts", "2")
            status, stdout, _ = bench(address, *flags, "--label", "A", "--json", str(paths[0]))
            assert status == 0 and "Latency, ms" in stdout
            flags = (*flags, "--label", "B", "--output", str(paths[1]))
            status, stdout, _ = bench(address, *flags, "--baseline", str(paths[0]), "--markdown")
        assert status == 0 and "### Side by side (in brackets: over A)" in stdout
        names = [str(path) for path in paths]
        status, stdout, _ = bench("", *names, target="serve-compare")
        assert status == 0 and "x)" in stdout and "WARNING" not in stdout
        status, stdout, _ = bench("", *names, "--json", target="serve-compare")
        assert [row["label"] for row in json.loads(stdout)["rows"]] == ["A", "B"]
        status, _, stderr = bench("", str(tmp_path / "c.json"), target="serve-compare")
        assert status == 2 and "there is no file" in stderr

    @pytest.mark.parametrize(
        ("argv", "message"),
        [
            (["--input-len", "8,x"], "--input-len: 'x' is not a whole number"),
            (["--input-len", "64"], "does not fit the server's max_model_len=64"),
            (["--request-rate", "fast"], "--request-rate: 'fast' is not a number"),
            (["--request-rate", "0"], "request_rate=0.0 must be above 0"),
            (["--goodput", "ttft"], "goodput='ttft' must be ttft:MS"),
            (["--percentiles", "101"], "--percentiles: 101 is not in [0, 100]"),
            (["--check-answers", "--temperature", "1"], "needs greedy answers"),
            (["--dataset-name", "trace"], "needs --dataset-path"),
            (["--dataset-name", "interference", "--input-len", "8,9"], "takes one length"),
            (["--max-concurrency", "0"], "max_concurrency=0 must be at least 1"),
            (["--timeout", "0"], "timeout=0.0 must be above 0"),
            (["--max-duration", "-1"], "max_duration=-1.0 must be above 0"),
            (["--json", "no/such/file"], "there is no folder"),
            (["--baseline", "no-such-file"], "there is no file"),
        ],
    )
    def test_bad_flags(self, argv: list[str], message: str) -> None:
        engine = FakeEngine()
        with served(engine) as address:
            status, _, stderr = bench(address, *FAST, *argv)
        assert status == 2 and message in stderr and engine.received == []

    @pytest.mark.parametrize("target", ["serve", "serve-compare"])
    def test_a_plot_without_matplotlib_names_the_extra(
        self, monkeypatch: pytest.MonkeyPatch, target: str
    ) -> None:
        monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
        argv = ["--plot", "a.png", *(["a.json"] if target == "serve-compare" else [])]
        status, _, stderr = bench("127.0.0.1:1", *argv, target=target)
        assert status == 2 and "pip install 'flowkv-jax[plots]'" in stderr

    def test_no_jax_in_the_client(self) -> None:
        script = (
            "import sys\n"
            "from flowkv_jax import cli\n"
            "cli.main(['bench', 'serve', '--target', '127.0.0.1:1'])\n"
            "import flowkv_jax.bench.serve_compare, flowkv_jax.bench.serve_plots\n"
            "sys.exit('jax is loaded' if {'jax', 'jaxlib', 'flax'} & set(sys.modules) else 0)\n"
        )
        done = subprocess.run(
            [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0, done.stderr
        assert "no server answers" in done.stderr


def test_values_out_of_range() -> None:
    workload = RandomWorkload(input_lens=(1,), output_len=1, request_rates=(1,), num_prompts=1)
    with pytest.raises(ValidationError, match="num_warmups=-1"):
        ServeBench(workload=workload, num_warmups=-1)
    with pytest.raises(ValidationError, match="max_retries=-1"):
        ServeBench(workload=workload, asking=Asking(max_retries=-1))
