"""`flowkv doctor`: what is here, and what an engine started now would use.

Works with nothing fetched and nothing running. What is wrong is listed last, with what to do about
it, and makes the exit status 1.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

import ml_dtypes  # noqa: F401  (teaches NumPy the name "bfloat16")
import numpy as np

from flowkv_jax import environment
from flowkv_jax.commands import Context
from flowkv_jax.commands.options import add_config_arguments, config_from_args
from flowkv_jax.commands.progress import spinner
from flowkv_jax.config import EngineConfig, cache_dir
from flowkv_jax.engine.cache_plan import plan_cache
from flowkv_jax.errors import ClientError, ConfigError
from flowkv_jax.models import hub
from flowkv_jax.models.config import LlamaConfig
from flowkv_jax.models.source import open_model
from pallas_kernels.kv_layout import KVLayout

_LOW_DISK_BYTES = 1 << 30


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    add_config_arguments(parser, EngineConfig)


def run(args: argparse.Namespace, context: Context) -> int:
    config = config_from_args(args, EngineConfig)
    problems: list[str] = []
    document: dict[str, Any] = {
        "versions": environment.versions(),
        "host": environment.host_facts(),
        "cache": cache_facts(cache_dir(), problems),
    }
    with spinner(context.stderr, "Starting JAX", enabled=not args.json):
        document["device"] = _device_facts(problems)
        document["plan"] = None
        if document["device"] is not None:
            document["plan"] = plan(config, document["device"], document["host"], problems)
    document["problems"] = problems
    if args.json:
        print(json.dumps(document, indent=2), file=context.stdout)
    else:
        _print(document, context.stdout)
    return 1 if problems else 0


def cache_facts(folder: Path, problems: list[str]) -> dict[str, Any]:
    """The cache folder: whether it can be written, what is free, which files are in it."""
    existing = next(parent for parent in (folder, *folder.parents) if parent.exists())
    is_writable = existing.is_dir() and os.access(existing, os.W_OK | os.X_OK)
    free_bytes = shutil.disk_usage(existing).free
    if not is_writable:
        problems.append(f"{existing} cannot be written: set FLOWKV_CACHE_DIR to a folder that can")
    if free_bytes < _LOW_DISK_BYTES:
        problems.append(
            f"{existing} has {_size(free_bytes)} free; a model and its compiled programs want about"
            f" {_size(_LOW_DISK_BYTES)}: set FLOWKV_CACHE_DIR to another disk"
        )
    models = sorted(hub.models_dir().glob("*.gguf"))
    return {
        "folder": str(folder),
        "is_writable": is_writable,
        "free_bytes": free_bytes,
        "models": {str(path): path.stat().st_size for path in models},
    }


def plan(
    config: EngineConfig, device: Mapping[str, Any], host: Mapping[str, Any], problems: list[str]
) -> dict[str, Any]:
    """What an engine would choose, as far as it can be known without loading weights."""
    from flowkv_jax.engine.build import resolve_attention, resolve_dtype

    is_cpu = device["platform"] == "cpu"
    compilation_cache_dir = config.runtime.compilation_cache_dir
    chosen: dict[str, Any] = {
        "model": config.model.model,
        "dtype": resolve_dtype(config.model.dtype, is_cpu=is_cpu),
        "attention_implementation": config.runtime.attention_implementation,
        "tensor_parallel_size": config.runtime.tensor_parallel_size,
        "max_num_seqs": config.scheduler.max_num_seqs,
        "compilation_cache_dir": "in the cache folder"
        if compilation_cache_dir is None
        else compilation_cache_dir or "off",
    }
    if config.runtime.tensor_parallel_size > len(device["devices"]):
        problems.append(
            f"tensor_parallel_size={config.runtime.tensor_parallel_size} exceeds the number of"
            f" devices here, {len(device['devices'])}"
        )
    model = _model_config(config.model.model, problems)
    if model is None:
        return chosen
    dtype = np.dtype(chosen["dtype"])
    try:
        chosen["attention_implementation"] = resolve_attention(config, model, dtype.name)
    except ConfigError as error:
        problems.append(str(error))
    max_model_len = config.model.max_model_len or model.max_position_embeddings
    layout = KVLayout(
        num_layers=model.num_layers,
        block_size=config.cache.block_size,
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        dtype=dtype.name,
        dtype_bytes=dtype.itemsize,
    )
    weight_bytes = dtype.itemsize * sum(map(math.prod, model.tensor_shapes().values()))
    free_bytes = host["memory_available_bytes"] - weight_bytes
    num_blocks = _num_blocks(config, layout, max_model_len, is_cpu, free_bytes, problems)
    return chosen | {
        "max_model_len": max_model_len,
        "weight_bytes": weight_bytes,
        "kv_bytes_per_token": layout.bytes_per_token,
        "num_blocks": num_blocks,
        "pool_bytes": None if num_blocks is None else num_blocks * layout.bytes_per_block,
    }


def _model_config(model: str, problems: list[str]) -> LlamaConfig | None:
    """Shape of the model, without fetching it: None if it is not here or cannot be read."""
    if model in hub.KNOWN_MODELS and not hub.is_present(model):
        return None
    try:
        with open_model(model) as source:
            return source.config
    except ClientError as error:
        problems.append(str(error))
        return None


def _num_blocks(
    config: EngineConfig,
    layout: KVLayout,
    max_model_len: int,
    is_cpu: bool,
    free_bytes: int,
    problems: list[str],
) -> int | None:
    """Blocks of the pool; None where only loading tells: on a GPU, or where none would fit."""
    cache = config.cache
    if not is_cpu and cache.num_blocks is None and cache.kv_cache_memory_bytes is None:
        return None
    try:
        return plan_cache(
            cache,
            layout,
            max_num_seqs=config.scheduler.max_num_seqs,
            max_model_len=max_model_len,
            free_bytes=max(0, free_bytes),
            is_cpu=is_cpu,
        ).num_blocks
    except ClientError as error:
        problems.append(str(error))
        return None


def _device_facts(problems: list[str]) -> dict[str, Any] | None:
    try:
        return environment.device_facts()
    except (ImportError, RuntimeError) as error:
        problems.append(f"JAX finds no device: {error}")
        return None


def _size(num_bytes: int | None) -> str:
    if num_bytes is None:
        return "unknown"
    for unit, shift in (("GiB", 30), ("MiB", 20)):
        if num_bytes >= 1 << shift:
            return f"{num_bytes / (1 << shift):.1f} {unit}"
    return f"{num_bytes} bytes"


def _print(document: Mapping[str, Any], stdout: TextIO) -> None:
    """Sections of "name  value" lines."""
    for title, rows in _sections(document).items():
        print(title, file=stdout)
        width = max(map(len, rows))
        for name, value in rows.items():
            print(f"  {name:<{width}}  {value}", file=stdout)
    problems = document["problems"]
    print("problems" if problems else "no problems found", file=stdout)
    for problem in problems:
        print(f"  {problem}", file=stdout)


def _sections(document: Mapping[str, Any]) -> dict[str, dict[str, str]]:
    host, cache, device = document["host"], document["cache"], document["device"]
    sections = {
        "versions": {name: found or "missing" for name, found in document["versions"].items()},
        "machine": {
            "system": host["platform"],
            "cores": str(host["cores"]),
            "memory": f"{_size(host['memory_available_bytes'])} available of"
            f" {_size(host['memory_total_bytes'])}",
            "load average": " ".join(f"{load:.2f}" for load in host["load_average"]),
        },
        "cache folder": {
            "path": cache["folder"] + ("" if cache["is_writable"] else " (cannot be written)"),
            "free": _size(cache["free_bytes"]),
            **{Path(path).name: _size(size) for path, size in cache["models"].items()},
        },
    }
    if device is not None:
        sections["devices"] = {"platform": device["platform"]} | {
            str(d["id"]): d["kind"] + (f", {_size(d['memory_bytes'])}" if d["memory_bytes"] else "")
            for d in device["devices"]
        }
        sections["an engine would use"] = _plan_rows(document["plan"])
    return sections


def _plan_rows(chosen: Mapping[str, Any]) -> dict[str, str]:
    rows = {name: str(value) for name, value in chosen.items() if not name.endswith("_bytes")}
    if "num_blocks" not in chosen:
        return rows | {"pool": "unknown until the model is here (flowkv pull)"}
    rows["weights"] = _size(chosen["weight_bytes"])
    if chosen["num_blocks"] is None:
        return rows | {"num_blocks": "unknown until the weights are loaded"}
    return rows | {"pool": _size(chosen["pool_bytes"])}
