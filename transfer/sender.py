"""Transfers from this engine's pools, by name and by leg. Imports no JAX.

What each of them does is in `outgoing`; here they are found, looked after, and ended.
"""

from __future__ import annotations

import itertools
import threading

from transfer import messages
from transfer.errors import EngineClosed, TransferError
from transfer.handle import TransferHandle
from transfer.outgoing import Outgoing
from transfer.route import Route
from transfer.runtime import Runtime
from transfer.strategies import Strategy
from transfer.types import TransferRequest


class Sender:
    """All transfers from this engine's pools. Any thread may call."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._lock = threading.Condition()
        self._outgoing: dict[str, Outgoing] = {}
        self._by_leg: dict[int, Outgoing] = {}
        self._numbers = itertools.count(1)
        self._is_closed = False

    def start(
        self,
        request: TransferRequest,
        strategy: Strategy,
        routes: list[Route],
        engine_id: str | None,
    ) -> TransferHandle:
        """Begin a transfer; arguments are those of `Outgoing`.

        Raises:
            EngineClosed, BlocksBusy, UnknownNode: nothing has begun.
        """
        runtime = self._runtime
        name = f"{runtime.engine_id[:12]}-{next(self._numbers)}"
        transfer = Outgoing(
            runtime, name, request, strategy, routes, engine_id, self._add_leg, self._on_final
        )
        with self._lock:
            if self._is_closed:
                raise EngineClosed("the engine is closed")
            self._outgoing[name] = transfer
        try:
            transfer.start()
        except TransferError:
            with self._lock:
                self._outgoing.pop(name, None)
            raise
        return transfer.handle

    def to(self, engine_id: str) -> list[Outgoing]:
        """Those to the pools of another engine."""
        with self._lock:
            return [t for t in self._outgoing.values() if t.engine_id == engine_id]

    def on_answer(
        self,
        message: messages.Note | messages.Accept | messages.Moved | messages.Done | messages.Failed,
    ) -> None:
        """A destination says something about a leg."""
        with self._lock:
            transfer = self._by_leg.get(message.leg)
        if transfer is not None:
            transfer.on_message(message.leg, message)

    def on_ended(self, message: messages.Ended) -> None:
        with self._lock:
            transfer = self._outgoing.get(message.transfer)
        if transfer is not None:
            transfer.on_ended(message.state)

    def tick(self) -> None:
        """Look after deadlines and late answers; drop peers that do not stop what they should."""
        now = self._runtime.clock()
        with self._lock:
            transfers = list(self._outgoing.values())
        for transfer in transfers:
            error = transfer.tick(now)
            if error is not None and transfer.engine_id is not None:
                channel = self._runtime.peers.channel(transfer.engine_id)
                if channel is not None:
                    channel.shut(error)

    def close(self, error: TransferError) -> None:
        """Begin no transfer any more, and cancel those that are under way; does not wait."""
        with self._lock:
            self._is_closed = True
            transfers = list(self._outgoing.values())
        for transfer in transfers:
            transfer.cancel(error)

    def wait_still(self, timeout_s: float) -> bool:
        """Whether every transfer has ended within the time."""
        with self._lock:
            return self._lock.wait_for(lambda: not self._outgoing, timeout_s)

    def _add_leg(self, transfer: Outgoing) -> int:
        number = next(self._numbers)
        with self._lock:
            self._by_leg[number] = transfer
        return number

    def _on_final(self, transfer: Outgoing) -> None:
        with self._lock:
            self._outgoing.pop(transfer.name, None)
            for leg in transfer.leg_numbers:
                self._by_leg.pop(leg, None)
            self._lock.notify_all()
