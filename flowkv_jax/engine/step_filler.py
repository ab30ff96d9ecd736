"""Fills one step after the other: who decodes, who prefills, who gives up blocks for whom.

A step is filled in this order: growth of what decodes, chunks of prompts under way, swapped
requests, waiting requests. What holds blocks thus never queues behind what holds none. Prompts
are admitted as soon as the token budget and the blocks allow, in the same step as decodes
("prefill first"), and get the blocks of the whole prompt at once, contiguous if possible.
"""

from __future__ import annotations

from flowkv_jax.config import SchedulerConfig
from flowkv_jax.engine.admission import Room
from flowkv_jax.engine.queues import LiveRequest, LiveRequests
from flowkv_jax.engine.step import ScheduledSequence, StepDraft
from flowkv_jax.engine.steps_under_way import StepsUnderWay
from flowkv_jax.kv_cache.manager import KVCacheManager
from flowkv_jax.request import Request, RequestStatus


class StepFiller:
    """The scheduler's choice of what a step computes.

    Args:
        live, steps, room: the scheduler's.
        prefill_tile: see `Scheduler`.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        kv: KVCacheManager,
        live: LiveRequests,
        steps: StepsUnderWay,
        room: Room,
        prefill_tile: int,
    ) -> None:
        self.num_preemptions = 0
        self._config = config
        self._kv = kv
        self._live = live
        self._steps = steps
        self._room = room
        self._prefill_tile = prefill_tile

    def fill(self, draft: StepDraft, now_s: float) -> None:
        """Move requests, blocks and positions on by one step, and write it into `draft`."""
        self._schedule_decodes(draft)
        for live in self._live.prefilling.items.copy():
            self._schedule_chunk(live, draft, now_s)
        # Not into a shortage.
        if not draft.preempted:
            self._resume_swapped(draft, now_s)
            if not self._live.swapped.items:
                self._admit_waiting(draft, now_s)
        for sequence in draft.prefills:
            self._kv.commit(sequence.request)

    def send_back(self, live: LiveRequest) -> None:
        """To the waiting requests, without blocks, to be computed again."""
        request = live.request
        self._kv.commit(request)
        self._kv.free(request.request_id)
        request.num_computed_tokens = 0
        self._live.move(live, RequestStatus.WAITING)
        live.prefilling = True

    def _schedule_decodes(self, draft: StepDraft) -> None:
        # Ascending order: a victim is the last in order, so it is never one scheduled already.
        decoding = self._live.decoding.items
        allocate = self._kv.allocate
        index = 0
        while index < len(decoding):
            live = decoding[index]
            request = live.request
            num_tokens = len(request.token_ids) + request.num_in_flight
            # One that is to be sent is only waited for.
            if not request.hands_off and num_tokens < live.stop_rule.token_limit:
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
        self.num_preemptions += 1
        draft.preempted.append(request.request_id)
        self._steps.leave(request)
        if self._config.preemption_mode != "recompute" and request.num_computed_tokens:
            runs = self._kv.swap_out(request)
            if runs is not None:
                draft.swap_out.extend(runs)
                self._live.move(live, RequestStatus.SWAPPED)
                return
        self.send_back(live)

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
            if request.hands_off:
                self._live.move(live, RequestStatus.SENDING)
                live.prefilling = False
            else:
                self._live.set_prefilling(live, False)

    def _resume_swapped(self, draft: StepDraft, now_s: float) -> None:
        while self._live.swapped.items and self._may_join(draft):
            live = self._live.swapped.items[0]
            request = live.request
            if request.num_in_flight:
                return
            runs = self._kv.swap_in(request, reserve_blocks=self._room.growth_reserve())
            if runs is None:
                return
            draft.swap_in.extend(runs)
            self._live.move(live, RequestStatus.RUNNING)
            if live.prefilling:
                self._schedule_chunk(live, draft, now_s)
            else:
                self._schedule_decode(request, draft)

    def _admit_waiting(self, draft: StepDraft, now_s: float) -> None:
        while self._live.waiting.items and self._may_join(draft):
            live = self._live.waiting.items[0]
            request = live.request
            # One that was preempted is computed again, with the token that has not been read yet.
            if request.num_in_flight:
                return
            # Blocks without a chunk in this step would be held for nothing.
            if draft.prefills and draft.budget < min(self._prefill_tile, request.num_tokens):
                return
            num_cached_tokens = self._kv.admit(request, reserve_blocks=self._room.growth_reserve())
            if num_cached_tokens is None:
                return
            request.num_computed_tokens = num_cached_tokens
            if request.scheduled_s is None:
                request.num_cached_tokens = min(num_cached_tokens, request.num_prompt_tokens)
            self._live.move(live, RequestStatus.RUNNING)
            self._schedule_chunk(live, draft, now_s)

    def _may_join(self, draft: StepDraft) -> bool:
        # Rows of a step are counted too: what was sent on in this step has left its seat.
        return (
            draft.budget > 0
            and draft.num_sequences < self._config.max_num_seqs
            and self._room.has_seat()
        )
