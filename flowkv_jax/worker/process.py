"""What `flowkv worker` runs: a node with weights and pool, as a member of a cluster."""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import jax

from flowkv_jax import __version__
from flowkv_jax.cluster.facts import NodeFacts
from flowkv_jax.cluster.messages import PROBE
from flowkv_jax.cluster.secret import wrong_secret
from flowkv_jax.compiling_progress import CompilingProgress
from flowkv_jax.config import EngineConfig
from flowkv_jax.controller.role import Role
from flowkv_jax.engine.build import BuiltEngine, build_engine
from flowkv_jax.engine.profiler import Profiler
from flowkv_jax.engine.transfer_backends import transfer_backends
from flowkv_jax.errors import UnprocessableError
from flowkv_jax.handoff.agent import HandoffAgent
from flowkv_jax.handoff.exchange import Exchange
from flowkv_jax.sampling_params import SamplingParams
from flowkv_jax.worker.application import Application
from flowkv_jax.worker.engine_node import EngineNode, MemberNode
from flowkv_jax.worker.fingerprint import model_facts
from flowkv_jax.worker.member import Member
from flowkv_jax.worker.member_config import MemberConfig
from flowkv_jax.worker.peer_links import PeerLinks
from flowkv_jax.worker.stop_signals import stop_on_signals
from transfer.config import TransferConfig
from transfer.connection import Address, dial
from transfer.errors import AuthenticationFailed, HandshakeMismatch, TransferError
from transfer.host import host_id

logger = logging.getLogger(__name__)

_PROBE_TIMEOUT_S = 5.0
SWITCH_INTERVAL_S = 0.0005
"""How long a thread may keep the interpreter from one that has woken up. Python's own, ten times as
long, is most of a hand-off."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Post:
    """Where a worker serves, and as what.

    Attributes:
        front: where it joins.
        secret: shared with the front and the other workers.
        name: empty for the front to choose.
        listen_host: address of this host at which other workers reach it; 0.0.0.0 for the one it
            reaches the front from.
        relative_speed: of its device, against the others'.
        warms_up: compile every shape first.
    """

    front: Address
    secret: bytes
    role: Role
    name: str = ""
    listen_host: str = "127.0.0.1"
    relative_speed: float = 1.0
    warms_up: bool = True


def run_worker(
    config: EngineConfig, post: Post, member: MemberConfig, say: Callable[[str], None]
) -> str:
    """Load the model, join the front and serve until told to leave; returns why it left. For the
    main thread.

    Args:
        say: told what it is at, for people.

    Raises:
        ConfigError, NotFoundError, ModelFormatError: see `build_engine`.
        UnprocessableError, FrontNotFound, EngineDeadError: see `Member.run`.
    """
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    _prove(post)
    began_s = time.monotonic()
    built = build_engine(config, num_nodes=1, records_prefix_events=True)
    info = built.model_info
    say(
        f"{info.served_model_name} loaded in {time.monotonic() - began_s:.1f} s: {info.dtype}, "
        f"{info.num_blocks} blocks"
    )
    if post.warms_up:
        began_s = time.monotonic()
        default = SamplingParams().with_defaults(built.description.generation_defaults)
        num_shapes = built.nodes[0].runner.warmup(default, CompilingProgress(say))
        say(f"{num_shapes} shapes compiled in {time.monotonic() - began_s:.1f} s")
    transfer = TransferConfig(urgent_readers=True)
    exchange = Exchange(
        transfer,
        secret=post.secret,
        links=config.handoff.handoff_links,
        backends=transfer_backends(transfer, config.handoff.handoff_backend),
    )
    try:
        exchange.transfers.listen(post.listen_host)
        return _serve(config, built, exchange, post, member)
    finally:
        exchange.close()


def _prove(post: Post) -> None:
    """Find out whether the front takes our secret before a model is loaded for nothing.

    Raises:
        UnprocessableError: it does not.
    """
    try:
        dial(
            post.front, post.secret, PROBE, timeout_s=_PROBE_TIMEOUT_S, max_frame_bytes=1024
        ).close()
    except (AuthenticationFailed, HandshakeMismatch) as error:
        raise UnprocessableError(wrong_secret(error)) from None
    except TransferError:
        return  # it is not there yet; who joins tries again


def _serve(
    config: EngineConfig,
    built: BuiltEngine,
    exchange: Exchange,
    post: Post,
    member_config: MemberConfig,
) -> str:
    told = Application(
        version=__version__,
        role=post.role,
        model=model_facts(
            built.description.architecture,
            built.description.config,
            built.weights_path,
            built.layout,
        ),
        node=_node_facts(config, built, exchange, post),
        name=post.name,
    )
    parts = built.nodes[0]
    built.grammars.prepare_soon()
    node = MemberNode(
        post.name or post.role.value,
        parts.runner,
        parts.scheduler,
        parts.kv,
        vocab_size=built.model_info.vocab_size,
        eos_token_ids=built.model_info.eos_token_ids,
        deliver=lambda name, updates: member.deliver(name, updates),
        grammars=built.grammars,
        enable_overlap=config.runtime.enable_overlap,
        is_urgent=True,
        debug=config.runtime.debug,
    )
    links = PeerLinks(exchange, on_unreachable=lambda peer: handoffs.on_lost([peer]))
    handoffs = HandoffAgent(node, links, built.layout, config.handoff)
    node.attach(handoffs)
    profiler = Profiler(config.runtime.profile_dir)
    local = EngineNode(node, handoffs, links, exchange, parts.pool.access, profiler)
    member = Member(local, post.front, post.secret, told, member_config)
    try:
        with stop_on_signals(member):
            return member.run()
    finally:
        local.close()


def _node_facts(
    config: EngineConfig, built: BuiltEngine, exchange: Exchange, post: Post
) -> NodeFacts:
    return NodeFacts(
        num_blocks=built.model_info.num_blocks,
        max_num_seqs=config.scheduler.max_num_seqs,
        max_num_batched_tokens=config.scheduler.max_num_batched_tokens,
        max_request_tokens=built.max_request_tokens,
        tensor_parallel_size=config.runtime.tensor_parallel_size,
        relative_speed=post.relative_speed,
        device_kind=jax.local_devices()[0].device_kind,
        host_id=host_id(),
        pid=os.getpid(),
        transfer_address=exchange.transfers.listen_address,
    )
