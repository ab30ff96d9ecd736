"""How one transfer becomes calls: FlowKV's three strategies side by side. Imports no JAX.

For B blocks of L layers in R runs (FlowKV, Sec. 3.3; K and V are moved apart layer by layer):

    layer-major per block    L * 2 * B calls    what most engines do: a piece a layer, a block
    block-major per block    B calls            all layers of a block are contiguous
    aligned runs             R calls            blocks contiguous on both sides share a call

Calls are byte ranges of the two pools, so a backend over host memory executes any of them; the
bytes moved are the same, and so is what arrives.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from pallas_kernels.kv_layout import KVLayout
from transfer.types import BlockRun

Calls = npt.NDArray[np.int64]
"""[N, 3]: offset in the source pool, offset in the destination pool, length; all in bytes."""


class Strategy(enum.Enum):
    """Grain of the calls of a transfer."""

    LAYER_MAJOR = "layer-major"
    BLOCK_MAJOR = "block-major"
    ALIGNED_RUNS = "aligned-runs"


def num_calls(strategy: Strategy, num_blocks: int, num_runs: int, num_layers: int) -> int:
    """Calls that the strategy needs; the formulas above."""
    if strategy is Strategy.LAYER_MAJOR:
        return num_layers * 2 * num_blocks
    return num_blocks if strategy is Strategy.BLOCK_MAJOR else num_runs


def calls_of(strategy: Strategy, runs: Sequence[BlockRun], layout: KVLayout) -> Calls:
    """The calls that move `runs`: int64 [N, 3] of (source offset, destination offset, bytes)."""
    block = layout.bytes_per_block
    if len(runs) == 1 and strategy is Strategy.ALIGNED_RUNS:
        src, dst, count = runs[0]
        return np.array([[src * block, dst * block, count * block]], np.int64)
    table = np.asarray(runs, dtype=np.int64).reshape(-1, 3)
    if strategy is Strategy.ALIGNED_RUNS:
        return table * block
    within = np.arange(table[:, 2].sum()) - np.repeat(
        np.cumsum(table[:, 2]) - table[:, 2], table[:, 2]
    )
    starts = (np.repeat(table[:, :2], table[:, 2], axis=0) + within[:, None]) * block
    pieces = layout.num_layers * 2 if strategy is Strategy.LAYER_MAJOR else 1
    piece_bytes = block // pieces
    offsets = np.arange(pieces, dtype=np.int64) * piece_bytes
    calls = np.empty((len(starts), pieces, 3), np.int64)
    calls[:, :, :2] = starts[:, None, :] + offsets[None, :, None]
    calls[:, :, 2] = piece_bytes
    return calls.reshape(-1, 3)


def batches(calls: Calls, max_bytes: int, max_calls: int) -> Iterator[Calls]:
    """The calls, in order, in groups of at most `max_calls`, and `max_bytes` unless it is one call.

    Longer calls are cut into pieces of `max_bytes`.
    """
    if len(calls) == 1 and calls[0, 2] <= max_bytes:
        yield calls
        return
    if calls[:, 2].max() > max_bytes:
        calls = _cut(calls, max_bytes)
    ends = np.cumsum(calls[:, 2])
    start = 0
    while start < len(calls):
        done = ends[start - 1] if start else 0
        stop = int(np.searchsorted(ends, done + max_bytes, "right"))
        stop = min(max(stop, start + 1), start + max_calls)
        yield calls[start:stop]
        start = stop


def _cut(calls: Calls, max_bytes: int) -> Calls:
    pieces = -(-calls[:, 2] // max_bytes)
    first = np.repeat(np.cumsum(pieces) - pieces, pieces)
    offsets = (np.arange(pieces.sum()) - first) * max_bytes
    cut = np.repeat(calls, pieces, axis=0)
    cut[:, :2] += offsets[:, None]
    cut[:, 2] = np.minimum(max_bytes, cut[:, 2] - offsets)
    return cut
