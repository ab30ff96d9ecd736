"""`flowkv bench selector`: it runs, reports, and refuses nonsense. Times are not asserted."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest

from flowkv_jax import cli
from flowkv_jax.bench.selector import run_selector_benchmark
from flowkv_jax.commands import Context


def run(*argv: str) -> tuple[int, str, str]:
    stdout, stderr = io.StringIO(), io.StringIO()

    def unused(*_: object) -> Any:
        raise AssertionError("the selector needs no engine and no model")

    context = Context(io.StringIO(), stdout, stderr, unused, unused)
    status = cli.main(["bench", "selector", *argv], context)
    return status, stdout.getvalue(), stderr.getvalue()


def test_command() -> None:
    arguments = ("--num-gpus", "3", "--iterations", "100")
    status, text, _ = run(*arguments, "--json")
    assert status == 0
    document = json.loads(text)
    assert document["benchmark"] == "selector" and document["num_gpus"] == 3
    assert {"commit", "versions", "host", "same_sample_p99_us"} <= set(document)
    status, text, _ = run(*arguments)
    assert status == 0 and "new_sample_median_us" in text
    status, _, stderr = run("--num-gpus", "1")
    assert status == 2 and "num_gpus=1" in stderr


def test_figures() -> None:
    figures = run_selector_benchmark(num_gpus=4, iterations=100)
    for name in ("same_sample", "new_sample", "ttft_sensitive"):
        assert 0 < figures[f"{name}_median_us"] <= figures[f"{name}_p99_us"]


def test_two_hosts_of_eight_cache_over_a_thousand_paths() -> None:
    assert run_selector_benchmark(iterations=100)["cached_paths"] >= 1000


def test_bad_settings() -> None:
    with pytest.raises(ValueError, match="num_gpus=1"):
        run_selector_benchmark(num_gpus=1)
    with pytest.raises(ValueError, match="iterations=0"):
        run_selector_benchmark(iterations=0)
