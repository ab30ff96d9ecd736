"""Traces of requests, by OpenTelemetry's API and its current gen_ai names.

    front door   arrive(operation, headers)     whose request this is: a context variable
    dispatcher   Tracing.begin, RequestTrace    a server span a request; when an answer has ended,
                                                its queue, prefill, handoff and decode as children

Spans are made of what the dispatcher has recorded once a sequence has ended, so nothing is done for
a token. Without an SDK in the process, or if a request is not sampled, nothing is done at all.
Prompts and answers are not in traces.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Literal

from opentelemetry import metrics, trace
from opentelemetry.context import Context
from opentelemetry.trace import Span, SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import AttributeValue

from flowkv_jax.cluster.dispatch_events import SequenceRecord
from flowkv_jax.metrics.gen_ai import GenAiInstruments, request_attributes, response_attributes
from flowkv_jax.sequence import SequenceSpec

Operation = Literal["chat", "text_completion"]

_SCOPE = "flowkv_jax"
_API_PACKAGES = ("opentelemetry.trace", "opentelemetry.metrics")


@dataclass(frozen=True, slots=True)
class Arrival:
    """How a request came to a front door.

    Attributes:
        traceparent, tracestate: W3C headers of the caller; None if it sent none.
        is_stream: the caller gets it in pieces; None if not known.
    """

    operation: Operation = "text_completion"
    traceparent: str | None = None
    tracestate: str | None = None
    is_stream: bool | None = None


_TRACE_HEADERS = frozenset({"traceparent", "tracestate", b"traceparent", b"tracestate"})
_arrival: ContextVar[Arrival | None] = ContextVar("flowkv_arrival", default=None)


def arrive(
    operation: Operation,
    headers: Iterable[tuple[str | bytes, str | bytes]] = (),
    *,
    is_stream: bool | None = None,
) -> None:
    """Say whose request the present task is about to give to the engine. Costs a look at each
    header.

    Args:
        headers: of HTTP, or metadata of gRPC; names in lower case. `traceparent` and `tracestate`
            (W3C Trace Context) make the caller's span the parent of ours.
    """
    found: dict[str, str] = {}
    for name, value in headers:
        if name in _TRACE_HEADERS:
            found.setdefault(_text(name), _text(value))
    traceparent, tracestate = found.get("traceparent"), found.get("tracestate")
    _arrival.set(Arrival(operation, traceparent, tracestate, is_stream))


def arrival() -> Arrival:
    """How the present task's request came."""
    return _arrival.get() or Arrival()


class Tracing:
    """Makes a trace of each request of one engine.

    Args:
        model: as clients ask for it.
        tracer_provider, meter_provider: None for the process's own.
    """

    def __init__(
        self,
        model: str,
        tracer_provider: trace.TracerProvider | None = None,
        meter_provider: metrics.MeterProvider | None = None,
    ) -> None:
        self._model = model
        self._tracer_provider = tracer_provider
        self._meter_provider = meter_provider
        self._instruments: GenAiInstruments | None = None

    def begin(self, request_id: str, spec: SequenceSpec, now_s: float) -> RequestTrace | None:
        """A request is submitted; None if nobody wants to know.

        Args:
            spec: of its first answer.
            now_s: on the dispatcher's clock.
        """
        tracer_provider = self._tracer_provider or trace.get_tracer_provider()
        instruments = self._wanted_instruments()
        if instruments is None and not _is_sdk(tracer_provider):
            return None
        came = arrival()
        clock = _WallClock(time.time_ns() - _ns(now_s))
        tracer = tracer_provider.get_tracer(_SCOPE)
        span = tracer.start_span(
            f"{came.operation} {self._model}",
            context=_context_of(came),
            kind=SpanKind.SERVER,
            start_time=clock.ns(spec.arrival_s),
        )
        if instruments is None and not span.is_recording():
            return None
        params = spec.sampling_params
        request = RequestTrace(tracer, span, clock, self._model, came, instruments, params.n)
        if span.is_recording():
            attributes = request_attributes(self._model, came.operation, params)
            if came.is_stream is not None:
                attributes["gen_ai.request.stream"] = came.is_stream
            span.set_attributes({**attributes, "gen_ai.response.id": request_id})
        return request

    def _wanted_instruments(self) -> GenAiInstruments | None:
        if self._instruments is None:
            provider = self._meter_provider or metrics.get_meter_provider()
            if _is_sdk(provider):
                self._instruments = GenAiInstruments(provider.get_meter(_SCOPE), self._model)
        return self._instruments


class RequestTrace:
    """The span of one request. Its owner's lock guards it; ends with its last sequence, or with
    `refused`."""

    def __init__(
        self,
        tracer: trace.Tracer,
        span: Span,
        clock: _WallClock,
        model: str,
        arrival: Arrival,
        instruments: GenAiInstruments | None,
        num_answers: int,
    ) -> None:
        self._tracer = tracer
        self._span = span
        self._clock = clock
        self._num_live = num_answers
        self._model = model
        self._arrival = arrival
        self._instruments = instruments
        self._records: list[SequenceRecord] = []
        self._error: Exception | None = None

    def refused(self, error: Exception) -> None:
        """It was not taken in: this is all."""
        self._set_error(error)
        self._span.end()

    def failed(self, error: Exception) -> None:
        """It is to end with an error."""
        self._error = error

    def sequence_ended(self, record: SequenceRecord) -> None:
        """One of its answers is complete, or given up."""
        self._records.append(record)
        self._num_live -= 1
        if self._span.is_recording():
            self._tell_phases(record)
        if not self._num_live:
            self._end()

    def _end(self) -> None:
        records, span = self._records, self._span
        if self._instruments is not None:
            for record in records:
                self._instruments.record(record, self._arrival.operation, self._error)
        if span.is_recording():
            span.set_attributes(response_attributes(self._model, records))
            if self._error is not None:
                self._set_error(self._error)
        span.end(self._clock.ns(max(record.ended_s for record in records)))

    def _set_error(self, error: Exception) -> None:
        # Its name, not its message: that may quote what the client sent.
        self._span.set_attribute("error.type", type(error).__qualname__)
        self._span.set_status(Status(StatusCode.ERROR, type(error).__qualname__))

    def _tell_phases(self, record: SequenceRecord) -> None:
        where = {"flowkv.sequence.id": record.sequence_id}
        for lost in record.lost_places:
            # Reasons name nodes and what became of them, and nothing of the request.
            told = {**where, "flowkv.node": lost.node or "", "flowkv.reason": lost.reason}
            self._span.add_event("lost_place", told, self._clock.ns(lost.time_s))
        if record.queue_s is None:
            self._phase("queue", record.arrival_s, record.ended_s, where)
            return
        begun_s = record.arrival_s + record.queue_s
        self._phase("queue", record.arrival_s, begun_s, where)
        prefill = {**where, "flowkv.node": record.prefill_node or ""}
        if record.prefill_s is None:
            self._phase("prefill", begun_s, record.ended_s, prefill)
            return
        first_s = begun_s + record.prefill_s
        self._phase("prefill", begun_s, first_s, prefill)
        report = record.handoff
        if report is not None and record.handed_off_s is not None:
            facts: dict[str, AttributeValue] = {
                **where,
                "flowkv.handoff.source": report.src,
                "flowkv.handoff.destination": report.dst,
                "flowkv.handoff.path": report.path,
                "flowkv.handoff.backend": report.backend,
                "flowkv.handoff.calls": report.calls,
                "flowkv.handoff.runs": report.runs,
                "flowkv.handoff.bytes": report.data_bytes,
                "flowkv.handoff.deferred_s": report.deferred_s,
                "flowkv.handoff.transfer_s": report.transfer_s,
            }
            begun_s = record.handed_off_s - report.total_s
            self._phase("handoff", begun_s, record.handed_off_s, facts)
        decode = {**where, "flowkv.node": record.decode_node or ""}
        self._phase("decode", first_s, first_s + (record.decode_s or 0.0), decode)

    def _phase(
        self, name: str, begun_s: float, ended_s: float, attributes: Mapping[str, AttributeValue]
    ) -> None:
        parent = trace.set_span_in_context(self._span, Context())
        ns = self._clock.ns
        span = self._tracer.start_span(
            name, context=parent, attributes=attributes, start_time=ns(begun_s)
        )
        span.end(ns(ended_s))


@dataclass(frozen=True, slots=True)
class _WallClock:
    """Unix time of a monotonic clock's readings."""

    offset_ns: int

    def ns(self, at_s: float) -> int:
        return self.offset_ns + _ns(at_s)


def _text(value: str | bytes) -> str:
    return value.decode("latin-1") if isinstance(value, bytes) else value


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)


def _context_of(arrival: Arrival) -> Context | None:
    """The caller's span, or for None whatever span is current here."""
    if arrival.traceparent is None:
        return None
    carrier = {"traceparent": arrival.traceparent}
    if arrival.tracestate is not None:
        carrier["tracestate"] = arrival.tracestate
    return TraceContextTextMapPropagator().extract(carrier, Context())


def _is_sdk(provider: object) -> bool:
    """The API's own providers do nothing."""
    return not type(provider).__module__.startswith(_API_PACKAGES)
