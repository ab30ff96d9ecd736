"""What the page asks for: the cluster as it stands, and what is new since the page's last numbers.

Rows that come by the hundred are arrays in the order of the fields; the page names them by the
same lists, which travel in `fields`.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from flowkv_jax.metrics.buckets import INTER_TOKEN_S
from flowkv_jax.trace.history import Marks, NodeSample, Sample
from flowkv_jax.trace.recorder import Recorder

MAX_ROWS = 1000
"""Of each kind in one answer; a page that was away for longer has missed the others."""

NODE_FIELDS = tuple(field.name for field in fields(NodeSample))
SAMPLE_FIELDS = tuple(field.name for field in fields(Sample))


def live_state(
    recorder: Recorder, marks: Marks, instance: str, *, model: str, version: str
) -> dict[str, Any]:
    """Values that msgspec makes JSON of. Any thread; a few milliseconds where all is asked for.

    Args:
        marks: the reader's last numbers, of the recorder that called itself `instance`; of another
            one they mean nothing.
    """
    if instance != recorder.instance:
        marks = Marks()
    memory = recorder.history.since(marks, limit=MAX_ROWS)
    return {
        "instance": recorder.instance,
        "model": model,
        "version": version,
        "unix_ms": round(time.time() * 1000),
        "interval_s": recorder.interval_s,
        "cluster": None if memory.latest is None else memory.latest.to_dict(),
        "token_gap_bounds_s": INTER_TOKEN_S,
        "fields": {"sample": SAMPLE_FIELDS, "node": NODE_FIELDS},
        "samples": [_sample_row(sample) for sample in memory.samples],
        "records": memory.records,
        "decisions": memory.decisions,
        "marks": memory.marks,
    }


def _sample_row(sample: Sample) -> Sequence[Any]:
    nodes = [
        (
            node.name,
            node.role.value,
            *(_rounded(getattr(node, name)) for name in NODE_FIELDS[2:]),
        )
        for node in sample.nodes
    ]
    loads = (_rounded(sample.prefill_load), _rounded(sample.decode_load))
    at = (sample.number, round(sample.time_s, 3), sample.regime.value)
    return (*at, *loads, nodes, sample.token_gaps)


def _rounded(value: float) -> float:
    return round(value, 4)
