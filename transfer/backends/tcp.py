"""Between any two engines, over plain TCP.

A leg runs over a few data streams beside the control channel: connections of their own, opened
like it (both sides prove the secret), by whichever side had dialled, and kept for later legs. A
stream serves one leg at a time, in one direction.

The bytes are cut into chunks, the same way on both sides. Each of the source's streams takes the
next chunk as soon as it has sent one, so a slow stream holds nobody up; what the socket does not
take waits in the pool, not in memory of ours. A chunk is one frame of `wire`, with

    leg u64 | chunk index u64         covered by the header's tag
    the chunk's bytes                 sent from, and received into, the pools themselves

and each stream ends the leg with a frame of index `_END`, so that both sides know that it is clean.
A stream of a leg that failed is closed.

A stream that breaks, or over which nothing comes for `peer_timeout_s`, fails the leg with a
`BackendError`, which another path or backend may make good.

A path through a node of a third engine goes there: that engine passes the streams on (`relay`), and
cannot change a header unnoticed. Small legs go with their offer, straight.

With a secret, the headers are authenticated: nobody else can choose where bytes go, or which
bytes count. The bytes themselves are neither authenticated nor encrypted; `Verification.CHECKSUM`
finds accidents only. Small legs go with their offer, whose tag covers them.
"""

from __future__ import annotations

import itertools
import struct
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TypeVar

import msgspec
import numpy as np

from transfer.backends.base import Link, LinkBackend, Peer, Plan, SendHalf
from transfer.backends.inline import InlineSend, receive_inline
from transfer.backends.tcp_streams import Stream, StreamLease, TcpStreams
from transfer.config import TransferConfig
from transfer.connection import Address, Connection
from transfer.dialler import Dialler
from transfer.errors import ProtocolError, TransferError
from transfer.parallel import in_parallel
from transfer.pool_access import HostMemory, PoolAccess, incoming, outgoing
from transfer.strategies import Calls, batches
from transfer.wire import HEADER_BYTES, Kind, parse_header

_INLINE, _STREAMS = b"i", b"s"
_WHERE = struct.Struct("<QQ")
_END = (1 << 64) - 1
_CHUNK_BYTES = 1 << 20
_MAX_PIECES = 256
_NOTE_S = 60.0


class _Need(msgspec.Struct, frozen=True, array_like=True, tag=0):
    """Source to destination: open or choose this many streams, for you had dialled."""

    count: int


class _Use(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """The leg goes over these streams."""

    streams: list[int]


_N = TypeVar("_N", _Need, _Use)
_decoder = msgspec.msgpack.Decoder(_Need | _Use)


class TcpBackend(LinkBackend):
    """See the module's text.

    Args:
        addresses: by the hops of a path, another address of the peer at its end, to be dialled
            for the streams of that path. So two links between the same two hosts can be two paths.
            Only the engine that had dialled the peer needs them.
    """

    name = "tcp"
    receives_inline = True

    def __init__(
        self,
        config: TransferConfig,
        addresses: Mapping[tuple[str, ...], Address] | None = None,
    ) -> None:
        self._config = config
        self._streams = TcpStreams(
            self.name, config.handshake_timeout_s, config.peer_timeout_s, addresses or {}
        )

    @property
    def num_streams(self) -> int:
        """Open data streams, over all peers."""
        return len(self._streams)

    def attach(self, dialler: Dialler) -> None:
        self._streams.attach(dialler)

    def accept_stream(self, connection: Connection) -> bool:
        return self._streams.accept(connection)

    def why_not(self, peer: Peer) -> str:
        return "" if self.name in peer.hellos else "the peer's engine has no such backend"

    def offer(self, source: PoolAccess, plan: Plan, peer: Peer) -> SendHalf:
        if plan.data_bytes <= self._config.inline_bytes:
            return InlineSend(_INLINE, source, plan)
        return _TcpSend(self, source, plan, peer)

    def receive(
        self, link: Link, destination: PoolAccess, plan: Plan, opening: bytes, peer: Peer
    ) -> int:
        if opening[:1] == _INLINE:
            receive_inline(destination, plan, memoryview(opening)[1:])
        else:
            lease = self._lease_for_receiving(link, plan, peer)
            with _ending(lease, link), destination.open() as memory:
                link.on_stop(lease.stop)
                _Receiving(memory, plan, _chunks_of(plan)).run(lease.streams, lease.stop)
        return len(plan.calls)

    def lease_for_sending(self, link: Link, plan: Plan, peer: Peer, num_chunks: int) -> StreamLease:
        """Streams for a leg from here to the peer."""
        count = min(self._config.streams, num_chunks)
        if peer.address is not None:
            lease = self._streams.lease(peer, plan.hops, count, sending=True)
            try:
                link.put(msgspec.msgpack.encode(_Use(lease.numbers)))
            except TransferError:
                lease.end(clean=False)
                raise
            return lease
        link.put(msgspec.msgpack.encode(_Need(count)))
        return self._streams.take(peer.engine_id, _read_note(link, _Use).streams, link)

    def peer_lost(self, engine_id: str) -> None:
        self._streams.drop(engine_id)

    def close(self) -> None:
        self._streams.close()

    def _lease_for_receiving(self, link: Link, plan: Plan, peer: Peer) -> StreamLease:
        if peer.address is None:
            return self._streams.take(peer.engine_id, _read_note(link, _Use).streams, link)
        count = _read_note(link, _Need).count
        if not 1 <= count <= 64:
            raise ProtocolError(f"the peer asks for {count} streams")
        lease = self._streams.lease(peer, plan.hops, count, sending=False)
        try:
            link.put(msgspec.msgpack.encode(_Use(lease.numbers)))
        except TransferError:
            lease.end(clean=False)
            raise
        return lease


class _TcpSend(SendHalf):
    opening = _STREAMS

    def __init__(self, backend: TcpBackend, source: PoolAccess, plan: Plan, peer: Peer) -> None:
        self._backend = backend
        self._source = source
        self._plan = plan
        self._peer = peer
        self._lease: StreamLease | None = None
        self._is_sent = False

    def run(self, link: Link) -> None:
        chunks = _chunks_of(self._plan)
        self._lease = lease = self._backend.lease_for_sending(
            link, self._plan, self._peer, len(chunks)
        )
        with _failing_as_told(link), self._source.open() as memory:
            link.on_stop(lease.stop)
            _Sending(memory, self._plan, chunks).run(lease.streams, lease.stop)
        self._is_sent = True

    def close(self) -> None:
        """The streams serve another leg only once the destination has read this one's end."""
        if self._lease is not None:
            self._lease.end(clean=self._is_sent)


@contextmanager
def _ending(lease: StreamLease, link: Link) -> Iterator[None]:
    clean = False
    try:
        with _failing_as_told(link):
            yield
        clean = True
    finally:
        lease.end(clean=clean)


@contextmanager
def _failing_as_told(link: Link) -> Iterator[None]:
    """A half that was stopped fails with the reason for that, not with its streams' end."""
    try:
        yield
    except TransferError:
        link.check()
        raise


def _chunks_of(plan: Plan) -> list[Calls]:
    """What each frame carries: the same on both sides, so no setting has a part in it."""
    block = plan.layout.bytes_per_block
    return list(batches(plan.calls, max(block, _CHUNK_BYTES - _CHUNK_BYTES % block), _MAX_PIECES))


class _Sending:
    """Chunks of one leg, handed to whichever stream is free."""

    def __init__(self, memory: HostMemory, plan: Plan, chunks: list[Calls]) -> None:
        self._memory = memory
        self._plan = plan
        self._chunks = chunks
        self._next = itertools.count()

    def run(self, streams: Sequence[Stream], stop: Callable[[], None]) -> None:
        in_parallel([partial(self._send, stream) for stream in streams], stop)

    def _send(self, stream: Stream) -> None:
        block = self._plan.layout.bytes_per_block
        # `next` of a count is one step of the interpreter: no two streams get the same index.
        while (index := next(self._next)) < len(self._chunks):
            calls = self._chunks[index]
            offsets, sizes = calls[:, 0].tolist(), calls[:, 2].tolist()
            size = sum(sizes)
            head = self._head(stream, index, size)
            if self._memory.flat is not None:
                pieces = outgoing(self._memory, offsets, sizes, size, block)
                stream.send([head, *(piece.data for piece in pieces)])
            else:
                stream.send([head])
                for piece in outgoing(self._memory, offsets, sizes, size, block):
                    stream.send([piece.data])
        stream.send([self._head(stream, _END, 0)])

    def _head(self, stream: Stream, index: int, size: int) -> memoryview:
        where = _WHERE.pack(self._plan.leg, index)
        return memoryview(stream.out.header(Kind.DATA, size, where) + where)


class _Receiving:
    """Chunks of one leg, from several streams, each exactly once."""

    def __init__(self, memory: HostMemory, plan: Plan, chunks: list[Calls]) -> None:
        self._memory = memory
        self._plan = plan
        self._chunks = chunks
        self._lock = threading.Lock()
        self._missing = np.ones(len(chunks), np.bool_)

    def run(self, streams: Sequence[Stream], stop: Callable[[], None]) -> None:
        in_parallel([partial(self._receive, stream) for stream in streams], stop)
        if self._missing.any():
            raise ProtocolError(f"{int(self._missing.sum())} chunks never came")

    def _receive(self, stream: Stream) -> None:
        block = self._plan.layout.bytes_per_block
        largest = max(int(calls[:, 2].sum()) for calls in self._chunks)
        head = bytearray(HEADER_BYTES + _WHERE.size)
        while True:
            stream.receive([memoryview(head)])
            kind, size = parse_header(bytes(head[:HEADER_BYTES]), largest)
            stream.into.check(bytes(head[:HEADER_BYTES]), bytes(head[HEADER_BYTES:]))
            leg, index = _WHERE.unpack_from(head, HEADER_BYTES)
            if kind is not Kind.DATA or leg != self._plan.leg:
                raise ProtocolError(f"a frame of leg {leg} on a stream of leg {self._plan.leg}")
            if index == _END:
                return
            calls = self._claim(index, size)
            offsets, sizes = calls[:, 1].tolist(), calls[:, 2].tolist()
            buffers = incoming(self._memory, offsets, sizes, size, block)
            if self._memory.flat is not None:
                stream.receive([buffer.data for buffer in buffers])
            else:
                for buffer in buffers:
                    stream.receive([buffer.data])

    def _claim(self, index: int, size: int) -> Calls:
        with self._lock:
            if index >= len(self._chunks) or not self._missing[index]:
                raise ProtocolError(f"chunk {index} of {len(self._chunks)} came again, or is none")
            self._missing[index] = False
        calls = self._chunks[index]
        if size != int(calls[:, 2].sum()):
            raise ProtocolError(f"chunk {index} came with {size} bytes")
        return calls


def _read_note(link: Link, kind: type[_N]) -> _N:
    try:
        note = _decoder.decode(link.get(_NOTE_S))
    except msgspec.DecodeError as error:
        raise ProtocolError(f"a note that cannot be read: {error}") from None
    if not isinstance(note, kind):
        raise ProtocolError(f"a {type(note).__name__} where {kind.__name__} was due")
    return note
