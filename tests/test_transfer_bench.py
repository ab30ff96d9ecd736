"""`flowkv bench transfer`: real processes and bytes at tiny sizes, call counts, faults, report."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import psutil
import pytest

from flowkv_jax import cli
from flowkv_jax.bench import plots, transfer, transfer_cases, transfer_systems
from flowkv_jax.bench.transfer_pair import BackendUnavailable, PeerError, open_pair
from flowkv_jax.bench.transfer_peer import PoolSetup
from flowkv_jax.bench.transfer_report import Figures, Report, markdown
from flowkv_jax.bench.transfer_systems import System, SystemFailed, run_system
from flowkv_jax.commands import Context
from flowkv_jax.errors import ValidationError
from transfer.strategies import Strategy
from transfer.types import BlockRun

ROOT = Path(__file__).resolve().parents[1]
QUICK_LAYERS = 2
TINY = {
    "num_layers": 2,
    "block_size": 4,
    "num_kv_heads": 1,
    "head_dim": 8,
    "dtype": "bfloat16",
    "dtype_bytes": 2,
}


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where the benchmark's files go; nothing may be left of them, nor any process."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr("tempfile.tempdir", None)
    yield folder
    assert psutil.Process().children() == []
    assert list(folder.iterdir()) == []


def bench(*argv: str) -> tuple[int, str, str]:
    """Exit status, standard output and error of `flowkv bench transfer`, in this process."""
    stdout, stderr = io.StringIO(), io.StringIO()
    context = Context(stdin=io.StringIO(), stdout=stdout, stderr=stderr)
    status = cli.main(["bench", "transfer", *argv], context)
    return status, stdout.getvalue(), stderr.getvalue()


@pytest.fixture(scope="module")
def document(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The report of a quick run."""
    output = tmp_path_factory.mktemp("report") / "report.json"
    status, stdout, stderr = bench(
        "--quick", "--churned-tokens", "all", "--json", "--output", str(output)
    )
    assert status == 0, stderr
    assert "shared_memory: 64 tokens, fresh pools" in stderr
    report: dict[str, Any] = json.loads(stdout)
    assert report == json.loads(output.read_text())
    return report


class TestQuickRun:
    def test_every_cell_made_the_calls_of_its_formula(self, document: dict[str, Any]) -> None:
        results = document["results"]
        cells = {(r["system"], r["placement"], r["case"], r["strategy"]) for r in results}
        assert len(cells) == len(results) == 2 * 2 * 2 * 3
        moved = {n["num_tokens"]: n["moved"] for n in document["churned"]["runs_needed"]}
        for result in results:
            blocks = -(-result["case"] // 16)
            runs = 1 if result["placement"] == "fresh" else moved[result["case"]]
            calls = {
                "layer-major": QUICK_LAYERS * 2 * blocks,
                "block-major": blocks,
                "aligned-runs": runs,
            }
            assert result["calls"] == calls[result["strategy"]]
            assert result["runs"] == runs
            assert result["data_bytes"] == blocks * document["settings"]["bytes_per_block"]

    def test_churned_pools_needed_more_than_one_run(self, document: dict[str, Any]) -> None:
        longest = document["churned"]["runs_needed"][-1]
        assert longest["moved"] > 1
        assert 1 < longest["mean"] <= longest["p99"] <= longest["largest"] <= longest["num_blocks"]

    def test_figures_fit_together(self, document: dict[str, Any]) -> None:
        for result in document["results"] + document["small"]:
            times = sorted(result["times_s"])
            assert result["repeats"] == len(times) == 2
            assert result["seconds"] == pytest.approx(sum(times) / 2)
            assert result["fastest_s"] == times[0] > 0
            assert result["gb_per_s"] == pytest.approx(
                result["data_bytes"] / result["seconds"] / 1e9
            )
            assert result["share_of_copy"] == pytest.approx(result["copy_s"] / result["seconds"])

    def test_small_cases(self, document: dict[str, Any]) -> None:
        found = [(r["system"], r["case"], r["data_bytes"]) for r in document["small"]]
        sizes = [("16 KiB", 16 << 10), ("1 MiB", 1 << 20)]
        assert found == [(name, *size) for name in ("shared_memory", "tcp") for size in sizes]

    def test_it_says_under_what_conditions(self, document: dict[str, Any]) -> None:
        assert document["settings"]["checksum"] is False
        assert document["settings"]["cold"] is True
        assert {"processor", "huge_pages", "load_average", "load_average_before"} <= set(
            document["host"]
        )
        assert {"python", "jax", "numpy"} <= set(document["versions"])
        assert document["commit"] is not None and document["seconds"] > 0
        assert document["failed"] == document["unavailable"] == {}


TINY_RUN = ("--quick", "--tokens", "32", "--repeat", "1", "--no-small")


def test_backends_that_need_more_than_memory_and_sockets() -> None:
    status, stdout, stderr = bench(
        *TINY_RUN, "--backends", "storage,jax_pull,collective", "--placements", "fresh", "--json"
    )
    assert status == 0, stderr
    results = json.loads(stdout)["results"]
    calls = [(r["system"], r["strategy"], r["calls"]) for r in results]
    assert calls == [
        (system, strategy, count)
        for system in ("storage", "jax_pull", "collective")
        for strategy, count in (("layer-major", 8), ("block-major", 2), ("aligned-runs", 1))
    ]


def test_checksums_warm_caches_and_chosen_strategies() -> None:
    flags = ("--checksum", "--warm-caches", "--strategies", "aligned-runs", "--backends", "tcp")
    status, stdout, stderr = bench(*TINY_RUN, *flags, "--markdown")
    assert status == 0, stderr
    lines = stdout.splitlines()
    assert "### KV transfer between two processes, fresh pools" in lines
    assert "| backend | tokens | MiB | aligned-runs, ms (calls) | GB/s | of plain copy |" in lines
    assert sum(line.startswith("| tcp | 32 | ") for line in lines) == 2
    assert any("Checksums on, caches warm." in line for line in lines)


def test_tables_for_a_terminal() -> None:
    status, stdout, _ = bench(*TINY_RUN, "--backends", "shared_memory")
    assert status == 0
    assert "layer-major / aligned-runs" in stdout and "Runs needed in churned pools" in stdout


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--tokens", "0"], "tokens=(0,) must be one or more numbers of at least 1"),
        (["--tokens", "12k"], "--tokens: '12k' is not a whole number"),
        (["--tokens", ","], "tokens=() must be one or more"),
        (["--backends", "ipc"], "backends has 'ipc'; there are shared_memory, tcp,"),
        (["--strategies", "fast"], "--strategies: 'fast' is not one of layer-major, block-major,"),
        (["--strategies", ""], "at least one strategy and one placement must be measured"),
        (["--placements", "old"], "placements has 'old'; there are fresh, churned"),
        (["--churned-tokens", "65"], "churned_tokens=(65,) must be some of tokens=(64, 256)"),
        (["--repeat", "0"], "repeat=0 must be above 0"),
        (["--cell-seconds", "-1"], "cell_s=-1.0 must be above 0"),
        (["--occupancy", "1"], "occupancy=1.0 must be in (0, 1)"),
        (["--pool-blocks", "15"], "pool_blocks=15 must be at least the 16 blocks"),
        (["--pool-blocks", "20"], "a request of 16 blocks does not fit the 4 of 20 blocks"),
        (["--num-layers", "0"], "num_layers=0 must be at least 1"),
        (["--head-dim", "1", "--block-size", "1"], "have 4 bytes; the comparison of both pools"),
        (["--tokens", "1000000000000"], "are available: ask for fewer tokens"),
        (["--storage-dir", "no/such"], "storage_dir='no/such' is no folder"),
        (["--output", "no/such/file"], "--output: there is no folder no/such"),
        (["--peer", "nixl"], "'nixl' is not NAME=PYTHON"),
        (["--peer", f"ucx={sys.executable}"], "unknown system 'ucx'; there are nixl, mooncake"),
        (["--peer", "nixl=no/python"], "no/python, the interpreter for nixl, is no file"),
    ],
)
def test_bad_flags(argv: list[str], message: str) -> None:
    status, stdout, stderr = bench("--quick", *argv)
    assert status == 2 and stdout == ""
    assert message in stderr


def test_a_plot_without_matplotlib_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    status, _, stderr = bench("--quick", "--plot", "times.png")
    assert status == 2
    assert "a plot needs matplotlib: pip install 'flowkv-jax[plots]'" in stderr


# The pair


@contextmanager
def tiny_pair(backend: str) -> Iterator[Any]:
    pools = {"kv": PoolSetup(TINY, 8)}
    with open_pair(backend, pools, storage_dir=None, deadline_s=20, cold=False) as pair:
        yield pair


RUNS = [[1, 4, 2], [6, 0, 1]]


def test_spoilt_blocks_are_told_from_moved_ones() -> None:
    with tiny_pair("shared_memory") as pair:
        pair.source.ask("fill", "kv", RUNS, 1)
        expected = pair.source.ask("fingerprint", "kv", RUNS)
        assert pair.destination.ask("fingerprint", "kv", RUNS) != expected
        pair.source.ask("move", "kv", RUNS, "aligned-runs", False)
        assert pair.destination.ask("fingerprint", "kv", RUNS) == expected
        pair.destination.ask("spoil", "kv", RUNS[1:])
        assert pair.destination.ask("fingerprint", "kv", RUNS) != expected
        seconds, calls = pair.source.ask("move", "kv", RUNS, "layer-major", True)
        assert seconds > 0 and calls == 2 * 2 * 3
        assert pair.destination.ask("fingerprint", "kv", RUNS) == expected
        # Blocks in another order are other blocks.
        swapped = [[6, 4, 1], [1, 0, 2]]
        assert pair.source.ask("fingerprint", "kv", swapped) != expected


def test_released_pools_hold_nothing() -> None:
    with tiny_pair("tcp") as pair:
        empty = pair.both("fingerprint", "kv", RUNS)
        pair.source.ask("fill", "kv", RUNS, 1)
        pair.source.ask("move", "kv", RUNS, "block-major", False)
        assert pair.both("fingerprint", "kv", RUNS) != empty
        pair.both("release", "kv")
        assert pair.both("fingerprint", "kv", RUNS) == empty


def test_a_transfer_that_fails_is_named_and_the_pair_goes_on() -> None:
    with tiny_pair("tcp") as pair:
        with pytest.raises(PeerError, match=r"PoolBoundsError at the source: .*8 blocks"):
            pair.source.ask("move", "kv", [[0, 7, 2]], "aligned-runs", False)
        assert pair.source.ask("move", "kv", RUNS, "aligned-runs", False)[1] == 2


def test_a_backend_that_is_not_there() -> None:
    with pytest.raises(BackendUnavailable, match="no backend 'pigeons'"), tiny_pair("pigeons"):
        pass


def test_a_process_that_dies_is_reported_with_its_last_words() -> None:
    words = r"(?s)destination's process ended.*no command 'explode'"
    with pytest.raises(PeerError, match=words), tiny_pair("tcp") as pair:
        pair.destination.ask("explode")


@pytest.mark.parametrize("ending", [signal.SIGINT, signal.SIGKILL])
def test_nothing_is_left_when_it_is_interrupted(ending: signal.Signals, temporary: Path) -> None:
    command = [sys.executable, "-m", "flowkv_jax.cli", "bench", "transfer", *TINY_RUN]
    shared = set(os.listdir("/dev/shm"))
    process = subprocess.Popen(
        [*command, "--backends", "shared_memory", "--repeat", "1000000"],
        cwd=ROOT,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    try:
        assert "32 tokens, fresh pools" in process.stderr.readline()
        pair = psutil.Process(process.pid).children()
        assert len(pair) == 2 and len(list(temporary.iterdir())) == 1
    finally:
        process.send_signal(ending)
        status = process.wait(timeout=30)
        process.stderr.close()
    assert status == (130 if ending is signal.SIGINT else -signal.SIGKILL)
    _, alive = psutil.wait_procs(pair, timeout=20)
    assert alive == []
    assert set(os.listdir("/dev/shm")) <= shared
    ends_s = time.monotonic() + 10
    while list(temporary.iterdir()) and time.monotonic() < ends_s:
        time.sleep(0.01)


class FakeEnd:
    """An end that counts one call too many, or holds other bytes."""

    def __init__(self, calls: int, fingerprint: int) -> None:
        self.calls = calls
        self.fingerprint = fingerprint

    def ask(self, command: str, *arguments: object) -> Any:
        return {"move": [0.5, self.calls], "fingerprint": self.fingerprint, "copy": 0.1}.get(
            command
        )


class FakePair:
    def __init__(self, calls: int, same: bool) -> None:
        self.source, self.destination = FakeEnd(calls, 1), FakeEnd(calls, 1 if same else 2)

    def both(self, command: str, *arguments: object) -> None:
        pass


@pytest.mark.parametrize(
    ("calls", "same", "message"),
    [
        (3, True, "aligned-runs: 3 calls were counted, not 1"),
        (1, False, "aligned-runs: the destination holds other bytes"),
    ],
)
def test_what_is_wrong_fails_and_the_others_go_on(
    monkeypatch: pytest.MonkeyPatch, calls: int, same: bool, message: str
) -> None:
    @contextmanager
    def fake(backend: str, *arguments: object, **more: object) -> Iterator[FakePair]:
        if backend == "storage":
            raise BackendUnavailable("no disk")
        yield FakePair(1, same=True) if backend == "tcp" else FakePair(calls, same)

    monkeypatch.setattr(transfer, "open_pair", fake)
    settings: dict[str, Any] = {"tokens": (16,), "placements": ("fresh",), "small": ()}
    settings |= {"strategies": (Strategy.ALIGNED_RUNS,), "repeat": 3}
    monkeypatch.setattr(transfer, "BACKENDS", ("shared_memory", "tcp", "storage"))
    report = transfer.run_transfer_benchmark(transfer.TransferBench(**settings))
    assert report.failed == {"shared_memory": message}
    assert report.unavailable == {"storage": "no disk"}
    assert [(f.system, f.times_s, f.copies_s) for f in report.large] == [
        ("tcp", (0.5,) * 3, (0.1,) * 3)
    ]
    by_name = transfer.TransferBench(backends=("storage",), **settings)
    assert transfer.run_transfer_benchmark(by_name).failed == {"storage": "no disk"}


def test_what_is_compared_with_is_not_repeated_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def fake(*arguments: object, **more: object) -> Iterator[FakePair]:
        yield FakePair(1, same=True)

    monkeypatch.setattr(transfer, "open_pair", fake)
    settings = transfer.TransferBench(
        backends=("tcp",),
        tokens=(16,),
        placements=("fresh",),
        strategies=(Strategy.BLOCK_MAJOR, Strategy.ALIGNED_RUNS),
        repeat=7,
        cell_s=0.9,
        small=(),
    )
    figures = transfer.run_transfer_benchmark(settings).large
    assert [(f.strategy, len(f.times_s)) for f in figures] == [
        ("block-major", 2),
        ("aligned-runs", 7),
    ]


# Which blocks


def churn(seed: int = 3, **more: Any) -> transfer_cases.Churned:
    settings: dict[str, Any] = {"occupancy": 0.8, "operations": 2_000, "samples": 30}
    return transfer_cases.churn({100: 10, 1000: 100}, 500, seed=seed, **(settings | more))


def test_churned_runs_are_a_request_in_both_pools() -> None:
    found = churn()
    for tokens, blocks in ((100, 10), (1000, 100)):
        for side in (0, 1):
            ids = [run[side] + i for run in found.runs[tokens] for i in range(run.num_blocks)]
            assert len(set(ids)) == len(ids) == blocks
            assert min(ids) >= 0 and max(ids) < 500
    for pool in found.pools.values():
        assert pool["blocks"] == 500 and pool["free_blocks"] == 100


def test_churn_repeats_itself_and_sides_differ() -> None:
    assert churn() == churn()
    assert churn() != churn(seed=4)
    assert churn().pools["source"] != churn().pools["destination"]


def test_runs_needed() -> None:
    short, long = churn().needed
    assert (short.num_tokens, short.num_blocks, short.samples) == (100, 10, 30)
    # The long one takes every free block, so as many runs as there are free segments, or more.
    assert long.moved >= max(p["free_segments"] for p in churn().pools.values()) > 1
    assert 1 <= short.mean <= short.p99 <= short.largest < long.mean


@pytest.mark.parametrize("name", ["operations", "samples"])
def test_churn_refuses(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name}=0"):
        churn(**{name: 0})


@pytest.mark.parametrize("tokens", [1, 500, 5_917, 12_000])
@pytest.mark.parametrize("occupancy", [0.1, 0.5, 0.8, 0.95])
def test_the_default_pool_just_holds_the_longest_request(tokens: int, occupancy: float) -> None:
    settings = transfer.TransferBench(tokens=(1, tokens), occupancy=occupancy)
    longest, size = settings.longest_blocks, settings.num_blocks
    assert size - int(size * occupancy) >= longest
    assert size - 1 - int((size - 1) * occupancy) <= longest


def test_fresh_requests_are_one_run() -> None:
    assert transfer_cases.fresh_runs(750) == (BlockRun(0, 0, 750),)


def test_scattered_runs() -> None:
    case = transfer_cases.SmallCase("x", 50, 4)
    runs = transfer_cases.scattered_runs(case, 400, seed=1)
    for side in (0, 1):
        starts = [run[side] for run in runs]
        assert len(set(starts)) == 50 and starts != sorted(starts)
        assert all(start % 4 == 0 and 0 <= start < 400 for start in starts)
    with pytest.raises(ValueError, match="does not fit a pool of 199 blocks"):
        transfer_cases.scattered_runs(case, 199, seed=1)


# Other systems


@pytest.fixture
def interpreter(tmp_path: Path) -> Any:
    """Makes a file that is run in place of another system's interpreter."""

    def make(body: str) -> Path:
        path = tmp_path / "python"
        path.write_text(f"#!{sys.executable}\nimport json, sys, time\n{body}\n")
        path.chmod(0o755)
        return path

    return make


ANSWER = """
task = json.load(sys.stdin)
assert sys.argv[1].endswith("transfer_peers.py") and sys.argv[2] == "mooncake"
seconds = {case: [0.25] * task["repeat"] for case in task["cases"]}
print(json.dumps({"version": f"mooncake {task['block_bytes']}", "seconds": seconds}))
"""


def test_another_system_beside_ours(interpreter: Any) -> None:
    peer = f"mooncake={interpreter(ANSWER)}"
    flags = ("--quick", "--tokens", "16", "--placements", "fresh", "--backends", "tcp")
    status, stdout, stderr = bench(*flags, "--peer", peer, "--json")
    assert status == 0, stderr
    document = json.loads(stdout)
    assert document["other_systems"] == {"mooncake itself": "mooncake 16384"}
    theirs = [r for r in document["small"] if r["system"] == "mooncake itself"]
    assert [(r["case"], r["times_s"]) for r in theirs] == [
        ("16 KiB", [0.25] * 2),
        ("1 MiB", [0.25] * 2),
    ]
    # Ours is measured before and after.
    ours = [r for r in document["small"] if r["system"] == "tcp"]
    assert [r["repeats"] for r in ours] == [4, 4]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("sys.exit('no such card')", "nixl ended with 1: no such card"),
        ("time.sleep(60)", "nixl took more than 0.5 s"),
    ],
)
def test_another_system_that_fails(
    interpreter: Any, monkeypatch: pytest.MonkeyPatch, body: str, message: str
) -> None:
    monkeypatch.setattr(transfer_systems, "_TIMEOUT_S", 0.5)
    system = System("nixl", interpreter(body))
    with pytest.raises(SystemFailed, match=message):
        run_system(system, {}, block_bytes=16, num_blocks=1, repeat=1, cold=False)


def test_the_script_for_other_systems_says_how_it_is_called() -> None:
    script = ROOT / "benchmarks" / "transfer_peers.py"
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and "nixl|mooncake" in done.stderr


# The report


def figures(system: str, case: int | str, seconds: float, **more: Any) -> Figures:
    settings: dict[str, Any] = {
        "placement": "fresh",
        "strategy": "aligned-runs",
        "data_bytes": 2 << 20,
        "runs": 1,
        "calls": 1,
        "times_s": (seconds,),
        "copies_s": (0.001,),
    }
    return Figures(system, case=case, **(settings | more))


def test_tables() -> None:
    layers = figures("tcp", 500, 0.2, strategy="layer-major", calls=2048)
    small = {"placement": "small", "copies_s": ()}
    report = Report(
        large=[layers, figures("tcp", 500, 0.004)],
        small=[
            figures("tcp", "16 KiB", 0.001, **small),
            figures("nixl itself", "16 KiB", 0.0025, **small, strategy=None, calls=None),
        ],
    )
    lines = markdown(report.tables(), ["a note"]).splitlines()
    assert "| tcp | 500 | 2 | 200 (2,048) | 4 (1) | 50.0x | 0.52 | 0.25 |" in lines
    assert "| 16 KiB | 1 | 2.5 |" in lines
    assert "| 16 KiB | nixl itself | 2.50x |" in lines
    assert lines[-1] == "- a note"


class FakePanel:
    def __init__(self) -> None:
        self.lines: dict[str, tuple[Sequence[int], Sequence[float]]] = {}

    def plot(self, x: Sequence[int], y: Sequence[float], style: str, **more: Any) -> None:
        self.lines[more["label"]] = (x, y)

    def __getattr__(self, name: str) -> Any:
        return lambda *arguments, **more: None


class FakePicture:
    def __init__(self, **settings: Any) -> None:
        self.panels: list[FakePanel] = []

    def subplots(self, rows: int, columns: int, **settings: Any) -> list[list[FakePanel]]:
        self.panels = [FakePanel() for _ in range(columns)]
        return [self.panels]

    def savefig(self, path: Path, **settings: Any) -> None:
        drawn = [panel.lines for panel in self.panels]
        path.write_text(json.dumps(drawn))


def test_a_plot_shows_every_figure(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(plots, "check_plotting", lambda: FakePicture)
    shown = [figures("tcp", 500, 0.1), figures("tcp", 1000, 0.2)]
    shown.append(figures("tcp", 1000, 0.3, placement="churned"))
    plots.plot_transfer(shown, tmp_path / "times.png")
    line, copied = "tcp, aligned-runs", "plain copy, one process"
    assert json.loads((tmp_path / "times.png").read_text()) == [
        {line: [[500, 1000], [0.1, 0.2]], copied: [[500, 1000], [0.001, 0.001]]},
        {line: [[1000], [0.3]], copied: [[1000], [0.001]]},
    ]


def test_matplotlib_is_imported_only_for_plots(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ValidationError, match="plots"):
        cast(Any, plots).check_plotting()
