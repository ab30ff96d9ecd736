"""What a node reports to do beyond what is booked there, into the node table.

Nearly always nothing: whatever this controller gave is booked from that moment on. It is more where
a sequence computes its prompt again after it lost its blocks, and after a controller has died whose
bookings nobody has. Reports come from other machines, so no number in them has to make sense.
"""

from __future__ import annotations

import math

from flowkv_jax.controller.node_table import NodeTable
from flowkv_jax.controller.snapshot import MAX_COUNT, NodeReport


def queued_sequences(report: NodeReport) -> int:
    """Sequences in any of a node's queues."""
    load = report.load
    return (
        load.num_requests_running
        + load.num_requests_waiting
        + load.num_requests_swapped
        + load.num_requests_sending
        + load.num_requests_receiving
    )


def measured_rate(report: NodeReport) -> float | None:
    """Prefill tokens a second; None if they were not measured."""
    rate = report.prefill_tokens_per_s
    return rate if rate is not None and 0 < rate < math.inf else None


def count_unbooked(table: NodeTable, slot: int, report: NodeReport) -> None:
    """Set the `unbooked_*` columns from a report that has just come."""
    booked = table.booked_prefills[slot] + table.booked_sends[slot] + table.booked_decodes[slot]
    usage = report.load.kv_cache_usage
    used_blocks = 0
    if not math.isnan(usage):
        used_blocks = round(min(max(usage, 0.0), 1.0) * float(table.num_blocks[slot]))
    table.unbooked_prefill_tokens[slot] = _beyond(
        report.load.num_waiting_tokens, int(table.booked_prefill_tokens[slot])
    )
    table.unbooked_sequences[slot] = _beyond(queued_sequences(report), int(booked))
    table.unbooked_blocks[slot] = _beyond(used_blocks, int(table.booked_blocks[slot]))


def _beyond(reported: int, booked: int) -> int:
    return min(max(reported - booked, 0), MAX_COUNT)
