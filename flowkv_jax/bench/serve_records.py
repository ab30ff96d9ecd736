"""What a load client saw of each request, and of a whole cell. Plain values, no clock.

Times are seconds since the cell's start, on the client's clock.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from flowkv_jax.outputs import RequestMetrics


class Outcome(enum.Enum):
    """How a request ended."""

    COMPLETED = "completed"
    FAILED = "failed"
    """Whatever else came of it; `RequestRecord.error` says what."""
    INTERRUPTED = "interrupted"
    """The client gave it up (Ctrl-C)."""


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """One request, after its end.

    Attributes:
        index: of its plan in the cell.
        request_id: the last the client gave it; differs between retries.
        group: of its plan.
        num_prompt_tokens: of its prompt.
        scheduled_s: when it was to be sent.
        sent_s: when it was sent first.
        held_s: of the time between, how long it waited for one of `max_concurrency` slots.
        ended_s: when the last message, or the error, came.
        arrivals: (when, tokens) of each message that brought tokens.
        token_ids: all of them.
        outcome, error, error_text: the error's class, and its words; None unless it failed.
        num_retries: times it was sent again after being refused.
        num_cached_tokens: of the prompt, found in the server's prefix cache.
        server: the server's own times.
    """

    index: int
    request_id: str
    group: str
    num_prompt_tokens: int
    scheduled_s: float
    sent_s: float
    ended_s: float
    outcome: Outcome
    held_s: float = 0.0
    arrivals: tuple[tuple[float, int], ...] = ()
    token_ids: tuple[int, ...] = ()
    error: str | None = None
    error_text: str | None = None
    num_retries: int = 0
    num_cached_tokens: int = 0
    server: RequestMetrics | None = None

    @property
    def is_completed(self) -> bool:
        return self.outcome is Outcome.COMPLETED

    @property
    def lateness_s(self) -> float:
        """How much later than planned it was sent, not counting the wait for a slot."""
        return self.sent_s - self.scheduled_s - self.held_s

    @property
    def ttft_s(self) -> float | None:
        """Time to first token."""
        return self.arrivals[0][0] - self.sent_s if self.arrivals else None

    @property
    def e2e_s(self) -> float:
        """To the last message."""
        return self.ended_s - self.sent_s

    @property
    def tpot_s(self) -> float | None:
        """Time per output token after the first: (last token - first) / (tokens - 1)."""
        if len(self.token_ids) < 2:
            return None
        return (self.arrivals[-1][0] - self.arrivals[0][0]) / (len(self.token_ids) - 1)

    @property
    def itls_s(self) -> list[float]:
        """Inter-token latencies: the time between one message with tokens and the next.

        As `vllm bench serve` counts them. A message with several tokens makes one entry, not one a
        token: what a reader waits for. So a stall counts at its full length, however many tokens
        then come together. How many do is reported as tokens per message; where it is above 1,
        TPOT is the figure per token.
        """
        return [
            later - earlier
            for (earlier, _), (later, _) in zip(self.arrivals, self.arrivals[1:], strict=False)
        ]

    def document(self) -> dict[str, Any]:
        """For the JSON report; without the token ids."""
        values = asdict(self) | {"outcome": self.outcome.value}
        del values["token_ids"]
        return values | {"num_output_tokens": len(self.token_ids)}


@dataclass(frozen=True, slots=True)
class AnswerCheck:
    """The same prompts asked again, one by one.

    Attributes:
        num_asked: of them `num_equal` gave the same token ids.
        different: request id -> what differed.
    """

    num_asked: int
    num_equal: int
    different: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class CellRun:
    """A cell that has been run.

    Attributes:
        records: of the requests that were sent, by index.
        num_planned: requests of the cell; fewer were sent if time was up, or it was interrupted.
        server_change: how much the server's own counters rose (prefix cache, preemptions).
        answers: None if they were not checked.
    """

    name: str
    input_len: int | None
    request_rate: float
    records: Sequence[RequestRecord]
    num_planned: int
    notes: tuple[str, ...] = ()
    server_change: dict[str, int] = field(default_factory=dict)
    answers: AnswerCheck | None = None

    @property
    def completed(self) -> list[RequestRecord]:
        return [record for record in self.records if record.is_completed]

    @property
    def duration_s(self) -> float:
        """From the first request sent to the last one ended."""
        if not self.records:
            return 0.0
        first = min(record.sent_s for record in self.records)
        return max(record.ended_s for record in self.records) - first
