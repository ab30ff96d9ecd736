"""One sequence on one node: what the scheduler, the KV-cache manager and the runner share.

Token positions, half-open, for a request whose device work runs ahead of what the host knows:

    [0, num_prompt_tokens)                    the prompt
    [num_prompt_tokens, num_tokens)           output the host knows: given at birth (sampled by a
                                              node that had the request before), or read here
    [num_tokens, num_tokens + num_in_flight)  sampled on the device, not read yet

    [0, num_computed_tokens)                  positions whose K/V are in the pool, or will be once
                                              the steps already dispatched have run

The scheduler moves `status` and `num_computed_tokens`; only it does. Blocks belong to the
KV-cache manager, which keeps them by `request_id`.

A hand-off shows as a request on each of two nodes:

    prefill node   WAITING ─> RUNNING ─> SENDING ─> FINISHED
    decode node                          RECEIVING ─> RUNNING ─> FINISHED
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field

from flowkv_jax.outputs import FinishReason
from flowkv_jax.sampling_params import SamplingParams


class RequestStatus(enum.Enum):
    """What a node is doing with a request.

    WAITING holds nothing. RUNNING holds blocks and is computed. SWAPPED holds swap space. SENDING
    holds the blocks of a computed prompt that is to be handed off, and is not scheduled. RECEIVING
    holds blocks into which another node's K/V arrive, and is not scheduled.
    """

    WAITING = enum.auto()
    RUNNING = enum.auto()
    SWAPPED = enum.auto()
    SENDING = enum.auto()
    RECEIVING = enum.auto()
    FINISHED = enum.auto()


LEGAL_MOVES: frozenset[tuple[RequestStatus, RequestStatus]] = frozenset(
    {
        (RequestStatus.WAITING, RequestStatus.RUNNING),
        (RequestStatus.WAITING, RequestStatus.RECEIVING),  # at birth
        (RequestStatus.WAITING, RequestStatus.FINISHED),
        (RequestStatus.RUNNING, RequestStatus.WAITING),  # preempted, to be recomputed
        (RequestStatus.RUNNING, RequestStatus.SWAPPED),
        (RequestStatus.RUNNING, RequestStatus.FINISHED),
        (RequestStatus.SWAPPED, RequestStatus.RUNNING),
        (RequestStatus.SWAPPED, RequestStatus.WAITING),  # its swapped blocks were given up
        (RequestStatus.SWAPPED, RequestStatus.FINISHED),
        (RequestStatus.RUNNING, RequestStatus.SENDING),
        (RequestStatus.SENDING, RequestStatus.RUNNING),  # kept here after all
        (RequestStatus.SENDING, RequestStatus.WAITING),  # likewise, without a seat
        (RequestStatus.SENDING, RequestStatus.FINISHED),
        (RequestStatus.RECEIVING, RequestStatus.RUNNING),
        (RequestStatus.RECEIVING, RequestStatus.FINISHED),
    }
)


@dataclass(eq=False, slots=True)
class Request:
    """A sequence being served. Compared by identity; `request_id` is unique among live requests.

    Attributes:
        arrival_s: when it was accepted, on the injected clock.
        deadline_s: on the same clock; None for no deadline.
        priority: lower runs first, as in vLLM.
        cache_salt: requests share cached blocks only with requests of the same salt.
        max_total_tokens: prompt plus output may not grow past this.
        seed: the per-request random seed, already resolved (never None).
        known_output_token_ids: output of an earlier life; its K/V are computed with the prompt's.
        hands_off: another node is to decode it: it becomes SENDING with the last chunk.
    """

    request_id: str
    prompt_token_ids: Sequence[int]
    sampling_params: SamplingParams
    arrival_s: float
    max_total_tokens: int
    seed: int
    deadline_s: float | None = None
    priority: int = 0
    cache_salt: str | None = None
    known_output_token_ids: Sequence[int] = ()
    hands_off: bool = False

    status: RequestStatus = RequestStatus.WAITING
    token_ids: list[int] = field(default_factory=list)
    num_computed_tokens: int = 0
    num_in_flight: int = 0
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    scheduled_s: float | None = None
    first_token_s: float | None = None
    last_token_s: float | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None

    def __post_init__(self) -> None:
        self.token_ids = [*self.prompt_token_ids, *self.known_output_token_ids]

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def num_tokens(self) -> int:
        """Tokens the host knows: prompt plus output, given at birth or read."""
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - len(self.prompt_token_ids)

    @property
    def output_token_ids(self) -> list[int]:
        return self.token_ids[len(self.prompt_token_ids) :]

    @property
    def is_finished(self) -> bool:
        return self.status is RequestStatus.FINISHED

    def move_to(self, status: RequestStatus) -> None:
        """Change `status`.

        Raises:
            RuntimeError: if the move is not in `LEGAL_MOVES` (a bug of ours, never a caller's).
        """
        if (self.status, status) not in LEGAL_MOVES:
            raise RuntimeError(
                f"{self.request_id}: illegal move {self.status.name} -> {status.name}"
            )
        self.status = status
