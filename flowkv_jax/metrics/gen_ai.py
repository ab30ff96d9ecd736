"""OpenTelemetry's semantic conventions for generative AI: names of attributes and instruments.

The names are those of semantic conventions 0.66b2. They are written out, as the package that has
them marks every one as deprecated since the conventions moved to a repository of their own.
"""

from __future__ import annotations

from collections.abc import Sequence

from opentelemetry.metrics import Meter
from opentelemetry.util.types import AttributeValue

from flowkv_jax.cluster.dispatch_events import SequenceRecord
from flowkv_jax.sampling_params import SamplingParams

PROVIDER = "flowkv"

# What the conventions advise.
_DURATION_S = (
    0.01,
    0.02,
    0.04,
    0.08,
    0.16,
    0.32,
    0.64,
    1.28,
    2.56,
    5.12,
    10.24,
    20.48,
    40.96,
    81.92,
)
_FIRST_TOKEN_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
)
_PER_TOKEN_S = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)
_TOKENS = tuple(float(4**power) for power in range(14))


def request_attributes(
    model: str, operation: str, params: SamplingParams
) -> dict[str, AttributeValue]:
    """What was asked for."""
    attributes: dict[str, AttributeValue] = {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": PROVIDER,
        "gen_ai.request.model": model,
        "gen_ai.request.temperature": params.temperature,
        "gen_ai.request.top_p": params.top_p,
        "gen_ai.request.choice.count": params.n,
    }
    if params.top_k > 0:
        attributes["gen_ai.request.top_k"] = params.top_k
    if params.max_tokens is not None:
        attributes["gen_ai.request.max_tokens"] = params.max_tokens
    if params.seed is not None:
        attributes["gen_ai.request.seed"] = params.seed
    if params.stop_strings:
        attributes["gen_ai.request.stop_sequences"] = list(params.stop_strings)
    for name in ("frequency_penalty", "presence_penalty"):
        if getattr(params, name):
            attributes[f"gen_ai.request.{name}"] = getattr(params, name)
    return attributes


def response_attributes(model: str, records: Sequence[SequenceRecord]) -> dict[str, AttributeValue]:
    """What came of it: `records` of all answers, at least one."""
    first = records[0]
    attributes: dict[str, AttributeValue] = {
        "gen_ai.response.model": model,
        "gen_ai.response.finish_reasons": [str(record.finish_reason) for record in records],
        "gen_ai.usage.input_tokens": first.num_prompt_tokens,
        "gen_ai.usage.output_tokens": sum(record.num_output_tokens for record in records),
        "gen_ai.usage.cache_read.input_tokens": first.num_cached_tokens,
    }
    waits = [wait for record in records if (wait := first_token_s(record)) is not None]
    if waits:
        attributes["gen_ai.response.time_to_first_chunk"] = min(waits)
    return attributes


def first_token_s(record: SequenceRecord) -> float | None:
    """From arrival to first token; None if there was none."""
    if record.queue_s is None or record.prefill_s is None:
        return None
    return record.queue_s + record.prefill_s


class GenAiInstruments:
    """The conventions' histograms of a server. Values are of one answer each."""

    def __init__(self, meter: Meter, model: str) -> None:
        self._model = model
        self._duration = meter.create_histogram(
            "gen_ai.server.request.duration",
            unit="s",
            description="From arrival to the last token.",
            explicit_bucket_boundaries_advisory=_DURATION_S,
        )
        self._first_token = meter.create_histogram(
            "gen_ai.server.time_to_first_token",
            unit="s",
            description="From arrival to the first token.",
            explicit_bucket_boundaries_advisory=_FIRST_TOKEN_S,
        )
        self._per_token = meter.create_histogram(
            "gen_ai.server.time_per_output_token",
            unit="s",
            description="Of each token after the first.",
            explicit_bucket_boundaries_advisory=_PER_TOKEN_S,
        )
        self._usage = meter.create_histogram(
            "gen_ai.client.token.usage",
            unit="{token}",
            description="Tokens of prompt and answer.",
            explicit_bucket_boundaries_advisory=_TOKENS,
        )

    def record(self, record: SequenceRecord, operation: str, error: Exception | None) -> None:
        """An answer has ended, with `error` if there is one."""
        about: dict[str, AttributeValue] = {
            "gen_ai.operation.name": operation,
            "gen_ai.provider.name": PROVIDER,
            "gen_ai.request.model": self._model,
            "gen_ai.response.model": self._model,
        }
        failure = {} if error is None else {"error.type": type(error).__qualname__}
        self._duration.record(record.ended_s - record.arrival_s, {**about, **failure})
        waited_s = first_token_s(record)
        if error is None and waited_s is not None:
            self._first_token.record(waited_s, about)
            if record.decode_s is not None and record.num_output_tokens > 1:
                self._per_token.record(record.decode_s / (record.num_output_tokens - 1), about)
        for kind, count in (
            ("input", record.num_prompt_tokens),
            ("output", record.num_output_tokens),
        ):
            self._usage.record(count, {**about, "gen_ai.token.type": kind})
