"""One end of `flowkv bench transfer`: an engine and its pools, in a process of its own.

    parent                              this process
    one line of JSON, [name, ...]  ->   method of `_End` of that name
    one line of JSON               <-   {"value": ...}, or {"error": class, "text": text}

The first line is a `Setup`. When the parent goes, however it goes, its end of the pipe closes, and
this process ends at once, whatever it is doing. Standard output belongs to the protocol alone:
what libraries print goes to standard error.
"""

from __future__ import annotations

import json
import mmap
import os
import queue
import shutil
import sys
import threading
import traceback
import zlib
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter
from typing import Any, TextIO

import msgspec
import numpy as np
import numpy.typing as npt

from pallas_kernels.kv_layout import KVLayout
from transfer.backends.base import LinkBackend
from transfer.config import TransferConfig
from transfer.engine import TransferEngine
from transfer.errors import BackendError, TransferError
from transfer.pool_access import Bytes, NumpyPool
from transfer.strategies import Strategy
from transfer.types import BlockRun, TransferRequest, Verification

Runs = Sequence[tuple[int, int, int]]

_TILE_WORDS = 1 << 16
_SPOILED = np.uint64((1 << 64) - 1)
_JOIN_S = 60
_SWEEP_BYTES = 64 << 20


class PoolSetup(msgspec.Struct, frozen=True):
    """One pool at each end: `layout` as the arguments of `KVLayout`."""

    layout: dict[str, Any]
    num_blocks: int


class Setup(msgspec.Struct, frozen=True):
    """What an end is.

    Attributes:
        is_source: the source drives; the destination listens.
        backend: name of the only backend.
        pools: by name; node names are "source/NAME" and "destination/NAME".
        secret: of the pair.
        storage_dir: folder of the storage backend.
        delete_storage: nobody else uses the folder: delete it when the parent is lost.
        coordinator: HOST:PORT of the pair's `jax.distributed` world.
        deadline_s: of one transfer.
        cold: empty the caches before every copy and transfer.
    """

    is_source: bool
    backend: str
    pools: dict[str, PoolSetup]
    secret: str
    storage_dir: str
    delete_storage: bool
    coordinator: str
    deadline_s: float
    cold: bool


class _Pool:
    """Host memory that takes room only where it was written, and gives it back when asked.

    Pages are advised to be huge, as NumPy advises for its own arrays.
    """

    def __init__(self, setup: PoolSetup) -> None:
        self.layout = KVLayout(**setup.layout)
        size = setup.num_blocks * self.layout.bytes_per_block
        self._map = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._map.madvise(mmap.MADV_HUGEPAGE)
        array = np.frombuffer(self._map, np.uint8)
        self.access = NumpyPool(self.layout, setup.num_blocks, array)

    def release(self) -> None:
        self._map.madvise(mmap.MADV_DONTNEED)

    def stamps(self, start: int, count: int) -> npt.NDArray[np.uint64]:
        """View uint64 [count, L * 2]: the first 8 bytes of every layer's K and V of blocks."""
        rows = self.access.rows[start : start + count].view(np.uint64)
        return rows.reshape(count, self.layout.num_layers * 2, -1)[:, :, 0]


class _End:
    """What the parent can ask for. Runs are lists of (source block, destination block, blocks)."""

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        storage = Path(setup.storage_dir)
        # A machine that is busy with the bytes may be late with its heartbeats.
        config = TransferConfig(storage_dir=storage, peer_timeout_s=60, settle_timeout_s=60)
        backend = _make_backend(setup, config)
        self._engine = TransferEngine(config, secret=setup.secret, backends=[backend])
        self._pools = {name: _Pool(pool) for name, pool in setup.pools.items()}
        for name, pool in self._pools.items():
            self._engine.register_pool(self._node(name, at_source=setup.is_source), pool.access)
        self._copied: Bytes = np.empty(0, np.uint8)
        self._elsewhere: Bytes = np.zeros(_SWEEP_BYTES if setup.cold else 0, np.uint8)

    def listen(self) -> list[object]:
        return list(self._engine.listen("127.0.0.1", 0))

    def connect(self, host: str, port: int) -> list[str]:
        return self._engine.connect((host, port))

    def release(self, pool: str) -> None:
        """Give the pool's memory back; its contents are zeros again."""
        self._pools[pool].release()

    def fill(self, pool: str, runs: Runs, seed: int) -> None:
        """Write blocks of the source, each of its layers' halves different from every other."""
        found = self._pools[pool]
        words = np.random.default_rng(seed).integers(0, 1 << 63, _TILE_WORDS, np.uint64)
        row = np.resize(words, found.layout.bytes_per_block // 8).view(np.uint8)
        pieces = np.arange(found.layout.num_layers * 2, dtype=np.uint64)
        for start, _, count in runs:
            found.access.rows[start : start + count] = row
            blocks = np.arange(start, start + count, dtype=np.uint64)
            found.stamps(start, count)[:] = (blocks[:, None] + 1) << np.uint64(16) | pieces

    def spoil(self, pool: str, runs: Runs) -> None:
        """Overwrite the first bytes of every layer's half of the destination's blocks."""
        for _, start, count in runs:
            self._pools[pool].stamps(start, count)[:] = _SPOILED

    def fingerprint(self, pool: str, runs: Runs) -> int:
        """Of this end's blocks in the order of the runs: over 64-bit sums of blocks, and stamps."""
        found, value = self._pools[pool], 0
        for src, dst, count in runs:
            start = src if self._setup.is_source else dst
            words = found.access.rows[start : start + count].view(np.uint64)
            value = zlib.crc32(words.sum(axis=1, dtype=np.uint64).tobytes(), value)
            value = zlib.crc32(found.stamps(start, count).tobytes(), value)
        return value

    def copy(self, pool: str, runs: Runs) -> float:
        """Seconds of `np.copyto` of the same runs to other memory of this process, one thread."""
        rows = self._pools[pool].access.rows
        num_blocks = sum(count for _, _, count in runs)
        if self._copied.size < num_blocks * rows.shape[1]:
            self._copied = np.zeros(num_blocks * rows.shape[1], np.uint8)
            self._copied[:] = 1  # So that the memory is there before the clock runs.
        into = self._copied[: num_blocks * rows.shape[1]].reshape(num_blocks, -1)
        done = 0
        self._sweep()
        begin = perf_counter()
        for start, _, count in runs:
            np.copyto(into[done : done + count], rows[start : start + count])
            done += count
        return perf_counter() - begin

    def move(self, pool: str, runs: Runs, strategy: str, checksum: bool) -> tuple[float, int]:
        """Move the runs; seconds from submitting to knowing, calls that the engine counted."""
        block_runs = tuple(BlockRun(*run) for run in runs)
        layout = self._pools[pool].layout
        request = TransferRequest(
            self._node(pool, at_source=True),
            self._node(pool, at_source=False),
            sum(run.num_blocks for run in block_runs) * layout.bytes_per_block,
            block_runs,
            layout.bytes_per_block,
            deadline_s=self._setup.deadline_s,
            verification=Verification.CHECKSUM if checksum else Verification.NONE,
        )
        before = self._num_calls()
        chosen = Strategy(strategy)
        self._sweep()
        begin = perf_counter()
        handle = self._engine.submit(request, backend=self._setup.backend, strategy=chosen)
        handle.wait()
        return perf_counter() - begin, self._num_calls() - before

    def rounds(
        self, pool: str, runs: Runs, checksum: bool, least: int, most: int, limit_s: float
    ) -> list[object]:
        """Copy and move by aligned runs again and again, without a word to the parent in between:
        `most` times, or fewer, but at least `least`, once moving has taken `limit_s`.

        [seconds of each move, seconds of each copy, calls of each move]."""
        copies: list[float] = []
        times: list[float] = []
        calls: list[int] = []
        while len(times) < least or (len(times) < most and sum(times) < limit_s):
            copies.append(self.copy(pool, runs))
            seconds, counted = self.move(pool, runs, Strategy.ALIGNED_RUNS.value, checksum)
            times.append(seconds)
            calls.append(counted)
        return [times, copies, calls]

    def close(self) -> None:
        self._engine.close()

    def _sweep(self) -> None:
        """Read and write elsewhere, so that caches hold nothing of what moves next."""
        # Filling alone would go past the caches.
        self._elsewhere += 1

    def _num_calls(self) -> int:
        return sum(metrics.calls for metrics in self._engine.metrics.snapshot().values())

    @staticmethod
    def _node(pool: str, *, at_source: bool) -> str:
        return f"{'source' if at_source else 'destination'}/{pool}"


_COMMANDS = frozenset(name for name in vars(_End) if not name.startswith("_"))


def _make_backend(setup: Setup, config: TransferConfig) -> LinkBackend:
    """Raises `BackendError` where it cannot work here."""
    try:
        match setup.backend:
            case "shared_memory":
                from transfer.backends.shared_memory import SharedMemoryBackend

                return SharedMemoryBackend(config)
            case "tcp":
                from transfer.backends.tcp import TcpBackend

                return TcpBackend(config)
            case "storage":
                from transfer.backends.storage import StorageBackend

                return StorageBackend(config)
            case "jax_pull":
                from transfer.backends.jax_pull import JaxPullBackend

                return JaxPullBackend(config, secret=setup.secret)
            case "collective":
                return _join_world(setup, config)
            case "nixl":
                from transfer.backends.nixl import NixlBackend

                return NixlBackend(config)
    except ImportError as error:
        raise BackendError(f"{setup.backend} cannot be imported: {error}") from None
    raise BackendError(f"there is no backend {setup.backend!r}")


def _join_world(setup: Setup, config: TransferConfig) -> LinkBackend:
    """The pair is a world of its own. Waits for the other end."""
    import jax

    from transfer.backends.collective import CollectiveBackend

    jax.distributed.initialize(
        setup.coordinator, 2, int(setup.is_source), initialization_timeout=_JOIN_S
    )
    return CollectiveBackend(config, world=setup.coordinator)


def _serve(lines: queue.Queue[str], answers: TextIO, setup: Setup) -> None:
    def say(answer: dict[str, Any]) -> None:
        print(json.dumps(answer), file=answers, flush=True)

    try:
        end = _End(setup)
    except TransferError as error:
        say({"error": type(error).__name__, "text": str(error)})
        return
    say({"value": None})
    command = ""
    while command != "close":
        command, *arguments = json.loads(lines.get())
        if command not in _COMMANDS:
            raise ValueError(f"no command {command!r}")
        try:
            say({"value": getattr(end, command)(*arguments)})
        except TransferError as error:
            say({"error": type(error).__name__, "text": str(error)})


def main() -> None:
    """Serve the parent until it says "close" or is gone."""
    # Libraries, gloo among them, print to descriptor 1.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    setup = msgspec.json.decode(sys.stdin.readline(), type=Setup)
    lines: queue.Queue[str] = queue.Queue()

    def read() -> None:
        for line in sys.stdin:
            lines.put(line)
        if setup.delete_storage:
            shutil.rmtree(setup.storage_dir, ignore_errors=True)
        os._exit(1)

    threading.Thread(target=read, name="bench-parent", daemon=True).start()
    # Not by way of the interpreter's end: it would wait for the thread that reads, and for the
    # engine's, if it is we who failed.
    status = 1
    try:
        _serve(lines, answers, setup)
        status = 0
    except Exception:
        traceback.print_exc()
    answers.close()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    main()
