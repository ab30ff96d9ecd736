"""States of a transfer, and the moves between them. Imports no JAX.

A transfer is seen by both engines, and each keeps its own state of it. Here `*` ends it:

    source        QUEUED ─> MOVING ─> COMPLETED*
                     ^         └────> SETTLING ─> FAILED* | CANCELLED* | COMPLETED*
                     └─ next path ───────┘
    destination             MOVING ─> COMPLETED*
                               └────> SETTLING ─> FAILED* | CANCELLED*

SETTLING is the fence after an error or a cancel: some of the transfer's legs may still touch
memory, on either side. Blocks stay pinned, and nothing is reported, until every leg has stopped.
It can still end COMPLETED: the destination had everything before it heard of the cancel.

A leg is one backend moving some of the transfer's runs over one route:

    OFFERED ─> MOVING ─> DONE*
        └─────────┴────> STOPPING ─> STOPPED* | DONE*
        └─────────┴────> STOPPED*          (refused, or failed on the other side first)
"""

from __future__ import annotations

import enum
from typing import TypeVar


class TransferState(enum.Enum):
    """What an engine knows of a transfer."""

    QUEUED = "queued"
    MOVING = "moving"
    SETTLING = "settling"
    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def is_final(self) -> bool:
        return not TRANSFER_MOVES[self]


class LegState(enum.Enum):
    """What an engine knows of one leg of a transfer."""

    OFFERED = "offered"
    MOVING = "moving"
    STOPPING = "stopping"
    DONE = "done"
    STOPPED = "stopped"

    @property
    def is_final(self) -> bool:
        return not LEG_MOVES[self]


_T = TransferState
TRANSFER_MOVES: dict[TransferState, frozenset[TransferState]] = {
    _T.QUEUED: frozenset({_T.MOVING, _T.SETTLING}),
    _T.MOVING: frozenset({_T.COMPLETED, _T.SETTLING}),
    _T.SETTLING: frozenset({_T.QUEUED, _T.COMPLETED, _T.FAILED, _T.CANCELLED}),
    _T.COMPLETED: frozenset(),
    _T.FAILED: frozenset(),
    _T.CANCELLED: frozenset(),
}

_L = LegState
LEG_MOVES: dict[LegState, frozenset[LegState]] = {
    _L.OFFERED: frozenset({_L.MOVING, _L.DONE, _L.STOPPING, _L.STOPPED}),
    _L.MOVING: frozenset({_L.DONE, _L.STOPPING, _L.STOPPED}),
    _L.STOPPING: frozenset({_L.DONE, _L.STOPPED}),
    _L.DONE: frozenset(),
    _L.STOPPED: frozenset(),
}

S = TypeVar("S", TransferState, LegState)


def moved(old: S, new: S) -> S:
    """`new`, if the table allows it.

    Raises:
        RuntimeError: an illegal move, which is a bug of this package.
    """
    table = TRANSFER_MOVES if isinstance(old, TransferState) else LEG_MOVES
    if new not in table[old]:
        raise RuntimeError(f"illegal move {old.name} -> {new.name}")
    return new
