"""Roles and numbers of nodes: FlowKV's three regimes, with what keeps them from flapping.

Load of a role, in [0, 1]: the mean score of the active nodes that serve it, or the pressure of
their mean predicted queue time, if that is more. Both see work that waits, so demand is seen where
nothing completes. A role with work and nobody to do it has load `NOBODY`.

    regime        levels (`load_level`)                   action
    NORMAL        anything else                           return what was lent, if it can be spared
    IMBALANCED    one role HIGH, the other LOW            lend a node of the idle role
    EXTREME       both HIGH, or both LOW for long         add nodes, or remove some

Lending. The idle role's least loaded node drains and takes the other role; if it is the only one
of its role it becomes HYBRID, which needs no draining. It stays so for `role_switch_cycles` cycles
at least, and then until the role it helps would do without it.

Scaling. A role that stays HIGH for `scale_out_hold_s` gets a node. One that stays LOW for
`scale_in_hold_s` gives one up. A cluster of hybrid nodes is one role with the bounds of decode.
Lost nodes are replaced when fewer than the least number are left.

Against flapping: levels have hysteresis; a node is taken from a role of N nodes only if the others
would carry what it did; one action at a time, none while another one is not finished; a cool-down
between changes of roles, and between changes of numbers.

What the others would carry is load * N / (N - 1), which must be under the middle (lending,
returning) or still low (removing). For prefill that is not enough, as its load is its queue: two
nodes that are busy 70 % of the time have next to none, and one of them has one that only grows. So
the work that arrives, in busy nodes, over N - 1 must be under the middle as well.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from flowkv_jax.controller.actions import Action, AddNode, RemoveNode, SwitchRole
from flowkv_jax.controller.config import ControllerConfig
from flowkv_jax.controller.load_level import Level, LoadLevel
from flowkv_jax.controller.load_score import queue_pressure
from flowkv_jax.controller.role import Role
from flowkv_jax.controller.snapshot import ClusterSnapshot, NodeState, NodeView, Regime

NOBODY = 2.0
"""Load of a role that no active node serves."""

_OTHER = {Role.PREFILL: Role.DECODE, Role.DECODE: Role.PREFILL}


@dataclass(frozen=True, slots=True)
class PolicyDecision:
    """What one cycle found and wants.

    Attributes:
        regime: as found.
        prefill_load, decode_load: of the roles.
        actions: to carry out.
    """

    regime: Regime
    prefill_load: float
    decode_load: float
    actions: tuple[Action, ...] = ()


class Policy:
    """Decides once a cycle. Its state: levels, times of the last changes, nodes asked for."""

    def __init__(self, config: ControllerConfig) -> None:
        self._config = config
        self._levels = {
            role: LoadLevel(config.role_load_low, config.role_load_high, config.role_load_hold_s)
            for role in _OTHER
        }
        self._last = PolicyDecision(Regime.NORMAL, 0.0, 0.0)
        self._last_cycle_s: float | None = None
        self._role_changed_s: float | None = None
        self._scaled_s: float | None = None
        self._asked: list[tuple[Role, float]] = []
        self._known: set[tuple[str, int]] = set()
        self._prefill_demand_nodes = 0.0
        self._is_split: bool | None = None  # not known before the first node

    def is_due(self, now_s: float) -> bool:
        """A cycle has passed since the last decision."""
        return _has_passed(self._last_cycle_s, self._config.policy_interval_s, now_s)

    def tick(self, snapshot: ClusterSnapshot, now_s: float) -> PolicyDecision:
        """Decide, if a cycle has passed; else repeat the last finding, without its actions."""
        config = self._config
        if not self.is_due(now_s):
            last = self._last
            return PolicyDecision(last.regime, last.prefill_load, last.decode_load)
        self._last_cycle_s = now_s
        self._prefill_demand_nodes = snapshot.prefill_demand_nodes
        self._note_joined(snapshot.nodes, now_s)
        nodes = [n for n in snapshot.nodes if n.state in (NodeState.ACTIVE, NodeState.SWITCHING)]
        is_leaving = len(nodes) < len(snapshot.nodes)
        is_switching = any(node.state is NodeState.SWITCHING for node in nodes)
        if is_switching:
            self._role_changed_s = now_s  # a cool-down begins when the change is done
        if is_leaving:
            self._scaled_s = now_s
        loads = {role: _role_load(nodes, role, config.queue_target_s) for role in _OTHER}
        for role, load in loads.items():
            self._levels[role].update(load, now_s)
        actions: tuple[Action, ...] = self._missing(nodes, now_s)
        if not actions and not is_switching:
            action: Action | None = (
                self._restore_role(nodes, loads)
                or self._return_lent(nodes, loads, now_s)
                or self._lend(nodes, loads, now_s)
            )
            if action is None and not is_leaving:
                action = self._scale_out(nodes, loads, now_s) or self._scale_in(nodes, loads, now_s)
            actions = (action,) if action is not None else ()
        self._note_actions(actions, now_s)
        regime = self._regime(now_s)
        self._last = PolicyDecision(regime, loads[Role.PREFILL], loads[Role.DECODE], actions)
        return self._last

    def _regime(self, now_s: float) -> Regime:
        levels = {level.level for level in self._levels.values()}
        if levels == {Level.HIGH, Level.LOW}:
            return Regime.IMBALANCED
        lasting = {
            level: min(tracked.held_s(level, now_s) for tracked in self._levels.values())
            for level in (Level.HIGH, Level.LOW)
        }
        if levels == {Level.HIGH} or (
            levels == {Level.LOW} and lasting[Level.LOW] >= self._config.scale_in_hold_s
        ):
            return Regime.EXTREME
        return Regime.NORMAL

    # Nodes that come.

    def _note_joined(self, nodes: Sequence[NodeView], now_s: float) -> None:
        """Nodes asked for are awaited until one of their role joins, or for the launch timeout."""
        known = {(node.name, node.epoch) for node in nodes}
        for node in nodes:
            if (node.name, node.epoch) not in self._known:
                asked = next((a for a in self._asked if a[0] is node.home_role), None)
                if asked is not None:
                    self._asked.remove(asked)
                    self._scaled_s = now_s
        self._known = known
        oldest_s = now_s - self._config.node_launch_timeout_s
        self._asked = [asked for asked in self._asked if asked[1] > oldest_s]
        if nodes:
            self._is_split = any(node.home_role is not Role.HYBRID for node in nodes)

    def _note_actions(self, actions: Sequence[Action], now_s: float) -> None:
        for action in actions:
            if isinstance(action, SwitchRole):
                self._role_changed_s = now_s
            else:
                self._scaled_s = now_s
            if isinstance(action, AddNode):
                self._asked.append((action.role, now_s))

    def _missing(self, nodes: Sequence[NodeView], now_s: float) -> tuple[Action, ...]:
        """Ask for nodes below the least numbers, at once."""
        if not self._config.enable_elastic_scaling or self._is_split is None:
            return ()
        actions: list[Action] = []
        for role in self._scaled_roles():
            count = self._count(nodes, role)
            low, _ = self._bounds(role)
            reason = f"{count} {role.value} nodes, at least {low} are wanted"
            actions += [AddNode(role, reason, {"nodes": count})] * (low - count)
        return tuple(actions)

    # Roles.

    def _restore_role(
        self, nodes: Sequence[NodeView], loads: dict[Role, float]
    ) -> SwitchRole | None:
        """A role has nobody left: another node takes it without waiting."""
        if not self._config.enable_role_switch or not nodes:
            return None
        for role, load in loads.items():
            if load == NOBODY:
                others = [n for n in nodes if n.role is _OTHER[role]]
                lent = [n for n in others if n.home_role is role]
                terms = {"donor_nodes": len(others)}
                reason = f"no {role.value} node is left"
                return _take(lent or others, len(others), role, reason, terms)
        return None

    def _return_lent(
        self, nodes: Sequence[NodeView], loads: dict[Role, float], now_s: float
    ) -> SwitchRole | None:
        config = self._config
        least_s = config.role_switch_cycles * config.policy_interval_s
        for node in nodes:
            if node.role is node.home_role or node.home_role is Role.HYBRID:
                continue
            helped = _OTHER[node.home_role]
            if now_s - node.role_since_s < least_s:
                continue
            count = len(_serving(nodes, helped))
            if count < 2:
                continue
            spared = self._without(helped, loads, count)
            terms = {"helped_load": loads[helped], "helped_load_without": spared}
            is_needed = (
                self._levels[node.home_role].level is Level.HIGH
                and self._levels[helped].level is not Level.HIGH
            )
            if is_needed:
                return SwitchRole(
                    node.name, node.epoch, node.home_role, "its own role needs it", terms
                )
            if spared < self._levels[helped].middle:
                return SwitchRole(node.name, node.epoch, node.home_role, "no more needed", terms)
        return None

    def _lend(
        self, nodes: Sequence[NodeView], loads: dict[Role, float], now_s: float
    ) -> SwitchRole | None:
        config = self._config
        if not config.enable_role_switch or not _has_passed(
            self._role_changed_s, config.role_switch_cooldown_s, now_s
        ):
            return None
        for busy, idle in _OTHER.items():
            if (self._levels[busy].level, self._levels[idle].level) != (Level.HIGH, Level.LOW):
                continue
            donors = [n for n in nodes if n.role is idle and n.home_role is idle]
            count = len(_serving(nodes, idle))
            terms = {"busy_load": loads[busy], "idle_load": loads[idle], "idle_nodes": count}
            if count > 1:
                terms["idle_load_without"] = self._without(idle, loads, count)
                if terms["idle_load_without"] >= self._levels[idle].middle:
                    continue
            reason = f"{busy.value} is overloaded and {idle.value} is idle"
            return _take(donors, count, busy, reason, terms)
        return None

    def _without(self, role: Role, loads: dict[Role, float], count: int) -> float:
        """Load of a role of `count` nodes, above 1, if it had one less; see the module."""
        load = loads[role] * count / (count - 1)
        if role is Role.PREFILL:
            load = max(load, self._prefill_demand_nodes / (count - 1))
        return load

    # Numbers.

    def _scaled_roles(self) -> tuple[Role, ...]:
        return (Role.PREFILL, Role.DECODE) if self._is_split else (Role.HYBRID,)

    def _bounds(self, role: Role) -> tuple[int, int]:
        config = self._config
        if role is Role.PREFILL:
            return config.min_prefill_nodes, config.max_prefill_nodes
        return config.min_decode_nodes, config.max_decode_nodes

    def _count(self, nodes: Sequence[NodeView], role: Role) -> int:
        """Nodes that belong to a role, and those asked for."""
        here = sum(node.home_role is role for node in nodes)
        return here + sum(asked is role for asked, _ in self._asked)

    def _may_scale(self, now_s: float) -> bool:
        config = self._config
        return (
            config.enable_elastic_scaling
            and not self._asked
            and _has_passed(self._scaled_s, config.scale_cooldown_s, now_s)
        )

    def _tracked(self, role: Role) -> Sequence[LoadLevel]:
        return [self._levels[r] for r in _OTHER if role in (r, Role.HYBRID)]

    def _scale_out(
        self, nodes: Sequence[NodeView], loads: dict[Role, float], now_s: float
    ) -> AddNode | None:
        hold_s = self._config.scale_out_hold_s
        if not nodes or not self._may_scale(now_s):
            return None
        for role in self._scaled_roles():
            held_s = max(t.held_s(Level.HIGH, now_s) for t in self._tracked(role))
            is_high = any(t.level is Level.HIGH for t in self._tracked(role))
            count, (_, high) = self._count(nodes, role), self._bounds(role)
            if is_high and held_s >= hold_s and count < high:
                terms = {**_load_terms(loads), "nodes": count, "overloaded_s": held_s}
                return AddNode(role, f"overloaded for {held_s:.0f} s", terms)
        return None

    def _scale_in(
        self, nodes: Sequence[NodeView], loads: dict[Role, float], now_s: float
    ) -> RemoveNode | None:
        config = self._config
        if not self._may_scale(now_s) or any(n.role is not n.home_role for n in nodes):
            return None
        if any(tracked.level is Level.HIGH for tracked in self._levels.values()):
            return None  # an idle node is lent to an overloaded role, not sent away
        for role in self._scaled_roles():
            tracked = self._tracked(role)
            held_s = min(t.held_s(Level.LOW, now_s) for t in tracked)
            is_low = all(t.level is Level.LOW for t in tracked)
            count, (low, _) = self._count(nodes, role), self._bounds(role)
            if not is_low or held_s < config.scale_in_hold_s or count <= max(low, 1):
                continue
            load = max(loads[r] for r in _OTHER if role in (r, Role.HYBRID))
            without = load * count / (count - 1)
            busy = 0.0 if role is Role.DECODE else self._prefill_demand_nodes / (count - 1)
            if without > config.role_load_low or busy >= tracked[0].middle:
                continue
            node = _least_loaded([n for n in nodes if n.home_role is role])
            terms = {
                "load": load,
                "load_without": without,
                "busy_without": busy,
                "nodes": count,
                "idle_s": held_s,
            }
            return RemoveNode(node.name, node.epoch, f"idle for {held_s:.0f} s", terms)
        return None


def _serving(nodes: Sequence[NodeView], role: Role) -> list[NodeView]:
    """Nodes that take work of PREFILL, or of DECODE."""
    return [
        node
        for node in nodes
        if (node.takes_prefill if role is Role.PREFILL else node.takes_decode)
    ]


def _role_load(nodes: Sequence[NodeView], role: Role, queue_target_s: float) -> float:
    serving = _serving(nodes, role)
    if not serving:
        return NOBODY if nodes else 0.0
    count = len(serving)
    if role is Role.DECODE:
        return sum(node.decode_load for node in serving) / count
    score = sum(node.prefill_load for node in serving) / count
    queue_s = sum(node.queue_s for node in serving) / count
    return max(score, queue_pressure(queue_s, queue_target_s))


def _least_loaded(nodes: Sequence[NodeView]) -> NodeView:
    return min(nodes, key=lambda n: (n.booked_work, max(n.prefill_load, n.decode_load), n.name))


def _take(
    donors: Sequence[NodeView], count: int, role: Role, reason: str, terms: Mapping[str, float]
) -> SwitchRole | None:
    """The least loaded donor takes a role; beside its own if `count` says that it is the last."""
    if not donors:
        return None
    target = role if count > 1 else Role.HYBRID
    node = _least_loaded(donors)
    return SwitchRole(node.name, node.epoch, target, reason, terms)


def _load_terms(loads: dict[Role, float]) -> dict[str, float]:
    return {f"{role.value}_load": load for role, load in loads.items()}


def _has_passed(since_s: float | None, wanted_s: float, now_s: float) -> bool:
    return since_s is None or now_s - since_s >= wanted_s
