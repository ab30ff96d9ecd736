"""Reports of `flowkv bench serve` side by side. Works on the JSON documents."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flowkv_jax.bench.serve_report import Document, number, transfer_share
from flowkv_jax.bench.transfer_report import Table
from flowkv_jax.errors import NotFoundError, ValidationError

_COLUMNS: tuple[tuple[str, tuple[str, str] | str], ...] = (
    ("TTFT p50 ms", ("ttft", "p50")),
    ("TTFT p99 ms", ("ttft", "p99")),
    ("TPOT mean ms", ("tpot", "mean")),
    ("ITL p99 ms", ("itl", "p99")),
    ("E2E p50 ms", ("e2el", "p50")),
    ("out tok/s", "output_throughput"),
    ("goodput req/s", "goodput"),
)
# What has to be equal for two runs to be the same experiment.
_SAME = ("dataset", "seed", "workload", "asking", "num_warmups", "max_duration_s")


@dataclass(frozen=True, slots=True)
class Compared:
    """A figure of one report, and the same of the first."""

    value: float | None
    ratio: float | None

    def __str__(self) -> str:
        shown = number(self.value)
        return shown if self.ratio is None else f"{shown} ({self.ratio:.2f}x)"


def read_report(path: Path) -> dict[str, Any]:
    """
    Raises:
        NotFoundError: there is no such file.
        ValidationError: it is no report of `flowkv bench serve`.
    """
    try:
        document: Any = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise NotFoundError(f"there is no file {path}") from None
    except ValueError as error:
        raise ValidationError(f"{path} is no JSON: {error}", parameter="reports") from error
    if not isinstance(document, dict) or document.get("benchmark") != "serve":
        raise ValidationError(
            f"{path} is no JSON report of `flowkv bench serve`", parameter="reports"
        )
    return document


def compare(documents: Sequence[Document]) -> list[dict[str, Any]]:
    """A row for each cell (and group of it) and report that has it, JSON-ready; cell by cell.

    A ratio is to the first report that has the cell, which has none itself.
    """
    by_cell: dict[str, list[dict[str, Any]]] = {}
    for document in documents:
        for cell in document["cells"]:
            for group, latencies in _groups(cell):
                name = f"{cell['name']} {group}".rstrip()
                rows = by_cell.setdefault(name, [])
                figures = _figures(cell, latencies)
                rows.append(
                    {
                        "cell": name,
                        "label": document["label"],
                        "figures": figures,
                        "ratios": _ratios(figures, rows[0]["figures"]) if rows else None,
                        "transfer_share": transfer_share(cell),
                        "failed": cell["failed"],
                    }
                )
    return [row for rows in by_cell.values() for row in rows]


def comparison_table(documents: Sequence[Document]) -> Table:
    """`compare` as a table; in brackets the ratio to the first, above 1 where it is larger."""
    lines, previous = [], None
    for row in compare(documents):
        ratios = row["ratios"] or {}
        share = row["transfer_share"]
        lines.append(
            (
                row["cell"] if row["cell"] != previous else "",
                row["label"],
                *(
                    str(Compared(row["figures"][heading], ratios.get(heading)))
                    for heading, _ in _COLUMNS
                ),
                "-" if share is None else f"{share:.2%}",
                str(row["failed"]),
            )
        )
        previous = row["cell"]
    headings = ("cell", "label", *(heading for heading, _ in _COLUMNS), "transfer of E2E", "failed")
    title = f"Side by side (in brackets: over {documents[0]['label']})"
    return Table(title, headings, tuple(lines), num_names=2)


def differences(documents: Sequence[Document]) -> list[str]:
    """How the reports are not the same experiment, for the reader to judge."""
    first = documents[0]
    found = []
    for document in documents[1:]:
        for name in _SAME:
            ours, base = document["settings"].get(name), first["settings"].get(name)
            if ours != base:
                found.append(_difference(document["label"], name, ours, base))
        for name in ("served_model_name", "dtype"):
            ours, base = document["model"][name], first["model"][name]
            if ours != base:
                found.append(_difference(document["label"], name, ours, base))
        if document["slo"] != first["slo"]:
            found.append(_difference(document["label"], "goodput", document["slo"], first["slo"]))
    return found


def _difference(label: str, name: str, ours: Any, base: Any) -> str:
    if isinstance(ours, dict) and isinstance(base, dict):
        names = [key for key in (ours | base) if ours.get(key) != base.get(key)]
        shown = ", ".join(f"{key}={ours.get(key)!r} not {base.get(key)!r}" for key in names)
        return f"WARNING: {label} had another {name}: {shown}."
    return f"WARNING: {label} had {name}={ours!r}, the first {base!r}."


def _groups(cell: Document) -> list[tuple[str, Document]]:
    if cell["groups"]:
        return [(group, found["latencies_ms"]) for group, found in cell["groups"].items()]
    return [("", cell["latencies_ms"])]


def _figures(cell: Document, latencies: Document) -> dict[str, float | None]:
    found: dict[str, float | None] = {}
    for heading, where in _COLUMNS:
        if isinstance(where, str):
            found[heading] = cell[where]
        else:
            found[heading] = (latencies[where[0]] or {}).get(where[1])
    return found


def _ratios(
    figures: dict[str, float | None], base: dict[str, float | None]
) -> dict[str, float | None]:
    found: dict[str, float | None] = {}
    for heading, value in figures.items():
        first = base[heading]
        found[heading] = value / first if value is not None and first else None
    return found
