"""The benchmark of a routing decision: it runs, reports, and refuses nonsense."""

from __future__ import annotations

import json

import pytest

from flowkv_jax.bench.router import run_router_benchmark


def test_figures() -> None:
    figures = run_router_benchmark((1, 6), iterations=100)
    assert json.loads(json.dumps(figures)) == figures
    for name in ("nodes_1", "nodes_6"):
        of_size = figures[name]
        assert 0 < of_size["median_us"] <= of_size["p99_us"]
        assert 0 < of_size["idle_median_us"] <= of_size["idle_p99_us"]
        assert of_size["tick_median_us"] > 0


def test_bad_settings() -> None:
    with pytest.raises(ValueError, match="iterations=0"):
        run_router_benchmark(iterations=0)
    with pytest.raises(ValueError, match="node_counts"):
        run_router_benchmark((0,))
