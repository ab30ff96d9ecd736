"""Messages of `vllm.grpc.engine` <-> values: what 0 means, and what is told of probabilities."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from smg_grpc_proto.generated import vllm_engine_pb2 as pb

from flowkv_jax.errors import UnprocessableError, ValidationError
from flowkv_jax.outputs import CompletionOutput, Logprob, RequestOutput
from flowkv_jax.rpc import vllm_wire
from flowkv_jax.sampling_params import SamplingParams


def params_of(**fields: Any) -> SamplingParams:
    return vllm_wire.sampling_params_from_wire(pb.SamplingParams(**fields))


class TestSamplingParams:
    def test_nothing_given_leaves_all_to_the_model(self) -> None:
        params = params_of()
        assert params.given_fields <= {
            "max_tokens",
            "detokenize",
            "skip_special_tokens",
            "output_kind",
        }
        assert params.max_tokens is None
        assert (params.n, params.top_p, params.repetition_penalty) == (1, 1.0, 1.0)
        assert not params.detokenize
        assert params.with_defaults({"temperature": 0.6}).temperature == 0.6

    def test_zero_is_a_value_where_a_field_is_optional(self) -> None:
        params = params_of(temperature=0, seed=0, logprobs=0, prompt_logprobs=0)
        assert params.is_greedy and params.effective_seed == 0
        assert params.with_defaults({"temperature": 0.6}).is_greedy
        assert (params.logprobs, params.prompt_logprobs) == (0, 0)
        for name in ("max_tokens", "truncate_prompt_tokens"):
            with pytest.raises(ValidationError, match=name):
                params_of(**{name: 0})

    def test_every_field_arrives(self) -> None:
        params = params_of(
            temperature=0.7, top_p=0.9, top_k=5, min_p=0.1, frequency_penalty=0.3,
            presence_penalty=-0.3, repetition_penalty=1.1, max_tokens=9, min_tokens=2,
            stop=["a", "b"], stop_token_ids=[7], ignore_eos=True, n=2, logprobs=3,
            prompt_logprobs=1, seed=-1, include_stop_str_in_output=True, logit_bias={4: -1.5},
            truncate_prompt_tokens=-1, skip_special_tokens=False,
        )  # fmt: skip
        wanted = SamplingParams(
            temperature=0.7, top_p=0.9, top_k=5, min_p=0.1, frequency_penalty=0.3,
            presence_penalty=-0.3, repetition_penalty=1.1, max_tokens=9, min_tokens=2,
            stop=["a", "b"], stop_token_ids=[7], ignore_eos=True, n=2, logprobs=3,
            prompt_logprobs=1, seed=-1, include_stop_str_in_output=True, logit_bias={4: -1.5},
            truncate_prompt_tokens=-1, skip_special_tokens=False, detokenize=True,
            output_kind=params.output_kind,
        )  # fmt: skip
        assert params == wanted
        assert params.output_kind.value == "delta"

    @given(st.integers(1, 200_000))
    def test_decimals_stay_what_they_were(self, value: int) -> None:
        meant = value / 100_000
        assert params_of(temperature=meant).temperature == meant

    def test_text_is_made_only_for_stop_strings(self) -> None:
        assert params_of(stop=["END"]).detokenize
        assert not params_of(stop_token_ids=[2], skip_special_tokens=False).detokenize

    @pytest.mark.parametrize(
        "field, value, wanted",
        [
            ("json_schema", '{"type": "object"}', {"json": '{"type": "object"}'}),
            ("regex", "[ab]+", {"regex": "[ab]+"}),
            ("grammar", 'start: "a"', {"grammar": 'start: "a"'}),
            ("json_object", True, {"json_object": True}),
            ("choice", pb.ChoiceConstraint(choices=["a", "b"]), {"choice": ["a", "b"]}),
        ],
    )
    def test_constraints(self, field: str, value: Any, wanted: dict[str, Any]) -> None:
        expected = SamplingParams.from_mapping({"structured_outputs": wanted}).structured_outputs
        assert expected is not None
        assert params_of(**{field: value}).structured_outputs == expected

    def test_a_prompt_that_is_computed_for_another_server(self) -> None:
        """smg's first request of two asks for one token, whichever, and keeps the constraint."""
        message = pb.SamplingParams(max_tokens=1, min_tokens=1, ignore_eos=True, json_object=True)
        params = vllm_wire.sampling_params_from_wire(message, decodes_elsewhere=True)
        assert params.structured_outputs is not None and not params.ignore_eos
        message.ClearField("json_object")
        assert vllm_wire.sampling_params_from_wire(message, decodes_elsewhere=True).ignore_eos

    def test_constraints_that_are_none(self) -> None:
        with pytest.raises(UnprocessableError, match="structural_tag"):
            params_of(structural_tag="x")
        with pytest.raises(ValidationError):
            params_of(json_object=False)
        with pytest.raises(ValidationError):
            params_of(choice=pb.ChoiceConstraint())

    def test_long_lists(self) -> None:
        with pytest.raises(ValidationError, match="stop_token_ids has"):
            params_of(stop_token_ids=range((1 << 18) + 1))


def output(**changes: Any) -> RequestOutput:
    """Two positions: in the first the sampled token is the likeliest, in the second the third."""
    logprobs = [
        {7: Logprob(-0.1, 1), 3: Logprob(-2.0, 2)},
        {8: Logprob(-3.0, 3), 5: Logprob(-0.2, 1), 6: Logprob(-1.5, 2)},
    ]
    answer = CompletionOutput(
        0, "", [], delta_token_ids=[7, 8], logprobs=logprobs, finish_reason="length"
    )
    prompt_logprobs = [None, {2: Logprob(-0.5, 2), 9: Logprob(-0.25, 1)}]
    values: dict[str, Any] = {"prompt_logprobs": prompt_logprobs, **changes}
    return RequestOutput("a", None, [1, 2], [answer], finished=True, **values)


def messages(params: SamplingParams, *, is_stream: bool) -> list[pb.GenerateResponse]:
    writer = vllm_wire.AnswerWriter(params, 10, is_stream=is_stream)
    return list(writer.messages(output()))


class TestLogprobs:
    @pytest.mark.parametrize("is_stream", [True, False])
    def test_the_likeliest_come_first_and_positions_stay_aligned(self, is_stream: bool) -> None:
        params = SamplingParams(logprobs=2, prompt_logprobs=1)
        first, *rest = messages(params, is_stream=is_stream)
        holder = first.chunk if is_stream else first.complete
        out, prompt = holder.output_logprobs, holder.input_logprobs
        assert list(out.token_ids) == [7, 8]
        assert list(out.token_logprobs) == pytest.approx([-0.1, -3.0])
        assert [list(top.token_ids) for top in out.top_logprobs] == [[7, 3], [5, 6]]
        assert list(prompt.token_ids) == [1, 2]
        assert [p.HasField("value") for p in prompt.token_logprobs] == [False, True]
        assert prompt.token_logprobs[1].value == pytest.approx(-0.5)
        assert [list(top.token_ids) for top in prompt.top_logprobs] == [[], [9]]
        # What a stream has told is not told again.
        assert not any(r.complete.HasField("output_logprobs") for r in rest)

    def test_none_unless_asked_for(self) -> None:
        for response in messages(SamplingParams(), is_stream=True):
            assert not response.chunk.HasField("output_logprobs")
            assert not response.chunk.HasField("input_logprobs")

    def test_without_alternatives(self) -> None:
        first, _ = messages(SamplingParams(logprobs=0, prompt_logprobs=0), is_stream=True)
        assert not first.chunk.output_logprobs.top_logprobs
        assert not first.chunk.input_logprobs.top_logprobs


def test_a_stop_token_and_an_end_without_tokens() -> None:
    writer = vllm_wire.AnswerWriter(SamplingParams(), 10, is_stream=True)
    ended = CompletionOutput(0, "", [], finish_reason="stop", stop_reason=2)
    (only,) = writer.messages(RequestOutput("a", None, [1], [ended], finished=True))
    assert only.complete.matched_token_id == 2
    assert (only.complete.finish_reason, only.complete.completion_tokens) == ("stop", 0)


def test_default_params() -> None:
    assert vllm_wire.default_params_to_wire(SamplingParams()) == ""
    recommended = SamplingParams().with_defaults({"temperature": 0.6, "top_k": 20, "max_tokens": 5})
    assert vllm_wire.default_params_to_wire(recommended) == '{"temperature": 0.6, "top_k": 20}'
