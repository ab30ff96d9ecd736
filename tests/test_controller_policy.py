"""The policy: replays of load on a clock moved by hand, and each rule alone on made snapshots."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from flowkv_jax.controller.actions import Action, AddNode, RemoveNode, SwitchRole
from flowkv_jax.controller.config import ControllerConfig
from flowkv_jax.controller.policy import NOBODY, Policy, PolicyDecision
from flowkv_jax.controller.role import Role
from flowkv_jax.controller.snapshot import ClusterSnapshot, NodeState, NodeView, Regime
from tests.controller_cluster import SimulatedCluster

P, D, H = Role.PREFILL, Role.DECODE, Role.HYBRID

QUICK = {
    "policy_interval_s": 1.0,
    "role_load_hold_s": 2.0,
    "role_switch_cycles": 10,
    "role_switch_cooldown_s": 10.0,
    "scale_out_hold_s": 10.0,
    "scale_in_hold_s": 20.0,
    "scale_cooldown_s": 15.0,
    "node_launch_timeout_s": 30.0,
}


def settings(**changes: Any) -> ControllerConfig:
    return ControllerConfig(**(QUICK | changes))


def view(name: str, role: Role, load: float = 0.0, **changes: Any) -> NodeView:
    can_work = changes.get("state", NodeState.ACTIVE) is NodeState.ACTIVE
    values: dict[str, Any] = {
        "host": "one",
        "epoch": 1,
        "home_role": role,
        "state": NodeState.ACTIVE,
        "next_role": None,
        "state_since_s": 0.0,
        "role_since_s": 0.0,
        "takes_prefill": can_work and role.can_prefill,
        "takes_decode": can_work and role.can_decode,
        "prefill_load": load,
        "decode_load": load,
        "metrics": {},
        "load": None,
        "reported_s": None,
        "queue_s": 0.0,
        "booked_prefills": 0,
        "booked_prefill_tokens": 0,
        "booked_sends": 0,
        "booked_decodes": 0,
        "booked_blocks": 0,
        "prefill_tokens_per_s": 1000.0,
        "decode_step_s": None,
        "cached_prefix_blocks": 0,
        "pool_map": b"",
        "link_loads": (),
    }
    return NodeView(name=name, role=role, **(values | changes))


class Replay:
    """Runs the policy once a second over snapshots and keeps what it wanted."""

    def __init__(self, **changes: Any) -> None:
        self.policy = Policy(settings(**changes))
        self.now_s = 0.0
        self.actions: list[tuple[float, Action]] = []
        self.found = PolicyDecision(Regime.NORMAL, 0.0, 0.0)

    def run(self, seconds: int, *nodes: NodeView, demand: float = 0.0) -> list[Action]:
        """Hold these nodes for a time; returns what was wanted in it."""
        begin = len(self.actions)
        for _ in range(seconds):
            self.now_s += 1.0
            snapshot = ClusterSnapshot(
                self.now_s, Regime.NORMAL, 0.0, 0.0, demand, nodes, 0.25, 0.6
            )
            self.found = self.policy.tick(snapshot, self.now_s)
            self.actions += [(self.now_s, action) for action in self.found.actions]
        return [action for _, action in self.actions[begin:]]


class TestRegimes:
    @pytest.mark.parametrize(
        ("prefill", "decode", "regime"),
        [
            (0.1, 0.1, Regime.NORMAL),
            (0.5, 0.1, Regime.NORMAL),
            (0.9, 0.5, Regime.NORMAL),
            (0.9, 0.1, Regime.IMBALANCED),
            (0.1, 0.9, Regime.IMBALANCED),
            (0.9, 0.9, Regime.EXTREME),
        ],
    )
    def test_of_two_loads(self, prefill: float, decode: float, regime: Regime) -> None:
        replay = Replay(enable_role_switch=False)
        replay.run(5, view("p", P, prefill), view("d", D, decode))
        assert replay.found.regime is regime
        assert (replay.found.prefill_load, replay.found.decode_load) == (prefill, decode)

    def test_idle_for_long_is_extreme(self) -> None:
        replay = Replay()
        replay.run(20, view("p", P), view("d", D))
        assert replay.found.regime is Regime.NORMAL
        replay.run(2, view("p", P), view("d", D))
        assert replay.found.regime is Regime.EXTREME

    def test_demand_is_seen_where_nothing_completes(self) -> None:
        replay = Replay(enable_role_switch=False, queue_target_s=1.0)
        replay.run(5, view("p", P, 0.1, queue_s=60.0), view("d", D, 0.1))
        assert replay.found.prefill_load > 0.98
        assert replay.found.regime is Regime.IMBALANCED

    def test_a_cycle_has_to_pass(self) -> None:
        policy = Policy(settings())
        nodes = (view("p0", P), view("p1", P))
        snapshot = ClusterSnapshot(0.0, Regime.NORMAL, 0.0, 0.0, 0.0, nodes, 0.25, 0.6)
        assert policy.tick(snapshot, 0.0).actions
        again = policy.tick(snapshot, 0.9)
        assert not again.actions and again.decode_load == NOBODY
        assert policy.is_due(1.0)


class TestLending:
    busy = (view("p", P, 0.9), view("d0", D, 0.1, booked_decodes=2), view("d1", D, 0.1))

    def test_the_least_loaded_idle_node_goes(self) -> None:
        (action,) = Replay().run(3, *self.busy)
        assert isinstance(action, SwitchRole)
        assert (action.node, action.role) == ("d1", P)
        assert "prefill is overloaded" in action.reason
        assert action.terms["idle_load_without"] == pytest.approx(0.2)

    def test_load_must_last(self) -> None:
        replay = Replay()
        for _ in range(10):
            assert not replay.run(1, *self.busy)
            assert not replay.run(1, view("p", P, 0.1), *self.busy[1:])

    def test_the_last_of_its_role_becomes_hybrid(self) -> None:
        (action,) = Replay().run(3, view("p", P, 0.9), view("d", D, 0.1))
        assert action == SwitchRole("d", 1, H, action.reason, action.terms)

    def test_not_if_the_others_could_not_carry_its_load(self) -> None:
        # 0.24 is idle, but one of two would have 0.48.
        replay = Replay(role_load_low=0.25, role_load_high=0.6)
        assert not replay.run(20, view("p", P, 0.9), view("d0", D, 0.24), view("d1", D, 0.24))

    def test_cool_down(self) -> None:
        replay = Replay()
        assert len(replay.run(3, *self.busy)) == 1
        assert not replay.run(9, *self.busy)
        assert len(replay.run(1, *self.busy)) == 1

    def test_one_at_a_time(self) -> None:
        replay = Replay(role_switch_cooldown_s=0.0)
        switching = replace(self.busy[2], state=NodeState.SWITCHING, next_role=P)
        assert not replay.run(30, *self.busy[:2], switching)

    def test_turned_off(self) -> None:
        assert not Replay(enable_role_switch=False).run(30, *self.busy)


class TestReturning:
    lent = view("d1", P, 0.1, home_role=D)

    def test_after_some_cycles_when_it_can_be_spared(self) -> None:
        replay = Replay()
        nodes = (view("p", P, 0.1), view("d0", D, 0.1), self.lent)
        assert not replay.run(9, *nodes)
        (action,) = replay.run(1, *nodes)
        assert action == SwitchRole("d1", 1, D, "no more needed", action.terms)

    def test_not_while_it_is_needed(self) -> None:
        nodes = (view("p", P, 0.4), view("d0", D, 0.1), replace(self.lent, prefill_load=0.4))
        assert not Replay().run(100, *nodes)

    def test_not_while_the_others_would_be_busy(self) -> None:
        # No queue at all, but the prompts that arrive keep 1.4 nodes busy.
        nodes = (view("p", P, 0.1), view("d0", D, 0.1), self.lent)
        assert not Replay().run(100, *nodes, demand=1.4)
        assert Replay().run(10, *nodes, demand=0.4)

    def test_its_own_role_comes_first(self) -> None:
        nodes = (view("p", P, 0.4), view("d0", D, 0.9), replace(self.lent, prefill_load=0.4))
        (action,) = Replay().run(10, *nodes)
        assert action == SwitchRole("d1", 1, D, "its own role needs it", action.terms)

    def test_hybrid_goes_back(self) -> None:
        nodes = (view("p", P, 0.1), view("d", H, 0.1, home_role=D))
        (action,) = Replay().run(10, *nodes)
        assert action == SwitchRole("d", 1, D, "no more needed", action.terms)


class TestLostRole:
    def test_another_node_takes_it_at_once(self) -> None:
        (action,) = Replay().run(1, view("d0", D, 0.9), view("d1", D, 0.9))
        assert isinstance(action, SwitchRole)
        assert (action.node, action.role) == ("d0", P)

    def test_the_last_node_does_both(self) -> None:
        (action,) = Replay().run(1, view("p", P, 0.5))
        assert isinstance(action, SwitchRole)
        assert (action.node, action.role) == ("p", H)

    def test_one_that_was_lent_goes_home(self) -> None:
        (action,) = Replay().run(1, view("a", D, 0.1), view("z", D, 0.3, home_role=P))
        assert isinstance(action, SwitchRole)
        assert (action.node, action.role) == ("z", P)

    def test_leaving_nodes_do_not_count(self) -> None:
        leaving = view("p", P, state=NodeState.LEAVING)
        (action,) = Replay().run(1, leaving, view("d", D))
        assert isinstance(action, SwitchRole)
        assert (action.node, action.role) == ("d", H)

    def test_nobody_at_all(self) -> None:
        assert not Replay().run(5)


ELASTIC = {"enable_elastic_scaling": True, "enable_role_switch": False}


class TestScaling:
    overloaded = (view("p", P, 0.9), view("d", D, 0.9))
    idle = (view("p0", P, 0.01), view("p1", P, 0.01), view("d", D, 0.3))

    def test_off_by_default(self) -> None:
        replay = Replay()
        assert not replay.run(200, *self.overloaded) and not replay.run(200, *self.idle)

    def test_out_after_lasting_overload(self) -> None:
        replay = Replay(**ELASTIC)
        assert not replay.run(12, *self.overloaded)
        (action,) = replay.run(1, *self.overloaded)
        assert isinstance(action, AddNode) and action.role is P
        assert action.terms["overloaded_s"] == 10.0

    def test_asked_for_once_until_it_joins_or_is_given_up(self) -> None:
        replay = Replay(**ELASTIC)
        assert len(replay.run(13, *self.overloaded)) == 1
        assert not replay.run(29, *self.overloaded)
        assert len(replay.run(2, *self.overloaded)) == 1

    def test_next_one_after_it_joined_and_a_cool_down(self) -> None:
        replay = Replay(**ELASTIC)
        replay.run(13, *self.overloaded)
        more = (*self.overloaded, view("p2", P, 0.9))
        assert not replay.run(15, *more)
        (action,) = replay.run(1, *more)
        assert isinstance(action, AddNode)

    def test_never_above_the_most(self) -> None:
        replay = Replay(**ELASTIC, max_prefill_nodes=1, max_decode_nodes=1)
        assert not replay.run(100, *self.overloaded)

    def test_in_after_lasting_idleness(self) -> None:
        replay = Replay(**ELASTIC)
        assert not replay.run(20, *self.idle)
        actions = replay.run(10, *self.idle)
        assert isinstance(actions[0], RemoveNode) and actions[0].node == "p0"
        assert actions[0].terms["load_without"] == pytest.approx(0.02)

    def test_in_only_if_the_others_stay_idle(self) -> None:
        # 0.15 of two nodes is 0.30 of one: no longer low, so none is removed.
        nodes = (view("p0", P, 0.15), view("p1", P, 0.15), view("d", D, 0.3))
        assert not Replay(**ELASTIC).run(200, *nodes)

    def test_in_only_if_the_others_can_compute_what_arrives(self) -> None:
        assert not Replay(**ELASTIC).run(200, *self.idle, demand=0.9)

    def test_never_under_the_least(self) -> None:
        assert not Replay(**ELASTIC, min_prefill_nodes=2).run(200, *self.idle)

    def test_not_while_the_other_role_is_overloaded(self) -> None:
        nodes = (*self.idle[:2], view("d", D, 0.9))
        replay = Replay(**ELASTIC, max_decode_nodes=1)
        assert not replay.run(200, *nodes)

    def test_lost_nodes_are_replaced_at_once(self) -> None:
        replay = Replay(**ELASTIC, min_prefill_nodes=2)
        replay.run(1, view("p0", P), view("p1", P), view("d", D))
        actions = replay.run(1, view("d", D))
        assert [a.role for a in actions if isinstance(a, AddNode)] == [P, P]
        assert not replay.run(20, view("d", D))
        replay.run(1)
        assert not replay.run(5)[1:]

    def test_all_lost(self) -> None:
        replay = Replay(**ELASTIC)
        replay.run(1, view("p", P), view("d", D))
        assert len(replay.run(1)) == 2

    def test_nothing_before_the_first_node(self) -> None:
        assert not Replay(**ELASTIC).run(20)

    def test_hybrid_cluster_is_one_role(self) -> None:
        replay = Replay(**ELASTIC, max_decode_nodes=2)
        (action,) = replay.run(13, view("a", H, 0.9))
        assert isinstance(action, AddNode) and action.role is H
        replay = Replay(**ELASTIC)
        actions = replay.run(40, view("a", H), view("b", H))
        assert isinstance(actions[0], RemoveNode)


class TestReplays:
    """A real controller, with nodes that take time."""

    def test_steady_load_changes_nothing(self) -> None:
        cluster = SimulatedCluster({"p": P, "d": D}, settings())
        cluster.run(120, requests_per_s=2, prompt_tokens=200, output_tokens=40)
        assert not cluster.actions

    def test_long_prompts_borrow_a_decode_node_and_give_it_back(self) -> None:
        cluster = SimulatedCluster({"p": P, "d0": D, "d1": D}, settings())
        cluster.run(60, requests_per_s=1.5, prompt_tokens=1000, output_tokens=10)
        lent = [name for name in ("d0", "d1") if cluster.role_of(name) is P]
        assert len(lent) == 1
        assert len(cluster.switches()) == 1
        late = cluster.first_token_s[-20:]
        assert max(late) < max(cluster.first_token_s)
        cluster.run(120, requests_per_s=1, prompt_tokens=100, output_tokens=40)
        assert [cluster.role_of(name) for name in ("d0", "d1")] == [D, D]
        assert len(cluster.switches()) == 2

    def test_load_of_one_and_a_half_nodes_does_not_flap(self) -> None:
        cluster = SimulatedCluster({"p": P, "d0": D, "d1": D}, settings())
        cluster.run(300, requests_per_s=1.4, prompt_tokens=1000, output_tokens=10)
        assert len(cluster.switches()) <= 2

    def test_many_tokens_borrow_a_prefill_node(self) -> None:
        cluster = SimulatedCluster({"p0": P, "p1": P, "d": D}, settings())
        cluster.run(60, requests_per_s=2, prompt_tokens=20, output_tokens=120)
        roles = {cluster.role_of(name) for name in ("p0", "p1")}
        assert D in roles and any(role.can_prefill for role in roles)
        cluster.run(120, requests_per_s=2, prompt_tokens=20, output_tokens=120)
        assert len(cluster.switches()) <= 3

    def test_bursts_and_pauses_do_not_flap(self) -> None:
        cluster = SimulatedCluster({"p": P, "d0": D, "d1": D}, settings())
        for _ in range(20):
            cluster.run(8, requests_per_s=1.6, prompt_tokens=1000, output_tokens=10)
            cluster.run(8, requests_per_s=0.1, prompt_tokens=100, output_tokens=10)
        minutes = cluster.now_s / 60
        assert len(cluster.switches()) <= 2.5 * minutes

    def test_grows_under_overload_and_shrinks_when_idle(self) -> None:
        config = settings(enable_elastic_scaling=True, max_prefill_nodes=4, max_decode_nodes=4)
        cluster = SimulatedCluster({"p": P, "d": D}, config)
        cluster.run(150, requests_per_s=3, prompt_tokens=800, output_tokens=100)
        assert len(cluster.nodes) > 3
        assert all(not isinstance(action, RemoveNode) for _, action in cluster.actions)
        cluster.run(300, requests_per_s=0.1, prompt_tokens=100, output_tokens=10)
        assert len(cluster.nodes) == 2
        assert {node.info.role for node in cluster.nodes.values()} == {P, D}

    def test_scaled_cluster_does_not_oscillate(self) -> None:
        config = settings(enable_elastic_scaling=True)
        cluster = SimulatedCluster({"p": P, "d": D}, config)
        cluster.run(400, requests_per_s=1.3, prompt_tokens=1000, output_tokens=20)
        added = sum(isinstance(action, AddNode) for _, action in cluster.actions)
        removed = sum(isinstance(action, RemoveNode) for _, action in cluster.actions)
        assert added <= 2 and removed <= 1

    def test_loses_its_prefill_node(self) -> None:
        cluster = SimulatedCluster({"p": P, "d": D}, settings())
        cluster.run(10, requests_per_s=1, prompt_tokens=100, output_tokens=20)
        del cluster.nodes["p"]
        cluster.sending = [s for s in cluster.sending if s.prefill_node != "p"]
        cluster.controller.leave("p", cluster.now_s, "lost")
        cluster.run(10, requests_per_s=1, prompt_tokens=100, output_tokens=20)
        assert cluster.role_of("d") is H
        cluster.join("p", P)
        cluster.run(40, requests_per_s=1, prompt_tokens=100, output_tokens=20)
        assert cluster.role_of("d") is D
