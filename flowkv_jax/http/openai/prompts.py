"""What a completions request asks to be continued, and how long a text may be."""

from __future__ import annotations

from flowkv_jax.checks import bad_value
from flowkv_jax.errors import ValidationError
from flowkv_jax.http.openai.requests import MAX_CHOICES, MAX_PROMPTS, CompletionRequest
from flowkv_jax.rpc.engine_protocol import PromptInput


def prompts_of(request: CompletionRequest) -> list[PromptInput]:
    """The prompts, in order. A list of numbers is one prompt.

    Raises:
        ValidationError: lists of several kinds, empty prompts, or too many.
    """
    given = request.prompt
    if isinstance(given, str):
        prompts: list[PromptInput] = [given]
    elif all(type(item) is int for item in given):
        prompts = [given]  # type: ignore[list-item]
    else:
        kinds = {type(item) for item in given}
        if kinds not in ({str}, {list}):
            raise ValidationError(
                "prompt must be text, token ids, a list of texts or a list of lists of token ids;"
                " this list is mixed",
                parameter="prompt",
            )
        prompts = given  # type: ignore[assignment]
    if len(prompts) > MAX_PROMPTS:
        raise bad_value("prompt", "[...]", f"has {len(prompts)} prompts; at most {MAX_PROMPTS}")
    num_choices = len(prompts) * (request.n or 1)
    if num_choices > MAX_CHOICES:
        raise bad_value(
            "n", request.n, f"makes {num_choices} choices with {len(prompts)} prompts; at most"
            f" {MAX_CHOICES}"
        )  # fmt: skip
    for prompt in prompts:
        if not prompt:
            raise ValidationError("prompt is empty", parameter="prompt")
    return prompts
