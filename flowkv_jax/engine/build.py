"""Builds nodes from a configuration: model, weights, pools, schedulers, runners."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import psutil
from flax import nnx
from jax.sharding import Mesh

from flowkv_jax.config import EngineConfig, RuntimeConfig, cache_dir
from flowkv_jax.engine.batch import BatchBuilder
from flowkv_jax.engine.cache_plan import CachePlan, plan_cache
from flowkv_jax.engine.grammar_cache import GrammarCache
from flowkv_jax.engine.model_runner import ModelRunner
from flowkv_jax.engine.programs import Programs
from flowkv_jax.engine.scheduler import Scheduler
from flowkv_jax.errors import ConfigError
from flowkv_jax.kv_cache.manager import KVCacheManager
from flowkv_jax.kv_cache.pool import KVPool
from flowkv_jax.load import ModelInfo
from flowkv_jax.models.config import LlamaConfig
from flowkv_jax.models.description import ModelDescription, describe
from flowkv_jax.models.llama import Llama
from flowkv_jax.models.source import ModelSource, open_model
from flowkv_jax.models.weights import TENSOR_AXIS, load_weights
from pallas_kernels.kv_layout import KVLayout
from pallas_kernels.paged_attention.api import AttentionSizes, Implementation, choose, unsupported

logger = logging.getLogger(__name__)

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class NodeParts:
    """What one node is made of."""

    runner: ModelRunner
    scheduler: Scheduler
    kv: KVCacheManager
    pool: KVPool


@dataclass(frozen=True)
class BuiltEngine:
    """What an engine, or a worker, is made of. All nodes share the weights and the programs.

    Attributes:
        weights_path: the file or folder that the weights came from.
    """

    nodes: tuple[NodeParts, ...]
    layout: KVLayout
    description: ModelDescription
    model_info: ModelInfo
    grammars: GrammarCache
    weights_path: Path

    @property
    def max_request_tokens(self) -> int:
        """Prompt plus output that a node can hold."""
        return self.nodes[0].scheduler.max_request_tokens


@dataclass(frozen=True)
class _LoadedModel:
    """A model with its weights on the devices, and the memory that is left for the cache.

    Attributes:
        model: abstract; its graph is what gets compiled.
        mesh: None for one device.
        free_bytes: see `plan_cache`.
    """

    config: LlamaConfig
    dtype: np.dtype
    model: Llama
    weights: nnx.State
    mesh: Mesh | None
    is_cpu: bool
    free_bytes: int


def build_engine(
    config: EngineConfig,
    progress: Progress | None = None,
    *,
    num_nodes: int = 1,
    records_prefix_events: bool = False,
) -> BuiltEngine:
    """Load the model and make nodes for it.

    Args:
        progress: called with (weights loaded, weights in all).
        num_nodes: each with a pool of its own, on the same devices.
        records_prefix_events: a controller wants to hear what prefix caches hold.

    Raises:
        NotFoundError, ModelFormatError: the model is missing or broken.
        ConfigError: the configuration does not fit the model or the devices.
    """
    use_compilation_cache(config.runtime)
    with open_model(config.model.model) as source:
        description = describe(source, config.model)
        loaded = _load(source, config, progress)
    layout = KVLayout(
        num_layers=loaded.config.num_layers,
        block_size=config.cache.block_size,
        num_kv_heads=loaded.config.num_kv_heads,
        head_dim=loaded.config.head_dim,
        dtype=loaded.dtype.name,
        dtype_bytes=loaded.dtype.itemsize,
    )
    plan = plan_cache(
        config.cache,
        layout,
        max_num_seqs=config.scheduler.max_num_seqs,
        max_model_len=description.max_model_len,
        free_bytes=loaded.free_bytes // num_nodes,
        is_cpu=loaded.is_cpu,
    )
    logger.info("%s in %s; %s", config.model.model, loaded.dtype.name, plan.describe(layout))
    programs = Programs(loaded.model, loaded.weights, layout.block_size, loaded.mesh)
    model_info = description.info(layout, plan.num_blocks)
    return BuiltEngine(
        nodes=tuple(
            _node_parts(
                config,
                loaded,
                programs,
                layout,
                plan,
                description.max_model_len,
                records_prefix_events=records_prefix_events,
            )
            for _ in range(num_nodes)
        ),
        layout=layout,
        description=description,
        model_info=model_info,
        grammars=GrammarCache.of(description.tokenizer, model_info),
        weights_path=source.path,
    )


def _load(source: ModelSource, config: EngineConfig, progress: Progress | None) -> _LoadedModel:
    devices = _devices(config.runtime, source.config)
    is_cpu = devices[0].platform == "cpu"
    dtype = jnp.dtype(resolve_dtype(config.model.dtype, is_cpu=is_cpu))
    attention = resolve_attention(config, source.config, dtype.name)
    mesh = Mesh(np.array(devices), (TENSOR_AXIS,)) if len(devices) > 1 else None
    # Before the weights come in: afterwards it would depend on how much of them is resident.
    free_bytes = _free_bytes(devices, config, _weight_bytes(source, dtype))
    whole = nnx.eval_shape(lambda: Llama(source.config, dtype))
    weights = load_weights(whole, source.config, source, mesh=mesh, progress=progress)
    model = nnx.eval_shape(
        lambda: Llama(
            source.config,
            dtype,
            # XLA on CPU has no 16-bit arithmetic but matrix products.
            activation_dtype=jnp.dtype("float32") if is_cpu else None,
            axis=None if mesh is None else TENSOR_AXIS,
            attention=attention,
        )
    )
    return _LoadedModel(
        config=source.config,
        dtype=dtype,
        model=model,
        weights=weights,
        mesh=mesh,
        is_cpu=is_cpu,
        free_bytes=free_bytes,
    )


def _node_parts(
    config: EngineConfig,
    loaded: _LoadedModel,
    programs: Programs,
    layout: KVLayout,
    plan: CachePlan,
    max_model_len: int,
    *,
    records_prefix_events: bool,
) -> NodeParts:
    kv = KVCacheManager(
        plan.num_blocks,
        layout.block_size,
        enable_prefix_caching=config.cache.enable_prefix_caching,
        num_swap_blocks=plan.num_swap_blocks,
        record_prefix_events=records_prefix_events,
    )
    scheduler = Scheduler(
        config.scheduler,
        kv,
        max_model_len=max_model_len,
        eos_token_ids=loaded.config.eos_token_ids,
    )
    batches = BatchBuilder(
        config.scheduler.max_num_seqs, layout.blocks_for(max_model_len), kv.block_table
    )
    pool = KVPool(
        layout,
        plan.num_blocks,
        plan.num_swap_blocks,
        mesh=loaded.mesh,
        axis=None if loaded.mesh is None else TENSOR_AXIS,
        generations=kv.generations,
    )
    runner = ModelRunner(
        programs,
        pool,
        batches,
        vocab_size=loaded.config.vocab_size,
        debug=config.runtime.debug,
    )
    return NodeParts(runner, scheduler, kv, pool)


def use_compilation_cache(runtime: RuntimeConfig) -> None:
    """Keep compiled programs on disk between starts. The setting is the process's."""
    folder = runtime.compilation_cache_dir
    if folder == "":
        return
    jax.config.update(
        "jax_compilation_cache_dir", str(cache_dir() / "xla" if folder is None else folder)
    )
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)


def resolve_attention(config: EngineConfig, model: LlamaConfig, dtype: str) -> Implementation:
    """The implementation of paged attention to use.

    Raises:
        ConfigError: the one asked for cannot serve this model here.
    """
    name = config.runtime.attention_implementation
    sizes = AttentionSizes(
        dtype=dtype,
        head_dim=model.head_dim,
        group=model.num_heads // model.num_kv_heads,
        block_size=config.cache.block_size,
    )
    if name == "auto":
        return choose(sizes)
    why_not = unsupported(name, sizes)
    if why_not:
        raise ConfigError(
            f"attention_implementation: {why_not}",
            parameter="attention_implementation",
            value=name,
        )
    return name


def resolve_dtype(dtype: str, *, is_cpu: bool) -> str:
    """The dtype that "auto" stands for. XLA on CPU computes bfloat16 several times slower."""
    if dtype != "auto":
        return dtype
    return "float32" if is_cpu else "bfloat16"


def _devices(runtime: RuntimeConfig, model: LlamaConfig) -> list[jax.Device]:
    size = runtime.tensor_parallel_size
    devices = jax.local_devices()
    if size > len(devices):
        raise ConfigError(
            f"tensor_parallel_size={size} exceeds the {len(devices)} {devices[0].platform} devices"
            " here",
            parameter="tensor_parallel_size",
            value=size,
        )
    for name, count in (
        ("num_key_value_heads", model.num_kv_heads),
        ("intermediate_size", model.intermediate_size),
        ("vocab_size", model.vocab_size),
    ):
        if count % size:
            raise ConfigError(
                f"tensor_parallel_size={size} does not divide the model's {name}={count}",
                parameter="tensor_parallel_size",
                value=size,
            )
    return devices[:size]


def _weight_bytes(source: ModelSource, dtype: np.dtype) -> int:
    return sum(int(np.prod(source.shape(name))) for name in source.names()) * dtype.itemsize


def _free_bytes(devices: list[jax.Device], config: EngineConfig, weight_bytes: int) -> int:
    if devices[0].platform == "cpu":
        return max(0, psutil.virtual_memory().available - weight_bytes)
    stats = devices[0].memory_stats() or {}
    limit_bytes = int(stats.get("bytes_limit", 0))
    usable_bytes = int(config.cache.gpu_memory_utilization * limit_bytes) * len(devices)
    return max(0, usable_bytes - weight_bytes)
