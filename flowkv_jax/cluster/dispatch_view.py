"""A dispatcher and its controller as others may see and steer them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from flowkv_jax.cluster.dispatch_events import SequenceRecord
from flowkv_jax.cluster.dispatcher import Dispatcher
from flowkv_jax.controller.controller import Controller
from flowkv_jax.controller.decision_log import Decision
from flowkv_jax.controller.role import Role
from flowkv_jax.controller.snapshot import ClusterSnapshot
from flowkv_jax.metrics.reading import Reading


class DispatchView:
    """A `ClusterView` (in `rpc.cluster_view`) of this process.

    Args:
        dispatcher: its lock guards the controller too.
        refresh: called before a snapshot, where nodes report only when asked.
        num_expired_holds: see `Reading`; None where nothing is held for other servers.
        clock: the one both are told the time by.
    """

    def __init__(
        self,
        dispatcher: Dispatcher,
        controller: Controller,
        *,
        refresh: Callable[[], None] | None = None,
        num_expired_holds: Callable[[], Mapping[str, int]] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._dispatcher = dispatcher
        self._controller = controller
        self._refresh = refresh
        self._num_expired_holds = num_expired_holds
        self._clock = clock

    def snapshot(self) -> ClusterSnapshot:
        if self._refresh is not None:
            self._refresh()
        return self._dispatcher.exclusively(self._controller.snapshot, self._clock())

    def reading(self) -> Reading:
        """All that metrics show, at one moment. Any thread; waits for the lock as `snapshot`."""
        if self._refresh is not None:
            self._refresh()
        return self._dispatcher.exclusively(self._read)

    def _read(self) -> Reading:
        dispatcher, controller = self._dispatcher, self._controller
        return Reading(
            snapshot=controller.snapshot(self._clock()),
            totals=controller.totals(),
            requests=dispatcher.tallies.copy(),
            num_decisions=dict(controller.num_decisions),
            role_switches=dict(controller.role_switches),
            num_pending=dispatcher.num_pending,
            num_waiting_requests=dispatcher.num_waiting,
            num_waiting_tokens=dispatcher.num_waiting_tokens,
            num_expired_holds=self._num_expired_holds() if self._num_expired_holds else {},
        )

    def decisions(self, limit: int, after: int | None = None) -> list[Decision]:
        return self._dispatcher.exclusively(self._controller.decisions, limit, after)

    def records(self, limit: int, after: int | None = None) -> list[SequenceRecord]:
        return self._dispatcher.records_since(after, limit)

    def set_role(self, name: str, role: Role) -> None:
        request = self._controller.request_role
        self._dispatcher.exclusively(request, name, role, self._clock())

    def drain(self, name: str) -> None:
        self._dispatcher.exclusively(self._controller.request_drain, name, self._clock())
        self._dispatcher.migrate(name)
