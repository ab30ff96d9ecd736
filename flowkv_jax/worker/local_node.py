"""What a worker needs of the node it serves with. Plain protocol, no JAX."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from typing import Protocol

from flowkv_jax.cluster.messages import ErrandKind, Peer
from flowkv_jax.cluster.node_port import SequenceKey, StopOrder
from flowkv_jax.controller.role import Role
from flowkv_jax.controller.snapshot import NodeReport
from flowkv_jax.sequence import SequenceSpec


class LocalNode(Protocol):
    """A node in this process, as its worker drives it.

    All but `leave` return at once, from any thread. What comes of sequences goes to the `deliver`
    that the node was made with.
    """

    @property
    def is_alive(self) -> bool:
        """False once it can serve nothing any more."""
        ...

    @property
    def is_idle(self) -> bool:
        """It holds no sequence, no hand-off is under way, and all news have been delivered."""
        ...

    def enter(self, name: str, epoch: int, role: Role) -> None:
        """A membership begins: who it is from now on. Nothing is held then."""
        ...

    def leave(self) -> None:
        """The membership has ended: end every sequence and hand-off, and return when nothing of
        them will be delivered any more. May wait for the device."""
        ...

    def start(self, specs: Sequence[SequenceSpec]) -> Future[None]:
        """See `NodePort.start`."""
        ...

    def stop(self, orders: Sequence[StopOrder]) -> None:
        """See `NodePort.stop`."""
        ...

    def redirect(self, key: SequenceKey, decode_node: str | None) -> None:
        """See `NodePort.redirect`."""
        ...

    def release(self, node: str) -> None:
        """See `NodePort.release`."""
        ...

    def set_role(self, role: Role) -> None:
        """Another role from now on; what runs, stays."""
        ...

    def run_errand(self, kind: ErrandKind, duration_s: float) -> Future[bool]:
        """Something for an administrator. The future fails with what it is refused for."""
        ...

    def peer_joined(self, peer: Peer) -> None:
        """A node that sequences may be handed off to, or come from."""
        ...

    def peer_left(self, peer: Peer) -> None:
        """It is gone, in this epoch; give up what is held on its behalf."""
        ...

    def report(self) -> NodeReport:
        """How it is, and what is new in its cache since the last report of this membership; the
        first one of a membership starts from nothing (`prefixes_cleared`). Waits for no device."""
        ...
