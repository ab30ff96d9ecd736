"""Choosing the next token of every row, traced into the compiled step.

Order of operations, vLLM's: raw log-probabilities are taken; what the form of an output does not
allow, and other ids that are not allowed, become impossible; biases; penalties; then a greedy row
takes its most likely token, and any other row divides by temperature, filters by min_p, top_k and
top_p (over what top_k left) and draws.

Nothing sorts the vocabulary. A filter is a threshold, found by bisection over the ordered integers
behind float32 (at most 32 counting passes, exact; equal values stay or go together). A draw is one
uniform number a row, carried through the cumulative distribution: first over chunks of the
vocabulary, then inside one chunk. The number comes from (seed, position) and nothing else, so a
request draws the same token alone, in any batch, in any row, after preemption and after a move.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import jax
import jax.numpy as jnp
from jax import lax

from flowkv_jax.engine.sampling_batch import SamplingFlags, SamplingInputs, SamplingMode

Array: TypeAlias = jax.Array

_CHUNK = 256
_NEGATIVE_INFINITY = -jnp.inf

jax.tree_util.register_dataclass(
    SamplingInputs,
    data_fields=[field.name for field in dataclasses.fields(SamplingInputs)],
    meta_fields=[],
)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SamplerOutput:
    """Tokens and, where asked for, their log-probabilities under the raw distribution.

    Attributes:
        token_ids: int32 [B]
        logprob: float32 [B], of the token in `token_ids`; None without logprobs.
        rank: int32 [B], 1 for the most likely token.
        top_ids: int32 [B, K], most likely first; None when K is 0.
        top_logprobs: float32 [B, K]
    """

    token_ids: Array
    logprob: Array | None = None
    rank: Array | None = None
    top_ids: Array | None = None
    top_logprobs: Array | None = None


def sample(logits_BV: Array, inputs: SamplingInputs, *, flags: SamplingFlags) -> SamplerOutput:
    """Choose a token for every row. To be called inside a jitted function.

    Args:
        logits_BV: float32.
        inputs: see `SamplingInputs`.
        flags: static.
    """
    adjusted_BV = _apply_penalties(_apply_bias(logits_BV, inputs), inputs)
    token_ids = argmax(adjusted_BV)
    if flags.mode is not SamplingMode.GREEDY:
        token_ids = _draw_rows(adjusted_BV, token_ids, inputs, flags.mode)
    return token_logprobs(logits_BV, token_ids, flags.num_logprobs)


def prompt_logprobs(logits_TV: Array, target_ids_T: Array, num_logprobs: int) -> SamplerOutput:
    """Log-probabilities of prompt tokens: row t of `logits_TV` predicts `target_ids_T[t]`.

    The result has T rows, and the targets as its `token_ids`.
    """
    return token_logprobs(logits_TV, target_ids_T, num_logprobs)


def token_logprobs(logits_BV: Array, token_ids_B: Array, num_logprobs: int | None) -> SamplerOutput:
    """Log-probability and rank of one token a row, and of the `num_logprobs` most likely ones."""
    if num_logprobs is None:
        return SamplerOutput(token_ids_B)
    log_norm_B1 = jax.nn.logsumexp(logits_BV, axis=-1, keepdims=True)
    chosen_B1 = _pick(logits_BV, token_ids_B)[:, None]
    rank_B = 1 + jnp.sum((logits_BV > chosen_B1).astype(jnp.int32), axis=-1)
    output = SamplerOutput(token_ids_B, (chosen_B1 - log_norm_B1)[:, 0], rank_B)
    if num_logprobs == 0:
        return output
    top_logits_BK, top_ids_BK = lax.top_k(logits_BV, num_logprobs)
    return dataclasses.replace(output, top_ids=top_ids_BK, top_logprobs=top_logits_BK - log_norm_B1)


def argmax(x_BV: Array) -> Array:
    """Lowest index of the largest value, int32 [B].

    In two levels: on CPU XLA's argmax over a whole row is about thirty times slower than its
    maximum, because it does not vectorise.
    """
    chunks_BCW = _chunked(x_BV, _NEGATIVE_INFINITY)
    chunk_B = jnp.argmax(jnp.max(chunks_BCW, axis=-1), axis=-1).astype(jnp.int32)
    within_B = jnp.argmax(_take_chunk(chunks_BCW, chunk_B), axis=-1).astype(jnp.int32)
    return chunk_B * _CHUNK + within_B


def _apply_bias(logits_BV: Array, inputs: SamplingInputs) -> Array:
    rows_B1 = jnp.arange(logits_BV.shape[0], dtype=jnp.int32)[:, None]
    if inputs.may_follow is not None:
        may_follow_BV = _unpacked(jnp.asarray(inputs.may_follow), logits_BV.shape[-1])
        logits_BV = jnp.where(may_follow_BV, logits_BV, _NEGATIVE_INFINITY)
    if inputs.allowed_ids is not None and inputs.has_allowed is not None:
        is_allowed_BV = jnp.zeros(logits_BV.shape, jnp.bool_)
        is_allowed_BV = is_allowed_BV.at[rows_B1, inputs.allowed_ids].set(True, mode="drop")
        is_allowed_BV |= ~jnp.asarray(inputs.has_allowed)[:, None]
        logits_BV = jnp.where(is_allowed_BV, logits_BV, _NEGATIVE_INFINITY)
    if inputs.bias_ids is not None:
        logits_BV = logits_BV.at[rows_B1, inputs.bias_ids].add(inputs.bias_values, mode="drop")
    return logits_BV


def _unpacked(words_BC: Array, size: int) -> Array:
    """The first `size` bits of each row, the lowest bit of a word first, bool."""
    shifts_11W = jnp.arange(32, dtype=jnp.uint32)[None, None, :]
    bits_BCW = (words_BC[:, :, None] >> shifts_11W) & jnp.uint32(1)
    return bits_BCW.reshape(words_BC.shape[0], -1)[:, :size] != 0


def _apply_penalties(logits_BV: Array, inputs: SamplingInputs) -> Array:
    """Repetition over prompt and output first, then frequency and presence over the output."""
    if inputs.seen_ids is None or inputs.output_counts is None:
        return logits_BV
    presence_B1, frequency_B1, repetition_B1 = (
        jnp.asarray(column)[:, None]
        for column in (inputs.presence, inputs.frequency, inputs.repetition)
    )
    rows_B1 = jnp.arange(logits_BV.shape[0], dtype=jnp.int32)[:, None]
    counts_BU = jnp.asarray(inputs.output_counts)
    seen_BU = logits_BV.at[rows_B1, inputs.seen_ids].get(mode="fill", fill_value=0)
    seen_BU = jnp.where(seen_BU > 0, seen_BU / repetition_B1, seen_BU * repetition_B1)
    seen_BU -= frequency_B1 * counts_BU + presence_B1 * (counts_BU > 0).astype(jnp.float32)
    return logits_BV.at[rows_B1, inputs.seen_ids].set(seen_BU, mode="drop")


def _draw_rows(
    logits_BV: Array, greedy_ids_B: Array, inputs: SamplingInputs, mode: SamplingMode
) -> Array:
    """A drawn token where the row's temperature is above 0, else the greedy one."""
    temperature_B = jnp.asarray(inputs.temperature)
    is_greedy_B = temperature_B == 0
    scaled_BV = logits_BV / jnp.where(is_greedy_B, 1.0, temperature_B)[:, None]
    max_B1 = jnp.max(scaled_BV, axis=-1, keepdims=True)
    if mode is SamplingMode.FILTERED:
        lowest_B1 = jnp.maximum(
            max_B1 + jnp.log(jnp.asarray(inputs.min_p))[:, None],
            _top_k_threshold(scaled_BV, max_B1, jnp.asarray(inputs.top_k))[:, None],
        )
        weights_BV = jnp.where(scaled_BV >= lowest_B1, jnp.exp(scaled_BV - max_B1), 0.0)
        lowest_B1 = _top_p_threshold(weights_BV, jnp.asarray(inputs.top_p))[:, None]
        weights_BV = jnp.where(weights_BV >= lowest_B1, weights_BV, 0.0)
    else:
        weights_BV = jnp.exp(scaled_BV - max_B1)
    uniform_B = _uniform(jnp.asarray(inputs.seed), jnp.asarray(inputs.position))
    drawn_B, is_drawn_B = _inverse_cdf(weights_BV, uniform_B)
    # Nothing can be drawn from a row without a finite weight (a model that returned NaN): such a
    # row gets its greedy id, which is at least inside the vocabulary.
    return jnp.where(is_drawn_B & ~is_greedy_B, drawn_B, greedy_ids_B)


def _top_k_threshold(x_BV: Array, max_B1: Array, top_k_B: Array) -> Array:
    """Threshold [B] that the k largest values (and equals of the k-th) reach; -inf where k is 0."""
    is_off_B = top_k_B == 0
    lowest_B = jnp.full_like(max_B1[:, 0], _NEGATIVE_INFINITY)

    def keeps_enough(threshold_B: Array) -> tuple[Array, Array]:
        count_B = jnp.sum((x_BV >= threshold_B[:, None]).astype(jnp.float32), axis=-1)
        wanted_B = top_k_B.astype(jnp.float32)
        return count_B >= wanted_B, count_B == wanted_B

    return _largest_threshold(keeps_enough, lowest_B, max_B1[:, 0], is_off_B)


def _top_p_threshold(weights_BV: Array, top_p_B: Array) -> Array:
    """Largest threshold [B] above which the weights still sum to `top_p_B` of their total.

    All weights below (1 - top_p) total / V sum to less than (1 - top_p) total, so no threshold
    below that is needed; half of it leaves room for rounding.
    """
    wanted_B = top_p_B * jnp.sum(weights_BV, axis=-1)
    lowest_B = (1.0 - top_p_B) * (0.5 / weights_BV.shape[-1])

    def keeps_enough(threshold_B: Array) -> tuple[Array, Array]:
        kept_BV = jnp.where(weights_BV >= threshold_B[:, None], weights_BV, 0.0)
        mass_B = jnp.sum(kept_BV, axis=-1)
        return mass_B >= wanted_B, jnp.zeros_like(mass_B, dtype=jnp.bool_)

    return _largest_threshold(keeps_enough, lowest_B, jnp.max(weights_BV, axis=-1), top_p_B >= 1.0)


def _largest_threshold(
    keeps_enough: Callable[[Array], tuple[Array, Array]],
    lowest_B: Array,
    highest_B: Array,
    is_off_B: Array,
) -> Array:
    """Threshold in [lowest, highest] that keeps no more than needed, by bisection over float32.

    Args:
        keeps_enough: thresholds [B] -> (enough is kept; exactly enough is kept, no need to look
            further). The first falls in the threshold and holds for `lowest_B`.
        is_off_B: rows that take `lowest_B`.
    """

    def is_open(bounds: tuple[Array, Array]) -> Array:
        low_B, high_B = bounds
        return jnp.any(high_B - low_B > 1)

    def halve(bounds: tuple[Array, Array]) -> tuple[Array, Array]:
        low_B, high_B = bounds
        middle_B = low_B + (high_B - low_B) // 2
        is_enough_B, is_settled_B = keeps_enough(_from_ordered(middle_B))
        low_B = jnp.where(is_enough_B, middle_B, low_B)
        high_B = jnp.where(is_enough_B, high_B, middle_B)
        return low_B, jnp.where(is_settled_B, low_B + 1, high_B)

    low_B = _to_ordered(lowest_B)
    high_B = jnp.where(is_off_B, low_B, jnp.maximum(low_B, _to_ordered(highest_B))) + 1
    return _from_ordered(lax.while_loop(is_open, halve, (low_B, high_B))[0])


def _to_ordered(x: Array) -> Array:
    """float32 -> uint32 in the same order (sign bit flipped, negatives complemented)."""
    bits = lax.bitcast_convert_type(x, jnp.uint32)
    sign = jnp.uint32(1 << 31)
    return jnp.where(bits >= sign, ~bits, bits | sign)


def _from_ordered(ordered: Array) -> Array:
    """Inverse of `_to_ordered`."""
    sign = jnp.uint32(1 << 31)
    bits = jnp.where(ordered >= sign, ordered ^ sign, ~ordered)
    return lax.bitcast_convert_type(bits, jnp.float32)


def _uniform(seed_B2: Array, position_B: Array) -> Array:
    """One number in [0, 1) a row, 24 random bits, from (seed, position) alone.

    The seed's two words are the Threefry key; the generator is named so that no process-wide
    setting changes what a seed means.
    """

    def random_bits(seed_2: Array, position: Array) -> Array:
        key = jax.random.wrap_key_data(seed_2, impl="threefry2x32")
        return jax.random.bits(jax.random.fold_in(key, position), (), jnp.uint32)

    bits_B: Array = jax.vmap(random_bits)(seed_B2, position_B)
    uniform_B: Array = (bits_B >> 8).astype(jnp.float32) * jnp.float32(2.0**-24)
    return uniform_B


def _inverse_cdf(weights_BV: Array, uniform_B: Array) -> tuple[Array, Array]:
    """Index [B] drawn with probability proportional to its weight, and whether there was one.

    Sums in float32 are inexact, so a target may fall past the last partial sum. Both levels
    therefore choose only among entries with a weight above 0.
    """
    chunks_BCW = _chunked(weights_BV, 0.0)
    sums_BC = jnp.sum(chunks_BCW, axis=-1)
    cumulative_BC = jnp.cumsum(sums_BC, axis=-1)
    target_B = uniform_B * cumulative_BC[:, -1]
    chunk_B = _first_above(cumulative_BC, target_B, sums_BC)
    before_B = _pick(cumulative_BC - sums_BC, chunk_B)
    chunk_BW = _take_chunk(chunks_BCW, chunk_B)
    within_B = _first_above(jnp.cumsum(chunk_BW, axis=-1), target_B - before_B, chunk_BW)
    return chunk_B * _CHUNK + within_B, _pick(chunk_BW, within_B) > 0


def _first_above(cumulative_BX: Array, target_B: Array, weights_BX: Array) -> Array:
    """First index whose cumulative weight exceeds the target, or the last with a weight at all."""
    has_weight_BX = weights_BX > 0
    is_past_BX = (cumulative_BX > target_B[:, None]) & has_weight_BX
    size = weights_BX.shape[-1]
    last_B = size - 1 - jnp.argmax(has_weight_BX[:, ::-1], axis=-1)
    first_B = jnp.argmax(is_past_BX, axis=-1)
    return jnp.where(jnp.any(is_past_BX, axis=-1), first_B, last_B).astype(jnp.int32)


def _chunked(x_BV: Array, padding: float) -> Array:
    """[B, V] -> [B, C, W]: chunks of `_CHUNK`, the last one padded."""
    rows, size = x_BV.shape
    missing = -size % _CHUNK
    if missing:
        x_BV = jnp.pad(x_BV, ((0, 0), (0, missing)), constant_values=padding)
    return x_BV.reshape(rows, -1, _CHUNK)


def _take_chunk(chunks_BCW: Array, chunk_B: Array) -> Array:
    return jnp.take_along_axis(
        chunks_BCW, chunk_B[:, None, None], axis=1, mode="promise_in_bounds"
    )[:, 0]


def _pick(x_BX: Array, index_B: Array) -> Array:
    """One entry of each row."""
    return jnp.take_along_axis(x_BX, index_B[:, None], axis=-1, mode="promise_in_bounds")[:, 0]
