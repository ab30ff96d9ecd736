"""`flowkv serve` over worker processes. This process computes nothing, and never imports JAX."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from flowkv_jax import __version__
from flowkv_jax.cluster.config import ClusterConfig
from flowkv_jax.cluster.control_plane import ControlPlane
from flowkv_jax.cluster.front import ClusterEngine
from flowkv_jax.cluster.secret import SECRET_VARIABLE, read_secret
from flowkv_jax.commands import Context
from flowkv_jax.commands.pull import fetch_if_known
from flowkv_jax.config import ServeConfig
from flowkv_jax.errors import ConfigError
from flowkv_jax.models.description import ModelDescription, describe
from flowkv_jax.models.source import open_model
from flowkv_jax.worker.command_line import (
    WorkerCommands,
    machine_shares,
    visible_cpus,
    visible_gpus,
)
from flowkv_jax.worker.fingerprint import config_digest, weights_digest
from flowkv_jax.worker.fleet import Fleet
from flowkv_jax.worker.launcher import LocalLauncher
from transfer.connection import Address
from transfer.listener import is_loopback

_SWITCH_INTERVAL_S = 0.0005
_SECRET_BYTES = 16
_GRACE_S = 5.0
"""Beyond `drain_timeout_s`, before a worker that was told to stop is killed."""


@contextmanager
def open_cluster(config: ServeConfig, context: Context) -> Iterator[ClusterEngine]:
    """A cluster as an engine, its workers up; they end with the block.

    Raises:
        ConfigError: the machine lacks what the workers take, or nobody may join as configured.
        NotReady: workers did not come, or could not be started.
        NotFoundError, ModelFormatError: the model is missing or broken.
    """
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    is_spawning = config.cluster.workers != "join"
    secret = _secret(config.cluster, is_spawning=is_spawning)
    num_workers = len(config.engine.nodes.roles)
    shares = machine_shares(config, num_workers, cpus=visible_cpus(), gpus=visible_gpus(os.environ))
    fetch_if_known(config.engine.model.model, context, quiet=False)
    model, wanted = _read_model(config)
    try:
        control = ControlPlane(config, version=__version__, secret=secret, wanted=wanted)
    except OSError as error:
        where = f"{config.cluster.cluster_host}:{config.cluster.cluster_port}"
        raise ConfigError(
            f"workers cannot join at {where}: {error.strerror or error}", parameter="cluster_port"
        ) from error
    fleet = None
    if is_spawning:
        commands = WorkerCommands(config, _from_here(control.membership.address), secret, shares)
        grace_s = config.server.drain_timeout_s + _GRACE_S
        fleet = Fleet(LocalLauncher(commands.command, grace_s=grace_s, output=context.stderr))

    def say(text: str) -> None:
        print(f"flowkv: {text}", file=context.stderr, flush=True)

    engine = ClusterEngine(config, model, control, fleet)
    try:
        if not is_spawning:
            host, port = control.membership.address
            say(f"workers join at {host}:{port}; waiting for {num_workers}")
        engine.wait_until_ready(say)
        yield engine
    finally:
        engine.shutdown()


def _secret(config: ClusterConfig, *, is_spawning: bool) -> bytes:
    """The one that was given, or one that nobody but our own workers learns.

    Raises:
        ConfigError: none was given, and workers may come from elsewhere.
    """
    secret = read_secret(config.cluster_secret_file, os.environ)
    if not secret and not is_loopback(config.cluster_host):
        raise ConfigError(
            f"cluster_host={config.cluster_host!r} without a secret would let anyone join: give one"
            f" with cluster_secret_file or {SECRET_VARIABLE}, or listen on 127.0.0.1",
            parameter="cluster_host",
            value=config.cluster_host,
        )
    if not secret and is_spawning:
        secret = os.urandom(_SECRET_BYTES).hex().encode()
    return secret


def _read_model(config: ServeConfig) -> tuple[ModelDescription, dict[str, object]]:
    """The model, and what workers must be to serve it (`facts.named_facts`)."""
    with open_model(config.engine.model.model) as source:
        wanted: dict[str, object] = {
            "model configuration": config_digest(source.config),
            "weights": weights_digest(source.path),
            "block_size": config.engine.cache.block_size,
        }
        if config.engine.model.dtype != "auto":
            wanted["dtype"] = config.engine.model.dtype
        return describe(source, config.engine.model), wanted


def _from_here(address: Address) -> Address:
    """Where this machine reaches who listens there."""
    everywhere = {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}
    return everywhere.get(address[0], address[0]), address[1]
