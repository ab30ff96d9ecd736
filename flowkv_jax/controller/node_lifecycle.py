"""A node's states and legal moves, and the record the controller keeps of it.

    ACTIVE -> SWITCHING -> ACTIVE        another role, once the work it gives up is done
    ACTIVE -> LEAVING, SWITCHING -> LEAVING -> DRAINED

A node leaves for good from any state (it is lost, or stopped): its record ends then, and the name
may join again with a higher epoch. The controller owns all records and makes every move.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from flowkv_jax.controller.load_score import Metrics
from flowkv_jax.controller.load_window import LoadWindow
from flowkv_jax.controller.role import Role
from flowkv_jax.controller.snapshot import NodeInfo, NodeReport, NodeState

LEGAL_MOVES: dict[NodeState, frozenset[NodeState]] = {
    NodeState.ACTIVE: frozenset({NodeState.SWITCHING, NodeState.LEAVING}),
    NodeState.SWITCHING: frozenset({NodeState.ACTIVE, NodeState.LEAVING}),
    NodeState.LEAVING: frozenset({NodeState.DRAINED}),
    NodeState.DRAINED: frozenset(),
}


class IllegalMove(RuntimeError):
    """A bug of the controller: a node's state cannot change that way."""


@dataclass(eq=False, slots=True)
class NodeRecord:
    """What the controller knows of one live node.

    Attributes:
        info: as it joined.
        epoch: of this life of the name.
        slot: its place in the node table.
        window: of its metrics; `metrics` is the average when it last reported.
        role: now; `home_role` is where it belongs, `next_role` where it goes while SWITCHING.
        state, state_since_s, role_since_s, joined_s: where it stands, and since when.
        prefill_load, decode_load: scores of `metrics`.
        report, reported_s: the newest.
        is_reported_empty: it has said so since the change that is under way began.
        change: reason and terms of the change of role or drain that is under way.
    """

    info: NodeInfo
    epoch: int
    slot: int
    window: LoadWindow
    joined_s: float
    role: Role
    home_role: Role
    state_since_s: float
    role_since_s: float
    state: NodeState = NodeState.ACTIVE
    next_role: Role | None = None
    metrics: Metrics = ()
    prefill_load: float = 0.0
    decode_load: float = 0.0
    report: NodeReport | None = None
    reported_s: float | None = None
    is_reported_empty: bool = False
    change: tuple[str, Mapping[str, float]] = ("", MappingProxyType({}))

    @property
    def name(self) -> str:
        return self.info.name

    @property
    def takes_prefill(self) -> bool:
        """It is given prompts to compute."""
        return self._takes_work and self.role.can_prefill and self._role_to_be.can_prefill

    @property
    def takes_decode(self) -> bool:
        """It is given sequences to decode."""
        return self._takes_work and self.role.can_decode and self._role_to_be.can_decode

    @property
    def _takes_work(self) -> bool:
        return self.state in (NodeState.ACTIVE, NodeState.SWITCHING)

    @property
    def _role_to_be(self) -> Role:
        return self.next_role or self.role

    def move(self, state: NodeState, now_s: float) -> None:
        """Change state.

        Raises:
            IllegalMove: not one of `LEGAL_MOVES`.
        """
        if state not in LEGAL_MOVES[self.state]:
            raise IllegalMove(f"{self.name}: {self.state.value} to {state.value} is no legal move")
        self.state = state
        self.state_since_s = now_s
