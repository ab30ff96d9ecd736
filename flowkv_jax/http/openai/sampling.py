"""From a request's fields to `SamplingParams`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flowkv_jax.checks import bad_value
from flowkv_jax.errors import ValidationError
from flowkv_jax.http.openai.requests import (
    ChatCompletionRequest,
    CompletionRequest,
    GenerationFields,
    ResponseFormat,
)
from flowkv_jax.sampling_params import RequestOutputKind, SamplingParams

_SAME_NAMES = (
    "n",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "logit_bias",
    "allowed_token_ids",
    "bad_words",
    "seed",
    "stop",
    "stop_token_ids",
    "include_stop_str_in_output",
    "ignore_eos",
    "min_tokens",
    "prompt_logprobs",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "truncate_prompt_tokens",
    "structured_outputs",
)


def completion_params(request: CompletionRequest) -> SamplingParams:
    """Without a bound of its own an answer has at most 16 tokens, or the model's recommendation.

    Raises:
        ValidationError, UnprocessableError: naming the field.
    """
    values = _common_values(request)
    if request.best_of is not None and request.best_of != (request.n or 1):
        raise bad_value("best_of", request.best_of, f"must equal n={request.n or 1}")
    limit = _max_tokens(request)
    if limit is not None:
        values["max_tokens"] = limit
    if is_scoring_only(request):
        values["max_tokens"] = 1  # it is computed, and not shown
        values.pop("min_tokens", None)
    if request.logprobs is not None:
        values["logprobs"] = request.logprobs
    if request.echo:
        values["echo"] = True
        if request.logprobs is not None:
            values.setdefault("prompt_logprobs", request.logprobs)
    return _params(values)


def is_scoring_only(request: CompletionRequest) -> bool:
    """The prompt comes back, with its log-probabilities if wanted, and nothing else."""
    return bool(request.echo) and _max_tokens(request) == 0


def chat_params(
    request: ChatCompletionRequest, forced_form: Mapping[str, Any] | None = None
) -> SamplingParams:
    """Without a bound of its own an answer may fill the context.

    Args:
        forced_form: `structured_outputs` that a tool choice asks for.

    Raises:
        ValidationError, UnprocessableError: naming the field.
    """
    values = _common_values(request)
    values["max_tokens"] = _max_tokens(request)
    if request.top_logprobs and not request.logprobs:
        raise bad_value("top_logprobs", request.top_logprobs, "needs logprobs=true")
    if request.logprobs:
        values["logprobs"] = request.top_logprobs or 0
    if forced_form is not None:
        if "structured_outputs" in values:
            raise ValidationError(
                "tool_choice forces a call, which contradicts response_format and"
                " structured_outputs",
                parameter="tool_choice",
            )
        values["structured_outputs"] = forced_form
    return _params(values)


def _max_tokens(request: GenerationFields) -> int | None:
    wins = request.max_completion_tokens
    return request.max_tokens if wins is None else wins


def _common_values(request: GenerationFields) -> dict[str, Any]:
    values = {name: value for name in _SAME_NAMES if (value := getattr(request, name)) is not None}
    if request.stream_options is not None and not request.stream:
        raise bad_value("stream_options", "{...}", "needs stream=true")
    if request.prompt_logprobs is not None and request.stream:
        raise bad_value("prompt_logprobs", request.prompt_logprobs, "is not served with stream")
    if request.response_format is not None:
        form = _form_of(request.response_format)
        if form is not None:
            if request.structured_outputs is not None:
                raise ValidationError(
                    "response_format and structured_outputs contradict each other; give one",
                    parameter="structured_outputs",
                )
            values["structured_outputs"] = form
    return values


def _form_of(response_format: ResponseFormat) -> Mapping[str, Any] | None:
    has_schema = response_format.json_schema is not None
    if has_schema != (response_format.type == "json_schema"):
        raise ValidationError(
            "response_format.json_schema is given exactly with type=json_schema; type is"
            f" {response_format.type}",
            parameter="response_format",
        )
    if response_format.type == "text":
        return None
    if response_format.json_schema is None:
        return {"json_object": True}
    schema = response_format.json_schema.schema
    if schema is None:
        raise ValidationError(
            "response_format.json_schema.schema is missing", parameter="response_format"
        )
    return {"json": schema}


def _params(values: dict[str, Any]) -> SamplingParams:
    # Deltas: an answer so far would be copied with every token.
    return SamplingParams.from_mapping({**values, "output_kind": RequestOutputKind.DELTA})
