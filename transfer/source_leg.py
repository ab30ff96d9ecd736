"""Legs of a transfer at its source, and what is done for one without the transfer's lock."""

from __future__ import annotations

from dataclasses import dataclass, field

from transfer.backends.base import LocalMover, Plan, SendHalf
from transfer.channel import Channel
from transfer.checksum import check_same, plan_checksum
from transfer.errors import TransferError, from_wire, to_wire
from transfer.leg_link import LegLink
from transfer.lifecycle import LegState
from transfer.pool_access import PoolAccess, block_ids
from transfer.route import Leg, Route
from transfer.runtime import check_generations
from transfer.transfer_metrics import PathMetrics


@dataclass(slots=True)
class SourceLeg:
    """A leg in flight, offered by `channel`. `answered`: the destination's half has stopped."""

    leg: int
    route: Leg
    plan: Plan
    link: LegLink
    started_s: float
    heard_s: float
    state: LegState = LegState.OFFERED
    half: SendHalf | None = None
    channel: Channel | None = None
    running: bool = False
    answered: bool = False
    calls: int = 0
    error: TransferError | None = None

    def failed_there(self, error: TransferError) -> None:
        """The destination's half has stopped for this reason. One that leaves nothing to retry
        counts even where our half had failed with one that does."""
        if self.error is None or (self.error.can_retry and not error.can_retry):
            self.error = error

    def metrics(self, seconds: float, *, is_retry: bool) -> PathMetrics:
        """What to add to the counters, once the leg is final."""
        if self.state is not LegState.DONE:
            return PathMetrics(failures=1, retries=int(is_retry))
        return PathMetrics(
            transfers=1,
            retries=int(is_retry),
            calls=self.calls,
            runs=len(self.plan.runs),
            data_bytes=self.plan.data_bytes,
            seconds=seconds,
        )


@dataclass(slots=True)
class Attempt:
    """The legs of one path."""

    number: int
    route: Route
    legs: list[SourceLeg] = field(default_factory=list)

    @property
    def is_over(self) -> bool:
        return all(leg.state.is_final for leg in self.legs)


def run_local(
    mover: LocalMover,
    leg: SourceLeg,
    source: PoolAccess,
    destination: PoolAccess,
    *,
    is_verified: bool,
) -> int:
    """A whole leg within this process; returns its calls. Raises where it cannot be vouched for."""
    _check_destination(leg, destination)
    calls = mover.move(source, destination, leg.plan, leg.link.check)
    destination.flush()
    if is_verified:
        there = plan_checksum(source, leg.plan, of_source=True)
        check_same(leg.plan, there, plan_checksum(destination, leg.plan, of_source=False))
    check_source(leg, source)
    _check_destination(leg, destination)
    return calls


def check_source(leg: SourceLeg, source: PoolAccess) -> None:
    """Raise `StaleGeneration` if one of the leg's blocks was freed at the source."""
    expected = leg.route.src_generations
    ids = block_ids(leg.route.runs, of_source=True) if expected else ()
    check_generations(leg.plan.src, source, ids, expected)


def _check_destination(leg: SourceLeg, destination: PoolAccess) -> None:
    expected = leg.route.dst_generations
    ids = block_ids(leg.route.runs, of_source=False) if expected else ()
    check_generations(leg.plan.dst, destination, ids, expected)


def as_transfer_error(error: Exception) -> TransferError:
    """The error itself, or a `BackendError` that tells of it."""
    return error if isinstance(error, TransferError) else from_wire(*to_wire(error))
