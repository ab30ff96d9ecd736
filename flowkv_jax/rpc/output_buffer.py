"""What one request has produced and the wire has not taken yet.

    engine's pace   put put put .. close          one task
    wire's pace     take ....... take ....... take -> None      another

The first output can be taken at once. After a take, the next one waits until `min_interval_s` has
passed or the buffer is closed; outputs that arrive meanwhile are merged. A reader slower than that
only makes the merged deltas larger: memory is bounded by what one request may generate.

Both sides live on one event loop.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable

from flowkv_jax.outputs import RequestOutput
from flowkv_jax.rpc.merge import OutputMerger


class OutputBuffer:
    """A merging mailbox of one request.

    Args:
        min_interval_s: least time between two takes, but for the last.
        clock: monotonic seconds.
        whole: nothing can be taken before the buffer is closed.
    """

    def __init__(
        self, *, min_interval_s: float, clock: Callable[[], float], whole: bool = False
    ) -> None:
        self._merger = OutputMerger()
        self._min_interval_s = min_interval_s
        self._clock = clock
        self._next_take_s = math.inf if whole else -math.inf
        self._filled = asyncio.Event()
        self._closed = asyncio.Event()
        self._error: BaseException | None = None

    def put(self, output: RequestOutput) -> None:
        """Add what the engine produced; passed over once closed."""
        if not self._closed.is_set():
            self._merger.add(output)
            self._filled.set()

    def close(self, error: BaseException | None = None) -> None:
        """No more outputs will come; `error` says why, if too soon. The first call wins."""
        if not self._closed.is_set():
            self._error = error
            self._closed.set()
            self._filled.set()

    async def take(self) -> RequestOutput | None:
        """Everything new, merged; None when closed and empty.

        Raises:
            BaseException: the error given to `close`, after the outputs put before it were taken.
        """
        await self._filled.wait()
        await self._until_due()
        if not self._closed.is_set():
            self._filled.clear()
        if not self._merger.is_empty:
            self._next_take_s = self._clock() + self._min_interval_s
            return self._merger.take()
        if self._error is not None:
            raise self._error
        return None

    async def take_whole(self) -> RequestOutput:
        """What is still to come, as one output. For a buffer made with `whole`.

        Raises:
            BaseException: the error given to `close`.
        """
        output = await self.take()
        if output is None or await self.take() is not None:
            raise RuntimeError("not everything came at once")
        return output

    async def _until_due(self) -> None:
        remaining_s = self._next_take_s - self._clock()
        if remaining_s <= 0 or self._closed.is_set():
            return
        try:
            async with asyncio.timeout(remaining_s if math.isfinite(remaining_s) else None):
                await self._closed.wait()
        except TimeoutError:
            pass
