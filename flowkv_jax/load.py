"""What a node says of itself: its load, and the model it serves. Plain values, no JAX."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any


@dataclass(frozen=True, slots=True)
class NodeLoad:
    """One node's load at one moment.

    Attributes:
        num_requests_running, num_requests_waiting, num_requests_swapped: queue lengths.
        num_waiting_tokens: prompt tokens queued.
        kv_cache_usage: share of blocks that live requests hold, in [0, 1].
        num_blocks, num_free_blocks: free counts blocks that can be handed out now, including
            cached ones that nobody holds.
        fragmentation: 1 - largest free segment / free blocks; 0 when nothing is free.
        prefix_cache_queries, prefix_cache_hits: tokens asked for and found, since start.
        num_preemptions: since start.
        token_budget_used: share of the step's token budget the last step used, in [0, 1].
        num_requests_sending: prompts computed here whose K/V wait for, or are on, their way out.
        num_requests_receiving: requests that hold blocks for K/V on their way in.
    """

    num_requests_running: int
    num_requests_waiting: int
    num_requests_swapped: int
    num_waiting_tokens: int
    kv_cache_usage: float
    num_blocks: int
    num_free_blocks: int
    fragmentation: float
    prefix_cache_queries: int
    prefix_cache_hits: int
    num_preemptions: int
    token_budget_used: float
    num_requests_sending: int = 0
    num_requests_receiving: int = 0

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def total_load(loads: Sequence[NodeLoad]) -> NodeLoad:
    """Load of several nodes (at least one) as if they were one: counts are added, shares are means,
    and `fragmentation` is that of the worst."""
    if len(loads) == 1:
        return loads[0]
    num_blocks = sum(load.num_blocks for load in loads)
    held = sum(load.kv_cache_usage * load.num_blocks for load in loads)
    sums = {
        name: sum(getattr(load, name) for load in loads)
        for name in (field.name for field in fields(NodeLoad))
        if name not in ("kv_cache_usage", "fragmentation", "token_budget_used")
    }
    return NodeLoad(
        **sums,
        kv_cache_usage=held / num_blocks if num_blocks else 0.0,
        fragmentation=max(load.fragmentation for load in loads),
        token_budget_used=sum(load.token_budget_used for load in loads) / len(loads),
    )


@dataclass(frozen=True, slots=True)
class LinkLoad:
    """How busy the direct way from one node to another is: that of its busiest link.

    Attributes:
        dst: the other node.
        medium: of that link; see `transfer.graph.LinkType`.
        utilisation: in [0, 1]; None where nothing measures it.
        threshold: utilisation above which no path is chosen over the link.
        bytes_per_s: nominal, of the slowest link on the way.
    """

    dst: str
    medium: str
    utilisation: float | None
    threshold: float
    bytes_per_s: float


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """The served model, as clients see it."""

    model: str
    served_model_name: str
    architecture: str
    dtype: str
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    num_blocks: int
    has_chat_template: bool

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)
