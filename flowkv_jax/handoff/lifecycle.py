"""States of a hand-off on its two sides, and the moves between them. `*` ends it.

sender     ASKED ──> GRANTED ──> MOVING ──> DONE*
             │ ^        │           │
             v │        v           v
           DEFERRED ──> STUCK <─────┘        the front is asked: another node, or stay
                          │
                          ├──> ASKED         another node
                          └──> KEPT*         decoded where it is
           any ──> WITHDRAWN*                the sequence ended here

receiver   DEFERRED ──> RESERVED ──> FILLING ──> TAKEN*
           any ──> RELEASED*
"""

from __future__ import annotations

import enum
from typing import TypeVar


class SenderState(enum.Enum):
    ASKED = "asked"
    DEFERRED = "deferred"
    GRANTED = "granted"
    MOVING = "moving"
    STUCK = "stuck"
    DONE = "done"
    KEPT = "kept"
    WITHDRAWN = "withdrawn"


class ReceiverState(enum.Enum):
    DEFERRED = "deferred"
    RESERVED = "reserved"
    FILLING = "filling"
    TAKEN = "taken"
    RELEASED = "released"


_S, _R = SenderState, ReceiverState

SENDER_MOVES: dict[SenderState, frozenset[SenderState]] = {
    _S.ASKED: frozenset({_S.DEFERRED, _S.GRANTED, _S.STUCK, _S.WITHDRAWN}),
    _S.DEFERRED: frozenset({_S.GRANTED, _S.STUCK, _S.WITHDRAWN}),
    _S.GRANTED: frozenset({_S.MOVING, _S.STUCK, _S.WITHDRAWN}),
    _S.MOVING: frozenset({_S.DONE, _S.STUCK, _S.WITHDRAWN}),
    _S.STUCK: frozenset({_S.ASKED, _S.KEPT, _S.WITHDRAWN}),
    _S.DONE: frozenset(),
    _S.KEPT: frozenset(),
    _S.WITHDRAWN: frozenset(),
}
RECEIVER_MOVES: dict[ReceiverState, frozenset[ReceiverState]] = {
    _R.DEFERRED: frozenset({_R.RESERVED, _R.RELEASED}),
    _R.RESERVED: frozenset({_R.FILLING, _R.RELEASED}),
    _R.FILLING: frozenset({_R.TAKEN, _R.RELEASED}),
    _R.TAKEN: frozenset(),
    _R.RELEASED: frozenset(),
}

_State = TypeVar("_State", SenderState, ReceiverState)


def moved(state: _State, to: _State) -> _State:
    """`to`, if the move is legal.

    Raises:
        RuntimeError: it is not (a bug of ours, never the other side's).
    """
    moves = SENDER_MOVES if isinstance(state, SenderState) else RECEIVER_MOVES
    if to not in moves[state]:
        raise RuntimeError(f"illegal move of a hand-off: {state.name} -> {to.name}")
    return to
