"""What the scheduler hands to the engine for one device step, and what it says after the step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from flowkv_jax.request import Request
from transfer.types import BlockRun


class ScheduledSequence(NamedTuple):
    """Positions [start, start + num_tokens) of `request` are computed in this step.

    `samples` is true when the last of them yields a token. The input token of a decode may still
    be in flight: it was then sampled by the step scheduled just before, and is on the device.
    """

    request: Request
    start: int
    num_tokens: int
    samples: bool


@dataclass(frozen=True, slots=True)
class ScheduledStep:
    """One step, to be carried out in this order: swap_out, swap_in, then prefills and decodes.

    Attributes:
        step_id: rises by one a step.
        prefills: prompt chunks.
        decodes: one token each.
        sampling: those of `prefills`, then of `decodes`, that yield a token; `Scheduler.update`
            takes the tokens in this order.
        swap_out, swap_in: block copies device -> host and host -> device.
        expired: requests that ran past their deadline; they have ended, with reason "error".
        preempted: ids of requests that lost their blocks in the pool.
        num_tokens: tokens computed.
    """

    step_id: int
    prefills: tuple[ScheduledSequence, ...]
    decodes: tuple[ScheduledSequence, ...]
    sampling: tuple[ScheduledSequence, ...]
    swap_out: tuple[BlockRun, ...]
    swap_in: tuple[BlockRun, ...]
    expired: tuple[Request, ...]
    preempted: tuple[str, ...]
    num_tokens: int

    @property
    def is_empty(self) -> bool:
        """Nothing for the device to do."""
        return not (self.num_tokens or self.swap_out or self.swap_in)


class TokenUpdate(NamedTuple):
    """A sampled token that was appended to its request, and whether that ended the request."""

    request: Request
    token_id: int
    finished: bool


class StepDraft:
    """A step while it is being put together."""

    __slots__ = ("budget", "decodes", "preempted", "prefills", "swap_in", "swap_out")

    def __init__(self, budget: int) -> None:
        self.budget = budget  # tokens left
        self.prefills: list[ScheduledSequence] = []
        self.decodes: list[ScheduledSequence] = []
        self.swap_out: list[BlockRun] = []
        self.swap_in: list[BlockRun] = []
        self.preempted: list[str] = []

    @property
    def num_sequences(self) -> int:
        return len(self.prefills) + len(self.decodes)

    def seal(self, step_id: int, expired: tuple[Request, ...], num_tokens: int) -> ScheduledStep:
        sampling = [sequence for sequence in self.prefills if sequence.samples]
        sampling += self.decodes
        return ScheduledStep(
            step_id,
            tuple(self.prefills),
            tuple(self.decodes),
            tuple(sampling),
            tuple(self.swap_out),
            tuple(self.swap_in),
            expired,
            tuple(self.preempted),
            num_tokens,
        )
