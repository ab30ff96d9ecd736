"""`flowkv serve` as a process of a benchmark, from its ready line to its end."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import psutil

_READY = re.compile(r"serving \S+ on http://(\S+?); gRPC on (\S+?);?(\s|$)")
_START_TIMEOUT_S = 300.0


@dataclass(frozen=True, slots=True)
class Served:
    """A running server.

    Attributes:
        address: HOST:PORT of its gRPC API.
        http_address: likewise of its HTTP API.
        pid: of the front.
    """

    address: str
    http_address: str
    pid: int

    def worker_pids(self, role: str) -> list[int]:
        """Processes of the workers that were started for `role`."""
        children = psutil.Process(self.pid).children(recursive=True)
        found = []
        for child in children:
            with suppress(psutil.NoSuchProcess):
                if f"--role={role}" in child.cmdline():
                    found.append(child.pid)
        return found

    def cpu_seconds(self) -> dict[str, float]:
        """CPU time so far: of the front, and of all workers together."""
        front = psutil.Process(self.pid)
        times = front.cpu_times()
        workers = [child.cpu_times() for child in front.children(recursive=True)]
        return {
            "front": times.user + times.system,
            "workers": sum(worker.user + worker.system for worker in workers),
        }


@contextmanager
def serving(arguments: Sequence[str]) -> Iterator[Served]:
    """Run `flowkv serve` with these flags on a free port; stopped when the block is left.

    Raises:
        RuntimeError: it did not get ready; with the last lines it said.
    """
    process = subprocess.Popen(
        [sys.executable, "-m", "flowkv_jax.cli", "serve", "--port=0", "--grpc-port=0", *arguments],
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
        env=dict(os.environ, PYTHONUNBUFFERED="1"),
    )
    lines: deque[str] = deque(maxlen=30)
    ready = threading.Event()
    addresses: list[str] = []

    def read() -> None:
        assert process.stderr is not None
        for line in process.stderr:
            lines.append(line.rstrip())
            found = _READY.search(line)
            if found and not addresses:
                addresses.extend((found.group(2), found.group(1)))
                ready.set()
        ready.set()

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    try:
        if not ready.wait(_START_TIMEOUT_S) or not addresses:
            raise RuntimeError("flowkv serve did not get ready:\n" + "\n".join(lines))
        yield Served(*addresses, process.pid)
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        reader.join(5)
