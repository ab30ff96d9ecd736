"""Names at the top of a request: which are known, which are refused, which pass.

A field that would shape the answer and is not served is refused by name: dropping it would return
an answer that its reader believes to be shaped. Other unknown fields are ignored, and logged once.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import TypeVar

import msgspec

from flowkv_jax.errors import ValidationError
from flowkv_jax.http.json_body import decode_json

logger = logging.getLogger(__name__)

_SHOWN_CHARACTERS = 100
_MAX_REMEMBERED = 256

# name -> values that change nothing; None always is one.
_REFUSED: Mapping[str, tuple[object, ...]] = {
    "suffix": ("",),
    "chat_template": (),
    "functions": ([],),
    "function_call": ("none",),
    "structural_tag": (),
    "json_schema": (),
    "regex": (),
    "ebnf": (),
    "grammar": (),
    "stop_regex": (),
    "logits_processors": ([],),
    "custom_logit_processor": (),
    "logprob_token_ids": (),
    "token_ids_logprob": (),
    "use_beam_search": (False,),
    "length_penalty": (1, 1.0),
    "early_stopping": (False,),
    "thinking_token_budget": (),
    "repetition_detection": (),
    "prompt_embeds": (),
    "lora_request": (),
    "documents": ([],),
    "audio": (),
    "modalities": (["text"],),
    "web_search_options": (),
    "add_special_tokens": (),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "thinking": (),
}
_ADVICE: Mapping[str, str] = {
    "functions": "; use tools",
    "function_call": "; use tool_choice",
    "json_schema": "; use response_format or structured_outputs",
    "regex": "; use structured_outputs",
    "ebnf": "; use structured_outputs",
    "grammar": "; use structured_outputs",
    "chat_template": "; the server's own is used (--chat-template)",
}

_RequestT = TypeVar("_RequestT", bound=msgspec.Struct)


class FieldJudge:
    """Reads requests, and judges the names in them."""

    def __init__(self) -> None:
        self._ignored_before: set[str] = set()

    def read(self, body: bytes, request_type: type[_RequestT]) -> _RequestT:
        """A body as a request of this type.

        Raises:
            ValidationError: no JSON, of a wrong type, or with a field that is refused.
        """
        request = decode_json(body, request_type)
        given = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
        unknown = given.keys() - set(request.__struct_encode_fields__)
        if unknown:
            self._judge_unknown(given, unknown)
        return request

    def _judge_unknown(self, given: Mapping[str, msgspec.Raw], names: Iterable[str]) -> None:
        for name in sorted(names):
            if name in _REFUSED or name.startswith("guided_"):
                _refuse_unless_harmless(name, given[name])
                continue
            shown = name[:_SHOWN_CHARACTERS]
            if shown not in self._ignored_before and len(self._ignored_before) < _MAX_REMEMBERED:
                self._ignored_before.add(shown)
                logger.debug("the field %r of a request is not known, and ignored", shown)


def _refuse_unless_harmless(name: str, raw: msgspec.Raw) -> None:
    value = msgspec.json.decode(raw)
    if value is None or value in _REFUSED.get(name, ()):
        return
    shown = name[:_SHOWN_CHARACTERS]
    advice = "; use structured_outputs" if name.startswith("guided_") else _ADVICE.get(name, "")
    raise ValidationError(
        f"{shown} is not served here, and is refused because the answer would be another with it"
        f"{advice}",
        parameter=shown,
    )
