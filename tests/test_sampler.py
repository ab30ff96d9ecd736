"""The sampler against a float64 NumPy oracle that sorts, and against its own promises."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowkv_jax.engine import sampler
from flowkv_jax.engine.sampling_batch import (
    SamplingBatcher,
    SamplingFlags,
    SamplingInputs,
    SamplingMode,
)
from flowkv_jax.engine.sampling_state import SamplingState
from flowkv_jax.sampling_params import SamplingParams

VOCAB = 600  # not a multiple of the sampler's chunk


@pytest.fixture(autouse=True, scope="module")
def strict_jax():
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        yield


sample = jax.jit(sampler.sample, static_argnames="flags")
draw_weights = jax.jit(sampler._inverse_cdf)


def random_logits(seed, rows, vocab=VOCAB, scale=3.0):
    return np.random.default_rng(seed).normal(0, scale, (rows, vocab)).astype(np.float32)


def state(params, prompt=(1, 2, 3), output=(), seed=0, eos=(2,), bad_words=()):
    return SamplingState(
        params,
        token_ids=[*prompt, *output],
        num_prompt_tokens=len(prompt),
        seed=seed,
        eos_token_ids=eos,
        bad_word_ids=bad_words,
    )


def run(logits, states, positions=None, padded_rows=None):
    rows = len(states) if padded_rows is None else padded_rows
    padded = np.zeros((rows, logits.shape[1]), np.float32)
    padded[: len(states)] = logits
    positions = [s.num_tokens for s in states] if positions is None else positions
    inputs, flags = SamplingBatcher(logits.shape[1]).build(states, positions, rows)
    return sample(padded, inputs, flags=flags)


def oracle_adjust(logits, params, prompt, output, eos=(2,), bad_tokens=()):
    """Allowed ids and biases, then penalties, in float64."""
    x = logits.astype(np.float64).copy()
    if params.allowed_token_ids is not None:
        mask = np.ones(len(x), bool)
        mask[list(params.allowed_token_ids)] = False
        x[mask] = -np.inf
    for token, value in params.bias.items():
        x[token] += value
    forbidden = set(bad_tokens)
    if len(output) < params.min_tokens:
        forbidden |= set(params.stop_ids) | (set() if params.ignore_eos else set(eos))
    x[list(forbidden)] = -np.inf
    for token in set(prompt) | set(output):
        repetition = params.repetition_penalty
        x[token] = x[token] / repetition if x[token] > 0 else x[token] * repetition
    for token in set(output):
        x[token] -= params.presence_penalty + params.frequency_penalty * output.count(token)
    return x


def oracle_probabilities(x, params):
    """Temperature, min_p, top_k, top_p by sorting, in float64."""
    x = x / params.effective_temperature
    p = np.exp(x - x.max())
    keep = p >= params.min_p
    if 0 < params.effective_top_k < len(x):
        keep &= x >= np.sort(x)[-params.effective_top_k]
    p = np.where(keep, p, 0)
    order = np.argsort(-p, kind="stable")
    mass_before = np.cumsum(p[order]) - p[order]
    kept = order[mass_before < params.top_p * p.sum()]
    nucleus = np.zeros_like(p)
    nucleus[kept] = p[kept]
    return nucleus / nucleus.sum()


@pytest.mark.parametrize("vocab", [1, 7, 255, 256, 257, 1024])
def test_argmax_is_the_lowest_index_of_the_largest(vocab):
    values = np.random.default_rng(0).integers(0, 5, (6, vocab)).astype(np.float32)
    values[5] = -np.inf
    assert jax.jit(sampler.argmax)(values).tolist() == values.argmax(-1).tolist()


def test_ordered_integers_keep_the_order_of_floats():
    floats = np.array([-np.inf, -3e38, -1.0, -1e-45, 0.0, 1e-45, 0.5, 1.0, np.inf], np.float32)
    ordered = np.asarray(sampler._to_ordered(jnp.asarray(floats)))
    assert (np.diff(ordered.astype(np.int64)) > 0).all()
    assert np.asarray(sampler._from_ordered(jnp.asarray(ordered))).tolist() == floats.tolist()


@pytest.mark.parametrize("mode", list(SamplingMode), ids=lambda mode: mode.name)
@pytest.mark.parametrize("vocab", [31, 64, VOCAB])
def test_nothing_is_sampled_that_may_not_follow(vocab, mode):
    generator = np.random.default_rng(vocab)
    logits = random_logits(1, 4, vocab)
    may_follow = generator.random((4, vocab)) < 0.1
    may_follow[1] = True
    may_follow[2:, -1] = True
    may_follow[3, :-1] = False
    words = -(-vocab // 32)
    bits = np.ones((4, 32 * words), bool)  # bits past the vocabulary mean nothing
    bits[:, :vocab] = may_follow
    packed = np.packbits(bits, bitorder="little").view(np.uint32).reshape(4, words)
    drawing = SamplingParams(top_k=5 if mode is SamplingMode.FILTERED else 0)
    params = SamplingParams(temperature=0) if mode is SamplingMode.GREEDY else drawing
    states = [state(params, seed=row) for row in range(4)]
    plain, flags = SamplingBatcher(vocab).build(states, [3] * 4, 4)
    assert flags.mode is mode
    held = dataclasses.replace(plain, may_follow=packed)
    flags = dataclasses.replace(flags, num_logprobs=1)
    output = sample(logits, held, flags=flags)
    token_ids = np.asarray(output.token_ids)
    assert may_follow[np.arange(4), token_ids].all()
    assert token_ids[3] == vocab - 1
    if mode is SamplingMode.GREEDY:
        assert token_ids.tolist() == np.where(may_follow, logits, -np.inf).argmax(-1).tolist()
    free = sample(logits, plain, flags=flags)
    assert free.token_ids[1] == output.token_ids[1]
    np.testing.assert_array_equal(output.top_logprobs, free.top_logprobs)


@given(st.integers(0, 2**32 - 1), st.integers(1, 40), st.booleans())
@settings(max_examples=40, deadline=None)
def test_top_k_keeps_the_k_largest_and_their_ties(seed, top_k, with_ties):
    logits = random_logits(seed, 3, 40)
    if with_ties:
        logits = np.round(logits)
    top_ks = jnp.asarray([top_k, 0, 1], jnp.int32)
    kept = np.asarray(_top_k(logits, top_ks))
    assert (kept[0] == (logits[0] >= np.sort(logits[0])[-top_k])).all()
    assert kept[1].all()
    assert (kept[2] == (logits[2] == logits[2].max())).all()


@jax.jit
def _top_k(logits, top_ks):
    highest = jnp.max(logits, -1, keepdims=True)
    return logits >= sampler._top_k_threshold(logits, highest, top_ks)[:, None]


@given(
    st.integers(0, 2**32 - 1), st.floats(2.0**-20, 1.0, width=32), st.sampled_from([0.1, 3.0, 30.0])
)
@settings(max_examples=40, deadline=None)
def test_top_p_keeps_the_smallest_set_that_reaches_the_sum(seed, top_p, scale):
    logits = random_logits(seed, 1, 40, scale).astype(np.float64)
    weights = np.exp(logits - logits.max()).astype(np.float32)
    threshold = _top_p(weights, jnp.full(1, top_p, jnp.float32))
    kept = weights[0] >= np.asarray(threshold)[0]
    exact = weights[0].astype(np.float64)
    wanted, slack = top_p * exact.sum(), 1e-5 * exact.sum()
    assert exact[kept].sum() >= wanted - slack
    assert kept.any()
    if top_p < 1:
        assert exact[kept].sum() - exact[kept].min() < wanted + slack
    else:
        assert kept.all()


_top_p = jax.jit(sampler._top_p_threshold)


FILTERS = [
    {},
    {"temperature": 0.3},
    {"top_k": 1},
    {"top_k": 7},
    {"top_k": 10_000},
    {"top_p": 0.5},
    {"top_p": 1e-6},
    {"min_p": 0.2},
    {"min_p": 1.0},
    {"top_k": 20, "top_p": 0.8},
    {"top_k": 20, "top_p": 0.9, "min_p": 0.02, "temperature": 1.7},
]


@pytest.mark.parametrize("filters", FILTERS, ids=str)
def test_distribution_is_the_oracle_s(filters):
    """Chi-square over 4,096 positions of one seed; nothing outside the support is ever drawn."""
    draws, batch = 4096, 512
    params = SamplingParams(**filters)
    logits = random_logits(5, 1)
    expected = oracle_probabilities(logits[0], params)
    tokens = []
    for start in range(0, draws, batch):
        row = state(params, seed=11)
        positions = list(range(start, start + batch))
        tokens.append(run(np.repeat(logits, batch, 0), [row] * batch, positions).token_ids)
    counts = np.bincount(np.concatenate(tokens), minlength=VOCAB)
    assert counts[expected == 0].sum() == 0
    common = expected * draws >= 5
    observed = np.append(counts[common], counts[~common].sum())
    wanted = np.append(expected[common] * draws, expected[~common].sum() * draws)
    observed, wanted = observed[wanted > 0], wanted[wanted > 0]
    chi_square = ((observed - wanted) ** 2 / wanted).sum()
    freedom = len(wanted) - 1
    # Five standard deviations of a chi-square distribution.
    assert chi_square <= freedom + 5 * np.sqrt(2 * freedom) + 1e-3


MIXED = [
    SamplingParams(temperature=0),
    SamplingParams(),
    SamplingParams(top_k=5),
    SamplingParams(top_p=0.7, temperature=0.8),
    SamplingParams(min_p=0.1, repetition_penalty=1.3),
    SamplingParams(logit_bias={4: 3}, presence_penalty=1),
    SamplingParams(allowed_token_ids=[5, 6, 7]),
    SamplingParams(temperature=0, frequency_penalty=2, min_tokens=9, logprobs=3),
]


def test_a_row_does_not_depend_on_its_batch():
    """Alone, in batches of 4 and 8, at another row, next to other modes: the same tokens."""
    logits = random_logits(1, len(MIXED))
    states = [
        state(params, prompt=(1, 2, 3), output=(9, 9, 4), seed=100 + i)
        for i, params in enumerate(MIXED)
    ]
    alone = [int(run(logits[i : i + 1], [states[i]]).token_ids[0]) for i in range(len(states))]
    assert run(logits, states).token_ids.tolist() == alone
    assert run(logits[::-1], states[::-1]).token_ids.tolist() == alone[::-1]
    assert run(logits[2:5], states[2:5], padded_rows=4).token_ids.tolist()[:3] == alone[2:5]
    assert run(logits[:4], states[:4], padded_rows=8).token_ids.tolist()[:4] == alone[:4]


def test_draw_depends_on_seed_and_position_only():
    logits = np.zeros((1, VOCAB), np.float32)
    token = partial(run, logits)
    first = token([state(SamplingParams(), seed=1)], [5]).token_ids
    assert token([state(SamplingParams(), seed=1)], [5]).token_ids == first
    assert token([state(SamplingParams(), seed=1)], [6]).token_ids != first
    assert token([state(SamplingParams(), seed=2)], [5]).token_ids != first
    assert token([state(SamplingParams(), seed=1 + (1 << 32))], [5]).token_ids != first
    assert token([state(SamplingParams(), seed=-1)], [5]).token_ids != first


def test_seeds_keep_their_meaning_between_versions():
    """Stored answers of seeded requests must not change by accident."""
    logits = np.zeros((1, VOCAB), np.float32)
    tokens = [
        int(run(logits, [state(SamplingParams(), seed=42)], [p]).token_ids[0]) for p in range(4)
    ]
    assert tokens == [318, 436, 400, 233]


@given(
    st.integers(0, 2**32 - 1),
    st.sampled_from([1, 5, 256, 600]),
    st.sampled_from([0.0, 1e-30, 0.5, 1 - 2**-24]),
    st.floats(0, 1),
)
@settings(max_examples=60, deadline=None)
def test_draw_never_lands_on_a_zero_weight(seed, vocab, uniform, zero_share):
    """Also at the ends, where rounded sums may fall short of the target."""
    rng = np.random.default_rng(seed)
    weights = rng.random((1, vocab)).astype(np.float32) ** 8
    weights[rng.random((1, vocab)) < zero_share] = 0
    weights[0, rng.integers(vocab)] = 1
    token, is_drawn = draw_weights(weights, np.full(1, uniform, np.float32))
    assert bool(is_drawn[0])
    assert weights[0, int(token[0])] > 0


def test_uniform_at_its_ends_takes_first_and_last_weight():
    weights = np.zeros((2, 700), np.float32)
    weights[:, [3, 400, 690]] = 0.1
    token, _ = draw_weights(weights, np.array([0, 1], np.float32))
    assert token.tolist() == [3, 690]


def test_broken_logits_still_give_a_token_of_the_vocabulary():
    logits = np.full((3, VOCAB), np.nan, np.float32)
    logits[1] = -np.inf
    logits[2, 7] = np.inf
    for params in (
        SamplingParams(temperature=0),
        SamplingParams(),
        SamplingParams(top_p=0.5, top_k=9),
    ):
        tokens = run(logits, [state(params)] * 3).token_ids
        assert ((tokens >= 0) & (tokens < VOCAB)).all()


CONSTRAINTS = [
    {"repetition_penalty": 1.5},
    {"presence_penalty": 1.5, "frequency_penalty": -0.5},
    {"repetition_penalty": 0.7, "presence_penalty": -2, "frequency_penalty": 2},
    {"logit_bias": {3: 100, 500: -5}},
    {"min_tokens": 10, "stop_token_ids": [8]},
    {"min_tokens": 10, "stop_token_ids": [8], "ignore_eos": True},
    {"allowed_token_ids": [8, 9, 10, 599]},
    {"allowed_token_ids": [0], "logit_bias": {1: 100}},
    {"logit_bias": {4: -3, 9: 2}, "repetition_penalty": 2, "frequency_penalty": 1},
]


@pytest.mark.parametrize("constraint", CONSTRAINTS, ids=str)
def test_adjusted_logits_are_the_oracle_s(constraint):
    prompt, output, bad_tokens = (1, 2, 3, 3, 599), (4, 9, 9, 1), (7,)
    params = SamplingParams(**constraint)
    logits = random_logits(3, 2)
    states = [state(params, prompt, output, bad_words=[(7,)]), state(SamplingParams())]
    inputs, _ = SamplingBatcher(VOCAB).build(states, [s.num_tokens for s in states], 2)
    adjusted = _adjust(logits, inputs)
    wanted = oracle_adjust(logits[0], params, prompt, output, bad_tokens=bad_tokens)
    np.testing.assert_allclose(adjusted[0], wanted, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(adjusted[1], logits[1])


@jax.jit
def _adjust(logits, inputs):
    return sampler._apply_penalties(sampler._apply_bias(logits, inputs), inputs)


def test_logprobs_are_raw_and_ranked():
    logits = random_logits(4, 2)
    chosen = int(np.argsort(-logits[0])[4])
    params = SamplingParams(temperature=0, logit_bias={chosen: 100}, logprobs=3)
    output = run(logits, [state(params), state(SamplingParams(temperature=0))])
    log_softmax = logits - np.log(np.exp(logits.astype(np.float64)).sum(-1, keepdims=True))
    assert int(output.token_ids[0]) == chosen
    assert int(output.rank[0]) == 5
    assert int(output.rank[1]) == 1
    np.testing.assert_allclose(output.logprob[0], log_softmax[0, chosen], atol=1e-5)
    assert output.top_ids.shape == (2, 5)
    assert output.top_ids[0].tolist() == np.argsort(-logits[0])[:5].tolist()
    np.testing.assert_allclose(output.top_logprobs[0], np.sort(log_softmax[0])[:-6:-1], atol=1e-5)


def test_without_alternatives_only_the_token_s_own_logprob():
    logits = random_logits(4, 1)
    output = run(logits, [state(SamplingParams(temperature=0, logprobs=0))])
    assert output.logprob is not None
    assert output.top_ids is None
    assert run(logits, [state(SamplingParams(temperature=0))]).logprob is None


def test_prompt_logprobs():
    logits = random_logits(6, 4)
    targets = np.array([0, 5, 599, int(logits[3].argmax())], np.int32)
    output = jax.jit(sampler.prompt_logprobs, static_argnums=2)(logits, targets, 1)
    log_softmax = logits - np.log(np.exp(logits.astype(np.float64)).sum(-1, keepdims=True))
    np.testing.assert_allclose(output.logprob, log_softmax[np.arange(4), targets], atol=1e-5)
    assert int(output.rank[3]) == 1
    assert output.top_ids[:, 0].tolist() == logits.argmax(-1).tolist()


def test_greedy_step_compiles_nothing_but_the_maximum():
    """No random numbers, no exponentials, no sort in the cheap path."""
    flags = SamplingFlags(SamplingMode.GREEDY)
    lowered = jax.jit(sampler.sample, static_argnames="flags").lower(
        jnp.zeros((4, VOCAB), jnp.float32), SamplingInputs(), flags=flags
    )
    text = lowered.as_text()
    for operation in ("exponential", ".sort", "while", "top_k", "threefry", "scatter"):
        assert operation not in text
