"""`flowkv serve`: an engine behind the front doors, HTTP and gRPC, until a signal ends it."""

from __future__ import annotations

import argparse
import asyncio
import gc
import os
import sys
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, Protocol, TextIO

from flowkv_jax.cluster.secret import SECRET_VARIABLE, read_secret
from flowkv_jax.commands import Context
from flowkv_jax.commands.loading import start_engine
from flowkv_jax.commands.options import add_config_arguments, config_from_args
from flowkv_jax.config import EngineConfig, ServeConfig, ServerConfig
from flowkv_jax.errors import ConfigError
from flowkv_jax.kv_transfer.config import KVTransferConfig
from flowkv_jax.metrics.telemetry import sending_traces
from flowkv_jax.rpc.engine_protocol import ServingEngine
from transfer.listener import is_loopback

EXIT_OK, EXIT_ENGINE_DEAD = 0, 1
SWITCH_INTERVAL_S = 0.0005
"""How long a thread may keep the interpreter from one that has woken up: Python's own is most of a
hand-off."""


def configure(parser: argparse.ArgumentParser) -> None:
    add_config_arguments(parser, ServeConfig)
    parser.add_argument(
        "config:model",
        nargs="?",
        default=argparse.SUPPRESS,
        metavar="MODEL",
        help="the same as --model",
    )


def run(args: argparse.Namespace, context: Context) -> int:
    config = config_from_args(args, ServeConfig)
    with sending_traces(config.server.otlp_traces_endpoint):
        return _run_configured(config, context)


def _run_configured(config: ServeConfig, context: Context) -> int:
    if not config.has_workers:
        secret = None
        if config.engine.kv_transfer.kv_role is not None:
            secret = _secret_of_servers(config)
            sys.setswitchinterval(SWITCH_INTERVAL_S)
        engine_factory = partial(
            start_engine,
            context=context,
            quiet=False,
            warms_up=config.cluster.warmup,
            cluster_secret=secret,
        )
        return run_serve(config, engine_factory, out=context.stderr)
    if config.engine.kv_transfer.kv_role is not None:
        raise ConfigError(
            f"kv_role={config.engine.kv_transfer.kv_role}: servers with worker processes exchange "
            "no K/V with other servers; give workers=none, or no kv_role",
            parameter="kv_role",
            value=config.engine.kv_transfer.kv_role,
        )

    from flowkv_jax.commands.serve_cluster import open_cluster

    _check_address(config.server)
    with open_cluster(config, context) as engine:
        where = f"; {engine.description}"
        return _run(_serve(engine, config.server, context.stderr, where))


def _secret_of_servers(config: ServeConfig) -> bytes:
    """What this server shares with those that it exchanges K/V with.

    Raises:
        ConfigError: there is none, and K/V are not for this machine alone.
    """
    secret = read_secret(config.cluster.cluster_secret_file, os.environ)
    host = config.engine.kv_transfer.kv_host
    if not secret and not is_loopback(host):
        raise ConfigError(
            f"kv_host={host!r} without a secret would let anyone have prompts computed: give one"
            f" with cluster_secret_file or {SECRET_VARIABLE}, or listen on 127.0.0.1",
            parameter="kv_host",
            value=host,
        )
    return secret


class OwnedEngine(ServingEngine, Protocol):
    """An engine that ends with the command."""

    def shutdown(self) -> None: ...


def run_serve(
    config: ServeConfig, engine_factory: Callable[[EngineConfig], OwnedEngine], *, out: TextIO
) -> int:
    """Build the engine, serve it, print one line when ready, return after a drain.

    SIGTERM and SIGINT drain, a second one stops at once.

    Args:
        out: where the ready line goes.

    Returns:
        0, or 1 if the engine was dead when the server stopped.

    Raises:
        ConfigError: the server cannot be set up as configured; known before the engine is built,
            unless somebody takes the port meanwhile.
        FlowKVError: the engine cannot be built.
    """
    _check_address(config.server)
    _check_kv_address(config.engine.kv_transfer)
    engine = engine_factory(config.engine)
    try:
        info = engine.kv_transfer_info()
        where = "" if info is None else f"; K/V at {info.host}:{info.port} ({info.role})"
        return _run(_serve(engine, config.server, out, where))
    finally:
        engine.shutdown()


def _check_kv_address(config: KVTransferConfig) -> None:
    from flowkv_jax.rpc.transport import check_address_free

    if config.kv_role is not None:
        check_address_free(f"{config.kv_host}:{config.kv_port}", "kv_port")


def _check_address(config: ServerConfig) -> None:
    from flowkv_jax.rpc.transport import check_addresses_free, listen_settings

    check_addresses_free(listen_settings(config))


def _run(serving: Coroutine[Any, Any, int]) -> int:
    """On uvloop where there is one: it halves what a token's way to its client costs."""
    loop_factory = None
    if sys.platform != "win32":
        import uvloop

        loop_factory = uvloop.new_event_loop
    with asyncio.Runner(loop_factory=loop_factory) as runner:
        return runner.run(serving)


async def _serve(engine: OwnedEngine, config: ServerConfig, out: TextIO, where: str = "") -> int:
    from flowkv_jax.serving import Server

    server = Server(engine, config)
    await server.start()
    server.install_signal_handlers()
    # What is there now stays: the collector need not look through it again and again.
    gc.collect()
    gc.freeze()
    name = engine.model_info().served_model_name
    print(f"flowkv: serving {name}{server.description}{where}", file=out, flush=True)
    await server.wait()
    return EXIT_OK if engine.is_healthy else EXIT_ENGINE_DEAD
