"""The transfer engine of a process, and which node of it each event is for."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from contextlib import suppress
from typing import Protocol

from flowkv_jax.handoff.agent import HandoffAgent
from flowkv_jax.handoff.links import LinkSelector
from flowkv_jax.kv_transfer.messages import is_message
from flowkv_jax.load import LinkLoad
from transfer.arrival import Arrival
from transfer.backends.base import LinkBackend
from transfer.config import TransferConfig
from transfer.connection import Address
from transfer.engine import TransferEngine
from transfer.errors import TransferError
from transfer.notifications import Notification, PeerLoss
from transfer.pool_access import PoolAccess


class ServerTraffic(Protocol):
    """Who hears what servers say to each other; see `flowkv_jax.kv_transfer`. Any thread."""

    def on_notification(self, notification: Notification) -> None: ...

    def on_lost(self, loss: PeerLoss) -> None: ...


class Exchange:
    """Makes and owns a `TransferEngine`.

    Args:
        secret: shared with every process of the cluster.
        links: see `HandoffConfig.handoff_links`.
        backends: None for those that need nothing but this machine.

    Attributes:
        server_traffic: set before anybody can connect; None where no other server is heard.

    Raises:
        ConfigError: see `LinkSelector`.
    """

    server_traffic: ServerTraffic | None = None

    def __init__(
        self,
        config: TransferConfig | None = None,
        *,
        secret: str | bytes = b"",
        links: str | None = None,
        backends: Iterable[LinkBackend] | None = None,
    ) -> None:
        self._agents: dict[str, HandoffAgent] = {}
        self._lock = threading.Lock()
        self._selector = None if links is None else LinkSelector(links)
        self.transfers = TransferEngine(
            config,
            secret=secret,
            selector=self._selector,
            backends=backends,
            on_arrival=self._on_arrival,
            on_notify=self._on_notify,
            on_peer_lost=self._on_peer_lost,
        )

    def attach(self, node: str, agent: HandoffAgent, pool: PoolAccess) -> None:
        """Make a node of this process known to the others."""
        with self._lock:
            self._agents[node] = agent
        self.transfers.register_pool(node, pool)

    def detach(self, node: str) -> None:
        """Make a node of this process unknown again.

        Raises:
            BlocksBusy: transfers use its pool.
        """
        self.transfers.unregister_pool(node)
        with self._lock:
            del self._agents[node]

    def connect(self, address: Address) -> None:
        """Connect to another process, if it is there; who needs it later finds out."""
        with suppress(TransferError):
            self.transfers.connect(address)

    def link_loads(self, src: str, dsts: Iterable[str]) -> tuple[LinkLoad, ...]:
        """How busy the ways from a node to others are; empty where no links are configured."""
        return () if self._selector is None else self._selector.loads(src, dsts)

    def close(self) -> None:
        """End every transfer and connection. Idempotent."""
        self.transfers.close()
        if self._selector is not None:
            self._selector.close()

    def _on_arrival(self, arrival: Arrival) -> None:
        agent = self._agents.get(arrival.node)
        if agent is not None and arrival.tag:
            agent.on_arrival(arrival)

    def _on_notify(self, notification: Notification) -> None:
        if is_message(notification.payload):
            if self.server_traffic is not None:
                self.server_traffic.on_notification(notification)
            return
        agent = self._agents.get(notification.node)
        if agent is not None:
            agent.on_notification(notification.payload)

    def _on_peer_lost(self, loss: PeerLoss) -> None:
        for agent in list(self._agents.values()):
            agent.on_lost(loss.nodes)
        if self.server_traffic is not None:
            self.server_traffic.on_lost(loss)
