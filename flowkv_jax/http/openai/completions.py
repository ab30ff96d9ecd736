"""`POST /v1/completions`."""

from __future__ import annotations

import dataclasses
from typing import Any

from msgspec import UNSET

from flowkv_jax.http.openai.delivery import Answer, deliver
from flowkv_jax.http.openai.exchange import Exchange, kv_of
from flowkv_jax.http.openai.logprobs import (
    CompletionLogprobs,
    completion_logprobs,
    prompt_logprobs,
)
from flowkv_jax.http.openai.prompts import prompts_of
from flowkv_jax.http.openai.requests import CompletionRequest
from flowkv_jax.http.openai.responses import CompletionChoice, CompletionResponse
from flowkv_jax.http.openai.sampling import completion_params, is_scoring_only
from flowkv_jax.http.request import Request
from flowkv_jax.http.response import Response
from flowkv_jax.http.surroundings import Surroundings
from flowkv_jax.outputs import CompletionOutput, RequestOutput, TokenLogprobs
from flowkv_jax.rpc.generation import PromptOutput, merged


async def answer_completion(
    request: Request, surroundings: Surroundings, asked: CompletionRequest
) -> Response | None:
    """Answer one request that has been read."""
    params = completion_params(asked)
    prompts = prompts_of(asked, surroundings.engine.model_info().max_model_len)
    exchange = Exchange.begin(request, surroundings, asked, "cmpl")
    answer = _CompletionAnswer(exchange, asked, num_prompts=len(prompts))
    return await deliver(exchange, answer, prompts, params)


class _CompletionAnswer(Answer):
    """Turns one request's outputs into its answer, or the events of it."""

    def __init__(self, exchange: Exchange, asked: CompletionRequest, *, num_prompts: int) -> None:
        super().__init__(exchange, "text_completion", num_prompts * (asked.n or 1))
        self._asked = asked
        self._num_answers = asked.n or 1
        self._as_ids = bool(asked.return_tokens_as_token_ids)
        self._is_scoring_only = is_scoring_only(asked)
        self._is_plain = not (
            exchange.has_continuous_usage
            or asked.logprobs is not None
            or asked.return_token_ids
            or self._is_scoring_only
        )
        self._offsets: dict[int, int] = {}
        self._prompt_logprobs: dict[int, list[TokenLogprobs | None]] = {}

    # Streams

    def chunks(self, taken: list[PromptOutput]) -> bytes:
        """Events for what was taken."""
        pieces = []
        for prompt_index, output in merged(taken):
            output = self._noted(prompt_index, output)
            first = prompt_index * self._num_answers
            for delta in output.outputs:
                if self._is_plain and delta.finish_reason is None:
                    if delta.delta_text:
                        pieces.append(self._writer.text(first + delta.index, delta.delta_text))
                else:
                    pieces.append(self._full_chunk(prompt_index, output, delta))
        return b"".join(pieces)

    def _full_chunk(
        self, prompt_index: int, output: RequestOutput, delta: CompletionOutput
    ) -> bytes:
        index = prompt_index * self._num_answers + delta.index
        is_first = index not in self._offsets
        extra: dict[str, Any] = {}
        if self._asked.return_token_ids:
            extra["token_ids"] = delta.delta_token_ids
            if is_first:
                extra["prompt_token_ids"] = output.prompt_token_ids
        chunk = self._writer.choice(
            index,
            self._writer.content(delta.delta_text),
            logprobs=self._logprobs(prompt_index, index, output, delta),
            finish_reason=delta.finish_reason,
            stop_reason=delta.stop_reason,
            extra=extra,
            usage=self._continuous_usage(),
            top=kv_of(output) if delta.finish_reason is not None else None,
        )
        self._offsets.setdefault(index, 0)
        return chunk

    # Whole answers

    def whole(self, taken: list[PromptOutput]) -> CompletionResponse:
        """The answer to all prompts, from all their outputs."""
        choices = []
        kv_transfer_params: dict[str, Any] | None = None
        for prompt_index, output in merged(taken):
            output = self._noted(prompt_index, output)
            kv_transfer_params = kv_transfer_params or output.kv_transfer_params
            choices += [self._choice(prompt_index, output, one) for one in output.outputs]
        return CompletionResponse(
            **self._exchange.envelope.members(),
            choices=choices,
            usage=self.count.usage(),
            kv_transfer_params=kv_transfer_params or UNSET,
        )

    def _choice(
        self, prompt_index: int, output: RequestOutput, answer: CompletionOutput
    ) -> CompletionChoice:
        index = prompt_index * self._num_answers + answer.index
        choice = CompletionChoice(
            index=index,
            text=answer.delta_text,
            logprobs=self._logprobs(prompt_index, index, output, answer),
            finish_reason=answer.finish_reason,
            stop_reason=answer.stop_reason,
        )
        if self._asked.return_token_ids:
            choice.token_ids = answer.delta_token_ids
            choice.prompt_token_ids = output.prompt_token_ids
        if self._asked.prompt_logprobs is not None:
            choice.prompt_logprobs = prompt_logprobs(self._prompt_logprobs.get(prompt_index, []))
        return choice

    # Both

    def _noted(self, prompt_index: int, output: RequestOutput) -> RequestOutput:
        """The output as it is to be shown, once the books are kept."""
        if output.prompt_logprobs is not None:
            self._prompt_logprobs[prompt_index] = output.prompt_logprobs
        if self._is_scoring_only:
            output = _prompt_alone(output)
        self.count.add(prompt_index, output)
        first = prompt_index * self._num_answers
        for delta in output.outputs:
            if delta.finish_reason is not None:
                self._open.discard(first + delta.index)
        return output

    def _logprobs(
        self, prompt_index: int, index: int, output: RequestOutput, delta: CompletionOutput
    ) -> CompletionLogprobs | None:
        if self._asked.logprobs is None:
            return None
        token_ids = delta.delta_token_ids
        positions: list[TokenLogprobs | None] = list(delta.logprobs or ())
        is_first = index not in self._offsets
        if self._asked.echo and is_first:
            token_ids = output.prompt_token_ids + token_ids
            positions = self._prompt_logprobs.get(prompt_index, []) + positions
        shown = completion_logprobs(
            token_ids,
            positions,
            first_offset=self._offsets.get(index, 0),
            as_ids=self._as_ids,
            spell=self._spell,
        )
        ends = [o + len(t) for o, t in zip(shown.text_offset, shown.tokens, strict=True)]
        self._offsets[index] = ends[-1] if ends else self._offsets.get(index, 0)
        return shown

    def _spell(self, token_id: int) -> str:
        tokenizer = self._exchange.surroundings.engine.get_tokenizer()
        return tokenizer.decode([token_id], skip_special_tokens=False)


def _prompt_alone(output: RequestOutput) -> RequestOutput:
    """What a request that only scores its prompt shows: the one token it had to make is hidden."""
    text = output.prompt or ""
    ended = [
        CompletionOutput(
            index=one.index,
            text=text,
            token_ids=[],
            delta_text=text,
            logprobs=[],
            finish_reason="length",
        )
        for one in output.outputs
        if one.finish_reason is not None
    ]
    return dataclasses.replace(output, outputs=ended)
