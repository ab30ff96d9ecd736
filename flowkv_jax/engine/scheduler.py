"""Who computes what in the next step: continuous batching with chunked prefill, for one node.

    add ──> waiting ──admit──> prefilling ──last chunk──> decoding ──> finished
               ^                   │ preempt                 │ preempt
               ├─── recompute ─────┴─────────────────────────┤
               │                   swapped <──── swap ───────┤
               └ (no swap room)       └──── resume ──────────┘

Steps overlap: the engine may schedule step n+1 before it has read the tokens of step n, never
further ahead.

    schedule(0)  schedule(1)  update(0)  schedule(2)  update(1)  ...

So a decode may be scheduled whose input token only the device knows (`Request.num_in_flight`), and
an end token is seen one step late; the token computed beyond it is dropped. A request that is
preempted comes back only once all its tokens have been read.

A step is filled in this order: growth of what decodes, chunks of prompts under way, swapped
requests, waiting requests. What holds blocks thus never queues behind what holds none. Prompts
are admitted as soon as the token budget and the blocks allow, in the same step as decodes
("prefill first"), and get the blocks of the whole prompt at once, contiguous if possible.

Nobody gets stuck: `add` refuses what the empty pool could not carry to its token limit; whoever
lacks a block takes those of the request that is last in order; so the first in order always
proceeds, and with nothing running the head of a queue fits.

Pure: no clock, no device, no thread. Times are `now_s` arguments.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from flowkv_jax.config import SchedulerConfig
from flowkv_jax.engine.admission import require_fit, require_queue_room
from flowkv_jax.engine.queues import DeadlineHeap, LiveRequest, LiveRequests
from flowkv_jax.engine.step import ScheduledSequence, ScheduledStep, StepDraft, TokenUpdate
from flowkv_jax.engine.stop_rules import StopRule
from flowkv_jax.errors import ConfigError, DuplicateRequestError
from flowkv_jax.kv_cache.manager import KVCacheManager
from flowkv_jax.load import NodeLoad
from flowkv_jax.outputs import FinishReason
from flowkv_jax.request import Request, RequestStatus

_MAX_OUTSTANDING_STEPS = 2
_RESERVED_SHARE = 100  # 1/100 of the pool


class Scheduler:
    """Drives requests from `add` to their end. Not thread-safe: one owner.

    Args:
        kv: the node's blocks; nobody else may change it.
        max_model_len: bound on prompt plus output, in tokens.
        eos_token_ids: the model's end tokens, primary first.
        prefill_tile: chunks that do not end a prompt are multiples of this many tokens, so that
            the device sees few shapes.

    Raises:
        ConfigError: the token budget is smaller than the number of sequences, so that decodes
            could starve.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        kv: KVCacheManager,
        *,
        max_model_len: int,
        eos_token_ids: Sequence[int] = (),
        prefill_tile: int = 64,
    ) -> None:
        if config.max_num_batched_tokens < config.max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens={config.max_num_batched_tokens} must be at least "
                f"max_num_seqs={config.max_num_seqs}: every sequence decodes one token a step",
                parameter="max_num_batched_tokens",
                value=config.max_num_batched_tokens,
            )
        if prefill_tile < 1:
            raise ValueError(f"{prefill_tile=} must be at least 1")
        self.config = config
        self.max_model_len = max_model_len
        self._kv = kv
        self._eos_token_ids = tuple(eos_token_ids)
        self._prefill_tile = prefill_tile
        self._live = LiveRequests()
        self._deadlines = DeadlineHeap()
        self._outstanding: deque[int] = deque()
        self._num_added = 0
        self._next_step_id = 0
        self._num_preemptions = 0
        self._last_step_tokens = 0

    # Coming in

    @property
    def max_request_tokens(self) -> int:
        """Largest `max_total_tokens` that `add` accepts whatever the prompt.

        The last token of a request is sampled and never fed, so it needs no room.
        """
        return min(self.max_model_len, self._kv.num_blocks * self._kv.block_size + 1)

    def add(self, request: Request, now_s: float) -> None:
        """Queue a request. One without a deadline gets `request_timeout_s` from `now_s` on.

        Raises:
            ValidationError: the prompt is empty or too long, or the request might outgrow the pool.
            DuplicateRequestError: the id is in use.
            QueueOverflowError: `max_waiting_requests` requests wait.
            MaxQueuedTokensError: it would make more than `max_waiting_tokens` tokens wait.
        """
        if request.status is not RequestStatus.WAITING:
            raise RuntimeError(f"{request.request_id} is {request.status.name}, not WAITING")
        if self._live.get(request.request_id) is not None:
            raise DuplicateRequestError(f"request_id={request.request_id!r} is in use")
        stop_rule = StopRule.of(request, self._eos_token_ids)
        require_fit(request, stop_rule.token_limit, self._kv, self.max_model_len)
        require_queue_room(request, self._live.waiting, self.config)
        if request.deadline_s is None and self.config.request_timeout_s is not None:
            request.deadline_s = now_s + self.config.request_timeout_s
        priority = request.priority if self.config.scheduling_policy == "priority" else 0
        number = self._num_added
        live = LiveRequest(request, (priority, request.arrival_s, number), stop_rule)
        self._num_added += 1
        self._live.add(live)
        self._deadlines.push(request, number, len(self._live))

    # One step

    def schedule(self, now_s: float) -> ScheduledStep:
        """The next step, which may be empty. Unless `num_tokens` is 0 it must get its `update`.

        Raises:
            RuntimeError: two steps have not been updated yet.
        """
        if len(self._outstanding) >= _MAX_OUTSTANDING_STEPS:
            raise RuntimeError(f"steps {list(self._outstanding)} must be updated first")
        expired = self._deadlines.pop_expired(now_s)
        for request in expired:
            self.finish(request, "error", None, now_s)
        draft = StepDraft(self.config.max_num_batched_tokens)
        self._schedule_decodes(draft)
        for live in self._live.prefilling.items.copy():
            self._schedule_chunk(live, draft, now_s)
        # Not into a shortage. It also means that whoever is preempted comes back one step later at
        # the earliest, when the update in between has read its last token.
        if not draft.preempted:
            self._resume_swapped(draft, now_s)
            if not self._live.swapped.items:
                self._admit_waiting(draft, now_s)
        for sequence in draft.prefills:
            self._kv.commit(sequence.request)
        num_tokens = self.config.max_num_batched_tokens - draft.budget
        step = draft.seal(self._next_step_id, tuple(expired), num_tokens)
        self._next_step_id += 1
        self._last_step_tokens = num_tokens
        if num_tokens:
            self._outstanding.append(step.step_id)
        return step

    def _schedule_decodes(self, draft: StepDraft) -> None:
        # Ascending order: a victim is the last in order, so it is never one scheduled already.
        decoding = self._live.decoding.items
        allocate = self._kv.allocate
        index = 0
        while index < len(decoding):
            live = decoding[index]
            request = live.request
            num_tokens = len(request.token_ids) + request.num_in_flight
            if num_tokens < live.stop_rule.token_limit:
                if not allocate(request, num_tokens) and not self._make_room(live, draft):
                    return
                self._schedule_decode(request, draft)
            index += 1

    def _make_room(self, live: LiveRequest, draft: StepDraft) -> bool:
        """Preempt until `live` has grown by a token; False if it was the last in order itself."""
        num_tokens = live.request.num_tokens + live.request.num_in_flight
        while True:
            victim = self._live.last_running()
            self._preempt(victim, draft)
            if victim is live:
                return False
            if self._kv.allocate(live.request, num_tokens):
                return True

    def _preempt(self, live: LiveRequest, draft: StepDraft) -> None:
        request = live.request
        request.num_preemptions += 1
        self._num_preemptions += 1
        draft.preempted.append(request.request_id)
        if self.config.preemption_mode != "recompute" and request.num_computed_tokens:
            runs = self._kv.swap_out(request)
            if runs is not None:
                draft.swap_out.extend(runs)
                self._live.move(live, RequestStatus.SWAPPED)
                return
        self._kv.commit(request)
        self._kv.free(request.request_id)
        request.num_computed_tokens = 0
        self._live.move(live, RequestStatus.WAITING)
        live.prefilling = True

    def _schedule_decode(self, request: Request, draft: StepDraft) -> None:
        start = request.num_computed_tokens
        draft.decodes.append(ScheduledSequence(request, start, 1, True))
        draft.budget -= 1
        request.num_computed_tokens = start + 1
        request.num_in_flight += 1

    def _schedule_chunk(self, live: LiveRequest, draft: StepDraft, now_s: float) -> None:
        """Schedule as much of the prompt as the budget allows, in whole tiles unless it ends.

        The first chunk of a step may be smaller than a tile, so that a small budget cannot stall.
        """
        request = live.request
        start = request.num_computed_tokens
        remaining = len(request.token_ids) - start
        num_tokens = min(remaining, draft.budget)
        samples = num_tokens == remaining
        if not samples and (num_tokens >= self._prefill_tile or draft.prefills):
            num_tokens -= num_tokens % self._prefill_tile
        if num_tokens == 0:
            return
        draft.prefills.append(ScheduledSequence(request, start, num_tokens, samples))
        draft.budget -= num_tokens
        request.num_computed_tokens = start + num_tokens
        if request.scheduled_s is None:
            request.scheduled_s = now_s
        if samples:
            request.num_in_flight += 1
            self._live.set_prefilling(live, False)

    def _resume_swapped(self, draft: StepDraft, now_s: float) -> None:
        while self._live.swapped.items and self._has_seat(draft):
            live = self._live.swapped.items[0]
            request = live.request
            runs = self._kv.swap_in(request, reserve_blocks=self._growth_reserve())
            if runs is None:
                return
            draft.swap_in.extend(runs)
            self._live.move(live, RequestStatus.RUNNING)
            if live.prefilling:
                self._schedule_chunk(live, draft, now_s)
            else:
                self._schedule_decode(request, draft)

    def _admit_waiting(self, draft: StepDraft, now_s: float) -> None:
        while self._live.waiting.items and self._has_seat(draft):
            live = self._live.waiting.items[0]
            request = live.request
            # Blocks without a chunk in this step would be held for nothing.
            if draft.prefills and draft.budget < min(self._prefill_tile, request.num_tokens):
                return
            num_cached_tokens = self._kv.admit(request, reserve_blocks=self._growth_reserve())
            if num_cached_tokens is None:
                return
            request.num_computed_tokens = num_cached_tokens
            if request.num_preemptions == 0:
                request.num_cached_tokens = num_cached_tokens
            self._live.move(live, RequestStatus.RUNNING)
            self._schedule_chunk(live, draft, now_s)

    def _has_seat(self, draft: StepDraft) -> bool:
        return draft.budget > 0 and self._live.num_running < self.config.max_num_seqs

    def _growth_reserve(self) -> int:
        """Blocks an admission must leave free: one for each running sequence, and 1 % of the pool.

        Nothing when nothing runs, so that whatever `add` accepted can be admitted.
        """
        num_running = self._live.num_running
        return num_running + self._kv.num_blocks // _RESERVED_SHARE if num_running else 0

    # After a step

    def update(
        self, step: ScheduledStep, sampled: Sequence[int], now_s: float
    ) -> list[TokenUpdate]:
        """Take in the tokens of the oldest step that was not updated yet.

        Args:
            sampled: one token id for each of `step.sampling`, as Python ints.

        Returns:
            What was appended, in the same order. Tokens of requests that have ended are dropped.

        Raises:
            RuntimeError: another step is due.
            ValueError: `sampled` has the wrong length.
        """
        if not step.num_tokens:
            return []
        if not self._outstanding or self._outstanding[0] != step.step_id:
            raise RuntimeError(f"update of step {step.step_id}, due are {list(self._outstanding)}")
        if len(sampled) != len(step.sampling):
            raise ValueError(f"{len(sampled)} tokens for {len(step.sampling)} sampling sequences")
        self._outstanding.popleft()
        updates: list[TokenUpdate] = []
        block_size = self._kv.block_size
        for sequence, token in zip(step.sampling, sampled, strict=True):
            request = sequence.request
            request.num_in_flight -= 1
            if request.status is RequestStatus.FINISHED:
                continue
            request.token_ids.append(token)
            request.last_token_s = now_s
            if request.first_token_s is None:
                request.first_token_s = now_s
            live = self._live[request.request_id]
            ending = live.stop_rule.judge(request)
            if ending is not None:
                self._end(live, *ending)
            elif (
                # All blocks before the newest token are full and computed.
                (len(request.token_ids) - 1) % block_size == 0
                and request.status is RequestStatus.RUNNING
            ):
                self._kv.commit(request)
            updates.append(TokenUpdate(request, token, ending is not None))
        return updates

    # Going out

    def finish(
        self,
        request: Request,
        finish_reason: FinishReason,
        stop_reason: int | str | None,
        now_s: float,
    ) -> bool:
        """End a request, whatever it is doing. False if it had ended, or is not one of ours."""
        live = self._live.get(request.request_id)
        if live is None or live.request is not request:
            return False
        self._end(live, finish_reason, stop_reason)
        return True

    def abort(self, request_id: str, now_s: float) -> Request | None:
        """End a request because its caller gave it up; None if there is none of that id."""
        live = self._live.get(request_id)
        if live is None:
            return None
        self._end(live, "abort", None)
        return live.request

    def fail_all(self, now_s: float) -> list[Request]:
        """End everything with reason "error" after a step failed on the device.

        The pool's contents cannot be trusted then: the prefix cache is forgotten as well, and
        steps that were not updated yet never will be.
        """
        self._kv.forget_all()
        failed: list[Request] = []
        for live in self._live.all():
            failed.append(live.request)
            live.request.num_in_flight = 0
            self._end(live, "error", None, keep_cached=False)
        self._outstanding.clear()
        return failed

    def _end(
        self,
        live: LiveRequest,
        finish_reason: FinishReason,
        stop_reason: int | str | None,
        *,
        keep_cached: bool = True,
    ) -> None:
        """The one way out: leave the queue, give up blocks or swap space, FINISHED."""
        request = live.request
        if keep_cached and request.status is RequestStatus.RUNNING:
            self._kv.commit(request)
        self._kv.free(request.request_id)
        self._live.move(live, RequestStatus.FINISHED)
        request.finish_reason = finish_reason
        request.stop_reason = stop_reason

    # Figures

    @property
    def has_work(self) -> bool:
        """Some request has not ended."""
        return len(self._live) > 0

    @property
    def num_running(self) -> int:
        return self._live.num_running

    @property
    def num_waiting(self) -> int:
        return len(self._live.waiting)

    @property
    def num_swapped(self) -> int:
        return len(self._live.swapped)

    def get(self, request_id: str) -> Request | None:
        """The live request of that id."""
        live = self._live.get(request_id)
        return live.request if live is not None else None

    def load(self) -> NodeLoad:
        """Load at this moment."""
        kv = self._kv
        return NodeLoad(
            num_requests_running=self.num_running,
            num_requests_waiting=self.num_waiting,
            num_requests_swapped=self.num_swapped,
            num_waiting_tokens=self._live.waiting.num_prompt_tokens,
            kv_cache_usage=kv.usage,
            num_blocks=kv.num_blocks,
            num_free_blocks=kv.num_free_blocks,
            fragmentation=kv.fragmentation,
            prefix_cache_queries=kv.prefix_cache_queries,
            prefix_cache_hits=kv.prefix_cache_hits,
            num_preemptions=self._num_preemptions,
            token_budget_used=self._last_step_tokens / self.config.max_num_batched_tokens,
        )
