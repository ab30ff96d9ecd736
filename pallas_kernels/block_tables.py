"""Checks of block tables on the host, for debug mode and tests. Imports no JAX.

Kernels read the entries in use unchecked: on a GPU a check would cost a branch a token, and an id
outside the pool is always a fault of the host's bookkeeping, which is where it is looked for.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt


def check_block_tables(
    block_tables_RM: npt.NDArray[np.int32],
    kv_lens_R: npt.NDArray[np.int32],
    *,
    num_blocks: int,
    block_size: int,
) -> None:
    """Refuse tables with an id outside the pool among the entries in use.

    Args:
        block_tables_RM: int32[R, M]; entries at or past ceil(kv_len / block_size) may be anything.
        kv_lens_R: int32[R].
        num_blocks: P.
        block_size: Z.

    Raises:
        ValueError: an id outside [0, num_blocks) in use, a length below 0 or beyond the table.
    """
    width = block_tables_RM.shape[1]
    most = width * block_size
    bad_rows = np.flatnonzero((kv_lens_R < 0) | (kv_lens_R > most))
    if bad_rows.size:
        row = int(bad_rows[0])
        raise ValueError(
            f"row {row} has kv_len={int(kv_lens_R[row])}, outside [0, {most}], what a table of "
            f"{width} blocks of {block_size} tokens holds"
        )
    used_R = -(-kv_lens_R // block_size)
    is_used_RM = np.arange(width)[None, :] < used_R[:, None]
    is_outside_RM = (block_tables_RM < 0) | (block_tables_RM >= num_blocks)
    bad = np.argwhere(is_used_RM & is_outside_RM)
    if bad.size:
        row, entry = (int(index) for index in bad[0])
        raise ValueError(
            f"row {row} uses block {int(block_tables_RM[row, entry])} at entry {entry}, outside "
            f"the pool's [0, {num_blocks})"
        )
