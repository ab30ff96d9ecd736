"""`flowkv bench allocator`: cost and contiguity of the segment allocator in a churned pool.

The pool first lives through a serving-like past: prompts of mixed length land, grow by single
blocks in interleaved order as decodes do, and end in random order, with the occupancy held at its
target. Then `allocate` and `free` of one request are timed, and the churn goes on between samples,
so that no two samples meet the same free list.
"""

from __future__ import annotations

import random
from statistics import fmean, median
from time import perf_counter_ns
from typing import Any

from flowkv_jax.kv_cache.segment_allocator import SegmentAllocator
from transfer.alignment import align

_PROMPT_BLOCKS = (1, 200)
_GROWTH_BLOCKS = 16
_CHURN_PER_SAMPLE = 1 / 8


def run_allocator_benchmark(
    num_blocks: int = 100_000,
    occupancy: float = 0.8,
    request_blocks: int = 64,
    iterations: int = 5_000,
    seed: int = 0,
) -> dict[str, Any]:
    """Time `allocate(request_blocks)` followed by `free` of the result.

    Args:
        occupancy: share of blocks in use while timing, in (0, 1).
        iterations: samples.

    Returns:
        `median_us` and `p99_us` of one allocate and free together; figures of the free list after
        the churn; `runs_per_request_*`, into how many runs the blocks of `request_blocks`-block
        requests fell (1 is one transfer call).

    Raises:
        ValueError: an argument is out of range.
    """
    if not 0 < occupancy < 1:
        raise ValueError(f"{occupancy=} must be in (0, 1)")
    if not 0 < request_blocks <= num_blocks * (1 - occupancy):
        raise ValueError(
            f"{request_blocks=} must be at least 1 and fit the "
            f"{int(num_blocks * (1 - occupancy))} blocks that stay free"
        )
    if iterations < 1:
        raise ValueError(f"{iterations=} must be at least 1")
    churn = _Churn(SegmentAllocator(num_blocks), int(num_blocks * occupancy), seed)
    mean_request = sum(_PROMPT_BLOCKS) / 2 + _GROWTH_BLOCKS / 2
    churn.run(int(8 * num_blocks / mean_request))
    samples_ns, runs = _sample(churn, request_blocks, iterations)
    samples_ns.sort()
    allocator = churn.allocator
    return {
        "num_blocks": num_blocks,
        "occupancy": occupancy,
        "request_blocks": request_blocks,
        "iterations": iterations,
        "seed": seed,
        "median_us": median(samples_ns) / 1e3,
        "p99_us": samples_ns[int(0.99 * (iterations - 1))] / 1e3,
        "fragmentation": allocator.fragmentation,
        "num_segments": allocator.num_segments,
        "largest_segment_blocks": allocator.largest_segment,
        "mean_segment_blocks": allocator.num_free / max(allocator.num_segments, 1),
        "runs_per_request_mean": fmean(runs),
        "runs_per_request_max": max(runs),
    }


class _Churn:
    """Requests that come, grow and go, at a steady occupancy."""

    def __init__(self, allocator: SegmentAllocator, target_used: int, seed: int) -> None:
        self.allocator = allocator
        self._target_used = target_used
        self._random = random.Random(seed)
        self._tables: list[list[int]] = []

    def run(self, num_ends: int) -> None:
        """Let `num_ends` requests end, each replaced by new ones."""
        for _ in range(num_ends):
            self._fill()
            victim = self._random.randrange(len(self._tables))
            self._tables[victim], self._tables[-1] = self._tables[-1], self._tables[victim]
            self.allocator.free(self._tables.pop())
        self._fill()

    def _fill(self) -> None:
        while self.allocator.num_used < self._target_used:
            room = self._target_used - self.allocator.num_used
            table = self.allocator.allocate(min(room, self._random.randint(*_PROMPT_BLOCKS)))
            if table is None:
                raise RuntimeError("the pool has room and allocate refused")
            self._tables.append(table)
            for _ in range(min(_GROWTH_BLOCKS, self._target_used - self.allocator.num_used)):
                grown = self._random.choice(self._tables)
                grown.extend(self.allocator.grow(grown[-1], 1) or ())


def _sample(churn: _Churn, request_blocks: int, iterations: int) -> tuple[list[int], list[int]]:
    """Nanoseconds of each allocate and free, and the number of runs of some requests."""
    allocator = churn.allocator
    samples_ns: list[int] = []
    runs: list[int] = []
    churn_every = int(1 / _CHURN_PER_SAMPLE)
    for index in range(iterations):
        begin = perf_counter_ns()
        table = allocator.allocate(request_blocks)
        if table is None:
            raise RuntimeError("the pool has room and allocate refused")
        allocator.free(table)
        samples_ns.append(perf_counter_ns() - begin)
        if index % churn_every == 0:
            runs.append(len(align(table, range(request_blocks))))
            churn.run(1)
    return samples_ns, runs
