"""Time of one routing decision of the controller over synthetic clusters.

Half of the nodes prefill and half decode, each reports a random load and caches random prefixes,
and links between them have been measured. Prompts are 128 blocks long; one in two continues a
cached prefix. A decision is timed as the dispatcher sees it: prefix look-up, choice, booking, and
log. Beside it `tick` is timed, with the policy's cycle in it, and the choice among copies of one
node (`idle`), where every cost is equal.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from statistics import median
from time import perf_counter_ns
from typing import Any

from flowkv_jax.controller.config import ControllerConfig
from flowkv_jax.controller.controller import Controller
from flowkv_jax.controller.role import Role
from flowkv_jax.controller.routing import RouteQuery
from flowkv_jax.controller.snapshot import NodeInfo, NodeReport
from flowkv_jax.load import NodeLoad
from flowkv_jax.sequence import HandoffReport

_PROMPT_BLOCKS = 128
_BLOCK_SIZE = 16
_CHAINS = 64
_WARMUP = 50
_TICKS = 10
_LIVE_SEQUENCES_PER_NODE = 4


def run_router_benchmark(
    node_counts: Sequence[int] = (1, 10, 100, 1000), iterations: int = 2000, seed: int = 0
) -> dict[str, Any]:
    """Time `Controller.place` and `Controller.tick`.

    Args:
        node_counts: sizes of the clusters; each at least 1.
        iterations: decisions timed at each size.

    Returns:
        for each size under `nodes_<n>`: `median_us` and `p99_us` of a decision in a loaded cluster,
        the same in an idle one (`idle_...`), and `tick_median_us`.

    Raises:
        ValueError: an argument is out of range.
    """
    if iterations < 100:
        raise ValueError(f"{iterations=} must be at least 100")
    if not node_counts or min(node_counts) < 1:
        raise ValueError(f"{node_counts=} must be one or more numbers of at least 1")
    figures: dict[str, Any] = {"iterations": iterations, "seed": seed}
    for num_nodes in node_counts:
        chance = random.Random(seed)
        loaded_us, controller = _sample(num_nodes, iterations, chance, is_idle=False)
        idle_us, _ = _sample(num_nodes, iterations, chance, is_idle=True)
        figures[f"nodes_{num_nodes}"] = {
            "median_us": median(loaded_us),
            "p99_us": _p99(loaded_us),
            "idle_median_us": median(idle_us),
            "idle_p99_us": _p99(idle_us),
            "tick_median_us": median(_time_ticks(controller)),
        }
    return figures


def _p99(samples: Sequence[float]) -> float:
    return samples[int(0.99 * (len(samples) - 1))]


def _sample(
    num_nodes: int, iterations: int, chance: random.Random, *, is_idle: bool
) -> tuple[list[float], Controller]:
    """Microseconds of each decision, ascending, and the controller that made them."""
    chains = [[chance.randbytes(32) for _ in range(_PROMPT_BLOCKS)] for _ in range(_CHAINS)]
    controller = Controller(ControllerConfig())
    names = _join_nodes(controller, num_nodes)
    if not is_idle:
        _report_loads(controller, names, chains, chance)
        _observe_links(controller, names, chance)
    samples_ns, live = [], []
    for index in range(_WARMUP + iterations):
        hashes = tuple(chains[index % _CHAINS]) if index % 2 else (chance.randbytes(32),)
        query = RouteQuery(
            sequence_id=f"sequence-{index}",
            num_tokens=_PROMPT_BLOCKS * _BLOCK_SIZE,
            block_hashes=hashes,
            max_new_tokens=256,
        )
        now_s = 1.0 + index * 1e-3
        begin = perf_counter_ns()
        placement = controller.place(query, now_s)
        samples_ns.append(perf_counter_ns() - begin)
        live.append(placement.booking)
        if len(live) > _LIVE_SEQUENCES_PER_NODE * num_nodes:
            controller.ended(live.pop(0), now_s)
    return sorted(ns / 1e3 for ns in samples_ns[_WARMUP:]), controller


def _join_nodes(controller: Controller, num_nodes: int) -> list[str]:
    names = [f"node-{index:04}" for index in range(num_nodes)]
    for index, name in enumerate(names):
        role = Role.HYBRID if num_nodes == 1 else (Role.PREFILL, Role.DECODE)[index % 2]
        info = NodeInfo(
            name=name,
            role=role,
            num_blocks=8192,
            block_size=_BLOCK_SIZE,
            max_num_seqs=64,
            max_num_batched_tokens=2048,
            host=f"host-{index // 8}",
            block_bytes=2 << 20,
        )
        controller.join(info, 0.0)
    return names


def _report_loads(
    controller: Controller,
    names: Sequence[str],
    chains: Sequence[Sequence[bytes]],
    chance: random.Random,
) -> None:
    for name in names:
        load = NodeLoad(
            num_requests_running=chance.randrange(32),
            num_requests_waiting=chance.randrange(8),
            num_requests_swapped=0,
            num_waiting_tokens=chance.randrange(16_384),
            kv_cache_usage=chance.random(),
            num_blocks=8192,
            num_free_blocks=4096,
            fragmentation=0.1,
            prefix_cache_queries=0,
            prefix_cache_hits=0,
            num_preemptions=0,
            token_budget_used=chance.random(),
        )
        chain = chance.choice(chains)
        report = NodeReport(
            load=load,
            device_utilisation=chance.random(),
            prefill_tokens_per_s=chance.uniform(5_000, 20_000),
            added_blocks=tuple(chain[: chance.randrange(1, _PROMPT_BLOCKS)]),
        )
        controller.report(name, 1, report, 0.5)


def _observe_links(controller: Controller, names: Sequence[str], chance: random.Random) -> None:
    for src in names[::2]:
        for dst in chance.sample(names, min(len(names), 16)):
            if src == dst:
                continue
            seconds = chance.uniform(0.01, 0.1)
            report = HandoffReport(
                src, dst, "Direct", "tcp", 1, 1, 256 << 20, 128, 0, 0.0, seconds, seconds
            )
            controller.moved(0, report, 0.6)


def _time_ticks(controller: Controller) -> list[float]:
    samples = []
    for index in range(_TICKS):
        begin = perf_counter_ns()
        controller.tick(1000.0 + index)
        samples.append((perf_counter_ns() - begin) / 1e3)
    return samples
