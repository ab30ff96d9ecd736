"""How `flowkv serve` runs nodes in processes of their own."""

from __future__ import annotations

import re
from typing import Literal

from flowkv_jax.config_section import Section
from flowkv_jax.errors import ConfigError

WorkerSource = Literal["auto", "spawn", "join", "none"]

_MAX_PORT = 65535


class ClusterConfig(Section, frozen=True, kw_only=True):
    """Nodes in processes of their own.

    Attributes:
        workers: where nodes run: spawn (worker processes that this command starts, and starts
            again), join (workers that are started elsewhere, by `flowkv worker`; as many are waited
            for as nodes are asked for), none (this very process), or auto: spawn where more than
            one node is asked for, else none.
        cluster_host, cluster_port: where workers join; port 0 takes a free one.
        cluster_secret_file: file with the secret that front and workers share; else the environment
            variable FLOWKV_CLUSTER_SECRET. Needed where cluster_host is no loopback address.
        lease_s: silence after which a worker is lost; its requests go on elsewhere.
        heartbeat_s: how often workers report; at most a third of the lease.
        worker_cpus: CPUs that spawned workers share among them, such as 0,2-3: each keeps to its
            part; off leaves them all, auto takes all where no GPU is used and each worker gets one.
        start_timeout_s: how long spawned workers may take to load the model and join; and how long
            requests wait for workers that join by themselves, once none is there.
        warmup: compile every shape that a step may use before a node serves.
    """

    workers: WorkerSource = "auto"
    cluster_host: str = "127.0.0.1"
    cluster_port: int = 0
    cluster_secret_file: str | None = None
    lease_s: float = 3.0
    heartbeat_s: float = 0.1
    worker_cpus: str = "auto"
    start_timeout_s: float = 600.0
    warmup: bool = True

    def __post_init__(self) -> None:
        self.require_positive("lease_s", "heartbeat_s", "start_timeout_s")
        if not 0 <= self.cluster_port <= _MAX_PORT:
            raise ConfigError(
                f"cluster_port={self.cluster_port} must be in [0, {_MAX_PORT}]",
                parameter="cluster_port",
                value=self.cluster_port,
            )
        if self.heartbeat_s > self.lease_s / 3:
            raise ConfigError(
                f"heartbeat_s={self.heartbeat_s} must be at most a third of lease_s={self.lease_s}",
                parameter="heartbeat_s",
                value=self.heartbeat_s,
            )
        if self.worker_cpus not in ("auto", "off"):
            parse_cpus(self.worker_cpus)


def parse_cpus(text: str) -> list[int]:
    """CPU numbers from a list such as "0,2-3", in order.

    Raises:
        ConfigError: it is none.
    """
    cpus: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d{1,5})(?:-(\d{1,5}))?\s*", part)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if first > last:
            raise ConfigError(
                f"worker_cpus={text!r} must be auto, off, or a list such as 0,2-3",
                parameter="worker_cpus",
                value=text,
            )
        cpus += range(first, last + 1)
    return sorted(set(cpus))
