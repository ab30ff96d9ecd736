"""A worker's connections to the other workers. No JAX.

    whoever hears the front        any thread                   the dialling thread
    want(peer), drop(peer)  ──────────────────────────────>     connects, hangs up
                                   notify ──held while one is being dialled──> sent

To dial may take seconds, and the front may hand work over in the same moment in which it tells
of a new worker. So what is said to a worker that is being dialled waits until it can be said.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable

from flowkv_jax.cluster.messages import Peer
from flowkv_jax.handoff.exchange import Exchange
from transfer.errors import PeerLost, TransferError
from transfer.handle import TransferHandle
from transfer.strategies import Strategy
from transfer.types import TransferRequest

logger = logging.getLogger(__name__)

_ATTEMPTS = 5
_PAUSE_S = 0.2
_INTRODUCTION_S = 5.0
_POLL_S = 0.01


class PeerLinks:
    """Connects to workers that are there, and hangs up on those that are not; `handoff`'s
    `Transfers` over these connections. Safe from several threads.

    Args:
        on_unreachable: hears the name of a worker that cannot be reached, and of which something
            was to be told.
    """

    def __init__(self, exchange: Exchange, on_unreachable: Callable[[str], None]) -> None:
        self._transfers = exchange.transfers
        self._on_unreachable = on_unreachable
        self._wanted: dict[str, Peer] = {}
        self._held: dict[str, list[bytes]] = {}
        self._lock = threading.Lock()
        self._tasks: queue.SimpleQueue[tuple[Peer, bool] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="flowkv-peer-links", daemon=True)
        self._thread.start()

    def want(self, peer: Peer) -> None:
        """A worker is there."""
        if peer.transfer_address is None:
            return
        with self._lock:
            self._wanted[peer.name] = peer
            self._held.setdefault(peer.name, [])
        self._tasks.put((peer, True))

    def drop(self, peer: Peer) -> None:
        """It is gone, in this epoch."""
        with self._lock:
            known = self._wanted.get(peer.name)
            if known is None or known.epoch > peer.epoch:
                return
            del self._wanted[peer.name]
            self._held.pop(peer.name, None)
        self._tasks.put((peer, False))

    @property
    def names(self) -> list[str]:
        """Of workers that are there."""
        with self._lock:
            return list(self._wanted)

    def forget(self) -> None:
        """Nobody is known any more; connections stay."""
        with self._lock:
            self._wanted.clear()
            self._held.clear()

    def close(self) -> None:
        """Dial no more. Idempotent."""
        self.forget()
        self._tasks.put(None)

    # `Transfers`

    def notify(self, node: str, payload: bytes) -> None:
        """See `TransferEngine.notify`; said later, where the node is being dialled."""
        with self._lock:
            held = self._held.get(node)
            if held is not None:
                held.append(payload)
                return
        self._transfers.notify(node, payload)

    def submit(
        self,
        request: TransferRequest,
        *,
        backend: str | None = None,
        strategy: Strategy = Strategy.ALIGNED_RUNS,
    ) -> TransferHandle:
        """See `TransferEngine.submit`."""
        return self._transfers.submit(request, backend=backend, strategy=strategy)

    def pinned(self, node: str, block_ids: list[int]) -> list[int]:
        """See `TransferEngine.pinned`."""
        return self._transfers.pinned(node, block_ids)

    # The dialling thread

    def _run(self) -> None:
        while (task := self._tasks.get()) is not None:
            peer, is_wanted = task
            try:
                if is_wanted:
                    self._connect(peer)
                else:
                    self._hang_up(peer)
            except Exception:
                logger.exception("the connection to %s could not be changed", peer.name)

    def _connect(self, peer: Peer) -> None:
        address, trouble = peer.transfer_address, ""
        if address is None:
            return
        for attempt in range(_ATTEMPTS):
            if attempt:
                time.sleep(_PAUSE_S)
            if not self._is_wanted(peer):
                return
            try:
                if self._transfers.peer_of(peer.name) is None:  # it may have dialled us
                    self._transfers.connect(address)
                self._await_introduction(peer)
                self._say_what_waits(peer)
                return
            except TransferError as error:
                trouble = f"{type(error).__name__}: {error}"
        logger.warning("no connection to %s at %s:%d: %s", peer.name, *address, trouble)
        self._give_up(peer)

    def _await_introduction(self, peer: Peer) -> None:
        """A worker's pool may be known a moment later than its address."""
        ends_s = time.monotonic() + _INTRODUCTION_S
        while self._transfers.peer_of(peer.name) is None:
            if time.monotonic() > ends_s or not self._is_wanted(peer):
                raise PeerLost(f"there is no node {peer.name}")
            time.sleep(_POLL_S)

    def _say_what_waits(self, peer: Peer) -> None:
        with self._lock:
            if self._wanted.get(peer.name) is not peer:
                return
            held = self._held.get(peer.name, [])
            while held:
                self._transfers.notify(peer.name, held[0])
                del held[0]
            self._held.pop(peer.name, None)

    def _give_up(self, peer: Peer) -> None:
        with self._lock:
            if self._wanted.get(peer.name) is not peer:
                return
            held = self._held.pop(peer.name, [])
        if held:
            self._on_unreachable(peer.name)

    def _hang_up(self, peer: Peer) -> None:
        """If it has come anew meanwhile, it is dialled next."""
        engine_id = self._transfers.peer_of(peer.name)
        if engine_id is not None:
            self._transfers.disconnect(engine_id)

    def _is_wanted(self, peer: Peer) -> bool:
        with self._lock:
            return self._wanted.get(peer.name) is peer
