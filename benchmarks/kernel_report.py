"""Results of checks and timings as plain text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from statistics import median
from typing import Any

from benchmarks.device_timing import Ceilings
from benchmarks.kernel_cases import LAYOUTS, Case
from benchmarks.kernel_checks import Check

_NAMES = {"gpu": "pallas", "hopper": "hopper", "xla": "xla", "reference": "reference"}
LEGEND = (
    "Time of one operation, median of the samples. Then the per cent of it that moving its bytes\n"
    "takes at the copy bandwidth (b; reading alone can be faster than copying) or computing takes\n"
    "at the rate of the matrix product (f), whichever is more."
)


class Status(StrEnum):
    """What became of a check or a timing."""

    OK = "ok"
    WRONG = "wrong"
    FAILED = "failed"
    REFUSED = "refused"
    SKIPPED = "skipped"


@dataclass(frozen=True)
class CheckResult:
    """`error` is None where the kernel did not run; `message` says why, or what is wrong."""

    check: Check
    status: Status
    message: str = ""
    error: float | None = None

    def as_json(self) -> dict[str, Any]:
        check = self.check
        return {
            "title": check.title,
            "kernel": check.kernel,
            "implementation": check.implementation,
            "model": check.model.name,
            "layout": check.layout,
            "dtype": check.dtype,
            "num_splits": check.num_splits,
            "spare_blocks": check.spare_blocks,
            "status": self.status,
            # JSON has no infinity.
            "error": str(self.error) if self.error == float("inf") else self.error,
            "bound": check.bound,
            "message": self.message,
        }


@dataclass(frozen=True)
class TimingResult:
    """Seconds of one operation in each sample; none where the case did not run."""

    case: Case
    status: Status
    message: str = ""
    samples_s: tuple[float, ...] = ()

    @property
    def median_s(self) -> float | None:
        return median(self.samples_s) if self.samples_s else None

    def shares(self, ceilings: Ceilings) -> tuple[float, float]:
        """Of the copy bandwidth and of the matrix product's rate."""
        seconds = self.median_s or float("inf")
        return (
            self.case.bytes / seconds / ceilings.copy_bytes_per_s,
            self.case.flops / seconds / ceilings.matmul_flops_per_s,
        )

    def as_json(self, ceilings: Ceilings) -> dict[str, Any]:
        case, seconds = self.case, self.median_s
        share_of_copy, share_of_matmul = self.shares(ceilings)
        return {
            "title": case.title,
            "name": case.name,
            "implementation": case.implementation,
            "model": case.model.name,
            "layout": case.layout,
            "table": case.table,
            "num_splits": case.num_splits,
            "status": self.status,
            "message": self.message,
            "pool_shape": list(case.program.shapes[0].shape),
            "operations_per_call": case.program.operations,
            "bytes": case.bytes,
            "flops": case.flops,
            "median_s": seconds,
            "samples_s": list(self.samples_s),
            "bytes_per_s": case.bytes / seconds if seconds else None,
            "flops_per_s": case.flops / seconds if seconds else None,
            "share_of_copy_bandwidth": share_of_copy if seconds else None,
            "share_of_matmul_rate": share_of_matmul if seconds else None,
        }

    def cell(self, ceilings: Ceilings) -> str:
        """For a table: time and share."""
        if self.median_s is None:
            return self.status
        share, unit = max(zip(self.shares(ceilings), "bf", strict=True))
        return f"{_duration(self.median_s)} {100 * share:3.0f}%{unit}"


def check_table(results: Sequence[CheckResult]) -> str:
    """Worst error of each kernel by implementation, over models, layouts and shares."""
    implementations = [
        name for name in _NAMES if any(r.check.implementation == name for r in results)
    ]
    rows = []
    for kernel, dtype in dict.fromkeys((r.check.kernel, r.check.dtype) for r in results):
        cells = []
        for name in implementations:
            own = [
                r
                for r in results
                if (r.check.kernel, r.check.dtype, r.check.implementation) == (kernel, dtype, name)
            ]
            cells.append(_worst(own))
        rows.append([f"{kernel} {dtype}", *cells])
    return _table([["worst error", *(_NAMES[name] for name in implementations)], *rows])


def _worst(results: Sequence[CheckResult]) -> str:
    bad = [r for r in results if r.status in (Status.WRONG, Status.FAILED)]
    errors = [r.error for r in results if r.error is not None]
    if bad:
        return f"{bad[0].status} ({len(bad)} of {len(results)})"
    if errors:
        return f"{max(errors):.0e}" if max(errors) else "0"
    return results[0].status if results else ""


def kernel_tables(results: Sequence[TimingResult], ceilings: Ceilings) -> str:
    """A table a model: kernels down, layouts and implementations across."""
    tables = []
    for model in dict.fromkeys(r.case.model.name for r in results):
        found = {
            (r.case.name, r.case.layout, r.case.implementation): r.cell(ceilings)
            for r in results
            if r.case.model.name == model and r.case.table == "kernels"
        }
        columns = [
            (layout, name)
            for layout in LAYOUTS
            for name in _NAMES
            if any(key[1:] == (layout, name) for key in found)
        ]
        rows = [
            [model, *(layout for layout, _ in columns)],
            ["", *(_NAMES[name] for _, name in columns)],
        ]
        for case in dict.fromkeys(key[0] for key in found):
            rows.append([case, *(found.get((case, *column), "") for column in columns)])
        if found:
            tables.append(_table(rows))
    return "\n\n".join(tables)


def splits_table(results: Sequence[TimingResult], ceilings: Ceilings) -> str:
    """Decode of few rows with long contexts, by shares of the context; empty if none was timed."""
    own = [r for r in results if r.case.table == "splits"]
    splits = list(dict.fromkeys(r.case.num_splits for r in own))
    rows: dict[str, dict[int | None, str]] = {}
    for result in own:
        case = result.case
        title = f"{case.model.name} {case.name} {_NAMES[case.implementation]}"
        rows.setdefault(title, {})[case.num_splits] = result.cell(ceilings)
    if not rows:
        return ""
    header = ["shares of the context", *(str(number or "auto") for number in splits)]
    body = [[title, *(cells.get(number, "") for number in splits)] for title, cells in rows.items()]
    return _table([header, *body])


def _table(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if index == 0 else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )


def _duration(seconds: float) -> str:
    microseconds = seconds * 1e6
    if microseconds < 1e4:
        return f"{microseconds:.1f} us"
    return f"{microseconds / 1e3:.1f} ms"
