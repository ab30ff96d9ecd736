"""Everything that is exported, at one moment. Plain values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from flowkv_jax.config import CacheConfig
from flowkv_jax.controller.decision_log import DecisionKind
from flowkv_jax.controller.node_totals import NodeTotals
from flowkv_jax.controller.role import Role
from flowkv_jax.controller.snapshot import ClusterSnapshot
from flowkv_jax.load import ModelInfo
from flowkv_jax.metrics.request_tallies import RequestTallies


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """What an engine is asked for at every scrape.

    Attributes:
        snapshot: the nodes that are there; what is said of others is not exported.
        totals: what these counted since they began, by name.
        requests: our own copy.
        num_decisions: of the controller, by kind.
        role_switches: that were carried out, by role taken.
        num_pending: sequences that no node serves.
        num_waiting_requests, num_waiting_tokens: requests without a first token, and tokens of
            their prompts.
        num_expired_holds: prompts that nodes held for other servers, and nobody came for, by node.
    """

    snapshot: ClusterSnapshot
    totals: Mapping[str, NodeTotals] = field(default_factory=dict)
    requests: RequestTallies = field(default_factory=RequestTallies)
    num_decisions: Mapping[DecisionKind, int] = field(default_factory=dict)
    role_switches: Mapping[Role, int] = field(default_factory=dict)
    num_pending: int = 0
    num_waiting_requests: int = 0
    num_waiting_tokens: int = 0
    num_expired_holds: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """What metrics say of the model and its cache.

    Attributes:
        name: as clients ask for it.
        max_model_len: prompt plus output, in tokens.
        block_size: tokens in a block of the cache.
        cache_facts: more labels of `vllm:cache_config_info`.
    """

    name: str
    max_model_len: int
    block_size: int
    cache_facts: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, info: ModelInfo, cache: CacheConfig) -> ServedModel:
        """A model as it is served, with a cache as it is configured."""
        return cls(
            name=info.served_model_name,
            max_model_len=info.max_model_len,
            block_size=info.block_size,
            cache_facts={
                "cache_dtype": info.dtype,
                "enable_prefix_caching": str(cache.enable_prefix_caching),
                "gpu_memory_utilization": str(cache.gpu_memory_utilization),
            },
        )
