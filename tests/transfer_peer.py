"""An engine in a process of its own, for tests: says its address, then does what lines tell it.

read START COUNT          CRC-32 of those blocks
pins                      number of pinned blocks
connect HOST PORT         names of the nodes there
submit DST SRC_START DST_START COUNT [BACKEND]     name of the transfer
state TRANSFER            of one that it submitted
notify NODE FIRST COUNT   says the numbers from FIRST on; "ok", or the name of the error
heard                     JSON list of [node, engine id, payload, or "lost"], oldest first
id                        of its engine
quit
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from pallas_kernels.kv_layout import KVLayout
from transfer.backends.defaults import default_backends
from transfer.backends.shared_memory import SharedMemoryBackend
from transfer.config import TransferConfig
from transfer.engine import TransferEngine
from transfer.errors import TransferError
from transfer.handle import TransferHandle
from transfer.notifications import Notification, PeerLoss
from transfer.pool_access import NumpyPool
from transfer.testing import Fault, ScriptedBackend
from transfer.types import BlockRun, TransferRequest

ROOT = Path(__file__).resolve().parents[1]
LAYOUT = KVLayout(
    num_layers=2, block_size=4, num_kv_heads=4, head_dim=8, dtype="float32", dtype_bytes=4
)


def filled_pool(num_blocks: int, seed: int, layout: KVLayout = LAYOUT) -> NumpyPool:
    """A pool of random bytes."""
    size = num_blocks * layout.bytes_per_block
    return NumpyPool(
        layout, num_blocks, np.random.default_rng(seed).integers(0, 256, size, np.uint8)
    )


def request(
    runs: list[tuple[int, int, int]], src: str = "a", dst: str = "b", **more: Any
) -> TransferRequest:
    """A request for runs of `LAYOUT` blocks."""
    block_runs = tuple(BlockRun(*run) for run in runs)
    block = LAYOUT.bytes_per_block
    size = sum(run.num_blocks for run in block_runs) * block
    return TransferRequest(src, dst, size, block_runs, block, **more)


def assert_moved(source: NumpyPool, destination: NumpyPool, req: TransferRequest) -> None:
    """What the request names is the same on both sides."""
    for run in req.runs:
        there = source.rows[run.src_start : run.src_start + run.num_blocks]
        here = destination.rows[run.dst_start : run.dst_start + run.num_blocks]
        np.testing.assert_array_equal(there, here)


def until(condition: Callable[[], bool]) -> None:
    """Wait for something that another thread or process does."""
    ends = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < ends, "it never happened"
        time.sleep(0.002)


class Heard:
    """An `on_notify` and an `on_peer_lost` that keep, in one list, what they are told."""

    def __init__(self) -> None:
        self.entries: list[tuple[str, str, str]] = []
        self.losses: list[PeerLoss] = []

    def notified(self, notification: Notification) -> None:
        text = notification.payload[:100].decode()
        self.entries.append((notification.node, notification.engine_id, text))

    def lost(self, loss: PeerLoss) -> None:
        self.losses.append(loss)
        self.entries.append((",".join(loss.nodes), loss.engine_id, "lost"))

    def said(self, engine_id: str | None = None) -> list[str]:
        """Payloads, and "lost"; of one engine or of all."""
        return [text for _, sender, text in self.entries if engine_id in (None, sender)]


class PeerProcess:
    """The other end of the pipe."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        host, port = self._line().split()
        self.address = (host, int(port))

    def ask(self, line: str) -> str:
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
        return self._line()

    def crc(self, start: int, count: int) -> int:
        return int(self.ask(f"read {start} {count}"))

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(timeout=10)

    def _line(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline().strip()
        assert line, "the peer process ended"
        return line


@contextlib.contextmanager
def peer_process(**options: Any) -> Iterator[PeerProcess]:
    """Options: see `_serve`."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.transfer_peer", json.dumps(options)],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield PeerProcess(process)
    finally:
        assert process.stdin is not None and process.stdout is not None
        with contextlib.suppress(OSError):
            process.stdin.close()
        try:
            process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()


def _serve(
    node: str = "b",
    num_blocks: int = 64,
    seed: int = 2,
    secret: str = "",
    ring: bool = False,
    faults: list[str] | None = None,
    storage_dir: str | None = None,
    config: dict[str, Any] | None = None,
) -> None:
    folder = None if storage_dir is None else Path(storage_dir)
    settings = TransferConfig(storage_dir=folder, **(config or {}))
    backends = default_backends(settings)
    if ring:
        backends[0] = SharedMemoryBackend(settings, single_copy=False)
    if faults is not None:
        backends.append(ScriptedBackend([Fault(f) for f in faults], name="scripted"))
    pool = filled_pool(num_blocks, seed)
    handles: dict[str, TransferHandle] = {}
    heard = Heard()
    with TransferEngine(
        settings,
        secret=secret,
        backends=backends,
        on_notify=heard.notified,
        on_peer_lost=heard.lost,
    ) as engine:
        engine.register_pool(node, pool)
        print(*engine.listen(), flush=True)
        for line in sys.stdin:
            word, *rest = line.split()
            if word == "quit":
                break
            if word in ("notify", "heard", "id"):
                print(_speak(engine, heard, word, rest), flush=True)
            else:
                print(_do(engine, node, pool, handles, word, rest), flush=True)


def _speak(engine: TransferEngine, heard: Heard, word: str, rest: list[str]) -> str:
    if word == "id":
        return engine.engine_id
    if word == "heard":
        return json.dumps(heard.entries)
    node, first, count = rest[0], int(rest[1]), int(rest[2])
    try:
        for number in range(first, first + count):
            engine.notify(node, b"%d" % number)
    except TransferError as error:
        return type(error).__name__
    return "ok"


def _do(
    engine: TransferEngine,
    node: str,
    pool: NumpyPool,
    handles: dict[str, TransferHandle],
    word: str,
    rest: list[str],
) -> str:
    if word == "read":
        start, count = map(int, rest)
        return str(zlib.crc32(pool.rows[start : start + count].tobytes()))
    if word == "pins":
        return str(len(engine.pinned(node, list(range(pool.num_blocks)))))
    if word == "connect":
        return " ".join(engine.connect((rest[0], int(rest[1]))))
    if word == "submit":
        dst, *numbers = rest[:4]
        run = tuple(map(int, numbers))
        backend = rest[4] if len(rest) > 4 else None
        handle = engine.submit(request([run], node, dst), backend=backend)  # type: ignore[list-item]
        handles[handle.transfer] = handle
        return handle.transfer
    handle = handles[rest[0]]
    with contextlib.suppress(Exception):
        handle.wait(5)
    return f"{handle.state.value} {type(handle.error).__name__}"


if __name__ == "__main__":
    _serve(**json.loads(sys.argv[1]))
