"""What the dispatcher keeps of a caller's request until its last output."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from flowkv_jax.cluster.submission import Submission
from flowkv_jax.outputs import RequestMetrics
from flowkv_jax.sampling_params import RequestOutputKind

if TYPE_CHECKING:
    from flowkv_jax.cluster.tracked_sequence import TrackedSequence


@dataclass(eq=False, slots=True)
class TrackedRequest:
    """A live request. Times are the dispatcher's.

    Attributes:
        accepted: the answer to `Dispatcher.submit`.
        is_accepted: `accepted` has been answered; errors go to the sink from then on.
        prompt_hashes: of the prompt's full blocks, for the router.
        sequences: one an answer, ended ones too; `num_live` of them have not ended.
        num_unconfirmed: sequences that no node has taken in yet, and that do not wait either.
        is_waiting: counted in the waiting room, for want of a first token.
    """

    submission: Submission
    accepted: Future[None]
    prompt_hashes: tuple[bytes, ...]
    sequences: list[TrackedSequence] = field(default_factory=list)
    num_live: int = 0
    num_unconfirmed: int = 0
    is_accepted: bool = False
    is_waiting: bool = True
    is_over: bool = False
    scheduled_s: float | None = None
    first_token_s: float | None = None
    last_token_s: float | None = None
    num_preemptions: int = 0
    tells_end_only: bool = False

    def __post_init__(self) -> None:
        kind = self.submission.specs[0].sampling_params.output_kind
        self.tells_end_only = kind is RequestOutputKind.FINAL_ONLY

    @property
    def request_id(self) -> str:
        return self.submission.request_id

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.submission.specs[0].prompt_token_ids)

    def metrics(self) -> RequestMetrics:
        """Times of the request as a whole: first token of any answer, last token of any."""
        arrival_s = self.submission.specs[0].arrival_s
        return RequestMetrics(
            arrival_time=arrival_s,
            queued_ts=arrival_s,
            scheduled_ts=self.scheduled_s,
            first_token_ts=self.first_token_s,
            last_token_ts=self.last_token_s,
            num_preemptions=self.num_preemptions,
        )
