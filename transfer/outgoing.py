"""One transfer at its source: attempts, legs, and the fence before anything is freed.

    attempt = one path = one leg, or several for a split, that run at the same time
    leg     = source's half here, destination's half there, and the destination's answer

A leg is over when our half has ended *and* the destination has answered (or is lost). An attempt
is over when all its legs are; until then nothing is unpinned, retried or reported. The first leg
that fails has its siblings stopped. The next attempt takes the next-best path of the decision.

The destination's answer decides: a leg that it calls done is done, even if our half was stopped
while the answer was on its way. All methods may be called by any thread.
"""

from __future__ import annotations

from collections.abc import Callable

from transfer import messages
from transfer.arrival import Arrival
from transfer.backends.base import Plan
from transfer.callbacks import DeferringLock, call_back
from transfer.channel import Channel
from transfer.checksum import plan_checksum
from transfer.errors import (
    BlocksBusy,
    Cancelled,
    DeadlineExceeded,
    EngineClosed,
    PeerLost,
    TransferError,
    from_wire,
    to_wire,
)
from transfer.handle import TransferHandle, TransferReport
from transfer.leg_link import LegLink
from transfer.lifecycle import LegState, TransferState, moved
from transfer.route import Route
from transfer.runtime import RegisteredPool, Runtime
from transfer.source_leg import Attempt, SourceLeg, as_transfer_error, check_source, run_local
from transfer.strategies import Strategy
from transfer.types import TransferRequest, Verification


class Outgoing:
    """One transfer.

    Args:
        request, strategy: what to move, and in which calls.
        routes: ways to do it, best first; at least one.
        engine_id: of the destination's engine; None where that is this one.
        next_leg: hands out leg numbers, and tells the engine whose they are.
        on_final: called once, when nothing of the transfer is left.
    """

    def __init__(
        self,
        runtime: Runtime,
        name: str,
        request: TransferRequest,
        strategy: Strategy,
        routes: list[Route],
        engine_id: str | None,
        next_leg: Callable[[Outgoing], int],
        on_final: Callable[[Outgoing], None],
    ) -> None:
        self.handle = TransferHandle(name, self.cancel)
        self.engine_id = engine_id
        self.name = name
        self._runtime = runtime
        self._request = request
        self._strategy = strategy
        self._routes = routes
        self.leg_numbers: list[int] = []
        self._next_leg = next_leg
        self._on_final = on_final
        self._lock = DeferringLock()
        self._state = TransferState.QUEUED
        self._attempt: Attempt | None = None
        self._attempts = 0
        self._stop_error: TransferError | None = None
        self._failure: TransferError | None = None
        self._was_offered = False
        self._is_ending = False
        self._settle_by_s: float | None = None
        self._started_s = runtime.clock()
        self._deadline_s = (
            None if request.deadline_s is None else self._started_s + request.deadline_s
        )
        self._intervals = [(run.src_start, run.num_blocks) for run in request.runs]
        self._source: RegisteredPool = runtime.pool(request.src)
        self._destination = runtime.pool(request.dst) if engine_id is None else None

    def start(self) -> None:
        """Pin the blocks of this engine's pools and begin the first attempt.

        Raises:
            BlocksBusy: another transfer uses some of them. Nothing is pinned then.
        """
        self._source.pins.read(self._intervals)
        if self._destination is not None:
            try:
                self._destination.pins.write(
                    self.name, [(run.dst_start, run.num_blocks) for run in self._request.runs]
                )
            except BlocksBusy:
                self._source.pins.unpin_read(self._intervals)
                raise
        with self._lock:
            self._begin()

    def cancel(self, error: TransferError | None = None) -> None:
        """Stop everything. Idempotent; the first error counts."""
        with self._lock:
            if self._state.is_final or self._stop_error is not None:
                return
            self._stop_error = error or Cancelled(f"transfer {self.name} was cancelled")
            self._fail(self._stop_error)

    def on_message(self, leg_number: int, message: messages.Message) -> None:
        """The destination says something about a leg."""
        with self._lock:
            leg = self._find(leg_number)
            if leg is None or leg.state.is_final:
                return
            leg.heard_s = self._runtime.clock()
            if isinstance(message, messages.Note):
                leg.link.deliver(message.body)
            elif isinstance(message, messages.Accept):
                if leg.state is LegState.OFFERED:
                    leg.state = moved(leg.state, LegState.MOVING)
            elif isinstance(message, messages.Moved):
                self._confirm(leg)
            elif isinstance(message, messages.Done):
                leg.calls, leg.error = message.calls, None
                self._answered(leg)
            elif isinstance(message, messages.Failed):
                leg.failed_there(from_wire(message.code, message.text))
                self._answered(leg)

    def on_ended(self, state: str) -> None:
        """The destination's last word on a transfer that we have given up."""
        with self._lock:
            if self._is_ending and not self._state.is_final:
                self._finish(completed=state == TransferState.COMPLETED.value)

    def channel_lost(self, channel: Channel, error: TransferError) -> None:
        """Notes may have been lost; the answers may still be had by another channel."""
        with self._lock:
            for leg in self._attempt.legs if self._attempt else ():
                if not leg.answered and leg.channel is channel:
                    leg.link.stop(error)

    def query(self) -> None:
        """Ask for every answer that is due, by whichever channel there is."""
        with self._lock:
            assert self.engine_id is not None
            if self._is_ending:
                self._send_end()
            for leg in self._attempt.legs if self._attempt else ():
                if not leg.answered:
                    leg.heard_s = self._runtime.clock()
                    self._runtime.peers.send(self.engine_id, messages.Query(leg.leg))

    def peer_lost(self, error: TransferError) -> None:
        """The destination's engine will never answer."""
        with self._lock:
            if self._state.is_final:
                return
            for leg in list(self._attempt.legs) if self._attempt else ():
                if not leg.answered:
                    leg.link.stop(error)
                    leg.failed_there(error)
                    self._answered(leg)
            if self._is_ending and not self._state.is_final:
                self._finish(completed=False)

    def tick(self, now_s: float) -> TransferError | None:
        """Deadlines and queries. Returns an error where the destination's engine must be dropped.

        Args:
            now_s: on the engine's clock.
        """
        config = self._runtime.config
        with self._lock:
            if self._state.is_final:
                return None
            late = self._deadline_s is not None and now_s >= self._deadline_s
            if late and self._stop_error is None:
                self.cancel(
                    DeadlineExceeded(
                        f"transfer {self.name} ran past its deadline of "
                        f"{self._request.deadline_s} s"
                    )
                )
            if self._settle_by_s is not None and now_s >= self._settle_by_s:
                self._settle_by_s = None
                return PeerLost(
                    f"the destination did not say within {config.settle_timeout_s} s that "
                    f"transfer {self.name} has stopped"
                )
            for leg in self._attempt.legs if self._attempt else ():
                waits = not leg.running and not leg.answered and self.engine_id is not None
                if waits and now_s - leg.heard_s >= config.query_after_s:
                    leg.heard_s = now_s
                    assert self.engine_id is not None
                    self._runtime.peers.send(self.engine_id, messages.Query(leg.leg))
        return None

    # Below, the lock is held.

    def _begin(self) -> None:
        """Start the next attempt: every leg of the next route."""
        route = self._routes[self._attempts]
        self._attempts += 1
        self._move(TransferState.MOVING)
        attempt = self._attempt = Attempt(self._attempts, route)
        now = self._runtime.clock()
        for part in route.legs:
            number = self._next_leg(self)
            self.leg_numbers.append(number)
            plan = Plan(
                self.name,
                number,
                self._request.src,
                self._request.dst,
                part.hops,
                part.runs,
                self._source.access.layout,
                self._strategy,
            )
            link = LegLink(self._note_sender(number), self._runtime.clock, self._deadline_s)
            attempt.legs.append(SourceLeg(number, part, plan, link, now, now))
        self._runtime.events.add(self.name, "attempt", route)
        for leg in attempt.legs:
            if leg.state is LegState.OFFERED:
                self._launch(attempt, leg)
            elif not leg.state.is_final:
                # A sibling failed before this one began.
                self._answered(leg)

    def _launch(self, attempt: Attempt, leg: SourceLeg) -> None:
        try:
            if self._stop_error is not None:
                raise self._stop_error
            if self.engine_id is None:
                self._launch_local(leg)
            else:
                self._launch_remote(attempt, leg, self.engine_id)
        except TransferError as error:
            leg.error = error
            leg.running = False
            self._answered(leg)

    def _launch_local(self, leg: SourceLeg) -> None:
        leg.running = True
        leg.state = moved(leg.state, LegState.MOVING)
        if leg.plan.data_bytes <= self._runtime.config.inline_bytes:
            self._run_local(leg)
        else:
            self._submit(leg, self._run_local, leg)

    def _launch_remote(self, attempt: Attempt, leg: SourceLeg, engine_id: str) -> None:
        runtime = self._runtime
        backend = runtime.backends[leg.route.backend]
        request = self._request
        half = leg.half = backend.offer(
            self._source.access, leg.plan, runtime.peers.view(engine_id)
        )
        verify = request.verification is Verification.CHECKSUM
        small = leg.plan.data_bytes <= runtime.config.inline_bytes
        digest = (
            plan_checksum(self._source.access, leg.plan, of_source=True)
            if verify and small
            else None
        )
        left = None if self._deadline_s is None else self._deadline_s - runtime.clock()
        if left is not None and left <= 0:
            raise DeadlineExceeded(f"transfer {self.name} ran past its deadline")
        offer = messages.Offer(
            transfer=self.name,
            leg=leg.leg,
            attempt=attempt.number,
            num_legs=len(attempt.legs),
            src=request.src,
            dst=request.dst,
            hops=leg.plan.hops,
            runs=messages.pack_runs(leg.plan.runs),
            strategy=self._strategy.value,
            backend=leg.route.backend,
            verify=verify,
            digest=digest,
            confirm=bool(request.src_generations),
            dst_generations=messages.pack_ids(leg.route.dst_generations),
            deadline_s=left,
            tag=request.tag,
            path_type=attempt.route.path_type.value,
            opening=half.opening,
        )
        leg.channel = runtime.peers.channel(engine_id)
        leg.running = half.needs_run or (verify and digest is None)
        if not runtime.peers.send(engine_id, offer):
            raise PeerLost("the connection to the destination's engine is lost")
        self._was_offered = True
        if leg.running:
            self._submit(leg, self._run_remote, leg, engine_id, verify and digest is None)

    def _submit(self, leg: SourceLeg, work: Callable[..., None], *args: object) -> None:
        try:
            self._runtime.senders.submit(work, *args)
        except RuntimeError:
            leg.running = False
            self._leg_failed(leg, EngineClosed("the engine closes"))
            if self.engine_id is None:
                self._answered(leg)

    def _confirm(self, leg: SourceLeg) -> None:
        assert self.engine_id is not None
        try:
            check_source(leg, self._source.access)
        except TransferError as error:
            self._leg_failed(leg, error)
        else:
            self._runtime.peers.send(self.engine_id, messages.Confirm(leg.leg))

    def _answered(self, leg: SourceLeg) -> None:
        """The destination's half has stopped. Ours may still have to."""
        leg.answered = True
        if leg.error is not None:
            leg.link.stop(leg.error)
        self._leg_over(leg)

    def _leg_over(self, leg: SourceLeg) -> None:
        if leg.running or not leg.answered or leg.state.is_final:
            return
        leg.state = moved(leg.state, LegState.DONE if leg.error is None else LegState.STOPPED)
        if leg.half is not None:
            leg.half.close()
        self._count(leg)
        if leg.error is not None:
            self._fail(leg.error)
        assert self._attempt is not None
        if self._attempt.is_over and not self._is_ending:
            self._attempt_over(self._attempt)

    def _attempt_over(self, attempt: Attempt) -> None:
        failures = [leg.error for leg in attempt.legs if leg.error is not None]
        if not failures:
            self._finish(completed=True)
            return
        final = (error for error in failures if not error.can_retry)
        failure = self._failure = next(final, self._failure or failures[0])
        more = self._attempts < len(self._routes)
        if self._stop_error is None and failure.can_retry and more:
            self._runtime.events.add(self.name, "retry", f"{type(failure).__name__}: {failure}")
            self._failure = self._settle_by_s = None
            self._move(TransferState.QUEUED)
            self._begin()
            return
        self._is_ending = True
        if not self._was_offered or self.engine_id is None or not self._send_end():
            self._finish(completed=False)

    def _fail(self, error: TransferError) -> None:
        """Begin to settle: stop every leg of the attempt that is not over."""
        self._failure = self._failure or error
        if self._state is not TransferState.SETTLING:
            self._move(TransferState.SETTLING)
            self._settle_by_s = self._runtime.clock() + self._runtime.config.settle_timeout_s
        for leg in list(self._attempt.legs) if self._attempt else ():
            if not leg.state.is_final:
                self._leg_failed(leg, error)

    def _leg_failed(self, leg: SourceLeg, error: TransferError) -> None:
        """Our half failed, or is to stop: tell the other one, and wait for it."""
        leg.error = leg.error or error
        leg.link.stop(error)
        if leg.state in (LegState.OFFERED, LegState.MOVING):
            leg.state = moved(leg.state, LegState.STOPPING)
            if self.engine_id is not None and leg.half is not None and not leg.answered:
                abort = messages.Abort(leg.leg, *to_wire(error))
                self._runtime.peers.send(self.engine_id, abort)

    def _send_end(self) -> bool:
        error = self._stop_error or self._failure or Cancelled("given up")
        assert self.engine_id is not None
        return self._runtime.peers.send(self.engine_id, messages.End(self.name, *to_wire(error)))

    def _finish(self, *, completed: bool) -> None:
        failure = self._stop_error or self._failure
        if completed:
            state = TransferState.COMPLETED
        elif isinstance(failure, Cancelled):
            state = TransferState.CANCELLED
        else:
            state = TransferState.FAILED
        self._source.pins.unpin_read(self._intervals)
        if self._destination is not None:
            self._destination.pins.unpin_write(self.name)
        report = self._report() if completed else None
        detail = "" if completed else f"{type(failure).__name__}: {failure}"
        self._runtime.events.add(self.name, state.value, detail)
        self._state = moved(self._state, state)
        self._on_final(self)
        error = None if completed else failure
        if self._destination is not None:
            way = ("", "") if report is None else report.way
            arrival = Arrival(self.name, self._request.dst, state, error, self._request.tag, *way)
            self._lock.defer(lambda: call_back(self._runtime.on_arrival, arrival))
        self._lock.defer(lambda: self.handle.finish(state, report, error))

    def _report(self) -> TransferReport:
        assert self._attempt is not None
        legs = self._attempt.legs
        return TransferReport(
            transfer=self.name,
            path_type=self._attempt.route.path_type,
            routes=tuple((leg.plan.hops, leg.route.backend) for leg in legs),
            data_bytes=self._request.data_bytes,
            runs=sum(len(leg.plan.runs) for leg in legs),
            calls=sum(leg.calls for leg in legs),
            seconds=self._runtime.clock() - self._started_s,
            retries=self._attempts - 1,
        )

    def _count(self, leg: SourceLeg) -> None:
        assert self._attempt is not None
        seconds = self._runtime.clock() - leg.started_s
        more = leg.metrics(seconds, is_retry=self._attempts > 1)
        self._runtime.metrics.add(self._attempt.route.path_type, leg.route.backend, more)
        if more.transfers and self._runtime.selector is not None:
            self._runtime.selector.observe(leg.plan.hops, leg.plan.data_bytes, seconds)

    def _move(self, state: TransferState) -> None:
        self._state = moved(self._state, state)
        self.handle.set_state(state)

    def _find(self, leg_number: int) -> SourceLeg | None:
        legs = self._attempt.legs if self._attempt is not None else []
        return next((leg for leg in legs if leg.leg == leg_number), None)

    # Below, no lock is held: halves, in worker threads.

    def _run_local(self, leg: SourceLeg) -> None:
        assert self._destination is not None
        failure: TransferError | None = None
        try:
            ends = (self._source.access, self._destination.access)
            is_verified = self._request.verification is Verification.CHECKSUM
            leg.calls = run_local(self._runtime.local, leg, *ends, is_verified=is_verified)
        except Exception as error:
            failure = as_transfer_error(error)
        with self._lock:
            leg.running = False
            leg.error = failure
            self._answered(leg)

    def _run_remote(self, leg: SourceLeg, engine_id: str, with_digest: bool) -> None:
        failure: TransferError | None = None
        try:
            if leg.half is not None and leg.half.needs_run:
                leg.half.run(leg.link)
            if with_digest:
                self._runtime.peers.send(
                    engine_id,
                    messages.Digest(
                        leg.leg, plan_checksum(self._source.access, leg.plan, of_source=True)
                    ),
                )
        except Exception as error:
            failure = as_transfer_error(error)
        with self._lock:
            leg.running = False
            if failure is not None and not leg.answered:
                self._leg_failed(leg, failure)
            self._leg_over(leg)

    def _note_sender(self, number: int) -> Callable[[bytes], None]:
        def send(body: bytes) -> None:
            note = messages.Note(number, False, body)
            if self.engine_id is None or not self._runtime.peers.send(self.engine_id, note):
                raise PeerLost("the connection to the destination's engine is lost")

        return send
