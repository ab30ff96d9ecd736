"""What the dispatcher asks of the controller for each sequence, and tells it afterwards."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from flowkv_jax.errors import RetryableRequestError
from flowkv_jax.sequence import HandoffReport


class NoNodeAvailable(RetryableRequestError):
    """No live node may serve the sequence now."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteQuery:
    """A sequence that needs a place.

    Attributes:
        num_tokens: known tokens, all to be computed but for what a prefix cache holds.
        block_hashes: chained hashes of the full blocks among them (`block_hash`); may be empty
            where nobody looks for prefixes.
        max_new_tokens: most tokens it may still generate.
        exclude: nodes that must not be used.
        prefill_node: its K/V are there already, and only a decode node is wanted.
    """

    sequence_id: str
    num_tokens: int
    block_hashes: tuple[bytes, ...] = ()
    max_new_tokens: int = 1
    exclude: frozenset[str] = frozenset()
    prefill_node: str | None = None


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a sequence goes.

    Attributes:
        booking: names the load that was booked for it; ends with `Routing.ended`.
        prefill_node: who computes the prompt.
        decode_node: who decodes; equal to `prefill_node` if it stays there.
    """

    booking: int
    prefill_node: str
    decode_node: str


class Routing(Protocol):
    """The controller, as the dispatcher uses it. Times are the dispatcher's `now_s`."""

    def place(self, query: RouteQuery, now_s: float) -> Placement:
        """Choose nodes and book the load at once.

        Raises:
            NoNodeAvailable: try again when a node has joined or has less to do.
        """
        ...

    def prefilled(self, booking: int, now_s: float) -> None:
        """The prompt has been computed: the first token came."""
        ...

    def moved(self, booking: int, report: HandoffReport, now_s: float) -> None:
        """The sequence has come to its decode node."""
        ...

    def ended(self, booking: int, now_s: float) -> None:
        """The sequence has ended, or lost its place; a booking ends once, later calls are
        passed over."""
        ...
