"""Where a sequence stands, as the dispatcher sees it, and the moves between. Imports no JAX.

    PENDING ─> PREFILLING ──> MOVING <─> DECODING ──> ENDED
       ^        │   └───────────────────────^ │
       └────────┴──────────────┴──────────────┘    (a node was lost, or refused; from all: ENDED)

PENDING     no node serves it. It has no booking, and no node holds anything for it.
PREFILLING  `prefill_node` computes prompt and known output, and has not reported a token yet.
MOVING      the first token came; `prefill_node` holds the K/V, and hands off to `decode_node`.
DECODING    `decode_node` holds the K/V (it may be the prefill node itself) and generates.
ENDED       finished, stopped, aborted or failed.

Reports of two nodes may cross: the decode node's "it has come here" may be heard before the
prefill node's first token, so PREFILLING goes to DECODING directly. What is migrated goes back to
MOVING: the node where it has been decoded is its `prefill_node` then.
"""

from __future__ import annotations

import enum


class SequenceState(enum.Enum):
    PENDING = "pending"
    PREFILLING = "prefilling"
    MOVING = "moving"
    DECODING = "decoding"
    ENDED = "ended"


_S = SequenceState
LEGAL_MOVES: dict[SequenceState, frozenset[SequenceState]] = {
    _S.PENDING: frozenset({_S.PREFILLING, _S.ENDED}),
    _S.PREFILLING: frozenset({_S.MOVING, _S.DECODING, _S.PENDING, _S.ENDED}),
    _S.MOVING: frozenset({_S.DECODING, _S.PENDING, _S.ENDED}),
    _S.DECODING: frozenset({_S.MOVING, _S.PENDING, _S.ENDED}),
    _S.ENDED: frozenset(),
}
