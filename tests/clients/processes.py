"""Children of the run: each in a process group of its own, and none outlives the run."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

END_TIMEOUT_S = 30.0


class Child:
    """A process with its descendants. Output goes to a file.

    Args:
        command: program and arguments.
        log: file that stdout and stderr are written to.
    """

    def __init__(
        self, command: Sequence[str], log: Path, *, environ: Mapping[str, str], folder: Path
    ) -> None:
        log.parent.mkdir(parents=True, exist_ok=True)
        self.log = log
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                list(command),
                cwd=folder,
                env=dict(environ),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                # Ctrl-C in the terminal is the run's to handle: it ends its children in order.
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    def poll(self) -> int | None:
        """Exit status, or None while it runs."""
        return self._process.poll()

    def wait(self, timeout_s: float) -> int | None:
        """Exit status, or None if it still runs after `timeout_s`."""
        try:
            return self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None

    def output(self) -> str:
        """What it has written so far."""
        return self.log.read_text(encoding="utf-8", errors="replace")

    def keep_log(self) -> None:
        """Put the log aside, so that the next process of its name does not overwrite it."""
        self.log = self.log.replace(self.log.with_suffix(".ended.log"))

    def end(self) -> None:
        """Ask it to stop, then kill what is left of its group."""
        if self._process.poll() is None:
            self._process.terminate()
            self.wait(END_TIMEOUT_S)
        # Also after a tidy end: what it started and left behind is in the same group.
        for _ in range(50):
            try:
                os.killpg(self._process.pid, signal.SIGKILL)
            except (ProcessLookupError, PermissionError):
                break
            self._process.poll()
            time.sleep(0.02)


def end_all(children: Iterable[Child]) -> None:
    """End several, the last one started first."""
    for child in reversed(list(children)):
        child.end()
