"""Nouns of the transfer middleware. Imports no JAX."""

from __future__ import annotations

from typing import NamedTuple


class BlockRun(NamedTuple):
    """`num_blocks` blocks that are contiguous in the source pool and in the destination pool.

    Block `src_start + i` of the source goes to block `dst_start + i` of the destination.
    """

    src_start: int
    dst_start: int
    num_blocks: int
