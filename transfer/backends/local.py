"""Between two pools of one process: a copy, device to device, or through a third device.

    both in host memory          one memory copy a call
    JAX arrays, another device   slice out, copy to the destination's sharding, put back
    a relay on the path          the same in chunks, through the relay's device: while one chunk
                                 leaves the relay the next one arrives there
    anything else                whole blocks through host memory

Different shardings on the two sides (TP 2 -> TP 4) are JAX's business, or, in host
memory, that of `HostMemory.read` and `write`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from transfer.backends.base import LocalMover, Plan
from transfer.pool_access import HostMemory, PoolAccess, outgoing
from transfer.types import BlockRun

if TYPE_CHECKING:
    import jax

_PIECE_BYTES = 8 << 20


class LocalBackend(LocalMover):
    """See the module's text.

    Args:
        relays: device of each node that blocks can be relayed through; shared with the engine,
            which adds to it.
        chunk_bytes: grain of a relay's pipeline.
    """

    name = "local"

    def __init__(self, relays: Mapping[str, jax.Device], chunk_bytes: int) -> None:
        self._relays = relays
        self._chunk_bytes = chunk_bytes

    def move(
        self, source: PoolAccess, destination: PoolAccess, plan: Plan, check: Callable[[], None]
    ) -> int:
        via = [self._relays[hop] for hop in plan.hops[1:-1] if hop in self._relays]
        if source.is_device_pool and destination.is_device_pool and via:
            return self._move_relayed(source, destination, plan, via, check)
        with source.open() as there, destination.open() as here:
            if there.flat is not None and here.flat is not None:
                return _copy(there, here, plan, check)
        if source.is_device_pool and destination.is_device_pool:
            return self._move_relayed(source, destination, plan, via, check)
        with source.open() as there, destination.open() as here:
            return _copy_blocks(there, here, plan, check)

    def _move_relayed(
        self,
        source: PoolAccess,
        destination: PoolAccess,
        plan: Plan,
        via: list[jax.Device],
        check: Callable[[], None],
    ) -> int:
        chunk_blocks = max(1, self._chunk_bytes // plan.layout.bytes_per_block)
        for piece in _chunks(plan.runs, chunk_blocks if via else 0):
            check()
            # Dispatch does not wait: the relay takes this chunk in while it sends the last one.
            chunk = source.take(piece.src_start, piece.num_blocks)
            for device in via:
                chunk = chunk.to_device(device)
            destination.put(piece.dst_start, chunk)
        return len(plan.runs)


def _copy(
    source: HostMemory, destination: HostMemory, plan: Plan, check: Callable[[], None]
) -> int:
    assert source.flat is not None and destination.flat is not None
    for src, dst, size in plan.calls.tolist():
        for start in range(0, size, _PIECE_BYTES):
            check()
            end = min(size, start + _PIECE_BYTES)
            destination.flat[dst + start : dst + end] = source.flat[src + start : src + end]
    return len(plan.calls)


def _copy_blocks(
    source: HostMemory, destination: HostMemory, plan: Plan, check: Callable[[], None]
) -> int:
    block = plan.layout.bytes_per_block
    for src, dst, size in plan.calls.tolist():
        done = 0
        for piece in outgoing(source, [src], [size], _PIECE_BYTES, block):
            check()
            destination.write((dst + done) // block, piece)
            done += piece.size
    return len(plan.calls)


def _chunks(runs: tuple[BlockRun, ...], chunk_blocks: int) -> list[BlockRun]:
    """Runs cut to at most `chunk_blocks` blocks; 0 for whole runs."""
    if not chunk_blocks:
        return list(runs)
    return [
        BlockRun(src + i, dst + i, min(chunk_blocks, count - i))
        for src, dst, count in runs
        for i in range(0, count, chunk_blocks)
    ]
