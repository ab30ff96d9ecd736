"""A form that answers must have, compiled for one model's tokens (over llguidance).

Everything is bounded: the text by `StructuredOutputs`; the work of compiling, of each mask, and
the lexer's states by llguidance's own limits. So compiling takes 0.1 s at most.

JSON may have white space between its parts, up to 32 characters at a place, so that a model which
falls for endless blanks comes out of them.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

import llguidance
import numpy as np
import numpy.typing as npt
from llguidance.gbnf_to_lark import gbnf_to_lark

from flowkv_jax.errors import UnprocessableError, ValidationError
from flowkv_jax.structured_outputs import StructuredOutputs
from flowkv_jax.tokenizer import Tokenizer

MaskRow = npt.NDArray[np.uint32]

_JSON_WHITE_SPACE = r"[\x20\x0A\x0D\x09]{1,32}"
_ANY_OBJECT = '{"type": "object"}'
_MAX_LEXER_STATES = 32_000  # of 1 to 2 kB
_MAX_REASON_CHARACTERS = 300


def mask_words(vocab_size: int) -> int:
    """32-bit words of a mask with a bit for each token, the lowest bit first."""
    return -(-vocab_size // 32)


class Vocabulary:
    """A model's tokens as bytes, as llguidance wants them. Takes 0.2 s to make for 50,000 tokens.

    Ids beyond the tokenizer's (a model may have more logits) stand for nothing.

    Args:
        vocab_size: V, the number of logits.
        eos_token_ids: the model's end tokens; any of them ends an answer that is complete.

    Attributes:
        tokens: llguidance's own form.
        may_pass: uint32 [ceil(V / 32)], all but special tokens; of those only the ends.

    Raises:
        UnprocessableError: the tokenizer does not tell its tokens' bytes, or there is no end token.
    """

    def __init__(
        self, tokenizer: Tokenizer, *, vocab_size: int, eos_token_ids: Sequence[int]
    ) -> None:
        if not tokenizer.has_token_bytes:
            raise UnprocessableError(
                "structured_outputs is not served here: this model's tokenizer is neither "
                "byte-level nor SentencePiece, so the bytes of its tokens are not known"
            )
        if not eos_token_ids:
            raise UnprocessableError(
                "structured_outputs is not served here: this model has no end token"
            )
        num_known = min(tokenizer.vocab_size, vocab_size)
        special = [token for token in range(num_known) if tokenizer.is_special(token)]
        source = _TokenSource(
            tokenizer,
            tokens=[
                tokenizer.token_bytes(token) if token < num_known else b""
                for token in range(vocab_size)
            ],
            special_token_ids=sorted({*special, *eos_token_ids}),
            eos_token_id=eos_token_ids[0],
        )
        self.tokens = llguidance.LLTokenizer(
            llguidance.TokenizerWrapper(source),
            eos_token=list(eos_token_ids),
            slices=llguidance.LLTokenizer.json_slices(),
        )
        may_pass = np.zeros(32 * mask_words(vocab_size), np.bool_)
        may_pass[:num_known] = True
        may_pass[special] = False
        may_pass[list(eos_token_ids)] = True
        self.may_pass: MaskRow = np.packbits(may_pass, bitorder="little").view(np.uint32)


class _TokenSource:
    """What llguidance asks of a tokenizer; the names are its own."""

    bos_token_id = None

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        tokens: list[bytes],
        special_token_ids: list[int],
        eos_token_id: int,
    ) -> None:
        self.tokens = tokens
        self.special_token_ids = special_token_ids
        self.eos_token_id = eos_token_id
        self._encode = tokenizer.literal_encoder()

    def __call__(self, text: str) -> list[int]:
        """How the model would spell `text`, which is no special token whatever it looks like."""
        return self._encode(text)


class Grammar:
    """One form, compiled. Safe from several threads.

    Raises:
        ValidationError: it means nothing, asks for what is not supported, is too complex, or no
            token can begin it.
    """

    def __init__(self, form: StructuredOutputs, vocabulary: Vocabulary) -> None:
        self.vocabulary = vocabulary
        self._kind = form.kind
        self._source = _source(form)
        self._untouched = self.compile()
        _require_no_error(self._kind, self._untouched)
        state = self.start()
        row = np.zeros_like(vocabulary.may_pass)
        fill(state, row)
        _require_no_error(self._kind, state)
        allowed = np.flatnonzero(
            np.unpackbits((row & vocabulary.may_pass).view(np.uint8), bitorder="little")
        )
        if not allowed.size:
            raise _bad(self._kind, "no text can begin it")
        # Too many ways on are found when a token is followed; most often the first shows it.
        state.try_consume_tokens([int(allowed[0])])
        _require_no_error(self._kind, state)

    def start(self) -> llguidance.LLMatcher:
        """At its beginning; shares what the lexer has learnt with all others from here."""
        return self._untouched.deep_copy()

    def compile(self) -> llguidance.LLMatcher:
        """At its beginning, sharing nothing."""
        limits = llguidance.LLParserLimits(max_lexer_states=_MAX_LEXER_STATES, verbose_errors=False)
        return llguidance.LLMatcher(
            self.vocabulary.tokens, self._source, log_level=0, limits=limits
        )


def fill(state: llguidance.LLMatcher, row: MaskRow) -> None:
    """Write the mask of the tokens that may follow."""
    state.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)


def _source(form: StructuredOutputs) -> str:
    """The form in llguidance's language."""
    matcher = llguidance.LLMatcher
    if form.regex is not None:
        return matcher.grammar_from_regex(form.regex)
    if form.choice is not None:
        choices = (json.dumps(choice, ensure_ascii=False) for choice in form.choice)
        return matcher.grammar_from_lark("start: " + " | ".join(choices))
    if form.grammar is not None:
        return matcher.grammar_from_lark(_lark(form) if form.is_gbnf else form.grammar)
    schema = _ANY_OBJECT if form.json_object else form.text
    try:
        return matcher.grammar_from_json_schema(
            schema, defaults={"whitespace_pattern": _JSON_WHITE_SPACE}
        )
    except ValueError as error:
        raise _bad(form.kind, str(error)) from None


def _lark(form: StructuredOutputs) -> str:
    try:
        return gbnf_to_lark(form.text)
    except Exception as error:  # the converter raises bare Exception for what it does not know
        raise _bad(form.kind, str(error) or type(error).__name__) from None


def _require_no_error(kind: str, state: llguidance.LLMatcher) -> None:
    if state.is_error():
        raise _bad(kind, state.get_error())


def _bad(kind: str, reason: str) -> ValidationError:
    name = f"structured_outputs.{kind}"
    return ValidationError(
        f"{name} cannot be served: {shortened(reason)}", parameter=name, value=None
    )


def shortened(reason: str) -> str:
    """llguidance's reason, on one line and without what it says of its own insides."""
    reason = reason.partition("<non-verbose/>")[0].partition("<backtrace>")[0]
    reason = " ".join(reason.split())
    if len(reason) > _MAX_REASON_CHARACTERS:
        reason = reason[:_MAX_REASON_CHARACTERS] + "..."
    return reason
