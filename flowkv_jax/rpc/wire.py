"""Values <-> messages. A field that was not set on one side is not set on the other."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from flowkv_jax.errors import ValidationError
from flowkv_jax.load import ModelInfo, NodeLoad
from flowkv_jax.outputs import (
    CompletionOutput,
    FinishReason,
    Logprob,
    RequestMetrics,
    RequestOutput,
    TokenLogprobs,
)
from flowkv_jax.rpc.flowkv.v1 import flowkv_pb2 as pb
from flowkv_jax.sampling_params import RequestOutputKind, SamplingParams

_FINISH_REASONS: Mapping[FinishReason, pb.FinishReason] = {
    "stop": pb.FINISH_REASON_STOP,
    "length": pb.FINISH_REASON_LENGTH,
    "abort": pb.FINISH_REASON_ABORT,
    "error": pb.FINISH_REASON_ERROR,
}
_FINISH_REASON_NAMES = {number: name for name, number in _FINISH_REASONS.items()}

# The client decides how it shows what arrives; the wire carries deltas.
_CLIENT_SIDE_FIELDS = frozenset({"output_kind"})

_MAX_ENTRIES = 1 << 18
"""Of a list in sampling parameters: more than a vocabulary has, and not long to look at."""


def assign(message: Any, parameter: str, value: Any) -> None:
    """Set a field of a message by name: scalar, list or map.

    Raises:
        ValidationError: the field cannot hold the value.
    """
    try:
        if isinstance(value, bytes):
            raise TypeError("bytes are no text")
        if isinstance(value, Mapping):
            getattr(message, parameter).update(value)
        elif isinstance(value, Sequence) and not isinstance(value, str):
            getattr(message, parameter).extend(value)
        else:
            setattr(message, parameter, value)
    except (AttributeError, TypeError, ValueError, OverflowError) as error:
        shown = f"{value!r:.100}"
        raise ValidationError(
            f"{parameter}={shown} cannot be sent: {error!s:.200}", parameter=parameter, value=value
        ) from error


def sampling_params_to_wire(params: SamplingParams) -> pb.SamplingParams:
    """Send what the caller gave; defaults stay the server's.

    Raises:
        ValidationError: an integer does not fit the field (32 bits; 64 for the seed).
    """
    message = pb.SamplingParams()
    for name, value in params.to_mapping().items():
        if name in _CLIENT_SIDE_FIELDS:
            continue
        if name == "max_tokens" and value is None:
            message.fill_context = True
        elif value is None:
            continue
        elif name == "allowed_token_ids":
            message.allowed_token_ids.CopyFrom(token_ids_to_wire("allowed_token_ids", value))
        elif name == "logit_bias":
            assign(message, name, {int(token): float(bias) for token, bias in value.items()})
        elif name == "structured_outputs":
            _form_to_wire(message.structured_outputs, value)
        elif name == "stop" and isinstance(value, str):
            message.stop.append(value)
        else:
            assign(message, name, value)
    return message


def sampling_params_from_wire(message: pb.SamplingParams) -> SamplingParams:
    """The parameters of one request, always with `DELTA` outputs.

    Raises:
        ValidationError: a value is out of range, or max_tokens and fill_context are both given.
        UnprocessableError: a feature that is not served.
    """
    values: dict[str, Any] = {"output_kind": RequestOutputKind.DELTA}
    for descriptor, value in message.ListFields():
        name = descriptor.name
        _check_size(name, value)
        if name == "allowed_token_ids":
            values[name] = list(value.ids)
        elif name == "logit_bias":
            values[name] = dict(value)
        elif name == "structured_outputs":
            values[name] = _form_from_wire(value)
        elif name != "fill_context":
            values[name] = value if isinstance(value, int | float) else list(value)
    if message.fill_context and "max_tokens" in values:
        raise ValidationError(
            f"max_tokens={values['max_tokens']} contradicts fill_context; give one of them",
            parameter="max_tokens",
            value=values["max_tokens"],
        )
    if message.fill_context:
        values["max_tokens"] = None
    return SamplingParams.from_mapping(values)


def _form_to_wire(message: pb.StructuredOutputs, form: Mapping[str, Any]) -> None:
    for name, value in form.items():
        if name == "choice":
            assign(message.choice, "texts", value)
        else:
            assign(message, name, value)


def _form_from_wire(message: pb.StructuredOutputs) -> dict[str, Any]:
    return {
        field.name: list(value.texts) if field.name == "choice" else value
        for field, value in message.ListFields()
    }


def _check_size(name: str, value: Any) -> None:
    if isinstance(value, int | float | pb.StructuredOutputs):  # the last one checks itself
        return
    size = len(value.ids if isinstance(value, pb.TokenIds) else value)
    if size > _MAX_ENTRIES:
        raise ValidationError(f"{name} has {size} entries; at most {_MAX_ENTRIES}", parameter=name)


def token_ids_to_wire(parameter: str, token_ids: Iterable[int]) -> pb.TokenIds:
    """
    Raises:
        ValidationError: an id is no 32-bit integer; `parameter` names the list.
    """
    try:
        return pb.TokenIds(ids=token_ids)
    except (TypeError, ValueError, OverflowError) as error:
        raise ValidationError(
            f"{parameter} must be a list of 32-bit token ids: {error!s:.200}", parameter=parameter
        ) from error


def response_to_wire(output: RequestOutput, *, is_first: bool) -> pb.GenerateResponse:
    """One merged delta as one message. The caller adds `usage` to the last."""
    response = pb.GenerateResponse(
        request_id=output.request_id,
        outputs=[_completion_to_wire(completion) for completion in output.outputs],
        finished=output.finished,
    )
    if is_first:
        response.prompt.token_ids.extend(output.prompt_token_ids)
        if output.prompt is not None:
            response.prompt.text = output.prompt
        # Complete before the first token exists, and repeated in every output.
        if output.prompt_logprobs is not None:
            response.prompt.logprobs.extend(map(_position_to_wire, output.prompt_logprobs))
    if output.finished and output.metrics is not None:
        response.metrics.CopyFrom(pb.RequestMetrics(**asdict(output.metrics)))
    return response


def response_from_wire(response: pb.GenerateResponse, prompt: pb.Prompt) -> RequestOutput:
    """One message as a delta. `prompt` is what the messages so far have said of the prompt."""
    return RequestOutput(
        request_id=response.request_id,
        prompt=prompt.text if prompt.HasField("text") else None,
        prompt_token_ids=list(prompt.token_ids),
        outputs=[_completion_from_wire(completion) for completion in response.outputs],
        finished=response.finished,
        prompt_logprobs=[
            _position_from_wire(position) or None for position in prompt.logprobs
        ] or None,
        num_cached_tokens=response.usage.cached_tokens,
        metrics=_metrics_from_wire(response.metrics) if response.HasField("metrics") else None,
    )  # fmt: skip


def model_info_to_wire(info: ModelInfo) -> pb.GetModelInfoResponse:
    return pb.GetModelInfoResponse(**asdict(info))


def model_info_from_wire(message: pb.GetModelInfoResponse) -> ModelInfo:
    values = {name: getattr(message, name) for name in ModelInfo.__dataclass_fields__}
    return ModelInfo(**{**values, "eos_token_ids": tuple(message.eos_token_ids)})


def loads_to_wire(load: NodeLoad) -> pb.GetLoadsResponse:
    """Figures that the message has no field for stay behind."""
    fields = pb.GetLoadsResponse.DESCRIPTOR.fields_by_name
    return pb.GetLoadsResponse(**{name: getattr(load, name) for name in fields})


def loads_from_wire(message: pb.GetLoadsResponse) -> NodeLoad:
    return NodeLoad(**{name: getattr(message, name) for name in message.DESCRIPTOR.fields_by_name})


def _completion_to_wire(completion: CompletionOutput) -> pb.CompletionDelta:
    delta = pb.CompletionDelta(
        index=completion.index,
        text=completion.delta_text,
        token_ids=completion.delta_token_ids,
        cumulative_logprob=completion.cumulative_logprob,
    )
    if completion.logprobs is not None:
        delta.logprobs.extend(map(_position_to_wire, completion.logprobs))
    if completion.finish_reason is not None:
        delta.finish_reason = _FINISH_REASONS[completion.finish_reason]
    if isinstance(completion.stop_reason, str):
        delta.stop_string = completion.stop_reason
    elif completion.stop_reason is not None:
        delta.stop_token_id = completion.stop_reason
    return delta


def finish_reason_to_wire(reason: FinishReason) -> pb.FinishReason:
    return _FINISH_REASONS[reason]


def finish_reason_from_wire(number: pb.FinishReason) -> FinishReason | None:
    """None where it has not ended, or for a reason that is not known here."""
    return _FINISH_REASON_NAMES.get(number)


def _completion_from_wire(delta: pb.CompletionDelta) -> CompletionOutput:
    reason_field = delta.WhichOneof("stop_reason")
    return CompletionOutput(
        index=delta.index,
        text=delta.text,
        token_ids=list(delta.token_ids),
        delta_text=delta.text,
        delta_token_ids=list(delta.token_ids),
        cumulative_logprob=(
            delta.cumulative_logprob if delta.HasField("cumulative_logprob") else None
        ),
        logprobs=[_position_from_wire(position) for position in delta.logprobs] or None,
        finish_reason=finish_reason_from_wire(delta.finish_reason),
        stop_reason=getattr(delta, reason_field) if reason_field else None,
    )


def _position_to_wire(position: TokenLogprobs | None) -> pb.PositionLogprobs:
    return pb.PositionLogprobs(
        entries=[
            pb.TokenLogprob(
                token_id=token_id,
                logprob=entry.logprob,
                rank=entry.rank,
                decoded_token=entry.decoded_token,
            )
            for token_id, entry in (position or {}).items()
        ]
    )


def _position_from_wire(position: pb.PositionLogprobs) -> TokenLogprobs:
    return {
        entry.token_id: Logprob(
            logprob=entry.logprob,
            rank=entry.rank,
            decoded_token=entry.decoded_token if entry.HasField("decoded_token") else None,
        )
        for entry in position.entries
    }


def _metrics_from_wire(message: pb.RequestMetrics) -> RequestMetrics:
    values = {field.name: value for field, value in message.ListFields()}
    return RequestMetrics(**{"arrival_time": 0.0, "queued_ts": 0.0, **values})
