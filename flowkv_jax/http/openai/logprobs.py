"""Log-probabilities in OpenAI's two shapes.

The order of a position's alternatives is the engine's: the token itself, then the most likely ones.
JSON has no infinity: a token that cannot be is `MIN_LOGPROB`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from msgspec import Struct

from flowkv_jax.outputs import Logprob, TokenLogprobs
from flowkv_jax.rpc.engine_protocol import TokenizerLike

MIN_LOGPROB = -9999.0
_BROKEN = "\ufffd"


class CompletionLogprobs(Struct, kw_only=True):
    """Of `/v1/completions`: lists of equal length, an entry a token.

    Attributes:
        text_offset: where the token begins in the answer, in characters.
        token_logprobs, top_logprobs: null for the first token of a prompt: nothing precedes it.
    """

    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class TopLogprob(Struct, kw_only=True):
    """`bytes` are the token's; null where it is half of a character and the tokenizer cannot tell
    which half."""

    token: str
    logprob: float
    bytes: list[int] | None


class ChatTokenLogprob(TopLogprob, kw_only=True):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Struct, kw_only=True):
    """Of `/v1/chat/completions`: an entry a token."""

    content: list[ChatTokenLogprob]


def completion_logprobs(
    token_ids: Sequence[int],
    positions: Sequence[TokenLogprobs | None],
    *,
    first_offset: int,
    as_ids: bool,
    spell: Callable[[int], str],
) -> CompletionLogprobs:
    """
    Args:
        token_ids: the tokens of the text, one a position.
        first_offset: characters before the first of them.
        as_ids: tokens are spelt "token_id:17".
        spell: text of a token that has no log-probability.
    """
    shown = CompletionLogprobs(text_offset=[], token_logprobs=[], tokens=[], top_logprobs=[])
    offset = first_offset
    for token_id, position in zip(token_ids, positions, strict=True):
        own = None if position is None else position[token_id]
        shown.text_offset.append(offset)
        text = spell(token_id) if own is None and not as_ids else _text(token_id, own, as_ids)
        shown.tokens.append(text)
        offset += len(text)
        shown.token_logprobs.append(None if own is None else _finite(own.logprob))
        shown.top_logprobs.append(None if position is None else _by_text(position, as_ids))
    return shown


def chat_logprobs(
    token_ids: Sequence[int],
    positions: Sequence[TokenLogprobs],
    *,
    num_alternatives: int,
    as_ids: bool,
    tokenizer: TokenizerLike,
) -> ChatLogprobs:
    """
    Args:
        num_alternatives: entries of each `top_logprobs`.
        tokenizer: tells the bytes of tokens that are no whole text.
    """
    content = []
    for token_id, position in zip(token_ids, positions, strict=True):
        ranked = sorted(position.items(), key=lambda item: item[1].rank)[:num_alternatives]
        own = position[token_id]
        token = _text(token_id, own, as_ids)
        content.append(
            ChatTokenLogprob(
                token=token,
                logprob=_finite(own.logprob),
                bytes=_bytes(token_id, own, tokenizer),
                top_logprobs=[
                    TopLogprob(
                        token=_text(other, one, as_ids),
                        logprob=_finite(one.logprob),
                        bytes=_bytes(other, one, tokenizer),
                    )
                    for other, one in ranked
                ],
            )
        )
    return ChatLogprobs(content=content)


def prompt_logprobs(positions: Sequence[TokenLogprobs | None]) -> list[dict[str, Any] | None]:
    """vLLM's `prompt_logprobs`: token id -> {logprob, rank, decoded_token}, a position."""
    return [
        None
        if position is None
        else {
            str(token_id): {
                "logprob": _finite(one.logprob),
                "rank": one.rank,
                "decoded_token": one.decoded_token,
            }
            for token_id, one in position.items()
        }
        for position in positions
    ]


def _by_text(position: TokenLogprobs, as_ids: bool) -> dict[str, float]:
    """Different tokens may have one text (halves of characters); the likeliest stands for it."""
    shown: dict[str, float] = {}
    for token_id, one in position.items():
        text = _text(token_id, one, as_ids)
        shown[text] = max(_finite(one.logprob), shown.get(text, MIN_LOGPROB))
    return shown


def _text(token_id: int, one: Logprob | None, as_ids: bool) -> str:
    if as_ids or one is None or one.decoded_token is None:
        return f"token_id:{token_id}"
    return one.decoded_token


def _bytes(token_id: int, one: Logprob, tokenizer: TokenizerLike) -> list[int] | None:
    text = one.decoded_token
    if text is not None and _BROKEN not in text:
        return list(text.encode())
    return list(tokenizer.token_bytes(token_id)) if tokenizer.has_token_bytes else None


def _finite(logprob: float) -> float:
    return max(logprob, MIN_LOGPROB)
