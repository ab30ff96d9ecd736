"""Transfer middleware: which blocks move, over which path, by which backend.

Useful without the serving runtime. It knows the pool's layout and nothing else of the kernels.
"""

from transfer.alignment import align
from transfer.types import BlockRun

__all__ = ["BlockRun", "align"]
