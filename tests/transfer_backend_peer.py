"""An engine with one backend in a process of its own, told what to do by lines of JSON.

A line is [command, *arguments] for a method of `_Commands`; the answer is one line of JSON too.
Halves of legs can be made to stop at a chosen step of their talk (`pause`), so that a test can
kill the process there.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from pallas_kernels.kv_layout import KVLayout
from transfer.arrival import Arrival
from transfer.backends.base import Link, LinkBackend, Peer, Plan, SendHalf
from transfer.config import TransferConfig
from transfer.engine import TransferEngine
from transfer.errors import RequestError, TransferError
from transfer.handle import TransferHandle
from transfer.pool_access import Generations, NumpyPool, PoolAccess
from transfer.strategies import Strategy
from transfer.types import BlockRun, TransferRequest, Verification

ROOT = Path(__file__).resolve().parents[1]
LAYOUT = KVLayout(
    num_layers=2, block_size=4, num_kv_heads=4, head_dim=8, dtype="bfloat16", dtype_bytes=2
)
NUM_BLOCKS = 64
CONFIG = TransferConfig(heartbeat_s=0.5, peer_timeout_s=5.0)

FRAGMENTED = [(0, 40, 5), (9, 3, 1), (11, 10, 7), (51, 20, 13), (63, 63, 1)]
"""Runs (source, destination, blocks) of many lengths: 5 calls."""
Runs = list[tuple[int, int, int]]


def random_blocks(seed: int) -> np.ndarray[Any, np.dtype[np.uint16]]:
    """Bits of a bfloat16 pool, uint16 [P, L, 2, Z, K, H]."""
    shape = LAYOUT.pool_shape(NUM_BLOCKS)
    return np.random.default_rng(seed).integers(0, 1 << 16, shape, np.uint16)


def make_pool(kind: str, seed: int, generations: Generations) -> PoolAccess:
    """A pool in plain host memory ("numpy"), on one CPU device ("jax") or over two ("sharded")."""
    blocks = random_blocks(seed)
    if kind == "numpy":
        return NumpyPool(LAYOUT, NUM_BLOCKS, blocks, generations)
    import jax
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    from transfer.jax_pool import JaxPool

    if kind == "jax":
        device = jax.local_devices()[0]
        return JaxPool(LAYOUT, jax.device_put(blocks, device, may_alias=False), generations)
    mesh = Mesh(np.array(jax.local_devices()[:2]), "k")
    spec = PartitionSpec(None, None, None, None, "k", None)
    return JaxPool(LAYOUT, jax.device_put(blocks, NamedSharding(mesh, spec)), generations)


def read_blocks(pool: PoolAccess, ids: list[int]) -> bytes:
    out = np.empty(len(ids) * LAYOUT.bytes_per_block, np.uint8)
    with pool.open() as memory:
        for i, block in enumerate(ids):
            start = i * LAYOUT.bytes_per_block
            memory.read(block, out[start : start + LAYOUT.bytes_per_block])
    return out.tobytes()


def ids_of(runs: Runs, *, of_source: bool) -> list[int]:
    return [(src if of_source else dst) + i for src, dst, count in runs for i in range(count)]


def make_request(src: str, dst: str, runs: Runs, **more: Any) -> TransferRequest:
    block_runs = tuple(BlockRun(*run) for run in runs)
    block = LAYOUT.bytes_per_block
    size = sum(run.num_blocks for run in block_runs) * block
    return TransferRequest(src, dst, size, block_runs, block, **more)


class Pause:
    """Where halves stop: at the n-th `put`, `get` or start (`run`, `receive`) of any leg."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._at: tuple[str, int] | None = None
        self._seen = 0
        self._is_paused = False
        self._link: Link | None = None

    def arm(self, what: str, nth: int) -> None:
        with self._condition:
            self._at, self._seen, self._is_paused = (what, nth), 0, False

    def resume(self) -> None:
        with self._condition:
            self._at, self._is_paused = None, False
            self._condition.notify_all()

    def wait(self, timeout_s: float = 10.0) -> bool:
        with self._condition:
            return self._condition.wait_for(lambda: self._is_paused, timeout_s)

    def is_stopped(self) -> bool:
        """Whether the leg that stands still has been stopped meanwhile."""
        assert self._link is not None
        try:
            self._link.check()
        except TransferError:
            return True
        return False

    def step(self, what: str, link: Link) -> None:
        with self._condition:
            if self._at is None or self._at[0] != what:
                return
            self._seen += 1
            if self._seen == self._at[1]:
                self._is_paused, self._link = True, link
                self._condition.notify_all()
                self._condition.wait_for(lambda: not self._is_paused, 60)


class _PausingLink:
    def __init__(self, link: Link, pause: Pause) -> None:
        self._link = link
        self._pause = pause
        self.check = link.check
        self.on_stop = link.on_stop

    def put(self, body: bytes) -> None:
        self._pause.step("put", self._link)
        self._link.put(body)

    def get(self, timeout_s: float | None = None) -> bytes:
        self._pause.step("get", self._link)
        return self._link.get(timeout_s)


class _PausingSend(SendHalf):
    def __init__(self, half: SendHalf, pause: Pause) -> None:
        self._half = half
        self._pause = pause
        self.opening = half.opening
        self.needs_run = half.needs_run

    def run(self, link: Link) -> None:
        self._pause.step("run", link)
        self._half.run(_PausingLink(link, self._pause))

    def close(self) -> None:
        self._half.close()


class PausingBackend(LinkBackend):
    """A real backend, whose halves can be stopped."""

    def __init__(self, backend: LinkBackend) -> None:
        self.pause = Pause()
        self.name = backend.name
        self.receives_inline = backend.receives_inline
        self.hello = backend.hello  # type: ignore[method-assign]
        self.attach = backend.attach  # type: ignore[method-assign]
        self.peer_lost = backend.peer_lost  # type: ignore[method-assign]
        self.close = backend.close  # type: ignore[method-assign]
        self._backend = backend

    def why_not(self, peer: Peer) -> str:
        return self._backend.why_not(peer)

    def offer(self, source: PoolAccess, plan: Plan, peer: Peer) -> SendHalf:
        return _PausingSend(self._backend.offer(source, plan, peer), self.pause)

    def receive(
        self, link: Link, destination: PoolAccess, plan: Plan, opening: bytes, peer: Peer
    ) -> int:
        self.pause.step("receive", link)
        stopping = _PausingLink(link, self.pause)
        return self._backend.receive(stopping, destination, plan, opening, peer)


class Commands:
    """What an engine of a test can be told, here or in its process."""

    def __init__(self, backend: LinkBackend, nodes: dict[str, str], seed: int) -> None:
        self.backend = PausingBackend(backend)
        self._arrivals: list[Arrival] = []
        self.engine = TransferEngine(
            CONFIG, backends=[self.backend], on_arrival=self._arrivals.append
        )
        self._num_freed = 0
        self.pools = {
            name: make_pool(kind, seed, self._generations) for name, kind in nodes.items()
        }
        for name, pool in self.pools.items():
            self.engine.register_pool(name, pool)
        self._handles: dict[str, TransferHandle] = {}

    def listen(self) -> list[object]:
        """Address; may be asked for again."""
        with contextlib.suppress(RequestError):
            self.engine.listen()
        return list(self.engine.listen_address)

    def arrivals(self) -> list[list[str]]:
        """[state, error's class] of every transfer that ended here since the last call."""
        arrivals, self._arrivals[:] = self._arrivals.copy(), []
        return [[a.state.value, type(a.error).__name__] for a in arrivals]

    def connect(self, host: str, port: int) -> list[str]:
        return self.engine.connect((host, port))

    def submit(
        self,
        src: str,
        dst: str,
        runs: Runs,
        strategy: str = "aligned-runs",
        verify: bool = False,
        deadline_s: float | None = None,
        generation: int | None = None,
    ) -> str:
        num_blocks = sum(count for _, _, count in runs)
        generations = () if generation is None else (generation,) * num_blocks
        request = make_request(
            src,
            dst,
            [tuple(run) for run in runs],
            verification=Verification.CHECKSUM if verify else Verification.NONE,
            deadline_s=deadline_s,
            src_generations=generations,
            dst_generations=generations,
        )
        handle = self.engine.submit(request, backend=self.backend.name, strategy=Strategy(strategy))
        self._handles[handle.transfer] = handle
        return handle.transfer

    def state(self, transfer: str) -> str:
        return self._handles[transfer].state.value

    def knows(self, node: str) -> bool:
        """Whether a connected peer has announced the node."""
        return any(node in nodes for nodes in self.engine.peers.values())

    def cancel(self, transfer: str) -> None:
        self._handles[transfer].cancel()

    def wait(self, transfer: str, timeout_s: float = 20.0) -> list[object]:
        """[state, error's class, error's text, calls]."""
        handle = self._handles[transfer]
        calls = 0
        with contextlib.suppress(TransferError):
            calls = handle.wait(timeout_s).calls
        error = handle.error
        return [handle.state.value, type(error).__name__, str(error), calls]

    def crc(self, node: str, ids: list[int]) -> int:
        return zlib.crc32(read_blocks(self.pools[node], ids))

    def overwrite(self, node: str, seed: int) -> None:
        data = random_blocks(seed).reshape(-1).view(np.uint8)
        with self.pools[node].open() as memory:
            memory.write(0, data)

    def free_all(self) -> None:
        """Every block of every pool here has another generation from now on."""
        self._num_freed += 1

    def _generations(self, ids: Sequence[int]) -> list[int]:
        return [self._num_freed] * len(ids)

    def num_pinned(self) -> int:
        ids = list(range(NUM_BLOCKS))
        return sum(len(self.engine.pinned(node, ids)) for node in self.pools)

    def metric_calls(self) -> int:
        by_path = self.engine.metrics.snapshot()
        return sum(more.calls for (_, name), more in by_path.items() if name == self.backend.name)

    def pause(self, what: str, nth: int) -> None:
        self.backend.pause.arm(what, nth)

    def paused(self) -> bool:
        return self.backend.pause.wait()

    def is_stopped(self) -> bool:
        return self.backend.pause.is_stopped()

    def resume(self) -> None:
        self.backend.pause.resume()

    def close(self) -> list[str]:
        """Names of the threads that are left."""
        self.engine.close()
        return [t.name for t in threading.enumerate() if t is not threading.main_thread()]


Told = Any
"""A `Commands` of this process, or a `BackendPeer`: they can be told the same."""


class BackendPeer:
    """The other end of the pipe. Attribute access makes a command of any method of `Commands`."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process

    def __getattr__(self, command: str) -> Callable[..., Any]:
        return lambda *arguments: self._ask([command, *arguments])

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(timeout=10)

    def _ask(self, line: list[object]) -> Any:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps(line) + "\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline()
        assert answer, "the peer process ended"
        value = json.loads(answer)
        assert not isinstance(value, dict), value
        return value


@contextlib.contextmanager
def backend_peer(backend: str, nodes: dict[str, str], **options: Any) -> Iterator[BackendPeer]:
    """A process that runs `Commands`.

    Args:
        backend: its name. nodes: kind of pool by node. options: see `make_backend`.
    """
    seed = options.pop("seed", 2)
    arguments = json.dumps([backend, nodes, seed, options])
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.transfer_backend_peer", arguments],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield BackendPeer(process)
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


def make_backend(name: str, **options: Any) -> LinkBackend:
    if name == "jax_pull":
        from transfer.backends.jax_pull import JaxPullBackend

        return JaxPullBackend(CONFIG, **options)
    if name == "nixl":
        from transfer.backends.nixl import NixlBackend

        return NixlBackend(CONFIG, **options)
    if name == "collective":
        return _join_world(**options)
    raise ValueError(f"no backend {name!r} for tests")


def _join_world(coordinator: str, index: int, count: int) -> LinkBackend:
    """The collective backend, in a process that becomes one of a world. Waits for all of them."""
    import jax

    from transfer.backends.collective import CollectiveBackend

    # The others go on when one of them is killed.
    jax.config.update("jax_enable_recoverability", True)
    jax.distributed.initialize(coordinator, count, index)
    return CollectiveBackend(CONFIG, world=coordinator)


def _serve(backend: str, nodes: dict[str, str], seed: int, options: dict[str, Any]) -> None:
    # Libraries that print do so to the other stream from now on.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    commands = Commands(make_backend(backend, **options), nodes, seed)
    for line in sys.stdin:
        command, *arguments = json.loads(line)
        try:
            answer = getattr(commands, command)(*arguments)
        except Exception as error:
            answer = {"error": type(error).__name__, "text": str(error)}
        print(json.dumps(answer), file=answers, flush=True)
    commands.close()


if __name__ == "__main__":
    _serve(*json.loads(sys.argv[1]))
