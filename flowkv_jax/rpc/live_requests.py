"""The requests that all front doors of a server are answering, for the sake of ending them well.

A request is live from admission until its answer is written *and* the engine's iterator is closed,
so an empty set means that the engine holds nothing for anyone.
"""

from __future__ import annotations

import asyncio
from typing import Protocol

from flowkv_jax.errors import DEFAULT_RETRY_AFTER_S, FlowKVError, RetryableRequestError


class LiveRequest(Protocol):
    """A request under way; hashed by identity."""

    def stop(self, error: FlowKVError) -> None:
        """End it in the engine, and its answer with `error`. Idempotent, waits for nothing."""
        ...


class LiveRequests:
    """Admission and accounting. Used from one event loop."""

    def __init__(self) -> None:
        self._requests: dict[LiveRequest, tuple[str, ...]] = {}
        self._empty = asyncio.Event()
        self._empty.set()
        self._is_accepting = True

    def __len__(self) -> int:
        return len(self._requests)

    @property
    def is_accepting(self) -> bool:
        """False once the server drains."""
        return self._is_accepting

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
                retry_after_s=DEFAULT_RETRY_AFTER_S,
            )

    def add(self, request: LiveRequest, *names: str) -> None:
        """
        Args:
            names: by which `stop` finds it; they need not be its alone.

        Raises:
            RetryableRequestError: the server began to drain after `check_accepting`; nothing would
                wait for this one.
        """
        self.check_accepting()
        self._requests[request] = names
        self._empty.clear()

    def discard(self, request: LiveRequest) -> None:
        self._requests.pop(request, None)
        if not self._requests:
            self._empty.set()

    def stop(self, name: str, error: FlowKVError) -> int:
        """End the requests of this name; returns how many."""
        named = [request for request, names in self._requests.items() if name in names]
        for request in named:
            request.stop(error)
        return len(named)

    def stop_all(self, error: FlowKVError) -> int:
        """End all; returns how many."""
        requests = list(self._requests)
        for request in requests:
            request.stop(error)
        return len(requests)

    async def wait_until_empty(self, timeout_s: float | None) -> bool:
        """Whether nothing is live any more, waiting at most `timeout_s`."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._empty.wait()
        except TimeoutError:
            return False
        return True
