"""The controller: which nodes serve a sequence, which role each node has, how many there are.

It is pure: no clock (each call brings `now_s`, seconds that never run backwards), no thread, no
input or output. One owner calls it, under one lock. Who owns it moves the outside world:

    node joins          join(info) -> epoch, told to the node; it reports under this epoch
    node reports        report(name, epoch, report); `StaleEpoch` for a life that is over
    sequence            place -> prefilled -> moved -> ended (`Routing`)
    about twice a second  for action in tick(now_s): carry it out
    node is lost        leave(name); its sequences are placed anew by who drives them

A name that joins again begins a new life with a higher epoch: its bookings, its cached prefixes,
and what was measured of it are gone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from flowkv_jax.controller.actions import Action, AddNode, RemoveNode, SwitchRole
from flowkv_jax.controller.bookings import BookingLedger
from flowkv_jax.controller.config import ControllerConfig
from flowkv_jax.controller.cost_model import PrefillRates, TransferTimes
from flowkv_jax.controller.decision_log import Decision, DecisionKind, DecisionLog
from flowkv_jax.controller.drain import is_drained
from flowkv_jax.controller.load_score import (
    METRICS,
    load_score,
    normalised_metrics,
    with_booked_decodes,
)
from flowkv_jax.controller.load_window import LoadWindow, RateWindow
from flowkv_jax.controller.node_lifecycle import NodeRecord
from flowkv_jax.controller.node_table import NodeTable
from flowkv_jax.controller.node_totals import NodeTotals, PastLives
from flowkv_jax.controller.policy import Policy, PolicyDecision
from flowkv_jax.controller.prefix_directory import PrefixDirectory
from flowkv_jax.controller.reported_work import count_unbooked, measured_rate
from flowkv_jax.controller.role import Role
from flowkv_jax.controller.router import Router
from flowkv_jax.controller.routing import Placement, RouteQuery
from flowkv_jax.controller.snapshot import (
    MAX_COUNT,
    ClusterSnapshot,
    NodeInfo,
    NodeReport,
    NodeState,
    NodeView,
    Regime,
)
from flowkv_jax.errors import NotFoundError, ServerError, UnprocessableError
from flowkv_jax.sequence import HandoffReport


class StaleEpoch(ServerError):
    """A message of a life of a node that is over; its sender has to join again."""


class Controller:
    """See the module. Implements `Routing`.

    Attributes:
        role_switches: changes of roles that were carried out, by role taken.
    """

    def __init__(self, config: ControllerConfig | None = None) -> None:
        self.config = config or ControllerConfig()
        self._table = NodeTable()
        self._ledger = BookingLedger(self._table)
        self._rates = PrefillRates(self.config.default_prefill_tokens_per_s)
        self._transfers = TransferTimes(self.config)
        self._directory = PrefixDirectory(self.config.max_prefix_entries)
        self._router = Router(self.config, self._transfers)
        self._prefill_demand = RateWindow(self.config.demand_window_s)
        self._policy = Policy(self.config)
        self._found = PolicyDecision(Regime.NORMAL, 0.0, 0.0)
        self._done: list[Action] = []
        self._log = DecisionLog(self.config.max_logged_decisions)
        self._records: dict[str, NodeRecord] = {}
        self._last_epoch: dict[str, int] = {}
        self._past = PastLives()
        self.role_switches: Counter[Role] = Counter()

    # Nodes.

    def join(self, info: NodeInfo, now_s: float, epoch: int | None = None) -> int:
        """Take a node in; returns the epoch it reports under.

        Args:
            epoch: of whoever keeps membership; None for one more than the name's last.

        Raises:
            ValueError: `epoch` is not above the name's last one.
        """
        last = self._last_epoch.get(info.name, 0)
        if epoch is None:
            epoch = last + 1
        elif epoch <= last:
            raise ValueError(f"{epoch=} of node {info.name!r} must be above its last, {last}")
        if info.name in self._records:
            self.leave(info.name, now_s, "joined again")
        self._last_epoch[info.name] = epoch
        table = self._table
        slot = table.add(info.name, info.host)
        table.num_blocks[slot] = info.num_blocks
        table.block_size[slot] = info.block_size
        table.block_bytes[slot] = info.block_bytes
        table.max_num_seqs[slot] = info.max_num_seqs
        table.prefill_tokens_per_s[slot] = self._rates.join(info.name, info.relative_speed)
        self._directory.join(slot)
        self._records[info.name] = record = NodeRecord(
            info=info,
            epoch=epoch,
            slot=slot,
            window=LoadWindow(self.config.load_window_s),
            joined_s=now_s,
            role=info.role,
            home_role=info.role,
            state_since_s=now_s,
            role_since_s=now_s,
        )
        self._show_state(record)
        self._log.add(
            now_s, DecisionKind.NODE, info.name, info.role.value, f"joined, epoch {epoch}"
        )
        return epoch

    def leave(self, name: str, now_s: float, reason: str) -> None:
        """A node is gone, for whatever reason; unknown names are passed over."""
        record = self._records.pop(name, None)
        if record is None:
            return
        self._past.ended(name, record.report)
        self._ledger.leave(record.slot, now_s)
        self._directory.leave(record.slot)
        self._transfers.leave(record.slot)
        self._rates.leave(name)
        self._table.remove(record.slot)
        self._done = [a for a in self._done if isinstance(a, AddNode) or a.node != name]
        self._log.add(now_s, DecisionKind.NODE, name, "gone", reason)

    def report(self, name: str, epoch: int, report: NodeReport, now_s: float) -> None:
        """Take in what a node says of itself.

        Raises:
            StaleEpoch: the node is not known, or has joined again since.
        """
        record = self._of_epoch(name, epoch)
        record.report, record.reported_s = report, now_s
        record.window.add(normalised_metrics(record.info, report), now_s)
        record.metrics = record.window.average(now_s)
        record.prefill_load = load_score(record.metrics, self.config.prefill_load_weights)
        record.decode_load = load_score(record.metrics, self.config.decode_load_weights)
        table, slot = self._table, record.slot
        table.prefill_load[slot] = record.prefill_load
        table.decode_load[slot] = record.decode_load
        count_unbooked(table, slot, report)
        rate = measured_rate(report)
        if rate is not None:
            table.prefill_tokens_per_s[slot] = self._rates.observe(name, rate)
        if report.prefixes_cleared:
            self._directory.clear(slot)
        self._directory.remove(slot, report.removed_blocks)
        self._directory.add(slot, report.added_blocks)

    def drained(self, name: str, epoch: int, now_s: float) -> None:
        """A node says that it has nothing left; what is booked there and on its way still counts.

        Raises:
            StaleEpoch: as in `report`.
        """
        record = self._of_epoch(name, epoch)
        record.is_reported_empty = True

    def request_role(self, name: str, role: Role, now_s: float) -> None:
        """Give a node another role for good; it drains first, and `tick` tells when it is done.

        Raises:
            NotFoundError: no such node.
            UnprocessableError: it is leaving.
        """
        record = self._record(name)
        if record.state in (NodeState.LEAVING, NodeState.DRAINED):
            raise UnprocessableError(f"node {name!r} is leaving; it takes no other role")
        record.home_role = role
        self._begin_role(record, role, "asked for", {}, now_s)

    def request_drain(self, name: str, now_s: float) -> None:
        """Give a node no more work; `tick` tells when it has none left. Idempotent.

        Raises:
            NotFoundError: no such node.
        """
        self._begin_drain(self._record(name), "asked for", {}, now_s)

    def tick(self, now_s: float) -> list[Action]:
        """Let time pass: roles and drains that are done, and what the policy wants.

        Returns:
            what to carry out now: tell a node its role, start one, or stop one. Each comes once.
        """
        for record in self._records.values():
            self._finish(record, now_s)
        if not self._policy.is_due(now_s):
            return self._take_done()
        regime = self._found.regime
        self._found = self._policy.tick(self.snapshot(now_s), now_s)
        if self._found.regime is not regime:
            self._log.add(
                now_s,
                DecisionKind.REGIME,
                "cluster",
                self._found.regime.value,
                f"was {regime.value}",
                terms={
                    "prefill_load": self._found.prefill_load,
                    "decode_load": self._found.decode_load,
                },
            )
        for action in self._found.actions:
            self._begin(action, now_s)
        return self._take_done()

    # Sequences: `Routing`.

    def place(self, query: RouteQuery, now_s: float) -> Placement:
        """Choose nodes and book the load at once; see `Routing`."""
        matches = self._directory.match(query.block_hashes) if len(self._records) > 1 else {}
        route = self._router.route(
            self._table,
            query,
            matches,
            now_s,
            is_imbalanced=self._found.regime is Regime.IMBALANCED,
        )
        booking = self._ledger.add(route.work, now_s)
        self._prefill_demand.add(route.work.prefill_us * 1e-6, now_s)
        names = self._table.names
        prefill_node, decode_node = names[route.work.prefill_slot], names[route.work.decode_slot]
        chosen = f"{prefill_node} -> {decode_node}"
        self._log.add(
            now_s, DecisionKind.ROUTE, query.sequence_id, chosen, route.reason, route.candidates
        )
        return Placement(booking, prefill_node, decode_node)

    def prefilled(self, booking: int, now_s: float) -> None:
        """The prompt has been computed; see `Routing`."""
        self._ledger.prefilled(booking, now_s)

    def moved(self, booking: int, report: HandoffReport, now_s: float) -> None:
        """The sequence has come to its decode node; see `Routing`."""
        self._ledger.moved(booking, now_s)
        src, dst = self._records.get(report.src), self._records.get(report.dst)
        if src is None or dst is None:
            return
        self._transfers.observe(
            src.slot,
            dst.slot,
            src.info.host == dst.info.host,
            report.data_bytes,
            # It may have waited for room while its prompt was still being computed.
            max(report.total_s - report.deferred_s, report.transfer_s),
        )
        sent_blocks = report.num_blocks - report.num_reused_blocks
        if not self._table.block_bytes[src.slot] and sent_blocks > 0:
            block_bytes = min(report.data_bytes // sent_blocks, MAX_COUNT)
            self._table.block_bytes[src.slot] = block_bytes

    def ended(self, booking: int, now_s: float) -> None:
        """The sequence has ended, or lost its place; see `Routing`."""
        self._ledger.ended(booking, now_s)

    # What it shows.

    def snapshot(self, now_s: float) -> ClusterSnapshot:
        """All nodes as they stand, by name."""
        queue_s = self._table.queue_s(now_s)
        views = [
            self._view(self._records[name], float(queue_s[self._records[name].slot]))
            for name in sorted(self._records)
        ]
        found = self._found
        return ClusterSnapshot(
            now_s,
            found.regime,
            found.prefill_load,
            found.decode_load,
            self._prefill_demand.per_s(now_s),
            tuple(views),
            self.config.role_load_low,
            self.config.role_load_high,
        )

    def totals(self) -> dict[str, NodeTotals]:
        """What the nodes that are there counted, by name, their earlier lives included."""
        with_present, records = self._past.with_present, self._records
        return {name: with_present(name, record.report) for name, record in records.items()}

    @property
    def num_decisions(self) -> Mapping[DecisionKind, int]:
        """Decisions so far, by kind."""
        return self._log.counts

    def decisions(self, limit: int, after: int | None = None) -> list[Decision]:
        """Logged decisions, oldest first; see `DecisionLog.newest`."""
        return self._log.newest(limit, after)

    def check(self) -> None:
        """Raise `AssertionError` unless bookings and sums, nodes and columns agree."""
        self._ledger.check()
        self._directory.check()
        assert len(self._table) == len(self._records)
        for name, record in self._records.items():
            assert self._table.slot_of(name) == record.slot
            assert self._last_epoch[name] == record.epoch

    def _take_done(self) -> list[Action]:
        done, self._done = self._done, []
        return done

    def _begin(self, action: Action, now_s: float) -> None:
        if isinstance(action, SwitchRole):
            record = self._records[action.node]
            self._begin_role(record, action.role, action.reason, action.terms, now_s)
        elif isinstance(action, RemoveNode):
            self._begin_drain(self._records[action.node], action.reason, action.terms, now_s)
        else:
            self._log.add(
                now_s,
                DecisionKind.SCALE,
                "cluster",
                f"add {action.role.value}",
                action.reason,
                terms=action.terms,
            )
            self._done.append(action)

    def _begin_role(
        self, record: NodeRecord, role: Role, reason: str, terms: Mapping[str, float], now_s: float
    ) -> None:
        if role is record.role and record.next_role is None:
            return
        self._log.add(now_s, DecisionKind.ROLE, record.name, role.value, reason, terms=terms)
        record.change = (reason, terms)
        record.next_role = role
        if record.state is NodeState.ACTIVE:
            record.move(NodeState.SWITCHING, now_s)
            record.is_reported_empty = False
        self._show_state(record)
        self._finish(record, now_s)

    def _begin_drain(
        self, record: NodeRecord, reason: str, terms: Mapping[str, float], now_s: float
    ) -> None:
        if record.state in (NodeState.LEAVING, NodeState.DRAINED):
            return
        self._log.add(now_s, DecisionKind.SCALE, record.name, "remove", reason, terms=terms)
        record.change = (reason, terms)
        record.move(NodeState.LEAVING, now_s)
        record.is_reported_empty = False
        record.next_role = None
        self._show_state(record)
        self._finish(record, now_s)

    def _finish(self, record: NodeRecord, now_s: float) -> None:
        """Take the last step of a change of role, or of a drain, if its time has come."""
        waited_s = now_s - record.state_since_s
        if record.state is NodeState.SWITCHING:
            if self._is_drained(record) or waited_s >= self.config.role_drain_timeout_s:
                self._take_role(record, now_s)
        elif record.state is NodeState.LEAVING and self._is_drained(record):
            record.move(NodeState.DRAINED, now_s)
            reason, terms = record.change
            self._done.append(RemoveNode(record.name, record.epoch, reason, terms))

    def _take_role(self, record: NodeRecord, now_s: float) -> None:
        if record.next_role is None:
            raise RuntimeError(f"{record.name} is given no role to take")
        record.move(NodeState.ACTIVE, now_s)
        record.role, record.next_role = record.next_role, None
        self.role_switches[record.role] += 1
        record.role_since_s = now_s
        self._show_state(record)
        reason, terms = record.change
        self._done.append(SwitchRole(record.name, record.epoch, record.role, reason, terms))

    def _is_drained(self, record: NodeRecord) -> bool:
        table, slot = self._table, record.slot
        return is_drained(
            record,
            int(table.booked_prefills[slot]),
            int(table.booked_sends[slot]),
            int(table.booked_decodes[slot]),
        )

    def _of_epoch(self, name: str, epoch: int) -> NodeRecord:
        record = self._records.get(name)
        if record is None:
            raise StaleEpoch(f"node {name!r} is not known; it has to join")
        if record.epoch != epoch:
            raise StaleEpoch(
                f"node {name!r} speaks of epoch {epoch}, but {record.epoch} has begun; "
                "it has to join again"
            )
        return record

    def _record(self, name: str) -> NodeRecord:
        record = self._records.get(name)
        if record is None:
            raise NotFoundError(f"no node {name!r}; there are {sorted(self._records)}")
        return record

    def _show_state(self, record: NodeRecord) -> None:
        """Bring what the router sees of a node up to its role and state."""
        table, slot = self._table, record.slot
        table.can_prefill[slot] = record.takes_prefill
        table.can_decode[slot] = record.takes_decode
        table.is_usable[slot] = record.state in (NodeState.ACTIVE, NodeState.SWITCHING)

    def _view(self, record: NodeRecord, queue_s: float) -> NodeView:
        table, slot, report = self._table, record.slot, record.report
        return NodeView(
            name=record.name,
            host=record.info.host,
            epoch=record.epoch,
            role=record.role,
            home_role=record.home_role,
            state=record.state,
            next_role=record.next_role,
            state_since_s=record.state_since_s,
            role_since_s=record.role_since_s,
            takes_prefill=record.takes_prefill,
            takes_decode=record.takes_decode,
            prefill_load=record.prefill_load,
            decode_load=load_score(
                with_booked_decodes(
                    record.metrics, int(table.booked_decodes[slot]), record.info.max_num_seqs
                ),
                self.config.decode_load_weights,
            ),
            metrics=dict(zip(METRICS, record.metrics, strict=bool(record.metrics))),
            load=report.load if report is not None else None,
            reported_s=record.reported_s,
            queue_s=queue_s,
            booked_prefills=int(table.booked_prefills[slot]),
            booked_prefill_tokens=int(table.booked_prefill_tokens[slot]),
            booked_sends=int(table.booked_sends[slot]),
            booked_decodes=int(table.booked_decodes[slot]),
            booked_blocks=int(table.booked_blocks[slot]),
            prefill_tokens_per_s=float(table.prefill_tokens_per_s[slot]),
            decode_step_s=report.decode_step_s if report is not None else None,
            cached_prefix_blocks=self._directory.count(slot),
            pool_map=report.pool_map if report is not None else b"",
            link_loads=report.link_loads if report is not None else (),
        )
