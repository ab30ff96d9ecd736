"""The servers that checks run against: `flowkv serve` from this tree, with the real model."""

from __future__ import annotations

import os
import re
import secrets
import socket
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.clients.environments import ROOT
from tests.clients.processes import Child, end_all

START_TIMEOUT_S = 600.0  # the first start compiles, and may fetch the model
_ENTRY = "import sys; from flowkv_jax.cli import main; sys.exit(main())"
_READY = re.compile(r"flowkv: serving (\S+)")


@dataclass(frozen=True)
class ServerKind:
    """A way to start `flowkv serve`.

    Attributes:
        flags: after `flowkv serve` and the ports.
        needs_key: clients must show an API key.
    """

    flags: tuple[str, ...] = ()
    needs_key: bool = False


# vLLM has these off, too: usage tells cached tokens, and SmolLM2's template knows no tools.
_MORE = ("--enable-prompt-tokens-details", "--tool-call-parser", "hermes")

KINDS: dict[str, ServerKind] = {
    # One node that prefills and decodes.
    "node": ServerKind(_MORE),
    # Prefill and decode on nodes of their own, every prompt handed off.
    "pair": ServerKind((*_MORE, "--prefill-nodes", "1", "--decode-nodes", "1")),
    # Soon full, and closed to strangers.
    "guarded": ServerKind(
        ("--max-num-seqs", "1", "--max-waiting-requests", "1"),
        needs_key=True,
    ),
    # Answers that nobody bounds end soon.
    "short": ServerKind((*_MORE, "--max-model-len", "256")),
    # Two servers whose hand-offs a router outside drives.
    "prefill": ServerKind(("--kv-role", "kv_producer", "--kv-port", "0")),
    "decode": ServerKind(("--kv-role", "kv_consumer", "--kv-port", "0")),
}


class ServerFailed(Exception):
    """A server did not start; the text is the end of what it said."""


class Server:
    """A running server."""

    def __init__(self, kind: str, logs: Path) -> None:
        self.kind = kind
        self._http_port, self._grpc_port = _free_ports(2)
        self.api_key = secrets.token_urlsafe(16) if KINDS[kind].needs_key else None
        flags = ["--port", str(self._http_port), "--grpc-port", str(self._grpc_port)]
        if self.api_key is not None:
            key_file = logs / f"{kind}.keys"
            key_file.write_text(f"{self.api_key}\n", encoding="utf-8")
            key_file.chmod(0o600)
            flags += ["--api-key-file", str(key_file)]
        command = [sys.executable, "-c", _ENTRY, "serve", *flags, *KINDS[kind].flags]
        environ = {key: value for key, value in os.environ.items() if key != "FLOWKV_API_KEY"}
        self.child = Child(command, logs / f"{kind}.log", environ=environ, folder=ROOT)
        self.model = ""

    def wait_until_ready(self) -> None:
        """Returns when the server said that it serves.

        Raises:
            ServerFailed: it ended, or took too long.
        """
        ends_at = time.monotonic() + START_TIMEOUT_S
        while not (match := _READY.search(self.child.output())):
            if self.child.poll() is not None or time.monotonic() > ends_at:
                tail = " ".join(self.child.output().split())[-600:]
                raise ServerFailed(f"server {self.kind!r} did not start: {tail}")
            time.sleep(0.1)
        self.model = match[1]

    def describe(self) -> dict[str, Any]:
        """As `checks/checklist.Surroundings.servers` holds it."""
        return {
            "http": f"http://127.0.0.1:{self._http_port}",
            "grpc": f"127.0.0.1:{self._grpc_port}",
            "pid": self.child.pid,
            "api_key": self.api_key,
        }


class Servers:
    """Servers by kind: started when first wanted, ended when no longer.

    Args:
        logs: an existing folder for what they say.
    """

    def __init__(self, logs: Path) -> None:
        self._running: dict[str, Server] = {}
        self._logs = logs

    def get(self, kinds: tuple[str, ...]) -> list[Server]:
        """Running servers of these kinds; several start at the same time.

        Raises:
            ServerFailed: one did not start.
        """
        started = []
        for kind in kinds:
            if kind not in self._running:
                self._running[kind] = Server(kind, self._logs)
                started.append(self._running[kind])
        try:
            for server in started:
                server.wait_until_ready()
        except ServerFailed:
            self.keep_only(set(self._running) - {server.kind for server in started})
            raise
        return [self._running[kind] for kind in kinds]

    def take_dead(self, kinds: tuple[str, ...]) -> list[str]:
        """One line for each of these that has ended by itself; the next use starts it anew."""
        lines = []
        for kind in kinds:
            server = self._running.get(kind)
            if server is not None and (status := server.child.poll()) is not None:
                del self._running[kind]
                server.child.end()
                server.child.keep_log()
                tail = " ".join(server.child.output().split())[-400:]
                lines.append(f"server {kind!r} ended with status {status}: {tail}")
        return lines

    def running(self) -> list[Server]:
        """Those that were started and not ended."""
        return list(self._running.values())

    def keep_only(self, kinds: set[str]) -> None:
        """End the servers of all other kinds."""
        gone = [kind for kind in self._running if kind not in kinds]
        end_all(self._running.pop(kind).child for kind in gone)

    def end(self) -> None:
        """End all."""
        self.keep_only(set())


def _free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    try:
        return [listener.getsockname()[1] for listener in sockets]
    finally:
        for listener in sockets:
            listener.close()
