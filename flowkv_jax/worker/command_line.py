"""How a front starts its workers: their command lines, their parts of CPUs and GPUs. No JAX."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from flowkv_jax.cluster.config import ClusterConfig, parse_cpus
from flowkv_jax.cluster.secret import SECRET_VARIABLE
from flowkv_jax.config import NodesConfig, ServeConfig, ServerConfig, flat_fields
from flowkv_jax.controller.config import ControllerConfig
from flowkv_jax.controller.role import Role
from flowkv_jax.errors import ConfigError
from flowkv_jax.kv_transfer.config import KVTransferConfig
from flowkv_jax.worker.launcher import LaunchCommand, share_cpus, thread_limits
from transfer.connection import Address

LAUNCHED_VARIABLE = "FLOWKV_LAUNCHED"
"""Set for a worker that is to end with its front."""

WORKER_CLUSTER_SETTINGS = frozenset({"cluster_secret_file", "warmup"})
"""Settings of `ClusterConfig` that a worker obeys."""

_NOT_PASSED_ON = frozenset(
    {
        *NodesConfig.__struct_fields__,
        *ControllerConfig.__struct_fields__,
        *ServerConfig.__struct_fields__,
        *KVTransferConfig.__struct_fields__,
        *(set(ClusterConfig.__struct_fields__) - WORKER_CLUSTER_SETTINGS),
        # The secret goes by the environment: a command line is there for all to read.
        "cluster_secret_file",
    }
)


@dataclass(frozen=True, slots=True)
class Share:
    """What one worker has of the machine. None for all of it."""

    cpus: tuple[int, ...] | None = None
    gpus: tuple[str, ...] | None = None
    gpu_memory_share: float = 1.0


@dataclass(slots=True)
class WorkerCommands:
    """Makes the command lines of one front's workers; `command` is what a `LocalLauncher` wants.

    A worker that is started again gets the same share of the machine.

    Attributes:
        address: where they join.
        shares: dealt out in turn.
    """

    config: ServeConfig
    address: Address
    secret: bytes
    shares: Sequence[Share]
    _share_of: dict[str, Share] = field(default_factory=dict)

    def command(self, role: Role, name: str) -> LaunchCommand:
        if name not in self._share_of:
            self._share_of[name] = self.shares[len(self._share_of) % len(self.shares)]
        share = self._share_of[name]
        argv = [
            sys.executable,
            *("-m", "flowkv_jax.cli", "worker"),
            f"--controller={self.address[0]}:{self.address[1]}",
            f"--role={role.value}",
            f"--name={name}",
            *flags_of(self.config, omit=_NOT_PASSED_ON),
        ]
        environment = {SECRET_VARIABLE: self.secret.decode(), LAUNCHED_VARIABLE: "1"}
        if share.cpus is not None:
            environment |= thread_limits(len(share.cpus))
        if share.gpus is not None:
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(share.gpus)
        if share.gpu_memory_share < 1:
            environment["XLA_PYTHON_CLIENT_MEM_FRACTION"] = f"{share.gpu_memory_share:.3f}"
        return LaunchCommand(argv, environment, share.cpus)


def flags_of(config: ServeConfig, omit: frozenset[str] = frozenset()) -> list[str]:
    """The flags that make `config` of the defaults; see `commands.options`."""
    flags = []
    for name, (path, _) in flat_fields(ServeConfig).items():
        section: Any = config
        for part in path:
            section = getattr(section, part)
        value = getattr(section, name)
        default = next(f.default for f in msgspec.structs.fields(section) if f.name == name)
        if name in omit or value == default:
            continue
        flag = f"--{name.replace('_', '-')}"
        if isinstance(value, bool):
            flags.append(flag if value else flag.replace("--", "--no-", 1))
        elif isinstance(value, tuple | list):
            flags += [f"{flag}={item}" for item in value]
        else:
            flags.append(f"{flag}={'none' if value is None else value}")
    return flags


def machine_shares(
    config: ServeConfig,
    num_workers: int,
    *,
    cpus: Sequence[int],
    gpus: Sequence[str],
) -> list[Share]:
    """A share for each worker.

    Args:
        cpus: this process may run on.
        gpus: as CUDA_VISIBLE_DEVICES names them.

    Raises:
        ConfigError: fewer GPUs than the workers take, or CPUs that are not there.
    """
    if gpus:
        return _gpu_shares(gpus, num_workers, config.engine.runtime.tensor_parallel_size)
    wanted = config.cluster.worker_cpus
    if wanted == "off" or (wanted == "auto" and len(cpus) < num_workers):
        return [Share()] * num_workers
    if wanted != "auto":
        missing = sorted(set(parse_cpus(wanted)) - set(cpus))
        if missing:
            raise ConfigError(
                f"worker_cpus={wanted!r} names CPUs that this process may not run on: {missing}",
                parameter="worker_cpus",
                value=wanted,
            )
        cpus = parse_cpus(wanted)
    return [Share(cpus=share) for share in share_cpus(cpus, num_workers)]


def _gpu_shares(gpus: Sequence[str], num_workers: int, size: int) -> list[Share]:
    """Neighbouring GPUs for each; workers of one GPU may share it."""
    if num_workers * size <= len(gpus):
        return [Share(gpus=tuple(gpus[i * size : (i + 1) * size])) for i in range(num_workers)]
    if size > 1:
        raise ConfigError(
            f"{num_workers} workers of tensor_parallel_size={size} take {num_workers * size} GPUs; "
            f"there are {len(gpus)}",
            parameter="tensor_parallel_size",
            value=size,
        )
    most = -(-num_workers // len(gpus))
    return [
        Share(gpus=(gpus[i % len(gpus)],), gpu_memory_share=0.9 / most) for i in range(num_workers)
    ]


def visible_cpus() -> list[int]:
    """CPUs this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def visible_gpus(
    environ: Mapping[str, str],
    nodes: Callable[[], Sequence[Path]] = lambda: sorted(Path("/dev").glob("nvidia[0-9]*")),
) -> list[str]:
    """GPUs that a worker would see, as CUDA_VISIBLE_DEVICES names them; none where JAX is told to
    use another platform."""
    platforms = environ.get("JAX_PLATFORMS", "")
    if platforms and not {"cuda", "gpu"} & set(platforms.split(",")):
        return []
    listed = environ.get("CUDA_VISIBLE_DEVICES")
    if listed is not None:
        return [gpu.strip() for gpu in listed.split(",") if gpu.strip()]
    return [path.name.removeprefix("nvidia") for path in nodes()]
