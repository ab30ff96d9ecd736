"""Scheduler state machine against a device that checks every K/V it is told to read.

The fake device has a pool whose slots remember which prefix wrote them. A scheduled chunk may read
positions [0, start) only if its block table leads to exactly the request's own prefix, so a block
freed too early, shared wrongly, swapped to the wrong place or fed the wrong token fails the run.
Tokens depend on (seed, position) alone, so every request's output is known beforehand, whatever
happens to it on the way.
"""

from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from flowkv_jax.config import SchedulerConfig
from flowkv_jax.engine.scheduler import Scheduler
from flowkv_jax.engine.step import ScheduledStep
from flowkv_jax.errors import (
    DuplicateRequestError,
    MaxQueuedTokensError,
    QueueOverflowError,
    ValidationError,
)
from flowkv_jax.kv_cache.manager import KVCacheManager
from flowkv_jax.request import Request, RequestStatus
from flowkv_jax.sampling_params import SamplingParams

SIZE = 2
EOS = 9


def sampled_token(request: Request, position: int) -> int:
    """What the model answers at `position`: few tokens, so that prefixes meet, and some EOS."""
    draw = hash((request.seed, position)) % 23
    return EOS if draw == 0 else draw % 2


def true_token(request: Request, position: int) -> int:
    if position < request.num_prompt_tokens:
        return request.prompt_token_ids[position]
    return sampled_token(request, position)


def true_prefix(request: Request, end: int) -> tuple:
    """What K/V at position `end - 1` depend on. The salt is there to catch sharing across salts."""
    return (request.cache_salt, *(true_token(request, position) for position in range(end)))


def expected_output(request: Request) -> list[int]:
    params = request.sampling_params
    limit = min(request.max_total_tokens, request.num_prompt_tokens + params.max_tokens)
    output: list[int] = []
    while request.num_prompt_tokens + len(output) < limit:
        output.append(sampled_token(request, request.num_prompt_tokens + len(output)))
        if output[-1] == EOS and not params.ignore_eos and len(output) >= params.min_tokens:
            break
    return output


@dataclass
class FakeDevice:
    """Runs steps in the order they are dispatched."""

    kv: KVCacheManager
    pool: dict[int, tuple] = field(default_factory=dict)
    host: dict[int, tuple | None] = field(default_factory=dict)

    def run(self, step: ScheduledStep) -> list[int]:
        for runs, source, target in (
            (step.swap_out, self.pool, self.host),
            (step.swap_in, self.host, self.pool),
        ):
            for src, dst, num_blocks in runs:
                for offset in range(num_blocks * SIZE):
                    target[dst * SIZE + offset] = source.get(src * SIZE + offset)
        sequences = step.prefills + step.decodes
        # All reads come first: no sequence may need what another one computes in the same step.
        for request, start, _, _ in sequences:
            table = self.kv.block_table(request.request_id)
            for position in range(start):
                content = self.pool.get(self.slot(table, position))
                assert content == true_prefix(request, position + 1), (request.request_id, position)
        written: set[int] = set()
        for request, start, num_tokens, _ in sequences:
            table = self.kv.block_table(request.request_id)
            for position in range(start, start + num_tokens):
                slot = self.slot(table, position)
                assert slot not in written
                written.add(slot)
                self.pool[slot] = true_prefix(request, position + 1)
        return [
            sampled_token(request, start + num_tokens)
            for request, start, num_tokens, _ in step.sampling
        ]

    @staticmethod
    def slot(table, position: int) -> int:
        return int(table[position // SIZE]) * SIZE + position % SIZE


@dataclass
class Draft:
    """A request before it has an id and an arrival."""

    tokens: list[int]
    max_tokens: int
    min_tokens: int
    ignore_eos: bool
    prompt_logprobs: int | None
    priority: int
    salt: str | None
    timeout_s: int | None
    reuse_id: bool


DRAFTS = st.builds(
    Draft,
    tokens=st.lists(st.integers(0, 1), min_size=1, max_size=10),
    max_tokens=st.integers(1, 14),
    min_tokens=st.sampled_from([0, 0, 1]),
    ignore_eos=st.booleans(),
    prompt_logprobs=st.sampled_from([None, None, None, 0]),
    priority=st.integers(0, 2),
    salt=st.sampled_from([None, None, "s"]),
    timeout_s=st.sampled_from([None, None, 3, 10]),
    reuse_id=st.sampled_from([False, False, False, True]),
)


class SchedulerMachine(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.now_s = 0.0
        self.requests: list[Request] = []
        self.in_flight: list[tuple[ScheduledStep, list[int]]] = []

    @initialize(
        num_blocks=st.integers(5, 14),
        num_swap_blocks=st.sampled_from([0, 3, 8]),
        max_num_seqs=st.integers(2, 4),
        budget=st.integers(4, 12),
        mode=st.sampled_from(["auto", "swap", "recompute"]),
        policy=st.sampled_from(["fcfs", "priority"]),
        caching=st.booleans(),
        tile=st.sampled_from([1, 2, 4]),
        timeout_s=st.sampled_from([None, None, 8]),
    )
    def build(
        self,
        num_blocks,
        num_swap_blocks,
        max_num_seqs,
        budget,
        mode,
        policy,
        caching,
        tile,
        timeout_s,
    ):
        self.kv = KVCacheManager(
            num_blocks, SIZE, enable_prefix_caching=caching, num_swap_blocks=num_swap_blocks
        )
        self.config = SchedulerConfig(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=budget,
            max_waiting_requests=6,
            max_waiting_tokens=40,
            scheduling_policy=policy,
            preemption_mode=mode,
            request_timeout_s=timeout_s,
        )
        self.scheduler = Scheduler(
            self.config, self.kv, max_model_len=24, eos_token_ids=(EOS,), prefill_tile=tile
        )
        self.device = FakeDevice(self.kv)

    def live(self) -> list[Request]:
        return [request for request in self.requests if not request.is_finished]

    def order(self, request: Request) -> tuple:
        priority = request.priority if self.config.scheduling_policy == "priority" else 0
        return priority, request.arrival_s, self.requests.index(request)

    @rule(drafts=st.lists(DRAFTS, min_size=1, max_size=4))
    def submit(self, drafts):
        for draft in drafts:
            self.submit_one(draft)

    def submit_one(self, draft: Draft) -> None:
        reuse_id = draft.reuse_id and self.requests
        tokens, max_tokens = draft.tokens, draft.max_tokens
        request = Request(
            f"r{len(self.requests) - bool(reuse_id)}",
            tokens,
            SamplingParams(
                max_tokens=max_tokens,
                min_tokens=draft.min_tokens,
                ignore_eos=draft.ignore_eos,
                prompt_logprobs=draft.prompt_logprobs,
            ),
            arrival_s=self.now_s,
            max_total_tokens=24,
            seed=len(self.requests),
            priority=draft.priority,
            cache_salt=draft.salt,
            deadline_s=None if draft.timeout_s is None else self.now_s + draft.timeout_s,
        )
        waiting = [r for r in self.live() if r.status is RequestStatus.WAITING]
        needed = self.kv.blocks_for(min(24, len(tokens) + max_tokens) - 1)
        try:
            self.scheduler.add(request, self.now_s)
        except ValidationError:
            assert needed > self.kv.num_blocks
        except DuplicateRequestError:
            assert request.request_id in {r.request_id for r in self.live()}
        except QueueOverflowError:
            assert len(waiting) >= 6
        except MaxQueuedTokensError:
            assert waiting
            assert sum(r.num_prompt_tokens for r in waiting) + len(tokens) > 40
        else:
            assert needed <= self.kv.num_blocks
            self.requests.append(request)

    @rule(num_steps=st.integers(1, 12), overlap=st.booleans())
    def serve(self, num_steps, overlap):
        """Steps as the engine takes them."""
        for _ in range(num_steps):
            while len(self.in_flight) > int(overlap):
                self.update()
            self.schedule()
            self.sound()

    @precondition(lambda self: len(self.in_flight) < 2)
    @rule()
    def schedule(self):
        decodable = [
            request
            for request in self.live()
            if request.status is RequestStatus.RUNNING
            and request.num_computed_tokens == request.num_tokens + request.num_in_flight - 1
            and request.num_tokens + request.num_in_flight
            < request.num_prompt_tokens + request.sampling_params.max_tokens
        ]
        step = self.scheduler.schedule(self.now_s)
        self.check_step(step)
        scheduled = {sequence.request for sequence in step.decodes}
        for request in decodable:
            # Whoever decodes goes on decoding, unless preempted or ended.
            assert (
                request in scheduled
                or request.request_id in step.preempted
                or request in step.expired
                or request.num_computed_tokens == 0
                or any(sequence.request is request for sequence in step.prefills)
            )
        tokens = self.device.run(step)
        if step.num_tokens:
            self.in_flight.append((step, tokens))

    def check_step(self, step: ScheduledStep) -> None:
        sequences = step.prefills + step.decodes
        assert len({sequence.request for sequence in sequences}) == len(sequences)
        assert sum(sequence.num_tokens for sequence in sequences) == step.num_tokens
        assert step.num_tokens <= self.config.max_num_batched_tokens
        assert self.scheduler.num_running <= self.config.max_num_seqs
        assert list(step.sampling) == [sequence for sequence in sequences if sequence.samples]
        for request, start, num_tokens, samples in sequences:
            assert request.status is RequestStatus.RUNNING
            assert start + num_tokens == request.num_computed_tokens
            assert samples == (start + num_tokens >= request.num_tokens)
            assert self.kv.block_table(request.request_id).size * SIZE >= start + num_tokens
        # A prompt is (re)computed only when all its tokens have been read.
        assert all(s.request.num_in_flight == s.samples for s in step.prefills)
        # Victims are the last in order.
        running = [r for r in self.live() if r.status is RequestStatus.RUNNING]
        victims = [r for r in self.live() if r.request_id in step.preempted]
        assert not victims or max(map(self.order, running), default=()) < min(
            map(self.order, victims)
        )
        assert all(request.finish_reason == "error" for request in step.expired)
        assert all(request.deadline_s <= self.now_s for request in step.expired)
        # Nothing runs although something waits: only while tokens are still to be read, or right
        # after the last running request gave up its blocks.
        if self.scheduler.num_running == 0 and self.scheduler.has_work:
            assert step.preempted or any(request.num_in_flight for request in self.live())

    @precondition(lambda self: self.in_flight)
    @rule()
    def update(self):
        step, tokens = self.in_flight.pop(0)
        already_ended = {s.request for s in step.sampling if s.request.is_finished}
        updates = self.scheduler.update(step, tokens, self.now_s)
        assert [u.request for u in updates] == [
            s.request for s in step.sampling if s.request not in already_ended
        ]
        assert all(update.finished == update.request.is_finished for update in updates)

    @rule(seconds=st.integers(1, 2))
    def wait(self, seconds):
        self.now_s += seconds

    @precondition(lambda self: self.live())
    @rule(data=st.data(), aborted=st.booleans())
    def end_early(self, data, aborted):
        """By its caller, or by a stop string that the output processor found."""
        request = data.draw(st.sampled_from(self.live()))
        if aborted:
            assert self.scheduler.abort(request.request_id, self.now_s) is request
        else:
            assert self.scheduler.finish(request, "stop", "text", self.now_s)
        assert request.is_finished
        assert not self.kv.holds_blocks(request.request_id)
        assert not self.scheduler.finish(request, "error", None, self.now_s)

    @rule()
    def reset_prefix_cache(self):
        self.kv.reset_prefix_cache()

    @invariant()
    def sound(self):
        if not hasattr(self, "scheduler"):
            return
        self.kv.check()
        live = self.live()
        for request in self.requests:
            output = request.output_token_ids
            assert output == expected_output(request)[: len(output)]
            assert 0 <= request.num_in_flight <= 2
            if request.finish_reason == "length" or (
                request.finish_reason == "stop" and request.stop_reason is None
            ):
                assert output == expected_output(request)
        for request in live:
            holds = self.kv.holds_blocks(request.request_id)
            assert holds == (request.status is RequestStatus.RUNNING)
        counts = {
            RequestStatus.WAITING: self.scheduler.num_waiting,
            RequestStatus.RUNNING: self.scheduler.num_running,
            RequestStatus.SWAPPED: self.scheduler.num_swapped,
        }
        for status, count in counts.items():
            assert count == sum(request.status is status for request in live)
        assert self.scheduler.has_work == bool(live)

    def teardown(self):
        if not hasattr(self, "scheduler"):
            return
        # Every request ends within a bounded number of steps, and everything is free then.
        for _ in range(400):
            if len(self.in_flight) < 2:
                self.schedule()
            if self.in_flight:
                self.update()
            self.sound()
            if not self.scheduler.has_work and not self.in_flight:
                break
        else:
            pytest.fail(f"did not end: {self.live()}")
        assert self.kv.num_free_blocks == self.kv.num_blocks
        assert self.kv.swap_allocator.num_used == 0
        assert self.kv.reset_prefix_cache()
        assert self.kv.allocator.largest_segment == self.kv.num_blocks


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(
    max_examples=150, stateful_step_count=25, deadline=None, derandomize=True
)
