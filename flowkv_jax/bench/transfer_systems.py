"""Other systems beside `flowkv bench transfer`: NIXL and Mooncake's transfer engine.

Each runs by itself, in the environment whose interpreter is given, from
`benchmarks/transfer_peers.py`, on the run lists and sizes of ours. Nothing of them is imported
here.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flowkv_jax.errors import ServerError
from transfer.types import BlockRun

SYSTEMS = ("nixl", "mooncake")
_SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "transfer_peers.py"
_TIMEOUT_S = 180.0
_SHOWN_CHARACTERS = 1_000


class SystemFailed(ServerError):
    """Another system could not be measured."""


@dataclass(frozen=True, slots=True)
class System:
    """Another system.

    Attributes:
        name: one of `SYSTEMS`.
        python: interpreter of an environment where it is installed.

    Raises:
        ValueError: unknown name, or no such file.
    """

    name: str
    python: Path

    def __post_init__(self) -> None:
        if self.name not in SYSTEMS:
            raise ValueError(f"unknown system {self.name!r}; there are {', '.join(SYSTEMS)}")
        if not self.python.is_file():
            raise ValueError(f"{self.python}, the interpreter for {self.name}, is no file")
        if not _SCRIPT.is_file():
            raise ValueError(f"measuring {self.name} beside needs a checkout: no {_SCRIPT}")

    @property
    def label(self) -> str:
        """In reports; a backend of ours has the same name as one of them."""
        return f"{self.name} itself"

    @classmethod
    def parse(cls, text: str) -> System:
        """From NAME=PYTHON. Raises `ValueError` for anything else."""
        name, equals, python = text.partition("=")
        if not equals or not python:
            raise ValueError(f"{text!r} is not NAME=PYTHON, such as nixl=/opt/nixl/bin/python")
        return cls(name, Path(python))


@dataclass(frozen=True, slots=True)
class SystemTimes:
    """Seconds of every repetition by case, and the system's version."""

    version: str
    seconds: dict[str, list[float]]


def run_system(
    system: System,
    runs: Mapping[str, Sequence[BlockRun]],
    *,
    block_bytes: int,
    num_blocks: int,
    repeat: int,
    cold: bool,
) -> SystemTimes:
    """Let a system move the runs of every case.

    Args:
        runs: by case.
        block_bytes, num_blocks: of the pools.
        cold: empty the caches before every transfer.

    Raises:
        SystemFailed: it cannot, does not come to an end, or moved wrong bytes.
    """
    task = {
        "block_bytes": block_bytes,
        "num_blocks": num_blocks,
        "repeat": repeat,
        "cold": cold,
        "cases": {case: [list(run) for run in found] for case, found in runs.items()},
    }
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    process = subprocess.Popen(
        [str(system.python), str(_SCRIPT), system.name],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        env=environment,
        process_group=0,
    )
    try:
        output, errors = process.communicate(json.dumps(task), _TIMEOUT_S)
    except subprocess.TimeoutExpired:
        raise SystemFailed(f"{system.name} took more than {_TIMEOUT_S:g} s") from None
    finally:
        # Its second process ends with the first.
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout, process.stderr):
            if pipe is not None:
                pipe.close()
    if process.returncode != 0:
        raise SystemFailed(
            f"{system.name} ended with {process.returncode}: {errors[-_SHOWN_CHARACTERS:].strip()}"
        )
    answer: dict[str, Any] = json.loads(output)
    return SystemTimes(answer["version"], answer["seconds"])
