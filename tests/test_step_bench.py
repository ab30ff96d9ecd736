"""`flowkv bench step` and `flowkv bench layouts`: they run, report, and refuse nonsense."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flowkv_jax import cli
from flowkv_jax.bench.step import StepShape
from flowkv_jax.commands import Context


def run(*argv: str) -> tuple[int, str, str]:
    stdout, stderr = io.StringIO(), io.StringIO()

    def unused(*_: object) -> Any:
        raise AssertionError("this benchmark opens no engine and no client")

    context = Context(io.StringIO(), stdout, stderr, unused, unused)
    return cli.main(["bench", *argv], context), stdout.getvalue(), stderr.getvalue()


def test_step(tiny_model: Callable[[str], Path], tmp_path: Path) -> None:
    model = str(tiny_model("wide_head_dim"))
    arguments = ("step", "--model", model, "--shapes", "2x1@40,2x16@32", "--repeat", "1")
    status, text, _ = run(*arguments, "--json")
    assert status == 0
    document = json.loads(text)
    assert document["benchmark"] == "step"
    decode, prefill = document["results"]
    assert (decode["rows"], decode["queries"], decode["context"]) == (2, 1, 40)
    assert (prefill["rows"], prefill["queries"], prefill["context"]) == (2, 16, 32)
    for row in document["results"]:
        parts = ("attention_ms", "products_ms", "other_layers_ms", "head_and_sampling_ms")
        assert sum(row[part] for part in parts) == pytest.approx(row["step_ms"])
    status, text, _ = run(*arguments)
    assert status == 0
    assert "attention share" in text


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        ("8", "'8' is not ROWSxQUERIES@CONTEXT"),
        ("2x16@31", "context=31 is below the 32 tokens computed"),
        ("0x1@4", "rows=0 must be at least 1"),
    ],
)
def test_step_refuses(tiny_model: Callable[[str], Path], shapes: str, message: str) -> None:
    status, _, stderr = run("step", "--model", str(tiny_model("wide_head_dim")), "--shapes", shapes)
    assert status == 2
    assert message in stderr


def test_shapes_are_what_the_engine_would_compute() -> None:
    decode = StepShape(rows=2, queries=1, context=33).inputs(16)
    assert decode.q_starts_R.tolist() == [32, 32]
    assert decode.kv_lens_R.tolist() == [33, 33]
    assert decode.block_tables_RM.tolist() == [[0, 1, 2], [3, 4, 5]]
    prefill = StepShape(rows=2, queries=16, context=40).inputs(16)
    assert prefill.q_starts_R.tolist() == [8, 24]
    assert prefill.kv_lens_R.tolist() == [24, 40]
    assert prefill.block_tables_RM.tolist() == [[0, 1, 2], [0, 1, 2]]


@pytest.mark.parametrize("implementation", ["cpu", "xla"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_layouts(implementation: str, dtype: str) -> None:
    small = ("--batch", "2", "--num-layers", "2", "--head-dim", "16", "--repeat", "1")
    choice = ("--implementation", implementation, "--dtype", dtype)
    status, text, _ = run("layouts", "--contexts", "20,40", *small, *choice, "--json")
    assert status == 0
    results = json.loads(text)["results"]
    assert [row["context"] for row in results] == [20, 40]
    for row in results:
        assert row["price"] == pytest.approx(row["block_major_ms"] / row["layer_major_ms"])
