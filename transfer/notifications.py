"""What engines tell the programs that use them, besides transfers. Imports no JAX.

A notification is a message of the application: bytes that the middleware does not look into, from
the engine that calls `notify` to the one that holds a pool. It goes over the control channel.

An *acquaintance* of two engines lasts from the first channel between them until the last is lost,
or one that has carried notifications. During it notifications from one engine to another arrive
once each and in the order in which they were sent. When it ends, every channel of it is closed, so
it ends on both sides; each calls `on_peer_lost` once, and nothing of it is delivered after that.
What had been sent may then have arrived or not. Engines that connect again begin a new one.
"""

from __future__ import annotations

from dataclasses import dataclass

from transfer.errors import TransferError


@dataclass(frozen=True, slots=True)
class Notification:
    """A message of the application.

    Attributes:
        node: the pool of this engine that it was sent to.
        engine_id: of the engine that sent it; one's own, from this very engine.
        payload: as it was sent.
    """

    node: str
    engine_id: str
    payload: bytes


@dataclass(frozen=True, slots=True)
class PeerLoss:
    """An acquaintance with another engine is over.

    Attributes:
        engine_id: of the engine. Should it connect again, that is a new acquaintance.
        nodes: names of its pools.
        error: why.
    """

    engine_id: str
    nodes: tuple[str, ...]
    error: TransferError
