"""What one request contributes to the sampling of each of its tokens.

Most of it never changes (temperature, seed); some depends only on how many tokens there are (the
min_tokens mask); some on which tokens there are (penalties, bad words of several tokens, the form
that the output must have). Only the last kind keeps the host from choosing tokens a step ahead of
those it has read, and `needs_host_tokens` says so.

Positions are indices in the whole sequence: the first sampled token of a request has position
`num_prompt_tokens`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np
import numpy.typing as npt

from flowkv_jax.engine.grammar_matcher import GrammarMatcher
from flowkv_jax.errors import ValidationError
from flowkv_jax.sampling_params import SamplingParams

MAX_BAD_WORD_SEQUENCES = 128
MAX_BAD_WORD_CHARACTERS = 4096
_UINT64 = (1 << 64) - 1


def child_seed(seed: int, index: int) -> int:
    """Seed of answer `index` of a request with `n` answers; answer 0 has the request's own.

    SplitMix64 of seed and index (Steele, Lea and Flood, 2014), cut to 63 bits.
    """
    if index == 0:
        return seed
    word = (seed + index * 0x9E3779B97F4A7C15) & _UINT64
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & _UINT64
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & _UINT64
    return (word ^ (word >> 31)) >> 1


def tokenize_bad_words(
    bad_words: Sequence[str], encode: Callable[[str], Sequence[int]]
) -> tuple[tuple[int, ...], ...]:
    """Token sequences to forbid: each word as it begins a text and as it follows a space.

    Args:
        encode: text -> token ids, without special tokens.

    Raises:
        ValidationError: more than `MAX_BAD_WORD_SEQUENCES`, or a word longer than
            `MAX_BAD_WORD_CHARACTERS`.
    """
    sequences: dict[tuple[int, ...], None] = {}
    for word in bad_words:
        if len(word) > MAX_BAD_WORD_CHARACTERS:
            raise ValidationError(
                f"bad_words holds one of {len(word)} characters; at most {MAX_BAD_WORD_CHARACTERS}",
                parameter="bad_words",
                value=len(word),
            )
        bare = word.lstrip() or word
        for text in (bare, " " + bare):
            token_ids = tuple(encode(text))
            if token_ids:
                sequences[token_ids] = None
    if len(sequences) > MAX_BAD_WORD_SEQUENCES:
        raise ValidationError(
            f"bad_words make {len(sequences)} token sequences; at most {MAX_BAD_WORD_SEQUENCES}",
            parameter="bad_words",
            value=list(bad_words),
        )
    return tuple(sequences)


class SamplingState:
    """What one request contributes to a step's sampling.

    Args:
        token_ids: prompt, then what has been generated (a request that was moved or preempted).
        seed: resolved; see `child_seed`.
        eos_token_ids: the model's end-of-sequence tokens.
        bad_word_ids: from `tokenize_bad_words`.
        matcher: at the beginning of the form that the output must have.

    Raises:
        ValidationError: nothing is left to sample (`allowed_token_ids` against `bad_words` or
            `min_tokens`).
    """

    def __init__(
        self,
        params: SamplingParams,
        *,
        token_ids: Sequence[int],
        num_prompt_tokens: int,
        seed: int,
        eos_token_ids: Iterable[int] = (),
        bad_word_ids: Sequence[tuple[int, ...]] = (),
        matcher: GrammarMatcher | None = None,
    ) -> None:
        self.params = params
        self.matcher = matcher
        self.num_prompt_tokens = num_prompt_tokens
        self.temperature = params.effective_temperature
        self.top_k = params.effective_top_k
        self.top_p = params.effective_top_p
        self.min_p = params.effective_min_p
        self.seed_words = ((seed & _UINT64) >> 32, seed & 0xFFFFFFFF)
        self.is_filtered = self.top_k > 0 or self.top_p < 1 or self.min_p > 0
        self.allowed_ids = (
            None if params.allowed_ids is None else np.asarray(params.allowed_ids, np.int32)
        )
        self._phrases = [ids for ids in bad_word_ids if len(ids) > 1]
        self._tail_length = max((len(ids) - 1 for ids in self._phrases), default=0)
        self.needs_host_tokens = params.has_penalties or bool(self._phrases) or matcher is not None
        self._init_bias(frozenset(eos_token_ids), [ids[0] for ids in bad_word_ids if len(ids) == 1])
        self.has_bias = bool(self._bias) or bool(self._phrases) or params.min_tokens > 0

        self.num_tokens = num_prompt_tokens
        self._tail: list[int] = []
        self._seen = _TokenCounts()
        if params.repetition_penalty != 1:
            self._seen.add_prompt(token_ids[:num_prompt_tokens])
        for token_id in token_ids[num_prompt_tokens:]:
            self.append(token_id)

    def _init_bias(self, eos_token_ids: frozenset[int], bad_tokens: Sequence[int]) -> None:
        params = self.params
        self._bias = {**params.bias, **dict.fromkeys(bad_tokens, -np.inf)}
        ends = params.stop_ids if params.ignore_eos else params.stop_ids | eos_token_ids
        early = ends if params.min_tokens > 0 else frozenset()
        self._early_bias = {**self._bias, **dict.fromkeys(early, -np.inf)}
        if params.allowed_ids is not None:
            forbidden = {token for token, value in self._early_bias.items() if value == -np.inf}
            if forbidden.issuperset(params.allowed_ids):
                raise ValidationError(
                    f"allowed_token_ids={params.allowed_ids!r:.100} leaves nothing to sample: "
                    "bad_words or min_tokens forbid all of it",
                    parameter="allowed_token_ids",
                    value=params.allowed_token_ids,
                )

    def append(self, token_id: int) -> None:
        """Take in a sampled token once the host has read it."""
        self.num_tokens += 1
        if not self.needs_host_tokens:
            return
        if self.matcher is not None:
            self.matcher.accept(token_id)
        if self.params.has_penalties:
            self._seen.add_output(token_id)
        if self._tail_length:
            self._tail.append(token_id)
            del self._tail[: -self._tail_length]

    def seen(self) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]]:
        """Distinct tokens that penalties touch, and how often each is in the output."""
        return self._seen.arrays()

    def bias(self, position: int) -> dict[int, float]:
        """Values to add to the logits of the token at `position`; -inf forbids."""
        early = position - self.num_prompt_tokens < self.params.min_tokens
        if self.matcher is not None and self.matcher.is_complete:
            early = False  # nothing but an end can follow
        bias = self._early_bias if early else self._bias
        banned = [ids[-1] for ids in self._phrases if self._ends_with(ids[:-1])]
        if not banned:
            return bias
        joined = {**bias, **dict.fromkeys(banned, -np.inf)}
        allowed = self.params.allowed_ids
        if allowed is not None and all(joined.get(token) == -np.inf for token in allowed):
            # A phrase would leave nothing to sample; the harder constraint wins.
            return bias
        return joined

    def _ends_with(self, token_ids: tuple[int, ...]) -> bool:
        return tuple(self._tail[-len(token_ids) :]) == token_ids


class _TokenCounts:
    """Distinct tokens in order of first sight with their output counts, in growing arrays."""

    def __init__(self) -> None:
        self._index: dict[int, int] = {}
        self._ids = np.empty(64, np.int32)
        self._counts = np.zeros(64, np.float32)

    def add_prompt(self, token_ids: Sequence[int]) -> None:
        for token_id in dict.fromkeys(token_ids):
            self._slot(token_id)

    def add_output(self, token_id: int) -> None:
        slot = self._slot(token_id)  # may replace the arrays
        self._counts[slot] += 1

    def arrays(self) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]]:
        used = len(self._index)
        return self._ids[:used], self._counts[:used]

    def _slot(self, token_id: int) -> int:
        slot = self._index.setdefault(token_id, len(self._index))
        if slot == len(self._ids):
            self._ids = np.concatenate([self._ids, np.empty_like(self._ids)])
            self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
        self._ids[slot] = token_id
        return slot
