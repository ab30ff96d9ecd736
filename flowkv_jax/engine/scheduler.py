"""Who computes what in the next step: continuous batching with chunked prefill, for one node.

    add ──> waiting ──admit──> prefilling ──last chunk──> decoding ──> finished
               ^                   │ preempt                 │ preempt
               ├─── recompute ─────┴─────────────────────────┤
               │                   swapped <──── swap ───────┤
               └ (no swap room)       └──── resume ──────────┘

Prefilled on one node, decoded on another:

    add ──> waiting ──> prefilling ──last chunk──> sending ──> finished (None)
                           decoding ──────send───────^└─ keep ──> decoding, or waiting
    reserve ──> receiving ──receive──> decoding ──> ...

A request with `hands_off` is sending as soon as its last chunk is scheduled, so it is never
scheduled for decode although its first token is still in flight; `update` appends that token as
any other, and one that ends the request ends it. What is sending or receiving holds blocks and is
left alone by steps and preemption; it ends, or moves on, by a call.

Steps overlap: the engine may schedule step n+1 before it has read the tokens of step n, never
further ahead.

    schedule(0)  schedule(1)  update(0)  schedule(2)  update(1)  ...

So a decode may be scheduled whose input token only the device knows (`Request.num_in_flight`), and
an end token is seen one step late; the token computed beyond it is dropped. A request that is
preempted comes back only once all its tokens have been read.

What a step computes is chosen by `step_filler`; who finds room to come in, by `admission`.

Nobody gets stuck: `add` and `reserve` refuse what the empty pool could not carry to its token
limit; whoever lacks a block takes those of the request that is last in order; so the first in order
proceeds, and with nothing running the head of a queue fits. Hand-offs suspend this while they
last: the first in order may have to give up its own blocks when all others are being sent or
received, and the head of a queue may find no room beside them (`is_waiting_for_transfers`). They
must therefore end whatever happens at the other node: a sender that is deferred for long calls
`keep` or finishes, a receiver that hears nothing for long finishes, and whoever pins blocks unpins
them. Then what was received runs, and is last or first in order like any other; what was kept runs
or waits; no block is held by what does not run; and the argument holds again. Nor do reservations
starve what has run here: as long as a request that was swapped out or gave up its blocks waits,
they are deferred.

Pure: no clock, no device, no thread. Times are `now_s` arguments.
"""

from __future__ import annotations

from collections.abc import Sequence

from flowkv_jax.config import SchedulerConfig
from flowkv_jax.engine.admission import (
    Deferred,
    Reserved,
    Room,
    Standing,
    require_fit,
    require_queue_room,
)
from flowkv_jax.engine.queues import DeadlineHeap, LiveRequest, LiveRequests
from flowkv_jax.engine.step import ScheduledStep, StepDraft, TokenUpdate
from flowkv_jax.engine.step_filler import StepFiller
from flowkv_jax.engine.steps_under_way import StepsUnderWay
from flowkv_jax.engine.stop_rules import StopRule
from flowkv_jax.errors import ConfigError, DuplicateRequestError
from flowkv_jax.kv_cache.manager import KVCacheManager
from flowkv_jax.load import NodeLoad
from flowkv_jax.outputs import FinishReason
from flowkv_jax.request import Request, RequestStatus

_HAS_COMPUTED = (RequestStatus.RUNNING, RequestStatus.SENDING)
"""Holds blocks whose contents this node knows."""


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
        self._live = LiveRequests()
        self._steps = StepsUnderWay(kv)
        self._room = Room(config, kv, self._live, self._steps)
        self._filler = StepFiller(config, kv, self._live, self._steps, self._room, prefill_tile)
        self._deadlines = DeadlineHeap()
        self._num_added = 0
        self._next_step_id = 0
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
        stop_rule = self._check_new(request)
        require_queue_room(request, self._live.waiting, self.config)
        self._enlist(request, stop_rule, now_s)

    def _check_new(self, request: Request) -> StopRule:
        if request.status is not RequestStatus.WAITING:
            raise RuntimeError(f"{request.request_id} is {request.status.name}, not WAITING")
        if self._live.get(request.request_id) is not None:
            raise DuplicateRequestError(f"request_id={request.request_id!r} is in use")
        stop_rule = StopRule.of(request, self._eos_token_ids)
        require_fit(request, stop_rule.token_limit, self._kv, self.max_model_len)
        return stop_rule

    def _enlist(self, request: Request, stop_rule: StopRule, now_s: float) -> LiveRequest:
        if request.deadline_s is None and self.config.request_timeout_s is not None:
            request.deadline_s = now_s + self.config.request_timeout_s
        priority = request.priority if self.config.scheduling_policy == "priority" else 0
        number = self._num_added
        live = LiveRequest(request, (priority, request.arrival_s, number), stop_rule)
        self._num_added += 1
        self._live.add(live)
        self._deadlines.push(request, number, len(self._live))
        return live

    # Hand-offs

    def reserve(self, request: Request, now_s: float) -> Reserved | Deferred:
        """Blocks for a request that another node prefills: RECEIVING, or nothing changes.

        It gets room for all its known tokens and the one that its prefill node samples. It goes
        before waiting requests, for it holds blocks on its prefill node, but not before those that
        were preempted here. So ask for it when it is SENDING there: blocks that are held for one
        that waits may be what keeps it waiting. Ends with `receive` or `finish`.

        Raises:
            ValidationError: the prompt is empty or too long, or the request might outgrow the pool.
            DuplicateRequestError: the id is in use.
        """
        stop_rule = self._check_new(request)
        # The last token of a request is never fed.
        num_tokens = min(request.num_tokens + 1, stop_rule.token_limit - 1)
        answer = self._room.reserve(request, num_tokens)
        if isinstance(answer, Reserved):
            live = self._enlist(request, stop_rule, now_s)
            live.prefilling = False
            self._live.move(live, RequestStatus.RECEIVING)
            request.num_computed_tokens = answer.num_reused_tokens
        return answer

    def receive(self, request: Request, new_token_ids: Sequence[int], now_s: float) -> None:
        """K/V of a RECEIVING request have come, of all tokens but the newest: it decodes here.

        Args:
            new_token_ids: sampled where it was prefilled, beyond what was known when blocks were
                reserved. One of them may end the request.

        Raises:
            ValueError: there are none, or too many for the blocks that were reserved.
            RuntimeError: the request is not RECEIVING here.
        """
        live = self._require(request, RequestStatus.RECEIVING)
        if not new_token_ids:
            raise ValueError(
                f"{request.request_id} came without a sampled token; its prefill node must send one"
            )
        num_arrived = request.num_tokens + len(new_token_ids) - 1
        room = len(self._kv.block_table(request.request_id)) * self._kv.block_size
        if num_arrived > room:
            raise ValueError(
                f"{request.request_id} came with K/V of {num_arrived} tokens; blocks were reserved "
                f"for {room}"
            )
        self._live.move(live, RequestStatus.RUNNING)
        request.scheduled_s = request.first_token_s = request.last_token_s = now_s
        for token_id in new_token_ids:
            request.token_ids.append(token_id)
            request.num_computed_tokens = request.num_tokens - 1
            ending = live.stop_rule.judge(request)
            if ending is not None:
                self._end(live, *ending)
                return
        self._kv.commit(request)

    def send(self, request: Request) -> None:
        """A request is to go to another node after all, wherever it stands here.

        One that decodes is SENDING at once, or as soon as its token in flight has been read; one
        that is still, or again, to be computed once its last chunk is scheduled.

        Raises:
            RuntimeError: the request is not of this node, or is RECEIVING.
        """
        live = self._live.get(request.request_id)
        is_mine = live is not None and live.request is request
        if live is None or not is_mine or request.status is RequestStatus.RECEIVING:
            raise RuntimeError(f"{request.request_id} is {request.status.name} or not of this node")
        request.hands_off = True
        self._send_decoded(live)

    def _send_decoded(self, live: LiveRequest) -> None:
        is_decoding = live.request.status is RequestStatus.RUNNING and not live.prefilling
        if live.request.hands_off and is_decoding and not live.request.num_in_flight:
            self._live.move(live, RequestStatus.SENDING)

    def keep(self, request: Request, now_s: float) -> None:
        """Decode a SENDING request here after all.

        Without a free seat it gives up its blocks and waits to be computed again, which costs
        little as long as the prefix cache holds what it has.

        Raises:
            RuntimeError: the request is not SENDING here, or its first token was not read yet.
        """
        live = self._require(request, RequestStatus.SENDING)
        if request.num_in_flight:
            raise RuntimeError(f"{request.request_id}: its first token has not been read yet")
        request.hands_off = False
        if self._room.has_seat():
            self._live.move(live, RequestStatus.RUNNING)
        else:
            self._filler.send_back(live)

    def _require(self, request: Request, status: RequestStatus) -> LiveRequest:
        live = self._live.get(request.request_id)
        if live is None or live.request is not request or request.status is not status:
            raise RuntimeError(
                f"{request.request_id} is {request.status.name} or not of this node, "
                f"not {status.name}"
            )
        return live

    # One step

    def schedule(self, now_s: float) -> ScheduledStep:
        """The next step, which may be empty. Unless `num_tokens` is 0 it must get its `update`.

        Raises:
            RuntimeError: two steps have not been updated yet.
        """
        self._steps.require_room()
        expired = self._deadlines.pop_expired(now_s)
        for request in expired:
            self.finish(request, "error", None, now_s)
        draft = StepDraft(self.config.max_num_batched_tokens)
        self._filler.fill(draft, now_s)
        num_tokens = self.config.max_num_batched_tokens - draft.budget
        step = draft.seal(self._next_step_id, tuple(expired), num_tokens)
        self._next_step_id += 1
        self._last_step_tokens = num_tokens
        if num_tokens:
            self._steps.start(step)
        return step

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
        if len(sampled) != len(step.sampling):
            raise ValueError(f"{len(sampled)} tokens for {len(step.sampling)} sampling sequences")
        self._steps.finish(step)
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
                (len(request.token_ids) - 1) % block_size == 0 and request.status in _HAS_COMPUTED
            ):
                self._kv.commit(request)
            if ending is None:
                self._send_decoded(live)
            updates.append(TokenUpdate(request, token, ending is not None))
        return updates

    # Going out

    def finish(
        self,
        request: Request,
        finish_reason: FinishReason | None,
        stop_reason: int | str | None,
        now_s: float,
    ) -> bool:
        """End a request, whatever it is doing. False if it had ended, or is not one of ours.

        `finish_reason` is None for a request that goes on at another node.
        """
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
        self._steps.abandon()
        return failed

    def _end(
        self,
        live: LiveRequest,
        finish_reason: FinishReason | None,
        stop_reason: int | str | None,
        *,
        keep_cached: bool = True,
    ) -> None:
        """The one way out: leave the queue, give up blocks or swap space, FINISHED."""
        request = live.request
        if keep_cached and request.status in _HAS_COMPUTED:
            self._kv.commit(request)
            self._steps.leave(request)
        self._kv.free(request.request_id)
        self._live.move(live, RequestStatus.FINISHED)
        request.finish_reason = finish_reason
        request.stop_reason = stop_reason

    # Figures

    @property
    def has_work(self) -> bool:
        """Some request is waiting, running or swapped: a step may move it on."""
        return len(self._live) > len(self._live.sending) + len(self._live.receiving)

    @property
    def is_waiting_for_transfers(self) -> bool:
        """Explains an empty step with nothing in flight: until a hand-off moves on, or a transfer
        lets go of blocks whose owner has ended, no step has anything to compute."""
        live = self._live
        return not live.num_running and bool(
            live.sending.items or live.receiving.items or self._kv.num_pinned_blocks
        )

    @property
    def standing(self) -> Standing:
        """As long as it stays the same, what `reserve` has deferred would be deferred again."""
        return self._room.standing

    @property
    def next_deadline_s(self) -> float | None:
        """When the next request expires, for whoever sleeps meanwhile."""
        return self._deadlines.next_s

    @property
    def num_running(self) -> int:
        return self._live.num_running

    @property
    def num_waiting(self) -> int:
        return len(self._live.waiting)

    @property
    def num_swapped(self) -> int:
        return len(self._live.swapped)

    @property
    def num_sending(self) -> int:
        return len(self._live.sending)

    @property
    def num_receiving(self) -> int:
        return len(self._live.receiving)

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
            num_preemptions=self._filler.num_preemptions,
            token_budget_used=self._last_step_tokens / self.config.max_num_batched_tokens,
            num_requests_sending=self.num_sending,
            num_requests_receiving=self.num_receiving,
        )
