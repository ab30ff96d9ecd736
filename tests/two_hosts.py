"""Two hosts for tests, with an engine in a process on each.

Where the machine makes network namespaces, they are hosts of their own, with a link between them
that carries 10 MB/s (`benchmarks.namespaces`). Elsewhere they are two loopback addresses, with a
forwarder between them that carries as much. Both can be cut: from then on nothing passes, and
nobody is told.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import subprocess
import sys
import threading
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

from benchmarks.namespaces import Hosts, namespace_hosts
from tests.transfer_peer import filled_pool, request
from transfer.arrival import Arrival
from transfer.backends.defaults import default_backends
from transfer.config import TransferConfig
from transfer.connection import Address
from transfer.engine import TransferEngine
from transfer.errors import TransferError
from transfer.handle import TransferHandle
from transfer.types import Verification

ROOT = Path(__file__).resolve().parents[1]
BYTES_PER_S = 10e6
_PIECE_BYTES = 1 << 16


class TwoHosts(Protocol):
    """The network of a test.

    Attributes:
        source_command, destination_command: put before a program's arguments to run it there.
        listen_on: the destination's address; not a loopback one, so that a secret is needed.
        backends: names of those to use; None for the ones that an engine has by itself.
    """

    source_command: tuple[str, ...]
    destination_command: tuple[str, ...]
    listen_on: str
    backends: list[str] | None

    def reach(self, port: int) -> Address:
        """What the source dials to get to that port of the destination."""

    def carried_bytes(self) -> int:
        """From source to destination, so far."""

    def cut(self) -> None: ...

    def mend(self) -> None: ...


class NamespaceNetwork:
    backends: list[str] | None = None

    def __init__(self, hosts: Hosts) -> None:
        self._hosts = hosts
        self.source_command = hosts.source.command
        self.destination_command = hosts.destination.command
        self.listen_on = hosts.destination.addresses[0]

    def reach(self, port: int) -> Address:
        return self.listen_on, port

    def carried_bytes(self) -> int:
        return self._hosts.sent_bytes(0)

    def cut(self) -> None:
        self._hosts.set_link(0, up=False)

    def mend(self) -> None:
        self._hosts.set_link(0, up=True)


class LoopbackNetwork:
    """One thread moves pieces between pairs of sockets, one port of the destination."""

    source_command: tuple[str, ...] = ()
    destination_command: tuple[str, ...] = ()
    listen_on = "0.0.0.0"
    # Left to choose, engines that really are on one host would take shared memory.
    backends: list[str] | None = ["tcp"]

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._port = 0
        self._others: dict[socket.socket, socket.socket] = {}
        self._outward: set[socket.socket] = set()
        self._carried = 0
        self._passing = threading.Event()
        self._passing.set()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="forwarder")
        self._thread.start()

    def reach(self, port: int) -> Address:
        self._port = port
        host, forwarded_port = self._listener.getsockname()
        return host, forwarded_port

    def carried_bytes(self) -> int:
        return self._carried

    def cut(self) -> None:
        self._passing.clear()

    def mend(self) -> None:
        self._passing.set()

    def close(self) -> None:
        self._closing.set()
        self._thread.join()
        for sock in (self._listener, *self._others):
            sock.close()

    def _run(self) -> None:
        while not self._closing.wait(0.0005):
            if not self._passing.is_set():
                continue
            ready, _, _ = select.select([self._listener, *self._others], [], [], 0.01)
            for sock in ready:
                if sock is self._listener:
                    self._accept()
                elif sock in self._others:
                    self._pass_on(sock)

    def _accept(self) -> None:
        near, _ = self._listener.accept()
        far = socket.create_connection(("127.0.0.2", self._port))
        self._others |= {near: far, far: near}
        self._outward.add(near)

    def _pass_on(self, sock: socket.socket) -> None:
        other = self._others[sock]
        data = b""
        with contextlib.suppress(OSError):
            data = sock.recv(_PIECE_BYTES)
        with contextlib.suppress(OSError):
            if data:
                other.sendall(data)
                if sock in self._outward:
                    self._carried += len(data)
                    self._closing.wait(len(data) / BYTES_PER_S)
                return
        for end in (sock, other):
            self._others.pop(end).close()
            self._outward.discard(end)


@contextlib.contextmanager
def namespace_network() -> Iterator[TwoHosts]:
    """Raises `NamespacesUnavailable` where the machine makes none."""
    with namespace_hosts(1, BYTES_PER_S) as hosts:
        yield NamespaceNetwork(hosts)


@contextlib.contextmanager
def loopback_network() -> Iterator[TwoHosts]:
    network = LoopbackNetwork()
    try:
        yield network
    finally:
        network.close()


class EngineProcess:
    """An engine elsewhere: any method of `Commands`, by name."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def __getattr__(self, command: str) -> Callable[..., Any]:
        return lambda *arguments, **options: self._ask([command, arguments, options])

    def _ask(self, line: list[object]) -> Any:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(line) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        assert answer, "the engine's process ended"
        return json.loads(answer)


@contextlib.contextmanager
def engine_process(
    command: tuple[str, ...],
    node: str,
    num_blocks: int,
    *,
    secret: str,
    seed: int,
    backends: list[str] | None,
) -> Iterator[EngineProcess]:
    """An engine on the host of `command`, with a pool of random bytes; ends with the block."""
    arguments = json.dumps([node, num_blocks, secret, seed, backends])
    process = subprocess.Popen(
        [*command, sys.executable, "-m", "tests.two_hosts", arguments],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield EngineProcess(process)
    finally:
        assert process.stdin is not None and process.stdout is not None
        with contextlib.suppress(OSError):
            process.stdin.close()
        try:
            process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()


class Commands:
    """What the engine can be told. A `TransferError` is answered by [its class, its text]."""

    def __init__(
        self, node: str, num_blocks: int, secret: str, seed: int, backends: list[str] | None
    ) -> None:
        config = TransferConfig(
            heartbeat_s=0.2, peer_timeout_s=1.5, handshake_timeout_s=1.5, settle_timeout_s=1.5
        )
        self._node = node
        self._arrivals: list[Arrival] = []
        self._handles: dict[str, TransferHandle] = {}
        self._pool = filled_pool(num_blocks, seed)
        known = default_backends(config)
        self._engine = TransferEngine(
            config,
            secret=secret,
            backends=[b for b in known if backends is None or b.name in backends],
            on_arrival=self._arrivals.append,
        )
        self._engine.register_pool(node, self._pool)

    def listen(self, host: str) -> int:
        """The port."""
        return self._engine.listen(host)[1]

    def connect(self, host: str, port: int) -> list[str]:
        return self._engine.connect((host, port))

    def submit(self, dst: str, runs: list[tuple[int, int, int]]) -> str:
        asked = request(runs, self._node, dst, verification=Verification.CHECKSUM)
        handle = self._engine.submit(asked)
        self._handles[handle.transfer] = handle
        return handle.transfer

    def wait(self, transfer: str) -> list[str]:
        """[state, error's class, backend]; waits for 20 s at most."""
        handle = self._handles[transfer]
        backend = ""
        with contextlib.suppress(TransferError):
            backend = handle.wait(20).routes[0][1]
        return [handle.state.value, type(handle.error).__name__, backend]

    def crc(self, start: int, count: int) -> int:
        return zlib.crc32(self._pool.rows[start : start + count].tobytes())

    def num_pinned(self) -> int:
        return len(self._engine.pinned(self._node, list(range(self._pool.num_blocks))))

    def num_peers(self) -> int:
        return len(self._engine.peers)

    def arrivals(self) -> list[list[str]]:
        return [[a.transfer, a.state.value, type(a.error).__name__] for a in self._arrivals]

    def refusals(self) -> list[str]:
        """Why the listener let nobody in, each time."""
        events = self._engine.events.snapshot("listener")
        return [str(event.detail) for event in events if event.what == "refused"]

    def close(self) -> list[object]:
        """Names of the threads that are left, and the number of sockets."""
        self._engine.close()
        threads = [t.name for t in threading.enumerate() if t is not threading.main_thread()]
        num_sockets = 0
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):
                num_sockets += os.readlink(f"/proc/self/fd/{name}").startswith("socket:")
        return [threads, num_sockets]


def _serve(*settings: Any) -> None:
    commands = Commands(*settings)
    for line in sys.stdin:
        command, arguments, options = json.loads(line)
        try:
            answer = getattr(commands, command)(*arguments, **options)
        except TransferError as error:
            answer = [type(error).__name__, str(error)]
        print(json.dumps(answer), flush=True)
    commands.close()


if __name__ == "__main__":
    _serve(*json.loads(sys.argv[1]))
