"""A leg so small that its bytes go with the offer: one message there, one back."""

from __future__ import annotations

import numpy as np

from transfer.backends.base import Plan, SendHalf
from transfer.errors import ProtocolError
from transfer.pool_access import PoolAccess, incoming, outgoing


class InlineSend(SendHalf):
    """The source's half. `opening` is `prefix` and the bytes, in call order."""

    needs_run = False

    def __init__(self, prefix: bytes, source: PoolAccess, plan: Plan) -> None:
        block = plan.layout.bytes_per_block
        with source.open() as memory:
            offsets, sizes = plan.calls[:, 0].tolist(), plan.calls[:, 2].tolist()
            pieces = outgoing(memory, offsets, sizes, plan.data_bytes, block)
            self.opening = prefix + b"".join([piece.tobytes() for piece in pieces])

    def close(self) -> None:
        """Nothing was held."""


def receive_inline(destination: PoolAccess, plan: Plan, data: bytes | memoryview) -> None:
    """The destination's half; `data` is the opening without its prefix."""
    if len(data) != plan.data_bytes:
        raise ProtocolError(f"{len(data)} bytes came with an offer of {plan.data_bytes}")
    array = np.frombuffer(data, np.uint8)
    block = plan.layout.bytes_per_block
    with destination.open() as memory:
        offsets, sizes = plan.calls[:, 1].tolist(), plan.calls[:, 2].tolist()
        done = 0
        for piece in incoming(memory, offsets, sizes, plan.data_bytes, block):
            piece[:] = array[done : done + piece.size]
            done += piece.size
