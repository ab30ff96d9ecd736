"""What a request gives back: the field's names (vLLM's `RequestOutput`), plus deltas."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Literal

FinishReason = Literal["stop", "length", "abort", "error"]


@dataclass(frozen=True, slots=True)
class Logprob:
    """Log-probability of one token under the raw model distribution (before penalties and all).

    Attributes:
        logprob: natural logarithm.
        rank: 1 for the most likely token.
        decoded_token: the token's text; None where the request asked for no text.
    """

    logprob: float
    rank: int
    decoded_token: str | None = None


# One dict a position: token id -> Logprob; the sampled (or prompt) token is always in it.
TokenLogprobs = dict[int, Logprob]


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One of the `n` answers.

    `text`/`token_ids` follow `SamplingParams.output_kind`; `delta_*` always hold what is new since
    the previous output of this index.
    """

    index: int
    text: str
    token_ids: list[int]
    delta_text: str = ""
    delta_token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float | None = None
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None


@dataclass(frozen=True, slots=True)
class RequestMetrics:
    """Times in seconds on the engine's monotonic clock: only differences mean anything."""

    arrival_time: float
    queued_ts: float
    scheduled_ts: float | None = None
    first_token_ts: float | None = None
    last_token_ts: float | None = None
    num_preemptions: int = 0

    @property
    def ttft_s(self) -> float | None:
        """Time to first token."""
        if self.first_token_ts is None:
            return None
        return self.first_token_ts - self.arrival_time

    def tpot_s(self, num_output_tokens: int) -> float | None:
        """Time per output token after the first; None with fewer than two tokens."""
        if self.first_token_ts is None or self.last_token_ts is None or num_output_tokens < 2:
            return None
        return (self.last_token_ts - self.first_token_ts) / (num_output_tokens - 1)


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """State of one request, as one item of a stream or as the final answer.

    `prompt_logprobs[0]` is None: nothing precedes the first prompt token.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    num_cached_tokens: int = 0
    metrics: RequestMetrics | None = None
    kv_transfer_params: dict[str, Any] | None = None

    @property
    def text(self) -> str:
        """Text of the first answer."""
        return self.outputs[0].text

    def to_dict(self) -> dict[str, Any]:
        """Plain dict, JSON-ready."""
        return asdict(self)
