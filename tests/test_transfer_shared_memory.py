"""Shared memory: the single copy by several threads, the ring, and what happens without consent."""

from __future__ import annotations

import gc
import os
import threading
from typing import Any

import jax.numpy as jnp
import numpy as np
import psutil
import pytest

from tests.transfer_peer import LAYOUT, assert_moved, filled_pool, peer_process, request
from transfer.backends import process_memory
from transfer.backends.process_memory import read_bytes, read_memory
from transfer.backends.shared_memory import Lease, SharedMemoryBackend
from transfer.config import TransferConfig
from transfer.engine import TransferEngine
from transfer.errors import BackendError, PeerLost
from transfer.jax_pool import JaxPool
from transfer.testing import engine_pair
from transfer.types import Verification

FRAGMENTS = [(3 * i, 2 * i, 1 + i % 2) for i in range(1300)]


class TestProcessMemory:
    def test_reads_pieces(self) -> None:
        there, here = np.arange(100, dtype=np.uint8), np.zeros(100, np.uint8)
        base, into = there.ctypes.data, here.ctypes.data
        remote = np.array([[base + 90, 10], [base, 5]], np.int64)
        local = np.array([[into, 10], [into + 50, 5]], np.int64)
        read_memory(os.getpid(), remote, local)
        assert here[:10].tolist() == list(range(90, 100))
        assert here[50:55].tolist() == [0, 1, 2, 3, 4]

    def test_memory_that_is_not_there(self) -> None:
        with pytest.raises(BackendError, match="cannot read the memory"):
            read_bytes(os.getpid(), 8, 16)

    def test_a_process_that_is_not_there(self) -> None:
        with peer_process() as peer:
            pid = peer.process.pid
            peer.kill()
        with pytest.raises(PeerLost, match=f"process {pid} has ended"):
            read_bytes(pid, 4096, 16)

    def test_a_system_without_it(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(process_memory, "_READ", None)
        with pytest.raises(BackendError, match="no process_vm_readv"):
            read_bytes(os.getpid(), 4096, 16)

    def test_a_lease_ends(self) -> None:
        lease = Lease()
        assert read_bytes(os.getpid(), lease.address, 16) == lease.token
        lease.end()
        assert read_bytes(os.getpid(), lease.address, 16) == bytes(16)


@pytest.mark.parametrize("copy_threads", [1, 2, 5])
@pytest.mark.parametrize("single_copy", [True, False])
@pytest.mark.parametrize("runs", [[(0, 0, 4000)], FRAGMENTS], ids=["one run", "fragments"])
def test_large_legs(copy_threads: int, single_copy: bool, runs: list[tuple[int, int, int]]) -> None:
    config = TransferConfig(copy_threads=copy_threads, parallel_bytes=1 << 20, chunk_bytes=100_000)
    backend = SharedMemoryBackend(config, single_copy=single_copy)
    with (
        TransferEngine(config, backends=[backend]) as source,
        TransferEngine(config, backends=[SharedMemoryBackend(config)]) as destination,
    ):
        a, b = filled_pool(4000, 1), filled_pool(4000, 2)
        source.register_pool("a", a)
        destination.register_pool("b", b)
        source.connect(destination.listen())
        req = request(runs, verification=Verification.CHECKSUM)
        for _ in range(2):
            report = source.submit(req).wait(20)
            assert report.calls == len(runs)
            assert_moved(a, b, req)


def test_without_the_kernels_consent_bytes_go_through_a_ring(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(process_memory, "_READ", None)
    with engine_pair() as (source, destination):
        a, b = filled_pool(400, 1), filled_pool(400, 2)
        source.register_pool("a", a)
        destination.register_pool("b", b)
        source.connect(destination.listen_address)
        for count in (1, 400, 399):
            req = request([(0, 0, count)])
            report = source.submit(req).wait(10)
            assert report.routes[0][1] == "shared_memory"
            assert_moved(a, b, req)


@pytest.mark.parametrize("sharded_side", ["a", "b", "both"])
def test_pools_that_are_sharded(sharded_side: str) -> None:
    from tests.test_transfer_pool_access import sharded

    pools = {}
    for seed, name in ((1, "a"), (2, "b")):
        pools[name] = plain = filled_pool(300, seed)
        if sharded_side in (name, "both"):
            import jax

            values = plain.rows.view(np.float32).reshape(LAYOUT.pool_shape(300))
            bits = jnp.asarray(values.view(np.uint32))
            array = jax.device_put(bits, sharded(2 if name == "a" else 4))
            pools[name] = JaxPool(LAYOUT, array)  # type: ignore[assignment]
    with engine_pair() as (source, destination):
        source.register_pool("a", pools["a"])
        destination.register_pool("b", pools["b"])
        source.connect(destination.listen_address)
        for backend in ("shared_memory", "tcp"):
            for runs in ([(0, 7, 1)], [(1, 0, 250), (255, 290, 3)]):
                req = request(runs, verification=Verification.CHECKSUM)
                source.submit(req, backend=backend).wait(20)


def test_nothing_grows() -> None:
    """A ring is kept for the next leg; descriptors and segments do not add up."""
    with TransferEngine() as engine, peer_process(num_blocks=300, ring=True) as peer:
        engine.register_pool("a", filled_pool(300, 1))
        engine.connect(peer.address)
        name = peer.ask("submit a 0 0 300 shared_memory")
        assert peer.ask(f"state {name}") == "completed NoneType"
        gc.collect()
        here, there = psutil.Process(), psutil.Process(peer.process.pid)
        before = (here.num_fds(), there.num_fds())
        maps = [m for m in here.memory_maps() if "transfer-ring" in m.path]
        assert len(maps) == 1
        for _ in range(5):
            name = peer.ask("submit a 0 0 300 shared_memory")
            assert peer.ask(f"state {name}") == "completed NoneType"
        assert (here.num_fds(), there.num_fds()) == before
        peer.kill()
    gc.collect()
    assert not [m for m in psutil.Process().memory_maps() if "transfer-ring" in m.path]


@pytest.mark.parametrize(
    ("single_copy", "copy_threads", "num_blocks", "thread"),
    [
        (True, 2, 1, "transfer-reader"),
        (True, 2, 512, "transfer-reader"),
        (True, 2, 513, "transfer-receive"),
        (True, 1, 590, "transfer-reader"),
        (False, 2, 32, "transfer-reader"),
        (False, 1, 33, "transfer-receive"),
    ],
)
def test_which_thread_receives(
    monkeypatch: pytest.MonkeyPatch,
    single_copy: bool,
    copy_threads: int,
    num_blocks: int,
    thread: str,
) -> None:
    """The reader of the channel takes what waits for nobody: 1 MiB of a single copy, more where
    copies have one thread, and 64 KiB sent with the offer."""
    assert LAYOUT.bytes_per_block == 2048
    threads = []
    receive = SharedMemoryBackend.receive

    def noting(self: SharedMemoryBackend, *leg: Any) -> int:
        threads.append(threading.current_thread().name)
        return receive(self, *leg)

    monkeypatch.setattr(SharedMemoryBackend, "receive", noting)
    with engine_pair(config=TransferConfig(copy_threads=copy_threads)) as (source, destination):
        a, b = filled_pool(600, 1), filled_pool(600, 2)
        source.register_pool("a", a)
        destination.register_pool("b", b)
        source.add_backend(SharedMemoryBackend(source.config, single_copy=single_copy))
        source.connect(destination.listen_address)
        req = request([(0, 10, num_blocks)])
        source.submit(req, backend="shared_memory").wait(10)
        assert_moved(a, b, req)
    assert [name.startswith(thread) for name in threads] == [True]
