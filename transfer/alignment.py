"""Two block-id lists in, the fewest transfer calls out.

Block `src_ids[i]` must be copied to block `dst_ids[i]`. That is a set of copies (s, d), and copy
(s + 1, d + 1), if it is in the set, can share a call with (s, d). Destinations are distinct, so
every copy has at most one such successor and at most one predecessor: the copies fall into
chains in exactly one way, and one run a chain is the least possible.

Because only the set counts, id lists that descend together (growth blocks taken from the top of
the pool) give the same run as if they ascended, starting at the smaller ids.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from transfer.types import BlockRun

BlockIds = Sequence[int] | npt.NDArray[np.integer]


def align(src_ids: BlockIds, dst_ids: BlockIds) -> list[BlockRun]:
    """Fewest runs that are contiguous in the source and in the destination.

    Args:
        src_ids: source block of token-order position i. A block may occur more than once.
        dst_ids: destination block of position i, all distinct.

    Returns:
        Runs in ascending order of their destination; empty for empty lists. One NumPy pass when
        destinations already ascend, else one sort.

    Raises:
        ValueError: lengths differ, an id is negative or no integer, or a destination repeats.
    """
    src, dst = _as_ids("src_ids", src_ids), _as_ids("dst_ids", dst_ids)
    if src.size != dst.size:
        raise ValueError(
            f"len(src_ids)={src.size} and len(dst_ids)={dst.size} differ: block i of the source "
            "goes to block i of the destination"
        )
    if src.size == 0:
        return []
    step = np.diff(dst)
    if not (step > 0).all():
        order = np.argsort(dst)
        src, dst = src[order], dst[order]
        step = np.diff(dst)
        repeated = np.flatnonzero(step == 0)
        if repeated.size:
            raise ValueError(
                f"dst_ids repeats block {int(dst[repeated[0]])}: two copies would race"
            )
    breaks = np.flatnonzero((step != 1) | (np.diff(src) != 1)) + 1
    starts = np.concatenate(([0], breaks))
    lengths = np.diff(np.append(starts, src.size))
    return list(map(BlockRun, src[starts].tolist(), dst[starts].tolist(), lengths.tolist()))


def _as_ids(name: str, ids: BlockIds) -> npt.NDArray[np.int64]:
    array = np.asarray(ids)
    if array.size == 0:
        return np.empty(0, np.int64)
    if array.ndim != 1 or not np.issubdtype(array.dtype, np.integer):
        raise ValueError(
            f"{name} must be one list of integers, got shape {array.shape}, dtype {array.dtype}"
        )
    array = array.astype(np.int64, copy=False)
    lowest = int(array.min())
    if lowest < 0:
        raise ValueError(f"{name} holds negative block id {lowest}")
    return array
