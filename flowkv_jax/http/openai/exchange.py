"""One request between HTTP and the engine: its names, its engine requests, its count of tokens."""

from __future__ import annotations

import hashlib
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from flowkv_jax.checks import bad_value
from flowkv_jax.http.openai.chunks import Envelope
from flowkv_jax.http.openai.requests import GenerationFields
from flowkv_jax.http.openai.responses import PromptTokensDetails, Usage
from flowkv_jax.http.request import Request
from flowkv_jax.http.status_routes import check_model
from flowkv_jax.http.surroundings import Surroundings
from flowkv_jax.load import ModelInfo
from flowkv_jax.metrics.spans import Operation, arrive
from flowkv_jax.outputs import RequestOutput
from flowkv_jax.rpc.engine_protocol import PromptInput
from flowkv_jax.rpc.generation import Generation, RequestOptions, answers_to
from flowkv_jax.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class Exchange:
    """What both endpoints do alike for one request.

    Attributes:
        fields: the request as it was written.
        envelope: what the answer begins with.
        engine_name: the engine's name for the request; prompts behind the first have a number, too.
    """

    request: Request
    surroundings: Surroundings
    fields: GenerationFields
    envelope: Envelope
    engine_name: str

    @classmethod
    def begin(
        cls, request: Request, surroundings: Surroundings, fields: GenerationFields, prefix: str
    ) -> Exchange:
        """
        Args:
            prefix: of the answer's id.

        Raises:
            ModelNotFoundError, ValidationError: naming the field.
            RetryableRequestError: the server is draining.
        """
        surroundings.live.check_accepting()
        info = surroundings.engine.model_info()
        check_model(fields.model, info)
        given = fields.request_id
        if given is not None and not given.isprintable():
            raise bad_value("request_id", given, "must be printable")
        response_id = f"{prefix}-{given or request.request_id}"
        envelope = Envelope(
            response_id, int(time.time()), info.served_model_name, system_fingerprint(info)
        )
        # A client that tries again sends its X-Request-Id again, while the first try may still run.
        is_told = given is None and request.header(b"x-request-id") is not None
        unique = f"-{uuid.uuid4().hex[:8]}" if is_told else ""
        operation: Operation = "chat" if prefix == "chatcmpl" else "text_completion"
        arrive(operation, request.scope["headers"], is_stream=bool(fields.stream))
        return cls(request, surroundings, fields, envelope, given or f"{response_id}{unique}")

    def generation(self, prompts: Sequence[PromptInput], params: SamplingParams) -> Generation:
        """The engine's requests, one a prompt, not yet started."""
        fields, surroundings = self.fields, self.surroundings
        options = RequestOptions(
            request_id=self.engine_name,
            priority=fields.priority or 0,
            cache_salt=fields.cache_salt,
            kv_transfer_params=fields.kv_transfer_params,
            is_stream=bool(fields.stream),
        )
        return Generation(
            answers_to(surroundings.engine, prompts, params, options),
            surroundings.live,
            min_interval_s=surroundings.config.stream_interval_ms / 1000,
            is_whole=not options.is_stream,
            names=(self.envelope.response_id, self.engine_name, self.request.request_id),
        )

    @property
    def has_usage(self) -> bool:
        """The stream tells usage."""
        options = self.fields.stream_options
        return options is not None and bool(options.include_usage or options.continuous_usage_stats)

    @property
    def has_continuous_usage(self) -> bool:
        options = self.fields.stream_options
        return options is not None and bool(options.continuous_usage_stats)

    @property
    def has_usage_chunk(self) -> bool:
        options = self.fields.stream_options
        return options is not None and bool(options.include_usage)


class TokenCount:
    """Tokens of a request so far.

    Args:
        tells_cached: `cached_tokens` is told.
    """

    def __init__(self, *, tells_cached: bool) -> None:
        self._tells_cached = tells_cached
        self._prompts: dict[int, tuple[int, int]] = {}
        self.num_completion_tokens = 0

    def add(self, prompt_index: int, output: RequestOutput) -> None:
        if prompt_index not in self._prompts or output.finished:
            self._prompts[prompt_index] = (len(output.prompt_token_ids), output.num_cached_tokens)
        for delta in output.outputs:
            self.num_completion_tokens += len(delta.delta_token_ids)

    @property
    def num_prompt_tokens(self) -> int:
        return sum(count for count, _ in self._prompts.values())

    def usage(self) -> Usage:
        num_prompt_tokens = self.num_prompt_tokens
        usage = Usage(
            prompt_tokens=num_prompt_tokens,
            completion_tokens=self.num_completion_tokens,
            total_tokens=num_prompt_tokens + self.num_completion_tokens,
        )
        if self._tells_cached:
            cached = sum(count for _, count in self._prompts.values())
            usage.prompt_tokens_details = PromptTokensDetails(cached_tokens=cached)
        return usage


def kv_of(output: RequestOutput) -> dict[str, Any] | None:
    """What a chunk says of a hand-off beside its choices."""
    params = output.kv_transfer_params
    return None if params is None else {"kv_transfer_params": params}


def system_fingerprint(info: ModelInfo) -> str:
    """Equal for equal models; a seed repeats an answer only where this is equal."""
    text = msgspec.json.encode([info.served_model_name, info.architecture, info.dtype])
    return f"fp_{hashlib.sha256(text).hexdigest()[:10]}"
