"""`flowkv worker`: one node of a cluster, in this process, until it is told to leave."""

from __future__ import annotations

import argparse
import logging
import os
from typing import TextIO

from flowkv_jax.cluster.config import ClusterConfig
from flowkv_jax.cluster.secret import read_secret
from flowkv_jax.commands import Context
from flowkv_jax.commands.options import add_config_arguments, config_from_args
from flowkv_jax.config import NodesConfig, ServeConfig, ServerConfig
from flowkv_jax.controller.config import ControllerConfig
from flowkv_jax.controller.role import Role
from flowkv_jax.kv_transfer.config import KVTransferConfig
from flowkv_jax.worker.command_line import LAUNCHED_VARIABLE, WORKER_CLUSTER_SETTINGS
from transfer.connection import Address
from transfer.listener import is_loopback

OMIT = frozenset(
    {
        *NodesConfig.__struct_fields__,
        *ControllerConfig.__struct_fields__,
        *ServerConfig.__struct_fields__,
        *KVTransferConfig.__struct_fields__,
        *(set(ClusterConfig.__struct_fields__) - WORKER_CLUSTER_SETTINGS),
    }
)
"""Settings of the front. They may stand in the configuration file, so that one serves both."""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--controller",
        required=True,
        type=parse_address,
        metavar="HOST:PORT",
        help="where `flowkv serve` lets workers join; its ready line says so",
    )
    parser.add_argument(
        "--role",
        choices=[role.value for role in Role],
        default=Role.HYBRID.value,
        help="what it does at first (default: hybrid); the controller may change it",
    )
    parser.add_argument("--name", default="", help="unique in the cluster; else the front chooses")
    parser.add_argument(
        "--listen-host",
        metavar="ADDRESS",
        help="where other workers reach this one; default: where it reaches the controller from",
    )
    parser.add_argument(
        "--relative-speed",
        type=float,
        default=1.0,
        metavar="X",
        help="of its device, against the other workers' (default: 1)",
    )
    parser.add_argument(
        "--join-timeout-s",
        type=float,
        default=60.0,
        metavar="X",
        help="how long to look for the controller at first (default: 60); once it has been a"
        " member it looks for ever",
    )
    add_config_arguments(parser, ServeConfig, omit=OMIT)


def run(args: argparse.Namespace, context: Context) -> int:
    from flowkv_jax.worker.member_config import MemberConfig
    from flowkv_jax.worker.parent_watch import exit_with_parent

    if LAUNCHED_VARIABLE in os.environ:
        exit_with_parent()
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(message)s")
    config = config_from_args(args, ServeConfig)
    secret = read_secret(config.cluster.cluster_secret_file, os.environ)
    is_local = is_loopback(args.controller[0])
    member = MemberConfig(join_timeout_s=args.join_timeout_s)

    from flowkv_jax.worker.process import Post, run_worker  # imports JAX

    post = Post(
        front=args.controller,
        secret=secret,
        role=Role(args.role),
        name=args.name,
        listen_host=args.listen_host or ("127.0.0.1" if is_local else "0.0.0.0"),
        relative_speed=args.relative_speed,
        warms_up=config.cluster.warmup,
    )
    reason = run_worker(config.engine, post, member, lambda text: _say(text, context.stderr))
    _say(f"left: {reason}", context.stderr)
    return 0


def parse_address(text: str) -> Address:
    """(host, port) of "HOST:PORT"; IPv6 addresses may stand in brackets.

    Raises:
        argparse.ArgumentTypeError: it is none.
    """
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise argparse.ArgumentTypeError(f"{text!r} must be HOST:PORT")
    return host.removeprefix("[").removesuffix("]"), int(port)


def _say(text: str, stderr: TextIO) -> None:
    print(f"flowkv worker: {text}", file=stderr, flush=True)
