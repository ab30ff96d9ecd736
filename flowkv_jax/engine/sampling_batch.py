"""The arrays and flags of one step's sampling, joined from the states of its requests.

What no row needs is None, and is neither sent nor compiled. Arrays once handed out are never
written again (the device may read a NumPy buffer in place, later), so what depends on the batch's
membership alone is built once and handed out until the membership changes.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from flowkv_jax.engine.grammar import mask_words
from flowkv_jax.engine.sampling_state import SamplingState
from flowkv_jax.sampling_params import SamplingParams

FloatArray = npt.NDArray[np.float32]
IntArray = npt.NDArray[np.int32]

LOGPROBS_BUCKETS = (0, 1, 5, 20)
_MEMBERSHIPS_KEPT = 8


class SamplingMode(enum.Enum):
    """Which sampler is compiled."""

    GREEDY = enum.auto()
    """Every row takes its most likely token."""
    PLAIN = enum.auto()
    """Some row draws; no row filters."""
    FILTERED = enum.auto()
    """Some row draws with top_k, top_p or min_p."""


@dataclass(frozen=True)
class SamplingFlags:
    """The static part of a step's sampling: a part of the key of the compiled step.

    Attributes:
        num_logprobs: alternatives returned for each token (K, a bucket); None for no logprobs.
    """

    mode: SamplingMode = SamplingMode.GREEDY
    num_logprobs: int | None = None


@dataclass(frozen=True)
class SamplingInputs:
    """The arrays of a step's sampling; NumPy on the host, JAX arrays inside the compiled step.

    `seen_ids` and `bias_ids` name a token at most once a row. Rows shorter than the width are
    filled with V, the vocabulary size, which names no token. Padding rows are
    greedy and without constraints.

    Attributes:
        temperature, top_k, top_p, min_p: [B]; 0.0, 0, 1.0, 0.0 have no effect (and temperature
            0.0 is greedy). The first is None when every row is greedy, the others when no row
            filters.
        seed: uint32 [B, 2], high and low word of the request's seed.
        position: int32 [B], position of the token to be sampled. None, like `seed`, when every row
            is greedy.
        seen_ids: int32 [B, U], distinct tokens of the sequence that penalties touch.
        output_counts: float32 [B, U], occurrences in the output; 0 for tokens of the prompt alone.
        presence, frequency, repetition: float32 [B]. None, like the two above, when no row has
            penalties.
        bias_ids: int32 [B, E]
        bias_values: float32 [B, E], added to the logits; -inf forbids a token.
        allowed_ids: int32 [B, A], the only tokens of a row that may be sampled.
        has_allowed: bool [B], whether `allowed_ids` means anything for the row.
        may_follow: uint32 [B, ceil(V / 32)], a bit for each token, the lowest first: what the form
            of the row's output allows next. None when no row has a form.
    """

    temperature: FloatArray | None = None
    top_k: IntArray | None = None
    top_p: FloatArray | None = None
    min_p: FloatArray | None = None
    seed: npt.NDArray[np.uint32] | None = None
    position: IntArray | None = None
    seen_ids: IntArray | None = None
    output_counts: FloatArray | None = None
    presence: FloatArray | None = None
    frequency: FloatArray | None = None
    repetition: FloatArray | None = None
    bias_ids: IntArray | None = None
    bias_values: FloatArray | None = None
    allowed_ids: IntArray | None = None
    has_allowed: npt.NDArray[np.bool_] | None = None
    may_follow: npt.NDArray[np.uint32] | None = None


@dataclass(frozen=True)
class _Membership:
    """What depends only on which states are in which rows."""

    flags: SamplingFlags
    inputs: SamplingInputs
    penalty_rows: tuple[int, ...]
    bias_rows: tuple[int, ...]
    host_token_rows: tuple[int, ...]
    grammar_rows: tuple[int, ...]


class SamplingBatcher:
    """Builds the arrays of one step after the other.

    Args:
        vocab_size: V, the number of logits.
    """

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._memberships: dict[tuple[object, ...], _Membership] = {}

    def build(
        self, states: Sequence[SamplingState], positions: Sequence[int], padded_rows: int
    ) -> tuple[SamplingInputs, SamplingFlags]:
        """Arrays and flags for a step in which row i samples for `states[i]`.

        Args:
            positions: of the token each row samples, tokens still in flight counted.
            padded_rows: B, at least `len(states)`.
        """
        membership = self._membership(states, padded_rows)
        changes: dict[str, npt.NDArray[Any]] = {}
        if membership.flags.mode is not SamplingMode.GREEDY:
            position = np.zeros(padded_rows, np.int32)
            position[: len(states)] = positions
            changes["position"] = position
        for row in membership.host_token_rows:
            if states[row].num_tokens != positions[row]:
                raise RuntimeError(
                    f"row {row}: position {positions[row]} is sampled before the host has read "
                    f"the tokens before it (it has {states[row].num_tokens})"
                )
        if membership.grammar_rows:  # before the biases, for it tells which answers are complete
            changes["may_follow"] = self._may_follow(states, membership.grammar_rows, padded_rows)
        if membership.penalty_rows:
            seen = {row: states[row].seen() for row in membership.penalty_rows}
            changes["seen_ids"], changes["output_counts"] = self._ragged(seen, padded_rows)
        if membership.bias_rows:
            found = {row: states[row].bias(positions[row]) for row in membership.bias_rows}
            pairs = {row: (list(bias), list(bias.values())) for row, bias in found.items() if bias}
            if pairs:
                changes["bias_ids"], changes["bias_values"] = self._ragged(pairs, padded_rows)
        inputs = membership.inputs
        return (replace(inputs, **changes) if changes else inputs), membership.flags

    def _membership(self, states: Sequence[SamplingState], padded_rows: int) -> _Membership:
        key = (padded_rows, *states)
        found = self._memberships.pop(key, None)
        if found is None:
            found = self._new_membership(states, padded_rows)
            while len(self._memberships) >= _MEMBERSHIPS_KEPT:
                del self._memberships[next(iter(self._memberships))]
        self._memberships[key] = found
        return found

    def _new_membership(self, states: Sequence[SamplingState], padded_rows: int) -> _Membership:
        mode = SamplingMode.GREEDY
        if any(state.temperature > 0 for state in states):
            is_filtered = any(state.is_filtered for state in states)
            mode = SamplingMode.FILTERED if is_filtered else SamplingMode.PLAIN
        penalty_rows = tuple(row for row, s in enumerate(states) if s.params.has_penalties)
        arrays: dict[str, npt.NDArray[Any]] = {}
        if mode is not SamplingMode.GREEDY:
            arrays |= _draw_columns(states, padded_rows)
        if mode is SamplingMode.FILTERED:
            arrays |= _filter_columns(states, padded_rows, self._vocab_size)
        if penalty_rows:
            arrays |= _penalty_columns(states, padded_rows)
        arrays |= self._allowed_columns(states, padded_rows)
        for array in arrays.values():
            array.flags.writeable = False
        return _Membership(
            flags=SamplingFlags(mode, self._logprobs_bucket(states)),
            inputs=SamplingInputs(**arrays),
            penalty_rows=penalty_rows,
            bias_rows=tuple(row for row, s in enumerate(states) if s.has_bias),
            host_token_rows=tuple(row for row, s in enumerate(states) if s.needs_host_tokens),
            grammar_rows=tuple(row for row, s in enumerate(states) if s.matcher is not None),
        )

    def _may_follow(
        self, states: Sequence[SamplingState], rows: Sequence[int], padded_rows: int
    ) -> npt.NDArray[np.uint32]:
        shape = (padded_rows, mask_words(self._vocab_size))
        may_follow = np.full(shape, 0xFFFFFFFF, np.uint32)
        for row in rows:
            matcher = states[row].matcher
            if matcher is not None:
                matcher.fill(may_follow[row])
        return may_follow

    def _allowed_columns(
        self, states: Sequence[SamplingState], padded_rows: int
    ) -> dict[str, npt.NDArray[Any]]:
        rows = {row: s.allowed_ids for row, s in enumerate(states) if s.allowed_ids is not None}
        if not rows:
            return {}
        allowed_ids, _ = self._ragged({row: (ids, 0) for row, ids in rows.items()}, padded_rows)
        has_allowed = np.zeros(padded_rows, np.bool_)
        has_allowed[list(rows)] = True
        return {"allowed_ids": allowed_ids, "has_allowed": has_allowed}

    def _ragged(
        self, rows: Mapping[int, tuple[npt.ArrayLike, npt.ArrayLike]], padded_rows: int
    ) -> tuple[IntArray, FloatArray]:
        """Rows of (ids, values), padded on the right to a common bucketed width with (V, 0)."""
        lengths = {row: np.size(ids) for row, (ids, _) in rows.items()}
        width = width_bucket(max(lengths.values()), self._vocab_size)
        ids_array = np.full((padded_rows, width), self._vocab_size, np.int32)
        values_array = np.zeros((padded_rows, width), np.float32)
        for row, (ids, values) in rows.items():
            ids_array[row, : lengths[row]] = ids
            values_array[row, : lengths[row]] = values
        return ids_array, values_array

    def _logprobs_bucket(self, states: Sequence[SamplingState]) -> int | None:
        counts = [state.params.num_logprobs(self._vocab_size) for state in states]
        wanted = [count for count in counts if count is not None]
        return logprobs_bucket(max(wanted), self._vocab_size) if wanted else None


def width_bucket(width: int, vocab_size: int) -> int:
    """Smallest of 16, 64, 256, 1024, ... that holds `width`, but no wider than the vocabulary.

    Steps of four: every width is one more compiled step, and padding costs little.
    """
    bucket = 16
    while bucket < width:
        bucket *= 4
    return min(bucket, vocab_size)


def logprobs_bucket(count: int, vocab_size: int) -> int:
    """Number of alternatives to compute so that `count` are among them."""
    for bucket in LOGPROBS_BUCKETS:
        if count <= bucket <= vocab_size:
            return bucket
    return min(1 << (count - 1).bit_length(), vocab_size) if count else 0


def _column(
    values: Iterable[float], dtype: type[np.generic], padded_rows: int, padding: float = 0
) -> npt.NDArray[Any]:
    column = list(values)
    column += [padding] * (padded_rows - len(column))
    return np.array(column, dtype)


def _draw_columns(states: Sequence[SamplingState], padded_rows: int) -> dict[str, npt.NDArray[Any]]:
    seed = np.zeros((padded_rows, 2), np.uint32)
    seed[: len(states)] = [state.seed_words for state in states]
    temperature = _column((s.temperature for s in states), np.float32, padded_rows)
    return {"temperature": temperature, "seed": seed}


def _filter_columns(
    states: Sequence[SamplingState], padded_rows: int, vocab_size: int
) -> dict[str, npt.NDArray[Any]]:
    top_k = (s.top_k if s.top_k < vocab_size else 0 for s in states)
    return {
        "top_k": _column(top_k, np.int32, padded_rows),
        "top_p": _column((s.top_p for s in states), np.float32, padded_rows, 1),
        "min_p": _column((s.min_p for s in states), np.float32, padded_rows),
    }


def _penalty_columns(
    states: Sequence[SamplingState], padded_rows: int
) -> dict[str, npt.NDArray[Any]]:
    params = [state.params for state in states]
    return {
        "presence": _column((p.presence_penalty for p in params), np.float32, padded_rows),
        "frequency": _column((p.frequency_penalty for p in params), np.float32, padded_rows),
        "repetition": _column((_repetition(p) for p in params), np.float32, padded_rows, 1),
    }


def _repetition(params: SamplingParams) -> float:
    """Far beyond any use, and far enough from float32's ends that no logit becomes infinite."""
    return min(max(float(params.repetition_penalty), 1e-30), 1e30)
