"""The streams a server is answering, for the sake of ending them well.

A stream is live from admission until its answer is written *and* the engine's iterator is closed,
so an empty set means that the engine holds nothing for anyone.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from flowkv_jax.errors import FlowKVError, RetryableRequestError
from flowkv_jax.rpc.output_buffer import OutputBuffer

DRAIN_RETRY_AFTER_S = 1.0


@dataclass(eq=False, slots=True)
class LiveStream:
    """The two halves of a streaming call: `pump` fills `buffer`, the handler writes from it."""

    buffer: OutputBuffer
    pump: asyncio.Task[None]

    def stop(self, error: FlowKVError) -> None:
        """End the request in the engine, and the answer with `error`."""
        self.buffer.close(error)
        self.pump.cancel()


class LiveRequests:
    """Admission and accounting. Used from one event loop."""

    def __init__(self) -> None:
        self._streams: set[LiveStream] = set()
        self._empty = asyncio.Event()
        self._empty.set()
        self._is_accepting = True

    def __len__(self) -> int:
        return len(self._streams)

    def refuse_new(self) -> None:
        """From now on `check_accepting` raises."""
        self._is_accepting = False

    def check_accepting(self) -> None:
        """
        Raises:
            RetryableRequestError: the server is draining.
        """
        if not self._is_accepting:
            raise RetryableRequestError(
                "the server is shutting down and takes no new requests",
                retry_after_s=DRAIN_RETRY_AFTER_S,
            )

    def add(self, stream: LiveStream) -> None:
        self._streams.add(stream)
        self._empty.clear()

    def discard(self, stream: LiveStream) -> None:
        self._streams.discard(stream)
        if not self._streams:
            self._empty.set()

    def stop_all(self, error: FlowKVError) -> None:
        for stream in self._streams:
            stream.stop(error)

    async def wait_until_empty(self, timeout_s: float | None) -> bool:
        """Whether nothing is live any more, waiting at most `timeout_s`."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._empty.wait()
        except TimeoutError:
            return False
        return True
