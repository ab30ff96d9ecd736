"""Four CPU devices, strict JAX, and engines on tiny models for every test that wants one."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

# Before JAX is imported anywhere.
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=4"
)
os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import pytest

from flowkv_jax import Engine
from tests.tiny_models import write_tiny_model

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Folder of a tiny random model, by variant; written once."""
    folders: dict[str, Path] = {}

    def tiny(variant: str = "gqa_tied") -> Path:
        if variant not in folders:
            folders[variant] = write_tiny_model(
                tmp_path_factory.mktemp("models") / variant, variant
            )
        return folders[variant]

    return tiny


@pytest.fixture(scope="session")
def xla_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Compiled programs shared by the engines of one test session."""
    return tmp_path_factory.mktemp("xla")


@pytest.fixture
def make_engine(
    tiny_model: Callable[[str], Path], xla_cache: Path
) -> Iterator[Callable[..., Engine]]:
    """Engines on a tiny model, shut down at the end of the test."""
    engines: list[Engine] = []

    def make(variant: str = "gqa_tied", **overrides: object) -> Engine:
        settings: dict[str, object] = {
            "max_num_seqs": 4,
            "max_num_batched_tokens": 128,
            "num_blocks": 64,
            "max_model_len": 512,
            "swap_space_bytes": 1 << 20,
            "compilation_cache_dir": str(xla_cache),
        }
        engine = Engine(str(tiny_model(variant)), **(settings | overrides))
        engines.append(engine)
        return engine

    yield make
    for engine in engines:
        engine.shutdown()
