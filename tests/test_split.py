"""Dividing runs among paths: every copy exactly once, and no path later than need be."""

from __future__ import annotations

from collections import Counter
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from transfer import BlockRun
from transfer.split import shares, split_bytes, split_runs

RATES = st.lists(st.floats(0.01, 1e3), min_size=1, max_size=4)
RUNS = st.lists(
    st.builds(BlockRun, st.integers(0, 50), st.integers(0, 50), st.integers(1, 30)), max_size=12
)


def copies(runs: list[BlockRun] | tuple[BlockRun, ...]) -> Counter[tuple[int, int]]:
    return Counter(
        (run.src_start + i, run.dst_start + i) for run in runs for i in range(run.num_blocks)
    )


@given(RUNS, RATES)
def test_every_copy_exactly_once(runs: list[BlockRun], rates: list[float]) -> None:
    parts = split_runs(runs, rates)
    assert len(parts) == len(rates)
    assert copies([run for part in parts for run in part]) == copies(runs)
    assert sum(map(len, parts)) <= len(runs) + len(rates) - 1
    blocks = [sum(run.num_blocks for run in part) for part in parts]
    assert blocks == shares(sum(blocks), rates)
    for part in parts:
        assert list(part) == sorted(part, key=lambda run: run.dst_start)


@given(st.integers(0, 12), st.lists(st.floats(0.05, 20), min_size=1, max_size=3))
def test_no_division_finishes_earlier(num_blocks: int, rates: list[float]) -> None:
    divisions = [
        counts
        for counts in product(range(num_blocks + 1), repeat=len(rates))
        if sum(counts) == num_blocks
    ]
    best = min(max(c / r for c, r in zip(counts, rates, strict=True)) for counts in divisions)
    ours = shares(num_blocks, rates)
    assert sum(ours) == num_blocks
    assert max(c / r for c, r in zip(ours, rates, strict=True)) == pytest.approx(best)


@given(st.integers(1, 10**12), st.integers(1, 10**7), RATES)
def test_bytes_are_cut_at_blocks(data_bytes: int, block_bytes: int, rates: list[float]) -> None:
    sizes = split_bytes(data_bytes, block_bytes, rates)
    assert sum(sizes) == data_bytes
    assert all(size >= 0 for size in sizes)
    assert sum(size % block_bytes > 0 for size in sizes) <= 1


def test_a_single_run_is_cut_between_blocks() -> None:
    assert split_runs([BlockRun(10, 100, 9)], [2.0, 1.0]) == [
        (BlockRun(10, 100, 6),),
        (BlockRun(16, 106, 3),),
    ]


def test_whole_runs_are_kept_whole_where_they_fit() -> None:
    long, short = BlockRun(0, 0, 6), BlockRun(20, 20, 3)
    assert split_runs([short, long], [1.0, 2.0]) == [(short,), (long,)]


def test_a_slow_path_gets_nothing() -> None:
    assert split_runs([BlockRun(0, 0, 2)], [100.0, 0.1])[1] == ()


@pytest.mark.parametrize("rates", [[], [0.0], [1.0, -1.0], [float("inf")], [float("nan")]])
def test_bad_rates(rates: list[float]) -> None:
    with pytest.raises(ValueError, match="rates="):
        shares(4, rates)


def test_bad_sizes() -> None:
    with pytest.raises(ValueError, match="num_blocks=-1"):
        shares(-1, [1.0])
    with pytest.raises(ValueError, match="block_bytes=0"):
        split_bytes(4, 0, [1.0])
    with pytest.raises(ValueError, match="has no block"):
        split_runs([BlockRun(0, 0, 0)], [1.0])
