"""A caller's request on its way into the cluster."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from flowkv_jax.engine.output_processor import RequestOutputState
from flowkv_jax.kv_transfer.params import RemoteDecode, RemotePrefill
from flowkv_jax.metrics.spans import RequestTrace
from flowkv_jax.outputs import RequestOutput
from flowkv_jax.sequence import SequenceSpec

OutputSink = Callable[[RequestOutput | Exception], Callable[[], None] | None]
"""Where a request's outputs go; must not block. After an output with `finished`, or an exception,
nothing more comes. What it returns is called once all sinks have what is new at this time, and only
once if several return the same: so that whoever sleeps is woken once for all."""


@dataclass(eq=False, slots=True)
class Submission:
    """One caller's request with its `n` answers.

    Attributes:
        request_id: the caller's.
        specs: one sequence an answer; answer i has id `child_id(request_id, i)`.
        output: the text side.
        sink: where outputs go.
        kv_transfer: its part in a hand-off between servers; see `flowkv_jax.kv_transfer`.
        prefill_node: a node that computes its prompt if it is there when the request is placed for
            the first time, whatever the router would choose; None for the router's choice.
        trace: follows it from `Dispatcher.submit` on; None if nobody wants to know.
    """

    request_id: str
    specs: list[SequenceSpec]
    output: RequestOutputState
    sink: OutputSink
    kv_transfer: RemoteDecode | RemotePrefill | None = None
    prefill_node: str | None = None
    trace: RequestTrace | None = None


def child_id(request_id: str, index: int) -> str:
    """Id of one of the `n` sequences of a request; the first has the request's own."""
    return request_id if index == 0 else f"{request_id}#{index}"
