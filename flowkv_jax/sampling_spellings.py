"""Which `SamplingParams` field a key of a plain mapping means: other engines' spellings."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping
from typing import Any

from flowkv_jax.errors import UnprocessableError, ValidationError

_SHOWN_CHARACTERS = 100

ALIASES: Mapping[str, str] = {
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "sampling_seed": "seed",
    "no_stop_trim": "include_stop_str_in_output",
}

CONSTRAINT_ALIASES: Mapping[str, str] = {
    "json_schema": "json",
    "regex": "regex",
    "ebnf": "grammar",
}
"""SGLang's spellings of `structured_outputs`: the key of it that each means."""

# Fields other engines serve and this one does not. Dropping one silently would return output that
# the caller believes to be constrained, so each is refused by name.
_NOT_SERVED: frozenset[str] = frozenset(
    {
        "guided_json",
        "guided_regex",
        "guided_choice",
        "guided_grammar",
        "guided_json_object",
        "guided_decoding",
        "guided_decoding_backend",
        "guided_whitespace_pattern",
        "response_format",
        "structural_tag",
        "stop_regex",
        "logits_processors",
        "custom_logit_processor",
        "custom_params",
        "extra_args",
        "best_of",
        "use_beam_search",
        "length_penalty",
        "early_stopping",
        "logprob_token_ids",
        "token_ids_logprob",
        "repetition_detection",
        "thinking_token_budget",
        "stream_interval",
    }
)


def field_meant(key: Any, value: Any, fields: Collection[str]) -> str | None:
    """The field of `fields` that `key` means; None for an unserved feature that is switched off.

    Raises:
        UnprocessableError: a feature that is not served.
        ValidationError: no such field.
    """
    if key in fields:
        return str(key)
    if key in ALIASES:
        return ALIASES[key]
    if key in CONSTRAINT_ALIASES:
        return "structured_outputs"
    name = str(key)
    shown = name if len(name) <= _SHOWN_CHARACTERS else name[:_SHOWN_CHARACTERS] + "..."
    if name in _NOT_SERVED or name.startswith("guided_"):
        if value is None or value is False:
            return None
        raise UnprocessableError(f"{shown} is not served here; leave it out")
    close = difflib.get_close_matches(shown, [*fields, *ALIASES], n=1)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    raise ValidationError(
        f"unknown sampling parameter {shown!r}{hint}", parameter=name, value=value
    )
