"""Calls of the three strategies: as many as the formulas say, and together exactly the bytes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.kv_layout import KVLayout
from transfer.strategies import Strategy, batches, calls_of, num_calls
from transfer.types import BlockRun

LAYOUT = KVLayout(3, 2, 2, 4, "float16", 2)
RUNS = st.lists(
    st.tuples(st.integers(0, 50), st.integers(0, 50), st.integers(1, 6)), min_size=1, max_size=8
).map(lambda runs: [BlockRun(*run) for run in runs])


def expanded(calls: np.ndarray) -> list[tuple[int, int]]:
    """(source byte, destination byte) of each byte that moves."""
    return [(s + i, d + i) for s, d, n in calls.tolist() for i in range(n)]


class TestFormulas:
    @pytest.mark.parametrize(
        ("strategy", "expected"),
        [
            (Strategy.LAYER_MAJOR, 32 * 2 * 250),
            (Strategy.BLOCK_MAJOR, 250),
            (Strategy.ALIGNED_RUNS, 1),
        ],
    )
    def test_llama_8b_with_4000_tokens(self, strategy: Strategy, expected: int) -> None:
        layout = KVLayout(32, 16, 8, 128, "bfloat16", 2)
        assert layout.bytes_per_token == 131_072
        calls = calls_of(strategy, [BlockRun(0, 10, 250)], layout)
        assert len(calls) == num_calls(strategy, 250, 1, 32) == expected
        assert calls[:, 2].sum() == 4000 * 131_072

    @given(RUNS, st.sampled_from(Strategy))
    @settings(max_examples=60, deadline=None)
    def test_same_bytes_in_the_same_order(self, runs: list[BlockRun], strategy: Strategy) -> None:
        calls = calls_of(strategy, runs, LAYOUT)
        blocks = sum(run.num_blocks for run in runs)
        assert len(calls) == num_calls(strategy, blocks, len(runs), LAYOUT.num_layers)
        plain = calls_of(Strategy.ALIGNED_RUNS, runs, LAYOUT)
        assert expanded(calls) == expanded(plain)


class TestBatches:
    @given(RUNS, st.integers(1, 400), st.integers(1, 5))
    @settings(max_examples=60, deadline=None)
    def test_everything_once_within_the_limits(
        self, runs: list[BlockRun], max_bytes: int, max_calls: int
    ) -> None:
        calls = calls_of(Strategy.ALIGNED_RUNS, runs, LAYOUT)
        found = list(batches(calls, max_bytes, max_calls))
        assert all(len(b) <= max_calls and b[:, 2].sum() <= max_bytes for b in found)
        assert expanded(np.concatenate(found)) == expanded(calls)
