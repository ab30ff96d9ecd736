"""Block ids for sequences, kept contiguous: FlowKV's segment allocator.

Every block is free, used, or deferred (freed by its owner while a transfer still pins it):

    id      0        4     6            11      14        18
            |  used  | free |    used   | free  | deferred|
                     [4, 6)             [11, 14)

A segment is a maximal free interval [start, end): two segments never touch. Segments are found

    by length  `_by_length`, one sorted list of `length << 32 | start`: the first entry at or above
               `n << 32` is the best fit, the lowest start among equals;
    by edge    `_end_of` and `_start_of`: what coalescing asks, "is there one that starts (ends)
               here", is a dictionary question, so no second order is kept.

Prompts are carved from the low end of their segment. Growth that cannot continue in place takes
blocks from the top of the id range, so that it does not cut up the space where prompts land.

A block's generation number rises when its owner frees it, and again if a pin kept it from coming
free at once: whoever remembers (block, generation) can tell that the block is not the same.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

_FREE, _USED, _DEFERRED = 0, 1, 2
_SHIFT = 32
_START_MASK = (1 << _SHIFT) - 1


class SegmentAllocator:
    """Hands out the block ids [0, num_blocks). Not thread-safe: one owner.

    Args:
        num_blocks: size of the pool; 0 makes an allocator that never has room.
    """

    __slots__ = (
        "_by_length",
        "_end_of",
        "_generations",
        "_highest_free",
        "_num_deferred",
        "_num_free",
        "_pins",
        "_start_of",
        "_state",
        "num_blocks",
    )

    def __init__(self, num_blocks: int) -> None:
        if not 0 <= num_blocks <= _START_MASK:
            raise ValueError(f"{num_blocks=} must be in [0, {_START_MASK}]")
        self.num_blocks = num_blocks
        self._state = bytearray(num_blocks)
        self._generations: npt.NDArray[np.uint64] = np.zeros(num_blocks, np.uint64)
        self._pins: dict[int, int] = {}
        self._num_free = num_blocks
        self._num_deferred = 0
        self._end_of: dict[int, int] = {}
        self._start_of: dict[int, int] = {}
        self._by_length: list[int] = []
        # No free block lies above it; it may itself be used.
        self._highest_free = num_blocks - 1
        if num_blocks:
            self._add_segment(0, num_blocks)

    # Taking blocks

    def allocate(self, num_blocks: int) -> list[int] | None:
        """Ids of `num_blocks` blocks in token order, or None only if fewer are free.

        One piece from the smallest segment that holds them all; failing that, the fewest pieces:
        the largest segments whole, and the best fit for what remains.
        """
        if num_blocks < 0:
            raise ValueError(f"{num_blocks=} must not be negative")
        if num_blocks > self._num_free:
            return None
        if num_blocks == 0:
            return []
        index = bisect_left(self._by_length, num_blocks << _SHIFT)
        if index < len(self._by_length):
            start = self._carve(index, num_blocks)
            return list(range(start, start + num_blocks))
        block_ids: list[int] = []
        missing = num_blocks
        while missing:
            index = bisect_left(self._by_length, missing << _SHIFT)
            if index == len(self._by_length):
                index -= 1
            length = min(missing, self._by_length[index] >> _SHIFT)
            start = self._carve(index, length)
            block_ids.extend(range(start, start + length))
            missing -= length
        return block_ids

    def grow(self, last_block: int, num_blocks: int) -> list[int] | None:
        """`num_blocks` more blocks for a sequence that ends in `last_block`.

        As many as follow `last_block` directly, the rest from the top of the id range. None only
        if fewer than `num_blocks` are free.
        """
        if num_blocks < 0:
            raise ValueError(f"{num_blocks=} must not be negative")
        if num_blocks > self._num_free:
            return None
        block_ids: list[int] = []
        end = self._end_of.get(last_block + 1)
        if end is not None:
            start = last_block + 1
            length = min(num_blocks, end - start)
            self._take_edges(start, end, start, start + length)
            block_ids.extend(range(start, start + length))
        while len(block_ids) < num_blocks:
            block_ids.extend(self._take_top(num_blocks - len(block_ids)))
        return block_ids

    def _take_top(self, num_blocks: int) -> range:
        """The top of the highest segment, at most `num_blocks` of it."""
        end = self._state.rfind(_FREE, 0, self._highest_free + 1) + 1
        start = self._start_of[end]
        taken = max(start, end - num_blocks)
        self._take_edges(start, end, taken, end)
        self._highest_free = taken - 1
        return range(taken, end)

    def _carve(self, index: int, num_blocks: int) -> int:
        """Take the low end of segment `_by_length[index]`; the start of what was taken."""
        key = self._by_length.pop(index)
        start = key & _START_MASK
        end = start + (key >> _SHIFT)
        taken = start + num_blocks
        del self._end_of[start]
        if taken == end:
            del self._start_of[end]
        else:
            self._end_of[taken] = end
            self._start_of[end] = taken
            insort(self._by_length, (end - taken) << _SHIFT | taken)
        self._state[start:taken] = b"\x01" * num_blocks
        self._num_free -= num_blocks
        return start

    def _take_edges(self, start: int, end: int, taken: int, taken_end: int) -> None:
        """Take [taken, taken_end), which shares an edge with its segment [start, end)."""
        self._remove_segment(start, end)
        if start < taken:
            self._add_segment(start, taken)
        if taken_end < end:
            self._add_segment(taken_end, end)
        self._state[taken:taken_end] = b"\x01" * (taken_end - taken)
        self._num_free -= taken_end - taken

    # Giving blocks back

    def free(self, block_ids: Sequence[int]) -> None:
        """Give blocks back, in any order. They coalesce with their neighbours at once.

        A pinned block becomes free only with its last `unpin`.

        Raises:
            RuntimeError: an id is out of range, already free, or given twice. Nothing changes.
        """
        if not block_ids:
            return
        runs = self._used_runs(block_ids)
        if self._pins:
            runs = self._defer_pinned(runs)
        for start, end in runs:
            self._release(start, end)

    def _used_runs(self, block_ids: Sequence[int]) -> list[tuple[int, int]]:
        """Maximal intervals of `block_ids`, each checked to be used."""
        ordered = sorted(block_ids)
        first, last = ordered[0], ordered[-1]
        if first < 0 or last >= self.num_blocks:
            bad = first if first < 0 else last
            raise RuntimeError(f"free of block {bad}, outside [0, {self.num_blocks})")
        runs: list[tuple[int, int]] = []
        if last - first == len(ordered) - 1 and ordered == list(range(first, last + 1)):
            runs.append((first, last + 1))
        else:
            start = previous = first
            for block in ordered[1:]:
                if block != previous + 1:
                    if block == previous:
                        raise RuntimeError(f"double free of block {block}: given twice in one call")
                    runs.append((start, previous + 1))
                    start = block
                previous = block
            runs.append((start, previous + 1))
        for start, end in runs:
            if self._state.count(_USED, start, end) != end - start:
                bad = next(b for b in range(start, end) if self._state[b] != _USED)
                raise RuntimeError(f"double free of block {bad}")
        return runs

    def _defer_pinned(self, runs: list[tuple[int, int]]) -> list[tuple[int, int]]:
        """Mark pinned blocks of `runs` deferred; the intervals that can be freed now."""
        unpinned: list[tuple[int, int]] = []
        for start, end in runs:
            for block in range(start, end):
                if block in self._pins:
                    self._state[block] = _DEFERRED
                    self._generations[block] += 1
                    self._num_deferred += 1
                elif unpinned and unpinned[-1][1] == block:
                    unpinned[-1] = (unpinned[-1][0], block + 1)
                else:
                    unpinned.append((block, block + 1))
        return unpinned

    def _release(self, start: int, end: int) -> None:
        self._state[start:end] = bytes(end - start)
        self._generations[start:end] += 1
        self._num_free += end - start
        if end - 1 > self._highest_free:
            self._highest_free = end - 1
        left = self._start_of.get(start)
        if left is not None:
            self._remove_segment(left, start)
            start = left
        right = self._end_of.get(end)
        if right is not None:
            self._remove_segment(end, right)
            end = right
        self._add_segment(start, end)

    def _add_segment(self, start: int, end: int) -> None:
        self._end_of[start] = end
        self._start_of[end] = start
        insort(self._by_length, (end - start) << _SHIFT | start)

    def _remove_segment(self, start: int, end: int) -> None:
        del self._end_of[start]
        del self._start_of[end]
        del self._by_length[bisect_left(self._by_length, (end - start) << _SHIFT | start)]

    # Transfers

    def generation(self, block: int) -> int:
        """How often `block` has become free."""
        self._require_block(block)
        return int(self._generations[block])

    def generations(self, block_ids: Sequence[int]) -> list[int]:
        """`generation` of each block, in order.

        Raises:
            RuntimeError: an id is out of range.
        """
        if block_ids:
            self._require_block(min(block_ids))
            self._require_block(max(block_ids))
        generations: list[int] = self._generations[np.asarray(block_ids, np.int64)].tolist()
        return generations

    def pin(self, block_ids: Iterable[int]) -> None:
        """Hold blocks for a transfer in flight: none becomes free before its `unpin`. Pins count.

        Raises:
            RuntimeError: an id is out of range, or its block is not used. Nothing changes.
        """
        block_ids = list(block_ids)
        for block in block_ids:
            self._require_block(block)
            if self._state[block] != _USED:
                raise RuntimeError(f"pin of block {block}, which nobody holds")
        for block in block_ids:
            self._pins[block] = self._pins.get(block, 0) + 1

    def unpin(self, block_ids: Iterable[int]) -> None:
        """Undo one `pin`. A block whose owner has freed it meanwhile becomes free.

        Raises:
            RuntimeError: a block has fewer pins than are undone. Nothing changes.
        """
        for block, count in (counts := Counter(block_ids)).items():
            if self._pins.get(block, 0) < count:
                raise RuntimeError(f"unpin of block {block}, which is not pinned")
        for block, count in counts.items():
            if self._pins[block] > count:
                self._pins[block] -= count
                continue
            del self._pins[block]
            if self._state[block] == _DEFERRED:
                self._num_deferred -= 1
                self._release(block, block + 1)

    def _require_block(self, block: int) -> None:
        if not 0 <= block < self.num_blocks:
            raise RuntimeError(f"block {block} is outside [0, {self.num_blocks})")

    # Figures

    @property
    def num_free(self) -> int:
        return self._num_free

    @property
    def num_used(self) -> int:
        """Blocks that are not free, deferred ones included."""
        return self.num_blocks - self._num_free

    @property
    def num_deferred(self) -> int:
        """Blocks whose owner is gone but which a transfer still pins."""
        return self._num_deferred

    @property
    def num_pinned(self) -> int:
        """Blocks that a transfer holds, whoever else does."""
        return len(self._pins)

    @property
    def num_segments(self) -> int:
        return len(self._by_length)

    @property
    def largest_segment(self) -> int:
        """Blocks in the largest segment: the longest prompt that would land in one piece."""
        return self._by_length[-1] >> _SHIFT if self._by_length else 0

    @property
    def fragmentation(self) -> float:
        """1 - largest segment / free blocks, in [0, 1); 0 when nothing is free."""
        return 1 - self.largest_segment / self._num_free if self._num_free else 0.0

    def free_run_histogram(self) -> dict[int, int]:
        """Length of a segment in blocks -> how many there are, by ascending length."""
        return dict(Counter(key >> _SHIFT for key in self._by_length))

    def used_map(self, num_cells: int) -> bytes:
        """The pool in at most `num_cells` equal slices of the id range, the lowest first: the share
        of each that is not free, 0 to 255 (0 and 255 only where that is exact). O(segments).

        May be asked from any thread; what changes meanwhile may be missing.

        Raises:
            ValueError: `num_cells` is below 1.
        """
        if num_cells < 1:
            raise ValueError(f"{num_cells=} must be at least 1")
        num_cells = min(num_cells, self.num_blocks)
        if not num_cells:
            return b""
        keys = np.array(self._by_length.copy(), np.uint64)
        starts = (keys & np.uint64(_START_MASK)).astype(np.int64)
        ends = starts + (keys >> np.uint64(_SHIFT)).astype(np.int64)
        # Free blocks below an edge: those of whole segments before it, and the begun one's.
        order = np.argsort(starts)
        starts, ends = starts[order], ends[order]
        below = np.concatenate([[0], np.cumsum(ends - starts)])
        edges = np.arange(num_cells + 1) * self.num_blocks // num_cells
        num_begun = np.searchsorted(starts, edges)
        free = below[num_begun]
        begun = num_begun > 0
        free[begun] -= np.maximum(ends[num_begun[begun] - 1] - edges[begun], 0)
        size = np.diff(edges)
        used = np.clip(size - np.diff(free), 0, size)
        shares = np.clip(np.rint(used * 255 / size), used > 0, 255 - (used < size))
        return bytes(shares.astype(np.uint8).tolist())

    def is_pinned(self, block: int) -> bool:
        """Whether a transfer holds `block`."""
        return block in self._pins

    def is_used(self, block: int) -> bool:
        """Whether an owner holds `block`."""
        self._require_block(block)
        return self._state[block] == _USED

    def check(self) -> None:
        """Prove the bookkeeping: free + used + deferred == total, no overlap, fully coalesced.

        O(num_blocks). Raises RuntimeError with what is wrong.
        """
        segments = sorted(self._end_of.items())
        _require(
            self._by_length == sorted((e - s) << _SHIFT | s for s, e in segments),
            "by-length order and segments differ",
        )
        _require(
            self._start_of == {end: start for start, end in segments},
            "segment starts and ends differ",
        )
        free_map = bytearray(b"\x01" * self.num_blocks)
        previous_end = -1
        for start, end in segments:
            _require(
                0 <= start < end <= self.num_blocks, f"segment [{start}, {end}) is no interval"
            )
            _require(start > previous_end, f"segment [{start}, {end}) touches the one before")
            free_map[start:end] = bytes(end - start)
            previous_end = end
        _require(free_map == bytes(map(bool, self._state)), "block states and segments differ")
        _require(self._num_free == free_map.count(_FREE), f"num_free={self._num_free} is wrong")
        _require(self._num_deferred == self._state.count(_DEFERRED), "num_deferred is wrong")
        _require(self._highest_free >= free_map.rfind(_FREE), "a free block lies above the top")
        for block in self._pins:
            _require(self._state[block] != _FREE, f"pinned block {block} is free")


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise RuntimeError(f"segment allocator: {message}")
