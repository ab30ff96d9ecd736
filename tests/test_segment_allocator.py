"""Segment allocator: best fit, fewest pieces, growth, coalescing, generations and pins."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from flowkv_jax.bench.allocator import run_allocator_benchmark
from flowkv_jax.kv_cache.segment_allocator import SegmentAllocator


def with_free(num_blocks: int, *free: range) -> SegmentAllocator:
    """An allocator whose free segments are exactly `free`."""
    allocator = SegmentAllocator(num_blocks)
    everything = allocator.allocate(num_blocks)
    assert everything == list(range(num_blocks))
    for segment in free:
        allocator.free(list(segment))
    allocator.check()
    return allocator


def test_fresh_pool_allocates_in_one_piece_from_the_low_end():
    allocator = SegmentAllocator(10)
    assert allocator.allocate(4) == [0, 1, 2, 3]
    assert allocator.allocate(3) == [4, 5, 6]
    assert allocator.num_free == 3
    assert allocator.num_used == 7


def test_best_fit_takes_the_smallest_segment_that_holds_all():
    allocator = with_free(30, range(0, 8), range(10, 14), range(20, 25))
    assert allocator.allocate(4) == [10, 11, 12, 13]
    assert allocator.allocate(4) == [20, 21, 22, 23]
    allocator.check()


def test_equal_segments_are_taken_from_the_lowest():
    allocator = with_free(30, range(20, 24), range(2, 6), range(10, 14))
    assert allocator.allocate(4) == [2, 3, 4, 5]


def test_never_refuses_while_enough_is_free_and_uses_the_fewest_pieces():
    allocator = with_free(40, range(0, 3), range(5, 12), range(20, 25), range(30, 31))
    # 7 from the largest, 2 from the best fit for the rest.
    assert allocator.allocate(9) == [5, 6, 7, 8, 9, 10, 11, 0, 1]
    assert allocator.allocate(8) is None
    assert allocator.allocate(7) == [20, 21, 22, 23, 24, 30, 2]
    assert allocator.num_free == 0
    allocator.check()


def test_zero_blocks_and_zero_pool():
    assert SegmentAllocator(3).allocate(0) == []
    assert SegmentAllocator(0).allocate(0) == []
    assert SegmentAllocator(0).allocate(1) is None
    assert SegmentAllocator(0).grow(-1, 1) is None
    with pytest.raises(ValueError, match="num_blocks=-1"):
        SegmentAllocator(3).allocate(-1)
    with pytest.raises(ValueError, match="num_blocks=-1"):
        SegmentAllocator(-1)


def test_growth_continues_in_place():
    allocator = SegmentAllocator(10)
    table = allocator.allocate(3)
    assert allocator.grow(table[-1], 2) == [3, 4]


def test_growth_elsewhere_takes_the_top():
    allocator = SegmentAllocator(10)
    first = allocator.allocate(2)
    allocator.allocate(2)
    assert allocator.grow(first[-1], 1) == [9]
    assert allocator.grow(9, 1) == [8]
    assert allocator.grow(first[-1], 2) == [6, 7]
    allocator.check()


def test_growth_partly_in_place_takes_the_rest_from_the_top():
    allocator = with_free(12, range(3, 5), range(8, 10))
    assert allocator.grow(2, 3) == [3, 4, 9]
    assert allocator.grow(2, 2) is None
    assert allocator.num_free == 1
    allocator.check()


def test_growth_below_a_freed_top_uses_it_again():
    allocator = SegmentAllocator(8)
    allocator.allocate(1)
    guard = allocator.allocate(1)
    top = [allocator.grow(0, 1)[0] for _ in range(3)]
    assert top == [7, 6, 5]
    allocator.free([7])
    assert allocator.grow(0, 1) == [7]
    assert guard == [1]
    allocator.check()


def test_freed_blocks_coalesce_at_once_in_any_order():
    allocator = with_free(10)
    allocator.free([4, 2, 8])
    allocator.free([3])
    assert allocator.free_run_histogram() == {1: 1, 3: 1}
    allocator.free([7, 6, 5, 9])
    assert allocator.free_run_histogram() == {8: 1}
    assert allocator.largest_segment == 8
    assert allocator.fragmentation == 0
    allocator.check()


def test_fragmentation():
    allocator = with_free(20, range(0, 6), range(10, 12))
    assert allocator.fragmentation == pytest.approx(1 - 6 / 8)
    assert allocator.num_segments == 2
    assert with_free(4).fragmentation == 0


@pytest.mark.parametrize(
    ("block_ids", "message"),
    [
        ([2], "double free of block 2"),
        ([0, 1, 2], "double free of block 2"),
        ([0, 1, 0], "double free of block 0"),
        ([5], r"block 5, outside \[0, 5\)"),
        ([0, -1], r"block -1, outside"),
    ],
)
def test_bad_free_is_named_and_changes_nothing(block_ids, message):
    allocator = with_free(5, range(2, 5))
    with pytest.raises(RuntimeError, match=message):
        allocator.free(block_ids)
    assert allocator.num_free == 3
    assert allocator.generation(0) == 0
    allocator.check()


def test_generation_rises_when_a_block_becomes_free():
    allocator = SegmentAllocator(4)
    table = allocator.allocate(2)
    assert [allocator.generation(block) for block in range(4)] == [0, 0, 0, 0]
    allocator.free(table)
    assert [allocator.generation(block) for block in range(4)] == [1, 1, 0, 0]
    with pytest.raises(RuntimeError, match="block 4 is outside"):
        allocator.generation(4)


def test_generations_of_several_blocks_are_in_their_order():
    allocator = SegmentAllocator(4)
    allocator.allocate(4)
    allocator.free([2])
    assert allocator.generations([3, 2, 2]) == [0, 1, 1]
    assert allocator.generations([]) == []
    for bad in (-1, 4):
        with pytest.raises(RuntimeError, match=f"block {bad} is outside"):
            allocator.generations([0, bad])


def test_pinned_block_becomes_free_with_its_last_unpin():
    allocator = SegmentAllocator(4)
    table = allocator.allocate(4)
    allocator.pin([1, 2])
    allocator.pin([1])
    allocator.free(table)
    assert (allocator.num_free, allocator.num_deferred) == (2, 2)
    assert allocator.allocate(3) is None
    # Whoever comes late to write to it sees that its owner is gone.
    assert allocator.generation(1) == 1
    assert not allocator.is_used(1)
    allocator.check()
    with pytest.raises(RuntimeError, match="double free of block 1"):
        allocator.free([1])
    allocator.unpin([1, 2])
    assert allocator.num_free == 3
    allocator.unpin([1])
    assert allocator.generation(1) == 2
    assert allocator.allocate(4) == [0, 1, 2, 3]
    allocator.check()


def test_unpinned_before_free_leaves_nothing_behind():
    allocator = SegmentAllocator(4)
    table = allocator.allocate(4)
    allocator.pin(table)
    allocator.unpin(table)
    allocator.free(table)
    assert allocator.num_free == 4


def test_bad_pins_are_named_and_change_nothing():
    allocator = SegmentAllocator(4)
    allocator.allocate(2)
    with pytest.raises(RuntimeError, match="pin of block 2, which nobody holds"):
        allocator.pin([0, 2])
    with pytest.raises(RuntimeError, match="unpin of block 0, which is not pinned"):
        allocator.unpin([0])
    allocator.pin([0])
    with pytest.raises(RuntimeError, match="unpin of block 0"):
        allocator.unpin([0, 0])
    allocator.unpin([0])


@given(st.integers(1, 300), st.integers(1, 140), st.data())
@settings(max_examples=60, deadline=None)
def test_used_map_is_the_share_in_use_of_each_slice(num_blocks, num_cells, data):
    allocator = SegmentAllocator(num_blocks)
    taken = allocator.allocate(num_blocks)
    freed = data.draw(st.sets(st.integers(0, num_blocks - 1)))
    allocator.free(sorted(freed))
    shares = allocator.used_map(num_cells)
    num_cells = min(num_cells, num_blocks)
    assert len(shares) == num_cells
    edges = [cell * num_blocks // num_cells for cell in range(num_cells + 1)]
    for share, start, end in zip(shares, edges, edges[1:], strict=False):
        used = sum(block not in freed for block in taken[start:end])
        assert abs(share / 255 - used / (end - start)) <= 1 / 255
        assert (share == 0) == (used == 0) and (share == 255) == (used == end - start)


def test_used_map_of_nothing():
    assert SegmentAllocator(0).used_map(8) == b""
    with pytest.raises(ValueError, match="num_cells=0 must be at least 1"):
        SegmentAllocator(8).used_map(0)


def test_benchmark_reports_figures_of_a_churned_pool():
    result = run_allocator_benchmark(num_blocks=4_000, iterations=40)
    assert result["p99_us"] >= result["median_us"] > 0
    assert 0 <= result["fragmentation"] < 1
    assert result["runs_per_request_mean"] >= 1
    with pytest.raises(ValueError, match="occupancy=1"):
        run_allocator_benchmark(occupancy=1)
    with pytest.raises(ValueError, match="request_blocks=64"):
        run_allocator_benchmark(num_blocks=100)


class AllocatorMachine(RuleBasedStateMachine):
    """Against a set of free ids."""

    NUM_BLOCKS = 40

    def __init__(self):
        super().__init__()
        self.allocator = SegmentAllocator(self.NUM_BLOCKS)
        self.free = set(range(self.NUM_BLOCKS))
        self.tables: list[list[int]] = []
        self.pins: list[list[int]] = []
        self.generations = [0] * self.NUM_BLOCKS

    def segments(self) -> list[int]:
        lengths, previous = [], None
        for block in sorted(self.free):
            if previous == block - 1:
                lengths[-1] += 1
            else:
                lengths.append(1)
            previous = block
        return sorted(lengths, reverse=True)

    def take(self, block_ids: list[int]) -> None:
        assert len(set(block_ids)) == len(block_ids)
        assert set(block_ids) <= self.free
        self.free -= set(block_ids)

    def settle(self, block_ids: list[int]) -> None:
        pinned = {block for pin in self.pins for block in pin}
        owned = {block for table in self.tables for block in table}
        for block in set(block_ids) - pinned - owned:
            self.free.add(block)
            self.generations[block] += 1

    @rule(n=st.integers(1, 15))
    def allocate(self, n):
        lengths = self.segments()
        block_ids = self.allocator.allocate(n)
        if n > len(self.free):
            assert block_ids is None
            return
        pieces = 1 + sum(b != a + 1 for a, b in zip(block_ids, block_ids[1:], strict=False))
        fewest = next(k for k in range(1, len(lengths) + 1) if sum(lengths[:k]) >= n)
        assert pieces == fewest
        self.take(block_ids)
        self.tables.append(block_ids)

    @precondition(lambda self: self.tables)
    @rule(data=st.data(), n=st.integers(1, 3))
    def grow(self, data, n):
        table = data.draw(st.sampled_from(self.tables))
        follows = table[-1] + 1 in self.free
        highest = max(self.free, default=None)
        block_ids = self.allocator.grow(table[-1], n)
        if n > len(self.free):
            assert block_ids is None
            return
        assert (block_ids[0] == table[-1] + 1) if follows else (highest in block_ids)
        self.take(block_ids)
        table.extend(block_ids)

    @precondition(lambda self: self.tables)
    @rule(data=st.data(), shuffled=st.booleans())
    def release(self, data, shuffled):
        index = data.draw(st.integers(0, len(self.tables) - 1))
        table = self.tables.pop(index)
        for block in set(table) & {block for pin in self.pins for block in pin}:
            self.generations[block] += 1
        self.allocator.free(data.draw(st.permutations(table)) if shuffled else table)
        self.settle(table)

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def pin(self, data):
        table = data.draw(st.sampled_from(self.tables))
        pinned = data.draw(st.lists(st.sampled_from(table), unique=True))
        self.allocator.pin(pinned)
        self.pins.append(pinned)

    @precondition(lambda self: self.pins)
    @rule(data=st.data())
    def unpin(self, data):
        pinned = self.pins.pop(data.draw(st.integers(0, len(self.pins) - 1)))
        self.allocator.unpin(pinned)
        self.settle(pinned)

    @invariant()
    def agrees(self):
        allocator = self.allocator
        allocator.check()
        lengths = self.segments()
        assert allocator.num_free == len(self.free)
        assert allocator.largest_segment == (lengths[0] if lengths else 0)
        assert sum(allocator.free_run_histogram().values()) == len(lengths)
        assert [allocator.generation(b) for b in range(self.NUM_BLOCKS)] == self.generations

    def teardown(self):
        for pinned in self.pins:
            self.allocator.unpin(pinned)
        for table in self.tables:
            self.allocator.free(table)
        self.allocator.check()
        assert self.allocator.free_run_histogram() == {self.NUM_BLOCKS: 1}


TestAllocatorMachine = AllocatorMachine.TestCase
TestAllocatorMachine.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None, derandomize=True
)
