"""Pictures of `flowkv bench serve` reports. Needs matplotlib: the extra `plots`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from flowkv_jax.bench.plots import check_plotting
from flowkv_jax.bench.serve_figures import PHASES
from flowkv_jax.bench.serve_report import Document, transfer_share
from flowkv_jax.bench.serve_workload import SHORT, rate_text

_LATENCY_PANELS = (("TTFT", "ttft"), ("TPOT", "tpot"), ("ITL", "itl"), ("E2E", "e2el"))
_RATE_PANELS = (("Output tokens/s", "output_throughput"), ("Goodput, requests/s", "goodput"))
_PHASE_COLOURS = {
    "queue": "#bbbbbb",
    "prefill": "#5b8db8",
    "transfer": "#d62728",
    "decode": "#a8cf9a",
}


def plot_serve(documents: Sequence[Document], path: Path) -> None:
    """Latencies and throughput over the offered rate, a line for each report and input length; and
    where the time of a request went, a stacked bar for each cell (FlowKV's Figure 1).

    Args:
        documents: JSON reports; at least one.
        path: of a new PNG file.

    Raises:
        ValidationError: matplotlib is not installed.
    """
    bars = _bars(documents)
    lines = _lines(documents)
    rates = sorted({float(cell["request_rate"]) for cells in lines.values() for cell in cells})
    bars_height = 1.2 + 0.3 * len(bars)
    figure = check_plotting()(figsize=(14, 7.5 + bars_height), layout="constrained")
    upper, lower = figure.subfigures(2, 1, height_ratios=[7.5, bars_height])
    panels = list(upper.subplots(2, 3).flat)
    for panel in panels:
        # So that all have every rate, in order.
        panel.plot([rate_text(rate) for rate in rates], [0.0] * len(rates), alpha=0.0)
        panel.set(xlabel="offered requests/s")
        panel.grid(True, alpha=0.2)
    for panel, (title, name) in zip(panels, _LATENCY_PANELS, strict=False):
        for number, cells in enumerate(lines.values()):
            for which, style in (("p50", "-"), ("p99", "--")):
                values = [_latency(cell, name, which) for cell in cells]
                _draw(panel, cells, values, f"C{number}{style}")
        panel.set(title=f"{title} (p50, dashed p99)", ylabel="ms", ylim=(0, None))
    for panel, (title, name) in zip(panels[4:], _RATE_PANELS, strict=True):
        for number, (label, cells) in enumerate(lines.items()):
            _draw(panel, cells, [cell[name] for cell in cells], f"C{number}-", label)
        panel.set(title=title, ylim=(0, None))
        panel.set_visible(any(cell[name] is not None for cells in lines.values() for cell in cells))
    panels[4].legend(fontsize="small")
    _draw_phases(lower.subplots(), bars)
    figure.savefig(path, dpi=130, format="png")


def _bars(documents: Sequence[Document]) -> list[tuple[str, Document]]:
    """(name, cell) of each cell with known phases; the same cell of several reports together."""
    found: dict[str, list[tuple[str, Document]]] = {}
    for document in documents:
        for cell in document["cells"]:
            if cell["phases"]:
                label = f", {document['label']}" if len(documents) > 1 else ""
                found.setdefault(cell["name"], []).append((f"{cell['name']}{label}", cell))
    return [bar for bars in found.values() for bar in bars]


def _lines(documents: Sequence[Document]) -> dict[str, list[Document]]:
    """Label of a line -> its cells, by rate."""
    found: dict[str, list[Document]] = {}
    for document in documents:
        for cell in document["cells"]:
            length = "trace" if cell["input_len"] is None else f"{cell['input_len']} tokens in"
            label = f"{document['label']}, {length}" if len(documents) > 1 else length
            found.setdefault(label, []).append(cell)
    return {
        label: sorted(cells, key=lambda cell: float(cell["request_rate"]))
        for label, cells in found.items()
    }


def _latency(cell: Document, name: str, which: str) -> float | None:
    """Of the short ones, where others came between."""
    latencies = cell["groups"].get(SHORT, cell)["latencies_ms"]
    value: float | None = (latencies[name] or {}).get(which)
    return value


def _draw(
    panel: Any,
    cells: Sequence[Document],
    values: Sequence[float | None],
    style: str,
    label: str | None = None,
) -> None:
    """Rates stand beside each other at even distances: as names, `inf` among them."""
    points = [
        (rate_text(float(cell["request_rate"])), value)
        for cell, value in zip(cells, values, strict=True)
        if value is not None
    ]
    if points:
        names, heights = zip(*points, strict=True)
        panel.plot(names, heights, style, marker=".", label=label)


def _draw_phases(panel: Any, bars: Sequence[tuple[str, Document]]) -> None:
    names = [name for name, _ in bars]
    left = [0.0] * len(bars)
    for phase in PHASES:
        widths = [cell["phases"]["mean_ms"][phase] or 0.0 for _, cell in bars]
        if any(widths):
            panel.barh(names, widths, left=left, color=_PHASE_COLOURS[phase], label=phase)
        left = [start + width for start, width in zip(left, widths, strict=True)]
    for index, (_, cell) in enumerate(bars):
        share = transfer_share(cell)
        if share is not None:
            panel.text(left[index], index, f" transfer {share:.2%}", va="center", fontsize="small")
    panel.invert_yaxis()
    panel.set(title="Where the time of a request went", xlabel="ms (means)")
    panel.margins(x=0.12)
    panel.legend(fontsize="small", ncols=len(PHASES))
