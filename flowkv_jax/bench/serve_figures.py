"""Records of requests -> the figures of a cell. Pure.

Latencies are those of completed requests; failed ones are counted beside them, and never good.
Throughputs are of completed requests over the time from the first request sent to the last ended.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from flowkv_jax.bench.serve_handoff import HandoffRecord, by_request, phases
from flowkv_jax.bench.serve_records import CellRun, Outcome, RequestRecord
from flowkv_jax.checks import bad_value

LATENCIES = ("ttft", "tpot", "itl", "e2el")
PHASES = ("queue", "prefill", "transfer", "decode")


@dataclass(frozen=True, slots=True)
class Slo:
    """What a good request keeps to, each in milliseconds; None does not matter.

    Attributes:
        ttft_ms: time to first token.
        tpot_ms: time per output token after the first.
        e2el_ms: end-to-end latency.
    """

    ttft_ms: float | None = None
    tpot_ms: float | None = None
    e2el_ms: float | None = None

    @classmethod
    def parse(cls, words: Sequence[str]) -> Slo:
        """`["ttft:200", "tpot:50"]`, as `vllm bench serve --goodput` takes them.

        Raises:
            ValidationError: a word is not NAME:MILLISECONDS.
        """
        bounds: dict[str, float] = {}
        for word in words:
            name, _, text = word.partition(":")
            try:
                bound = float(text)
            except ValueError:
                bound = 0.0
            if name not in ("ttft", "tpot", "e2el") or name in bounds or not bound > 0:
                raise bad_value("goodput", word, "must be ttft:MS, tpot:MS or e2el:MS, each once")
            bounds[name] = bound
        return cls(**{f"{name}_ms": bound for name, bound in bounds.items()})

    def is_met(self, record: RequestRecord) -> bool:
        """Whether the request was completed within all bounds. No bound on TPOT is missed by an
        answer of one token, which has none."""
        if not record.is_completed:
            return False
        found = (
            (record.ttft_s, self.ttft_ms),
            (record.tpot_s, self.tpot_ms),
            (record.e2e_s, self.e2el_ms),
        )
        return all(
            value_s is None or bound_ms is None or value_s * 1e3 <= bound_ms
            for value_s, bound_ms in found
        )

    def __str__(self) -> str:
        bounds = (("TTFT", self.ttft_ms), ("TPOT", self.tpot_ms), ("E2E", self.e2el_ms))
        return ", ".join(f"{name} <= {ms:g} ms" for name, ms in bounds if ms is not None)

    def __bool__(self) -> bool:
        return (self.ttft_ms, self.tpot_ms, self.e2el_ms) != (None, None, None)


def cell_figures(
    run: CellRun,
    percentiles: Sequence[float],
    slo: Slo,
    handoffs: Sequence[HandoffRecord] | None,
) -> dict[str, Any]:
    """All figures of a cell, JSON-ready; times in ms.

    Args:
        percentiles: in [0, 100].
        handoffs: the server's records; None if it offers none.
    """
    completed, duration_s = run.completed, run.duration_s
    output_tokens = sum(len(record.token_ids) for record in completed)
    outcomes = Counter(record.outcome for record in run.records)
    good = sum(map(slo.is_met, run.records)) if slo else None
    groups = dict.fromkeys(record.group for record in run.records)
    return {
        "name": run.name,
        "input_len": run.input_len,
        "request_rate": run.request_rate if np.isfinite(run.request_rate) else "inf",
        "duration_s": duration_s,
        "planned": run.num_planned,
        "sent": len(run.records),
        **{outcome.value: outcomes[outcome] for outcome in Outcome},
        "errors": errors_by_class(run.records),
        "retries": sum(record.num_retries for record in run.records),
        "input_tokens": sum(record.num_prompt_tokens for record in completed),
        "cached_tokens": sum(record.num_cached_tokens for record in completed),
        "output_tokens": output_tokens,
        "request_throughput": _ratio(len(completed), duration_s),
        "output_throughput": _ratio(output_tokens, duration_s),
        "good": good,
        "goodput": None if good is None else _ratio(good, duration_s),
        "latencies_ms": latency_figures(completed, percentiles),
        "groups": {
            group: {
                "completed": sum(record.group == group for record in completed),
                "latencies_ms": latency_figures(
                    [record for record in completed if record.group == group], percentiles
                ),
            }
            for group in groups
            if len(groups) > 1
        },
        "tokens_per_message": _ratio(
            output_tokens, sum(len(record.arrivals) for record in completed)
        ),
        "lateness_ms": summary([1e3 * record.lateness_s for record in run.records], (50, 99)),
        "held_ms": summary([1e3 * record.held_s for record in run.records], (50, 99)),
        "phases": phase_figures(completed, handoffs),
        "handoffs": handoff_figures(completed, handoffs),
        "server_change": run.server_change,
        "answers": None
        if run.answers is None
        else {
            "asked": run.answers.num_asked,
            "equal": run.answers.num_equal,
            "different": run.answers.different,
        },
        "notes": list(run.notes),
    }


def latency_figures(
    completed: Sequence[RequestRecord], percentiles: Sequence[float]
) -> dict[str, dict[str, float] | None]:
    """Figures of `LATENCIES` in ms; None for one that no request has."""
    samples: Mapping[str, list[float | None]] = {
        "ttft": [record.ttft_s for record in completed],
        "tpot": [record.tpot_s for record in completed],
        "itl": [itl_s for record in completed for itl_s in record.itls_s],
        "e2el": [record.e2e_s for record in completed],
    }
    return {
        name: summary([value * 1e3 for value in samples[name] if value is not None], percentiles)
        for name in LATENCIES
    }


def summary(values: Sequence[float], percentiles: Sequence[float]) -> dict[str, float] | None:
    """Mean, percentiles (between two values in proportion, as NumPy does) and largest; None if
    there are no values."""
    if not values:
        return None
    array = np.asarray(values, np.float64)
    found = {"mean": float(array.mean())}
    for percentile, value in zip(percentiles, np.percentile(array, percentiles), strict=True):
        found[f"p{percentile:g}"] = float(value)
    return found | {"max": float(array.max())}


def errors_by_class(records: Sequence[RequestRecord]) -> dict[str, dict[str, Any]]:
    """Error class -> how many requests failed with it, and the words of the first."""
    found: dict[str, dict[str, Any]] = {}
    for record in records:
        if record.error is not None:
            entry = found.setdefault(record.error, {"count": 0, "example": record.error_text})
            entry["count"] += 1
    return found


def phase_figures(
    completed: Sequence[RequestRecord], handoffs: Sequence[HandoffRecord] | None
) -> dict[str, Any] | None:
    """Mean time in ms in each of `PHASES` and its share of E2E, over the requests of which it is
    known; None if of none. Without a source of hand-offs the transfer is None: it is then part of
    `decode`."""
    of_request = by_request(handoffs or ())
    known = [
        found
        for record in completed
        if (found := phases(record, of_request.get(record.request_id, ()))) is not None
    ]
    if not known:
        return None
    totals_s = {name: sum(getattr(p, f"{name}_s") for p in known) for name in PHASES}
    e2e_s = sum(totals_s.values())
    hidden = {"transfer"} if handoffs is None else set()
    return {
        "requests": len(known),
        "mean_ms": {n: None if n in hidden else s * 1e3 / len(known) for n, s in totals_s.items()},
        "share": {n: None if n in hidden else _ratio(s, e2e_s) for n, s in totals_s.items()},
    }


def handoff_figures(
    completed: Sequence[RequestRecord], handoffs: Sequence[HandoffRecord] | None
) -> dict[str, Any] | None:
    """Hand-offs of the cell's requests, by request; None without a source of them."""
    if handoffs is None:
        return None
    ids = {record.request_id for record in completed}
    ours = [handoff for handoff in handoffs if handoff.request_id in ids]
    requests = len({handoff.request_id for handoff in ours})
    per_request = {
        f"{name}_per_request": _ratio(sum(getattr(h, name) for h in ours), requests)
        for name in ("runs", "calls", "data_bytes")
    }
    return {
        "requests": requests,
        "handoffs": len(ours),
        **per_request,
        "transfer_ms": summary([1e3 * handoff.transfer_s for handoff in ours], (50, 99)),
    }


def _ratio(value: float, by: float) -> float | None:
    return value / by if by else None
