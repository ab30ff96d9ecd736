"""An engine's metrics in Prometheus' text formats."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import Metric
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.registry import Collector

from flowkv_jax.metrics.distribution import Histogram
from flowkv_jax.metrics.flowkv_metrics import FlowKVMetrics
from flowkv_jax.metrics.reading import Reading, ServedModel
from flowkv_jax.metrics.vllm_metrics import VllmMetrics

_OPENMETRICS = "application/openmetrics-text"
# The encoders take colons, which our names have, for characters to be escaped.
_AS_THEY_ARE = "allow-utf-8"


class ServingMetrics:
    """The metrics of one engine, in a registry of its own: two engines of a process do not meet.

    Args:
        read: takes what is exported, at every `render`. From any thread; may wait for a lock.
        model: as it is served.
    """

    def __init__(self, read: Callable[[], Reading], model: ServedModel) -> None:
        self._read = read
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(_Engine(read, model))
        # CPU, memory and age of this process: of the front, where workers hold the nodes.
        ProcessCollector(registry=self._registry)

    def render(self, accept: str = "") -> tuple[bytes, str]:
        """Every metric as it is now. Any thread; takes milliseconds.

        Args:
            accept: the request's Accept header. OpenMetrics 1.0 for those who prefer it, else
                Prometheus' text format 0.0.4.

        Returns:
            body and content type.
        """
        if _prefers_openmetrics(accept):
            encode = openmetrics.generate_latest
            body: bytes = encode(self._registry, escaping=_AS_THEY_ARE)  # type: ignore[no-untyped-call]
            return body, openmetrics.CONTENT_TYPE_LATEST
        return generate_latest(self._registry, escaping=_AS_THEY_ARE), CONTENT_TYPE_PLAIN_0_0_4

    def inter_token_s(self) -> Histogram:
        """Times from a token to the next, of all nodes since the start, by
        `buckets.INTER_TOKEN_S`. Any thread; waits for the lock as `render`."""
        tallies = self._read().requests.nodes.values()
        return sum((tally.inter_token_s.histogram() for tally in tallies), Histogram())


class _Engine(Collector):
    def __init__(self, read: Callable[[], Reading], model: ServedModel) -> None:
        self._read = read
        self._model = model

    def collect(self) -> Iterator[Metric]:
        reading = self._read()
        yield from VllmMetrics(reading, self._model).collect()
        yield from FlowKVMetrics(reading, self._model).collect()


def _prefers_openmetrics(accept: str) -> bool:
    weights = {_OPENMETRICS: 0.0, "text/plain": 0.0}
    for choice in accept.split(","):
        kind, *parameters = (part.strip() for part in choice.split(";"))
        if kind in weights:
            weights[kind] = max(weights[kind], _weight(parameters))
    return weights[_OPENMETRICS] > 0 and weights[_OPENMETRICS] >= weights["text/plain"]


def _weight(parameters: list[str]) -> float:
    """The quality value among a media type's parameters (RFC 9110, 12.4.2)."""
    for parameter in parameters:
        name, _, value = parameter.partition("=")
        if name.strip().lower() == "q":
            try:
                return float(value)
            except ValueError:
                return 0.0
    return 1.0
