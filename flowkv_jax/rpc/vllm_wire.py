"""Values <-> messages of `vllm.grpc.engine`.

Most of its fields cannot be told from unset when they are 0. What 0 means is vLLM's: `top_p`,
`repetition_penalty` and `n` have no value 0, so it is their default; of the others, 0 is the
default; `max_tokens` is optional, and without it an answer may fill the context.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import Any

from smg_grpc_proto.generated import vllm_engine_pb2 as pb

from flowkv_jax import __version__
from flowkv_jax.checks import bad_value
from flowkv_jax.errors import UnprocessableError, ValidationError
from flowkv_jax.load import NodeLoad
from flowkv_jax.outputs import CompletionOutput, Logprob, RequestOutput, TokenLogprobs
from flowkv_jax.sampling_params import GENERATION_CONFIG_FIELDS, RequestOutputKind, SamplingParams

MAX_KV_TRANSFER_BYTES = 1 << 20
_MAX_ENTRIES = 1 << 18
"""Of a list in sampling parameters: more than a vocabulary has, and not long to look at."""

_OPTIONAL = (
    "temperature",
    "max_tokens",
    "seed",
    "logprobs",
    "prompt_logprobs",
    "truncate_prompt_tokens",
)
_ZERO_IS_DEFAULT = (
    "top_p",
    "top_k",
    "min_p",
    "frequency_penalty",
    "presence_penalty",
    "repetition_penalty",
    "min_tokens",
    "n",
)
_FLAGS = ("ignore_eos", "include_stop_str_in_output")
_LISTS = ("stop", "stop_token_ids")


def sampling_params_from_wire(
    message: pb.SamplingParams, *, decodes_elsewhere: bool = False
) -> SamplingParams:
    """The parameters of one request. Text is made only where stop strings are searched in it.

    Args:
        decodes_elsewhere: the answer goes on at another server. What a router adds so that its
            first token comes for sure (`ignore_eos`) need not agree with the rest.

    Raises:
        ValidationError: a value is out of range.
        UnprocessableError: a feature that is not served.
    """
    values: dict[str, Any] = {"max_tokens": None}
    for name in _OPTIONAL:
        if message.HasField(name):
            values[name] = getattr(message, name)
    for name in (*_ZERO_IS_DEFAULT, *_FLAGS):
        if getattr(message, name):
            values[name] = _short_float(getattr(message, name))
    if "temperature" in values:
        values["temperature"] = _short_float(values["temperature"])
    for name in (*_LISTS, "logit_bias"):
        entries = getattr(message, name)
        if len(entries) > _MAX_ENTRIES:
            raise ValidationError(
                f"{name} has {len(entries)} entries; at most {_MAX_ENTRIES}", parameter=name
            )
        if entries:
            values[name] = dict(entries) if name == "logit_bias" else list(entries)
    constraint = _constraint(message)
    if constraint is not None:
        values["structured_outputs"] = constraint
        if decodes_elsewhere:
            values.pop("ignore_eos", None)
    makes_text = bool(message.stop)
    return SamplingParams.from_mapping(
        {
            **values,
            "detokenize": makes_text,
            "skip_special_tokens": message.skip_special_tokens if makes_text else True,
            "output_kind": RequestOutputKind.DELTA,
        }
    )


def kv_transfer_params_from_wire(request: pb.GenerateRequest) -> dict[str, Any] | None:
    """
    Raises:
        ValidationError: no JSON object.
        UnprocessableError: given in the old, typed way.
    """
    if not request.HasField("kv_transfer_params_json"):
        if request.HasField("kv_transfer_params"):
            raise UnprocessableError(
                "kv_transfer_params is not served here; send kv_transfer_params_json"
            )
        return None
    name, text = "kv_transfer_params_json", request.kv_transfer_params_json
    if len(text) > MAX_KV_TRANSFER_BYTES:
        raise ValidationError(
            f"{name} has {len(text)} characters; at most {MAX_KV_TRANSFER_BYTES}", parameter=name
        )
    try:
        params = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise bad_value(name, text, f"is no JSON: {error!s:.100}") from None
    if not isinstance(params, dict):
        raise bad_value(name, params, "must be a JSON object")
    return params


def check_served(request: pb.GenerateRequest) -> None:
    """
    Raises:
        UnprocessableError: it asks for what a text model on one replica has not.
    """
    for name in ("mm_inputs", "media_refs"):
        if request.HasField(name):
            raise UnprocessableError(f"{name} is not served here: the model takes text only")
    if request.extra_mm_inputs:
        raise UnprocessableError("extra_mm_inputs is not served here: the model takes text only")
    if request.HasField("data_parallel_rank") and request.data_parallel_rank != 0:
        raise UnprocessableError(
            f"data_parallel_rank={request.data_parallel_rank} is not served here: there is rank 0"
        )


class AnswerWriter:
    """Makes the messages of one answer: deltas by index, and at each index's end a `complete`.

    `completion_tokens` of a delta counts that delta; a `complete` has all tokens and their number.
    """

    def __init__(self, params: SamplingParams, vocab_size: int, *, is_stream: bool) -> None:
        self._num_logprobs = params.num_logprobs(vocab_size)
        self._num_prompt_logprobs = params.num_prompt_logprobs(vocab_size)
        self._is_stream = is_stream
        self._token_ids: dict[int, list[int]] = {}

    def messages(self, output: RequestOutput) -> Iterable[pb.GenerateResponse]:
        """What to send for what is new."""
        for answer in output.outputs:
            is_first = answer.index not in self._token_ids
            token_ids = self._token_ids.setdefault(answer.index, [])
            token_ids.extend(answer.delta_token_ids)
            if self._is_stream and answer.delta_token_ids:
                yield pb.GenerateResponse(chunk=self._chunk(output, answer, is_first))
            if answer.finish_reason is not None:
                yield pb.GenerateResponse(complete=self._complete(output, answer, token_ids))

    def _chunk(
        self, output: RequestOutput, answer: CompletionOutput, is_first: bool
    ) -> pb.GenerateStreamChunk:
        chunk = pb.GenerateStreamChunk(
            token_ids=answer.delta_token_ids,
            prompt_tokens=len(output.prompt_token_ids),
            completion_tokens=len(answer.delta_token_ids),
            cached_tokens=output.num_cached_tokens,
            index=answer.index,
        )
        self._add_logprobs(chunk, output, answer, with_prompt=is_first)
        return chunk

    def _complete(
        self, output: RequestOutput, answer: CompletionOutput, token_ids: list[int]
    ) -> pb.GenerateComplete:
        complete = pb.GenerateComplete(
            output_ids=token_ids,
            finish_reason=answer.finish_reason,
            prompt_tokens=len(output.prompt_token_ids),
            completion_tokens=len(token_ids),
            cached_tokens=output.num_cached_tokens,
            index=answer.index,
        )
        if not self._is_stream:
            self._add_logprobs(complete, output, answer, with_prompt=True)
        if isinstance(answer.stop_reason, str):
            complete.matched_stop_str = answer.stop_reason
        elif answer.stop_reason is not None:
            complete.matched_token_id = answer.stop_reason
        if output.kv_transfer_params is not None:
            complete.kv_transfer_params_json = json.dumps(output.kv_transfer_params)
        return complete

    def _add_logprobs(
        self, message: Any, output: RequestOutput, answer: CompletionOutput, *, with_prompt: bool
    ) -> None:
        if answer.logprobs is not None and self._num_logprobs is not None:
            logprobs = message.output_logprobs
            for token_id, position in zip(answer.delta_token_ids, answer.logprobs, strict=True):
                logprobs.token_ids.append(token_id)
                logprobs.token_logprobs.append(position[token_id].logprob)
                _add_top(logprobs, position, self._num_logprobs)
        if (
            with_prompt
            and output.prompt_logprobs is not None
            and self._num_prompt_logprobs is not None
        ):
            logprobs = message.input_logprobs
            pairs = zip(output.prompt_token_ids, output.prompt_logprobs, strict=True)
            for token_id, prompt_position in pairs:
                logprobs.token_ids.append(token_id)
                entry = logprobs.token_logprobs.add()
                if prompt_position is not None:
                    entry.value = prompt_position[token_id].logprob
                _add_top(logprobs, prompt_position or {}, self._num_prompt_logprobs)


def loads_to_wire(load: NodeLoad, *, block_size: int, max_num_seqs: int) -> pb.GetLoadsResponse:
    """All nodes as one rank. What is not measured (tokens a second) stays 0."""
    num_live = load.num_requests_running + load.num_requests_waiting + load.num_requests_swapped
    max_tokens = load.num_blocks * block_size
    hits = load.prefix_cache_hits / load.prefix_cache_queries if load.prefix_cache_queries else 0.0
    one = pb.SchedulerLoad(
        num_running_reqs=load.num_requests_running,
        num_waiting_reqs=load.num_requests_waiting + load.num_requests_swapped,
        num_total_reqs=num_live,
        num_used_tokens=round(load.kv_cache_usage * max_tokens),
        max_total_num_tokens=max_tokens,
        token_usage=load.kv_cache_usage,
        cache_hit_rate=hits,
        utilization=load.token_budget_used,
        max_running_requests=max_num_seqs,
        num_waiting_uncached_tokens=load.num_waiting_tokens,
    )
    timestamp = datetime.now(UTC).isoformat()
    return pb.GetLoadsResponse(
        timestamp=timestamp, version=__version__, dp_rank_count=1, loads=[one]
    )


def default_params_to_wire(params: SamplingParams) -> str:
    """What the model's makers recommend, as JSON; empty where they recommend nothing."""
    values = params.to_mapping()
    names = [name for name in GENERATION_CONFIG_FIELDS if name != "max_tokens" and name in values]
    return json.dumps({name: values[name] for name in names}) if names else ""


def _constraint(message: pb.SamplingParams) -> dict[str, Any] | None:
    match message.WhichOneof("constraint"):
        case None:
            return None
        case "json_schema":
            return {"json": message.json_schema}
        case "choice":
            return {"choice": list(message.choice.choices)}
        case "structural_tag":
            raise UnprocessableError("structural_tag is not served here; leave it out")
        case name:
            return {name: getattr(message, name)}


def _short_float(value: Any) -> Any:
    """A float32 as the decimal that was meant: 0.1, not 0.10000000149."""
    return float(f"{value:.7g}") if isinstance(value, float) else value


def _add_top(logprobs: Any, position: TokenLogprobs, most: int) -> None:
    """The likeliest tokens of a position; an empty entry keeps positions aligned."""
    if most == 0:
        return
    top = logprobs.top_logprobs.add()
    best: Sequence[tuple[int, Logprob]] = sorted(position.items(), key=lambda item: item[1].rank)
    for token_id, entry in best[:most]:
        top.token_ids.append(token_id)
        top.values.append(entry.logprob)
