"""Bounds that every front door, gRPC's and HTTP's, sets to what clients send."""

from __future__ import annotations

MAX_REQUEST_ID_CHARACTERS = 256
MAX_TOKENIZE_CHARACTERS = 1 << 20
"""Longest text that is tokenized: it runs on a thread, but nothing can stop it once it runs."""
MAX_DETOKENIZE_IDS = 1 << 20
MAX_MESSAGES = 1 << 14
"""Of one conversation."""
