"""Transfer middleware: which blocks move, over which path, by which backend.

Useful without the serving runtime. It knows the pool's layout and nothing else of the kernels.
Importing it imports no JAX.
"""

from transfer.alignment import align
from transfer.node_agent import MockNodeAgent, NodeAgent
from transfer.path_selector import PathSelector
from transfer.selector_config import SelectorConfig
from transfer.topology import Topology
from transfer.types import BlockRun, PathDecision, PathType, TransferRequest

__all__ = [
    "BlockRun",
    "MockNodeAgent",
    "NodeAgent",
    "PathDecision",
    "PathSelector",
    "PathType",
    "SelectorConfig",
    "Topology",
    "TransferRequest",
    "align",
]
