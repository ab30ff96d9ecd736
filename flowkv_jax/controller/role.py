"""Roles of a node."""

from __future__ import annotations

import enum


class Role(enum.Enum):
    """What a node is given to do. A scheduling policy: any node can take any role at any time."""

    PREFILL = "prefill"
    DECODE = "decode"
    HYBRID = "hybrid"

    @property
    def can_prefill(self) -> bool:
        return self is not Role.DECODE

    @property
    def can_decode(self) -> bool:
        return self is not Role.PREFILL
