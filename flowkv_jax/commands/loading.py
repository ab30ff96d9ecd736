"""From a configuration to a running engine, with signs of life on the way."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from flowkv_jax.commands import Context
from flowkv_jax.commands.progress import spinner
from flowkv_jax.commands.pull import fetch_if_known
from flowkv_jax.compiling_progress import CompilingProgress
from flowkv_jax.config import EngineConfig, SchedulerConfig

if TYPE_CHECKING:
    from flowkv_jax.engine.engine import Engine

# The pool has room for 2,048 tokens a sequence: four give one prompt 8,192.
_MIN_SEQS = 4


def for_few_requests(config: EngineConfig, num_requests: int) -> EngineConfig:
    """Shrink the default `max_num_seqs`, a server's, so that the pool fits a command."""
    scheduler = config.scheduler
    if scheduler.max_num_seqs != SchedulerConfig().max_num_seqs:
        return config
    scheduler = msgspec.structs.replace(scheduler, max_num_seqs=max(num_requests, _MIN_SEQS))
    return msgspec.structs.replace(config, scheduler=scheduler)


def start_engine(
    config: EngineConfig,
    context: Context,
    *,
    quiet: bool,
    warms_up: bool = False,
    cluster_secret: bytes | None = None,
) -> Engine:
    """The engine for `config`, for the caller to shut down; fetches a known model first.

    Args:
        warms_up: compile every shape that a step may use.
        cluster_secret: see `Engine`.
    """
    fetch_if_known(config.model.model, context, quiet=quiet)
    secret = {} if cluster_secret is None else {"cluster_secret": cluster_secret}
    with spinner(context.stderr, f"Loading {config.model.model}", enabled=not quiet):
        engine = context.engine_factory(config, **secret)
    if warms_up:
        with spinner(context.stderr, "Compiling", enabled=not quiet):
            engine.warmup(CompilingProgress(partial(_say, context)))
    return engine


def _say(context: Context, text: str) -> None:
    print(f"flowkv: {text}", file=context.stderr, flush=True)


@contextmanager
def open_engine(config: EngineConfig, context: Context, *, quiet: bool) -> Iterator[Engine]:
    """`start_engine`, shut down when the block ends."""
    with start_engine(config, context, quiet=quiet) as engine:
        yield engine
