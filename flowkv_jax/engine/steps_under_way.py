"""Steps the device has been given and whose tokens were not read, and the blocks they still write.

The device runs steps in order, so blocks that a request gives up may go to the next one at once:
its first write comes later. Transfers keep no such order. They write into the pool beside the
steps, and a step under way may still write into a block that its request has left, as the decode
beyond an end token does. Blocks for transfers are therefore taken elsewhere until that step is
over.
"""

from __future__ import annotations

from collections import deque

from flowkv_jax.engine.step import ScheduledStep
from flowkv_jax.kv_cache.manager import KVCacheManager
from flowkv_jax.request import Request

_MAX_STEPS = 2


class StepsUnderWay:
    """Scheduled, not updated, oldest first. Empty steps are none."""

    def __init__(self, kv: KVCacheManager) -> None:
        self._kv = kv
        self._steps: deque[ScheduledStep] = deque()
        self._left: list[tuple[int, list[int]]] = []  # step id, blocks it writes

    def require_room(self) -> None:
        """Raises RuntimeError if no further step may be scheduled."""
        if len(self._steps) >= _MAX_STEPS:
            raise RuntimeError(f"steps {self._ids()} must be updated first")

    def start(self, step: ScheduledStep) -> None:
        self._steps.append(step)

    def finish(self, step: ScheduledStep) -> None:
        """Raises RuntimeError if `step` is not the oldest."""
        if not self._steps or self._steps[0].step_id != step.step_id:
            raise RuntimeError(f"update of step {step.step_id}, due are {self._ids()}")
        self._steps.popleft()
        self._left = [left for left in self._left if left[0] > step.step_id]

    def abandon(self) -> None:
        """None of them will be updated."""
        self._steps.clear()
        self._left.clear()

    def leave(self, request: Request) -> None:
        """`request`, which holds blocks, is about to give them up."""
        block_size = self._kv.block_size
        for step in self._steps:
            for sequence in (*step.prefills, *step.decodes):
                if sequence.request is request:
                    first = sequence.start // block_size
                    end = self._kv.blocks_for(sequence.start + sequence.num_tokens)
                    table = self._kv.block_table(request.request_id)
                    self._left.append((step.step_id, table[first:end].tolist()))

    @property
    def left_blocks(self) -> frozenset[int]:
        """Blocks that steps under way write, and whose requests have given them up."""
        return frozenset(block for _, blocks in self._left for block in blocks)

    @property
    def is_swapping(self) -> bool:
        """Blocks are being copied between device and host."""
        return any(step.swap_out or step.swap_in for step in self._steps)

    def _ids(self) -> list[int]:
        return [step.step_id for step in self._steps]
