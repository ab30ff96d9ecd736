"""Which blocks `flowkv bench transfer` moves: run lists on fresh pools and in churned ones.

A churned pool has lived through random operations of the real `SegmentAllocator` at a steady
occupancy: prompts of very different lengths are allocated, requests grow by single blocks as
decoding does, and random ones are freed. Source and destination have different pasts. Imports no
JAX.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any

from flowkv_jax.kv_cache.segment_allocator import SegmentAllocator
from pallas_kernels.kv_layout import KVLayout
from transfer.alignment import align
from transfer.types import BlockRun

FRESH, CHURNED = "fresh", "churned"
PLACEMENTS = (FRESH, CHURNED)

_OPERATIONS_PER_SAMPLE = 16
_GROWTH_SHARE = 0.5
"""Of the operations that take blocks, how many take one for a request that grows."""


@dataclass(frozen=True, slots=True)
class SmallCase:
    """Runs of small blocks, for fixed costs.

    Attributes:
        num_runs: runs, scattered over both pools where it is above 1.
        run_blocks: blocks in each.
    """

    name: str
    num_runs: int
    run_blocks: int


SMALL_LAYOUT = KVLayout(4, 16, 1, 64, "bfloat16", 2)
"""Blocks of 16 KiB."""
SMALL_POOL_BLOCKS = 4096
SMALL_CASES = (
    SmallCase("16 KiB", 1, 1),
    SmallCase("1 MiB", 1, 64),
    SmallCase("16 MiB", 1, 1024),
    SmallCase("64 MiB", 1, 4096),
    SmallCase("1000 x 16 KiB", 1000, 1),
)


@dataclass(frozen=True, slots=True)
class RunsNeeded:
    """Runs into which requests of one length fall in two churned pools.

    Attributes:
        num_tokens, num_blocks: of a request.
        samples: requests looked at.
        mean, p99, largest: runs of a request.
        moved: runs of the one whose bytes are moved.
    """

    num_tokens: int
    num_blocks: int
    samples: int
    mean: float
    p99: int
    largest: int
    moved: int


@dataclass(frozen=True, slots=True)
class Churned:
    """What two churned pools give.

    Attributes:
        runs: by tokens, a request's runs right after the churn.
        needed: figures over many requests, the churn going on between them.
        pools: figures of the two free lists right after the churn.
    """

    runs: dict[int, tuple[BlockRun, ...]]
    needed: tuple[RunsNeeded, ...]
    pools: dict[str, Any]

    def document(self) -> dict[str, Any]:
        """For the JSON report, without the runs themselves."""
        return {"pools": self.pools, "runs_needed": [asdict(n) for n in self.needed]}


def fresh_runs(num_blocks: int) -> tuple[BlockRun, ...]:
    """What an empty allocator on either side gives: one run."""
    tables = [SegmentAllocator(num_blocks).allocate(num_blocks) for _ in range(2)]
    return tuple(align(tables[0] or [], tables[1] or []))


def scattered_runs(case: SmallCase, num_blocks: int, seed: int) -> tuple[BlockRun, ...]:
    """The runs of a small case, in both pools of `num_blocks` blocks.

    Raises:
        ValueError: they do not fit.
    """
    slots = num_blocks // case.run_blocks
    if case.num_runs > slots:
        raise ValueError(f"{case} does not fit a pool of {num_blocks} blocks")
    if case.num_runs == 1:
        return (BlockRun(0, 0, case.run_blocks),)
    chance = random.Random(seed)
    sides = [chance.sample(range(slots), case.num_runs) for _ in range(2)]
    return tuple(
        BlockRun(src * case.run_blocks, dst * case.run_blocks, case.run_blocks)
        for src, dst in zip(*sides, strict=True)
    )


def churn(
    blocks_by_tokens: dict[int, int],
    num_blocks: int,
    *,
    occupancy: float,
    operations: int,
    samples: int,
    seed: int,
) -> Churned:
    """Churn two allocators and ask both for requests of every length.

    Args:
        blocks_by_tokens: tokens of a request -> its blocks.
        num_blocks: of each pool.
        occupancy: share of blocks in use, in (0, 1).
        operations: on each side before anything is asked for.
        samples: requests of each length to look at.

    Raises:
        ValueError: an argument is out of range, or a request does not fit what stays free.
    """
    if not 0 < occupancy < 1:
        raise ValueError(f"{occupancy=} must be in (0, 1)")
    if samples < 1 or operations < 1:
        raise ValueError(f"{samples=} and {operations=} must be at least 1")
    target = int(num_blocks * occupancy)
    longest = max(blocks_by_tokens.values())
    if longest > num_blocks - target:
        raise ValueError(
            f"a request of {longest} blocks does not fit the {num_blocks - target} of {num_blocks} "
            f"blocks that stay free at {occupancy=}"
        )
    sides = [_Churn(num_blocks, target, longest, seed + side) for side in range(2)]
    for side in sides:
        side.run(operations)
    pools = {
        name: {
            "blocks": num_blocks,
            "free_blocks": side.allocator.num_free,
            "free_segments": side.allocator.num_segments,
            "largest_segment_blocks": side.allocator.largest_segment,
        }
        for name, side in zip(("source", "destination"), sides, strict=True)
    }
    runs = {tokens: _ask(sides, blocks) for tokens, blocks in blocks_by_tokens.items()}
    counts: dict[int, list[int]] = {tokens: [] for tokens in blocks_by_tokens}
    for _ in range(samples):
        for tokens, blocks in blocks_by_tokens.items():
            counts[tokens].append(len(_ask(sides, blocks)))
        for side in sides:
            side.run(_OPERATIONS_PER_SAMPLE)
    needed = tuple(
        _figures(tokens, blocks_by_tokens[tokens], sorted(found), len(runs[tokens]))
        for tokens, found in counts.items()
    )
    return Churned(runs, needed, pools)


def _figures(num_tokens: int, num_blocks: int, counts: Sequence[int], moved: int) -> RunsNeeded:
    p99 = counts[min(len(counts) - 1, int(0.99 * len(counts)))]
    return RunsNeeded(
        num_tokens, num_blocks, len(counts), fmean(counts), p99, max(counts[-1], moved), moved
    )


def _ask(sides: Sequence[_Churn], num_blocks: int) -> tuple[BlockRun, ...]:
    """A request's runs; its blocks are given back at once."""
    tables = []
    for side in sides:
        table = side.allocator.allocate(num_blocks)
        if table is None:
            raise RuntimeError("the pool has room and allocate refused")
        tables.append(table)
    for side, table in zip(sides, tables, strict=True):
        side.allocator.free(table)
    return tuple(align(*tables))


class _Churn:
    """Requests that come, grow and go in one pool, at a steady occupancy.

    Lengths are log-uniform between one block and `longest`: as many requests between 10 and 20
    blocks as between 100 and 200.
    """

    def __init__(self, num_blocks: int, target_used: int, longest: int, seed: int) -> None:
        self.allocator = SegmentAllocator(num_blocks)
        self._target_used = target_used
        self._longest = longest
        self._random = random.Random(seed)
        self._tables: list[list[int]] = []
        self._fill()

    def run(self, operations: int) -> None:
        """Allocate, grow or free, that many times; then fill up."""
        for _ in range(operations):
            if not self._room:
                self._go()
            elif self._tables and self._random.random() < _GROWTH_SHARE:
                table = self._random.choice(self._tables)
                table.extend(self.allocator.grow(table[-1], 1) or ())
            else:
                self._come()
        self._fill()

    def _fill(self) -> None:
        while self._room:
            self._come()

    @property
    def _room(self) -> int:
        return self._target_used - self.allocator.num_used

    def _come(self) -> None:
        blocks = round(self._longest ** self._random.random())
        table = self.allocator.allocate(min(self._room, blocks))
        if not table:
            raise RuntimeError("the pool has room and allocate refused")
        self._tables.append(table)

    def _go(self) -> None:
        index = self._random.randrange(len(self._tables))
        self._tables[index], self._tables[-1] = self._tables[-1], self._tables[index]
        self.allocator.free(self._tables.pop())
