"""What the front door asks of a cluster, to show it and to steer it.

`DispatchView` offers it of a dispatcher and a controller in this process, `ClusterClient` of a
server elsewhere.
"""

from __future__ import annotations

from typing import Protocol

from flowkv_jax.cluster.dispatch_events import SequenceRecord
from flowkv_jax.controller.decision_log import Decision
from flowkv_jax.controller.role import Role
from flowkv_jax.controller.snapshot import ClusterSnapshot


class ClusterView(Protocol):
    """A cluster as seen from outside. Every method may wait for a lock, and may be called from any
    thread but an event loop's. Times are all of one monotonic clock."""

    def snapshot(self) -> ClusterSnapshot:
        """All nodes as they stand."""
        ...

    def decisions(self, limit: int, after: int | None = None) -> list[Decision]:
        """The controller's decisions, oldest first: the first `limit` that are remembered behind
        the number `after`, else the newest."""
        ...

    def records(self, limit: int, after: int | None = None) -> list[SequenceRecord]:
        """Sequences that have ended, oldest first: the first `limit` that are remembered behind
        the number `after`, else the newest."""
        ...

    def set_role(self, name: str, role: Role) -> None:
        """Give a node another role for good; it finishes what it has of the old one first.

        Raises:
            NotFoundError: no such node.
            UnprocessableError: it is leaving.
        """
        ...

    def drain(self, name: str) -> None:
        """Give a node no more work, for good. Idempotent.

        Raises:
            NotFoundError: no such node.
        """
        ...
