"""`flowkv serve` and `flowkv worker` as processes, for tests."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from flowkv_jax.rpc.client import Client
from tests.cluster_fakes import wait_for

ROOT = Path(__file__).resolve().parents[1]
READY = re.compile(
    r"flowkv: serving \S+ on (\S+); gRPC on (\S+); workers join at (\S+); nodes: (.*)"
)


def environment(cache: Path, **more: str) -> dict[str, str]:
    """Of a process that finds this package, and compiles into `cache`."""
    kept = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    return {**kept, "PYTHONPATH": str(ROOT), "FLOWKV_CACHE_DIR": str(cache), **more}


@dataclass
class Process:
    """A `flowkv` command whose standard error is kept, line by line."""

    process: subprocess.Popen[str]
    lines: list[str] = field(default_factory=list)

    def said(self, pattern: str) -> re.Match[str]:
        """Wait for a line; fails if the process ends without it."""

        def find() -> re.Match[str] | None:
            ended = self.process.poll() is not None
            for line in list(self.lines):
                if match := re.search(pattern, line):
                    return match
            assert not ended, "\n".join(self.lines)
            return None

        return wait_for(find, pattern)

    def wait(self) -> int:
        return self.process.wait(60)


@contextlib.contextmanager
def flowkv(
    *arguments: str,
    env: Mapping[str, str],
    command: Sequence[str] = (),
    module: str = "flowkv_jax.cli",
) -> Iterator[Process]:
    """Run a command; it is killed at the end if it has not ended."""
    process = subprocess.Popen(
        [*command, sys.executable, "-m", module, *arguments],
        env=dict(env),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    made = Process(process)
    stderr = process.stderr
    assert stderr is not None

    def read() -> None:
        for line in stderr:
            made.lines.append(line.rstrip("\n"))

    reader = threading.Thread(target=read)
    reader.start()
    try:
        yield made
    finally:
        process.kill()
        process.wait()
        reader.join()
        stderr.close()


class Front(Process):
    """A server over workers that is ready."""

    @property
    def address(self) -> str:
        return self.said(READY.pattern)[2]

    @property
    def http_address(self) -> str:
        return self.said(READY.pattern)[1]

    @property
    def controller(self) -> str:
        return self.said(READY.pattern)[3]

    def worker(self, name: str) -> psutil.Process:
        """The process of a worker that the front started."""
        for child in psutil.Process(self.process.pid).children():
            with contextlib.suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
                if f"--name={name}" in child.cmdline():
                    return child
        raise AssertionError(f"no process of {name}")

    def workers(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children()


@contextlib.contextmanager
def serving(*arguments: str, env: Mapping[str, str]) -> Iterator[tuple[Front, Client]]:
    """A server on a free port, with a client. Ends with SIGTERM."""
    with flowkv("serve", "--port=0", "--grpc-port=0", *arguments, env=env) as process:
        front = Front(process.process, process.lines)
        with Client(front.address) as client:
            yield front, client
        front.process.terminate()
        front.wait()
