"""The subcommands of `flowkv`, one module each.

A module offers `configure(parser)`, which adds its flags, and `run(args, context) -> int`, which
does the work and returns the exit status. `flowkv_jax.cli` imports a module only when its command
was named, and is the one place that turns errors into exit statuses. What a command touches
outside its arguments comes in as a `Context`, so tests bring their own streams and engine.

Nothing here imports JAX at import time.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from flowkv_jax.commands.progress import PullProgress
from flowkv_jax.config import EngineConfig

if TYPE_CHECKING:
    from flowkv_jax.engine.engine import Engine

EngineFactory = Callable[..., "Engine"]
"""Of an `EngineConfig`, and maybe `cluster_secret`."""
FetchModel = Callable[[str, PullProgress], Path]


def make_engine(config: EngineConfig, *, cluster_secret: bytes | None = None) -> Engine:
    """The real engine. Imports JAX."""
    from flowkv_jax.engine.engine import Engine

    return Engine(config=config, cluster_secret=cluster_secret)


def fetch_model(name: str, progress: PullProgress) -> Path:
    """Bring a known model into the cache folder; returns its file."""
    from flowkv_jax.models.hub import pull

    return pull(name, progress=progress)


@dataclass(frozen=True)
class Context:
    """The world as a command sees it."""

    stdin: TextIO = field(default_factory=lambda: sys.stdin)
    stdout: TextIO = field(default_factory=lambda: sys.stdout)
    stderr: TextIO = field(default_factory=lambda: sys.stderr)
    engine_factory: EngineFactory = make_engine
    fetch_model: FetchModel = fetch_model
