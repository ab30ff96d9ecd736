"""Sequences and their news between processes. Pure, no JAX.

Monotonic clocks of two hosts have nothing to do with each other, so times travel as ages: how long
ago something was, or how much time is left. What a message took on its way is lost; deadlines end
late by that, never early.

The `n` sequences of one request share their prompt and their parameters, and a message carries
each of these once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Annotated, Any, Generic, TypeVar

import msgspec

from flowkv_jax.cluster.error_wire import MAX_TEXT, WireError, error_from_wire, error_to_wire
from flowkv_jax.cluster.facts import Count, NodeName
from flowkv_jax.engine.output_processor import LogprobsRow
from flowkv_jax.errors import ValidationError
from flowkv_jax.outputs import FinishReason
from flowkv_jax.sampling_params import RequestOutputKind, SamplingParams
from flowkv_jax.sequence import HandoffReport, PromptLogprobs, SequenceSpec, SequenceUpdate
from flowkv_jax.structured_outputs import StructuredOutputs

Token = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]
Tokens = tuple[Token, ...]
SequenceId = Annotated[str, msgspec.Meta(max_length=1024)]
Text = Annotated[str, msgspec.Meta(max_length=MAX_TEXT)]
Row = tuple[float, int, tuple[int, ...], tuple[float, ...]]
"""logprob, rank, top_ids, top_logprobs."""


class WireParams(msgspec.Struct, frozen=True, array_like=True):
    """`SamplingParams`: what the caller gave, and what the model's defaults filled in."""

    given: dict[str, Any]
    filled: dict[str, Any] = {}


class WireSpec(msgspec.Struct, frozen=True, array_like=True):
    """A `SequenceSpec`; `prompt` and `params` are indices in the lists beside it."""

    sequence_id: SequenceId
    attempt: Count
    prompt: Count
    params: Count
    seed: int
    max_total_tokens: Count
    age_s: float
    left_s: float | None = None
    output_token_ids: Tokens = ()
    priority: int = 0
    cache_salt: Text | None = None
    bad_word_ids: tuple[Tokens, ...] = ()
    decode_node: NodeName | None = None
    hold: SequenceId | None = None


class WireSpecs(msgspec.Struct, frozen=True, array_like=True):
    """Sequences, with what they share held once."""

    prompts: list[list[Token]]
    params: list[WireParams]
    specs: list[WireSpec]


class WireUpdate(msgspec.Struct, frozen=True, array_like=True):
    """A `SequenceUpdate`."""

    sequence_id: SequenceId
    attempt: Count
    start: Count = 0
    token_ids: Tokens = ()
    finish_reason: FinishReason | None = None
    stop_reason: int | Text | None = None
    num_cached_tokens: Count = 0
    num_preemptions: Count = 0
    scheduled_age_s: float | None = None
    logprobs: tuple[Row, ...] | None = None
    prompt_logprobs: tuple[Count, Tokens, tuple[Row, ...]] | None = None
    handoff: HandoffReport | None = None
    handoff_error: Text | None = None
    decode_node: Text | None = None
    error: WireError | None = None


def specs_to_wire(specs: Iterable[SequenceSpec], now_s: float) -> WireSpecs:
    """`now_s` is on the clock of the specs' own times."""
    prompts: _Shared[list[int], list[int]] = _Shared(lambda prompt: prompt)
    params: _Shared[SamplingParams, WireParams] = _Shared(_params_to_wire)
    rows = [
        WireSpec(
            spec.sequence_id,
            spec.attempt,
            prompts.index(spec.prompt_token_ids),
            params.index(spec.sampling_params),
            spec.seed,
            spec.max_total_tokens,
            now_s - spec.arrival_s,
            None if spec.deadline_s is None else spec.deadline_s - now_s,
            spec.output_token_ids,
            spec.priority,
            spec.cache_salt,
            spec.bad_word_ids,
            spec.decode_node,
            spec.hold,
        )
        for spec in specs
    ]
    return WireSpecs(prompts.items, params.items, rows)


def specs_from_wire(wire: WireSpecs, now_s: float) -> list[SequenceSpec]:
    """The sequences, their times on the clock of `now_s`.

    Raises:
        ValidationError: parameters that `SamplingParams` does not take, or a sequence that names a
            prompt or parameters that did not come with it.
    """
    for spec in wire.specs:
        if spec.prompt >= len(wire.prompts) or spec.params >= len(wire.params):
            raise ValidationError(f"{spec.sequence_id!r} came without its prompt or parameters")
    params = [_params_from_wire(each) for each in wire.params]
    return [
        SequenceSpec(
            sequence_id=spec.sequence_id,
            attempt=spec.attempt,
            prompt_token_ids=wire.prompts[spec.prompt],
            sampling_params=params[spec.params],
            seed=spec.seed,
            max_total_tokens=spec.max_total_tokens,
            arrival_s=now_s - spec.age_s,
            deadline_s=None if spec.left_s is None else now_s + spec.left_s,
            output_token_ids=spec.output_token_ids,
            priority=spec.priority,
            cache_salt=spec.cache_salt,
            bad_word_ids=spec.bad_word_ids,
            decode_node=spec.decode_node,
            hold=spec.hold,
        )
        for spec in wire.specs
    ]


def updates_to_wire(updates: Iterable[SequenceUpdate], now_s: float) -> list[WireUpdate]:
    """`now_s` is on the clock of `scheduled_s`."""
    return [
        WireUpdate(
            update.sequence_id,
            update.attempt,
            update.start,
            update.token_ids,
            update.finish_reason,
            update.stop_reason,
            update.num_cached_tokens,
            update.num_preemptions,
            None if update.scheduled_s is None else now_s - update.scheduled_s,
            None if update.logprobs is None else _rows_to_wire(update.logprobs),
            None if update.prompt_logprobs is None else _prompt_to_wire(update.prompt_logprobs),
            update.handoff,
            None if update.handoff_error is None else update.handoff_error[:MAX_TEXT],
            update.decode_node,
            None if update.error is None else error_to_wire(update.error),
        )
        for update in updates
    ]


def updates_from_wire(wire: Iterable[WireUpdate], now_s: float) -> list[SequenceUpdate]:
    """The news, their times on the clock of `now_s`."""
    return [
        SequenceUpdate(
            sequence_id=each.sequence_id,
            attempt=each.attempt,
            start=each.start,
            token_ids=each.token_ids,
            finish_reason=each.finish_reason,
            stop_reason=each.stop_reason,
            num_cached_tokens=each.num_cached_tokens,
            num_preemptions=each.num_preemptions,
            scheduled_s=None if each.scheduled_age_s is None else now_s - each.scheduled_age_s,
            logprobs=None if each.logprobs is None else _rows_from_wire(each.logprobs),
            prompt_logprobs=(
                None if each.prompt_logprobs is None else _prompt_from_wire(each.prompt_logprobs)
            ),
            handoff=each.handoff,
            handoff_error=each.handoff_error,
            decode_node=each.decode_node,
            error=None if each.error is None else error_from_wire(each.error),
        )
        for each in wire
    ]


_ItemT = TypeVar("_ItemT")
_WireT = TypeVar("_WireT")


class _Shared(Generic[_ItemT, _WireT]):
    """Makes each object into its wire form once, told apart by identity."""

    def __init__(self, to_wire: Callable[[_ItemT], _WireT]) -> None:
        self.items: list[_WireT] = []
        self._to_wire = to_wire
        self._index: dict[int, int] = {}

    def index(self, item: _ItemT) -> int:
        found = self._index.get(id(item))
        if found is None:
            found = self._index[id(item)] = len(self.items)
            self.items.append(self._to_wire(item))
        return found


def _params_to_wire(params: SamplingParams) -> WireParams:
    values = params.to_mapping()
    given = {name: value for name, value in values.items() if name in params.given_fields}
    return WireParams(given, {k: v for k, v in values.items() if k not in given})


def _params_from_wire(wire: WireParams) -> SamplingParams:
    """What was given counts as given again, and only that."""
    given = dict(wire.given)
    try:
        if "output_kind" in given:
            given["output_kind"] = RequestOutputKind(given["output_kind"])
        if given.get("structured_outputs") is not None:
            given["structured_outputs"] = StructuredOutputs.from_mapping(
                given["structured_outputs"]
            )
        params = SamplingParams(**given)
    except (TypeError, ValueError) as error:
        if isinstance(error, ValidationError):
            raise
        raise ValidationError(f"sampling parameters that cannot be read: {error}") from None
    return params.with_defaults(wire.filled) if wire.filled else params


def _rows_to_wire(rows: Sequence[LogprobsRow]) -> tuple[Row, ...]:
    return tuple(
        (row.logprob, row.rank, tuple(row.top_ids), tuple(row.top_logprobs)) for row in rows
    )


def _rows_from_wire(rows: Sequence[Row]) -> tuple[LogprobsRow, ...]:
    return tuple(LogprobsRow(*row) for row in rows)


def _prompt_to_wire(prompt: PromptLogprobs) -> tuple[int, Tokens, tuple[Row, ...]]:
    return prompt.start, prompt.token_ids, _rows_to_wire(prompt.rows)


def _prompt_from_wire(wire: tuple[int, Tokens, tuple[Row, ...]]) -> PromptLogprobs:
    start, token_ids, rows = wire
    return PromptLogprobs(start, token_ids, _rows_from_wire(rows))
