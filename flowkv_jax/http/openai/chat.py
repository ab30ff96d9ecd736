"""`POST /v1/chat/completions`."""

from __future__ import annotations

import asyncio
import dataclasses

from msgspec import UNSET

from flowkv_jax.http.openai.chunks import delta_members
from flowkv_jax.http.openai.conversation import messages_of, template_variables
from flowkv_jax.http.openai.delivery import Answer, deliver
from flowkv_jax.http.openai.exchange import Exchange, kv_of
from flowkv_jax.http.openai.logprobs import ChatLogprobs, chat_logprobs, prompt_logprobs
from flowkv_jax.http.openai.requests import ChatCompletionRequest
from flowkv_jax.http.openai.responses import AnswerMessage, ChatChoice, ChatCompletionResponse
from flowkv_jax.http.openai.sampling import chat_params
from flowkv_jax.http.openai.tools.answer_reader import AnswerReader
from flowkv_jax.http.openai.tools.calling import ToolUse, parser_named, tool_use_of
from flowkv_jax.http.openai.tools.model_way import ModelWay
from flowkv_jax.http.request import Request
from flowkv_jax.http.response import Response
from flowkv_jax.http.surroundings import Surroundings
from flowkv_jax.outputs import CompletionOutput, RequestOutput
from flowkv_jax.rpc.generation import PromptOutput, merged


async def answer_chat(
    request: Request,
    surroundings: Surroundings,
    asked: ChatCompletionRequest,
    model_way: ModelWay,
) -> Response | None:
    """Answer one request that has been read."""
    tools = tool_use_of(asked)
    params = chat_params(asked, tools.form)
    exchange = Exchange.begin(request, surroundings, asked, "chatcmpl")
    if tools.needs_model_way:
        name = await model_way.parser_name(surroundings)
        tools = dataclasses.replace(tools, new_parser=parser_named(name, asked))
    # Templates and tokenising take milliseconds.
    prompt = await asyncio.to_thread(
        surroundings.engine.render_chat, messages_of(asked), template_variables(asked)
    )
    return await deliver(exchange, _ChatAnswer(exchange, asked, tools), [prompt], params)


class _ChatAnswer(Answer):
    """Turns one request's outputs into its answer, or the events of it."""

    def __init__(self, exchange: Exchange, asked: ChatCompletionRequest, tools: ToolUse) -> None:
        super().__init__(exchange, "chat.completion.chunk", asked.n or 1)
        self._asked = asked
        self._readers: list[AnswerReader] | None = None
        if tools.new_parser is not None:
            self._readers = [AnswerReader(tools) for _ in range(asked.n or 1)]
        self._num_answers = asked.n or 1
        self._is_plain = not (
            exchange.has_continuous_usage
            or asked.logprobs
            or asked.return_token_ids
            or tools.new_parser is not None
        )
        self._has_begun = False

    # Streams

    def chunks(self, taken: list[PromptOutput]) -> bytes:
        """Events for what was taken."""
        [(_, output)] = merged(taken)
        self.count.add(0, output)
        pieces = []
        if not self._has_begun:
            self._has_begun = True
            pieces.append(self._first_chunks(output))
        for delta in output.outputs:
            if self._is_plain and delta.finish_reason is None:
                if delta.delta_text:
                    pieces.append(self._writer.text(delta.index, delta.delta_text))
            else:
                pieces.append(self._full_chunks(output, delta))
        return b"".join(pieces)

    def _first_chunks(self, output: RequestOutput) -> bytes:
        """Who speaks, before anything is said."""
        members = delta_members({"role": "assistant", "content": ""})
        top = {"prompt_token_ids": output.prompt_token_ids}
        return b"".join(
            self._writer.choice(
                index,
                members,
                usage=self._continuous_usage(),
                top=top if self._asked.return_token_ids and index == 0 else None,
            )
            for index in range(self._num_answers)
        )

    def _full_chunks(self, output: RequestOutput, delta: CompletionOutput) -> bytes:
        """Chunks of one answer's news: what a tool call is told in takes several."""
        is_over = delta.finish_reason is not None
        finish_reason: str | None = delta.finish_reason
        if is_over:
            self._open.discard(delta.index)
        if self._readers is None:
            members = [{"content": delta.delta_text}] if delta.delta_text else []
        else:
            reader = self._readers[delta.index]
            members = reader.read(delta.delta_text, is_over=is_over)
            finish_reason = reader.finish_reason(delta.finish_reason)
        usage = self._continuous_usage()
        *early, last = members or [{}]
        pieces = [
            self._writer.choice(delta.index, delta_members(one), usage=usage) for one in early
        ]
        logprobs = self._logprobs(delta)
        if members or is_over or logprobs or usage or self._asked.return_token_ids:
            pieces.append(
                self._writer.choice(
                    delta.index,
                    delta_members(last),
                    logprobs=logprobs,
                    finish_reason=finish_reason,
                    stop_reason=delta.stop_reason,
                    extra=self._token_ids(delta),
                    usage=usage,
                    top=kv_of(output) if is_over else None,
                )
            )
        return b"".join(pieces)

    def _token_ids(self, delta: CompletionOutput) -> dict[str, list[int]] | None:
        return {"token_ids": delta.delta_token_ids} if self._asked.return_token_ids else None

    # Whole answers

    def whole(self, taken: list[PromptOutput]) -> ChatCompletionResponse:
        """The answer, from all its outputs."""
        [(_, output)] = merged(taken)
        self.count.add(0, output)
        response = ChatCompletionResponse(
            **self._exchange.envelope.members(),
            choices=[self._choice(answer) for answer in output.outputs],
            usage=self.count.usage(),
            kv_transfer_params=output.kv_transfer_params or UNSET,
        )
        if self._asked.return_token_ids:
            response.prompt_token_ids = output.prompt_token_ids
        if self._asked.prompt_logprobs is not None:
            response.prompt_logprobs = prompt_logprobs(output.prompt_logprobs or [])
        return response

    def _choice(self, answer: CompletionOutput) -> ChatChoice:
        message = AnswerMessage(content=answer.delta_text)
        finish_reason: str | None = answer.finish_reason
        if self._readers is not None:
            reader = self._readers[answer.index]
            message = reader.message(answer.delta_text)
            finish_reason = reader.finish_reason(answer.finish_reason)
        return ChatChoice(
            index=answer.index,
            message=message,
            logprobs=self._logprobs(answer),
            finish_reason=finish_reason,
            stop_reason=answer.stop_reason,
            token_ids=answer.delta_token_ids if self._asked.return_token_ids else UNSET,
        )

    def _logprobs(self, delta: CompletionOutput) -> ChatLogprobs | None:
        if not self._asked.logprobs:
            return None
        return chat_logprobs(
            delta.delta_token_ids,
            delta.logprobs or [],
            num_alternatives=self._asked.top_logprobs or 0,
            as_ids=bool(self._asked.return_tokens_as_token_ids),
            tokenizer=self._exchange.surroundings.engine.get_tokenizer(),
        )
