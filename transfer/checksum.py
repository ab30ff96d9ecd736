"""Checksum of what a leg moved, on either side. Imports no JAX.

CRC-32 of zlib: it is in the standard library, catches every burst of up to 32 bits and swapped
pieces too (a plain sum would not), releases the interpreter lock, and runs at several GB/s where
zlib uses the processor's carry-less multiplication. It finds accidents. It is no protection
against someone who wants to deceive.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable

from transfer.backends.base import Plan
from transfer.errors import ChecksumMismatch
from transfer.pool_access import Bytes, PoolAccess, outgoing

_PIECE_BYTES = 4 << 20


def checksum(pieces: Iterable[Bytes]) -> int:
    """CRC-32 of the pieces, one after the other."""
    value = 0
    for piece in pieces:
        value = zlib.crc32(piece.data, value)
    return value


def plan_checksum(access: PoolAccess, plan: Plan, *, of_source: bool) -> int:
    """Checksum of the plan's byte ranges, in call order, as one side holds them."""
    offsets = plan.calls[:, 0 if of_source else 1].tolist()
    sizes = plan.calls[:, 2].tolist()
    with access.open() as memory:
        block = access.layout.bytes_per_block
        return checksum(outgoing(memory, offsets, sizes, _PIECE_BYTES, block))


def check_same(plan: Plan, source: int, destination: int) -> None:
    """Raise `ChecksumMismatch` unless both sides hold the same."""
    if source != destination:
        raise ChecksumMismatch(
            f"checksum {destination:08x} in {plan.dst}, {source:08x} in {plan.src}: the bytes that "
            "arrived are not those that were sent"
        )
