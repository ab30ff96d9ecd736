"""`flowkv bench selector`: time of one path decision on a mock host, and how many paths it caches.

Every link has a random load, every pair of GPUs is asked for in turn, and requests may be split.
Between two agent samples a decision compares candidates that were weighed already; the first one
of a pair after a sample weighs them. Both are timed, `same_sample` and `new_sample`. An agent
samples ten times a second, so a loaded system nearly always meets the first. `in_flight` is the
first again, once transfers are observed to end: what was assigned lately shares the links, here
with no end to it but its expiry.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from statistics import median
from time import perf_counter_ns
from typing import Any

from transfer import MockNodeAgent, PathSelector, SelectorConfig, Topology, TransferRequest
from transfer.graph import LinkType

_DATA_BYTES = 64 << 20
_BLOCK_BYTES = 1 << 20
_MAX_LOAD = 0.95
_WARMUP = 200


def run_selector_benchmark(
    num_gpus: int = 8, iterations: int = 20_000, seed: int = 0
) -> dict[str, Any]:
    """Time `PathSelector.select`.

    Args:
        num_gpus: GPUs of the mock host, at least 2.
        iterations: samples of each kind.

    Returns:
        `median_us` and `p99_us` of a decision under a sample that the pair has seen
        (`same_sample`), under one that it has not (`new_sample`), when TTFT-sensitive, and with
        transfers in flight (`in_flight`); the paths of two hosts with as many GPUs each, and the
        time to enumerate one pair's.

    Raises:
        ValueError: an argument is out of range.
    """
    if num_gpus < 2:
        raise ValueError(f"{num_gpus=} must be at least 2")
    if iterations < 100:
        raise ValueError(f"{iterations=} must be at least 100")
    chance = random.Random(seed)
    topology = Topology.make_mock_dgx(num_gpus)
    agent = MockNodeAgent(topology)
    selector = PathSelector(topology, agent, SelectorConfig())
    gpus = topology.gpu_nodes()
    pairs = [(a, b) for a in gpus for b in gpus if a != b]
    chance.shuffle(pairs)

    def requests(ttft_sensitive: bool) -> list[TransferRequest]:
        return [
            TransferRequest(
                a, b, _DATA_BYTES, block_bytes=_BLOCK_BYTES, ttft_sensitive=ttft_sensitive
            )
            for a, b in pairs
        ]

    def load() -> None:
        for link in topology.links:
            if link.link_type is LinkType.NVLINK:
                busy = chance.uniform(0, _MAX_LOAD)
                agent.set_utilization(link.src, link.dst, busy, both_ways=False)

    def touch() -> None:
        agent.set_utilization(gpus[0], gpus[1], chance.uniform(0, _MAX_LOAD), both_ways=False)

    load()
    figures: dict[str, Any] = {"num_gpus": num_gpus, "iterations": iterations, "seed": seed}
    for name, before, ttft_sensitive in (
        ("same_sample", None, False),
        ("new_sample", touch, False),
        ("ttft_sensitive", None, True),
        ("in_flight", None, False),
    ):
        if name == "in_flight":
            selector.observe(pairs[0], 1, 1.0)
        samples_us = _sample(selector, requests(ttft_sensitive), iterations, before)
        figures[f"{name}_median_us"] = median(samples_us)
        figures[f"{name}_p99_us"] = samples_us[int(0.99 * (iterations - 1))]
    return figures | _enumeration(num_gpus)


def _sample(
    selector: PathSelector,
    requests: list[TransferRequest],
    iterations: int,
    before: Callable[[], None] | None,
) -> list[float]:
    """Microseconds of each decision, ascending."""
    samples_ns = []
    for index in range(_WARMUP + iterations):
        request = requests[index % len(requests)]
        if before is not None:
            before()
        begin = perf_counter_ns()
        selector.select(request)
        samples_ns.append(perf_counter_ns() - begin)
    return sorted(ns / 1e3 for ns in samples_ns[_WARMUP:])


def _enumeration(num_gpus: int) -> dict[str, Any]:
    topology = Topology.make_mock_two_hosts(num_gpus)
    begin = perf_counter_ns()
    num_paths = topology.enumerate_all()
    elapsed_us = (perf_counter_ns() - begin) / 1e3
    num_pairs = 2 * num_gpus * (2 * num_gpus - 1)
    return {"cached_paths": num_paths, "enumerate_pair_us": elapsed_us / num_pairs}
