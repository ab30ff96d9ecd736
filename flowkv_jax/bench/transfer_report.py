"""What `flowkv bench transfer` found, and how it is shown: JSON, tables, Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from statistics import median
from typing import Any

from flowkv_jax.bench.transfer_cases import Churned
from transfer.strategies import Strategy

SMALL = "small"
_ALIGNED, _LAYERS = Strategy.ALIGNED_RUNS.value, Strategy.LAYER_MAJOR.value


@dataclass(frozen=True, slots=True)
class Figures:
    """One thing that was moved again and again.

    Attributes:
        system: a backend of ours, or another system.
        placement: of the blocks; `SMALL` for a case of small blocks.
        case: input tokens, or the small case's name.
        strategy: None for another system.
        runs: moved.
        calls: counted by the engine; None for another system.
        times_s: of every repetition.
        copies_s: of plain copies of the same runs in the same rounds; empty for another system.
    """

    system: str
    placement: str
    case: int | str
    strategy: str | None
    data_bytes: int
    runs: int
    calls: int | None
    times_s: tuple[float, ...]
    copies_s: tuple[float, ...] = ()

    @property
    def seconds(self) -> float:
        """The median."""
        return median(self.times_s)

    @property
    def gb_per_s(self) -> float:
        return self.data_bytes / self.seconds / 1e9

    @property
    def share_of_copy(self) -> float | None:
        """Bandwidth over that of the plain copy."""
        return median(self.copies_s) / self.seconds if self.copies_s else None

    def and_later(self, more: Figures) -> Figures:
        """The same thing, moved again later."""
        return replace(
            self, times_s=self.times_s + more.times_s, copies_s=self.copies_s + more.copies_s
        )

    def document(self) -> dict[str, Any]:
        """For the JSON report."""
        return asdict(self) | {
            "repeats": len(self.times_s),
            "seconds": self.seconds,
            "fastest_s": min(self.times_s),
            "copy_s": median(self.copies_s) if self.copies_s else None,
            "gb_per_s": self.gb_per_s,
            "share_of_copy": self.share_of_copy,
        }


@dataclass(frozen=True, slots=True)
class Table:
    """Text, column by column; the first `num_names` are names, the others figures."""

    title: str
    headings: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    num_names: int = 1


@dataclass(slots=True)
class Report:
    """What was measured, and what could not be.

    Attributes:
        churned: the churned pools, if any.
        large: figures of requests' blocks.
        small: figures of small cases, ours and other systems'.
        failed: backend or system -> why.
        unavailable: backends that were not asked for by name and do not work here -> why.
        versions: of other systems.
    """

    churned: Churned | None = None
    large: list[Figures] = field(default_factory=list)
    small: list[Figures] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    unavailable: dict[str, str] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)

    def document(self) -> dict[str, Any]:
        """For the JSON report."""
        return {
            "churned": None if self.churned is None else self.churned.document(),
            "results": [figures.document() for figures in self.large],
            "small": [figures.document() for figures in self.small],
            "failed": self.failed,
            "unavailable": self.unavailable,
            "other_systems": self.versions,
        }

    def tables(self) -> list[Table]:
        """Large transfers by placement, runs needed, small ones; those that were measured."""
        found = [
            _large_table(placement, [f for f in self.large if f.placement == placement])
            for placement in dict.fromkeys(figures.placement for figures in self.large)
        ]
        if self.churned is not None:
            found.append(_runs_table(self.churned))
        if self.small:
            found.append(_small_table(self.small))
            if (beside := _beside_table(self.small)) is not None:
                found.append(beside)
        return found


def markdown(tables: Iterable[Table], notes: Sequence[str]) -> str:
    """The tables and notes as Markdown."""
    parts = []
    for table in tables:
        lines = [f"### {table.title}", ""]
        marks = ["---" if i < table.num_names else "---:" for i in range(len(table.headings))]
        for cells in (table.headings, marks, *table.rows):
            lines.append(f"| {' | '.join(cells)} |")
        parts.append("\n".join(lines))
    parts.append("\n".join(f"- {note}" for note in notes))
    return "\n\n".join(parts) + "\n"


def _large_table(placement: str, figures: Sequence[Figures]) -> Table:
    """A row for each backend and length, a column for each strategy."""
    strategies = list(dict.fromkeys(f.strategy or "" for f in figures))
    rows: dict[tuple[str, int | str], dict[str, Figures]] = {}
    for f in figures:
        rows.setdefault((f.system, f.case), {})[f.strategy or ""] = f
    gain = f"{_LAYERS} / {_ALIGNED}"
    with_gain = {_LAYERS, _ALIGNED} <= set(strategies)
    ratios = ((gain,) if with_gain else ()) + ("GB/s", "of plain copy")
    headings = ("backend", "tokens", "MiB", *(f"{s}, ms (calls)" for s in strategies), *ratios)
    lines = []
    for (system, case), by_strategy in rows.items():
        best = by_strategy.get(_ALIGNED) or next(iter(by_strategy.values()))
        line = [system, str(case), f"{best.data_bytes / (1 << 20):.4g}"]
        for strategy in strategies:
            f = by_strategy[strategy]
            line.append(f"{_ms(f.seconds)} ({f.calls:,})")
        if with_gain:
            line.append(f"{by_strategy[_LAYERS].seconds / by_strategy[_ALIGNED].seconds:.1f}x")
        lines.append((*line, f"{best.gb_per_s:.2f}", f"{best.share_of_copy or 0:.2f}"))
    title = f"KV transfer between two processes, {placement} pools"
    return Table(title, headings, tuple(lines))


def _runs_table(churned: Churned) -> Table:
    rows = tuple(
        (
            str(n.num_tokens),
            str(n.num_blocks),
            f"{n.mean:.1f}",
            str(n.p99),
            str(n.largest),
            str(n.moved),
        )
        for n in churned.needed
    )
    headings = ("tokens", "blocks", "runs: mean", "p99", "most", "of the request moved")
    pool = churned.pools["source"]
    title = (
        f"Runs needed in churned pools of {pool['blocks']:,} blocks, "
        f"{pool['free_blocks']:,} of them free"
    )
    return Table(title, headings, rows)


def _small_table(figures: Sequence[Figures]) -> Table:
    """A row a case, a column a system."""
    by_key = {(f.system, f.case): f for f in figures}
    systems = list(dict.fromkeys(f.system for f in figures))
    rows = []
    for case in dict.fromkeys(f.case for f in figures):
        found = [by_key.get((system, case)) for system in systems]
        rows.append((str(case), *("-" if f is None else _ms(f.seconds) for f in found)))
    headings = ("runs", *(f"{system}, ms" for system in systems))
    return Table("Small transfers", headings, tuple(rows))


def _beside_table(figures: Sequence[Figures]) -> Table | None:
    """Other systems' times over ours, above 1 where ours is faster; None where there are none."""
    ours: dict[str, dict[int | str, float]] = {}
    for f in figures:
        if f.calls is not None:
            ours.setdefault(f.system, {})[f.case] = f.seconds
    rows = []
    for f in figures:
        if f.calls is None:
            own = [times.get(f.case) for times in ours.values()]
            ratios = ("-" if s is None else f"{f.seconds / s:.2f}x" for s in own)
            rows.append((str(f.case), f.system, *ratios))
    headings = ("runs", "other system", *(f"/ {system}" for system in ours))
    title = "Time of other systems over ours (above 1: ours is faster)"
    return Table(title, headings, tuple(rows), num_names=2) if rows else None


def _ms(seconds: float) -> str:
    """Milliseconds, three significant digits."""
    value = seconds * 1e3
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
