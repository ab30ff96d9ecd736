"""A pipeline through an anonymous segment that two processes map.

    source                                     destination
    note: name of a Unix socket          ->    connects there, sends a token, and the same token
                                         <-    as a note, so that each knows who the other is
    the segment's descriptor over it     ->    maps it            (once; rings are kept)
    fills slot i,   note: slot, bytes    ->    empties slot i
                                         <-    note: slot is free

The bytes pass in call order, cut at slot boundaries and nowhere else. A ring serves one leg at a
time; a leg that finds none idle makes another. After a leg that failed the ring is dropped, for
notes about its slots may be on their way.
"""

from __future__ import annotations

import hmac
import mmap
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeVar

import msgspec
import numpy as np

from transfer.backends.base import Link, Plan
from transfer.errors import BackendError, ProtocolError
from transfer.pool_access import Bytes, PoolAccess, incoming, outgoing

_SLOTS = 4
_PIECE_BYTES = 1 << 22
_HAND_OVER_S = 10.0
_LOOK_UP_S = 0.05
_NOTE_S = 60.0


class _Use(msgspec.Struct, frozen=True, array_like=True, tag=0):
    """The leg goes over this ring; `name` is the socket to get it from, if it is new."""

    ring: int
    name: bytes


class _Token(msgspec.Struct, frozen=True, array_like=True, tag=1):
    token: bytes


class _Slot(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """A slot is full; or, back to the source, free."""

    slot: int
    size: int


_N = TypeVar("_N", _Use, _Token, _Slot)

_decoder = msgspec.msgpack.Decoder(_Use | _Token | _Slot)
_encode = msgspec.msgpack.Encoder().encode


@dataclass
class Ring:
    """A mapped segment of `_SLOTS` slots."""

    number: int
    memory: mmap.mmap
    slot_bytes: int

    def slot(self, index: int, size: int) -> Bytes:
        """uint8 view of a slot's first `size` bytes."""
        if not (0 <= index < _SLOTS and 0 < size <= self.slot_bytes):
            raise ProtocolError(f"slot {index} with {size} bytes does not exist in the ring")
        return np.frombuffer(self.memory, np.uint8, size, index * self.slot_bytes)


class Rings:
    """Rings of one backend, by peer: idle ones to send over, and all that we receive by."""

    def __init__(self, slot_bytes: int) -> None:
        self.slot_bytes = slot_bytes
        self._lock = threading.Lock()
        self._next = 0
        self._idle: dict[str, list[Ring]] = {}
        self._receiving: dict[tuple[str, int], Ring] = {}

    def send(self, source: PoolAccess, plan: Plan, engine_id: str) -> RingSend:
        return RingSend(self, source, plan, engine_id)

    def lease(self, engine_id: str) -> tuple[Ring, int | None]:
        """A ring for one leg, and its descriptor if it is new and the peer has to get it."""
        with self._lock:
            idle = self._idle.get(engine_id)
            if idle:
                return idle.pop(), None
            self._next += 1
            number = self._next
        descriptor = os.memfd_create("transfer-ring", os.MFD_CLOEXEC)
        os.ftruncate(descriptor, _SLOTS * self.slot_bytes)
        memory = mmap.mmap(descriptor, _SLOTS * self.slot_bytes)
        return Ring(number, memory, self.slot_bytes), descriptor

    def give_back(self, engine_id: str, ring: Ring) -> None:
        with self._lock:
            self._idle.setdefault(engine_id, []).append(ring)

    def received(self, engine_id: str, number: int) -> Ring | None:
        with self._lock:
            return self._receiving.get((engine_id, number))

    def add_received(self, engine_id: str, ring: Ring) -> None:
        with self._lock:
            self._receiving[engine_id, ring.number] = ring

    def drop_received(self, engine_id: str, number: int) -> None:
        with self._lock:
            self._receiving.pop((engine_id, number), None)

    def drop(self, engine_id: str) -> None:
        """Forget a peer's rings; a leg that still uses one keeps it mapped until it ends."""
        with self._lock:
            self._idle.pop(engine_id, None)
            for key in [k for k in self._receiving if k[0] == engine_id]:
                del self._receiving[key]

    def close(self) -> None:
        with self._lock:
            self._idle.clear()
            self._receiving.clear()


class RingSend:
    """The source's half."""

    def __init__(self, rings: Rings, source: PoolAccess, plan: Plan, engine_id: str) -> None:
        self._rings = rings
        self._source = source
        self._plan = plan
        self._engine_id = engine_id
        self._clean: Ring | None = None

    def run(self, link: Link) -> None:
        ring, descriptor = self._rings.lease(self._engine_id)
        if descriptor is None:
            link.put(_encode(_Use(ring.number, b"")))
        else:
            try:
                _hand_over(link, ring, descriptor)
            finally:
                os.close(descriptor)
        self._fill(link, ring)
        self._clean = ring

    def close(self) -> None:
        """Keep the ring, now that the destination has emptied it; after an error, let it go."""
        if self._clean is not None:
            self._rings.give_back(self._engine_id, self._clean)

    def _fill(self, link: Link, ring: Ring) -> None:
        plan = self._plan
        left = plan.data_bytes
        free = list(range(_SLOTS))
        with self._source.open() as memory:
            pieces = outgoing(
                memory,
                plan.calls[:, 0].tolist(),
                plan.calls[:, 2].tolist(),
                _PIECE_BYTES,
                plan.layout.bytes_per_block,
            )
            stream = _Stream(pieces)
            while left:
                slot = free.pop() if free else _get(link, _Slot).slot
                size = min(left, ring.slot_bytes)
                stream.read_into(ring.slot(slot, size))
                link.put(_encode(_Slot(slot, size)))
                left -= size


def receive_ring(
    rings: Rings, link: Link, destination: PoolAccess, plan: Plan, engine_id: str
) -> None:
    """The destination's half."""
    use = _get(link, _Use)
    ring = rings.received(engine_id, use.ring)
    if use.name:
        ring = _take_over(link, use)
        rings.add_received(engine_id, ring)
    if ring is None:
        raise BackendError(f"ring {use.ring} of the peer is not mapped here")
    left = plan.data_bytes
    try:
        with destination.open() as memory:
            pieces = incoming(
                memory,
                plan.calls[:, 1].tolist(),
                plan.calls[:, 2].tolist(),
                _PIECE_BYTES,
                plan.layout.bytes_per_block,
            )
            stream = _Stream(pieces)
            while left:
                full = _get(link, _Slot)
                if full.size > left:
                    raise ProtocolError(f"{full.size} bytes came where {left} were due")
                stream.write_from(ring.slot(full.slot, full.size))
                left -= full.size
                link.put(_encode(full))
            stream.end()
    except Exception:
        rings.drop_received(engine_id, use.ring)
        raise


class _Stream:
    """Pieces of a pool as one stream of bytes."""

    def __init__(self, pieces: Iterator[Bytes]) -> None:
        self._pieces = pieces
        self._piece: Bytes = np.empty(0, np.uint8)

    def read_into(self, slot: Bytes) -> None:
        done = 0
        while done < slot.size:
            part = self._next(slot.size - done)
            slot[done : done + part.size] = part
            done += part.size

    def write_from(self, slot: Bytes) -> None:
        done = 0
        while done < slot.size:
            part = self._next(slot.size - done)
            part[:] = slot[done : done + part.size]
            done += part.size

    def end(self) -> None:
        """Lets the last piece be written to its pool."""
        next(self._pieces, None)

    def _next(self, limit: int) -> Bytes:
        if not self._piece.size:
            self._piece = next(self._pieces)
        part, self._piece = self._piece[:limit], self._piece[limit:]
        return part


def _hand_over(link: Link, ring: Ring, descriptor: int) -> None:
    name = b"\0transfer-" + os.urandom(16)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(name)
        listener.listen(1)
        link.put(_encode(_Use(ring.number, name)))
        try:
            with _accept(listener, link) as connection:
                connection.settimeout(_HAND_OVER_S)
                given = connection.recv(16, socket.MSG_WAITALL)
                if not hmac.compare_digest(given, _get(link, _Token).token):
                    raise BackendError("another process than the peer asked for the segment")
                socket.send_fds(connection, [b"r"], [descriptor])
        except OSError as error:
            link.check()
            raise BackendError(f"cannot hand the segment over: {error}") from None


def _take_over(link: Link, use: _Use) -> Ring:
    token = os.urandom(16)
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(_HAND_OVER_S)
            connection.connect(use.name)
            connection.sendall(token)
            link.put(_encode(_Token(token)))
            _, descriptors, _, _ = socket.recv_fds(connection, 1, 1)
    except OSError as error:
        raise BackendError(f"cannot reach the peer's segment: {error}") from None
    if not descriptors:
        raise BackendError("the peer handed over no segment")
    try:
        size = os.fstat(descriptors[0]).st_size
        if size < _SLOTS or size % _SLOTS:
            raise ProtocolError(f"a segment of {size} bytes is no ring of {_SLOTS} slots")
        memory = mmap.mmap(descriptors[0], size)
    finally:
        os.close(descriptors[0])
    return Ring(use.ring, memory, size // _SLOTS)


def _get(link: Link, kind: type[_N]) -> _N:
    try:
        note = _decoder.decode(link.get(_NOTE_S))
    except msgspec.DecodeError as error:
        raise ProtocolError(f"a note that cannot be read: {error}") from None
    if not isinstance(note, kind):
        raise ProtocolError(f"a {type(note).__name__} where {kind.__name__} was due")
    return note


def _accept(listener: socket.socket, link: Link) -> socket.socket:
    """The next connection. Nothing but time wakes an `accept` here, so it looks up often."""
    listener.settimeout(_LOOK_UP_S)
    for _ in range(round(_HAND_OVER_S / _LOOK_UP_S)):
        with suppress(TimeoutError):
            return listener.accept()[0]
        link.check()
    raise BackendError("the peer did not come for the segment")
