"""Tensors of the Open Inference Protocol, in both of its encodings.

A request gives the elements of all its tensors in the same way: typed, in each tensor's `contents`,
or raw, as one byte string a tensor in `raw_input_contents`. Raw elements are little-endian; a BYTES
element stands behind its length as uint32, a BOOL is one byte. An answer is given as its request
was. Only the datatypes that a text model needs are read and written.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from flowkv_jax.checks import bad_value
from flowkv_jax.errors import UnprocessableError, ValidationError
from flowkv_jax.rpc.inference import kserve_pb2 as pb

Datatype = Literal["BYTES", "BOOL", "UINT32"]

# What clients say of the encoding of tensors over HTTP, over gRPC too.
_HTTP_PARAMETERS = frozenset({"binary_data", "binary_data_size", "content_type"})
_MAX_RANK = 8
_MAX_ELEMENTS = 1 << 16
_LENGTH = struct.Struct("<I")
_CONTENTS: Mapping[Datatype, str] = {
    "BYTES": "bytes_contents",
    "BOOL": "bool_contents",
    "UINT32": "uint_contents",
}


@dataclass(frozen=True, slots=True)
class Tensor:
    """Elements row by row: bytes, bool or int, as `datatype` says."""

    name: str
    datatype: Datatype
    shape: tuple[int, ...]
    elements: Sequence[Any]


def read_tensors(
    message: pb.ModelInferRequest, datatypes: Mapping[str, Datatype]
) -> dict[str, Tensor]:
    """The inputs of a request, by name.

    Args:
        datatypes: of the inputs there may be.

    Raises:
        UnprocessableError: an input of another name, or one in shared memory.
        ValidationError: another datatype, or elements that do not fill the shape.
    """
    raw = message.raw_input_contents
    if raw and len(raw) != len(message.inputs):
        raise ValidationError(
            f"raw_input_contents has {len(raw)} entries for {len(message.inputs)} inputs; it must "
            "have one for each",
            parameter="raw_input_contents",
        )
    tensors: dict[str, Tensor] = {}
    for index, tensor in enumerate(message.inputs):
        name = tensor.name[:100]
        if tensor.name not in datatypes:
            raise UnprocessableError(
                f"input {name!r} is not served here; there are {', '.join(datatypes)}"
            )
        if tensor.name in tensors:
            raise ValidationError(f"input {name} is given twice", parameter=name)
        check_tensor_parameters(f"input {name}", tensor.parameters)
        datatype = datatypes[tensor.name]
        if tensor.datatype != datatype:
            raise ValidationError(
                f"{name} has datatype {tensor.datatype[:20]!r}; it must be {datatype}",
                parameter=name,
            )
        elements = _raw_elements(name, datatype, raw[index]) if raw else _typed_elements(tensor)
        if raw and tensor.HasField("contents"):
            raise ValidationError(f"{name} has contents beside raw ones", parameter=name)
        shape = tuple(tensor.shape)
        _check_shape(name, shape, len(elements))
        tensors[name] = Tensor(name, datatype, shape, elements)
    return tensors


def check_tensor_parameters(tensor: str, parameters: Iterable[str]) -> None:
    """
    Raises:
        UnprocessableError: a parameter that would change what a tensor means.
    """
    for name in parameters:
        if name not in _HTTP_PARAMETERS:
            raise UnprocessableError(f"parameter {name[:100]!r} of {tensor} is not served here")


def write_tensors(
    response: pb.ModelInferResponse, tensors: Sequence[Tensor], *, is_raw: bool
) -> None:
    """Put tensors into a response as its outputs."""
    for tensor in tensors:
        output = response.outputs.add(
            name=tensor.name, datatype=tensor.datatype, shape=tensor.shape
        )
        if is_raw:
            response.raw_output_contents.append(_raw_of(tensor))
        else:
            getattr(output.contents, _CONTENTS[tensor.datatype]).extend(tensor.elements)


def _check_shape(name: str, shape: tuple[int, ...], num_elements: int) -> None:
    if len(shape) > _MAX_RANK or any(not 0 <= size <= _MAX_ELEMENTS for size in shape):
        raise bad_value(
            f"shape of {name}",
            list(shape),
            f"must be at most {_MAX_RANK} sizes in [0, {_MAX_ELEMENTS}]",
        )
    if math.prod(shape) != num_elements:
        raise bad_value(
            f"shape of {name}",
            list(shape),
            f"stands for {math.prod(shape)} elements; {num_elements} were sent",
        )


def _typed_elements(tensor: pb.ModelInferRequest.InferInputTensor) -> list[Any]:
    wanted = _CONTENTS[tensor.datatype]  # type: ignore[index]
    for field, values in tensor.contents.ListFields():
        if field.name != wanted:
            raise ValidationError(
                f"{tensor.name} has {field.name}; {tensor.datatype} goes into {wanted}",
                parameter=tensor.name,
            )
        if len(values) > _MAX_ELEMENTS:
            raise _too_many(tensor.name)
    return list(getattr(tensor.contents, wanted))


def _raw_elements(name: str, datatype: Datatype, raw: bytes) -> list[Any]:
    if datatype == "BOOL":
        if len(raw) > _MAX_ELEMENTS:
            raise _too_many(name)
        return [byte != 0 for byte in raw]
    if datatype != "BYTES":
        raise ValidationError(f"{name} cannot be read as {datatype}", parameter=name)
    elements: list[bytes] = []
    position = 0
    while position < len(raw):
        start = position + _LENGTH.size
        end = start + _LENGTH.unpack_from(raw, position)[0] if start <= len(raw) else len(raw) + 1
        if end > len(raw):
            raise ValidationError(
                f"raw contents of {name} end inside element {len(elements)}; each element of a "
                "BYTES tensor stands behind its length as little-endian uint32",
                parameter=name,
            )
        if len(elements) == _MAX_ELEMENTS:
            raise _too_many(name)
        elements.append(raw[start:end])
        position = end
    return elements


def _raw_of(tensor: Tensor) -> bytes:
    if tensor.datatype == "BYTES":
        return b"".join(_LENGTH.pack(len(element)) + element for element in tensor.elements)
    if tensor.datatype == "BOOL":
        return bytes(tensor.elements)
    return struct.pack(f"<{len(tensor.elements)}I", *tensor.elements)


def _too_many(name: str) -> ValidationError:
    return ValidationError(f"{name} has more than {_MAX_ELEMENTS} elements", parameter=name)
