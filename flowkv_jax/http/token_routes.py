"""Text to token ids and back, in vLLM's shapes."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

import msgspec
from msgspec import UNSET, Meta, UnsetType

from flowkv_jax.checks import bad_value
from flowkv_jax.errors import ValidationError
from flowkv_jax.http.openai.conversation import messages_of, template_variables
from flowkv_jax.http.openai.fields import FieldJudge
from flowkv_jax.http.openai.requests import (
    MAX_TOOLS,
    ChatCompletionRequest,
    ChatMessage,
    Tool,
)
from flowkv_jax.http.request import Request
from flowkv_jax.http.response import Response, json_response
from flowkv_jax.http.route import Route
from flowkv_jax.http.status_routes import check_model
from flowkv_jax.http.surroundings import Surroundings
from flowkv_jax.rpc.limits import MAX_DETOKENIZE_IDS, MAX_MESSAGES, MAX_TOKENIZE_CHARACTERS

_Text = Annotated[str, Meta(max_length=MAX_TOKENIZE_CHARACTERS)]
_TokenId = Annotated[int, Meta(ge=0, le=2**31 - 1)]


class TokenizeRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Exactly one of `prompt` and `messages`.

    Attributes:
        add_special_tokens: put the model's first token before a prompt.
        return_token_strs: the text of each token, too.
        tools, chat_template_kwargs: as in `/v1/chat/completions`; with `messages`.
    """

    model: str | None = None
    prompt: _Text | UnsetType = UNSET
    messages: (
        Annotated[list[ChatMessage], Meta(min_length=1, max_length=MAX_MESSAGES)] | UnsetType
    ) = UNSET
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    tools: Annotated[list[Tool], Meta(max_length=MAX_TOOLS)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class TokenizeResponse(msgspec.Struct, frozen=True):
    """Attributes:
    count: of `tokens`.
    max_model_len: prompt plus output, in tokens.
    """

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Token ids of this model."""

    tokens: Annotated[list[_TokenId], Meta(max_length=MAX_DETOKENIZE_IDS)]
    model: str | None = None


class DetokenizeResponse(msgspec.Struct, frozen=True):
    """The text, special tokens included."""

    prompt: str


_OneInput = Meta(
    extra_json_schema={"oneOf": [{"required": ["prompt"]}, {"required": ["messages"]}]}
)


def routes() -> list[Route]:
    judge = FieldJudge()

    async def tokenize(request: Request, surroundings: Surroundings) -> Response:
        """Text, or a conversation in the model's template, as token ids."""
        asked = judge.read(await request.json_bytes(), TokenizeRequest)
        return await _tokenize(request, surroundings, asked)

    return [
        *(
            Route(
                "POST",
                path,
                tokenize,
                body=Annotated[TokenizeRequest, _OneInput],
                answer=TokenizeResponse,
                statuses=(404, 422),
            )
            for path in ("/tokenize", "/v1/tokenize")
        ),
        *(
            Route(
                "POST",
                path,
                detokenize,
                body=DetokenizeRequest,
                answer=DetokenizeResponse,
                statuses=(404,),
            )
            for path in ("/detokenize", "/v1/detokenize")
        ),
    ]


async def _tokenize(
    request: Request, surroundings: Surroundings, asked: TokenizeRequest
) -> Response:
    engine = surroundings.engine
    info = engine.model_info()
    check_model(asked.model, info)
    if (asked.prompt is UNSET) == (asked.messages is UNSET):
        raise ValidationError("give exactly one of prompt and messages", parameter="prompt")
    tokenizer = engine.get_tokenizer()
    if isinstance(asked.prompt, str):
        tokens = await asyncio.to_thread(
            tokenizer.encode, asked.prompt, add_special_tokens=asked.add_special_tokens is not False
        )
    else:
        messages, variables = _conversation(asked)
        tokens = await asyncio.to_thread(engine.render_chat, messages, variables)
    request.num_prompt_tokens = len(tokens)
    texts: list[str] | None = None
    if asked.return_token_strs:
        texts = await asyncio.to_thread(
            lambda: [tokenizer.decode([token], skip_special_tokens=False) for token in tokens]
        )
    return json_response(TokenizeResponse(len(tokens), info.max_model_len, list(tokens), texts))


def _conversation(asked: TokenizeRequest) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    if asked.add_special_tokens is not None:
        raise ValidationError(
            "add_special_tokens goes with prompt; with messages the model's template decides",
            parameter="add_special_tokens",
        )
    chat = ChatCompletionRequest(
        messages=asked.messages if isinstance(asked.messages, list) else [],
        tools=asked.tools,
        chat_template_kwargs=asked.chat_template_kwargs,
    )
    return messages_of(chat), template_variables(chat)


async def detokenize(request: Request, surroundings: Surroundings) -> Response:
    """Token ids as text."""
    asked = await request.json(DetokenizeRequest)
    engine = surroundings.engine
    info = engine.model_info()
    check_model(asked.model, info)
    if (most := max(asked.tokens, default=0)) >= info.vocab_size:
        raise bad_value("tokens", most, f"is not in [0, {info.vocab_size})")
    request.num_prompt_tokens = len(asked.tokens)
    decode = engine.get_tokenizer().decode
    text = await asyncio.to_thread(decode, asked.tokens, skip_special_tokens=False)
    return json_response(DetokenizeResponse(text))
