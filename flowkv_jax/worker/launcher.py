"""Starts and stops worker processes. `Launcher` is what a cluster engine would have to offer;
`LocalLauncher` runs them on this machine. No JAX.

One thread does everything to the processes, for the kernel's "die with my parent" is bound to the
thread that started a child: it starts them, reads what they print, and reaps them; it ends after
the last of them. A child is ended by its own process object only, never by a name or a number
that came from elsewhere, and belongs to a process group of its own, so that Ctrl-C in a terminal
reaches the front alone, which then decides.

A child's standard input is a pipe that nobody writes to: it ends when this process ends, for
workers that watch it where the kernel offers nothing better (`parent_watch`).
"""

from __future__ import annotations

import contextlib
import os
import queue
import selectors
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, TextIO

from flowkv_jax.controller.role import Role
from flowkv_jax.errors import ServerError

_BOOTSTRAP = Path(__file__).with_name("bootstrap.py")
_LAST_LINES = 20
_MAX_LINE_BYTES = 4096
_REAP_S = 0.1
_READ_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class WorkerExit:
    """How a worker ended.

    Attributes:
        status: as `subprocess` gives it: below 0 for a signal.
        last_lines: the last it printed.
    """

    status: int
    last_lines: tuple[str, ...] = ()

    def __str__(self) -> str:
        how = f"exit status {self.status}"
        if self.status < 0:
            with contextlib.suppress(ValueError):
                how = f"killed by {signal.Signals(-self.status).name}"
        return how if not self.last_lines else how + "; it said last:\n  " + "\n  ".join(
            self.last_lines
        )  # fmt: skip


class WorkerHandle(Protocol):
    """A worker that was started."""

    @property
    def name(self) -> str: ...


class Launcher(Protocol):
    """Where workers come from. Any thread may call; only `close` waits for processes to end."""

    def start(self, role: Role, name: str) -> WorkerHandle:
        """Start a worker; it joins by itself.

        Raises:
            ServerError: it cannot be started.
        """
        ...

    def stop(self, handle: WorkerHandle, *, drain: bool) -> None:
        """End it: let it finish what runs, or at once. Idempotent."""
        ...

    def poll(self, handle: WorkerHandle) -> WorkerExit | None:
        """How it ended; None while it runs."""
        ...

    def close(self) -> None:
        """End all workers and wait. Idempotent."""
        ...


@dataclass(frozen=True, slots=True)
class LaunchCommand:
    """How a worker is started.

    Attributes:
        argv: program and arguments.
        environment: added to this process's.
        cpus: it may run on; None for all.
    """

    argv: Sequence[str]
    environment: Mapping[str, str] = field(default_factory=dict)
    cpus: tuple[int, ...] | None = None


def share_cpus(cpus: Sequence[int], num_workers: int) -> list[tuple[int, ...]]:
    """Neighbouring CPUs for each of `num_workers`, as evenly as can be; they share where there are
    fewer CPUs than workers."""
    if num_workers >= len(cpus):
        return [(cpus[index % len(cpus)],) for index in range(num_workers)]
    bounds = [len(cpus) * index // num_workers for index in range(num_workers + 1)]
    return [tuple(cpus[a:b]) for a, b in zip(bounds, bounds[1:], strict=False)]


def thread_limits(num_cpus: int) -> dict[str, str]:
    """Environment for as many threads as a worker has CPUs: what XLA and BLAS read at start."""
    names = ("NPROC", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
    return dict.fromkeys(names, str(num_cpus))


@dataclass(eq=False, slots=True)
class _Child:
    """A process of ours. Only the launcher's thread changes it; `exit` is set once, and last."""

    name: str
    process: subprocess.Popen[bytes]
    lines: deque[str]
    tail: bytes = b""
    kill_at_s: float | None = None
    exit: WorkerExit | None = None


class LocalLauncher:
    """Workers as processes of this machine.

    Args:
        command: (role, name) -> how to start it.
        grace_s: how long a worker that was told to stop may take, before it is killed.
        close_grace_s: the same in `close`, when nothing runs any more.
        output: where what they print goes, each line with the worker's name in front.
    """

    def __init__(
        self,
        command: Callable[[Role, str], LaunchCommand],
        *,
        grace_s: float = 35.0,
        close_grace_s: float = 5.0,
        output: TextIO | None = None,
    ) -> None:
        self._command = command
        self._grace_s = grace_s
        self._close_grace_s = min(close_grace_s, grace_s)
        self._output = output
        self._tasks: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._children: list[_Child] = []
        self._selector = selectors.DefaultSelector()
        self._wake_read, self._wake_write = os.pipe()
        self._selector.register(self._wake_read, selectors.EVENT_READ, None)
        self._lock = threading.Lock()
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, name="flowkv-launcher")
        self._thread.start()

    def start(self, role: Role, name: str) -> WorkerHandle:
        """See `Launcher.start`."""
        command = self._command(role, name)
        future: Future[_Child] = Future()

        def spawn() -> None:
            try:
                future.set_result(self._spawn(name, command))
            except Exception as error:
                future.set_exception(ServerError(f"cannot start worker {name}: {error}"))

        if not self._post(spawn):
            raise ServerError(f"cannot start worker {name}: the launcher is closed")
        return future.result()

    def stop(self, handle: WorkerHandle, *, drain: bool) -> None:
        """See `Launcher.stop`."""
        self._post(lambda: self._stop(_child(handle), drain=drain))

    def poll(self, handle: WorkerHandle) -> WorkerExit | None:
        """See `Launcher.poll`."""
        return _child(handle).exit

    def pid(self, handle: WorkerHandle) -> int:
        """Of its process; for those who show it."""
        return _child(handle).process.pid

    def close(self) -> None:
        """See `Launcher.close`: SIGTERM, and SIGKILL for those that take longer."""

        def stop_all() -> None:
            for child in self._children:
                self._stop(child, drain=True)
                child.kill_at_s = time.monotonic() + self._close_grace_s

        self._post(stop_all, closes=True)
        self._thread.join()

    def _post(self, task: Callable[[], None], *, closes: bool = False) -> bool:
        with self._lock:
            if self._is_closing:
                return False
            self._is_closing = closes
            self._tasks.put(task)
            os.write(self._wake_write, b"\0")
        return True

    # The launcher's thread

    def _run(self) -> None:
        try:
            while not self._is_closing or self._children or not self._tasks.empty():
                for key, _ in self._selector.select(_REAP_S if self._children else None):
                    if key.data is None:
                        os.read(self._wake_read, 4096)
                    else:
                        self._read(key.data)
                while not self._tasks.empty():
                    self._tasks.get()()
                for child in list(self._children):
                    self._watch(child)
        finally:
            for child in self._children:  # only after an error of ours
                child.process.kill()
                child.process.wait()
            self._selector.close()
            os.close(self._wake_read)
            with self._lock:
                self._is_closing = True
                os.close(self._wake_write)

    def _spawn(self, name: str, command: LaunchCommand) -> _Child:
        cpus = ",".join(map(str, command.cpus or ()))
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", str(_BOOTSTRAP), str(os.getpid()), cpus, *command.argv],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={**os.environ, **command.environment},
            process_group=0,
        )
        child = _Child(name, process, deque(maxlen=_LAST_LINES))
        assert process.stdout is not None
        os.set_blocking(process.stdout.fileno(), False)
        self._selector.register(process.stdout, selectors.EVENT_READ, child)
        self._children.append(child)
        return child

    def _stop(self, child: _Child, *, drain: bool) -> None:
        if child.exit is not None:
            return
        if not drain:
            child.process.kill()
        elif child.kill_at_s is None:
            child.kill_at_s = time.monotonic() + self._grace_s
            child.process.terminate()

    def _watch(self, child: _Child) -> None:
        if child.process.poll() is not None:
            # What it printed last; a grandchild may hold the pipe open, so its end is not awaited.
            self._read(child)
            self._bury(child)
        elif child.kill_at_s is not None and time.monotonic() > child.kill_at_s:
            child.process.kill()

    def _bury(self, child: _Child) -> None:
        if child.tail:
            self._say(child, child.tail)
        self._children.remove(child)
        for stream in (child.process.stdout, child.process.stdin):
            assert stream is not None
            if stream.fileno() in self._selector.get_map():
                self._selector.unregister(stream)
            with contextlib.suppress(OSError):
                stream.close()
        child.exit = WorkerExit(child.process.returncode, tuple(child.lines))

    def _read(self, child: _Child) -> None:
        stream = child.process.stdout
        assert stream is not None
        while True:
            try:
                data = os.read(stream.fileno(), _READ_BYTES)
            except BlockingIOError:
                return
            if not data:
                with contextlib.suppress(KeyError):
                    self._selector.unregister(stream)
                return
            *lines, child.tail = (child.tail + data).split(b"\n")
            for line in lines:
                self._say(child, line)
            if len(child.tail) > _MAX_LINE_BYTES:
                self._say(child, child.tail)
                child.tail = b""

    def _say(self, child: _Child, line: bytes) -> None:
        text = line[:_MAX_LINE_BYTES].decode("utf-8", errors="replace").rstrip()
        child.lines.append(text)
        # What nobody can read any more (a closed terminal) must not end the workers.
        with contextlib.suppress(OSError, ValueError):
            print(f"{child.name} | {text}", file=self._output or sys.stderr, flush=True)


def _child(handle: WorkerHandle) -> _Child:
    if not isinstance(handle, _Child):
        raise TypeError(f"{handle!r} was not started by a local launcher")
    return handle
