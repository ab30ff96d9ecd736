"""What the dispatcher keeps of one sequence until it has ended."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from flowkv_jax.cluster.dispatch_events import LostPlace, SequenceRecord
from flowkv_jax.cluster.node_port import SequenceKey
from flowkv_jax.cluster.sequence_state import LEGAL_MOVES, SequenceState
from flowkv_jax.cluster.tracked_request import TrackedRequest
from flowkv_jax.outputs import FinishReason
from flowkv_jax.sequence import HandoffReport, SequenceSpec, SequenceUpdate


@dataclass(eq=False, slots=True)
class TrackedSequence:
    """A sequence on its way.

    Attributes:
        index: which of the request's answers it is.
        spec: as submitted; each placement makes one of its own from it.
        attempt: of the present or latest placement; -1 before the first.
        booking: of the present placement, at the router; None without a place.
        prefill_node, decode_node: of the present placement. A prefill node that is lost after it
            has handed off is forgotten: both are the decode node then.
        token_ids: output tokens, in order and without a gap: all that may have been told.
        early: updates whose tokens lie behind a gap, by position, and where they came from.
        failed_decode_nodes: nodes that it could not be handed off to in this attempt.
        is_confirmed: a node has taken it in, or it waits for a place.
        preemptions: by attempt and node.
    """

    request: TrackedRequest
    index: int
    spec: SequenceSpec
    state: SequenceState = SequenceState.PENDING
    attempt: int = -1
    booking: int | None = None
    prefill_node: str | None = None
    decode_node: str | None = None
    token_ids: list[int] = field(default_factory=list)
    early: list[tuple[SequenceUpdate, str]] = field(default_factory=list)
    failed_decode_nodes: set[str] = field(default_factory=set)
    num_handoff_errors: int = 0
    num_placements: int = 0
    is_confirmed: bool = False
    num_cached_tokens: int = 0
    preemptions: dict[tuple[int, str], int] = field(default_factory=dict)
    scheduled_s: float | None = None
    first_token_s: float | None = None
    last_token_s: float | None = None
    handoff: HandoffReport | None = None
    handed_off_s: float | None = None
    lost_places: list[LostPlace] = field(default_factory=list)

    @property
    def sequence_id(self) -> str:
        return self.spec.sequence_id

    @property
    def key(self) -> SequenceKey:
        return SequenceKey(self.spec.sequence_id, self.attempt)

    @property
    def holder(self) -> str | None:
        """The node whose loss takes the K/V with it; None without a place."""
        if self.state is SequenceState.DECODING:
            return self.decode_node
        if self.state in (SequenceState.PREFILLING, SequenceState.MOVING):
            return self.prefill_node
        return None

    @property
    def possible_holders(self) -> tuple[str, ...]:
        """Nodes that may hold anything for it."""
        nodes = (self.holder, None if self.holder is None else self.decode_node)
        return tuple(dict.fromkeys(node for node in nodes if node is not None))

    @property
    def lender(self) -> str | None:
        """The node of another server that holds the K/V, as long as one does."""
        wanted = self.request.submission.prefill_node
        return wanted if wanted is not None and self.holder == wanted else None

    def move_to(self, state: SequenceState) -> None:
        """Change `state`.

        Raises:
            RuntimeError: if the move is not in `LEGAL_MOVES`, a bug of the dispatcher.
        """
        if state not in LEGAL_MOVES[self.state]:
            raise RuntimeError(
                f"{self.sequence_id}: illegal move {self.state.name} -> {state.name}"
            )
        self.state = state

    @property
    def has_unfillable_gap(self) -> bool:
        """Tokens are missing that no node will tell any more: only another node than the holder
        could be late with them."""
        return bool(self.early) and self.prefill_node == self.decode_node

    def hold_back(self, update: SequenceUpdate, node: str) -> None:
        """Keep an update until the tokens before it have come."""
        self.early.append((update, node))
        self.early.sort(key=lambda early: early[0].start)

    def first_ran(self, scheduled_s: float) -> None:
        """Take in when a node first computed anything of it."""
        self.scheduled_s = scheduled_s
        request = self.request
        if request.scheduled_s is None or scheduled_s < request.scheduled_s:
            request.scheduled_s = scheduled_s

    def count_preemptions(self, node: str, num_preemptions: int) -> None:
        """Take in how often a node has preempted it in this attempt."""
        stay = (self.attempt, node)
        new = num_preemptions - self.preemptions.get(stay, 0)
        if new > 0:
            self.preemptions[stay] = num_preemptions
            self.request.num_preemptions += new

    def lose_place(self, failed: str | None, now_s: float, reason: str) -> None:
        """Forget the nodes of a placement that has ended, but for the record."""
        if self.prefill_node is not None and self.decode_node is not None:
            lost = LostPlace(self.prefill_node, self.decode_node, failed, now_s, reason)
            self.lost_places.append(lost)
        self.prefill_node = self.decode_node = None

    def record(self, number: int, finish_reason: FinishReason, now_s: float) -> SequenceRecord:
        """All that happened, now that it has ended."""
        arrival_s, scheduled_s = self.spec.arrival_s, self.scheduled_s
        first_s, last_s = self.first_token_s, self.last_token_s
        return SequenceRecord(
            number=number,
            request_id=self.request.request_id,
            sequence_id=self.sequence_id,
            num_prompt_tokens=len(self.spec.prompt_token_ids),
            num_output_tokens=len(self.token_ids),
            num_cached_tokens=self.num_cached_tokens,
            num_preemptions=sum(self.preemptions.values()),
            num_placements=self.num_placements,
            prefill_node=self.prefill_node,
            decode_node=self.decode_node,
            arrival_s=arrival_s,
            ended_s=now_s,
            queue_s=None if scheduled_s is None else scheduled_s - arrival_s,
            prefill_s=None if scheduled_s is None or first_s is None else first_s - scheduled_s,
            decode_s=None if first_s is None or last_s is None else last_s - first_s,
            handoff=self.handoff,
            finish_reason=finish_reason,
            handed_off_s=self.handed_off_s,
            lost_places=tuple(self.lost_places),
        )

    def check(self, nodes: Collection[str]) -> None:
        """Prove that state, place and booking agree.

        Raises:
            RuntimeError: they do not.
        """
        has_place = self.state not in (SequenceState.PENDING, SequenceState.ENDED)
        places = (self.prefill_node, self.decode_node)
        is_right = (
            has_place == (self.booking is not None)
            and all((node in nodes) if has_place else (node is None) for node in places)
            and (self.state is not SequenceState.MOVING or places[0] != places[1])
            and not self.has_unfillable_gap
            and all(update.start > len(self.token_ids) for update, _ in self.early)
        )
        if not is_right:
            raise RuntimeError(f"{self.sequence_id} is inconsistent: {self!r:.1000}")
