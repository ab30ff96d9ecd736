"""SamplingParams: every bound, every spelling, and what counts as given."""

import dataclasses
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowkv_jax.errors import UnprocessableError, ValidationError
from flowkv_jax.sampling_params import RequestOutputKind, SamplingParams

NAN, INF = math.nan, math.inf


@pytest.mark.parametrize(
    ("name", "bad_values"),
    [
        ("n", [0, -1, 65, True, 1.0, "1", None]),
        ("temperature", [-0.1, 2.01, NAN, INF, -INF, True, "1", None, 10**400]),
        ("top_k", [-2, True, 1.5, NAN, "5"]),
        ("top_p", [0, 0.0, 1.01, -0.5, NAN, True]),
        ("min_p", [-0.01, 1.01, NAN, False]),
        ("presence_penalty", [-2.1, 2.1, NAN, INF, True]),
        ("frequency_penalty", [-2.1, 2.1, NAN, -INF, True]),
        ("repetition_penalty", [0, -1, NAN, INF, True]),
        ("min_tokens", [-1, True, 1.0]),
        ("max_tokens", [0, -1, True, 1.0, "16"]),
        ("seed", [2**63, -(2**63) - 1, True, 0.5]),
        ("logprobs", [-2, True, 1.0]),
        ("prompt_logprobs", [-2, True, 1.0]),
        ("truncate_prompt_tokens", [0, -2, True]),
        ("stop", ["", [""], ["a", ""], [1], 5, ["x"] * 33, b"x"]),
        ("stop_token_ids", [[-1], [True], [1.0], "12", 3, [1] * 129]),
        ("allowed_token_ids", [[], [-1], [False], ["1"]]),
        ("bad_words", ["word", [""], [3], ["x"] * 65]),
        ("logit_bias", [{-1: 1}, {"x": 1}, {1: NAN}, {1: INF}, {1: True}, {"5": 1, 5: 1}, [1]]),
        ("logit_bias", [dict.fromkeys(range(1025), 1.0), {"9" * 50: 1.0}, {1: "1"}]),
        ("ignore_eos", [1, None, "yes"]),
        ("echo", [1, 0]),
        ("detokenize", [1]),
        ("skip_special_tokens", ["true"]),
        ("output_kind", ["delta", 1, None]),
    ],
)
def test_bad_value_is_named(name, bad_values):
    for value in bad_values:
        with pytest.raises(ValidationError) as caught:
            SamplingParams(**{name: value})
        assert caught.value.parameter == name
        assert name in str(caught.value)
        assert len(str(caught.value)) < 400


@pytest.mark.parametrize(
    "values",
    [
        {"n": 64, "temperature": 2},
        {"temperature": 0},
        {"top_k": -1, "top_p": 1, "min_p": 1},
        {"repetition_penalty": 1e-3, "presence_penalty": -2, "frequency_penalty": 2},
        {"seed": -1},
        {"seed": 2**63 - 1, "max_tokens": None, "min_tokens": 10**6},
        {"logprobs": -1, "prompt_logprobs": 0, "truncate_prompt_tokens": -1},
        {"temperature": np.float32(0.5), "top_k": np.int64(3)},
        {"logit_bias": {"5": 1, 6: -300.0}, "stop": ("a", "b"), "stop_token_ids": (1, 1)},
    ],
)
def test_edge_of_every_range_is_accepted(values):
    SamplingParams(**values)


@pytest.mark.parametrize(
    ("values", "parameter"),
    [
        ({"temperature": 0, "n": 2}, "n"),
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens"),
        ({"stop": "x", "detokenize": False}, "stop"),
        ({"echo": True, "detokenize": False}, "echo"),
    ],
)
def test_contradictions(values, parameter):
    with pytest.raises(ValidationError) as caught:
        SamplingParams(**values)
    assert caught.value.parameter == parameter


def test_greedy_has_no_filters_but_keeps_what_was_given():
    params = SamplingParams(temperature=1e-6, top_k=5, top_p=0.5, min_p=0.1)
    assert params.is_greedy
    assert (params.effective_temperature, params.effective_top_k) == (0.0, 0)
    assert (params.effective_top_p, params.effective_min_p) == (1.0, 0.0)
    assert (params.top_k, params.top_p, params.min_p) == (5, 0.5, 0.1)


def test_derived_values():
    params = SamplingParams(
        temperature=0.001,
        top_k=-1,
        seed=-1,
        stop="end",
        stop_token_ids=[3, 3],
        allowed_token_ids=[9, 2, 9],
        logit_bias={"4": 1000, 5: -1000.0},
        logprobs=-1,
    )
    assert params.effective_temperature == 0.01
    assert params.effective_top_k == 0
    assert params.effective_seed is None
    assert params.stop_strings == ("end",)
    assert params.stop_ids == {3}
    assert params.allowed_ids == (2, 9)
    assert params.bias == {4: 100.0, 5: -100.0}
    assert params.num_logprobs(50) == 50
    assert params.num_prompt_logprobs(50) is None
    assert not params.has_penalties
    assert SamplingParams(frequency_penalty=0.1).has_penalties


def test_is_frozen():
    params = SamplingParams()
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.n = 2


@pytest.mark.parametrize(
    ("values", "parameter"),
    [
        ({"stop_token_ids": [100]}, "stop_token_ids"),
        ({"allowed_token_ids": [1, 100]}, "allowed_token_ids"),
        ({"logit_bias": {"100": 1}}, "logit_bias"),
        ({"logprobs": 21}, "logprobs"),
        ({"prompt_logprobs": -1}, "prompt_logprobs"),
    ],
)
def test_validate_for_the_model(values, parameter):
    with pytest.raises(ValidationError) as caught:
        SamplingParams(**values).validate_for(vocab_size=100, max_logprobs=20)
    assert caught.value.parameter == parameter


def test_validate_for_accepts_the_bounds():
    SamplingParams(
        stop_token_ids=[99], allowed_token_ids=[0], logit_bias={99: 1}, logprobs=20
    ).validate_for(vocab_size=100, max_logprobs=20)
    SamplingParams(logprobs=-1).validate_for(vocab_size=100, max_logprobs=-1)


def test_from_mapping_reads_aliases_and_strings():
    params = SamplingParams.from_mapping(
        {
            "max_new_tokens": 7,
            "min_new_tokens": 2,
            "sampling_seed": 3,
            "no_stop_trim": True,
            "output_kind": "delta",
            "temperature": None,
            "json_schema": None,
        }
    )
    assert (params.max_tokens, params.min_tokens, params.seed) == (7, 2, 3)
    assert params.include_stop_str_in_output
    assert params.output_kind is RequestOutputKind.DELTA
    assert "temperature" not in params.given_fields


def test_from_mapping_max_tokens_none_fills_the_context():
    assert SamplingParams.from_mapping({"max_tokens": None}).max_tokens is None
    assert SamplingParams.from_mapping({}).max_tokens == 16


@pytest.mark.parametrize("name", ["guided_json", "guided_new", "response_format", "structural_tag"])
def test_constraints_that_are_not_served_are_refused_by_name(name):
    with pytest.raises(UnprocessableError, match=name):
        SamplingParams.from_mapping({name: "x"})


def test_unknown_key_is_named_with_a_suggestion():
    with pytest.raises(ValidationError, match="did you mean 'temperature'") as caught:
        SamplingParams.from_mapping({"temprature": 1})
    assert caught.value.parameter == "temprature"
    with pytest.raises(ValidationError) as caught:
        SamplingParams.from_mapping({"x" * 10_000: 1})
    assert len(str(caught.value)) < 200
    with pytest.raises(ValidationError, match="output_kind"):
        SamplingParams.from_mapping({"output_kind": "everything"})


def test_two_spellings_may_agree_and_not_differ():
    same = {"max_tokens": 5, "max_new_tokens": 5}
    assert SamplingParams.from_mapping(same).max_tokens == 5
    with pytest.raises(ValidationError, match="max_tokens"):
        SamplingParams.from_mapping({"max_tokens": 5, "max_new_tokens": 6})
    with pytest.raises(ValidationError, match="max_tokens"):
        SamplingParams.from_mapping({"max_tokens": None, "max_new_tokens": 6})


def test_model_defaults_fill_only_what_was_left_open():
    config = {"temperature": 0.6, "top_p": 0.9, "max_new_tokens": 99, "top_k": None, "bos": 1}
    filled = SamplingParams(temperature=1.0).with_defaults(config)
    assert (filled.temperature, filled.top_p, filled.max_tokens) == (1.0, 0.9, 99)
    assert filled.given_fields == {"temperature"}
    assert SamplingParams().with_defaults({"temperature": 0.6}).temperature == 0.6
    with pytest.raises(ValidationError, match="top_p"):
        SamplingParams().with_defaults({"top_p": 7})


def test_replace_keeps_defaults_filled_in_and_what_counts_as_given():
    params = SamplingParams(n=2).with_defaults({"temperature": 0.6}).replace(max_tokens=3)
    assert (params.n, params.temperature, params.max_tokens) == (2, 0.6, 3)
    assert params.given_fields == {"n", "max_tokens"}


@given(
    st.fixed_dictionaries(
        {},
        optional={
            "n": st.integers(1, 64),
            "temperature": st.floats(0.1, 2),
            "top_p": st.floats(0.1, 1),
            "max_tokens": st.one_of(st.none(), st.integers(10, 100)),
            "min_tokens": st.integers(0, 10),
            "seed": st.integers(-(2**63), 2**63 - 1),
            "stop": st.lists(st.text(min_size=1), max_size=3),
            "logit_bias": st.dictionaries(st.integers(0, 99), st.floats(-100, 100)),
            "output_kind": st.sampled_from([kind.value for kind in RequestOutputKind]),
        },
    )
)
def test_mapping_round_trip(values):
    params = SamplingParams.from_mapping(values)
    again = SamplingParams.from_mapping(params.to_mapping())
    assert again == params
    assert again.given_fields == params.given_fields


@pytest.mark.parametrize("name", ["stop", "bad_words"])
def test_strings_have_a_bound(name: str) -> None:
    SamplingParams(**{name: ["x" * 4096]})
    with pytest.raises(ValidationError, match="4097 characters; at most 4096"):
        SamplingParams(**{name: ["x" * 4097]})
