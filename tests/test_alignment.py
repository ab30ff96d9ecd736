"""Alignment of two block-id lists, against brute force."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from transfer import BlockRun, align


def copies(runs: list[BlockRun]) -> list[tuple[int, int]]:
    return [(src + i, dst + i) for src, dst, num_blocks in runs for i in range(num_blocks)]


def fewest_runs(src_ids: list[int], dst_ids: list[int]) -> int:
    """Chains of (s, d) -> (s + 1, d + 1): as many as there are copies without a predecessor."""
    wanted = set(zip(src_ids, dst_ids, strict=True))
    return sum((s - 1, d - 1) not in wanted for s, d in wanted)


@pytest.mark.parametrize(
    ("src_ids", "dst_ids", "runs"),
    [
        ([], [], []),
        ([7], [3], [(7, 3, 1)]),
        ([4, 5, 6], [9, 10, 11], [(4, 9, 3)]),
        # Both sides descend together: the same copies as ascending.
        ([6, 5, 4], [11, 10, 9], [(4, 9, 3)]),
        # One side ascends, the other descends.
        ([4, 5, 6], [11, 10, 9], [(6, 9, 1), (5, 10, 1), (4, 11, 1)]),
        # A break on either side ends a run.
        ([0, 1, 2, 3], [0, 1, 5, 6], [(0, 0, 2), (2, 5, 2)]),
        ([0, 1, 8, 9], [0, 1, 2, 3], [(0, 0, 2), (8, 2, 2)]),
        # A prompt in one piece whose growth came from the top on both sides.
        ([0, 1, 99, 98, 97], [10, 11, 79, 78, 77], [(0, 10, 2), (97, 77, 3)]),
        # Neighbours that are apart in token order.
        ([5, 9, 6], [1, 7, 2], [(5, 1, 2), (9, 7, 1)]),
        # One source block for two destinations.
        ([3, 3], [0, 1], [(3, 0, 1), (3, 1, 1)]),
    ],
)
def test_examples(src_ids, dst_ids, runs):
    assert align(src_ids, dst_ids) == [BlockRun(*run) for run in runs]


@st.composite
def id_lists(draw):
    """Lists as allocators make them: pieces that ascend or descend, on both sides at random."""

    def side(size: int, unique: bool) -> list[int]:
        ids: list[int] = []
        while len(ids) < size:
            start, length = draw(st.integers(0, 40)), draw(st.integers(1, 8))
            piece = range(start, start + length)
            if draw(st.booleans()):
                piece = reversed(piece)
            ids.extend(block for block in piece if not (unique and block in ids))
        return ids[:size]

    size = draw(st.integers(0, 24))
    return side(size, unique=False), side(size, unique=True)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(id_lists())
def test_exactly_the_copies_wanted_in_the_fewest_runs(lists):
    src_ids, dst_ids = lists
    runs = align(src_ids, dst_ids)
    assert sorted(copies(runs)) == sorted(zip(src_ids, dst_ids, strict=True))
    assert len(runs) == fewest_runs(src_ids, dst_ids)
    assert [run.dst_start for run in runs] == sorted(run.dst_start for run in runs)


def test_takes_arrays_and_gives_python_ints():
    runs = align(np.arange(4, dtype=np.int32), np.arange(4, dtype=np.uint64) + np.uint64(2))
    assert runs == [BlockRun(0, 2, 4)]
    assert all(type(value) is int for value in runs[0])


def test_large_fragmented_lists():
    rng = np.random.default_rng(0)
    src_ids, dst_ids = rng.permutation(100_000), rng.permutation(100_000)
    runs = align(src_ids, dst_ids)
    assert sum(run.num_blocks for run in runs) == 100_000
    assert align(np.arange(100_000), np.arange(100_000)) == [BlockRun(0, 0, 100_000)]


@pytest.mark.parametrize(
    ("src_ids", "dst_ids", "message"),
    [
        ([1, 2], [1], r"len\(src_ids\)=2 and len\(dst_ids\)=1"),
        ([1, -2], [1, 2], "src_ids holds negative block id -2"),
        ([1, 2], [-1, 2], "dst_ids holds negative block id -1"),
        ([1, 2, 3], [4, 5, 4], "dst_ids repeats block 4"),
        ([1, 2], [4, 4], "dst_ids repeats block 4"),
        ([1.5], [1], "src_ids must be one list of integers"),
        ([[1, 2]], [[3, 4]], "src_ids must be one list of integers"),
    ],
)
def test_bad_lists_are_named(src_ids, dst_ids, message):
    with pytest.raises(ValueError, match=message):
        align(src_ids, dst_ids)
