"""The two processes of `flowkv bench transfer`, as the one that measures sees them."""

from __future__ import annotations

import json
import os
import secrets
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec

import flowkv_jax
from flowkv_jax.bench.transfer_peer import PoolSetup, Setup
from flowkv_jax.errors import ServerError

_MODULE = "flowkv_jax.bench.transfer_peer"
_CLOSE_S = 10.0
_SHOWN_CHARACTERS = 2_000


class PeerError(ServerError):
    """A process of the pair could not do what it was asked, or ended."""


class BackendUnavailable(PeerError):
    """The backend cannot work here."""


class PeerProcess:
    """One of the two. Ends with its standard input, whatever becomes of us."""

    def __init__(self, setup: Setup) -> None:
        self._name = "source" if setup.is_source else "destination"
        self._errors = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115
        root = str(Path(flowkv_jax.__file__).resolve().parents[1])
        path = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
        self._process = subprocess.Popen(
            [sys.executable, "-m", _MODULE],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            env=os.environ | {"PYTHONPATH": path, "JAX_PLATFORMS": "cpu"},
            # Ctrl-C is for us: we end it.
            process_group=0,
        )
        self._write(msgspec.json.encode(setup).decode())

    def wait_started(self) -> None:
        """Wait until its engine is there. Raises `BackendUnavailable` if it cannot be."""
        try:
            self.answer()
        except PeerError as error:
            raise BackendUnavailable(str(error)) from None

    def ask(self, command: str, *arguments: object) -> Any:
        """Run a command there; its value.

        Raises:
            PeerError: it failed, or the process ended.
        """
        self._write(json.dumps([command, *arguments]))
        return self.answer()

    def begin(self, command: str, *arguments: object) -> None:
        """Like `ask`, whose value `answer` waits for."""
        self._write(json.dumps([command, *arguments]))

    def answer(self) -> Any:
        """What the process says next. Raises like `ask`."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise PeerError(f"the {self._name}'s process ended: {self._last_words()}")
        answer = json.loads(line)
        if "error" in answer:
            raise PeerError(f"{answer['error']} at the {self._name}: {answer['text']}")
        return answer["value"]

    def end(self) -> None:
        """Make sure that the process is gone. Idempotent."""
        assert self._process.stdin is not None and self._process.stdout is not None
        # It may be gone already, and have left something unread.
        with suppress(OSError):
            self._process.stdin.close()
        try:
            self._process.wait(_CLOSE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()
        self._errors.close()

    def _write(self, line: str) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(line + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise PeerError(f"the {self._name}'s process ended: {self._last_words()}") from None

    def _last_words(self) -> str:
        self._process.wait(_CLOSE_S)
        self._errors.seek(0)
        text = self._errors.read()[-_SHOWN_CHARACTERS:].strip()
        return f"exit status {self._process.returncode}. {text}"


class Pair:
    """A source and a destination that are connected."""

    def __init__(self, source: PeerProcess, destination: PeerProcess) -> None:
        self.source = source
        self.destination = destination

    def both(self, command: str, *arguments: object) -> list[Any]:
        """Ask both at once; [source's value, destination's value]."""
        ends = (self.source, self.destination)
        for end in ends:
            end.begin(command, *arguments)
        return [end.answer() for end in ends]


@contextmanager
def open_pair(
    backend: str,
    pools: Mapping[str, PoolSetup],
    *,
    storage_dir: Path | None,
    deadline_s: float,
    cold: bool,
) -> Iterator[Pair]:
    """Start both processes and connect them; both are gone when the block ends.

    Args:
        backend: the only one of both engines.
        storage_dir: where the storage backend's folder is made; None for the system's place.
        deadline_s, cold: see `Setup`.

    Raises:
        BackendUnavailable: the backend cannot work here.
        PeerError: a process ended, or they cannot connect.
    """
    with ExitStack() as stack:
        folder = stack.enter_context(
            tempfile.TemporaryDirectory(
                prefix="flowkv-bench-", dir=storage_dir, ignore_cleanup_errors=True
            )
        )
        setup = Setup(
            is_source=False,
            backend=backend,
            pools=dict(pools),
            secret=secrets.token_hex(16),
            storage_dir=folder,
            delete_storage=True,
            coordinator=f"127.0.0.1:{_free_port()}",
            deadline_s=deadline_s,
            cold=cold,
        )
        ends = []
        for is_source in (False, True):
            end = PeerProcess(msgspec.structs.replace(setup, is_source=is_source))
            stack.callback(end.end)
            ends.append(end)
        destination, source = ends
        # Both start at the same time: some backends wait for each other.
        for end in ends:
            end.wait_started()
        source.ask("connect", *destination.ask("listen"))
        pair = Pair(source, destination)
        yield pair
        source.ask("close")
        destination.ask("close")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
