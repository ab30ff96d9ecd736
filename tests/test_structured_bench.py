"""`flowkv bench structured`: it runs, reports, and refuses nonsense."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flowkv_jax import cli
from flowkv_jax.bench.structured import run_structured_benchmark
from flowkv_jax.commands import Context

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(tiny_model: Callable[[str], Path], xla_cache: Path) -> Run:
    settings = (
        *("--model", str(tiny_model("gqa_tied"))),
        *("--compilation-cache-dir", str(xla_cache)),
        *("--num-blocks", "32", "--max-num-seqs", "2", "--max-model-len", "256"),
    )

    def run(*argv: str) -> tuple[int, str, str]:
        stdout, stderr = io.StringIO(), io.StringIO()
        status = cli.main(
            ["bench", "structured", *settings, *argv], Context(io.StringIO(), stdout, stderr)
        )
        return status, stdout.getvalue(), stderr.getvalue()

    return run


def test_both_kinds_of_answers_are_timed(run: Run) -> None:
    numbers = ("--batch", "2", "--new-tokens", "12", "--repeat", "2")
    status, text, stderr = run(*numbers, "--json")
    assert status == 0, stderr
    document = json.loads(text)
    assert document["benchmark"] == "structured"
    free, held = document["results"]
    assert (free["answers"], held["answers"]) == ("free", "json schema")
    assert free["slower_percent"] == 0
    for row in (free, held):
        assert (row["batch"], row["new_tokens"]) == (2, 12)
        assert row["decode_tok_s"] > 0
        assert row["ms_per_step"] == pytest.approx(2000 / row["decode_tok_s"])


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        ((0, 2, 1), "batch=0 must be at least 1"),
        ((1, 1, 1), "new_tokens=1 must be at least 2"),
        ((1, 2, 0), "repeat=0 must be at least 1"),
    ],
)
def test_nonsense_is_refused(numbers: tuple[int, int, int], message: str) -> None:
    batch, new_tokens, repeat = numbers
    no_engine: Any = None
    with pytest.raises(ValueError, match=message):
        run_structured_benchmark(no_engine, batch=batch, new_tokens=new_tokens, repeat=repeat)
