"""Answers that are given whole. `/openapi.json` is made from the same structures."""

from __future__ import annotations

from typing import Any, Literal

from msgspec import UNSET, Struct, UnsetType

from flowkv_jax.http.openai.logprobs import ChatLogprobs, CompletionLogprobs


class PromptTokensDetails(Struct, kw_only=True):
    cached_tokens: int


class Usage(Struct, kw_only=True):
    """In tokens. `prompt_tokens_details` is told if the server is told to tell it."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails | UnsetType = UNSET


class CompletionChoice(Struct, kw_only=True):
    """
    Attributes:
        stop_reason: the stop string or token that ended the answer; null for the model's own.
    """

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | None
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: list[dict[str, Any] | None] | UnsetType = UNSET


class CompletionResponse(Struct, kw_only=True):
    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionChoice]
    usage: Usage
    kv_transfer_params: dict[str, Any] | UnsetType = UNSET


class FunctionCall(Struct, kw_only=True):
    """`arguments` is JSON text, as the model wrote it."""

    name: str
    arguments: str


class ToolCallAnswer(Struct, kw_only=True):
    id: str
    type: Literal["function"] = "function"
    function: FunctionCall


class AnswerMessage(Struct, kw_only=True):
    """`content` is null where the answer is nothing but tool calls."""

    role: Literal["assistant"] = "assistant"
    content: str | None
    refusal: None = None
    tool_calls: list[ToolCallAnswer] | UnsetType = UNSET


class ChatChoice(Struct, kw_only=True):
    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | None
    token_ids: list[int] | UnsetType = UNSET


class ChatCompletionResponse(Struct, kw_only=True):
    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: list[dict[str, Any] | None] | UnsetType = UNSET
    kv_transfer_params: dict[str, Any] | UnsetType = UNSET
