"""Why a sequence does not go the way that was planned for it."""

from __future__ import annotations

import enum


class Trouble(enum.Enum):
    """Why it lost its place, or has to go elsewhere.

    NODE_LOST: the node died, fell silent or left. NODE_REFUSED: it would not take the sequence.
    NODE_FAILED: it gave the sequence up. TOKENS_MISSING: news of it were lost. HANDOFF_FAILED: the
    K/V could not be moved. NODE_EMPTIED: a node is being drained.
    """

    NODE_LOST = "node_lost"
    NODE_REFUSED = "node_refused"
    NODE_FAILED = "node_failed"
    TOKENS_MISSING = "tokens_missing"
    HANDOFF_FAILED = "handoff_failed"
    NODE_EMPTIED = "node_emptied"
