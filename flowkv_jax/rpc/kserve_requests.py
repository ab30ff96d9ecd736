"""A text request in tensors, as Triton's vLLM backend has it.

    in   text_input               BYTES  the prompt, or several (one answer each)
         stream                   BOOL   deltas; of ModelStreamInfer only
         sampling_parameters      BYTES  a JSON object; values may be JSON in strings ("0.7")
         exclude_input_in_output  BOOL   left out: true with `stream`, else false
         return_finish_reason, return_num_input_tokens, return_num_output_tokens
                                  BOOL   send the output of that name
    out  text_output              BYTES  for each prompt, or each of the n answers to one
         finish_reason            BYTES  empty while there is none
         num_input_tokens         UINT32 of the prompt
         num_output_tokens        UINT32 in this response

All but `text_input` may stand in the request's `parameters` instead. So may every sampling
parameter, `priority` (lower runs first), `timeout` (microseconds), `cache_salt`, and
`triton_enable_empty_final_response`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from flowkv_jax.checks import bad_value, check_int
from flowkv_jax.errors import UnprocessableError, ValidationError
from flowkv_jax.rpc.inference import kserve_pb2 as pb
from flowkv_jax.rpc.kserve_tensors import Datatype, check_tensor_parameters, read_tensors
from flowkv_jax.sampling_params import SamplingParams
from flowkv_jax.sampling_spellings import ALIASES

MAX_PROMPTS = 64
"""Of one request."""
MAX_SAMPLING_PARAMETERS_BYTES = 1 << 20
MAX_PARAMETERS = 256
_MAX_TIMEOUT_US = 86_400_000_000

OPTIONAL_OUTPUTS: Mapping[str, Datatype] = {
    "finish_reason": "BYTES",
    "num_input_tokens": "UINT32",
    "num_output_tokens": "UINT32",
}
INPUTS: Mapping[str, Datatype] = {
    "text_input": "BYTES",
    "stream": "BOOL",
    "sampling_parameters": "BYTES",
    "exclude_input_in_output": "BOOL",
    "return_finish_reason": "BOOL",
    "return_num_input_tokens": "BOOL",
    "return_num_output_tokens": "BOOL",
}
OUTPUTS: Mapping[str, Datatype] = {"text_output": "BYTES", **OPTIONAL_OUTPUTS}

_SAMPLING_FIELDS = frozenset(SamplingParams.__dataclass_fields__) | frozenset(ALIASES)
# Strings are what these take; those of other fields are JSON.
_TEXT_FIELDS = frozenset({"stop", "bad_words", "output_kind"})
_BOOLS: Mapping[str, bool] = {"True": True, "False": False}


@dataclass(frozen=True, slots=True)
class TextRequest:
    """A `ModelInferRequest`, checked.

    Attributes:
        prompts: one or more.
        shape: of `text_input`.
        wants_empty_final: the stream's end is a response of its own.
        output_names: what to send.
        is_raw: how the tensors came, and are sent.
    """

    prompts: list[str]
    shape: tuple[int, ...]
    params: SamplingParams
    is_stream: bool
    wants_empty_final: bool
    output_names: tuple[str, ...]
    is_raw: bool
    priority: int
    timeout_s: float | None
    cache_salt: str | None


def read_request(message: pb.ModelInferRequest) -> TextRequest:
    """
    Raises:
        ValidationError: a tensor or parameter is missing, malformed, out of range or contradicts
            another.
        UnprocessableError: an input, output or parameter that is not served.
    """
    tensors = read_tensors(message, INPUTS)
    prompts = tensors.pop("text_input", None)
    if prompts is None:
        raise ValidationError("input text_input is missing", parameter="text_input")
    if not 1 <= len(prompts.elements) <= MAX_PROMPTS:
        raise ValidationError(
            f"text_input has {len(prompts.elements)} elements; it takes 1 to {MAX_PROMPTS}",
            parameter="text_input",
        )
    values = _parameter_values(message)
    for name, tensor in tensors.items():
        if len(tensor.elements) != 1:
            raise ValidationError(
                f"{name} has {len(tensor.elements)} elements; it takes 1", parameter=name
            )
        [element] = tensor.elements
        is_object = name == "sampling_parameters"
        _merge(values, _sampling_object(element) if is_object else {name: element})
    is_stream = _taken_bool(values, "stream", False)
    return TextRequest(
        prompts=[_text("text_input", element) for element in prompts.elements],
        shape=prompts.shape,
        is_stream=is_stream,
        wants_empty_final=_taken_bool(values, "triton_enable_empty_final_response", False),
        output_names=_output_names(message, values),
        is_raw=bool(message.raw_input_contents),
        priority=_taken_int(values, "priority", -(2**31), 2**31 - 1) or 0,
        timeout_s=_seconds(_taken_int(values, "timeout", 0, _MAX_TIMEOUT_US)),
        cache_salt=_taken_text(values, "cache_salt"),
        # Of what is taken above, nothing is left in `values` by now.
        params=_sampling_params(values, is_stream, len(prompts.elements)),
    )


def _parameter_values(message: pb.ModelInferRequest) -> dict[str, Any]:
    """The request's `parameters` as plain values, `sampling_parameters` among them unpacked."""
    if len(message.parameters) > MAX_PARAMETERS:
        raise ValidationError(
            f"parameters has {len(message.parameters)} entries; at most {MAX_PARAMETERS}",
            parameter="parameters",
        )
    values: dict[str, Any] = {}
    for name, parameter in message.parameters.items():
        kind = parameter.WhichOneof("parameter_choice")
        if kind is None:
            raise ValidationError(f"parameter {name[:100]!r} has no value", parameter=name)
        value = getattr(parameter, kind)
        if name == "sampling_parameters":
            _merge(values, _sampling_object(str(value).encode()))
        else:
            _merge(values, {name: _plain(name, value)})
    return values


def _sampling_object(element: bytes) -> dict[str, Any]:
    if len(element) > MAX_SAMPLING_PARAMETERS_BYTES:
        raise ValidationError(
            f"sampling_parameters has {len(element)} bytes; at most "
            f"{MAX_SAMPLING_PARAMETERS_BYTES}",
            parameter="sampling_parameters",
        )
    try:
        values = json.loads(_text("sampling_parameters", element))
    except (ValueError, RecursionError) as error:
        raise bad_value("sampling_parameters", element, f"is no JSON: {error!s:.100}") from None
    if not isinstance(values, dict):
        raise bad_value("sampling_parameters", values, "must be a JSON object")
    return {name: _plain(name, value) for name, value in values.items()}


def _plain(name: str, value: Any) -> Any:
    """A value that came as JSON in a string; any other as it is."""
    if not isinstance(value, str) or name not in _SAMPLING_FIELDS or name in _TEXT_FIELDS:
        return value
    try:
        return _BOOLS[value] if value in _BOOLS else json.loads(value)
    except (ValueError, RecursionError):
        return value


def _merge(values: dict[str, Any], more: Mapping[str, Any]) -> None:
    for name, value in more.items():
        if name in values and values[name] != value:
            raise bad_value(name[:100], value, f"contradicts {values[name]!r:.100}")
        values[name] = value


def _sampling_params(values: dict[str, Any], is_stream: bool, num_prompts: int) -> SamplingParams:
    if not _taken_bool(values, "exclude_input_in_output", is_stream):
        _merge(values, {"echo": True})
    params = SamplingParams.from_mapping({**values, "output_kind": "delta"})
    if params.n > 1 and num_prompts > 1:
        raise bad_value("n", params.n, f"must be 1 with the {num_prompts} prompts of text_input")
    return params


def _output_names(message: pb.ModelInferRequest, values: dict[str, Any]) -> tuple[str, ...]:
    wanted = {name for name in OPTIONAL_OUTPUTS if _taken_bool(values, f"return_{name}", False)}
    for output in message.outputs:
        name = output.name[:100]
        if output.name not in OUTPUTS:
            raise UnprocessableError(
                f"output {name!r} is not served here; there are {', '.join(OUTPUTS)}"
            )
        check_tensor_parameters(f"output {name}", output.parameters)
        wanted.add(output.name)
    if not message.outputs:
        wanted.add("text_output")
    return tuple(name for name in OUTPUTS if name in wanted)


def _taken_bool(values: dict[str, Any], name: str, default: bool) -> bool:
    value = values.pop(name, default)
    value = _BOOLS.get(value.capitalize(), value) if isinstance(value, str) else value
    if not isinstance(value, bool):
        raise bad_value(name, value, "must be true or false")
    return value


def _taken_int(values: dict[str, Any], name: str, low: int, high: int) -> int | None:
    value: int | None = values.pop(name, None)
    if value is not None:
        check_int(name, value, low, high)
    return value


def _taken_text(values: dict[str, Any], name: str) -> str | None:
    value = values.pop(name, None)
    if value is not None and not isinstance(value, str):
        raise bad_value(name, value, "must be text")
    return value


def _seconds(timeout_us: int | None) -> float | None:
    """Triton's clients send 0 for no timeout."""
    return timeout_us / 1e6 if timeout_us else None


def _text(name: str, element: bytes) -> str:
    try:
        return element.decode("utf-8")
    except UnicodeDecodeError as error:
        raise bad_value(name, element, f"is no UTF-8 text: {error.reason}") from None
