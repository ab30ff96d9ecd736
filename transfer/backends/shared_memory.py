"""Between two processes of one host.

Two ways, chosen for each leg by the source:

*Single copy.* The destination reads the source's pool out of the source's memory
(`process_memory`), in one system call for up to 1,024 pieces, large legs by several threads. The
source does nothing, and a small leg is one message there and one back. It needs both pools in
host memory in one piece, and the kernel's consent, which the source probes once by reading a
secret of the peer's.

*Ring.* Where that is not possible: an anonymous segment (memfd) that both processes map, handed
over through a Unix socket. The source fills one slot while the destination empties another. A
segment has no name, so a killed process leaves nothing behind; it is kept for the next leg. Small
legs go with their offer instead.

`Lease`: reading someone's memory without asking needs a proof that the blocks were still the
source's to show. For each leg the source keeps 16 random bytes at an address it announces, and
overwrites them before it gives the blocks up. The destination reads them after the data. If they
are still what was announced, every byte was read while the blocks were pinned; it also proves
that the process is still the same one.
"""

from __future__ import annotations

import ctypes
import os
import struct
import threading
from array import array
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass

import msgspec
import numpy as np

from transfer.backends.base import Link, LinkBackend, Peer, Plan, SendHalf
from transfer.backends.inline import InlineSend, receive_inline
from transfer.backends.process_memory import MAX_VECTORS, read_bytes, read_memory, read_vectors
from transfer.backends.shared_ring import Rings, RingSend, receive_ring
from transfer.config import TransferConfig
from transfer.errors import PeerLost, TransferError
from transfer.pool_access import HostMemory, PoolAccess, incoming
from transfer.strategies import Calls, batches

_TOKEN_BYTES = 16
_SINGLE, _INLINE, _RING = b"s", b"i", b"r"
_SINGLE_OPENING = struct.Struct("<QQ16s")
_READ_BYTES = 4 << 20
_INLINE_READ_BYTES = 1 << 20
_INLINE_READ_BYTES_OF_ONE_THREAD = 64 << 20


class _Hello(msgspec.Struct, frozen=True, array_like=True):
    """Where a peer finds 16 bytes that prove it can read us."""

    pid: int
    address: int
    token: bytes


class Lease:
    """16 random bytes at a fixed address, for as long as a leg's blocks are pinned."""

    def __init__(self) -> None:
        self.token = os.urandom(_TOKEN_BYTES)
        self._cell = array("B", self.token)
        self.address = self._cell.buffer_info()[0]

    def end(self) -> None:
        ctypes.memset(self.address, 0, _TOKEN_BYTES)


class SharedMemoryBackend(LinkBackend):
    """See the module's text.

    Args:
        single_copy: False never reads another process's memory.
    """

    name = "shared_memory"
    receives_inline = True

    def __init__(self, config: TransferConfig, *, single_copy: bool = True) -> None:
        self._config = config
        self._single_copy = single_copy
        self._proof = Lease()
        self._lock = threading.Lock()
        self._readable: dict[str, bool] = {}
        self._rings = Rings(config.chunk_bytes)
        self._num_threads = config.copy_threads or min(4, len(os.sched_getaffinity(0)))
        self._helpers: ThreadPoolExecutor | None = None

    def hello(self) -> bytes | None:
        if not hasattr(os, "memfd_create"):
            return None
        hello = _Hello(os.getpid(), self._proof.address, self._proof.token)
        return msgspec.msgpack.encode(hello)

    def why_not(self, peer: Peer) -> str:
        if not peer.same_host:
            return "the peer is on another host"
        if self.name not in peer.hellos:
            return "the peer's engine has no such backend"
        return ""

    def offer(self, source: PoolAccess, plan: Plan, peer: Peer) -> SendHalf:
        if self._can_read(peer):
            with ExitStack() as held:
                memory = held.enter_context(source.open())
                if memory.flat is not None:
                    return _SingleSend(memory, held.pop_all())
        if plan.data_bytes <= self._config.inline_bytes:
            return InlineSend(_INLINE, source, plan)
        return _RingHalf(self._rings.send(source, plan, peer.engine_id))

    def receive(
        self, link: Link, destination: PoolAccess, plan: Plan, opening: bytes, peer: Peer
    ) -> int:
        if opening[:1] == _SINGLE:
            self._read(link, destination, plan, opening[1:], peer)
        elif opening[:1] == _INLINE:
            receive_inline(destination, plan, memoryview(opening)[1:])
        else:
            receive_ring(self._rings, link, destination, plan, peer.engine_id)
        return len(plan.calls)

    def inline_receive_bytes(self, opening: bytes, inline_bytes: int) -> int:
        """A single copy waits for nobody, and of 1 MiB takes no longer than to find a thread for
        it. Where copies have one thread, as on a single core, no other could do it sooner."""
        if opening[:1] != _SINGLE:
            return inline_bytes
        alone = self._num_threads == 1
        limit = _INLINE_READ_BYTES_OF_ONE_THREAD if alone else _INLINE_READ_BYTES
        return max(inline_bytes, limit)

    def peer_lost(self, engine_id: str) -> None:
        with self._lock:
            self._readable.pop(engine_id, None)
        self._rings.drop(engine_id)

    def close(self) -> None:
        self._rings.close()
        with self._lock:
            helpers, self._helpers = self._helpers, None
        if helpers is not None:
            helpers.shutdown()

    def _can_read(self, peer: Peer) -> bool:
        """Whether this kernel lets us read the peer; by symmetry, whether it can read us."""
        if not self._single_copy:
            return False
        with self._lock:
            known = self._readable.get(peer.engine_id)
        if known is None:
            hello = _read_hello(peer)
            try:
                known = read_bytes(hello.pid, hello.address, _TOKEN_BYTES) == hello.token
            except TransferError:
                known = False
            with self._lock:
                self._readable[peer.engine_id] = known
        return known

    def _read(
        self, link: Link, destination: PoolAccess, plan: Plan, opening: bytes, peer: Peer
    ) -> None:
        base, lease_address, lease = _SINGLE_OPENING.unpack(opening)
        source = _Source(_read_hello(peer).pid, base, lease_address, lease)
        with destination.open() as memory:
            if memory.flat is None:
                _read_staged(link, source, memory, plan)
            else:
                self._read_flat(link, source, memory.flat.ctypes.data, plan)

    def _read_flat(self, link: Link, source: _Source, base: int, plan: Plan) -> None:
        if plan.data_bytes < self._config.parallel_bytes or self._num_threads == 1:
            work = batches(plan.calls, _READ_BYTES, MAX_VECTORS - 1)
            batch = next(work)
            for following in work:
                link.check()
                source.read(batch, base)
                batch = following
            source.read(batch, base, is_last=True)
            return
        piece_bytes = max(1 << 20, min(_READ_BYTES, plan.data_bytes // (2 * self._num_threads)))
        self._read_parallel(link, source, base, batches(plan.calls, piece_bytes, MAX_VECTORS))
        source.check_lease()

    def _read_parallel(self, link: Link, source: _Source, base: int, work: Iterator[Calls]) -> None:
        lock = threading.Lock()
        failed = threading.Event()

        def read() -> None:
            while not failed.is_set():
                with lock:
                    batch = next(work, None)
                if batch is None:
                    return
                try:
                    link.check()
                    source.read(batch, base)
                except TransferError:
                    failed.set()
                    raise

        helpers = [self._helper_threads().submit(read) for _ in range(self._num_threads - 1)]
        errors: list[BaseException] = []
        try:
            read()
        except TransferError as error:
            errors.append(error)
        # All of them, before the pool's memory is let go.
        errors += [e for e in (helper.exception() for helper in helpers) if e is not None]
        if errors:
            raise errors[0]

    def _helper_threads(self) -> ThreadPoolExecutor:
        with self._lock:
            if self._helpers is None:
                count = self._num_threads - 1
                self._helpers = ThreadPoolExecutor(count, "transfer-copy")
            return self._helpers


class _SingleSend(SendHalf):
    """The source's half of a single copy: it shows where the pool is, and holds it there."""

    needs_run = False

    def __init__(self, memory: HostMemory, held: ExitStack) -> None:
        assert memory.flat is not None
        self._held = held
        self._lease = Lease()
        self.opening = _SINGLE + _SINGLE_OPENING.pack(
            memory.flat.ctypes.data, self._lease.address, self._lease.token
        )

    def close(self) -> None:
        self._lease.end()
        self._held.close()


@dataclass
class _RingHalf(SendHalf):
    """The source's half over a ring."""

    ring: RingSend
    opening = _RING

    def run(self, link: Link) -> None:
        self.ring.run(link)

    def close(self) -> None:
        self.ring.close()


@dataclass(frozen=True, slots=True)
class _Source:
    """The source's pool, as its process shows it to us."""

    pid: int
    base: int
    lease_address: int
    lease: bytes

    def read(self, calls: Calls, here: int, *, is_last: bool = False) -> None:
        """Read calls into the pool at `here`; the last read of a leg takes the lease with it."""
        count = len(calls)
        if count == 1 and is_last:
            self._read_one(calls, here)
            return
        there = np.empty((count + is_last, 2), np.int64)
        into = np.empty((count + is_last, 2), np.int64)
        there[:count] = calls[:, ::2]
        into[:count] = calls[:, 1:]
        there[:count, 0] += self.base
        into[:count, 0] += here
        token = bytearray(_TOKEN_BYTES)
        if is_last:
            there[count] = self.lease_address, _TOKEN_BYTES
            into[count] = np.frombuffer(token, np.uint8).ctypes.data, _TOKEN_BYTES
        read_memory(self.pid, there, into)
        if is_last:
            self._compare(token)

    def _read_one(self, calls: Calls, here: int) -> None:
        """A leg of one small call: the same without NumPy, which is what takes time there."""
        src, dst, size = calls[0].tolist()
        token = array("Q", (0, 0))
        there = array("q", (self.base + src, size, self.lease_address, _TOKEN_BYTES))
        into = array("q", (here + dst, size, token.buffer_info()[0], _TOKEN_BYTES))
        read_vectors(
            self.pid, there.buffer_info()[0], into.buffer_info()[0], 2, size + _TOKEN_BYTES
        )
        self._compare(token.tobytes())

    def check_lease(self) -> None:
        """Raise `PeerLost` unless the source still holds the blocks."""
        self._compare(read_bytes(self.pid, self.lease_address, _TOKEN_BYTES))

    def _compare(self, token: bytes | bytearray) -> None:
        if token != self.lease:
            raise PeerLost("the source gave the blocks up while they were read")


def _read_staged(link: Link, source: _Source, memory: HostMemory, plan: Plan) -> None:
    """Read into a pool that does not lie in one piece, by way of a buffer."""
    block = plan.layout.bytes_per_block
    piece_bytes = max(block, _READ_BYTES - _READ_BYTES % block)
    for calls in batches(plan.calls, piece_bytes, 1):
        link.check()
        offset, size = calls[0, 1:].tolist()
        for buffer in incoming(memory, [offset], [size], piece_bytes, block):
            source.read(calls - np.array([0, offset, 0]), buffer.ctypes.data)
    source.check_lease()


def _read_hello(peer: Peer) -> _Hello:
    try:
        return msgspec.msgpack.decode(peer.hellos[SharedMemoryBackend.name], type=_Hello)
    except (KeyError, msgspec.DecodeError):
        raise PeerLost("the peer did not say how its memory is read") from None
