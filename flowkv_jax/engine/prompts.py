"""What callers may write for a prompt, brought to one form. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any, Protocol

from flowkv_jax.checks import bad_value
from flowkv_jax.errors import ContextLengthError, ValidationError
from flowkv_jax.sampling_params import SamplingParams

PromptType = str | Sequence[int] | Mapping[str, Any]
"""Text, token ids, {"prompt": text} or {"prompt_token_ids": ids}."""

_ALWAYS_TOKENISED_CHARACTERS = 1 << 16  # a few milliseconds


class Encoder(Protocol):
    @property
    def max_token_characters(self) -> int:
        """No token stands for more characters than this."""
        ...

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]: ...

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str: ...


@dataclass(frozen=True, slots=True)
class TokenizedPrompt:
    """Text is None when the caller gave ids and nothing needs the text."""

    text: str | None
    token_ids: list[int]


def as_batch(prompts: PromptType | Sequence[PromptType]) -> list[PromptType]:
    """One prompt or many, as a list. A list of ints is one tokenised prompt.

    Raises:
        ValidationError: empty, or not made of prompts.
    """
    if isinstance(prompts, str | Mapping):
        return [prompts]
    if not isinstance(prompts, Sequence) or isinstance(prompts, bytes):
        raise ValidationError(
            f"prompts must be text, token ids, a dict, or a list of these, got {prompts!r:.100}",
            parameter="prompts",
            value=prompts,
        )
    if not prompts:
        raise ValidationError(
            "prompts is empty: give at least one prompt", parameter="prompts", value=prompts
        )
    items: list[Any] = list(prompts)
    return [items] if all(_is_int(item) for item in items) else items


def tokenize(
    prompt: PromptType,
    encoder: Encoder,
    params: SamplingParams,
    *,
    vocab_size: int,
    max_prompt_tokens: int,
) -> TokenizedPrompt:
    """Token ids of a prompt, truncated if the parameters say so.

    Args:
        max_prompt_tokens: longest prompt that leaves room for one token of output.

    Raises:
        ContextLengthError: too long.
        ValidationError: empty, of a wrong type, or with ids outside the vocabulary.
    """
    text, token_ids = _text_and_ids(prompt)
    keep = params.truncate_prompt_tokens
    if keep == -1:
        keep = max_prompt_tokens
    if text is not None:
        token_ids = encoder.encode(_bounded(text, encoder, max_prompt_tokens, cut=keep is not None))
    if not token_ids:
        raise ValidationError("prompt is empty", parameter="prompt", value=prompt)
    if keep is not None and len(token_ids) > keep:
        token_ids = token_ids[-keep:]
        text = None
    if len(token_ids) > max_prompt_tokens:
        raise _too_long(f"{len(token_ids)} tokens", len(token_ids), max_prompt_tokens)
    for token_id in token_ids:
        if not _is_int(token_id) or not 0 <= token_id < vocab_size:
            raise ValidationError(
                f"prompt holds token id {token_id!r}; ids are integers in [0, {vocab_size})",
                parameter="prompt_token_ids",
                value=token_id,
            )
    if text is None and params.echo:
        text = encoder.decode(token_ids)
    return TokenizedPrompt(text, [int(token_id) for token_id in token_ids])


def _bounded(text: str, encoder: Encoder, max_prompt_tokens: int, *, cut: bool) -> str:
    """`text`, unless it is so long that it cannot fit: tokenising that would take minutes.

    With `cut`, the end of it: twice what can be kept, so that its tokens are those of the whole.
    """
    if len(text) <= _ALWAYS_TOKENISED_CHARACTERS:
        return text
    limit = max_prompt_tokens * encoder.max_token_characters
    if cut:
        return text[-max(2 * limit, _ALWAYS_TOKENISED_CHARACTERS) :]
    if len(text) > max(limit, _ALWAYS_TOKENISED_CHARACTERS):
        raise _too_long(f"{len(text)} characters", len(text), max_prompt_tokens)
    return text


def check_rendered(text: str, encoder: Encoder, max_prompt_tokens: int) -> None:
    """Before a conversation is tokenised, which would take minutes for millions of characters.

    Raises:
        ContextLengthError: it cannot fit, and is so long that its end alone could not either.
    """
    limit = 2 * max_prompt_tokens * encoder.max_token_characters
    if len(text) > max(limit, _ALWAYS_TOKENISED_CHARACTERS):
        raise _too_long(f"{len(text)} characters", len(text), max_prompt_tokens)


def _too_long(size: str, value: int, max_prompt_tokens: int) -> ContextLengthError:
    return ContextLengthError(
        f"prompt of {size} is too long: at most {max_prompt_tokens} tokens leave room"
        " for an answer; shorten it or set truncate_prompt_tokens",
        parameter="prompt",
        value=value,
    )


def spread(name: str, value: Any, count: int) -> list[Any]:
    """One value for every prompt, or a list with one a prompt.

    Raises:
        ValidationError: a list of another length.
    """
    if isinstance(value, str | Mapping) or not isinstance(value, Sequence):
        return [value] * count
    if len(value) != count:
        raise ValidationError(
            f"{name} has {len(value)} items for {count} prompts", parameter=name, value=value
        )
    return list(value)


def as_request_ids(request_id: Any) -> list[str]:
    """One id or several, as a list.

    Raises:
        ValidationError: neither.
    """
    if isinstance(request_id, str):
        return [request_id]
    if not isinstance(request_id, Sequence) or isinstance(request_id, bytes):
        raise bad_value("request_id", request_id, "must be text, or a list of texts")
    for one in request_id:
        if not isinstance(one, str):
            raise bad_value("request_id", one, "must be text")
    return list(request_id)


def _text_and_ids(prompt: PromptType) -> tuple[str | None, list[int]]:
    if isinstance(prompt, Mapping):
        known = {"prompt", "prompt_token_ids"}
        if set(prompt) - known or not set(prompt) & known:
            raise ValidationError(
                "a prompt dict has the key 'prompt' or 'prompt_token_ids', got"
                f" {sorted(map(str, prompt))}",
                parameter="prompt",
                value=prompt,
            )
        if prompt.get("prompt_token_ids") is not None:
            return _text_and_ids(prompt["prompt_token_ids"])
        return _text_and_ids(prompt.get("prompt", ""))
    if isinstance(prompt, str):
        return prompt, []
    if isinstance(prompt, Sequence) and not isinstance(prompt, bytes):
        token_ids: list[Any] = list(prompt)
        return None, token_ids
    raise ValidationError(
        f"a prompt is text, token ids or a dict, got {prompt!r:.100}",
        parameter="prompt",
        value=prompt,
    )


def _is_int(value: Any) -> bool:
    # NumPy's integers are registered as Integral; bool is an int by accident only.
    return isinstance(value, Integral) and not isinstance(value, bool)
