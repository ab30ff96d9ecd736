"""What `flowkv bench serve` found, and how it is shown. Tables are made from the JSON report, so
that one read from a file looks as it did when it was made."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from flowkv_jax.bench.serve import ServeRun
from flowkv_jax.bench.serve_figures import LATENCIES, PHASES, Slo, cell_figures
from flowkv_jax.bench.transfer_report import Table

LATENCY_NAMES = {"ttft": "TTFT", "tpot": "TPOT", "itl": "ITL", "e2el": "E2E"}
_LATE_MS = 20.0
"""From here on a client that sends late is worth a warning: a send takes well under 1 ms."""
_SEVERAL_TOKENS = 1.02

Document = Mapping[str, Any]


def figures_of(
    run: ServeRun, percentiles: Sequence[float], slo: Slo, *, detailed: bool = False
) -> dict[str, Any]:
    """The measured part of the JSON report.

    Args:
        detailed: with every request's own times.
    """
    cells = []
    for cell in run.cells:
        figures = cell_figures(cell, percentiles, slo, run.handoffs)
        if detailed:
            figures["requests"] = [record.document() for record in cell.records]
        cells.append(figures)
    return {
        "model": run.model.to_dict(),
        "is_interrupted": run.is_interrupted,
        "handoff_error": run.handoff_error,
        "slo": str(slo) or None,
        "cells": cells,
    }


def tables(document: Document) -> list[Table]:
    """Overview, latencies, where the time went, failures, answers; those there are."""
    cells = document["cells"]
    if not cells:
        return []
    found = [_overview(cells, document["slo"]), _latencies(cells)]
    if any(cell["phases"] for cell in cells):
        found.append(_phases(cells))
    if any(cell["handoffs"] for cell in cells):
        found.append(_handoffs(cells))
    if any(cell["errors"] for cell in cells):
        found.append(_errors(cells))
    if any(cell["answers"] for cell in cells):
        found.append(_answers(cells))
    return found


def notes(document: Document) -> list[str]:
    """What a reader of the figures must know."""
    model, settings, versions = document["model"], document["settings"], document["versions"]
    lines = [*_warnings(document), *_cell_notes(document["cells"])]
    if document["slo"]:
        lines.append(f"Goodput: completed requests with {document['slo']}, a second.")
    lines.append(
        "Latencies of completed requests, from sending on; throughputs from the first request sent "
        "to the last ended. ITL: from one message with tokens to the next "
        f"({_tokens_per_message(document['cells'])})."
    )
    asking = settings["asking"]
    concurrency = asking["max_concurrency"]
    lines.append(
        f"{model['served_model_name']} ({model['dtype']}, {model['max_model_len']} tokens at most) "
        f"at {document['target']}; {settings['dataset']}, seed {settings['seed']}, temperature "
        f"{asking['temperature']:g}, {'any number of' if concurrency is None else concurrency} "
        f"calls at once, {settings['num_warmups']} warm-up requests of each length."
    )
    host, load = document["host"], document["host"]["load_average"][0]
    lines.append(
        f"Client: {host['cores']} cores, load average {load:.1f}, Python {versions['python']}, "
        f"grpcio {versions['grpcio']}, flowkv-jax {versions['flowkv-jax']}, commit "
        f"{document['commit']}."
    )
    return lines


def transfer_share(cell: Document) -> float | None:
    """Of E2E; None where the server does not tell."""
    return cell["phases"]["share"]["transfer"] if cell["phases"] else None


def _overview(cells: Sequence[Document], slo: str | None) -> Table:
    has_retries = any(cell["retries"] for cell in cells)
    headings = ["cell", "done", "failed", *(["retries"] if has_retries else [])]
    headings += ["time s", "req/s", "tok/s"]
    headings += ["goodput", "good"] if slo else []
    headings += ["TTFT p50", "TPOT p50", "ITL max", "E2E p50"]
    rows = []
    for cell in cells:
        done = str(cell["completed"])
        if cell["sent"] < cell["planned"] or cell["interrupted"]:
            done = f"{done} of {cell['planned']}"
        row = [cell["name"], done, str(cell["failed"])]
        row += [str(cell["retries"])] if has_retries else []
        row += [f"{cell['duration_s']:.1f}", number(cell["request_throughput"])]
        row.append(number(cell["output_throughput"]))
        if slo:
            share = cell["good"] / cell["sent"] if cell["sent"] else 0.0
            row += [number(cell["goodput"]), f"{share:.0%}"]
        shown = (("ttft", "p50"), ("tpot", "p50"), ("itl", "max"), ("e2el", "p50"))
        # Of groups apart only, further down.
        latencies = {} if cell["groups"] else cell["latencies_ms"]
        row += [number((latencies.get(name) or {}).get(which)) for name, which in shown]
        rows.append(tuple(row))
    title = "Requests; input tokens @ offered rate, output tokens/s, latencies in ms"
    return Table(title, tuple(headings), tuple(rows))


def _latencies(cells: Sequence[Document]) -> Table:
    """A row for each cell, group and latency that was measured."""
    rows, names = [], ["mean"]
    for cell in cells:
        for group, figures in (cell["groups"] or {"": cell}).items():
            label = f"{cell['name']} {group}".rstrip()
            for name in LATENCIES:
                found = figures["latencies_ms"][name]
                if found is None:
                    continue
                names += [column for column in found if column not in names]
                rows.append((label, LATENCY_NAMES[name], found))
                label = ""
    shown = tuple((label, name, *(number(f.get(n)) for n in names)) for label, name, f in rows)
    return Table("Latency, ms", ("cell", "", *names), shown, num_names=2)


def _phases(cells: Sequence[Document]) -> Table:
    rows = []
    for cell in cells:
        mean = cell["phases"]["mean_ms"] if cell["phases"] else {}
        share = transfer_share(cell)
        row = [cell["name"], *(number(mean.get(name)) for name in PHASES)]
        rows.append((*row, "-" if share is None else f"{share:.2%}"))
    title = "Where the time of a request went, ms (means)"
    return Table(title, ("cell", *PHASES, "transfer of E2E"), tuple(rows))


def _handoffs(cells: Sequence[Document]) -> Table:
    headings = ("cell", "handed off", "transfer p50", "p99", "runs", "calls", "MiB")
    rows = []
    for cell in cells:
        found = cell["handoffs"] or {"requests": 0}
        row = [cell["name"], f"{found['requests']} of {cell['completed']}"]
        if found["requests"]:
            row += [number(found["transfer_ms"][which]) for which in ("p50", "p99")]
            row += [number(found[f"{name}_per_request"]) for name in ("runs", "calls")]
            row.append(number(found["data_bytes_per_request"] / (1 << 20)))
        else:
            row += ["-"] * 5
        rows.append(tuple(row))
    return Table("Hand-offs: transfer in ms; means of a request", headings, tuple(rows))


def _errors(cells: Sequence[Document]) -> Table:
    rows = [
        (cell["name"], kind, str(error["count"]), str(error["example"])[:120])
        for cell in cells
        for kind, error in cell["errors"].items()
    ]
    headings = ("cell", "error", "requests", "the first")
    return Table("Failed requests", headings, tuple(rows), num_names=4)


def _answers(cells: Sequence[Document]) -> Table:
    rows = []
    for cell in cells:
        answers = cell["answers"]
        if answers:
            first = next(iter(answers["different"].items()), None)
            shown = "-" if first is None else f"{first[0]}: {first[1]}"
            rows.append((cell["name"], str(answers["asked"]), str(answers["equal"]), shown))
    title = "Answers under load against the same prompts alone"
    headings = ("cell", "asked again", "equal", "first difference")
    return Table(title, headings, tuple(rows), num_names=4)


def _warnings(document: Document) -> list[str]:
    lines = []
    if document["is_interrupted"]:
        lines.append("INTERRUPTED: the last cell is incomplete, and cells after it are missing.")
    if document["handoff_error"]:
        lines.append(f"WARNING: hand-offs are missing: {document['handoff_error']}")
    for cell in document["cells"]:
        late = cell["lateness_ms"]
        if late and late["p99"] > _LATE_MS and cell["request_rate"] != "inf":
            lines.append(
                f"WARNING: the client did not keep up in {cell['name']}: requests were sent "
                f"{late['p50']:.1f} ms late at the median, {late['p99']:.1f} ms at p99. It needs a "
                "core of its own; read the latencies with care."
            )
        unsent = cell["planned"] - cell["sent"]
        if unsent and not document["is_interrupted"]:
            lines.append(f"{unsent} requests of {cell['name']} were not sent: time was up.")
        if cell["interrupted"]:
            lines.append(f"{cell['interrupted']} requests of {cell['name']} were given up.")
        held = cell["held_ms"]
        if held and held["max"] > 1:
            lines.append(
                f"In {cell['name']} requests waited for one of the client's slots for up to "
                f"{held['max'] / 1e3:.1f} s; that is in no latency."
            )
    return lines


def _cell_notes(cells: Sequence[Document]) -> list[str]:
    lines = [note for cell in cells for note in cell["notes"]]
    for cell in cells:
        change = cell["server_change"]
        asked, hits = (change.get(f"prefix_cache_{name}", 0) for name in ("queries", "hits"))
        if hits > 0:
            lines.append(f"{cell['name']}: {hits / asked:.0%} of prompt tokens were cached.")
        if change.get("num_preemptions", 0) > 0:
            lines.append(f"{cell['name']}: {change['num_preemptions']} preemptions.")
    return list(dict.fromkeys(lines))


def _tokens_per_message(cells: Sequence[Document]) -> str:
    means = [cell["tokens_per_message"] for cell in cells if cell["tokens_per_message"]]
    if not means:
        return "no message came"
    low, high = f"{min(means):.2f}", f"{max(means):.2f}"
    shown = f"{low if low == high else f'{low} to {high}'} tokens a message"
    if max(means) > _SEVERAL_TOKENS:
        shown += ", those within the server's stream_interval_ms in one; TPOT is per token"
    return shown


def number(value: float | None) -> str:
    """Three digits, or all digits before the point; "-" for None."""
    if value is None:
        return "-"
    decimals = 0 if abs(value) >= 100 else 1 if abs(value) >= 10 else 2
    return f"{value:,.{decimals}f}"
