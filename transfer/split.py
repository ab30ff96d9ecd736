"""Dividing runs of blocks among paths. Pure.

Each path gets the whole number of blocks that makes the slowest of them finish earliest. Runs are
then dealt out longest first, each to the path with the most of its blocks still to come; a run is
cut, between two blocks, where it exceeds that. So n paths add at most n - 1 runs to those there
were, and the set of block copies stays what it was.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence

from transfer.types import BlockRun


def shares(num_blocks: int, rates: Sequence[float]) -> list[int]:
    """Blocks for each path: whole numbers that minimise the largest `blocks / rate`.

    Args:
        rates: of the paths, in any one unit.

    Raises:
        ValueError: `num_blocks` is negative, there are no rates, or one is not above 0 and finite.
    """
    if num_blocks < 0:
        raise ValueError(f"{num_blocks=} must not be negative")
    if not rates or not all(0 < rate < math.inf for rate in rates):
        raise ValueError(f"{rates=} must be one or more finite numbers above 0")
    total = math.fsum(rates)
    # No path gets fewer than its exact share rounded down, and what that leaves over is less
    # than a block a path. The epsilon is for shares that floating point puts above the truth.
    counts = [max(int(num_blocks * (rate / total) - 1e-9), 0) for rate in rates]
    for _ in range(num_blocks - sum(counts)):
        chosen = min(range(len(rates)), key=lambda i: (counts[i] + 1) / rates[i])
        counts[chosen] += 1
    return counts


def split_runs(runs: Sequence[BlockRun], rates: Sequence[float]) -> list[tuple[BlockRun, ...]]:
    """Runs for each path, in ascending order of their destination; empty where a path has none.

    Raises:
        ValueError: as `shares`, or a run has no block.
    """
    for run in runs:
        if run.num_blocks < 1:
            raise ValueError(f"{run} has no block")
    counts = shares(sum(run.num_blocks for run in runs), rates)
    parts: list[list[BlockRun]] = [[] for _ in rates]
    missing = [(-count, path) for path, count in enumerate(counts) if count]
    heapq.heapify(missing)
    waiting = [(-run.num_blocks, run) for run in runs]
    heapq.heapify(waiting)
    while waiting:
        _, run = heapq.heappop(waiting)
        needed, path = missing[0]
        taken = min(run.num_blocks, -needed)
        parts[path].append(run._replace(num_blocks=taken))
        if -needed == taken:
            heapq.heappop(missing)
        else:
            heapq.heapreplace(missing, (needed + taken, path))
        left = run.num_blocks - taken
        if left:
            rest = BlockRun(run.src_start + taken, run.dst_start + taken, left)
            heapq.heappush(waiting, (-left, rest))
    return [tuple(sorted(part, key=lambda run: run.dst_start)) for part in parts]


def split_bytes(data_bytes: int, block_bytes: int, rates: Sequence[float]) -> list[int]:
    """Bytes for each path, whole blocks; the last, incomplete block goes with a path's last.

    Raises:
        ValueError: as `shares`, or a size is below 1.
    """
    if data_bytes < 1 or block_bytes < 1:
        raise ValueError(f"{data_bytes=} and {block_bytes=} must be at least 1")
    num_blocks = -(-data_bytes // block_bytes)
    sizes = [count * block_bytes for count in shares(num_blocks, rates)]
    last = max(i for i, size in enumerate(sizes) if size)
    sizes[last] -= num_blocks * block_bytes - data_bytes
    return sizes
