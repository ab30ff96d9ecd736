"""Fold deltas of one request into one delta that says the same.

    add(d1) add(d2) take() -> d1+d2      add(d3) take() -> d3

Text, token ids and logprobs are joined per answer index; everything else is the latest value that
was given. Nothing is lost or repeated, however the deltas are cut into `take`s.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from flowkv_jax.outputs import (
    CompletionOutput,
    FinishReason,
    RequestMetrics,
    RequestOutput,
    TokenLogprobs,
)


@dataclass(slots=True)
class _Answer:
    """One index: what was added since the last `take`."""

    index: int
    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] | None = None
    cumulative_logprob: float | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None

    def add(self, delta: CompletionOutput) -> None:
        self.texts.append(delta.delta_text)
        self.token_ids.extend(delta.delta_token_ids)
        if delta.logprobs is not None:
            self.logprobs = self.logprobs or []
            self.logprobs.extend(delta.logprobs)
        if delta.cumulative_logprob is not None:
            self.cumulative_logprob = delta.cumulative_logprob
        if delta.finish_reason is not None:
            self.finish_reason = delta.finish_reason
            self.stop_reason = delta.stop_reason

    def merged(self) -> CompletionOutput:
        text = "".join(self.texts)
        self.texts = [text]
        return CompletionOutput(
            index=self.index,
            text=text,
            token_ids=list(self.token_ids),
            delta_text=text,
            delta_token_ids=list(self.token_ids),
            cumulative_logprob=self.cumulative_logprob,
            logprobs=None if self.logprobs is None else list(self.logprobs),
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
        )


class OutputMerger:
    """Deltas of one request, to be taken as one. Logprobs must be deltas like the rest."""

    def __init__(self) -> None:
        self._answers: dict[int, _Answer] = {}
        self._latest: RequestOutput | None = None
        self._prompt_logprobs: list[TokenLogprobs | None] | None = None
        self._metrics: RequestMetrics | None = None

    @property
    def is_empty(self) -> bool:
        """Nothing was added since the last `take`."""
        return self._latest is None

    def add(self, output: RequestOutput) -> None:
        self._latest = output
        if output.prompt_logprobs is not None:
            self._prompt_logprobs = output.prompt_logprobs
        if output.metrics is not None:
            self._metrics = output.metrics
        for delta in output.outputs:
            answer = self._answers.get(delta.index)
            if answer is None:
                answer = self._answers[delta.index] = _Answer(delta.index)
            answer.add(delta)

    def merged(self) -> RequestOutput:
        """Everything since the last `take`, answers by index; keeps it.

        Raises:
            RuntimeError: `is_empty`.
        """
        if self._latest is None:
            raise RuntimeError("nothing to merge")
        return RequestOutput(
            request_id=self._latest.request_id,
            prompt=self._latest.prompt,
            prompt_token_ids=self._latest.prompt_token_ids,
            outputs=[self._answers[index].merged() for index in sorted(self._answers)],
            finished=self._latest.finished,
            prompt_logprobs=self._prompt_logprobs,
            num_cached_tokens=self._latest.num_cached_tokens,
            metrics=self._metrics,
            kv_transfer_params=self._latest.kv_transfer_params,
        )

    def take(self) -> RequestOutput:
        """Everything since the last `take`; the next one starts empty.

        Raises:
            RuntimeError: `is_empty`.
        """
        output = self.merged()
        self._answers = {}
        self._latest = None
        self._prompt_logprobs = None
        self._metrics = None
        return output
