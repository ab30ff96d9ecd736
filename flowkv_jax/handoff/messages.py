"""What the two sides of a hand-off say to each other; see the package. No JAX."""

from __future__ import annotations

import struct
from collections.abc import Sequence

import msgspec

from flowkv_jax.cluster.sequence_wire import WireSpecs
from flowkv_jax.errors import FlowKVError


class ProtocolError(FlowKVError):
    """A message of a hand-off that cannot be read."""


class _Message(msgspec.Struct, frozen=True, array_like=True):
    handoff: str


class Reserve(_Message, frozen=True, array_like=True, tag=0):
    """P: a sequence will come.

    Attributes:
        src: the name of P's node.
        sequence: exactly one; its output tokens are those computed at P.
    """

    src: str
    sequence: WireSpecs


class Granted(_Message, frozen=True, array_like=True, tag=1):
    """D: room is reserved.

    Attributes:
        num_reused_blocks: the first so many blocks are there already and must not be sent.
        blocks: int32 ids of the blocks to fill, in token order. generations: int64.
    """

    num_reused_blocks: int
    blocks: bytes
    generations: bytes


class Deferred(_Message, frozen=True, array_like=True, tag=2):
    """D: not now, for want of something that others will free."""

    reason: str


class Refused(_Message, frozen=True, array_like=True, tag=3):
    """D: never."""

    reason: str


class Filled(_Message, frozen=True, array_like=True, tag=4):
    """P: the K/V are complete, and on their way if `num_blocks` is not 0.

    Attributes:
        output: tokens sampled at P beyond those in RESERVE.
        num_runs, num_calls, data_bytes: what is about to move.
        waited_s: since the K/V were complete.
    """

    output: bytes
    num_blocks: int
    num_runs: int
    num_calls: int
    data_bytes: int
    waited_s: float


class Taken(_Message, frozen=True, array_like=True, tag=5):
    """D: the sequence runs here; no block had to move."""


class Withdraw(_Message, frozen=True, array_like=True, tag=6):
    """P: it will not come."""


class Released(_Message, frozen=True, array_like=True, tag=7):
    """D: the reservation is given up."""

    reason: str


Message = Reserve | Granted | Deferred | Refused | Filled | Taken | Withdraw | Released

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Message)


def encode(message: Message) -> bytes:
    return _encoder.encode(message)


def decode(payload: bytes) -> Message:
    """Raises `ProtocolError` for anything else than a message."""
    try:
        return _decoder.decode(payload)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ProtocolError(f"not a hand-off message: {error}") from None


def pack_ids(ids: Sequence[int]) -> bytes:
    """int32, little-endian."""
    return struct.pack(f"<{len(ids)}i", *ids)


def unpack_ids(data: bytes) -> list[int]:
    """Raises `ProtocolError` where `data` is no whole number of ids."""
    if len(data) % 4:
        raise ProtocolError(f"{len(data)} bytes are no int32 ids")
    return list(struct.unpack(f"<{len(data) // 4}i", data))


def pack_generations(generations: Sequence[int]) -> bytes:
    """int64, little-endian."""
    return struct.pack(f"<{len(generations)}q", *generations)


def unpack_generations(data: bytes) -> tuple[int, ...]:
    """Raises `ProtocolError` where `data` is no whole number of generations."""
    if len(data) % 8:
        raise ProtocolError(f"{len(data)} bytes are no int64 generations")
    return struct.unpack(f"<{len(data) // 8}q", data)
