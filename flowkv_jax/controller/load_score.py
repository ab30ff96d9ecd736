"""The load of a node as one number: C = sum(w_k * m_k) over eight metrics m_k in [0, 1].

FlowKV (appendix B) names the metrics and wants weights of 0 or more; how it normalises them is not
published. Here a count q of sequences that has no bound becomes q / (q + max_num_seqs): 0 when
nobody waits, one half when as many wait as one step decodes, and never flat, so that of two
overloaded nodes the worse one is known. What has a bound is its share of it:

    running            num_requests_running / max_num_seqs
    waiting            q / (q + max_num_seqs), q waiting sequences and those on their way in
    swapped            the same of swapped sequences
    sending            the same of sequences on their way out
    token_budget       share of the step's token budget in use
    kv_use             share of blocks that live requests hold
    device_use         share of time the device computes
    memory_bandwidth   share of the device's memory bandwidth

Weights sum to 1, so C is in [0, 1], and as they are not negative C never falls when a metric rises.
A metric that is not measured (None) is left out and its weight shared by the others.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from flowkv_jax.controller.snapshot import NodeInfo, NodeReport

METRICS = (
    "running",
    "waiting",
    "swapped",
    "sending",
    "token_budget",
    "kv_use",
    "device_use",
    "memory_bandwidth",
)

Metrics = tuple[float | None, ...]
"""One value a name in `METRICS`; None where it is not measured."""


def normalised_metrics(info: NodeInfo, report: NodeReport) -> Metrics:
    """The eight metrics of a report, each in [0, 1] or None."""
    load = report.load
    return (
        _share(load.num_requests_running / info.max_num_seqs),
        _queue(load.num_requests_waiting + load.num_requests_receiving, info.max_num_seqs),
        _queue(load.num_requests_swapped, info.max_num_seqs),
        _queue(load.num_requests_sending, info.max_num_seqs),
        _share(load.token_budget_used),
        _share(load.kv_cache_usage),
        _share(report.device_utilisation),
        _share(report.memory_bandwidth_utilisation),
    )


def load_score(metrics: Metrics, weights: Sequence[float]) -> float:
    """C in [0, 1]; 0 where no metric that weighs anything is measured."""
    total = weight = 0.0
    for value, w in zip(metrics, weights, strict=True):
        if value is not None:
            total += w * value
            weight += w
    return min(total / weight, 1.0) if weight > 0 else 0.0


def with_booked_decodes(metrics: Metrics, booked: int, max_num_seqs: int) -> Metrics:
    """Metrics that show at least the `booked` sequences: as running ones, the rest as waiting.

    A decode node cannot report sequences that have not come to it, and under overload those are
    the demand. With no metrics yet, the others stay unknown.
    """
    running, waiting, *others = metrics or (None,) * len(METRICS)
    queue = _queue(max(booked - max_num_seqs, 0), max_num_seqs)
    share = min(booked / max_num_seqs, 1.0)
    return (max(running or 0.0, share), max(waiting or 0.0, queue), *others)


def queue_pressure(queue_s: float, target_s: float) -> float:
    """A queue time as a load in [0, 1): one half at the target."""
    return queue_s / (queue_s + target_s)


def _queue(length: int, scale: int) -> float:
    length = max(length, 0)
    return length / (length + scale)


def _share(value: float | None) -> float | None:
    """Into [0, 1]; what is no number is not measured."""
    if value is None or math.isnan(value):
        return None
    return min(max(value, 0.0), 1.0)
