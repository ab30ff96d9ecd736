"""What a completions request asks to be continued, and how long a text may be."""

from __future__ import annotations

from flowkv_jax.checks import bad_value
from flowkv_jax.errors import ValidationError
from flowkv_jax.http.openai.requests import MAX_CHOICES, MAX_PROMPTS, CompletionRequest
from flowkv_jax.rpc.answering import prompt_ids
from flowkv_jax.rpc.engine_protocol import PromptInput


def prompts_of(request: CompletionRequest, max_model_len: int) -> list[PromptInput]:
    """The prompts, in order. A list of numbers is one prompt.

    Raises:
        ValidationError: lists of several kinds, empty prompts, too many, or far too long ones.
    """
    given = request.prompt
    is_truncated = request.truncate_prompt_tokens is not None
    if isinstance(given, str):
        prompts: list[PromptInput] = [given]
    else:
        kinds = set(map(type, given))
        if kinds == {int}:
            prompts = [given]  # type: ignore[list-item]
        elif kinds in ({str}, {list}):
            prompts = given  # type: ignore[assignment]
        else:
            raise ValidationError(
                "prompt must be text, token ids, a list of texts or a list of lists of token ids;"
                " this list is mixed",
                parameter="prompt",
            )
    if len(prompts) > MAX_PROMPTS:
        raise bad_value("prompt", "[...]", f"has {len(prompts)} prompts; at most {MAX_PROMPTS}")
    num_choices = len(prompts) * (request.n or 1)
    if num_choices > MAX_CHOICES:
        raise bad_value(
            "n", request.n, f"makes {num_choices} choices with {len(prompts)} prompts; at most"
            f" {MAX_CHOICES}"
        )  # fmt: skip
    if not all(prompts):
        raise ValidationError("prompt is empty", parameter="prompt")
    return [
        prompt
        if isinstance(prompt, str)
        else prompt_ids("prompt", prompt, max_model_len, is_truncated=is_truncated)
        for prompt in prompts
    ]
