"""Tensors in both encodings: what was written is read, and no bytes do harm."""

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowkv_jax.errors import ClientError
from flowkv_jax.rpc.inference import kserve_pb2 as pb
from flowkv_jax.rpc.kserve_tensors import Datatype, Tensor, read_tensors, write_tensors

DATATYPES: dict[str, Datatype] = {"texts": "BYTES", "flags": "BOOL"}


def as_request(response: pb.ModelInferResponse) -> pb.ModelInferRequest:
    """What was sent as outputs, as if it came as inputs: the messages have the same fields."""
    request = pb.ModelInferRequest(raw_input_contents=response.raw_output_contents)
    for output in response.outputs:
        request.inputs.add().MergeFromString(output.SerializeToString())
    return request


@given(
    texts=st.lists(st.binary(max_size=20), max_size=6),
    flags=st.lists(st.booleans(), max_size=6),
    is_raw=st.booleans(),
)
def test_what_was_written_is_read(texts: list[bytes], flags: list[bool], is_raw: bool) -> None:
    tensors = [
        Tensor("texts", "BYTES", (len(texts),), texts),
        Tensor("flags", "BOOL", (1, len(flags)), flags),
    ]
    response = pb.ModelInferResponse()
    write_tensors(response, tensors, is_raw=is_raw)
    assert read_tensors(as_request(response), DATATYPES) == {t.name: t for t in tensors}


def test_numbers_are_little_endian() -> None:
    counts = Tensor("counts", "UINT32", (2,), [1, 2**32 - 1])
    typed, raw = pb.ModelInferResponse(), pb.ModelInferResponse()
    write_tensors(typed, [counts], is_raw=False)
    write_tensors(raw, [counts], is_raw=True)
    assert list(typed.outputs[0].contents.uint_contents) == [1, 2**32 - 1]
    assert raw.raw_output_contents[0] == struct.pack("<II", 1, 2**32 - 1)


@given(
    raw=st.binary(max_size=40),
    shape=st.lists(st.integers(-2, 2**40), max_size=3),
    name=st.sampled_from(["texts", "flags"]),
)
def test_any_bytes_are_elements_or_refused(raw: bytes, shape: list[int], name: str) -> None:
    request = pb.ModelInferRequest(raw_input_contents=[raw])
    request.inputs.add(name=name, datatype=DATATYPES[name], shape=shape)
    try:
        tensor = read_tensors(request, DATATYPES)[name]
    except ClientError:
        return
    response = pb.ModelInferResponse()
    write_tensors(response, [tensor], is_raw=True)
    if name == "texts":
        assert response.raw_output_contents[0] == raw
    else:
        assert tensor.elements == [byte != 0 for byte in raw]


@pytest.mark.parametrize("name", ["texts", "flags"])
@pytest.mark.parametrize("is_raw", [True, False])
def test_too_many_elements(name: str, is_raw: bool) -> None:
    most = 1 << 16
    element: bytes | bool = b"" if name == "texts" else True
    tensor = Tensor(name, DATATYPES[name], (most + 1,), [element] * (most + 1))
    response = pb.ModelInferResponse()
    write_tensors(response, [tensor], is_raw=is_raw)
    with pytest.raises(ClientError, match="more than 65536 elements"):
        read_tensors(as_request(response), DATATYPES)
