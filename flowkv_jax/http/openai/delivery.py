"""From the engine's outputs to the client: whole, or as events. The same for both endpoints."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Literal

import msgspec

from flowkv_jax.http.event_stream import DONE
from flowkv_jax.http.openai.chunks import ChunkWriter
from flowkv_jax.http.openai.exchange import Exchange, TokenCount
from flowkv_jax.http.openai.responses import Usage
from flowkv_jax.http.response import Response, json_response
from flowkv_jax.rpc.engine_protocol import PromptInput
from flowkv_jax.rpc.generation import Generation, PromptOutput
from flowkv_jax.sampling_params import SamplingParams


class Answer(ABC):
    """Turns outputs into what the client sees, and keeps the books of one request.

    Args:
        kind: `object` of the events.
        num_choices: of all prompts together.

    Attributes:
        count: its tokens so far.
    """

    def __init__(
        self,
        exchange: Exchange,
        kind: Literal["text_completion", "chat.completion.chunk"],
        num_choices: int,
    ) -> None:
        self._exchange = exchange
        self._writer = ChunkWriter(exchange.envelope, kind, has_usage=exchange.has_usage)
        self._open = set(range(num_choices))
        config = exchange.surroundings.config
        self.count = TokenCount(tells_cached=config.enable_prompt_tokens_details)

    @abstractmethod
    def chunks(self, taken: list[PromptOutput]) -> bytes:
        """Events for what was taken; may be empty."""

    @abstractmethod
    def whole(self, taken: list[PromptOutput]) -> msgspec.Struct:
        """The body of an answer that is no stream, from all outputs."""

    def failed(self) -> bytes:
        """Events that end the choices that were not finished."""
        return b"".join(
            self._writer.choice(index, self._writer.nothing, finish_reason="error")
            for index in sorted(self._open)
        )

    def usage_chunk(self) -> bytes:
        """The event with the usage, at the end."""
        return self._writer.usage(self.count.usage())

    def _continuous_usage(self) -> Usage | None:
        """What every event tells, where that is wanted."""
        return self.count.usage() if self._exchange.has_continuous_usage else None


async def deliver(
    exchange: Exchange, answer: Answer, prompts: Sequence[PromptInput], params: SamplingParams
) -> Response | None:
    """Let the engine generate, and answer with it.

    Raises:
        ClientGone: nobody reads any more; the engine's requests were ended.
        FlowKVError: what the engine says. Behind the first event, open choices have been ended.
    """
    request = exchange.request
    try:
        async with (
            request.cancel_on_disconnect(),
            exchange.generation(prompts, params) as generation,
        ):
            if exchange.fields.stream:
                await _stream(exchange, answer, generation)
                return None
            return json_response(answer.whole(await generation.take_whole()))
    finally:
        request.num_prompt_tokens = answer.count.num_prompt_tokens
        request.num_completion_tokens = answer.count.num_completion_tokens


async def _stream(exchange: Exchange, answer: Answer, generation: Generation) -> None:
    async with exchange.request.events() as events:
        try:
            while taken := await generation.take():
                chunks = answer.chunks(taken)
                if chunks:
                    await events.send(chunks)
        except Exception:
            if events.has_started:
                await events.send(answer.failed())
            raise
        await events.send((answer.usage_chunk() if exchange.has_usage_chunk else b"") + DONE)
