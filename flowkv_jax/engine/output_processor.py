"""From sampled token ids to `RequestOutput`: text, stop strings, logprobs, and the `n` answers.

A request's way through here, once a step:

    append(index, token_ids, ...)    for each answer with news; says if a stop string ended it
    take_output(...)                 one output for all of them, or None if there is nothing to say

News collect between two `take_output` calls, so a slow reader gets fewer, larger deltas and loses
nothing. Token ids that arrive for an answer that has ended are dropped: the device runs one step
ahead of the host, and what it computed behind a stop string was never part of the answer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from flowkv_jax.engine.stop_strings import StopStringFinder
from flowkv_jax.outputs import (
    CompletionOutput,
    FinishReason,
    Logprob,
    RequestMetrics,
    RequestOutput,
    TokenLogprobs,
)
from flowkv_jax.sampling_params import RequestOutputKind, SamplingParams
from flowkv_jax.tokenizer import IncrementalDecoder


class Detokenizer(Protocol):
    """The part of `Tokenizer` that text is made with."""

    def decode_stream(self, skip_special_tokens: bool) -> IncrementalDecoder:
        """Start decoding one sequence."""

    def token_text(self, token_id: int) -> str:
        """Text of one token alone, for logprobs."""


@dataclass(frozen=True, slots=True)
class LogprobsRow:
    """Log-probabilities at one position, as the sampler returned them.

    Attributes:
        logprob, rank: of the sampled (or prompt) token.
        top_ids, top_logprobs: the most likely tokens, in order, as many as the request asked for.
    """

    logprob: float
    rank: int
    top_ids: Sequence[int] = ()
    top_logprobs: Sequence[float] = ()


class RequestOutputState:
    """Output side of one request with its `n` answers.

    Args:
        prompt: the prompt's text; needed for `echo`.
        detokenizer: may be None when `params.detokenize` is false.
    """

    def __init__(
        self,
        request_id: str,
        params: SamplingParams,
        *,
        prompt: str | None,
        prompt_token_ids: list[int],
        detokenizer: Detokenizer | None,
    ) -> None:
        if params.detokenize and detokenizer is None:
            raise RuntimeError(f"{request_id}: asks for text, and there is no detokenizer")
        if params.echo and prompt is None:
            raise RuntimeError(f"{request_id}: echo needs the prompt's text")
        self.request_id = request_id
        self._params = params
        self._prompt = prompt
        self._prompt_token_ids = prompt_token_ids
        self._detokenizer = detokenizer if params.detokenize else None
        echoed = prompt if params.echo and prompt is not None else ""
        self._answers = [_Answer(i, params, self._detokenizer, echoed) for i in range(params.n)]
        self._prompt_logprobs: list[TokenLogprobs | None] | None = (
            None if params.prompt_logprobs is None else [None]
        )
        self._is_closed = False

    @property
    def is_finished(self) -> bool:
        """Every answer has ended."""
        return all(answer.finish_reason is not None for answer in self._answers)

    @property
    def num_prompt_scored(self) -> int:
        """Prompt tokens, from the second on, whose logprobs have come in."""
        return 0 if self._prompt_logprobs is None else len(self._prompt_logprobs) - 1

    def append(
        self,
        index: int,
        token_ids: Sequence[int],
        *,
        logprobs: Sequence[LogprobsRow] | None = None,
        finish_reason: FinishReason | None = None,
        stop_reason: int | str | None = None,
    ) -> str | None:
        """Take in new tokens of answer `index`, and its end if it has ended.

        Args:
            logprobs: one row a token, if the request asked for logprobs.
            finish_reason: as the scheduler sees it. With "stop", the last token is the stop token.

        Returns:
            The stop string that ended the answer with these tokens; the caller then finishes the
            sequence. None otherwise.
        """
        answer = self._answers[index]
        if answer.finish_reason is not None:
            return None
        return answer.append(token_ids, logprobs, finish_reason, stop_reason)

    def append_prompt_logprobs(self, token_ids: Sequence[int], rows: Sequence[LogprobsRow]) -> None:
        """Take in logprobs of the next prompt tokens (from the second on), a chunk at a time."""
        if self._prompt_logprobs is None:
            raise RuntimeError(f"{self.request_id}: did not ask for prompt logprobs")
        token_text = None if self._detokenizer is None else self._detokenizer.token_text
        self._prompt_logprobs += [
            _token_logprobs(token_id, row, token_text)
            for token_id, row in zip(token_ids, rows, strict=True)
        ]

    def take_output(
        self,
        *,
        metrics: RequestMetrics | None = None,
        num_cached_tokens: int = 0,
        kv_transfer_params: dict[str, Any] | None = None,
    ) -> RequestOutput | None:
        """What to hand to the caller now; None if there is nothing new (or it waits for the end).

        CUMULATIVE and FINAL_ONLY outputs hold every answer, DELTA outputs those with news (and
        prompt logprobs once, in the first).
        """
        kind = self._params.output_kind
        is_finished = self.is_finished
        if self._is_closed or (kind is RequestOutputKind.FINAL_ONLY and not is_finished):
            return None
        told = [answer for answer in self._answers if answer.has_news]
        if not told:
            return None
        if kind is not RequestOutputKind.DELTA:
            told = self._answers
        self._is_closed = is_finished
        prompt_logprobs = self._prompt_logprobs
        if kind is RequestOutputKind.DELTA:
            self._prompt_logprobs = None
        return RequestOutput(
            request_id=self.request_id,
            prompt=self._prompt,
            prompt_token_ids=self._prompt_token_ids,
            outputs=[answer.take(kind) for answer in told],
            finished=is_finished,
            prompt_logprobs=prompt_logprobs,
            num_cached_tokens=num_cached_tokens,
            metrics=metrics,
            kv_transfer_params=kv_transfer_params,
        )


class _Answer:
    """One of the `n` answers: everything so far, and how much of it has been told."""

    def __init__(
        self, index: int, params: SamplingParams, detokenizer: Detokenizer | None, echoed: str
    ) -> None:
        self.index = index
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None
        self.has_news = False
        self._min_tokens = params.min_tokens
        self._keep_stop_token = params.include_stop_str_in_output
        self._decoder: IncrementalDecoder | None = None
        self._token_text: Callable[[int], str] | None = None
        if detokenizer is not None:
            self._decoder = detokenizer.decode_stream(params.skip_special_tokens)
            self._token_text = detokenizer.token_text
        self._finder = StopStringFinder(
            params.stop_strings, include_in_output=params.include_stop_str_in_output
        )
        self._text = echoed
        self._token_ids: list[int] = []
        self._wants_logprobs = params.logprobs is not None
        self._logprobs: list[TokenLogprobs] = []
        self._cumulative_logprob = 0.0
        self._told_characters = 0
        self._told_tokens = 0

    def append(
        self,
        token_ids: Sequence[int],
        logprobs: Sequence[LogprobsRow] | None,
        finish_reason: FinishReason | None,
        stop_reason: int | str | None,
    ) -> str | None:
        self.has_news = self.has_news or bool(token_ids) or finish_reason is not None
        # The stop token stays in token_ids; its text is no part of the answer.
        silent = len(token_ids) - 1 if finish_reason == "stop" and not self._keep_stop_token else -1
        for i, token_id in enumerate(token_ids):
            self._token_ids.append(token_id)
            if self._wants_logprobs:
                self._add_logprobs(token_id, None if logprobs is None else logprobs[i])
            if self._decoder is None or i == silent:
                continue
            stop = self._add_text(self._decoder.step(token_id))
            if stop is not None:
                return self._end_at(stop)
        if finish_reason is None:
            return None
        if self._decoder is not None:
            stop = self._add_text(self._decoder.flush())
            if stop is not None:
                return self._end_at(stop)
            self._text += self._finder.flush()
        self.finish_reason, self.stop_reason = finish_reason, stop_reason
        return None

    def take(self, kind: RequestOutputKind) -> CompletionOutput:
        """The answer as `kind` wants it; what it holds counts as told."""
        delta_text = self._text[self._told_characters :]
        delta_token_ids = self._token_ids[self._told_tokens :]
        logprobs = None
        if self._wants_logprobs:
            first = self._told_tokens if kind is RequestOutputKind.DELTA else 0
            logprobs = self._logprobs[first:]
        self._told_characters = len(self._text)
        self._told_tokens = len(self._token_ids)
        self.has_news = False
        is_delta = kind is RequestOutputKind.DELTA
        return CompletionOutput(
            index=self.index,
            text=delta_text if is_delta else self._text,
            token_ids=delta_token_ids if is_delta else self._token_ids.copy(),
            delta_text=delta_text,
            delta_token_ids=delta_token_ids,
            cumulative_logprob=self._cumulative_logprob if self._wants_logprobs else None,
            logprobs=logprobs,
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
        )

    def _add_text(self, piece: str | None) -> str | None:
        """Release what can be released; returns the stop string if `piece` completes one."""
        if not piece:
            return None
        released, stop = self._finder.feed(piece, search=len(self._token_ids) >= self._min_tokens)
        self._text += released
        return stop

    def _end_at(self, stop: str) -> str:
        self.finish_reason, self.stop_reason = "stop", stop
        return stop

    def _add_logprobs(self, token_id: int, row: LogprobsRow | None) -> None:
        if row is None:
            raise RuntimeError("the request asked for logprobs and a token came without")
        self._logprobs.append(_token_logprobs(token_id, row, self._token_text))
        self._cumulative_logprob += row.logprob


def _token_logprobs(
    token_id: int, row: LogprobsRow, token_text: Callable[[int], str] | None
) -> TokenLogprobs:
    """The token itself first, then the most likely ones in order."""
    ranked = [(token_id, row.logprob, row.rank)]
    ranked += [
        (other, logprob, rank)
        for rank, (other, logprob) in enumerate(
            zip(row.top_ids, row.top_logprobs, strict=True), start=1
        )
        if other != token_id
    ]
    return {
        token: Logprob(logprob, rank, None if token_text is None else token_text(token))
        for token, logprob, rank in ranked
    }
