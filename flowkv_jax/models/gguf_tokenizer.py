"""The tokenizer of a GGUF file, rebuilt from its metadata. No JAX.

Byte-level BPE (`tokenizer.ggml.model` "gpt2") is served, with the ways of cutting text before
merging that Llama-architecture models use: "smollm", "llama-bpe" (Llama 3) and "gpt-2".
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors

from flowkv_jax.errors import ModelFormatError, NotFoundError
from flowkv_jax.tokenizer import Tokenizer

_LLAMA3_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_PRE_TOKENIZERS = ("smollm", "gpt-2", "llama-bpe")
_CONTROL, _USER_DEFINED = 3, 4


def build_tokenizer(metadata: Mapping[str, Any]) -> Tokenizer:
    """Make the tokenizer that the metadata describes.

    Raises:
        NotFoundError: the file carries no tokenizer.
        ModelFormatError: it is broken, or of a kind that is not served (named).
    """
    if "tokenizer.ggml.tokens" not in metadata:
        raise NotFoundError("the GGUF file carries no tokenizer (tokenizer.ggml.tokens)")
    tokens = _strings(metadata, "tokenizer.ggml.tokens")
    template = metadata.get("tokenizer.chat_template")
    if template is not None and not isinstance(template, str):
        raise ModelFormatError(f"tokenizer.chat_template={template!r:.100} must be text")
    return Tokenizer(
        _backend(metadata, tokens),
        bos_token=_token(metadata, tokens, "bos"),
        eos_token=_token(metadata, tokens, "eos"),
        chat_template=template,
    )


def _backend(metadata: Mapping[str, Any], tokens: list[str]) -> tokenizers.Tokenizer:
    model, pre = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre")
    if model != "gpt2":
        raise ModelFormatError(f"tokenizer.ggml.model={model!r} is not served; served: 'gpt2'")
    if pre not in _PRE_TOKENIZERS:
        raise ModelFormatError(
            f"tokenizer.ggml.pre={pre!r} is not served; served: {', '.join(_PRE_TOKENIZERS)}"
        )
    merges = [
        (first, second)
        for first, _, second in (
            merge.partition(" ") for merge in _strings(metadata, "tokenizer.ggml.merges")
        )
    ]
    try:
        backend = tokenizers.Tokenizer(
            models.BPE(
                vocab={token: token_id for token_id, token in enumerate(tokens)},
                merges=merges,
                ignore_merges=pre == "llama-bpe",
            )
        )
    except Exception as error:  # the library raises bare Exception
        raise ModelFormatError(f"tokenizer.ggml.merges do not fit the tokens: {error}") from error
    backend.pre_tokenizer = pre_tokenizer(pre)
    backend.decoder = decoders.ByteLevel()
    types = metadata.get("tokenizer.ggml.token_type")
    if not isinstance(types, list) or len(types) != len(tokens):
        raise ModelFormatError(
            f"tokenizer.ggml.token_type must be a list of {len(tokens)} types, one a token"
        )
    for kind, is_special in ((_CONTROL, True), (_USER_DEFINED, False)):
        backend.add_tokens(
            [
                AddedToken(token, special=is_special, normalized=False)
                for token, token_kind in zip(tokens, types, strict=True)
                if token_kind == kind
            ]
        )
    if metadata.get("tokenizer.ggml.add_bos_token", pre == "llama-bpe"):
        bos = _token(metadata, tokens, "bos")
        if bos is not None:
            backend.post_processor = processors.TemplateProcessing(
                single=[bos, "$A"], special_tokens=[(bos, tokens.index(bos))]
            )
    return backend


def pre_tokenizer(pre: str) -> pre_tokenizers.PreTokenizer:
    """What cuts text before merging, by its name in `_PRE_TOKENIZERS`."""
    if pre == "llama-bpe":
        return pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(tokenizers.Regex(_LLAMA3_PATTERN), behavior="isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if pre == "gpt-2":
        return byte_level
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])


def _token(metadata: Mapping[str, Any], tokens: list[str], role: str) -> str | None:
    """The token that plays `role` (bos, eos), or None if the file names none."""
    token_id = metadata.get(f"tokenizer.ggml.{role}_token_id")
    if token_id is None:
        return None
    if type(token_id) is not int or not 0 <= token_id < len(tokens):
        raise ModelFormatError(
            f"tokenizer.ggml.{role}_token_id={token_id!r} is not in [0, {len(tokens)})"
        )
    return tokens[token_id]


def _strings(metadata: Mapping[str, Any], key: str) -> list[str]:
    value = metadata.get(key)
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise ModelFormatError(f"{key} must be a list of strings")
    return value
