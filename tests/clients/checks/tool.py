"""Programs of a client's environment, run from its check. Standard library only."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from checklist import CheckFailed, surroundings


def program(name: str) -> str:
    """Path of a program that the client's package installed."""
    return str(Path(sys.executable).parent / name)


def run_tool(
    command: list[str], timeout_s: float = 240, environ: dict[str, str] | None = None
) -> str:
    """Run to the end, with more environment variables; what it printed, both streams.

    Raises:
        CheckFailed: the exit status is not 0, or it took too long.
    """
    try:
        done = subprocess.run(
            command,
            cwd=surroundings.scratch,
            env={**os.environ, **(environ or {})},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=timeout_s,
        )
    except subprocess.TimeoutExpired as error:
        raise CheckFailed(f"{command[0]} was not done after {timeout_s:g} s") from error
    output = done.stdout.decode("utf-8", errors="replace")
    if done.returncode != 0:
        print(output)
        tail = " ".join(output.split())[-500:]
        raise CheckFailed(f"{Path(command[0]).name}: exit status {done.returncode}: {tail}")
    return output


@contextlib.contextmanager
def background(command: list[str], log_name: str) -> Iterator[subprocess.Popen[bytes]]:
    """A program that runs meanwhile; its output goes to `log_name` in the scratch folder."""
    with (Path(surroundings.scratch) / log_name).open("wb") as log:
        process = subprocess.Popen(
            command,
            cwd=surroundings.scratch,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
        )
        try:
            yield process
        finally:
            process.send_signal(signal.SIGTERM)
            ends_at = time.monotonic() + 10
            while process.poll() is None and time.monotonic() < ends_at:
                time.sleep(0.05)
            if process.poll() is None:
                os.kill(process.pid, signal.SIGKILL)
                process.wait()
