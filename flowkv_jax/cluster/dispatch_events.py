"""What the dispatcher tells of its sequences, for metrics and benchmarks. Plain values, no JAX."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from flowkv_jax.outputs import FinishReason
from flowkv_jax.sequence import HandoffReport


class DispatchEventKind(enum.Enum):
    """What happened to a sequence."""

    PLACED = "placed"
    WAITS = "waits"
    FIRST_TOKEN = "first_token"
    HANDED_OFF = "handed_off"
    REDIRECTED = "redirected"
    LOST_PLACE = "lost_place"
    ENDED = "ended"


@dataclass(frozen=True, slots=True)
class DispatchEvent:
    """One step of a sequence's life.

    Attributes:
        node: PLACED: where it prefills; FIRST_TOKEN: where that came from; HANDED_OFF: where it
            decodes now; REDIRECTED: where it is to decode; LOST_PLACE: the node that failed it;
            ENDED: where it was; None if it had no place.
        time_s: on the dispatcher's clock.
        report: of a hand-off.
        reason: why it lost its place or was redirected.
    """

    kind: DispatchEventKind
    request_id: str
    sequence_id: str
    node: str | None
    time_s: float
    report: HandoffReport | None = None
    reason: str | None = None


@dataclass(frozen=True, slots=True)
class LostPlace:
    """A placement that ended before its sequence did.

    Attributes:
        prefill_node, decode_node: of the placement.
        node: the one that failed; None if neither did.
        time_s: when, on the dispatcher's clock.
        reason: in words.
    """

    prefill_node: str
    decode_node: str
    node: str | None
    time_s: float
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceRecord:
    """A sequence that has ended.

    Attributes:
        number: rises by one with each record of its dispatcher, from 1 on.
        num_placements: 1 unless it was placed anew after a failure.
        prefill_node, decode_node: of the last placement; None if it never had one.
        arrival_s, ended_s: on the dispatcher's clock.
        queue_s: from arrival until it first ran; None if it never did, as all below.
        prefill_s: from then to its first token.
        decode_s: from its first token to its last one.
        handoff: of the last hand-off; None if it stayed where it was prefilled.
        finish_reason: "error" if the request failed.
        handed_off_s: when the last hand-off was heard of, on the dispatcher's clock.
        lost_places: its failed placements, in order.
    """

    number: int
    request_id: str
    sequence_id: str
    num_prompt_tokens: int
    num_output_tokens: int
    num_cached_tokens: int
    num_preemptions: int
    num_placements: int
    prefill_node: str | None
    decode_node: str | None
    arrival_s: float
    ended_s: float
    queue_s: float | None
    prefill_s: float | None
    decode_s: float | None
    handoff: HandoffReport | None
    finish_reason: FinishReason
    handed_off_s: float | None = None
    lost_places: tuple[LostPlace, ...] = ()
