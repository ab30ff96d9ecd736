"""Compiled grammars of one model, kept by their text.

What a front refuses (`check`) no node hears of. A node compiles again, once for each text, on a
thread of its own: steps of others go on, and the sequence waits for it only when its first token is
to be sampled.
"""

from __future__ import annotations

import hashlib
import logging
import threading
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from copy import copy
from dataclasses import dataclass
from functools import cached_property, partial

from flowkv_jax.engine.grammar import Grammar, Vocabulary
from flowkv_jax.engine.grammar_matcher import GrammarMatcher
from flowkv_jax.errors import FlowKVError, GenerationError, UnprocessableError
from flowkv_jax.load import ModelInfo
from flowkv_jax.structured_outputs import StructuredOutputs
from flowkv_jax.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

MAX_GRAMMARS = 64
MAX_TEXT_BYTES = 1 << 20


class GrammarCache:
    """The most recently used grammars, at most `MAX_GRAMMARS` of `MAX_TEXT_BYTES` together.

    Safe from several threads. Refusals are kept too: asking again costs nothing.

    Args:
        vocab_size: V, the number of logits.
        eos_token_ids: the model's end tokens.
    """

    def __init__(
        self, tokenizer: Tokenizer, *, vocab_size: int, eos_token_ids: Sequence[int]
    ) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_token_ids = tuple(eos_token_ids)
        self._lock = threading.Lock()
        self._vocabulary_lock = threading.Lock()
        self._kept: OrderedDict[bytes, _Kept] = OrderedDict()
        self._num_bytes = 0

    @classmethod
    def of(cls, tokenizer: Tokenizer, model_info: ModelInfo) -> GrammarCache:
        """For a model as it is served."""
        return cls(
            tokenizer,
            vocab_size=model_info.vocab_size,
            eos_token_ids=model_info.eos_token_ids,
        )

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def num_bytes(self) -> int:
        """Of the texts of all that are kept."""
        return self._num_bytes

    def prepare_soon(self) -> None:
        """Make the vocabulary beside whatever else is done, so that no sequence waits for it."""
        threading.Thread(target=self._prepare, name="flowkv-vocabulary", daemon=True).start()

    def check(self, form: StructuredOutputs) -> None:
        """Compile on this thread what was not compiled yet.

        Raises:
            ValidationError: see `Grammar`.
            UnprocessableError: see `Vocabulary`.
        """
        grammar, is_new = self._find(form)
        if is_new:
            self._compile(form, grammar)
        error = grammar.exception()
        if error is not None:
            raise copy(error)  # each time another: a traceback grows whenever it is raised

    def matcher(self, form: StructuredOutputs) -> GrammarMatcher:
        """A sequence at the beginning of `form`. Returns at once; what `check` would raise is its
        `failure`, from its first `fill` on."""
        grammar, is_new = self._find(form)
        if is_new:
            threading.Thread(
                target=self._compile, args=(form, grammar), name="flowkv-grammar", daemon=True
            ).start()
        return GrammarMatcher(grammar, partial(self._renew, form, grammar))

    def _find(self, form: StructuredOutputs) -> tuple[Future[Grammar], bool]:
        """The grammar, and whether the caller has to see to it that it is compiled."""
        key = _key(form)
        with self._lock:
            kept = self._kept.get(key)
            if kept is not None:
                self._kept.move_to_end(key)
                return kept.grammar, False
            kept = _Kept(Future(), len(form.text.encode()))
            self._kept[key] = kept
            self._num_bytes += kept.num_bytes
            while len(self._kept) > MAX_GRAMMARS or self._num_bytes > MAX_TEXT_BYTES:
                self._drop(next(iter(self._kept)))
            return kept.grammar, True

    def _compile(self, form: StructuredOutputs, grammar: Future[Grammar]) -> None:
        try:
            grammar.set_result(Grammar(form, self._made_vocabulary()))
        except FlowKVError as error:
            grammar.set_exception(error)
        except BaseException as error:  # also Rust's panics: whoever waits must hear of it
            logger.exception("a grammar was not compiled")
            grammar.set_exception(GenerationError(f"structured_outputs failed: {error!r:.300}"))
            if isinstance(error, KeyboardInterrupt | SystemExit):  # says nothing of the grammar
                self._renew(form, grammar)
                raise

    def _renew(self, form: StructuredOutputs, grammar: Future[Grammar]) -> None:
        key = _key(form)
        with self._lock:
            if key in self._kept and self._kept[key].grammar is grammar:
                self._drop(key)

    def _drop(self, key: bytes) -> None:
        self._num_bytes -= self._kept.pop(key).num_bytes

    def _prepare(self) -> None:
        with suppress(UnprocessableError):  # every request with a form hears of it
            self._made_vocabulary()

    def _made_vocabulary(self) -> Vocabulary:
        with self._vocabulary_lock:
            return self._vocabulary

    @cached_property
    def _vocabulary(self) -> Vocabulary:
        return Vocabulary(
            self._tokenizer, vocab_size=self._vocab_size, eos_token_ids=self._eos_token_ids
        )


@dataclass(frozen=True)
class _Kept:
    grammar: Future[Grammar]
    num_bytes: int


def _key(form: StructuredOutputs) -> bytes:
    return hashlib.sha256(f"{form.kind}\0{form.text}".encode()).digest()
