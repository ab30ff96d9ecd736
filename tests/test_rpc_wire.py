"""Messages say what the values say; the stubs are those of the proto; nothing here loads JAX."""

import ast
import dataclasses
import re
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowkv_jax.load import ModelInfo, NodeLoad
from flowkv_jax.outputs import RequestMetrics
from flowkv_jax.rpc import generate, wire
from flowkv_jax.rpc.flowkv.v1 import flowkv_pb2 as pb
from flowkv_jax.sampling_params import RequestOutputKind, SamplingParams
from flowkv_jax.structured_outputs import StructuredOutputs
from tests.fake_engine import LOAD, MODEL_INFO


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (ModelInfo, pb.GetModelInfoResponse),
        (NodeLoad, pb.GetLoadsResponse),
        (RequestMetrics, pb.RequestMetrics),
    ],
)
def test_messages_have_the_fields_of_the_values(values: type, message: type) -> None:
    fields = {f.name for f in dataclasses.fields(values)}
    if values is NodeLoad:  # figures of one node's hand-offs, which the front door does not show
        fields -= {"num_requests_sending", "num_requests_receiving"}
    assert set(message.DESCRIPTOR.fields_by_name) == fields


def test_sampling_params_have_the_fields_of_the_values() -> None:
    ours = {field.name for field in dataclasses.fields(SamplingParams)}
    theirs = set(pb.SamplingParams.DESCRIPTOR.fields_by_name)
    assert theirs - ours == {"fill_context"}
    assert ours - theirs == {"output_kind"}


def test_every_scalar_parameter_knows_unset_from_zero() -> None:
    for field in pb.SamplingParams.DESCRIPTOR.fields:
        if not field.is_repeated and field.name != "fill_context":
            assert field.has_presence, field.name


def test_model_info_and_loads_come_back() -> None:
    assert wire.model_info_from_wire(wire.model_info_to_wire(MODEL_INFO)) == MODEL_INFO
    assert wire.loads_from_wire(wire.loads_to_wire(LOAD)) == LOAD


FORMS = (
    StructuredOutputs(json={"type": "object"}),
    StructuredOutputs(regex="a+"),
    StructuredOutputs(choice=["yes", "no"]),
    StructuredOutputs(grammar='start: "a"'),
    StructuredOutputs(json_object=True),
)


@st.composite
def sampling_params(draw: st.DrawFn) -> SamplingParams:
    ids = st.lists(st.integers(0, 999), min_size=1, max_size=4)
    words = st.lists(st.text(min_size=1, max_size=5), min_size=1, max_size=3)
    fields = {
        "temperature": st.floats(0.01, 2.0),
        "n": st.integers(1, 4),
        "top_k": st.integers(-1, 50),
        "top_p": st.floats(0.01, 1.0),
        "min_p": st.floats(0.0, 1.0),
        "presence_penalty": st.floats(-2.0, 2.0),
        "frequency_penalty": st.floats(-2.0, 2.0),
        "repetition_penalty": st.floats(0.1, 2.0),
        "logit_bias": st.dictionaries(st.integers(0, 999), st.floats(-100.0, 100.0), max_size=3),
        "allowed_token_ids": ids,
        "bad_words": words,
        "min_tokens": st.just(0),
        "structured_outputs": st.sampled_from(FORMS),
        "max_tokens": st.one_of(st.none(), st.integers(1, 100)),
        "stop": words,
        "stop_token_ids": ids,
        "include_stop_str_in_output": st.booleans(),
        "ignore_eos": st.booleans(),
        "seed": st.integers(-(2**63), 2**63 - 1),
        "logprobs": st.integers(-1, 20),
        "prompt_logprobs": st.integers(-1, 20),
        "echo": st.booleans(),
        "skip_special_tokens": st.booleans(),
        "spaces_between_special_tokens": st.booleans(),
        "truncate_prompt_tokens": st.sampled_from([-1, 1, 7]),
    }
    names = draw(st.sets(st.sampled_from(sorted(fields))))
    if "structured_outputs" in names:  # which says itself where an answer ends
        names.discard("ignore_eos")
    return SamplingParams(**{name: draw(fields[name]) for name in sorted(names)})


@given(params=sampling_params())
def test_sampling_params_come_back(params: SamplingParams) -> None:
    message = wire.sampling_params_to_wire(params)
    message = pb.SamplingParams.FromString(message.SerializeToString())
    back = wire.sampling_params_from_wire(message)
    assert back.output_kind is RequestOutputKind.DELTA
    assert back.given_fields - params.given_fields == {"output_kind"}
    # An empty map is the same as none on the wire.
    expected = params.replace(logit_bias=params.logit_bias or None)
    assert back.replace(output_kind=params.output_kind) == expected


def test_a_lone_stop_string_and_string_keys() -> None:
    params = SamplingParams(stop="END", logit_bias={"7": 1})
    back = wire.sampling_params_from_wire(wire.sampling_params_to_wire(params))
    assert back.stop_strings == ("END",)
    assert back.bias == {7: 1.0}


def test_stubs_are_fresh(tmp_path: Path) -> None:
    def without_versions(source: str) -> str:
        source = re.sub(r"# Protobuf Python Version: .*", "", source)
        source = re.sub(r"Domain\.PUBLIC,\s+\d+,\s+\d+,\s+\d+,", "Domain.PUBLIC,", source)
        return re.sub(r"GRPC_GENERATED_VERSION = .*", "", source)

    made = generate.generate(tmp_path)
    assert [path.suffix for path in made] == [".py", ".pyi", ".py"] * len(generate.PROTOS)
    for path in made:
        kept = generate.PROTO_ROOT / path.relative_to(tmp_path)
        assert without_versions(kept.read_text()) == without_versions(path.read_text()), (
            f"{kept.name} is not what its proto gives: run `python -m {generate.__name__}`"
        )


def test_stubs_run_on_the_oldest_supported_versions() -> None:
    """Of `pyproject.toml`: grpcio 1.81.1, protobuf 6.33.5."""
    for proto in generate.PROTOS:
        stem = str(generate.PROTO_ROOT / proto.removesuffix(".proto"))
        assert "GRPC_GENERATED_VERSION = '1.81.1'" in Path(f"{stem}_pb2_grpc.py").read_text()
        assert "# Protobuf Python Version: 6.33.5" in Path(f"{stem}_pb2.py").read_text()


def test_descriptor_has_a_name_of_its_own() -> None:
    assert pb.DESCRIPTOR.name == "flowkv/v1/flowkv.proto"
    assert pb.DESCRIPTOR.package == "flowkv.v1"


def test_no_jax() -> None:
    modules = ["flowkv_jax.rpc.server", "flowkv_jax.rpc.client", "flowkv_jax.commands.serve"]
    program = (
        f"import sys, importlib; [importlib.import_module(m) for m in {modules}]; "
        "print([m for m in ('jax', 'jaxlib', 'flax') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, text=True
    )
    assert ast.literal_eval(done.stdout) == []
