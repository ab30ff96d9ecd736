"""Traces and gen_ai metrics, as OpenTelemetry's SDK gets them; and nothing without one."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF
from opentelemetry.trace import SpanKind, StatusCode

from flowkv_jax.controller.role import Role
from flowkv_jax.errors import ConfigError
from flowkv_jax.metrics.spans import Arrival, Tracing, arrival, arrive
from flowkv_jax.metrics.telemetry import sending_traces
from flowkv_jax.outputs import RequestOutput
from flowkv_jax.rpc.flowkv.v1 import flowkv_pb2 as pb
from tests.fake_engine import FakeEngine, serving, stub_of
from tests.metered_cluster import MeteredCluster
from tests.openai_http import chat, client_of, complete
from tests.test_metrics_requests import handoff

TRACE_ID, PARENT_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
TRACEPARENT = f"00-{TRACE_ID}-{PARENT_ID}-01"


class Traced(MeteredCluster):
    """A cluster whose traces are kept."""

    def __init__(self, roles: dict[str, Role], **options: Any) -> None:
        super().__init__(roles, **options)
        self.clock.now_s = 100.0
        self.exporter = InMemorySpanExporter()
        self.provider = TracerProvider(shutdown_on_exit=False)
        self.provider.add_span_processor(SimpleSpanProcessor(self.exporter))
        self.dispatcher.trace_with(Tracing("m", self.provider))

    @property
    def spans(self) -> dict[str, ReadableSpan]:
        return {span.name: span for span in self.exporter.get_finished_spans()}


@pytest.fixture(autouse=True)
def nobody_has_arrived() -> Iterator[None]:
    """Each test in a context of its own would be nicer; pytest has one for all."""
    arrive("text_completion")
    yield
    arrive("text_completion")


def serve_pair(cluster: MeteredCluster, **options: Any) -> None:
    """A request that arrived at 100 s, through both nodes."""
    cluster.submit(prompt=range(8), max_tokens=3, arrival_s=100.0, **options)
    cluster.news("P", 102.0, token_ids=(97,), scheduled_s=100.5, num_cached_tokens=2)
    cluster.news("D", 102.5, start=1, handoff=handoff())
    cluster.news("D", 103.0, start=1, token_ids=(97,))
    cluster.news("D", 103.25, start=2, token_ids=(97,), finish_reason="length")


def seconds(span: ReadableSpan) -> float:
    assert span.start_time is not None and span.end_time is not None
    return (span.end_time - span.start_time) / 1e9


class TestRequest:
    def test_the_server_span(self) -> None:
        cluster = Traced({"P": Role.PREFILL, "D": Role.DECODE})
        arrive("chat", is_stream=True)
        serve_pair(cluster, temperature=0.5, top_p=0.9, top_k=7, stop="zz", frequency_penalty=0.5)
        span = cluster.spans["chat m"]
        assert span.kind is SpanKind.SERVER and span.parent is None
        assert seconds(span) == pytest.approx(3.25, abs=1e-6)
        assert dict(span.attributes or {}) == {
            "gen_ai.operation.name": "chat",
            "gen_ai.provider.name": "flowkv",
            "gen_ai.request.model": "m",
            "gen_ai.request.max_tokens": 3,
            "gen_ai.request.temperature": 0.5,
            "gen_ai.request.top_p": 0.9,
            "gen_ai.request.top_k": 7,
            "gen_ai.request.stop_sequences": ("zz",),
            "gen_ai.request.choice.count": 1,
            "gen_ai.request.frequency_penalty": 0.5,
            "gen_ai.request.stream": True,
            "gen_ai.response.id": "r",
            "gen_ai.response.model": "m",
            "gen_ai.response.finish_reasons": ("length",),
            "gen_ai.response.time_to_first_chunk": 2.0,
            "gen_ai.usage.input_tokens": 8,
            "gen_ai.usage.output_tokens": 3,
            "gen_ai.usage.cache_read.input_tokens": 2,
        }

    def test_phases_are_its_children(self) -> None:
        cluster = Traced({"P": Role.PREFILL, "D": Role.DECODE})
        serve_pair(cluster)
        spans = cluster.spans
        root = spans.pop("text_completion m")
        assert root.start_time is not None
        places = {}
        for name, span in spans.items():
            assert span.parent is not None and span.parent.span_id == root.context.span_id
            assert span.start_time is not None
            begun_s = (span.start_time - root.start_time) / 1e9
            places[name] = (round(begun_s, 6), round(seconds(span), 6))
        assert places == {
            "queue": (0.0, 0.5),
            "prefill": (0.5, 1.5),
            "handoff": (1.875, 0.625),
            "decode": (2.0, 1.25),
        }
        assert (spans["prefill"].attributes or {})["flowkv.node"] == "P"
        assert (spans["decode"].attributes or {})["flowkv.node"] == "D"
        about = spans["handoff"].attributes or {}
        assert (about["flowkv.handoff.calls"], about["flowkv.handoff.bytes"]) == (2, 3000)

    def test_its_times_are_of_the_wall_clock(self) -> None:
        cluster = Traced({"A": Role.HYBRID})
        before = time.time_ns()
        cluster.submit(max_tokens=1, arrival_s=99.0)  # a second ago
        after = time.time_ns()
        cluster.news("A", 101.0, token_ids=(97,), scheduled_s=100.5, finish_reason="length")
        started = cluster.spans["text_completion m"].start_time
        assert started is not None
        assert before - 1_000_001_000 <= started <= after - 999_999_000

    def test_all_answers_in_one(self) -> None:
        cluster = Traced({"A": Role.HYBRID})
        cluster.submit(n=2, max_tokens=2, arrival_s=100.0)
        cluster.news("A", 101.0, token_ids=(97,), scheduled_s=100.5, finish_reason="stop")
        assert "text_completion m" not in cluster.spans
        cluster.news("A", 102.0, "r#1", token_ids=(97, 98), scheduled_s=100.5)
        cluster.dispatcher.abort(["r"])
        attributes = cluster.spans["text_completion m"].attributes or {}
        assert attributes["gen_ai.response.finish_reasons"] == ("stop", "abort")
        assert attributes["gen_ai.usage.output_tokens"] == 3
        assert attributes["gen_ai.request.choice.count"] == 2

    def test_a_lost_place_is_told(self) -> None:
        cluster = Traced({"A": Role.HYBRID, "B": Role.HYBRID})
        cluster.submit(max_tokens=2, arrival_s=100.0)
        (first,) = (name for name, node in cluster.nodes.items() if node.specs)
        other = "B" if first == "A" else "A"
        cluster.clock.now_s = 101.0
        cluster.leave(first)
        cluster.news(other, 102.0, token_ids=(97, 98), scheduled_s=101.5, finish_reason="length")
        (event,) = cluster.spans["text_completion m"].events
        assert event.name == "lost_place"
        assert (event.attributes or {})["flowkv.node"] == first


class TestTrouble:
    def test_one_that_is_refused(self) -> None:
        cluster = Traced({}, max_waiting_requests=1)
        cluster.submit("a", arrival_s=100.0)
        cluster.submit("b", arrival_s=100.0)
        (span,) = cluster.exporter.get_finished_spans()
        assert span.status.status_code is StatusCode.ERROR
        assert (span.attributes or {})["error.type"] == "QueueOverflowError"

    def test_one_that_fails(self) -> None:
        cluster = Traced({"A": Role.HYBRID})
        cluster.submit(arrival_s=100.0)
        cluster.news("A", 101.0, token_ids=(97,), scheduled_s=100.5)
        cluster.dispatcher.fail_all(RuntimeError("what the client wrote"))
        span = cluster.spans["text_completion m"]
        assert span.status.status_code is StatusCode.ERROR
        assert (span.attributes or {})["gen_ai.response.finish_reasons"] == ("error",)
        assert "what the client wrote" not in span.to_json()

    def test_one_that_never_ran(self) -> None:
        cluster = Traced({})
        cluster.submit(arrival_s=100.0)
        cluster.clock.now_s = 104.0
        cluster.dispatcher.abort(["r"])
        assert cluster.spans.keys() == {"queue", "text_completion m"}
        assert seconds(cluster.spans["queue"]) == pytest.approx(4.0, abs=1e-6)


class TestParent:
    @pytest.mark.parametrize(
        "headers",
        [
            [("traceparent", TRACEPARENT), ("tracestate", "vendor=1")],
            [(b"host", b"x"), (b"traceparent", TRACEPARENT.encode())],
        ],
    )
    def test_of_the_headers(self, headers: list[Any]) -> None:
        cluster = Traced({"P": Role.PREFILL, "D": Role.DECODE})
        arrive("chat", headers)
        serve_pair(cluster)
        for span in cluster.spans.values():
            assert f"{span.context.trace_id:032x}" == TRACE_ID
        root = cluster.spans["chat m"]
        assert root.parent is not None and root.parent.is_remote
        assert f"{root.parent.span_id:016x}" == PARENT_ID

    @pytest.mark.parametrize("traceparent", ["", "x", "00-0-0-00", TRACEPARENT[:-1], "\xff" * 60])
    def test_one_that_cannot_be_read(self, traceparent: str) -> None:
        cluster = Traced({"P": Role.PREFILL, "D": Role.DECODE})
        arrive("chat", [("traceparent", traceparent)])
        serve_pair(cluster)
        assert cluster.spans["chat m"].parent is None

    def test_of_the_program_that_has_the_engine(self) -> None:
        cluster = Traced({"P": Role.PREFILL, "D": Role.DECODE})
        with cluster.provider.get_tracer("program").start_as_current_span("job") as job:
            serve_pair(cluster)
        parent = cluster.spans["text_completion m"].parent
        assert parent is not None and parent.span_id == job.get_span_context().span_id

    async def test_of_one_task_is_not_of_another(self) -> None:
        cluster = Traced({"P": Role.PREFILL, "D": Role.DECODE})

        async def arrive_elsewhere() -> None:
            arrive("chat", [("traceparent", TRACEPARENT)])

        await asyncio.create_task(arrive_elsewhere())
        serve_pair(cluster)
        assert cluster.spans["text_completion m"].parent is None


class Listening(FakeEngine):
    """Remembers how each request came, as the dispatcher would see it."""

    def __init__(self) -> None:
        super().__init__()
        self.arrivals: list[Arrival] = []

    async def async_generate(self, *args: Any, **options: Any) -> AsyncIterator[RequestOutput]:
        self.arrivals.append(arrival())
        async for output in super().async_generate(*args, **options):
            yield output


class TestFrontDoors:
    """Each says whose request it is to the task that the engine is asked in."""

    async def test_http(self) -> None:
        engine = Listening()
        async with client_of(engine) as client:
            client.headers["traceparent"] = TRACEPARENT
            await chat(client, max_tokens=1)
            del client.headers["traceparent"]
            await complete(client, max_tokens=1, stream=False)
            await client.post("/v1/completions", json={"prompt": "a", "stream": True})
        assert engine.arrivals == [
            Arrival("chat", TRACEPARENT, None, False),
            Arrival("text_completion", None, None, False),
            Arrival("text_completion", None, None, True),
        ]

    async def test_grpc(self) -> None:
        engine = Listening()
        metadata = (("traceparent", TRACEPARENT), ("tracestate", "a=b"))
        params = pb.SamplingParams(max_tokens=1)
        turn = pb.ChatMessage(role="user", content="hi")
        async with serving(engine) as server, stub_of(server) as stub:
            for call in (
                stub.Generate(pb.GenerateRequest(text="a", sampling_params=params)),
                stub.Chat(
                    pb.ChatRequest(messages=[turn], sampling_params=params), metadata=metadata
                ),
            ):
                async for _ in call:
                    pass
        assert engine.arrivals == [
            Arrival("text_completion"),
            Arrival("chat", TRACEPARENT, "a=b"),
        ]


class TestNobodyWantsToKnow:
    def begun(self, tracing: Tracing) -> object:
        cluster = MeteredCluster({"A": Role.HYBRID})
        cluster.dispatcher.trace_with(tracing)
        return cluster.submit().submission.trace

    def test_without_an_sdk(self) -> None:
        assert isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider)
        assert self.begun(Tracing("m")) is None

    def test_one_that_is_not_sampled(self) -> None:
        provider = TracerProvider(sampler=ALWAYS_OFF, shutdown_on_exit=False)
        assert self.begun(Tracing("m", provider)) is None


def test_gen_ai_metrics() -> None:
    reader = InMemoryMetricReader()
    provider = MeterProvider([reader], shutdown_on_exit=False)
    cluster = MeteredCluster({"P": Role.PREFILL, "D": Role.DECODE})
    cluster.clock.now_s = 100.0
    cluster.dispatcher.trace_with(Tracing("m", meter_provider=provider))
    arrive("chat")
    serve_pair(cluster)
    found: dict[tuple[str, str], float] = {}
    data = reader.get_metrics_data()
    assert data is not None
    for metric in data.resource_metrics[0].scope_metrics[0].metrics:
        for point in metric.data.data_points:
            attributes = dict(point.attributes or {})
            kind = str(attributes.pop("gen_ai.token.type", ""))
            assert attributes == {
                "gen_ai.operation.name": "chat",
                "gen_ai.provider.name": "flowkv",
                "gen_ai.request.model": "m",
                "gen_ai.response.model": "m",
            }
            found[metric.name, kind] = point.sum  # type: ignore[union-attr]
    assert found == {
        ("gen_ai.server.request.duration", ""): 3.25,
        ("gen_ai.server.time_to_first_token", ""): 2.0,
        ("gen_ai.server.time_per_output_token", ""): 0.625,
        ("gen_ai.client.token.usage", "input"): 8,
        ("gen_ai.client.token.usage", "output"): 3,
    }
    provider.shutdown()


class TestSendingTraces:
    def test_nothing_is_asked_for(self) -> None:
        with sending_traces(None):
            assert isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider)

    @pytest.mark.parametrize("endpoint", ["", "127.0.0.1:4317", "ftp://x", "http://"])
    def test_no_url(self, endpoint: str) -> None:
        with pytest.raises(ConfigError, match="must be a URL"), sending_traces(endpoint):
            pass

    def test_without_the_extra(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
        missing = pytest.raises(ConfigError, match=r"flowkv-jax\[otel\]")
        with missing, sending_traces("http://127.0.0.1:4317"):
            pass
