"""Host side of sampling: what a request contributes, and how a step's arrays are joined."""

import numpy as np
import pytest

from flowkv_jax.engine.sampling_batch import (
    SamplingBatcher,
    SamplingFlags,
    SamplingInputs,
    SamplingMode,
    logprobs_bucket,
    width_bucket,
)
from flowkv_jax.engine.sampling_state import SamplingState, child_seed, tokenize_bad_words
from flowkv_jax.errors import ValidationError
from flowkv_jax.sampling_params import SamplingParams

VOCAB = 1000
INF = float("inf")


def state(prompt=(1, 2, 3), output=(), seed=0, eos=(2,), bad_words=(), **params):
    return SamplingState(
        SamplingParams(**params),
        token_ids=[*prompt, *output],
        num_prompt_tokens=len(prompt),
        seed=seed,
        eos_token_ids=eos,
        bad_word_ids=bad_words,
    )


def build(states, padded_rows=None, batcher=None):
    batcher = batcher or SamplingBatcher(VOCAB)
    return batcher.build(states, [s.num_tokens for s in states], padded_rows or len(states))


def given_arrays(inputs):
    return {name for name, array in vars(inputs).items() if array is not None}


def test_greedy_batch_sends_nothing():
    inputs, flags = build([state(temperature=0), state(temperature=0, top_k=5)], 4)
    assert inputs == SamplingInputs()
    assert flags == SamplingFlags(SamplingMode.GREEDY, None)


def test_plain_batch_sends_no_filters_and_pads_with_greedy_rows():
    inputs, flags = build([state(seed=(7 << 32) + 5), state(temperature=0)], 4)
    assert flags.mode is SamplingMode.PLAIN
    assert given_arrays(inputs) == {"temperature", "seed", "position"}
    assert inputs.temperature.tolist() == [1, 0, 0, 0]
    assert inputs.seed.tolist() == [[7, 5], [0, 0], [0, 0], [0, 0]]
    assert inputs.position.tolist() == [3, 3, 0, 0]


def test_filters_that_keep_everything_are_off():
    inputs, flags = build([state(top_k=VOCAB, top_p=0.9), state(min_p=0.5, top_k=7)], 3)
    assert flags.mode is SamplingMode.FILTERED
    assert inputs.top_k.tolist() == [0, 7, 0]
    np.testing.assert_allclose(inputs.top_p, [0.9, 1, 1])
    np.testing.assert_allclose(inputs.min_p, [0, 0.5, 0])
    assert build([state(temperature=0, top_k=7)])[1].mode is SamplingMode.GREEDY


def test_types_are_those_of_the_device():
    inputs, _ = build(
        [
            state(top_k=3, repetition_penalty=2, logit_bias={1: 1}),
            state(allowed_token_ids=[4, 5]),
        ]
    )
    given = {name: array for name, array in vars(inputs).items() if name != "may_follow"}
    types = {name: array.dtype.name for name, array in given.items()}
    assert types.pop("seed") == "uint32"
    assert types.pop("has_allowed") == "bool"
    integers = {"top_k", "position", "seen_ids", "bias_ids", "allowed_ids"}
    assert {name for name, kind in types.items() if kind == "int32"} == integers
    assert {kind for name, kind in types.items() if name not in integers} == {"float32"}


def test_penalties_name_each_token_once_with_its_output_count():
    states = [
        state(prompt=(5, 5, 6), output=(6, 7, 7), repetition_penalty=2),
        state(prompt=(5, 5, 6), output=(6, 7, 7), presence_penalty=1),
        state(),
    ]
    inputs, _ = build(states)
    assert inputs.seen_ids[0, :4].tolist() == [5, 6, 7, VOCAB]
    assert inputs.output_counts[0, :4].tolist() == [0, 1, 2, 0]
    # Without a repetition penalty the prompt does not matter.
    assert inputs.seen_ids[1, :3].tolist() == [6, 7, VOCAB]
    assert (inputs.seen_ids[2] == VOCAB).all()
    assert inputs.repetition.tolist() == [2, 1, 1]


def test_counts_grow_with_appended_tokens():
    appended = state(prompt=(1,), repetition_penalty=2)
    output = [int(token) for token in np.random.default_rng(0).integers(0, 300, 500)]
    for token_id in output:
        appended.append(token_id)
    ids, counts = appended.seen()
    wanted = {1: 0} | {token: output.count(token) for token in output}
    assert dict(zip(ids.tolist(), counts.tolist(), strict=True)) == wanted
    moved = state(prompt=(1,), output=output, repetition_penalty=2)
    assert [a.tolist() for a in moved.seen()] == [a.tolist() for a in appended.seen()]


def test_arrays_given_out_do_not_change_when_the_request_goes_on():
    row = state(frequency_penalty=1)
    batcher = SamplingBatcher(VOCAB)
    row.append(7)
    before, _ = build([row], batcher=batcher)
    kept = before.output_counts.copy()
    row.append(7)
    after, _ = build([row], batcher=batcher)
    assert (before.output_counts == kept).all()
    assert after.output_counts[0, 0] == 2
    assert after.frequency is before.frequency


def test_min_tokens_masks_ends_until_enough():
    row = state(min_tokens=2, stop_token_ids=[9], eos=(2, 4))
    assert not row.needs_host_tokens
    assert row.bias(3) == {2: -INF, 4: -INF, 9: -INF}
    assert row.bias(4) == {2: -INF, 4: -INF, 9: -INF}
    assert row.bias(5) == {}
    ignoring = state(min_tokens=2, stop_token_ids=[9], ignore_eos=True)
    assert ignoring.bias(3) == {9: -INF}


def test_min_tokens_counts_tokens_still_in_flight():
    row = state(min_tokens=2, temperature=0)
    batcher = SamplingBatcher(VOCAB)
    assert batcher.build([row], [4], 1)[0].bias_ids is not None
    assert batcher.build([row], [5], 1)[0] == SamplingInputs()


def test_bad_words_forbid_the_token_that_would_complete_them():
    row = state(bad_words=[(5,), (6, 7), (6, 6, 8)])
    assert row.needs_host_tokens
    assert row.bias(3) == {5: -INF}
    row.append(6)
    assert row.bias(4) == {5: -INF, 7: -INF}
    row.append(6)
    assert row.bias(5) == {5: -INF, 7: -INF, 8: -INF}
    row.append(1)
    assert row.bias(6) == {5: -INF}


def test_forbidding_beats_a_bias():
    assert state(logit_bias={5: 100}, bad_words=[(5,)]).bias(3) == {5: -INF}


def test_something_is_always_left_to_sample():
    with pytest.raises(ValidationError, match="allowed_token_ids"):
        state(allowed_token_ids=[2], min_tokens=1)
    with pytest.raises(ValidationError, match="allowed_token_ids"):
        state(allowed_token_ids=[5, 6], bad_words=[(5,), (6,)])
    row = state(allowed_token_ids=[5], bad_words=[(5, 5)])
    row.append(5)
    assert row.bias(4) == {}


@pytest.mark.parametrize(
    ("params", "needs"),
    [
        ({}, False),
        ({"logit_bias": {1: 1}, "min_tokens": 3, "allowed_token_ids": [3]}, False),
        ({"presence_penalty": 0.1}, True),
        ({"frequency_penalty": 0.1}, True),
        ({"repetition_penalty": 1.1}, True),
    ],
)
def test_which_requests_keep_the_host_from_running_ahead(params, needs):
    assert state(**params).needs_host_tokens is needs


def test_running_ahead_of_needed_tokens_is_a_bug_of_ours():
    with pytest.raises(RuntimeError, match="row 0"):
        SamplingBatcher(VOCAB).build([state(presence_penalty=1)], [4], 1)


def test_same_members_share_their_arrays_and_cannot_be_written():
    states = [state(seed=i, top_k=4) for i in range(3)]
    batcher = SamplingBatcher(VOCAB)
    first, _ = build(states, 4, batcher)
    for row in states:
        row.append(1)
    second, _ = build(states, 4, batcher)
    assert second.temperature is first.temperature
    assert second.position.tolist() == [4, 4, 4, 0]
    assert first.position.tolist() == [3, 3, 3, 0]
    with pytest.raises(ValueError, match="read-only"):
        first.temperature[0] = 2
    third, _ = build(states[::-1], 4, batcher)
    assert third.seed[0, 1] == 2


def test_memberships_kept_are_bounded():
    batcher = SamplingBatcher(VOCAB)
    for seed in range(100):
        build([state(seed=seed)], batcher=batcher)
    assert len(batcher._memberships) <= 8


def test_logprobs_flag_is_the_largest_wish():
    assert build([state(temperature=0), state(temperature=0)])[1].num_logprobs is None
    assert build([state(logprobs=0), state()])[1].num_logprobs == 0
    assert build([state(logprobs=2), state(logprobs=6)])[1].num_logprobs == 20
    assert build([state(logprobs=-1)])[1].num_logprobs == VOCAB


def test_buckets():
    counts = [0, 1, 2, 5, 6, 20, 21, 700, 1000]
    assert [logprobs_bucket(c, VOCAB) for c in counts] == [0, 1, 5, 5, 20, 20, 32, 1000, 1000]
    assert logprobs_bucket(6, 10) == 8
    assert [width_bucket(w, VOCAB) for w in (1, 16, 17, 300, 1000)] == [16, 16, 64, 1000, 1000]


def test_child_seeds():
    seeds = [child_seed(seed, index) for seed in (-1, 0, 1, 2**63 - 1) for index in range(64)]
    assert child_seed(42, 0) == 42
    assert len(set(seeds)) == len(seeds)
    assert all(-(2**63) <= seed < 2**63 for seed in seeds)
    assert child_seed(42, 1) == child_seed(42, 1)


def test_bad_words_are_tokenised_bare_and_after_a_space():
    def encode(text):
        return [ord(character) for character in text]

    assert tokenize_bad_words(["ab", " ab", "c"], encode) == (
        (97, 98),
        (32, 97, 98),
        (99,),
        (32, 99),
    )
    with pytest.raises(ValidationError, match="at most 128"):
        tokenize_bad_words([f"w{i}" for i in range(65)], encode)
