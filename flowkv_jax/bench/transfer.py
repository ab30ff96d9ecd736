"""`flowkv bench transfer`: KV blocks between two processes, in the shape of FlowKV's Table 3.

Each backend gets a pair of processes of its own, with pools of the same layout in host memory. For
each input length a request's blocks move from one to the other by each strategy, on fresh pools
(one run) and on churned ones (see `transfer_cases`), in rounds: a plain copy of the same runs
within the source's process, then one transfer by each strategy, and again. What the rest of the
machine does so falls on all of them alike.

- A transfer is timed by its caller, from `submit` until `wait` returns: the destination has the
  bytes and has said so. Medians are reported.
- Calls are what the engine's own counters say, and must equal the formulas of
  `transfer.strategies`. Where a backend can, it hands many calls to the system at once
  (`shared_memory` up to 1,024); where it cannot, every call costs a round trip.
- Before each transfer of the first round the destination's blocks are spoilt, and compared with
  the source's after it.
- Once it has taken `cell_s`, a strategy other than aligned runs is not repeated, and a small
  transfer not more than `repeat` times. Figures say how many repetitions they are the median of.
  Calls are never left out.
- Pages are there before the clock runs, and are advised to be huge, as NumPy's own arrays are.
- Unless `cold` is off, the source's process changes 64 MiB elsewhere before every copy and
  transfer: caches hold neither the bytes nor what the processes need to move them, as after a
  model's step.

Fixed costs are measured on runs of 16 KiB blocks, aligned runs only. Other systems, if
given, move the same runs between two measurements of ours (`transfer_systems`). Imports no JAX; the
pairs do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

from flowkv_jax.bench.transfer_cases import (
    CHURNED,
    FRESH,
    PLACEMENTS,
    SMALL_CASES,
    SMALL_LAYOUT,
    SMALL_POOL_BLOCKS,
    SmallCase,
    churn,
    fresh_runs,
    scattered_runs,
)
from flowkv_jax.bench.transfer_pair import BackendUnavailable, Pair, PeerError, open_pair
from flowkv_jax.bench.transfer_peer import PoolSetup
from flowkv_jax.bench.transfer_report import SMALL, Figures, Report
from flowkv_jax.bench.transfer_systems import System, SystemFailed, run_system
from pallas_kernels.kv_layout import KVLayout
from transfer.strategies import Strategy, num_calls
from transfer.types import BlockRun

BACKENDS = ("shared_memory", "tcp", "storage", "jax_pull", "collective", "nixl")
LLAMA_3_1_8B = KVLayout(32, 16, 8, 128, "bfloat16", 2)
TABLE_3_TOKENS = (500, 1000, 4000, 8000, 10000, 12000)

Progress = Callable[[str], None]
Runs = Sequence[BlockRun]

_POOL = "kv"
_SPARE_BYTES = 1 << 30
_SMALL_WARMUP = 3
_PAYLOADS_HELD = 5
"""Payloads in memory at once: two pools, the copy, and what some backends keep on either side."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferBench:
    """What is measured.

    Attributes:
        layout: of the pools.
        tokens: input lengths.
        churned_tokens: those of them whose blocks move in churned pools, too; None for the longest.
            Runs are counted for all.
        backends: names; empty for all that work here.
        strategies: in the order of the report.
        placements: which.
        repeat: repetitions of aligned runs, and at most of the others.
        cell_s: see the module's text.
        occupancy, operations: of the churned pools, before anything moves.
        samples: requests of each length whose runs are counted.
        pool_blocks: of each pool; None for the smallest that holds the longest request at that
            occupancy, which then takes every free block.
        small: fixed costs; empty for none.
        small_repeat: repetitions of those, at most.
        systems: to measure beside, on the small cases.
        cold: see the module's text; the same is done for other systems.
        checksum: let the engine verify every transfer; its time is part of the figures.
        storage_dir: where the storage backend's files go; None for the system's temporary folder.
        deadline_s: of one transfer.
        seed: of contents and churn.

    Raises:
        ValueError: a value is out of range.
    """

    layout: KVLayout = LLAMA_3_1_8B
    tokens: tuple[int, ...] = TABLE_3_TOKENS
    churned_tokens: tuple[int, ...] | None = None
    backends: tuple[str, ...] = ()
    strategies: tuple[Strategy, ...] = tuple(Strategy)
    placements: tuple[str, ...] = PLACEMENTS
    repeat: int = 5
    cell_s: float = 1.0
    occupancy: float = 0.8
    operations: int = 10_000
    samples: int = 500
    pool_blocks: int | None = None
    small: tuple[SmallCase, ...] = SMALL_CASES
    small_repeat: int = 20
    systems: tuple[System, ...] = ()
    cold: bool = True
    checksum: bool = False
    storage_dir: Path | None = None
    deadline_s: float = 300.0
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("repeat", "small_repeat", "cell_s", "deadline_s", "operations", "samples"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name}={getattr(self, name)} must be above 0")
        if not self.tokens or min(self.tokens) < 1:
            raise ValueError(f"tokens={self.tokens} must be one or more numbers of at least 1")
        if not set(self.churned_tokens or ()) <= set(self.tokens):
            raise ValueError(
                f"churned_tokens={self.churned_tokens} must be some of tokens={self.tokens}"
            )
        if not self.strategies or not self.placements:
            raise ValueError("at least one strategy and one placement must be measured")
        for name, known in (("backends", BACKENDS), ("placements", PLACEMENTS)):
            for value in getattr(self, name):
                if value not in known:
                    raise ValueError(f"{name} has {value!r}; there are {', '.join(known)}")
        piece = self.layout.bytes_per_block // (2 * self.layout.num_layers)
        if piece % 8:
            raise ValueError(
                f"a layer's keys of one block have {piece} bytes; the comparison of both pools "
                "needs a multiple of 8"
            )
        if self.storage_dir is not None and not self.storage_dir.is_dir():
            raise ValueError(f"storage_dir={str(self.storage_dir)!r} is no folder")
        if not 0 < self.occupancy < 1:
            raise ValueError(f"occupancy={self.occupancy} must be in (0, 1)")
        if self.pool_blocks is not None and self.pool_blocks < self.longest_blocks:
            raise ValueError(
                f"pool_blocks={self.pool_blocks} must be at least the {self.longest_blocks} blocks "
                "of the longest request"
            )

    @property
    def longest_blocks(self) -> int:
        return self.layout.blocks_for(max(self.tokens))

    @property
    def num_blocks(self) -> int:
        """Of each pool."""
        if self.pool_blocks is not None:
            return self.pool_blocks
        if CHURNED not in self.placements:
            return self.longest_blocks
        num_blocks = int(self.longest_blocks / (1 - self.occupancy))
        while num_blocks - int(num_blocks * self.occupancy) < self.longest_blocks:
            num_blocks += 1
        return num_blocks

    def document(self) -> dict[str, Any]:
        """For the JSON report."""
        return asdict(self) | {
            "strategies": [strategy.value for strategy in self.strategies],
            "pool_blocks": self.num_blocks,
            "small": [case.name for case in self.small],
            "systems": [system.name for system in self.systems],
            "storage_dir": None if self.storage_dir is None else str(self.storage_dir),
            "bytes_per_token": self.layout.bytes_per_token,
            "bytes_per_block": self.layout.bytes_per_block,
        }


def run_transfer_benchmark(bench: TransferBench, progress: Progress = lambda line: None) -> Report:
    """Measure. A backend that fails is in `Report.failed`, and the others go on.

    Args:
        progress: gets a line for each step.

    Raises:
        ValueError: the transfers do not fit this machine's memory, or a request its pool.
    """
    _check_memory(bench)
    report = Report()
    cases = _cases(bench, report)
    backends = list(bench.backends or BACKENDS)
    if bench.small:
        _measure_small(bench, backends, report, progress)
    for backend in backends:
        if backend in report.failed or backend in report.unavailable:
            continue
        pool = _pool_setup(bench.layout, bench.num_blocks)
        with _noting_failure(backend, bench, report, progress), _open(bench, backend, pool) as pair:
            for placement, tokens, runs in cases:
                progress(f"{backend}: {tokens} tokens, {placement} pools")
                moved = _Moved(backend, placement, tokens, runs, bench.layout)
                report.large += _measure(bench, pair, moved)
    return report


@dataclass(frozen=True, slots=True)
class _Moved:
    """What is moved in one cell, and by what."""

    system: str
    placement: str
    case: int | str
    runs: Runs
    layout: KVLayout

    @property
    def num_blocks(self) -> int:
        return sum(run.num_blocks for run in self.runs)

    @property
    def run_lists(self) -> list[list[int]]:
        """As they go to the pair."""
        return [list(run) for run in self.runs]

    def figures(
        self,
        strategy: Strategy | None,
        calls: int | None,
        times_s: Sequence[float],
        copies_s: Sequence[float],
    ) -> Figures:
        return Figures(
            self.system,
            self.placement,
            self.case,
            None if strategy is None else strategy.value,
            self.num_blocks * self.layout.bytes_per_block,
            len(self.runs),
            calls,
            tuple(times_s),
            tuple(copies_s),
        )


def _measure(bench: TransferBench, pair: Pair, moved: _Moved) -> list[Figures]:
    """All strategies on one run list, in rounds."""
    source, destination = pair.source, pair.destination
    runs = moved.run_lists
    expected = _prepare(bench, pair, runs)
    # Brings the destination's pages, and what backends make once.
    source.ask("move", _POOL, runs, Strategy.ALIGNED_RUNS.value, bench.checksum)
    copies: list[float] = []
    times: dict[Strategy, list[float]] = {strategy: [] for strategy in bench.strategies}
    calls: dict[Strategy, int] = {}
    for _ in range(bench.repeat):
        copies.append(source.ask("copy", _POOL, runs))
        for strategy, taken in times.items():
            if strategy is not Strategy.ALIGNED_RUNS and sum(taken) > bench.cell_s:
                continue
            if not taken:
                destination.ask("spoil", _POOL, runs)
            seconds, counted = source.ask("move", _POOL, runs, strategy.value, bench.checksum)
            if not taken and destination.ask("fingerprint", _POOL, runs) != expected:
                raise PeerError(f"{strategy.value}: the destination holds other bytes")
            taken.append(seconds)
            calls[strategy] = _checked(strategy, moved, counted)
    return [
        moved.figures(strategy, calls[strategy], taken, copies) for strategy, taken in times.items()
    ]


def _prepare(bench: TransferBench, pair: Pair, runs: list[list[int]]) -> int:
    """Fill the source's blocks, and no others on either side; their fingerprint."""
    pair.both("release", _POOL)
    pair.source.ask("fill", _POOL, runs, bench.seed)
    pair.source.ask("copy", _POOL, runs)
    expected: int = pair.source.ask("fingerprint", _POOL, runs)
    return expected


def _checked(strategy: Strategy, moved: _Moved, counted: int) -> int:
    layers = moved.layout.num_layers
    expected = num_calls(strategy, moved.num_blocks, len(moved.runs), layers)
    if counted != expected:
        raise PeerError(f"{strategy.value}: {counted} calls were counted, not {expected}")
    return counted


def _measure_small(
    bench: TransferBench, backends: Sequence[str], report: Report, progress: Progress
) -> None:
    """Ours, the other systems, and ours again where there were any."""
    runs = {case.name: scattered_runs(case, SMALL_POOL_BLOCKS, bench.seed) for case in bench.small}
    ours: dict[tuple[str, str], Figures] = {}
    for is_last in (False, True) if bench.systems else (True,):
        for backend in backends:
            if backend in report.failed or backend in report.unavailable:
                continue
            progress(f"{backend}: small transfers")
            with _noting_failure(backend, bench, report, progress):
                for figures in _small_figures(bench, backend, runs):
                    key = (backend, str(figures.case))
                    ours[key] = ours[key].and_later(figures) if key in ours else figures
        for system in () if is_last else bench.systems:
            progress(f"{system.name}: small transfers")
            _run_system(bench, system, runs, report, progress)
    report.small[:0] = ours.values()


def _small_figures(
    bench: TransferBench, backend: str, runs_by_case: dict[str, tuple[BlockRun, ...]]
) -> list[Figures]:
    found: list[Figures] = []
    with _open(bench, backend, _pool_setup(SMALL_LAYOUT, SMALL_POOL_BLOCKS)) as pair:
        source = pair.source
        for case, runs in runs_by_case.items():
            moved = _Moved(backend, SMALL, case, runs, SMALL_LAYOUT)
            expected = _prepare(bench, pair, moved.run_lists)
            arguments = (_POOL, moved.run_lists, bench.checksum)
            source.ask("rounds", *arguments, _SMALL_WARMUP, _SMALL_WARMUP, 0.0)
            least = min(bench.repeat, bench.small_repeat)
            times, copies, counts = source.ask(
                "rounds", *arguments, least, bench.small_repeat, bench.cell_s
            )
            if pair.destination.ask("fingerprint", _POOL, moved.run_lists) != expected:
                raise PeerError(f"{case}: the destination holds other bytes")
            for calls in counts:
                _checked(Strategy.ALIGNED_RUNS, moved, calls)
            found.append(moved.figures(Strategy.ALIGNED_RUNS, len(runs), times, copies))
    return found


def _run_system(
    bench: TransferBench,
    system: System,
    runs_by_case: dict[str, tuple[BlockRun, ...]],
    report: Report,
    progress: Progress,
) -> None:
    try:
        times = run_system(
            system,
            runs_by_case,
            block_bytes=SMALL_LAYOUT.bytes_per_block,
            num_blocks=SMALL_POOL_BLOCKS,
            repeat=bench.small_repeat,
            cold=bench.cold,
        )
    except SystemFailed as error:
        report.failed[system.label] = str(error)
        progress(f"{system.name} failed: {error}")
        return
    report.versions[system.label] = times.version
    for case, runs in runs_by_case.items():
        moved = _Moved(system.label, SMALL, case, runs, SMALL_LAYOUT)
        report.small.append(moved.figures(None, None, times.seconds[case], ()))


def _cases(bench: TransferBench, report: Report) -> list[tuple[str, int, Runs]]:
    """(placement, tokens, runs) of every large transfer."""
    blocks = {tokens: bench.layout.blocks_for(tokens) for tokens in bench.tokens}
    cases: list[tuple[str, int, Runs]] = []
    if FRESH in bench.placements:
        cases += [(FRESH, tokens, fresh_runs(count)) for tokens, count in blocks.items()]
    if CHURNED in bench.placements:
        report.churned = churn(
            blocks,
            bench.num_blocks,
            occupancy=bench.occupancy,
            operations=bench.operations,
            samples=bench.samples,
            seed=bench.seed,
        )
        runs = report.churned.runs
        chosen = bench.churned_tokens or (max(bench.tokens),)
        cases += [(CHURNED, tokens, runs[tokens]) for tokens in chosen]
    return cases


def _open(bench: TransferBench, backend: str, pool: PoolSetup) -> AbstractContextManager[Pair]:
    return open_pair(
        backend,
        {_POOL: pool},
        storage_dir=bench.storage_dir,
        deadline_s=bench.deadline_s,
        cold=bench.cold,
    )


@contextmanager
def _noting_failure(
    backend: str, bench: TransferBench, report: Report, progress: Progress
) -> Iterator[None]:
    """One that was asked for by name must work; others need not."""
    try:
        yield
    except PeerError as error:
        by_name = backend in bench.backends or not isinstance(error, BackendUnavailable)
        found = report.failed if by_name else report.unavailable
        found[backend] = str(error)
        progress(f"{backend} {'failed' if by_name else 'is not available'}: {error}")


def _pool_setup(layout: KVLayout, num_blocks: int) -> PoolSetup:
    return PoolSetup(asdict(layout), num_blocks)


def _check_memory(bench: TransferBench) -> None:
    payload = bench.longest_blocks * bench.layout.bytes_per_block
    needed = _PAYLOADS_HELD * payload + _SPARE_BYTES
    available = psutil.virtual_memory().available
    if needed > available:
        raise ValueError(
            f"{max(bench.tokens)} tokens are {payload / 2**30:.1f} GiB, and measuring them takes "
            f"about {needed / 2**30:.1f} GiB, of which {available / 2**30:.1f} GiB are available: "
            "ask for fewer tokens, or a smaller model"
        )
