"""Between any two hosts, by NIXL: RDMA, shared memory or TCP, whatever UCX finds there.

The destination reads: one READ with a descriptor a call, from the source's pool into its own.
Each pool is registered with NIXL once, when its first leg begins; for RDMA that pins its pages, and
takes a moment. The source's half does nothing but show where the pool is. The opening carries what
the destination needs: NIXL's metadata of the pool, its address, and a lease.

Lease: 16 random bytes in registered memory, which the source overwrites before it gives the
blocks up. The destination reads them after the data. If they are still what was announced, every
byte was read while the blocks were pinned, even if the source has lost sight of us meanwhile.

NIXL can neither take a posted READ back nor say when it has stopped: after `release_xfer_handle` or
`remove_remote_agent` of one in flight, the bytes still arrive once a peer that was stopped goes on
(nixl-cu12 1.5.1, UCX over TCP). So a half that is cancelled waits until its READ, of at most
`_REQUEST_BYTES` or one call, has ended by itself. With a peer that was killed that is at once; one
that is stopped, but alive, holds the blocks until it goes on.

Only pools that lie in host memory in one piece. NIXL's progress thread polls, which costs part of
a core. Installed by the extra `nixl`; imported only here.
"""

from __future__ import annotations

from contextlib import ExitStack

import msgspec
import numpy as np
import numpy.typing as npt

from transfer.backends.base import Link, LinkBackend, Peer, Plan, SendHalf
from transfer.backends.nixl_agent import Descriptors, Lease, NixlAgent
from transfer.config import TransferConfig
from transfer.errors import BackendError, PeerLost, ProtocolError
from transfer.pool_access import Bytes, HostMemory, PoolAccess
from transfer.strategies import batches

_REQUEST_BYTES = 16 << 20
_MAX_DESCRIPTORS = 4096


class _Opening(msgspec.Struct, frozen=True, array_like=True):
    """What the destination needs to read the source's pool.

    Attributes:
        metadata: NIXL's, of the pool and the leases.
        address: of the pool.
        lease_address, lease: where 16 bytes are, and what they are.
    """

    metadata: bytes
    address: int
    lease_address: int
    lease: bytes


class NixlBackend(LinkBackend):
    """See the module's text.

    Args:
        config: the engine's.
        plugin: NIXL's own backend.

    Raises:
        BackendError: NIXL is not installed, or does not start.
    """

    name = "nixl"

    def __init__(self, config: TransferConfig, *, plugin: str = "UCX") -> None:
        self._agent = NixlAgent(plugin)

    def hello(self) -> bytes | None:
        return self._agent.name.encode()

    def why_not(self, peer: Peer) -> str:
        return "" if self.name in peer.hellos else "the peer's engine has no such backend"

    def offer(self, source: PoolAccess, plan: Plan, peer: Peer) -> SendHalf:
        with ExitStack() as held:
            flat = _flat(held.enter_context(source.open()))
            metadata = self._agent.register(source, flat)
            lease = self._agent.lease()
            opening = _Opening(metadata, flat.ctypes.data, lease.address, lease.token)
            return _ShownPool(lease, msgspec.msgpack.encode(opening), held.pop_all())

    def receive(
        self, link: Link, destination: PoolAccess, plan: Plan, opening: bytes, peer: Peer
    ) -> int:
        shown = _read_opening(opening)
        with destination.open() as memory, self._agent.remote(peer, shown.metadata) as remote:
            flat = _flat(memory)
            self._agent.register(destination, flat)
            request_bytes = max(_REQUEST_BYTES, int(plan.calls[:, 2].max()))
            for calls in batches(plan.calls, request_bytes, _MAX_DESCRIPTORS):
                link.check()
                there = _descriptors(shown.address, calls[:, 0], calls[:, 2])
                here = _descriptors(flat.ctypes.data, calls[:, 1], calls[:, 2])
                remote.read(there, here)
            if not remote.still_shows(shown.lease_address, shown.lease):
                raise PeerLost("the source gave the blocks up while they were read")
        return len(plan.calls)

    def peer_lost(self, engine_id: str) -> None:
        self._agent.forget(engine_id)

    def close(self) -> None:
        self._agent.close()


class _ShownPool(SendHalf):
    """The source's half: it shows where the pool is, and holds it there."""

    needs_run = False

    def __init__(self, lease: Lease, opening: bytes, held: ExitStack) -> None:
        self.opening = opening
        self._lease = lease
        self._held = held

    def close(self) -> None:
        self._lease.end()
        self._held.close()


def _flat(memory: HostMemory) -> Bytes:
    if memory.flat is None:
        raise BackendError("nixl moves pools that lie in host memory in one piece only")
    return memory.flat


def _descriptors(
    base: int, offsets: npt.NDArray[np.int64], sizes: npt.NDArray[np.int64]
) -> Descriptors:
    table = np.zeros((len(offsets), 3), np.uint64)
    table[:, 0] = offsets
    table[:, 0] += np.uint64(base)
    table[:, 1] = sizes
    return table


def _read_opening(opening: bytes) -> _Opening:
    try:
        return msgspec.msgpack.decode(opening, type=_Opening)
    except msgspec.DecodeError as error:
        raise ProtocolError(f"an opening that cannot be read: {error}") from None
