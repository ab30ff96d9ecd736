"""What the engine keeps of a request between its acceptance and its last output."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from flowkv_jax.engine.output_processor import RequestOutputState
from flowkv_jax.engine.sampling_state import SamplingState
from flowkv_jax.outputs import RequestMetrics, RequestOutput
from flowkv_jax.request import Request

OutputSink = Callable[[RequestOutput | Exception], None]
"""Where a request's outputs go; called on the engine's thread, must not block. After an output with
`finished`, or an exception, nothing more comes."""


@dataclass(eq=False, slots=True)
class LiveRequest:
    """One caller's request with its `n` sequences.

    Attributes:
        request_id: the caller's.
        sequences: one `Request` an answer; answer i has id `child_id(request_id, i)`.
        states: sampling state of each sequence.
        output: the text side.
        sink: where outputs go.
        needs_host_tokens: its sampling depends on tokens the host must have read, so no step may
            be scheduled ahead of it.
    """

    request_id: str
    sequences: list[Request]
    states: list[SamplingState]
    output: RequestOutputState
    sink: OutputSink
    needs_host_tokens: bool

    def metrics(self) -> RequestMetrics:
        """Times of the request as a whole: first token of any answer, last token of any."""
        firsts = [s.first_token_s for s in self.sequences if s.first_token_s is not None]
        lasts = [s.last_token_s for s in self.sequences if s.last_token_s is not None]
        starts = [s.scheduled_s for s in self.sequences if s.scheduled_s is not None]
        first = self.sequences[0]
        return RequestMetrics(
            arrival_time=first.arrival_s,
            queued_ts=first.arrival_s,
            scheduled_ts=min(starts, default=None),
            first_token_ts=min(firsts, default=None),
            last_token_ts=max(lasts, default=None),
            num_preemptions=sum(s.num_preemptions for s in self.sequences),
        )


def child_id(request_id: str, index: int) -> str:
    """Id of one of the `n` sequences of a request; the first has the request's own."""
    return request_id if index == 0 else f"{request_id}#{index}"
