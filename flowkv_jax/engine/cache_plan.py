"""How large the pool and the swap space are. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from flowkv_jax.config import CacheConfig
from flowkv_jax.errors import ConfigError
from pallas_kernels.kv_layout import KVLayout

_CPU_TOKENS_PER_SEQUENCE = 2048
_CPU_SHARE_OF_FREE_MEMORY = 0.25


@dataclass(frozen=True)
class CachePlan:
    """Blocks in the pool and in the swap space."""

    num_blocks: int
    num_swap_blocks: int

    def describe(self, layout: KVLayout) -> str:
        """One line for the log."""
        size_mib = self.num_blocks * layout.bytes_per_block / 2**20
        return (
            f"{self.num_blocks} KV blocks of {layout.block_size} tokens ({size_mib:.0f} MiB),"
            f" {self.num_swap_blocks} swap blocks"
        )


def plan_cache(
    config: CacheConfig,
    layout: KVLayout,
    *,
    max_num_seqs: int,
    max_model_len: int,
    free_bytes: int,
    is_cpu: bool,
) -> CachePlan:
    """Decide the sizes.

    Args:
        free_bytes: memory the pool may be cut from: on CPU the host's available memory, on a GPU
            what `gpu_memory_utilization` leaves beside the weights.

    Raises:
        ConfigError: not even one block fits, or more is asked for than there is memory.
    """
    _require_memory(
        "swap_space_bytes", config.swap_space_bytes, config.swap_space_bytes, free_bytes
    )
    num_swap_blocks = config.swap_space_bytes // layout.bytes_per_block
    if config.num_blocks is not None:
        pool_bytes = config.num_blocks * layout.bytes_per_block
        _require_memory("num_blocks", config.num_blocks, pool_bytes, free_bytes)
        return CachePlan(config.num_blocks, num_swap_blocks)
    if config.kv_cache_memory_bytes is not None:
        size_bytes, parameter = config.kv_cache_memory_bytes, "kv_cache_memory_bytes"
        _require_memory(parameter, size_bytes, size_bytes, free_bytes)
    elif is_cpu:
        tokens = max_num_seqs * min(_CPU_TOKENS_PER_SEQUENCE, max_model_len)
        wanted_bytes = layout.blocks_for(tokens) * layout.bytes_per_block
        size_bytes = min(wanted_bytes, int(_CPU_SHARE_OF_FREE_MEMORY * free_bytes))
        parameter = "kv_cache_memory_bytes"
    else:
        size_bytes, parameter = free_bytes, "gpu_memory_utilization"
    num_blocks = size_bytes // layout.bytes_per_block
    if num_blocks < 1:
        raise ConfigError(
            f"{size_bytes} bytes for the KV cache hold no block of {layout.bytes_per_block} bytes;"
            f" raise {parameter}",
            parameter=parameter,
            value=size_bytes,
        )
    return CachePlan(num_blocks, num_swap_blocks)


def _require_memory(parameter: str, value: int, wanted_bytes: int, free_bytes: int) -> None:
    if wanted_bytes > free_bytes:
        raise ConfigError(
            f"{parameter}={value} asks for {wanted_bytes} bytes; {free_bytes} are free beside the"
            " weights",
            parameter=parameter,
            value=value,
        )
