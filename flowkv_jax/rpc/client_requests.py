"""Arguments of a client's call -> one message a prompt. The shapes are the Engine's: a prompt or a
list of prompts; parameters, ids and priorities for all of them or one each.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any

from flowkv_jax.engine.prompts import PromptType, as_batch, spread
from flowkv_jax.errors import ValidationError
from flowkv_jax.rpc import wire
from flowkv_jax.rpc.flowkv.v1 import flowkv_pb2 as pb
from flowkv_jax.sampling_params import RequestOutputKind, SamplingParams

Params = SamplingParams | Mapping[str, Any]

Wire = pb.GenerateRequest | pb.ChatRequest


@dataclass(frozen=True, slots=True)
class ClientRequest:
    """One call to make: `method` is the stub's, `message` its argument."""

    method: Callable[..., Any]
    message: Wire
    params: SamplingParams

    @property
    def output_kind(self) -> RequestOutputKind:
        return self.params.output_kind


@dataclass(frozen=True, slots=True)
class CommonArguments:
    """What `generate` and `chat` have in common, for all prompts or one each."""

    sampling_params: Params | Sequence[Params] | None
    request_id: str | Sequence[str] | None
    priority: int | Sequence[int]
    cache_salt: str | None
    is_stream: bool


def generate_requests(
    method: Callable[..., Any], prompts: PromptType | Sequence[PromptType], common: CommonArguments
) -> list[ClientRequest]:
    """
    Raises:
        ValidationError: no prompts, a prompt of another type, or lists of different lengths.
    """
    messages = []
    for prompt in map(_one_prompt, as_batch(prompts)):
        message = pb.GenerateRequest()
        if isinstance(prompt, str):
            wire.assign(message, "text", prompt)
        else:
            message.token_ids.CopyFrom(wire.token_ids_to_wire("prompt_token_ids", prompt))
        messages.append(message)
    return _with_common(method, messages, common)


def chat_requests(
    method: Callable[..., Any],
    conversations: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]],
    common: CommonArguments,
) -> list[ClientRequest]:
    """
    Raises:
        ValidationError: no messages, or one that is not a role and a text.
    """
    if not _is_list(conversations) or not conversations:
        raise ValidationError(
            f"messages={conversations!r:.100} must be a list of messages, and not empty",
            parameter="messages",
            value=conversations,
        )
    several: Any = [conversations] if isinstance(conversations[0], Mapping) else conversations
    messages = []
    for conversation in several:
        message = pb.ChatRequest()
        if not _is_list(conversation):
            raise ValidationError(
                f"conversation={conversation!r:.100} must be a list of messages",
                parameter="messages",
                value=conversation,
            )
        for turn in conversation:
            message.messages.append(_turn(turn))
        messages.append(message)
    return _with_common(method, messages, common)


def _one_prompt(prompt: Any) -> str | Sequence[int]:
    if isinstance(prompt, Mapping):
        keys = set(prompt)
        if keys == {"prompt"} and isinstance(prompt["prompt"], str):
            return str(prompt["prompt"])
        if keys != {"prompt_token_ids"}:
            raise ValidationError(
                f"prompt has the keys {sorted(map(str, keys))}; give either 'prompt' (a string) "
                "or 'prompt_token_ids'",
                parameter="prompt",
                value=prompt,
            )
        prompt = prompt["prompt_token_ids"]
    if isinstance(prompt, str):
        return prompt
    if isinstance(prompt, Sequence) and all(_is_id(item) for item in prompt):
        return prompt
    raise ValidationError(
        f"prompt={prompt!r:.100} must be a string or a list of token ids",
        parameter="prompt",
        value=prompt,
    )


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)


def _is_id(item: Any) -> bool:
    return isinstance(item, Integral) and not isinstance(item, bool)


def _turn(turn: Any) -> pb.ChatMessage:
    if not isinstance(turn, Mapping) or set(turn) != {"role", "content"}:
        raise ValidationError(
            f"message={turn!r:.100} must have 'role' and 'content', and nothing else",
            parameter="messages",
            value=turn,
        )
    message = pb.ChatMessage()
    wire.assign(message, "role", turn["role"])
    wire.assign(message, "content", turn["content"])
    return message


def _with_common(
    method: Callable[..., Any],
    messages: Sequence[Wire],
    common: CommonArguments,
) -> list[ClientRequest]:
    count = len(messages)
    several_params = spread("sampling_params", common.sampling_params, count)
    priorities = spread("priority", common.priority, count)
    request_ids = spread("request_id", common.request_id, count)
    if common.request_id is not None and len(set(request_ids)) < count:
        raise ValidationError(
            f"request_id={common.request_id!r:.100} must differ between the {count} prompts",
            parameter="request_id",
            value=common.request_id,
        )
    requests = []
    for message, one, request_id, priority in zip(
        messages, several_params, request_ids, priorities, strict=True
    ):
        params = _params_of(one)
        is_stream = common.is_stream and params.output_kind is not RequestOutputKind.FINAL_ONLY
        message.sampling_params.CopyFrom(wire.sampling_params_to_wire(params))
        message.options.stream = is_stream
        wire.assign(message.options, "priority", priority)
        if request_id is not None:
            wire.assign(message.options, "request_id", request_id)
        if common.cache_salt is not None:
            wire.assign(message.options, "cache_salt", common.cache_salt)
        requests.append(ClientRequest(method, message, params))
    return requests


def _params_of(given: Any) -> SamplingParams:
    if given is None:
        return SamplingParams()
    if isinstance(given, SamplingParams):
        return given
    if isinstance(given, Mapping):
        return SamplingParams.from_mapping(given)
    raise ValidationError(
        f"sampling_params={given!r:.100} must be SamplingParams or a mapping",
        parameter="sampling_params",
        value=given,
    )
