"""Sizes of the pool and the swap space."""

from __future__ import annotations

import pytest

from flowkv_jax.config import CacheConfig
from flowkv_jax.engine.cache_plan import CachePlan, plan_cache
from flowkv_jax.errors import ConfigError
from pallas_kernels.kv_layout import KVLayout

LAYOUT = KVLayout(
    num_layers=2, block_size=16, num_kv_heads=2, head_dim=8, dtype="float32", dtype_bytes=4
)
BLOCK = LAYOUT.bytes_per_block


def plan(is_cpu: bool = True, free_bytes: int = 10_000 * BLOCK, **settings: object) -> CachePlan:
    config = CacheConfig(**({"swap_space_bytes": 0} | settings))
    return plan_cache(
        config, LAYOUT, max_num_seqs=4, max_model_len=512, free_bytes=free_bytes, is_cpu=is_cpu
    )


def test_sizes():
    assert plan(num_blocks=7) == CachePlan(7, 0)
    assert plan(kv_cache_memory_bytes=5 * BLOCK + 1) == CachePlan(5, 0)
    assert plan(num_blocks=7, swap_space_bytes=3 * BLOCK + 1) == CachePlan(7, 3)
    # On CPU room for every sequence, but at most a quarter of what is free.
    assert plan() == CachePlan(4 * 512 // 16, 0)
    assert plan(free_bytes=40 * BLOCK) == CachePlan(10, 0)
    assert plan(is_cpu=False) == CachePlan(10_000, 0)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kv_cache_memory_bytes": BLOCK - 1}, "hold no block"),
        ({"kv_cache_memory_bytes": 10_001 * BLOCK}, "kv_cache_memory_bytes=.* are free"),
        ({"num_blocks": 10_001}, "num_blocks=10001 asks for"),
        ({"swap_space_bytes": 10_001 * BLOCK}, "swap_space_bytes=.* are free"),
    ],
)
def test_what_does_not_fit(settings: dict, message: str):
    with pytest.raises(ConfigError, match=message):
        plan(**settings)
