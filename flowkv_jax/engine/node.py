"""One model replica: scheduler, blocks, runner, and the thread that drives them.

    other threads                        the node's thread
    -------------                        -----------------------------------------------------
    start / stop / call ──mailbox──>     take messages
                                         schedule step n+1          (host)
                                         dispatch step n+1          (device starts it after n)
                                         sample step n+1            (if it can without step n's)
    collector: step n is done ──mailbox─>take messages until step n is done
                                         update n, then sample n+1 if it could not before
    deliver(updates) <────────────────   say what is new; end what it answers has to end

Everything below `_run` belongs to the node's thread alone: the scheduler, the blocks, the pool,
the hand-offs and the sequences need no lock. Other threads post messages, which are carried out
between two steps and while the device works, and read `load`, an immutable snapshot.

A step that fails on the device ends every sequence with `GenerationError` and starts over with an
empty pool. If even that fails the node is dead: every sequence, present or future, gets
`EngineDeadError`.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TypeVar

from flowkv_jax.cluster.node_port import Deliver, SequenceKey, StopOrder
from flowkv_jax.controller.snapshot import NUM_POOL_CELLS, NodeReport
from flowkv_jax.engine.grammar_cache import GrammarCache
from flowkv_jax.engine.mailbox import Collector, Mailbox, failed, log_failure
from flowkv_jax.engine.model_runner import InFlightStep, ModelRunner, StepResult
from flowkv_jax.engine.outcome import take_in
from flowkv_jax.engine.scheduler import Scheduler
from flowkv_jax.engine.served import Served
from flowkv_jax.engine.served_table import ServedTable
from flowkv_jax.engine.step import ScheduledStep
from flowkv_jax.engine.step_meter import StepMeter
from flowkv_jax.engine.updates import late_update
from flowkv_jax.errors import EngineDeadError, GenerationError, RetryableRequestError
from flowkv_jax.handoff.agent import HandoffAgent
from flowkv_jax.kv_cache.manager import KVCacheManager
from flowkv_jax.load import NodeLoad
from flowkv_jax.metrics.distribution import Histogram
from flowkv_jax.outputs import FinishReason
from flowkv_jax.request import Request, RequestStatus
from flowkv_jax.sequence import SequenceSpec, SequenceUpdate
from transfer.urgency import make_urgent

logger = logging.getLogger(__name__)

_Result = TypeVar("_Result")
_MAX_CONSECUTIVE_FAILURES = 3
_NO_THREAD = (
    "the engine has no thread in this process: it was made before a fork; make one in each process"
)


class Node:
    """Runs sequences on one model replica: a `NodePort` for whoever drives it.

    Args:
        name: unique among the nodes that know each other.
        runner: the device side; this node becomes its only user.
        scheduler, kv: the host side; likewise.
        vocab_size: V.
        eos_token_ids: the model's end tokens.
        deliver: where updates go.
        grammars: for sequences whose output must have a form.
        on_death: called once, on the node's thread, when it can serve nothing any more, unless it
            was shut down.
        enable_overlap: schedule step n+1 before the tokens of step n have been read.
        is_urgent: its host threads run before those that compute on the same cores, if the system
            permits it (`transfer.urgency`).
        debug: check the cache's books after every step.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        name: str,
        runner: ModelRunner,
        scheduler: Scheduler,
        kv: KVCacheManager,
        *,
        vocab_size: int,
        eos_token_ids: Sequence[int],
        deliver: Deliver,
        grammars: GrammarCache | None = None,
        on_death: Callable[[EngineDeadError], None] | None = None,
        enable_overlap: bool = True,
        is_urgent: bool = False,
        debug: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._name = name
        self._runner = runner
        self._scheduler = scheduler
        self._kv = kv
        self._vocab_size = vocab_size
        self._eos_token_ids = tuple(eos_token_ids)
        self._grammars = grammars
        self._deliver = deliver
        self._on_death = on_death
        self._enable_overlap = enable_overlap
        self._is_urgent = is_urgent
        self._debug = debug
        self._clock = clock
        self._mailbox = Mailbox()
        self._handoffs: HandoffAgent | None = None
        self._served = ServedTable()
        self._num_failures = 0
        self._is_blocked = False  # nothing to compute until a transfer moves on
        self._is_stopping = False
        self._dead: Exception | None = None
        # Reentrant: a collection that starts while it is held may close a dropped stream, and that
        # posts a message.
        self._death_lock = threading.RLock()
        self._load = scheduler.load()
        self._meter = StepMeter(clock())
        self._collector = Collector(f"flowkv-{name}-collector", self._mailbox, is_urgent=is_urgent)
        self._thread = threading.Thread(target=self._run, name=f"flowkv-{name}", daemon=True)
        self._begin()

    def _begin(self) -> None:
        self._thread.start()
        atexit.register(self.shutdown)  # the thread must end before JAX does

    # For other threads

    @property
    def name(self) -> str:
        return self._name

    @property
    def is_alive(self) -> bool:
        """False once the node can serve nothing any more."""
        return self._dead is None and not self._is_stopping and self._thread.is_alive()

    @property
    def death(self) -> Exception:
        """Why it serves nothing any more; only for a node that is not alive."""
        return self._dead or EngineDeadError(
            "the engine is being shut down" if self._is_stopping else _NO_THREAD
        )

    @property
    def load(self) -> NodeLoad:
        """Load after the latest step."""
        return self._load

    def stats(self) -> dict[str, float]:
        """Steps so far, and the median host time of a step (all but waiting for the device), ms."""
        return self._meter.stats()

    @property
    def step_tokens(self) -> Histogram:
        """Tokens a step; see `StepMeter.tokens`. Any thread."""
        return self._meter.tokens

    def report(self) -> Future[NodeReport]:
        """What the controller wants to know regularly."""
        return self.call(self._report)

    def attach(self, handoffs: HandoffAgent) -> None:
        """Let sequences come and go; before the first one is started."""
        self._handoffs = handoffs

    def start(self, specs: Sequence[SequenceSpec]) -> Future[None]:
        """Serve sequences, all or none.

        The future fails with what `Served.of` or `Scheduler.add` raises.
        """
        try:
            served = [self.make(spec) for spec in specs]
        except Exception as error:
            return failed(error)
        return self.call(lambda: self._accept(served))

    def stop(self, orders: Sequence[StopOrder]) -> None:
        """End sequences without an update; unknown ones are passed over."""
        self.post(lambda: self._carry_out(orders))

    def redirect(self, key: SequenceKey, decode_node: str | None) -> None:
        """See `NodePort.redirect`."""
        self.post(lambda: self._redirect(key, decode_node))

    def release(self, node: str) -> None:
        """See `NodePort.release`."""
        if self._handoffs is not None:
            self._handoffs.on_lost([node])

    def reset_prefix_cache(self) -> Future[bool]:
        """Forget cached prompts; see `KVCacheManager.reset_prefix_cache`."""
        return self.call(self._kv.reset_prefix_cache)

    def call(self, function: Callable[[], _Result]) -> Future[_Result]:
        """Run a function on the node's thread, between two steps or while the device works."""
        if not self._thread.is_alive():  # asked before the lock: a fork may have copied it locked
            return failed(self.death)
        # Under the lock, so that no message is posted behind the back of a dying thread.
        with self._death_lock:
            if self._dead is not None:
                return failed(self._dead)
            return self._mailbox.post(function)

    def post(self, function: Callable[[], object]) -> None:
        """`call` for what nobody waits for: what it raises is logged."""
        self.call(function).add_done_callback(log_failure)

    def shutdown(self, timeout_s: float | None = None) -> None:
        """End everything with `EngineDeadError`, then the thread. Idempotent."""
        atexit.unregister(self.shutdown)
        self._is_stopping = True
        self.call(lambda: None)  # wakes the thread
        # Not if a collection on the thread itself stops it: it ends after its present step.
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout_s)

    # The node's thread

    def _run(self) -> None:
        if self._is_urgent:
            make_urgent()
        in_flight: InFlightStep | None = None
        try:
            while True:
                self._take_messages(is_idle=in_flight is None)
                if self._is_stopping:
                    break
                try:
                    in_flight = self._step(in_flight)
                    if in_flight is not None:
                        self._num_failures = 0
                except Exception as error:
                    in_flight = None
                    self._recover(error)
                self._load = self._scheduler.load()
            if in_flight is not None:
                in_flight.collect()
            self._die(EngineDeadError("the engine was shut down"), is_asked_for=True)
        except BaseException as error:
            logger.exception("the engine died")
            self._die(EngineDeadError(f"the engine died: {error!r}"), is_asked_for=False)
        finally:
            self._collector.close()

    def _take_messages(self, *, is_idle: bool) -> None:
        """Carry out what is there; an idle node without work waits for something."""
        if is_idle and not self._has_work:
            before = self._scheduler.standing
            self._tend_handoffs()  # the last step may have made room, and this may make work
            if self._scheduler.standing == before and not self._is_stopping:
                self._mailbox.take(self._sleep_s())
        self._mailbox.take_all()
        self._tend_handoffs()

    @property
    def _has_work(self) -> bool:
        return self._scheduler.has_work and not self._is_blocked

    def _tend_handoffs(self) -> None:
        if self._handoffs is not None:
            self._handoffs.tick(self._clock())

    def _sleep_s(self) -> float | None:
        """Until something is due although nobody says so; None for never."""
        handoffs_s = None if self._handoffs is None else self._handoffs.next_due_s
        due = (self._scheduler.next_deadline_s, handoffs_s)
        next_s = min((when for when in due if when is not None), default=None)
        return None if next_s is None else max(next_s - self._clock(), 0.0)

    def _step(self, in_flight: InFlightStep | None) -> InFlightStep | None:
        """Schedule and start the next step, then finish the one in flight."""
        started = self._clock()
        waited_s = 0.0
        if in_flight is not None and not self._enable_overlap:
            waited_s += self._finish_step(in_flight)
            in_flight = None
        step = self._scheduler.schedule(self._clock())
        if step.expired:
            self._expire(step.expired)
        launched = None
        if not step.is_empty:
            launched = self._runner.dispatch(step)
            launched.dispatched_s = self._clock()
            if in_flight is None or not self._served.num_host_dependent:
                self._runner.sample(launched, self._served.state_of)
        if self._handoffs is not None:
            self._announce(self._handoffs, step)
        if in_flight is not None:
            waited_s += self._finish_step(in_flight)
            if launched is not None:  # does nothing if that was done above
                self._runner.sample(launched, self._served.state_of)
        # Said of a step with nothing before it: messages may have come while one was waited for.
        self._is_blocked = (
            in_flight is None and step.is_empty and self._scheduler.is_waiting_for_transfers
        )
        is_stuck = in_flight is None and step.is_empty and not step.expired and self._has_work
        if is_stuck and (self._handoffs is None or not self._handoffs.make_room()):
            raise RuntimeError("requests are alive, none is scheduled and none is in flight")
        self._meter.count(self._clock() - started - waited_s, is_empty=step.is_empty)
        return launched

    def _report(self) -> NodeReport:
        pace = self._meter.take(self._clock())
        events = self._kv.take_prefix_events()
        return NodeReport(
            load=self._scheduler.load(),
            device_utilisation=pace.utilisation,
            prefill_tokens_per_s=pace.prefill_tokens_per_s,
            decode_step_s=pace.decode_step_s,
            added_blocks=events.added,
            removed_blocks=events.removed,
            prefixes_cleared=not events.is_complete,
            pool_map=self._kv.allocator.used_map(NUM_POOL_CELLS),
            step_tokens=self._meter.tokens,
        )

    def _finish_step(self, in_flight: InFlightStep) -> float:
        """Read a step's tokens and pass them on. Returns the seconds the device was waited for."""
        waiting = self._clock()
        result = self._await(in_flight)
        now_s = self._clock()
        self._meter.done(in_flight.step, in_flight.dispatched_s, now_s)
        outcome = take_in(
            in_flight.step, result, self._scheduler, self._served, self._vocab_size, now_s
        )
        for served in outcome.ended:
            self.forget(served)
        if self._debug:
            self._kv.check()
        self._load = self._scheduler.load()  # so that whoever gets an output sees its effect
        if outcome.updates:
            self.say(outcome.updates)
        for served in outcome.filled:
            if not served.request.is_finished:
                self._send(served)
        return now_s - waiting

    def _await(self, in_flight: InFlightStep) -> StepResult:
        """Wait for the device, and carry out messages meanwhile."""
        done = self._collector.collect(in_flight)
        while not done.done():
            self._mailbox.take()
        return done.result()

    def _announce(self, handoffs: HandoffAgent, step: ScheduledStep) -> None:
        """Ask for room where prompts go whose last chunk has just been dispatched: the answer comes
        while the device computes."""
        for sequence in step.prefills:
            if sequence.samples and sequence.request.hands_off:
                handoffs.announce(self._require(sequence.request))

    # For hand-offs: the node as their `Host`; on the node's thread

    @property
    def scheduler(self) -> Scheduler:
        return self._scheduler

    @property
    def kv(self) -> KVCacheManager:
        return self._kv

    def now_s(self) -> float:
        """The node's clock."""
        return self._clock()

    def make(self, spec: SequenceSpec) -> Served:
        """A sequence that has not begun here. Any thread."""
        return Served.of(spec, self._eos_token_ids, self._grammars)

    def say(self, updates: Sequence[SequenceUpdate]) -> None:
        """Pass news on, and end what has to end for them."""
        orders = self._deliver(self._name, updates)
        if orders:
            self._carry_out(orders)
            self._load = self._scheduler.load()

    def remember(self, served: Served) -> None:
        """The scheduler has taken the sequence in."""
        self._served.add(served)

    def forget(self, served: Served) -> None:
        """The scheduler has ended the sequence."""
        self._served.remove(served)
        if self._handoffs is not None:
            self._handoffs.ended(served)

    def replace_older(self, served: Served) -> None:
        """An earlier attempt at the same sequence, if it is still here, gives way.

        Raises:
            DuplicateRequestError: the one that is here is as new.
        """
        before = self._served.older(served)
        if before is not None:
            self._end(before, "abort", None)

    # Sequences coming and going

    def _require(self, request: Request) -> Served:
        served = self._served.of(request)
        if served is None:
            raise RuntimeError(f"{request.request_id} is not of this node")
        return served

    def _accept(self, served: Sequence[Served]) -> None:
        for one in served:
            self.replace_older(one)
        now_s = self._clock()
        try:
            for one in served:
                self._scheduler.add(one.request, now_s)
        except Exception:
            for one in served:
                self._scheduler.finish(one.request, "abort", None, now_s)
            raise
        for one in served:
            self.remember(one)

    def _end(
        self, served: Served, finish_reason: FinishReason, stop_reason: int | str | None
    ) -> None:
        self._scheduler.finish(served.request, finish_reason, stop_reason, self._clock())
        self.forget(served)

    def _carry_out(self, orders: Sequence[StopOrder]) -> None:
        for order in orders:
            served = self._served.find(order.key)
            if served is not None:
                self._end(served, order.finish_reason, order.stop_reason)
            elif self._handoffs is not None:
                self._handoffs.stop(order.key)

    def _redirect(self, key: SequenceKey, decode_node: str | None) -> None:
        if self._handoffs is not None and self._handoffs.redirect(key, decode_node):
            return
        served = self._served.find(key)
        if served is None:
            gone = RetryableRequestError(f"{key.sequence_id} has left node {self._name}")
            self.say([SequenceUpdate(sequence_id=key[0], attempt=key[1], error=gone)])
            return
        request = served.request
        if self._handoffs is None or request.status is RequestStatus.RECEIVING:
            return
        served.spec = dataclasses.replace(served.spec, decode_node=decode_node)
        if decode_node is None:  # its last chunk or its last token here is still to come
            request.hands_off = False
            return
        self._scheduler.send(request)
        if request.status is RequestStatus.SENDING:  # it has decoded here so far
            self._send(served)

    def _send(self, served: Served) -> None:
        """A sequence is SENDING, and its newest token has been read."""
        if self._handoffs is not None:
            self._handoffs.announce(served)
            self._handoffs.filled(served)

    def _expire(self, requests: Sequence[Request]) -> None:
        late = [self._require(request) for request in requests]
        for served in late:
            self.forget(served)
        self.say([late_update(served, self._clock()) for served in late])

    # When things go wrong

    def _recover(self, error: Exception) -> None:
        self._num_failures += 1
        logger.exception("a step failed; every live request ends")
        if self._num_failures >= _MAX_CONSECUTIVE_FAILURES:
            raise error
        self._scheduler.fail_all(self._clock())
        self._runner.reset()
        self._fail_all(GenerationError(f"a step failed in the engine: {error!r:.500}"))

    def _fail_all(self, error: Exception) -> None:
        """Tell of the end of every sequence; the scheduler has ended them."""
        served = self._served.all()
        for one in served:
            self.forget(one)
        if served:
            self._deliver(self._name, [one.failed(error) for one in served])

    def _die(self, error: EngineDeadError, *, is_asked_for: bool) -> None:
        """Answer everyone who waits, and everyone who comes later."""
        with self._death_lock:
            self._dead = error
        # Whatever state a failure left the scheduler in, nobody is served any more.
        with contextlib.suppress(Exception):
            self._scheduler.fail_all(self._clock())
            self._load = self._scheduler.load()
        if self._on_death is not None and not is_asked_for:
            self._on_death(error)
        self._fail_all(error)
        self._mailbox.refuse_all(error)
