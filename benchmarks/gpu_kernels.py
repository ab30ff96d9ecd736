"""Are the kernels right on this GPU, and how near do they come to what it can do?

    python -m benchmarks.gpu_kernels            under three minutes on one GPU
    python -m benchmarks.gpu_kernels --quick --json kernels.json

First every kernel is checked on random data (`benchmarks.kernel_checks` says how). Then this
device's copy bandwidth and its rate in a large bfloat16 matrix product are measured, and the
kernels are timed on pools of Llama-3.1-8B and of one of four shards of Llama-3.1-70B, bfloat16,
blocks of 16 tokens, next to the same without Pallas and in both orders of the pool: block-major,
which is served, and layer-major, which FlowKV starts from. Last comes decode of few rows with long
contexts by the number of shares each context is cut into.

On a machine without a GPU everything runs at the smallest sizes in Pallas' interpreter. That shows
that the script works; its times mean nothing.

Exit status: 0; 1 if anything was wrong or failed; 2 for wrong arguments. A case that cannot run
says why, and the rest goes on.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import secrets
import subprocess
import sys
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import jax
import numpy as np

from benchmarks import kernel_cases, kernel_checks, kernel_report
from benchmarks.device_timing import (
    Ceilings,
    Effort,
    free_bytes,
    measure_ceilings,
    random_normal,
    time_call,
)
from benchmarks.kernel_cases import Case, CaseMaker, Model, Program
from benchmarks.kernel_checks import Check
from benchmarks.kernel_report import CheckResult, Status, TimingResult

_ROOT = Path(__file__).resolve().parents[1]
_SEEDS = 2**31
_OUT_OF_TIME = (Status.SKIPPED, "out of time")
_THREADS = min(8, os.cpu_count() or 1)
"""That trace and compile side by side."""
_POOL_SHARE = 0.45
"""Of the free memory, for the pool that is timed."""
_HUGE_ELEMENTS = (2**32, 2**31)
"""A pool of more than so many is checked too: the first that `_HUGE_SHARE` of the free memory
holds."""
_HUGE_SHARE = 0.3


@dataclass(frozen=True)
class Options:
    """What was asked for.

    Attributes:
        quick: fewer and shorter measurements.
        seed: of all random data.
        only: parts of titles, lower case; empty means everything.
        end_s: on the clock of `perf_counter`; what has not begun by then is skipped.
    """

    quick: bool
    seed: int
    only: tuple[str, ...]
    end_s: float

    def wants(self, title: str) -> bool:
        return not self.only or any(part in title.lower() for part in self.only)

    @property
    def is_late(self) -> bool:
        return perf_counter() > self.end_s


def main(arguments: Sequence[str] | None = None) -> int:
    """Run as a command; see the module's docstring."""
    begin_s = perf_counter()
    parser = _parser()
    parsed = parser.parse_args(arguments)
    if parsed.json and not Path(parsed.json).absolute().parent.is_dir():
        parser.error(f"--json {parsed.json}: there is no such folder")
    if parsed.seed is not None and not 0 <= parsed.seed < _SEEDS:
        parser.error(f"--seed {parsed.seed} is outside [0, {_SEEDS})")
    seed = secrets.randbelow(_SEEDS) if parsed.seed is None else parsed.seed
    only = tuple(part.lower() for part in parsed.only)
    options = Options(parsed.quick, seed, only, begin_s + parsed.limit_s)
    environment = _environment()
    print(", ".join(f"{name} {value}" for name, value in environment.items()))
    print(f"seed {seed}", flush=True)
    if not _has_gpu():
        print("No GPU: smallest sizes, interpreted kernels. The times below mean nothing.")
    checks = run_checks(options)
    ceilings = _measure_ceilings(options)
    timings = run_timings(options)
    if not checks and not timings:
        parser.error(f"--only {' '.join(parsed.only)} matches nothing")
    seconds = perf_counter() - begin_s
    _print_report(checks, timings, ceilings, seconds)
    statuses = {r.status for r in checks} | {r.status for r in timings}
    is_ok = not statuses & {Status.WRONG, Status.FAILED}
    if parsed.json:
        report = {
            "environment": environment,
            "seed": seed,
            "quick": options.quick,
            "only": list(options.only),
            "times_mean_something": _has_gpu(),
            "seconds": seconds,
            "ok": is_ok,
            "ceilings": asdict(ceilings),
            "checks": [result.as_json() for result in checks],
            "timings": [result.as_json(ceilings) for result in timings],
        }
        Path(parsed.json).write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return 0 if is_ok else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu_kernels",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=kernel_report.LEGEND,
        allow_abbrev=False,
    )
    parser.add_argument("--quick", action="store_true", help="one model, fewer sizes and checks")
    parser.add_argument("--json", metavar="FILE", help="write every result and sample to FILE")
    parser.add_argument("--seed", type=int, help="of the random data; default: another each time")
    parser.add_argument(
        "--only",
        metavar="NAME",
        action="append",
        default=[],
        help='what has NAME in its title, such as "decode", "kv_write", "70B", "layer-major", '
        '"splits", "hopper"; may be given several times',
    )
    parser.add_argument(
        "--limit-s",
        type=float,
        default=170.0,
        metavar="S",
        help="begin nothing more after S seconds, and say what was skipped (default: %(default)s)",
    )
    return parser


def run_checks(options: Options) -> list[CheckResult]:
    """Every check that is wanted, on data of the options' seed.

    Most of a check is compiling, so several run at a time; but one at a time in pools that are a
    good part of the memory.
    """
    wanted = [check for check in _checks(options) if options.wants(check.title)]
    small = [check for check in wanted if not check.spare_blocks]
    huge = [check for check in wanted if check.spare_blocks]
    with ThreadPoolExecutor(_THREADS) as threads:
        results = list(threads.map(partial(_check, options), small))
    results += [_check(options, check) for check in huge]
    for result in results:
        _say(result.check.title, result.status, result.message)
    return results


def _checks(options: Options) -> Iterable[Check]:
    if not _has_gpu():
        yield from kernel_checks.checks(kernel_cases.TINY, kernel_checks.SMALLEST)
        return
    first = kernel_checks.BRIEF if options.quick else kernel_checks.FULL
    yield from kernel_checks.checks(kernel_cases.LLAMA_8B, first)
    yield from (
        check
        for check in kernel_checks.checks(kernel_cases.LLAMA_70B_TP4, kernel_checks.BRIEF)
        if check.implementation in ("gpu", "hopper")
    )
    room = (free_bytes() or 0) * _HUGE_SHARE
    elements = next((size for size in _HUGE_ELEMENTS if 2 * size <= room), None)
    if elements is None:
        print(f"No pool of 2**31 elements is checked: it may take {room:.1e} bytes only.")
    else:
        yield from kernel_checks.huge_pool_checks(
            kernel_cases.LLAMA_8B, kernel_checks.BRIEF, elements
        )


def _check(options: Options, check: Check) -> CheckResult:
    if options.is_late:
        return CheckResult(check, *_OUT_OF_TIME)
    try:
        error = check.error(_generator(options, check.title))
    except Exception as exception:
        return CheckResult(check, *_why(exception))
    if error <= check.bound:
        return CheckResult(check, Status.OK, error=error)
    message = f"error {error:.1e} is above {check.bound:.0e}"
    return CheckResult(check, Status.WRONG, message, error)


def _measure_ceilings(options: Options) -> Ceilings:
    available = free_bytes()
    copy_bytes = 1 << 24 if available is None else min(2 << 30, available // 8)
    extent = 8192 if _has_gpu() else 256
    return measure_ceilings(jax.random.key(options.seed), copy_bytes, extent, _effort(options))


def run_timings(options: Options) -> list[TimingResult]:
    """Every case that is wanted, on one pool after another."""
    sizes = kernel_cases.QUICK if options.quick else kernel_cases.FULL
    if not _has_gpu():
        sizes = kernel_cases.SMALLEST
    results: list[TimingResult] = []
    # The tables of splits come last, so that they are what a slow machine leaves out.
    for cases_of in (CaseMaker.kernels, CaseMaker.splits):
        for model in sizes.models:
            for layout in kernel_cases.LAYOUTS:
                num_blocks = _pool_blocks(model, sizes.most_pool_bytes)
                maker = CaseMaker(model, layout, num_blocks, sizes)
                cases = [case for case in cases_of(maker) if options.wants(case.title)]
                results.extend(_time_on_one_pool(cases, maker, options))
    return results


def _pool_blocks(model: Model, most_bytes: int) -> int:
    available = free_bytes()
    room = most_bytes if available is None else min(most_bytes, int(available * _POOL_SHARE))
    return room // model.layout.bytes_per_block


class _Pool:
    """The pool that cases use in turn; made when first used, and after a case failed with it."""

    def __init__(self, maker: CaseMaker, seed: int) -> None:
        self._shape = maker.pool.shape
        self._seed = seed
        self._array: jax.Array | None = None

    def call(self, case: Case, inputs: tuple[Any, ...]) -> Any:
        if self._array is None or self._array.is_deleted():
            self._array = random_normal(jax.random.key(self._seed), self._shape)
        out = case.program.jitted(self._array, *inputs)
        if case.program.donates:
            self._array = out
        return out


def _time_on_one_pool(
    cases: Sequence[Case], maker: CaseMaker, options: Options
) -> list[TimingResult]:
    if not cases:
        return []
    fitting = [case.program for case in cases if case.num_blocks <= maker.num_blocks]
    failures = _compile(fitting, options)
    pool = _Pool(maker, options.seed)
    results = []
    for case in cases:
        failure = failures.get(case.program)
        if case.num_blocks > maker.num_blocks:
            message = f"needs {case.num_blocks} blocks, the pool has {maker.num_blocks}"
            failure = (Status.SKIPPED, message)
        elif failure is None and options.is_late:
            failure = _OUT_OF_TIME
        result = TimingResult(case, *failure) if failure else _time(case, pool, options)
        _say(case.title, result.status, result.message)
        results.append(result)
    return results


def _compile(programs: Iterable[Program], options: Options) -> dict[Program, tuple[Status, str]]:
    """Compile programs, several at a time; what went wrong with those that could not be."""

    def attempt(program: Program) -> tuple[Status, str] | None:
        if options.is_late:
            return _OUT_OF_TIME
        try:
            program.compile()
        except Exception as exception:
            return _why(exception)
        return None

    distinct = list(dict.fromkeys(programs))
    with ThreadPoolExecutor(_THREADS) as threads:
        outcomes = zip(distinct, threads.map(attempt, distinct), strict=True)
        return {program: outcome for program, outcome in outcomes if outcome is not None}


def _time(case: Case, pool: _Pool, options: Options) -> TimingResult:
    try:
        inputs = case.make_inputs(_generator(options, case.title))
        samples_s = time_call(
            lambda: pool.call(case, inputs), case.program.operations, _effort(options)
        )
    except Exception as exception:
        return TimingResult(case, *_why(exception))
    return TimingResult(case, Status.OK, samples_s=tuple(samples_s))


def _generator(options: Options, title: str) -> np.random.Generator:
    """Of one check's or case's random data, whatever else runs."""
    return np.random.default_rng([options.seed, *title.encode()])


def _effort(options: Options) -> Effort:
    if not _has_gpu():
        return Effort(repeats=5, least_s=0.0)
    return Effort(repeats=5 if options.quick else 7, least_s=0.02)


def _why(exception: Exception) -> tuple[Status, str]:
    """In one line. A kernel that says what it cannot serve has not failed."""
    text = " ".join(str(exception).split())
    if isinstance(exception, ValueError) and "'hopper' cannot serve this" in text:
        return Status.REFUSED, text
    return Status.FAILED, f"{type(exception).__name__}: {text[:300]}"


def _say(title: str, status: Status, message: str) -> None:
    if status is not Status.OK:
        print(f"{status}: {title}: {message}", flush=True)


def _has_gpu() -> bool:
    return jax.default_backend() == "gpu"


def _environment() -> dict[str, str]:
    device = jax.devices()[0]
    capability = getattr(device, "compute_capability", None)
    found = {
        "device": device.device_kind,
        "jax": jax.__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
        "commit": _commit(),
    }
    return found | ({"compute capability": str(capability)} if capability else {})


def _commit() -> str:
    command = ["git", "-C", str(_ROOT), "rev-parse", "--short", "HEAD"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return done.stdout.strip()


def _print_report(
    checks: Sequence[CheckResult],
    timings: Sequence[TimingResult],
    ceilings: Ceilings,
    seconds: float,
) -> None:
    print(
        f"\ncopy bandwidth {ceilings.copy_bytes_per_s / 1e9:.0f} GB/s (read and written), "
        f"bfloat16 matrix product {ceilings.matmul_flops_per_s / 1e12:.2f} TFLOP/s"
    )
    tables = (
        kernel_report.check_table(checks) if checks else "",
        kernel_report.kernel_tables(timings, ceilings),
        kernel_report.splits_table(timings, ceilings),
        kernel_report.LEGEND if timings else "",
    )
    for table in filter(None, tables):
        print(f"\n{table}")
    print(f"checks: {_counts([r.status for r in checks])}")
    print(f"timings: {_counts([r.status for r in timings])}")
    print(f"{seconds:.0f} s")


def _counts(statuses: Sequence[Status]) -> str:
    found = [status for status in Status if status is Status.OK or status in statuses]
    return ", ".join(f"{statuses.count(status)} {status}" for status in found)


if __name__ == "__main__":
    sys.exit(main())
