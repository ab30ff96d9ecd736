"""flowkv-jax: LLM serving in JAX with a block-major KV cache.

The names below are imported on first use, so that `import flowkv_jax` costs nothing and host-only
processes never load JAX.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flowkv_jax.config import EngineConfig, load_config
    from flowkv_jax.engine.engine import Engine
    from flowkv_jax.outputs import CompletionOutput, RequestOutput
    from flowkv_jax.rpc.client import Client
    from flowkv_jax.sampling_params import RequestOutputKind, SamplingParams

__version__ = "0.1.0"

__all__ = [
    "Client",
    "CompletionOutput",
    "Engine",
    "EngineConfig",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
    "load_config",
]

_HOME = {
    "Client": "flowkv_jax.rpc.client",
    "CompletionOutput": "flowkv_jax.outputs",
    "Engine": "flowkv_jax.engine.engine",
    "EngineConfig": "flowkv_jax.config",
    "RequestOutput": "flowkv_jax.outputs",
    "RequestOutputKind": "flowkv_jax.sampling_params",
    "SamplingParams": "flowkv_jax.sampling_params",
    "load_config": "flowkv_jax.config",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    value = getattr(importlib.import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
