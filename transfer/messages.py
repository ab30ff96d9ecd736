"""What two engines say to each other over a channel. Imports no JAX.

The source's engine drives. For one leg of a transfer:

    source                             destination
    OFFER runs, backend, opening  ->   checks bounds, generations, that nobody else writes there
                                  <-   ACCEPT (only where it takes longer) or FAILED code, text
    NOTE ...                     <->   NOTE ...         the two halves of the backend
    DIGEST checksum               ->                    with verification
                                  <-   MOVED            with generations of the source: all bytes
    CONFIRM                       ->                    were read before any block was freed
                                  <-   DONE             all bytes are in the pool, and verified
    ABORT                         ->                    the source's half failed
                                  <-   FAILED           the destination's half has stopped: a fence

and for a transfer that does not complete, once its legs have stopped:

    END outcome                   ->   its last state; nothing is written any more
                                  <-   ENDED state      COMPLETED if everything had arrived before

Beside transfers, in both directions and unanswered:

    NODES, UNREGISTERED                pools that came, and that went
    NOTIFY node, payload               a message of the application (`notifications`)

Every message to the destination can be sent again: it answers a QUERY, or a second ABORT or END,
with what it answered first, so a lost answer costs a question and no transfer.
"""

from __future__ import annotations

import struct
from typing import Annotated

import msgspec
import numpy as np

from pallas_kernels.kv_layout import KVLayout
from transfer.errors import ProtocolError
from transfer.types import MAX_TAG_CHARACTERS, BlockRun


class NodeInfo(msgspec.Struct, frozen=True, array_like=True):
    """A registered pool, as its engine announces it."""

    name: str
    layout: KVLayout
    num_blocks: int


class Introduction(msgspec.Struct, frozen=True, array_like=True, tag=0):
    """First message in both directions.

    Attributes:
        engine_id: differs for every engine ever started, so a restarted process is a new peer.
        host_id: equal for engines that run under one kernel.
        nodes: pools here.
        backends: for each backend that works here, what its other half must know.
        started_ns: when the engine started, since 1970: of two that hold a node of one name, the
            later one counts.
        partings: for other engines, how often this one has lost each.
        port: where it listens, at the address that it connects from; None where it does not.
    """

    engine_id: str
    host_id: str
    nodes: list[NodeInfo]
    backends: dict[str, bytes]
    started_ns: int
    partings: dict[str, int]
    port: int | None = None


class Nodes(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """Pools registered after the introduction."""

    nodes: list[NodeInfo]


class Unregistered(msgspec.Struct, frozen=True, array_like=True, tag=17):
    """Pools that are not there any more."""

    names: list[str]


class Notify(msgspec.Struct, frozen=True, array_like=True, tag=18):
    """A notification of the application to pool `node`; not answered."""

    node: str
    payload: bytes


class Offer(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """One leg.

    Attributes:
        transfer: names the transfer, at any engine.
        leg: unique at the source's engine.
        attempt, num_legs: the transfer is complete when `num_legs` legs of one attempt are.
        src, dst, hops: node names.
        runs: packed by `pack_runs`.
        strategy, backend: names.
        verify: a DIGEST follows, unless `digest` has it.
        confirm: DONE must not come before MOVED was answered by CONFIRM.
        dst_generations: int64, little-endian, in run order; empty for no check.
        deadline_s: seconds left; None for no deadline.
        tag: the request's.
        path_type: kind of the attempt's path, by name.
        opening: for the destination's half of the backend.
    """

    transfer: str
    leg: int
    attempt: int
    num_legs: int
    src: str
    dst: str
    hops: tuple[str, ...]
    runs: bytes
    strategy: str
    backend: str
    verify: bool
    digest: int | None
    confirm: bool
    dst_generations: bytes
    deadline_s: float | None
    tag: Annotated[str, msgspec.Meta(max_length=MAX_TAG_CHARACTERS)]
    path_type: str
    opening: bytes


class Accept(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """The destination's half has begun."""

    leg: int


class Note(msgspec.Struct, frozen=True, array_like=True, tag=5):
    """From one half of a backend to the other."""

    leg: int
    to_source: bool
    body: bytes


class Digest(msgspec.Struct, frozen=True, array_like=True, tag=6):
    """Checksum of what the source's blocks hold."""

    leg: int
    digest: int


class Moved(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """All bytes have arrived: are the source's generations still what they were?"""

    leg: int


class Confirm(msgspec.Struct, frozen=True, array_like=True, tag=16):
    """They are."""

    leg: int


class Done(msgspec.Struct, frozen=True, array_like=True, tag=7):
    """Everything is in the destination's pool. `calls`: how many calls it took."""

    leg: int
    calls: int


class Failed(msgspec.Struct, frozen=True, array_like=True, tag=8):
    """The destination refused the leg, or its half has stopped."""

    leg: int
    code: str
    text: str


class Abort(msgspec.Struct, frozen=True, array_like=True, tag=9):
    """The leg is not wanted any more; answered by FAILED, or by DONE."""

    leg: int
    code: str
    text: str


class End(msgspec.Struct, frozen=True, array_like=True, tag=10):
    """The transfer ends without completing; answered by ENDED."""

    transfer: str
    code: str
    text: str


class Ended(msgspec.Struct, frozen=True, array_like=True, tag=11):
    """Last state of the transfer at the destination: the value of a `TransferState`."""

    transfer: str
    state: str


class Query(msgspec.Struct, frozen=True, array_like=True, tag=12):
    """What became of this leg? Answered by ACCEPT, DONE or FAILED."""

    leg: int


class Ping(msgspec.Struct, frozen=True, array_like=True, tag=13):
    """Are you there? Answered by PONG."""


class Pong(msgspec.Struct, frozen=True, array_like=True, tag=14):
    """I am."""


class Bye(msgspec.Struct, frozen=True, array_like=True, tag=15):
    """The engine closes; nothing follows."""


Message = (
    Introduction
    | Nodes
    | Unregistered
    | Notify
    | Offer
    | Accept
    | Note
    | Digest
    | Moved
    | Confirm
    | Done
    | Failed
    | Abort
    | End
    | Ended
    | Query
    | Ping
    | Pong
    | Bye
)

decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)
_encoder = msgspec.msgpack.Encoder()


def encode(message: Message) -> bytes:
    return _encoder.encode(message)


_FEW_RUNS = 16
"""Up to this many, plain Python is faster than NumPy."""


def pack_runs(runs: tuple[BlockRun, ...]) -> bytes:
    """Three int64, little-endian, a run."""
    if len(runs) <= _FEW_RUNS:
        return b"".join([struct.pack("<3q", *run) for run in runs])
    return np.asarray(runs, dtype="<i8").tobytes()


def unpack_runs(packed: bytes) -> tuple[BlockRun, ...]:
    """Runs of an offer.

    Raises:
        ProtocolError: not whole runs, or not runs at all.
    """
    if not packed or len(packed) % 24:
        raise ProtocolError(f"runs of {len(packed)} bytes; 24 a run expected")
    if len(packed) <= _FEW_RUNS * 24:
        runs = tuple(map(BlockRun._make, struct.iter_unpack("<3q", packed)))
        if all(run.num_blocks > 0 <= min(run) for run in runs):
            return runs
        raise ProtocolError("an offer with a negative start, or a run without blocks")
    table = np.frombuffer(packed, "<i8").reshape(-1, 3)
    if int(table.min()) < 0 or int(table[:, 2].min()) < 1:
        raise ProtocolError("an offer with a negative start, or a run without blocks")
    return tuple(map(BlockRun._make, table.tolist()))


def pack_ids(values: tuple[int, ...]) -> bytes:
    return np.asarray(values, dtype="<i8").tobytes()


def unpack_ids(packed: bytes) -> tuple[int, ...]:
    if len(packed) % 8:
        raise ProtocolError(f"{len(packed)} bytes are not a list of int64")
    return tuple(np.frombuffer(packed, "<i8").tolist())
