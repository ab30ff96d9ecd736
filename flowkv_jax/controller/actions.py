"""What the policy wants done. Plain values; each tells why, with the figures it was decided by.

`epoch` says which life of the node is meant: whoever carries an action out later than it was given
leaves a node alone that has joined again since.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from flowkv_jax.controller.role import Role


@dataclass(frozen=True, slots=True)
class SwitchRole:
    """A node takes a role.

    From the policy: begin, by draining the node. From `Controller.tick`: it is done, tell the node.
    """

    node: str
    epoch: int
    role: Role
    reason: str
    terms: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class AddNode:
    """Start one more node; it joins when it is ready."""

    role: Role
    reason: str
    terms: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RemoveNode:
    """A node goes.

    From the policy: begin, by draining it. From `Controller.tick`: it has nothing left, stop it.
    """

    node: str
    epoch: int
    reason: str
    terms: Mapping[str, float] = field(default_factory=dict)


Action = SwitchRole | AddNode | RemoveNode
