"""What a worker joins with. Plain values, no JAX."""

from __future__ import annotations

import re
from dataclasses import dataclass

from flowkv_jax.cluster.facts import NODE_NAME_PATTERN, ModelFacts, NodeFacts
from flowkv_jax.controller.role import Role
from flowkv_jax.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Application:
    """What a worker says of itself.

    Attributes:
        name: empty for the front to choose.
        role: wanted; an order to change it outlives the membership.
    """

    version: str
    role: Role
    model: ModelFacts
    node: NodeFacts
    name: str = ""

    def __post_init__(self) -> None:
        if not re.fullmatch(NODE_NAME_PATTERN, self.name):
            raise ConfigError(
                f"name={self.name!r} must be up to 64 letters, digits, dots, dashes and "
                "underscores",
                parameter="name",
                value=self.name,
            )
