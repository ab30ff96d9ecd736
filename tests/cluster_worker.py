"""A worker in a process of its own, for tests: a real `Member` around a node that counts.

python -m tests.cluster_worker JSON      the JSON: see `main`; exits as `flowkv` does
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from flowkv_jax.controller.role import Role
from flowkv_jax.errors import ClientError, FlowKVError
from flowkv_jax.worker.launcher import LaunchCommand
from flowkv_jax.worker.member import Member
from flowkv_jax.worker.member_config import MemberConfig
from flowkv_jax.worker.parent_watch import exit_with_parent
from flowkv_jax.worker.stop_signals import stop_on_signals
from tests.cluster_fakes import SECRET, CountingNode, application, node_facts

ROOT = Path(__file__).resolve().parents[1]


def arguments(address: tuple[str, int], **options: Any) -> list[str]:
    """Command line of a worker that joins there."""
    return [
        sys.executable,
        "-m",
        "tests.cluster_worker",
        json.dumps({"address": address, **options}),
    ]


def launch_command(address: tuple[str, int], **options: Any) -> LaunchCommand:
    return LaunchCommand(arguments(address, **options), {"PYTHONPATH": str(ROOT)})


@contextlib.contextmanager
def worker_process(
    address: tuple[str, int], *, command: Sequence[str] = (), **options: Any
) -> Iterator[subprocess.Popen[bytes]]:
    """Killed at the end, if it has not ended. `command` goes in front of its own."""
    process = subprocess.Popen(
        [*command, *arguments(address, **options)],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        assert process.stdin is not None
        process.stdin.close()


def main(
    address: tuple[str, int],
    role: str = "hybrid",
    name: str = "",
    pace_s: float = 0.005,
    drain_timeout_s: float = 30.0,
    version: str | None = None,
    watch_parent: bool = False,
    **config: Any,
) -> int:
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    if watch_parent:
        exit_with_parent()
    told = application(Role(role), name=name, node=node_facts(pid=os.getpid()))
    if version is not None:
        told = application(Role(role), version=version)
    node = CountingNode(pace_s)
    settings = MemberConfig(
        drain_timeout_s=drain_timeout_s, first_backoff_s=0.02, max_backoff_s=0.1, **config
    )
    member = Member(node, (address[0], address[1]), SECRET, told, settings)
    node.deliver = member.deliver
    try:
        with stop_on_signals(member):
            print("left:", member.run(), flush=True)
    except FlowKVError as error:
        print("error:", error, file=sys.stderr, flush=True)
        return 2 if isinstance(error, ClientError) else 1
    finally:
        node.close()
    return 0


if __name__ == "__main__":
    sys.exit(main(**json.loads(sys.argv[1])))
