"""What a step has yielded: tokens go into their sequences, and some sequences end with them.

A sequence ends by its stop rules, which the scheduler knows; because its output has the form that
it must have, and nothing can follow; or with an error if it left that form. The last two are found
here, for they take a matcher.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from flowkv_jax.engine.model_runner import StepResult
from flowkv_jax.engine.scheduler import Scheduler
from flowkv_jax.engine.served import Served
from flowkv_jax.engine.served_table import ServedTable
from flowkv_jax.engine.step import ScheduledStep
from flowkv_jax.engine.updates import prompt_update, token_update
from flowkv_jax.errors import UnprocessableError
from flowkv_jax.request import RequestStatus
from flowkv_jax.sequence import SequenceUpdate


@dataclass(frozen=True)
class Outcome:
    """What is to be done after a step.

    Attributes:
        updates: to be said.
        ended: the scheduler has ended them.
        filled: they are SENDING, and their newest token has been read.
    """

    updates: list[SequenceUpdate] = field(default_factory=list)
    ended: list[Served] = field(default_factory=list)
    filled: list[Served] = field(default_factory=list)


def take_in(
    step: ScheduledStep,
    result: StepResult,
    scheduler: Scheduler,
    table: ServedTable,
    vocab_size: int,
    now_s: float,
) -> Outcome:
    """Take in the results of the oldest step that was not updated yet."""
    outcome = Outcome()
    outcome.updates.extend(
        prompt_update(served, scores, vocab_size)
        for scores in result.prompt_scores
        if (served := table.of(scores.sequence.request)) is not None
    )
    tokens = scheduler.update(step, result.tokens, now_s)
    # Tokens are in the order of `step.sampling`, without the sequences that have ended.
    rows = zip(step.sampling, result.rows, strict=True)
    for request, token_id, _ in tokens:
        samples, row = next(where for sequence, where in rows if sequence.request is request)
        served = table.of(request)
        if served is None:
            raise RuntimeError(f"{request.request_id} is not of this node")
        served.state.append(token_id)
        update = token_update(served, token_id, samples, row, vocab_size)
        outcome.updates.extend(_held_to_form(served, update, scheduler, now_s))
        if request.is_finished:
            outcome.ended.append(served)
        elif request.status is RequestStatus.SENDING:
            outcome.filled.append(served)
    return outcome


def _held_to_form(
    served: Served, update: SequenceUpdate, scheduler: Scheduler, now_s: float
) -> list[SequenceUpdate]:
    """What is said of a new token; ends the sequence if its output has left its form, or has it."""
    matcher, request = served.state.matcher, served.request
    if matcher is None:
        return [update]
    if matcher.failure is not None:
        scheduler.finish(request, "error", None, now_s)
        reason = f"structured_outputs failed after {update.start} tokens: {matcher.failure}"
        return [served.failed(UnprocessableError(reason))]
    if not matcher.is_complete or update.finish_reason == "stop":
        return [update]
    # Its last token is a part of the answer, which that of a sequence that stops is not. So the end
    # is said apart. It is complete also if the token was the last that it might have.
    scheduler.finish(request, "stop", None, now_s)
    request.finish_reason = "stop"
    last = msgspec.structs.replace(update, finish_reason=None, stop_reason=None)
    end = msgspec.structs.replace(
        last, start=request.num_output_tokens, token_ids=(), logprobs=None, finish_reason="stop"
    )
    return [last, end]
