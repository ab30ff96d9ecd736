"""OpenTelemetry's SDK, for a server that is to send its traces somewhere."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit

from opentelemetry import trace

from flowkv_jax import __version__
from flowkv_jax.errors import ConfigError

_PARAMETER = "otlp_traces_endpoint"


@contextmanager
def sending_traces(endpoint: str | None) -> Iterator[None]:
    """Send the traces of this process to an OTLP collector over gRPC; at the end, the last of them.

    The SDK's own environment variables (OTEL_SERVICE_NAME, OTEL_TRACES_SAMPLER,
    OTEL_EXPORTER_OTLP_HEADERS, ..) work as it says.

    Args:
        endpoint: such as "http://127.0.0.1:4317"; with https over TLS. None sends nothing.

    Raises:
        ConfigError: the endpoint is no URL, or the extra `otel` is not installed.
    """
    if endpoint is None:
        yield
        return
    url = urlsplit(endpoint)
    if url.scheme not in ("http", "https") or not url.hostname:
        raise ConfigError(
            f"{_PARAMETER}={endpoint!r} must be a URL of a gRPC collector, such as"
            " http://127.0.0.1:4317",
            parameter=_PARAMETER,
            value=endpoint,
        )
    try:
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import OTELResourceDetector, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise ConfigError(
            f"{_PARAMETER} needs OpenTelemetry's SDK and exporter ({error.name} is missing):"
            " pip install 'flowkv-jax[otel]'",
            parameter=_PARAMETER,
            value=endpoint,
        ) from error
    ours = Resource({"service.name": "flowkv", "service.version": __version__})
    # What the environment says wins.
    resource = Resource.create().merge(ours).merge(OTELResourceDetector().detect())
    provider = TracerProvider(resource=resource)
    exporter = OTLPSpanExporter(endpoint=endpoint, insecure=url.scheme == "http")
    provider.add_span_processor(BatchSpanProcessor(exporter))
    trace.set_tracer_provider(provider)
    try:
        yield
    finally:
        provider.shutdown()
