"""Metric families, put together from values that are counted elsewhere."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.utils import floatToGoString

from flowkv_jax.metrics.distribution import Histogram

Labels = Mapping[str, str]


def gauge(name: str, meaning: str, samples: Iterable[tuple[Labels, float]]) -> Metric:
    """A family of values that rise and fall."""
    family = GaugeMetricFamily(name, meaning)
    for labels, value in samples:
        family.add_sample(name, dict(labels), value)
    return family


def state_set(
    name: str,
    meaning: str,
    label: str,
    states: Sequence[str],
    samples: Iterable[tuple[Labels, str]],
) -> Metric:
    """A gauge for each state, 1 for the one that holds and 0 for the others."""
    return gauge(
        name,
        meaning,
        (
            ({**labels, label: state}, float(state == present))
            for labels, present in samples
            for state in states
        ),
    )


def counter(name: str, meaning: str, samples: Iterable[tuple[Labels, float]]) -> Metric:
    """A family of values that only rise.

    Args:
        name: without "_total", which is added.
    """
    family = CounterMetricFamily(name, meaning)
    for labels, value in samples:
        family.add_sample(f"{name}_total", dict(labels), value)
    return family


def histogram(
    name: str,
    meaning: str,
    bounds: Sequence[float],
    samples: Iterable[tuple[Labels, Histogram]],
) -> Metric:
    """A family of distributions over the same bounds."""
    family = HistogramMetricFamily(name, meaning)
    names = [*map(floatToGoString, bounds), "+Inf"]
    for labels, values in samples:
        so_far = 0
        for bound, count in zip(names, values.counts or [0] * len(names), strict=True):
            so_far += count
            family.add_sample(f"{name}_bucket", {**labels, "le": bound}, so_far)
        family.add_sample(f"{name}_count", dict(labels), so_far)
        family.add_sample(f"{name}_sum", dict(labels), values.total)
    return family
