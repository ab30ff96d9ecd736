"""One model replica: scheduler, blocks, runner, and the thread that drives them.

    callers' threads                     the node's thread
    ----------------                     -----------------------------------------------------
    submit / abort / call ──mailbox──>   take messages
                                         schedule step n+1          (host)
                                         dispatch step n+1          (device starts it after n)
                                         collect step n             (waits for the device)
                                         update, detokenise n
    sink(output) <────────────────────   hand out what is new

Everything below `_run` belongs to the node's thread alone: the scheduler, the blocks, the pool and
the live requests need no lock. Other threads post messages and read `load`, an immutable snapshot.

A step that fails on the device ends every live request with `GenerationError` and starts over with
an empty pool. If even that fails the node is dead: every request, present or future, gets
`EngineDeadError`.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import queue
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

from flowkv_jax.engine.live_request import LiveRequest
from flowkv_jax.engine.model_runner import InFlightStep, ModelRunner, StepResult
from flowkv_jax.engine.output_processor import LogprobsRow
from flowkv_jax.engine.sampler import SamplerOutput
from flowkv_jax.engine.sampling_state import SamplingState
from flowkv_jax.engine.scheduler import Scheduler
from flowkv_jax.errors import (
    DeadlineExceeded,
    DuplicateRequestError,
    EngineDeadError,
    GenerationError,
)
from flowkv_jax.kv_cache.manager import KVCacheManager
from flowkv_jax.load import NodeLoad
from flowkv_jax.request import Request

logger = logging.getLogger(__name__)

_Result = TypeVar("_Result")
_Message = tuple[Callable[[], Any], "Future[Any]"]
_MAX_CONSECUTIVE_FAILURES = 3
_STEPS_REMEMBERED = 1024
_NO_THREAD = (
    "the engine has no thread in this process: it was made before a fork; make one in each process"
)


class Node:
    """Runs requests on one model replica.

    Args:
        runner: the device side; this node becomes its only user.
        scheduler, kv: the host side; likewise.
        vocab_size: V.
        enable_overlap: schedule step n+1 before the tokens of step n have been read.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        runner: ModelRunner,
        scheduler: Scheduler,
        kv: KVCacheManager,
        *,
        vocab_size: int,
        enable_overlap: bool = True,
        debug: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._runner = runner
        self._scheduler = scheduler
        self._kv = kv
        self._vocab_size = vocab_size
        self._enable_overlap = enable_overlap
        self._debug = debug
        self._clock = clock
        self._mailbox: queue.SimpleQueue[_Message] = queue.SimpleQueue()
        self._live: dict[str, LiveRequest] = {}
        self._sequence_owner: dict[str, tuple[LiveRequest, int]] = {}
        self._states: dict[str, SamplingState] = {}
        self._num_host_dependent = 0
        self._num_failures = 0
        self._is_stopping = False
        self._dead: Exception | None = None
        # Reentrant: a collection that starts while it is held may close a dropped stream, and that
        # posts a message.
        self._death_lock = threading.RLock()
        self._load = scheduler.load()
        self._host_s: deque[float] = deque(maxlen=_STEPS_REMEMBERED)
        self._num_steps = 0
        self._thread = threading.Thread(target=self._run, name="flowkv-node", daemon=True)
        self._thread.start()
        atexit.register(self.stop)  # the thread must end before JAX does

    # For other threads

    @property
    def is_alive(self) -> bool:
        """False once the node can serve no request any more."""
        return self._dead is None and not self._is_stopping and self._thread.is_alive()

    @property
    def load(self) -> NodeLoad:
        """Load after the latest step."""
        return self._load

    def stats(self) -> dict[str, float]:
        """Steps so far, and the median host time of a step (all but waiting for the device), ms."""
        recent = list(self._host_s)
        return {
            "num_steps": float(self._num_steps),
            "host_ms_per_step": 1e3 * statistics.median(recent) if recent else 0.0,
        }

    def submit(self, live: LiveRequest) -> Future[None]:
        """Queue a request. The future fails with what `Scheduler.add` raises."""
        return self.call(lambda: self._accept(live))

    def abort(self, request_ids: list[str]) -> Future[int]:
        """End requests with finish_reason "abort"; resolves to how many were alive."""
        return self.call(lambda: sum(self._abort(request_id) for request_id in request_ids))

    def withdraw(self, requests: Sequence[LiveRequest]) -> Future[int]:
        """`abort` for a caller that goes away. By identity: a request that was refused because its
        id is in use must not take its namesake with it."""
        return self.call(
            lambda: sum(
                self._abort(live.request_id)
                for live in requests
                if self._live.get(live.request_id) is live
            )
        )

    def reset_prefix_cache(self) -> Future[bool]:
        """Forget cached prompts; see `KVCacheManager.reset_prefix_cache`."""
        return self.call(self._kv.reset_prefix_cache)

    def call(self, function: Callable[[], _Result]) -> Future[_Result]:
        """Run a function on the node's thread, between two steps."""
        future: Future[_Result] = Future()
        if not self._thread.is_alive():  # asked before the lock: a fork may have copied it locked
            future.set_exception(self._dead or EngineDeadError(_NO_THREAD))
            return future
        # Under the lock, so that no message is posted behind the back of a dying thread.
        with self._death_lock:
            if self._dead is not None:
                future.set_exception(self._dead)
            else:
                self._mailbox.put((function, future))
        return future

    def stop(self, timeout_s: float | None = None) -> None:
        """End every request with finish_reason "abort", then the thread. Idempotent."""
        atexit.unregister(self.stop)
        self._is_stopping = True
        self.call(lambda: None)  # wakes the thread
        # Not if a collection on the thread itself stops it: it ends after its present step.
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout_s)

    # The node's thread

    def _run(self) -> None:
        in_flight: InFlightStep | None = None
        try:
            while True:
                self._take_messages(may_wait=in_flight is None and not self._scheduler.has_work)
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
            self._die(EngineDeadError("the engine was shut down"), abort=True)
        except BaseException as error:
            logger.exception("the engine died")
            self._die(EngineDeadError(f"the engine died: {error!r}"), abort=False)

    def _take_messages(self, *, may_wait: bool) -> None:
        if may_wait:
            _carry_out(self._mailbox.get())
        while True:
            try:
                _carry_out(self._mailbox.get_nowait())
            except queue.Empty:
                return

    def _step(self, in_flight: InFlightStep | None) -> InFlightStep | None:
        """Schedule and start the next step, then finish the one in flight."""
        started = self._clock()
        waited_s = 0.0
        if in_flight is not None and (not self._enable_overlap or self._num_host_dependent):
            waited_s += self._finish_step(in_flight)
            in_flight = None
        step = self._scheduler.schedule(self._clock())
        for request in step.expired:
            self._expire(request)
        launched = None if step.is_empty else self._runner.dispatch(step, self._states)
        if in_flight is not None:
            waited_s += self._finish_step(in_flight)
        elif step.is_empty and not step.expired and self._scheduler.has_work:
            raise RuntimeError("requests are alive, none is scheduled and none is in flight")
        self._num_steps += not step.is_empty
        self._host_s.append(self._clock() - started - waited_s)
        return launched

    def _finish_step(self, in_flight: InFlightStep) -> float:
        """Read a step's tokens and pass them on. Returns the seconds the device was waited for."""
        waiting = self._clock()
        result = in_flight.collect()
        now_s = self._clock()
        self._pass_on_prompt_scores(result)
        touched: dict[str, LiveRequest] = {}
        updates = self._scheduler.update(in_flight.step, result.tokens, now_s)
        # Updates are in the order of `step.sampling`, without the sequences that have ended.
        rows = zip(in_flight.step.sampling, result.rows, strict=True)
        for request, token_id, is_finished in updates:
            samples, row = next(where for sequence, where in rows if sequence.request is request)
            owner, index = self._sequence_owner[request.request_id]
            owner.states[index].append(token_id)
            logprobs = self._logprobs(samples, row, request.sampling_params.logprobs)
            stop = owner.output.append(
                index,
                [token_id],
                logprobs=logprobs,
                finish_reason=request.finish_reason if is_finished else None,
                stop_reason=request.stop_reason if is_finished else None,
            )
            if stop is not None and not is_finished:
                self._scheduler.finish(request, "stop", stop, now_s)
            touched[owner.request_id] = owner
        if self._debug:
            self._kv.check()
        self._load = self._scheduler.load()  # so that whoever gets an output sees its effect
        for live in touched.values():
            self._hand_out(live)
        return now_s - waiting

    def _logprobs(
        self, samples: SamplerOutput, row: int, wanted: int | None
    ) -> list[LogprobsRow] | None:
        if wanted is None:
            return None
        return [_logprobs_row(samples, row, self._vocab_size if wanted == -1 else wanted)]

    def _pass_on_prompt_scores(self, result: StepResult) -> None:
        for scores in result.prompt_scores:
            request = scores.sequence.request
            owner, index = self._sequence_owner.get(request.request_id, (None, 0))
            if owner is None or index != 0:  # the answers share the prompt
                continue
            # A chunk that is computed again after a preemption has been passed on before.
            done = owner.output.num_prompt_scored + 1 - scores.start
            wanted = request.sampling_params.num_prompt_logprobs(self._vocab_size) or 0
            owner.output.append_prompt_logprobs(
                request.prompt_token_ids[scores.start + done : scores.start + scores.count],
                [_logprobs_row(scores.samples, row, wanted) for row in range(done, scores.count)],
            )

    def _hand_out(self, live: LiveRequest) -> None:
        output = live.output.take_output(
            metrics=live.metrics(), num_cached_tokens=live.sequences[0].num_cached_tokens
        )
        if output is not None:
            live.sink(output)
        if live.output.is_finished:
            self._forget(live)

    # Requests coming and going

    def _accept(self, live: LiveRequest) -> None:
        if live.request_id in self._live:
            raise DuplicateRequestError(f"request_id={live.request_id!r} is in use")
        now_s = self._clock()
        try:
            for sequence in live.sequences:
                self._scheduler.add(sequence, now_s)
        except Exception:
            self._end_sequences(live)
            raise
        self._live[live.request_id] = live
        for index, (sequence, state) in enumerate(zip(live.sequences, live.states, strict=True)):
            self._sequence_owner[sequence.request_id] = (live, index)
            self._states[sequence.request_id] = state
        self._num_host_dependent += live.needs_host_tokens

    def _abort(self, request_id: str) -> bool:
        live = self._live.get(request_id)
        if live is None:
            return False
        self._end_sequences(live)
        for index in range(len(live.sequences)):
            live.output.append(index, [], finish_reason="abort")
        self._hand_out(live)
        return True

    def _expire(self, request: Request) -> None:
        owner = self._sequence_owner.get(request.request_id)
        if owner is not None:
            waited_s = self._clock() - request.arrival_s
            self._fail(
                owner[0],
                DeadlineExceeded(
                    f"request {owner[0].request_id} ran past its deadline after {waited_s:.3f} s"
                    f" and {request.num_output_tokens} output tokens"
                ),
            )

    def _fail(self, live: LiveRequest, error: Exception) -> None:
        self._end_sequences(live)
        self._forget(live)
        live.sink(error)

    def _end_sequences(self, live: LiveRequest) -> None:
        """Take whatever is left of a request out of the scheduler; frees its blocks."""
        now_s = self._clock()
        for sequence in live.sequences:
            self._scheduler.finish(sequence, "abort", None, now_s)

    def _forget(self, live: LiveRequest) -> None:
        del self._live[live.request_id]
        for sequence in live.sequences:
            del self._sequence_owner[sequence.request_id]
            del self._states[sequence.request_id]
        self._num_host_dependent -= live.needs_host_tokens

    # When things go wrong

    def _recover(self, error: Exception) -> None:
        self._num_failures += 1
        logger.exception("a step failed; every live request ends")
        if self._num_failures >= _MAX_CONSECUTIVE_FAILURES:
            raise error
        self._scheduler.fail_all(self._clock())
        for live in list(self._live.values()):
            self._fail(live, GenerationError(f"a step failed in the engine: {error!r:.500}"))
        self._runner.reset()

    def _die(self, error: EngineDeadError, *, abort: bool) -> None:
        """Answer everyone who waits, and everyone who comes later."""
        with self._death_lock:
            self._dead = error
        if abort:
            for request_id in list(self._live):
                self._abort(request_id)
        for live in list(self._live.values()):
            live.sink(error)
        self._live.clear()
        # Whatever state a failure left the scheduler in, nobody is served any more.
        with contextlib.suppress(Exception):
            self._scheduler.fail_all(self._clock())
            self._load = self._scheduler.load()
        while True:
            try:
                _, future = self._mailbox.get_nowait()
            except queue.Empty:
                return
            if future.set_running_or_notify_cancel():
                future.set_exception(error)


def _carry_out(message: _Message) -> None:
    function, future = message
    if not future.set_running_or_notify_cancel():
        return
    try:
        result = function()
    except BaseException as error:
        future.set_exception(error)
        if not isinstance(error, Exception):
            raise
    else:
        future.set_result(result)


def _logprobs_row(samples: SamplerOutput, row: int, wanted: int) -> LogprobsRow:
    if samples.logprob is None or samples.rank is None:
        raise RuntimeError("logprobs were asked for and not computed")
    top_ids: list[int] = []
    top_logprobs: list[float] = []
    if wanted and samples.top_ids is not None and samples.top_logprobs is not None:
        top_ids = samples.top_ids[row, :wanted].tolist()
        top_logprobs = samples.top_logprobs[row, :wanted].tolist()
    return LogprobsRow(float(samples.logprob[row]), int(samples.rank[row]), top_ids, top_logprobs)
