"""What a destination hears of a transfer. Imports no JAX."""

from __future__ import annotations

from dataclasses import dataclass

from transfer.errors import TransferError
from transfer.lifecycle import TransferState


@dataclass(frozen=True, slots=True)
class Arrival:
    """A transfer as its destination sees it, once final.

    Attributes:
        transfer: its name; the source's handle has the same.
        node: whose pool it went to.
        state: COMPLETED, FAILED or CANCELLED.
        error: why it did not complete.
        tag: the request's; empty where the source gave the transfer up before any leg was taken.
        path_type: the kind of path that worked, by name; empty unless COMPLETED.
        backend: what moved the bytes; several names joined by "+" if legs differed.
    """

    transfer: str
    node: str
    state: TransferState
    error: TransferError | None = None
    tag: str = ""
    path_type: str = ""
    backend: str = ""
