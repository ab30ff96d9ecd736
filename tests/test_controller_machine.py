"""The controller as a state machine: nodes and sequences come and go in any order."""

from __future__ import annotations

import math

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    rule,
)

from flowkv_jax.controller.actions import AddNode, RemoveNode, SwitchRole
from flowkv_jax.controller.config import ControllerConfig
from flowkv_jax.controller.controller import Controller, StaleEpoch
from flowkv_jax.controller.decision_log import DecisionKind
from flowkv_jax.controller.node_lifecycle import LEGAL_MOVES, IllegalMove
from flowkv_jax.controller.role import Role
from flowkv_jax.controller.routing import NoNodeAvailable, Placement, Routing
from flowkv_jax.controller.snapshot import NodeState, Regime
from flowkv_jax.errors import NotFoundError, UnprocessableError, ValidationError
from tests.controller_cluster import handoff, node_info, node_load, node_report, query

P, D, H = Role.PREFILL, Role.DECODE, Role.HYBRID
NAMES = ["a", "b", "c", "d"]
CONFIG = ControllerConfig(
    enable_elastic_scaling=True,
    policy_interval_s=0.5,
    role_drain_timeout_s=5.0,
    scale_in_hold_s=3.0,
)
names = st.sampled_from(NAMES)
roles = st.sampled_from(list(Role))


class ControllerMachine(RuleBasedStateMachine):
    """Checks the books after every step, and that nothing of a life that is over has any effect."""

    placements = Bundle("placements")

    @initialize()
    def start(self) -> None:
        self.controller = Controller(CONFIG)
        self.now_s = 100.0
        self.epochs: dict[str, int] = {}
        self.live: dict[str, int] = {}
        self.leaving: set[str] = set()

    @rule(name=names, role=roles, num_blocks=st.sampled_from([20, 1000]))
    def join(self, name: str, role: Role, num_blocks: int) -> None:
        epoch = self.controller.join(node_info(name, role, num_blocks=num_blocks), self.now_s)
        assert epoch > self.epochs.get(name, 0)
        self.epochs[name] = self.live[name] = epoch
        self.leaving.discard(name)
        node = self.node(name)
        assert node.booked_work == node.booked_blocks == node.cached_prefix_blocks == 0

    @rule(name=names)
    def leave(self, name: str) -> None:
        self.controller.leave(name, self.now_s, "lost")
        self.live.pop(name, None)
        self.leaving.discard(name)

    @rule(
        name=names,
        age=st.sampled_from([0, 0, 0, 1]),
        waiting=st.integers(0, 12),
        running=st.integers(0, 12),
        kv_use=st.floats(0, 1),
        rate=st.sampled_from([None, 10.0, 5000.0]),
        added=st.lists(st.sampled_from([b"0", b"1", b"2"]), max_size=3),
    )
    def report(
        self,
        name: str,
        age: int,
        waiting: int,
        running: int,
        kv_use: float,
        rate: float | None,
        added: list[bytes],
    ) -> None:
        load = node_load(
            num_requests_waiting=waiting,
            num_waiting_tokens=100 * waiting,
            num_requests_running=running,
            kv_cache_usage=kv_use,
        )
        report = node_report(load, prefill_tokens_per_s=rate, added_blocks=tuple(added))
        epoch = self.epochs.get(name, 1) - age
        if self.live.get(name) == epoch:
            self.controller.report(name, epoch, report, self.now_s)
            return
        before = self.controller.snapshot(self.now_s)
        with pytest.raises(StaleEpoch):
            self.controller.report(name, epoch, report, self.now_s)
        with pytest.raises(StaleEpoch):
            self.controller.drained(name, epoch, self.now_s)
        assert self.controller.snapshot(self.now_s) == before

    @rule(
        target=placements,
        tokens=st.integers(1, 700),
        exclude=st.sets(names, max_size=2),
        hashes=st.sampled_from([(), (b"0",), (b"0", b"1", b"2")]),
        computed=st.none() | names,
    )
    def place(
        self, tokens: int, exclude: set[str], hashes: tuple[bytes, ...], computed: str | None
    ) -> object:
        asked = query(
            "s",
            tokens,
            exclude=frozenset(exclude),
            block_hashes=hashes,
            prefill_node=computed,
        )
        before = self.controller.snapshot(self.now_s)
        try:
            placement = self.controller.place(asked, self.now_s)
        except NoNodeAvailable:
            assert self.controller.snapshot(self.now_s) == before
            return multiple()
        usable = set(self.live) - self.leaving - exclude
        assert placement.decode_node in usable
        assert placement.prefill_node == computed or placement.prefill_node in usable
        return placement

    @rule(placement=placements)
    def prefilled(self, placement: Placement) -> None:
        self.controller.prefilled(placement.booking, self.now_s)
        self.same_again(lambda: self.controller.prefilled(placement.booking, self.now_s))

    @rule(placement=placements, data_bytes=st.integers(0, 1 << 30))
    def moved(self, placement: Placement, data_bytes: int) -> None:
        report = handoff(placement.prefill_node, placement.decode_node, data_bytes, 0.1)
        self.controller.moved(placement.booking, report, self.now_s)
        self.same_again(lambda: self.controller.moved(placement.booking, report, self.now_s))

    @rule(placement=consumes(placements))
    def ended(self, placement: Placement) -> None:
        self.controller.ended(placement.booking, self.now_s)
        self.same_again(lambda: self.controller.ended(placement.booking, self.now_s))
        self.same_again(lambda: self.controller.prefilled(placement.booking, self.now_s))

    def same_again(self, step) -> None:  # type: ignore[no-untyped-def]
        before = [(n.booked_work, n.booked_blocks) for n in self.controller.snapshot(0.0).nodes]
        step()
        after = [(n.booked_work, n.booked_blocks) for n in self.controller.snapshot(0.0).nodes]
        assert after == before

    @rule(name=names, role=roles)
    def request_role(self, name: str, role: Role) -> None:
        if name not in self.live:
            with pytest.raises(NotFoundError):
                self.controller.request_role(name, role, self.now_s)
        elif name in self.leaving:
            with pytest.raises(UnprocessableError):
                self.controller.request_role(name, role, self.now_s)
        else:
            self.controller.request_role(name, role, self.now_s)
            assert role in (self.node(name).role, self.node(name).next_role)

    @rule(name=names)
    def request_drain(self, name: str) -> None:
        if name in self.live:
            self.controller.request_drain(name, self.now_s)
            self.leaving.add(name)

    @rule(seconds=st.sampled_from([0.0, 0.1, 1.0, 10.0]))
    def tick(self, seconds: float) -> None:
        self.now_s += seconds
        for action in self.controller.tick(self.now_s):
            if isinstance(action, AddNode):
                continue
            assert self.live[action.node] == action.epoch
            if isinstance(action, RemoveNode):
                node = self.node(action.node)
                assert node.state is NodeState.DRAINED and node.booked_work == 0
        for node in self.controller.snapshot(self.now_s).nodes:
            if node.state in (NodeState.LEAVING, NodeState.DRAINED):
                self.leaving.add(node.name)

    def node(self, name: str):  # type: ignore[no-untyped-def]
        return next(n for n in self.controller.snapshot(self.now_s).nodes if n.name == name)

    @invariant()
    def books_agree(self) -> None:
        self.controller.check()
        snapshot = self.controller.snapshot(self.now_s)
        assert {n.name: n.epoch for n in snapshot.nodes} == self.live
        for node in snapshot.nodes:
            assert 0 <= node.prefill_load <= 1 and 0 <= node.decode_load <= 1
            assert node.queue_s > -1e-6
            assert (node.next_role is not None) == (node.state is NodeState.SWITCHING)
            if node.name in self.leaving:
                assert node.state in (NodeState.LEAVING, NodeState.DRAINED)
        snapshot.to_dict()


TestControllerMachine = ControllerMachine.TestCase
TestControllerMachine.settings = settings(max_examples=30, stateful_step_count=30, deadline=None)


def cluster(**roles: Role) -> Controller:
    controller = Controller()
    for name, role in roles.items():
        controller.join(node_info(name, role), 0.0)
    return controller


def state_of(controller: Controller, name: str) -> tuple[NodeState, Role]:
    node = next(n for n in controller.snapshot(0.0).nodes if n.name == name)
    return node.state, node.role


def test_is_what_the_dispatcher_asks_for() -> None:
    routing: Routing = Controller()
    assert routing


class TestRoleChange:
    def test_drains_then_takes_its_role_and_tells_it_once(self) -> None:
        controller = cluster(p=P, d=D, e=D)
        booking = controller.place(query(), 0.0).booking
        controller.request_role("d", P, 1.0)
        assert controller.tick(1.0) == []
        assert state_of(controller, "d") == (NodeState.SWITCHING, D)
        controller.prefilled(booking, 2.0)
        controller.moved(booking, handoff("p", "d", 1 << 20, 0.1), 2.0)
        assert controller.tick(2.0) == []
        controller.ended(booking, 3.0)
        assert controller.tick(3.0) == [SwitchRole("d", 1, P, "asked for")]
        assert controller.tick(3.5) == []
        assert state_of(controller, "d") == (NodeState.ACTIVE, P)

    def test_waits_for_what_the_node_says(self) -> None:
        controller = cluster(p=P, d=D, e=D)
        busy = node_report(node_load(num_requests_running=1))
        controller.report("d", 1, busy, 1.0)
        controller.request_role("d", P, 1.0)
        assert controller.tick(1.0) == []
        controller.report("d", 1, busy, 2.0)
        assert controller.tick(2.0) == []
        controller.report("d", 1, node_report(), 3.0)
        assert [action.role for action in controller.tick(3.0)] == [P]  # type: ignore[union-attr]

    def test_or_for_its_word(self) -> None:
        controller = cluster(p=P, d=D, e=D)
        controller.report("d", 1, node_report(node_load(num_requests_running=1)), 1.0)
        controller.request_role("d", P, 1.0)
        controller.drained("d", 1, 2.0)
        assert len(controller.tick(2.0)) == 1

    def test_not_for_ever(self) -> None:
        controller = cluster(p=P, d=D, e=D)
        controller.place(query(), 0.0)
        controller.request_role("d", P, 0.0)
        timeout_s = controller.config.role_drain_timeout_s
        assert controller.tick(timeout_s - 0.1) == []
        assert controller.tick(timeout_s) == [SwitchRole("d", 1, P, "asked for")]

    def test_hybrid_needs_no_draining_and_keeps_working_on_the_way_back(self) -> None:
        controller = cluster(p=P, d=D)
        controller.place(query(), 0.0)
        controller.request_role("d", H, 0.0)
        assert state_of(controller, "d") == (NodeState.ACTIVE, H)
        own = controller.place(query(exclude=frozenset({"p"})), 0.0)
        assert own.prefill_node == own.decode_node == "d"
        controller.request_role("d", D, 0.0)
        assert state_of(controller, "d") == (NodeState.SWITCHING, H)
        assert controller.place(query(), 0.0).decode_node == "d"
        controller.prefilled(own.booking, 1.0)
        controller.tick(1.0)
        assert state_of(controller, "d") == (NodeState.ACTIVE, D)

    def test_can_be_taken_back(self) -> None:
        controller = cluster(p=P, d=D, e=D)
        controller.place(query(), 0.0)
        controller.request_role("d", P, 0.0)
        controller.request_role("d", D, 0.0)
        assert state_of(controller, "d") == (NodeState.ACTIVE, D)

    def test_same_role_is_no_change(self) -> None:
        controller = cluster(p=P, d=D)
        controller.request_role("d", D, 0.0)
        assert controller.tick(0.0) == []


class TestDrain:
    def test_removed_when_empty(self) -> None:
        controller = cluster(p=P, d=D, e=D)
        booking = controller.place(query(), 0.0).booking
        controller.request_drain("d", 0.0)
        controller.request_drain("d", 0.0)
        assert controller.tick(99.0) == []
        controller.ended(booking, 100.0)
        assert controller.tick(100.0) == [RemoveNode("d", 1, "asked for")]
        assert state_of(controller, "d") == (NodeState.DRAINED, D)
        assert controller.tick(101.0) == []

    def test_hand_offs_out_are_waited_for(self) -> None:
        controller = cluster(p=P, q=P, d=D)
        booking = controller.place(query(), 0.0).booking
        controller.prefilled(booking, 0.0)
        controller.request_drain("p", 0.0)
        assert controller.tick(1.0) == []
        controller.moved(booking, handoff("p", "d", 1, 0.1), 2.0)
        assert [a.node for a in controller.tick(2.0)] == ["p"]  # type: ignore[union-attr]


class TestLives:
    def test_joining_again_ends_the_life_before(self) -> None:
        controller = cluster(p=P, d=D)
        booking = controller.place(query(), 0.0).booking
        assert controller.join(node_info("p", P), 1.0) == 2
        with pytest.raises(StaleEpoch, match="speaks of epoch 1, but 2 has begun"):
            controller.report("p", 1, node_report(), 1.0)
        (d, p) = controller.snapshot(1.0).nodes
        assert p.booked_work == 0 and d.booked_decodes == 1
        controller.prefilled(booking, 1.0)
        controller.moved(booking, handoff("p", "d", 1, 0.1), 1.0)
        controller.ended(booking, 1.0)
        assert all(node.booked_work == 0 for node in controller.snapshot(1.0).nodes)
        controller.check()

    def test_what_was_wanted_of_it_is_no_more(self) -> None:
        controller = cluster(p=P, d=D)
        controller.request_drain("d", 0.0)
        controller.leave("d", 0.0, "lost")
        controller.join(node_info("d", D), 0.0)
        assert controller.tick(0.0) == []

    def test_epochs_of_a_membership(self) -> None:
        controller = Controller()
        assert controller.join(node_info("a"), 0.0, 7) == 7
        with pytest.raises(ValueError, match="epoch=7 of node 'a' must be above its last, 7"):
            controller.join(node_info("a"), 0.0, 7)
        assert [node.epoch for node in controller.snapshot(0.0).nodes] == [7]
        assert controller.join(node_info("a"), 0.0) == 8

    def test_nonsense_in_a_report_harms_nobody(self) -> None:
        controller = cluster(a=P, b=P, d=D)
        load = node_load(
            kv_cache_usage=math.nan,
            token_budget_used=math.inf,
            num_waiting_tokens=1 << 80,
            num_requests_running=-(1 << 80),
            num_requests_waiting=1 << 90,
        )
        for rate in (math.nan, math.inf, -1.0, 0.0):
            report = node_report(load, device_utilisation=math.nan, prefill_tokens_per_s=rate)
            controller.report("a", 1, report, 0.0)
        assert controller.place(query(), 0.0).prefill_node == "b"
        controller.moved(0, handoff("a", "d", 1 << 90, math.nan), 0.0)
        controller.tick(1.0)
        controller.check()

    @pytest.mark.parametrize("field", ["num_blocks", "block_size", "max_num_seqs"])
    def test_nonsense_in_what_a_node_says_of_itself(self, field: str) -> None:
        with pytest.raises(ValidationError, match=f"{field}=0 must be in"):
            node_info("a", **{field: 0})

    def test_unknown_nodes(self) -> None:
        controller = Controller()
        controller.leave("x", 0.0, "lost")
        with pytest.raises(StaleEpoch, match="'x' is not known"):
            controller.report("x", 1, node_report(), 0.0)
        with pytest.raises(NotFoundError, match="no node 'x'"):
            controller.request_drain("x", 0.0)

    def test_a_slot_is_used_again_without_a_trace(self) -> None:
        controller = cluster(p=P, d=D)
        controller.place(query(), 0.0)
        controller.report("p", 1, node_report(node_load(num_waiting_tokens=9999)), 0.0)
        controller.leave("p", 0.0, "lost")
        controller.join(node_info("new", P), 0.0)
        new = next(n for n in controller.snapshot(0.0).nodes if n.name == "new")
        assert new.queue_s == 0.0 and new.booked_work == 0 and new.load is None


def test_illegal_moves_are_refused() -> None:
    controller = cluster(p=P)
    record = controller._records["p"]
    for state in NodeState:
        for target in NodeState:
            record.state = state
            if target in LEGAL_MOVES[state]:
                record.move(target, 0.0)
            else:
                with pytest.raises(IllegalMove, match="is no legal move"):
                    record.move(target, 0.0)


def test_log_tells_what_happened() -> None:
    controller = cluster(p=P, d=D)
    controller.place(query("seq"), 1.0)
    controller.request_role("d", H, 2.0)
    controller.leave("p", 3.0, "lease ran out")
    entries = controller.decisions(10)
    assert [entry.kind for entry in entries] == [
        DecisionKind.NODE,
        DecisionKind.NODE,
        DecisionKind.ROUTE,
        DecisionKind.ROLE,
        DecisionKind.NODE,
    ]
    assert entries[-1].reason == "lease ran out" and entries[2].subject == "seq"
    assert controller.decisions(2, after=entries[1].number) == entries[2:4]
    assert controller.snapshot(3.0).regime is Regime.NORMAL
