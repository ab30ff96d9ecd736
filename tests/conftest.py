"""Four CPU devices, strict JAX, and engines on tiny models for every test that wants one."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

# Before JAX is imported anywhere.
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=4"
)
os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import psutil
import pytest

from flowkv_jax import Engine
from tests.tiny_models import write_tiny_model

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")


@pytest.fixture(scope="session", autouse=True)
def plain_environment() -> Iterator[None]:
    """What the terminal or the user's shell say does not change a test."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("COLUMNS", "LINES", "FORCE_COLOR", "NO_COLOR", "FLOWKV_API_KEY"):
            patch.delenv(name, raising=False)
        patch.setenv("TERM", "xterm")
        # gRPC asks a proxy for this machine's own addresses too; pip may need it.
        unproxied = os.environ.get("no_proxy") or os.environ.get("NO_PROXY") or ""
        patch.setenv("no_proxy", f"{unproxied},127.0.0.1,localhost,::1".lstrip(","))
        yield


@pytest.fixture(scope="session", autouse=True)
def nothing_stays_behind() -> Iterator[None]:
    """No thread and no child process outlives the tests that made it."""
    yield
    # gRPC's own thread ends with the last of its objects.
    gc.collect()
    for thread in threading.enumerate():
        if thread is not threading.current_thread():
            thread.join(timeout=10)
    assert threading.enumerate() == [threading.current_thread()]
    assert psutil.Process().children(recursive=True) == []


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
            "debug": True,
        }
        engine = Engine(str(tiny_model(variant)), **(settings | overrides))
        engines.append(engine)
        return engine

    yield make
    for engine in engines:
        engine.shutdown()
