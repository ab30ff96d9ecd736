"""Hand-offs between two schedulers, against devices that run late and check every K/V they read.

Each node's device is given steps and runs them when it likes, in their order, at the latest when
their tokens are read. Transfers keep no such order: they copy blocks from pool to pool at once, a
block at a time, beside whatever the devices do, and go on for a while after either side has given
up. Whatever goes wrong with a block (freed while pinned, written twice, shared too early, handed to
a transfer while a step still writes to it) makes some request read K/V that are not its own.
"""

from __future__ import annotations

from collections import deque
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
from flowkv_jax.engine.admission import Deferred, Reserved
from flowkv_jax.engine.scheduler import Scheduler
from flowkv_jax.engine.step import ScheduledStep
from flowkv_jax.errors import MaxQueuedTokensError, QueueOverflowError, ValidationError
from flowkv_jax.kv_cache.manager import KVCacheManager
from flowkv_jax.request import Request, RequestStatus
from flowkv_jax.sampling_params import SamplingParams
from tests.test_scheduler_machine import (
    EOS,
    SIZE,
    FakeDevice,
    expected_output,
    sampled_token,
    true_prefix,
)

MAX_TOKENS = 24
HOLDING = {RequestStatus.RUNNING, RequestStatus.SENDING, RequestStatus.RECEIVING}


@dataclass
class LateStep:
    """A step as it was dispatched: tables are those of that moment."""

    step: ScheduledStep
    tables: dict[str, list[int]]
    tokens: list[int] | None = None


@dataclass
class Node:
    """A scheduler with its device."""

    name: str
    kv: KVCacheManager
    scheduler: Scheduler
    requests: list[Request] = field(default_factory=list)
    steps: deque[LateStep] = field(default_factory=deque)
    pool: dict[int, tuple] = field(default_factory=dict)
    host: dict[int, tuple | None] = field(default_factory=dict)
    expected: dict[Request, list[int]] = field(default_factory=dict)

    def live(self) -> list[Request]:
        return [request for request in self.requests if not request.is_finished]

    def of_status(self, *statuses: RequestStatus) -> list[Request]:
        return [request for request in self.requests if request.status in statuses]

    def schedule(self, now_s: float) -> ScheduledStep:
        step = self.scheduler.schedule(now_s)
        sequences = step.prefills + step.decodes
        assert len({sequence.request for sequence in sequences}) == len(sequences)
        assert len(sequences) <= self.scheduler.config.max_num_seqs
        for request, _, _, samples in sequences:
            if request.hands_off:
                assert request.status is (
                    RequestStatus.SENDING if samples else RequestStatus.RUNNING
                )
            else:
                assert request.status is RequestStatus.RUNNING
        assert all(not sequence.request.hands_off for sequence in step.decodes)
        if step.is_empty and not self.steps and self.scheduler.has_work and not step.expired:
            assert self.scheduler.is_waiting_for_transfers
        if not step.is_empty:
            tables = {
                s.request.request_id: self.kv.block_ids(s.request.request_id) for s in sequences
            }
            self.steps.append(LateStep(step, tables))
            if not step.num_tokens:
                # Copies alone: nothing to read, so they are not updated.
                self.run_all()
                self.steps.pop()
        return step

    def run_all(self) -> None:
        for late in self.steps:
            self.run(late)

    def run(self, late: LateStep) -> None:
        if late.tokens is not None:
            return
        step = late.step
        for runs, source, target in (
            (step.swap_out, self.pool, self.host),
            (step.swap_in, self.host, self.pool),
        ):
            for src, dst, num_blocks in runs:
                for offset in range(num_blocks * SIZE):
                    target[dst * SIZE + offset] = source.get(src * SIZE + offset)
        for request, start, _, _ in step.prefills + step.decodes:
            if request.is_finished:
                continue  # reads what it likes: its token is dropped
            table = late.tables[request.request_id]
            for position in range(start):
                content = self.pool.get(FakeDevice.slot(table, position))
                assert content == true_prefix(request, position + 1), (request.request_id, position)
        for request, start, num_tokens, _ in step.prefills + step.decodes:
            table = late.tables[request.request_id]
            for position in range(start, start + num_tokens):
                self.pool[FakeDevice.slot(table, position)] = true_prefix(request, position + 1)
        late.tokens = [
            sampled_token(request, start + num_tokens)
            for request, start, num_tokens, _ in step.sampling
        ]

    def update(self, now_s: float) -> None:
        late = self.steps.popleft()
        self.run(late)
        assert late.tokens is not None
        self.scheduler.update(late.step, late.tokens, now_s)

    def fail(self, now_s: float) -> None:
        failed = self.live()
        assert set(self.scheduler.fail_all(now_s)) == set(failed)
        self.steps.clear()
        self.pool.clear()

    def check(self) -> None:
        self.kv.check()
        scheduler = self.scheduler
        for request in self.requests:
            if request not in self.expected:
                self.expected[request] = expected_output(request)
            output, expected = request.output_token_ids, self.expected[request]
            assert output == expected[: len(output)]
            assert request.finish_reason not in ("stop", "length") or output == expected
        for request in self.live():
            assert scheduler.get(request.request_id) is request
            assert self.kv.holds_blocks(request.request_id) == (request.status in HOLDING)
        counts = {
            RequestStatus.WAITING: scheduler.num_waiting,
            RequestStatus.RUNNING: scheduler.num_running,
            RequestStatus.SWAPPED: scheduler.num_swapped,
            RequestStatus.SENDING: scheduler.num_sending,
            RequestStatus.RECEIVING: scheduler.num_receiving,
        }
        for status, count in counts.items():
            assert count == len(self.of_status(status)), status
        assert scheduler.num_running + scheduler.num_receiving <= scheduler.config.max_num_seqs
        moving = counts[RequestStatus.SENDING] + counts[RequestStatus.RECEIVING]
        assert scheduler.has_work == (len(self.live()) > moving)
        # Whoever sleeps is woken in time.
        deadlines = [r.deadline_s for r in self.live() if r.deadline_s is not None]
        assert scheduler.next_deadline_s == min(deadlines, default=None)


@dataclass
class Move:
    """K/V on their way; goes on although a side has ended, until it is drained."""

    src: Node
    dst: Node
    source: Request
    target: Request
    src_blocks: list[int]
    dst_blocks: list[int]
    generations: list[int]  # of dst_blocks
    contents: list[tuple]
    num_copied: int = 0

    def copy(self, num_blocks: int) -> None:
        end = min(self.num_copied + num_blocks, len(self.src_blocks))
        for index in range(self.num_copied, end):
            for offset in range(SIZE):
                content = self.src.pool.get(self.src_blocks[index] * SIZE + offset)
                if self.target.is_finished:
                    content = ("garbage",)
                self.dst.pool[self.dst_blocks[index] * SIZE + offset] = content
        self.num_copied = end

    def check(self) -> None:
        """What is read has not changed, and what is written is nobody else's."""
        written = set(self.dst_blocks)
        for request in self.dst.of_status(*HOLDING):
            if request is not self.target:
                assert written.isdisjoint(self.dst.kv.block_ids(request.request_id))
        is_given_up = self.dst.kv.generations(self.dst_blocks) != self.generations
        assert self.target.is_finished or not is_given_up
        if self.target.is_finished and self.target.finish_reason in ("abort", "error"):
            assert is_given_up or not written
        if self.src.pool:  # it has not failed
            slots = (block * SIZE + offset for block in self.src_blocks for offset in range(SIZE))
            assert [self.src.pool.get(slot) for slot in slots][: len(self.contents)] == (
                self.contents
            )


@dataclass
class Draft:
    tokens: list[int]
    max_tokens: int
    num_known: int
    hands_off: bool
    ignore_eos: bool
    priority: int
    salt: str | None
    timeout_s: int | None


DRAFTS = st.builds(
    Draft,
    tokens=st.lists(st.integers(0, 1), min_size=1, max_size=9),
    max_tokens=st.integers(1, 12),
    num_known=st.sampled_from([0, 0, 0, 1, 3]),
    hands_off=st.sampled_from([True, True, False]),
    ignore_eos=st.booleans(),
    priority=st.integers(0, 2),
    salt=st.sampled_from([None, None, None, "s"]),
    timeout_s=st.sampled_from([None, None, None, 4, 12]),
)
NODES = st.integers(0, 1)


class HandoffMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0
        self.num_requests = 0
        self.nodes: list[Node] = []
        self.targets: dict[Request, Request] = {}  # source -> target, while both are asked for
        self.moves: list[Move] = []

    @initialize(data=st.data())
    def build(self, data):
        for name in "AB":
            kv = KVCacheManager(
                data.draw(st.sampled_from([5, 8, 12, 12, 16])),
                SIZE,
                enable_prefix_caching=data.draw(st.booleans()),
                num_swap_blocks=data.draw(st.sampled_from([0, 3, 8])),
            )
            config = SchedulerConfig(
                max_num_seqs=data.draw(st.sampled_from([1, 3, 4])),
                max_num_batched_tokens=data.draw(st.integers(4, 12)),
                max_waiting_requests=6,
                max_waiting_tokens=40,
                scheduling_policy=data.draw(st.sampled_from(["fcfs", "priority"])),
                preemption_mode=data.draw(st.sampled_from(["auto", "recompute"])),
            )
            scheduler = Scheduler(
                config, kv, max_model_len=MAX_TOKENS, eos_token_ids=(EOS,), prefill_tile=2
            )
            self.nodes.append(Node(name, kv, scheduler))

    def node_of(self, request: Request) -> Node:
        return next(node for node in self.nodes if request in node.requests)

    def other(self, node: Node) -> Node:
        return self.nodes[1 - self.nodes.index(node)]

    def sources(self) -> list[Request]:
        """What is to be handed off and has not got blocks at the other node."""
        return [
            request
            for node in self.nodes
            for request in node.live()
            if request.hands_off and request not in self.targets
        ]

    def ready(self) -> list[Request]:
        """Sources that can be moved."""
        return [
            source
            for source, target in self.targets.items()
            if source.status is RequestStatus.SENDING
            and not source.num_in_flight
            and target.status is RequestStatus.RECEIVING
            and all(move.target is not target for move in self.moves)
        ]

    # What the nodes do

    @rule(index=NODES, drafts=st.lists(DRAFTS, min_size=2, max_size=4))
    def submit(self, index, drafts):
        for draft in drafts:
            self.num_requests += 1
            request = Request(
                f"r{self.num_requests}",
                draft.tokens,
                SamplingParams(max_tokens=draft.max_tokens, ignore_eos=draft.ignore_eos),
                arrival_s=self.now_s,
                max_total_tokens=MAX_TOKENS,
                seed=self.num_requests,
                priority=draft.priority,
                cache_salt=draft.salt,
                deadline_s=None if draft.timeout_s is None else self.now_s + draft.timeout_s,
                hands_off=draft.hands_off,
            )
            known = expected_output(request)[:-1][: draft.num_known]
            request.known_output_token_ids = known
            request.token_ids += known
            try:
                self.nodes[index].scheduler.add(request, self.now_s)
            except (ValidationError, QueueOverflowError, MaxQueuedTokensError):
                continue
            self.nodes[index].requests.append(request)

    @rule(index=NODES, num_steps=st.integers(1, 8), overlap=st.booleans())
    def serve(self, index, num_steps, overlap):
        node = self.nodes[index]
        for _ in range(num_steps):
            while len(node.steps) > int(overlap):
                node.update(self.now_s)
            node.schedule(self.now_s)
            node.check()

    @rule(num_steps=st.integers(2, 10), num_blocks=st.integers(0, 4))
    def work_together(self, num_steps, num_blocks):
        """Both nodes at their usual pace, and the hand-offs between them."""
        for _ in range(num_steps):
            for node in self.nodes:
                while len(node.steps) > 1:
                    node.update(self.now_s)
            for move in self.moves.copy():
                move.copy(num_blocks)
                if move.num_copied == len(move.src_blocks):
                    self.end(move, succeeds=True)
            for source in self.ready():
                self.start(source)
            for source in self.sources():
                if source.status is RequestStatus.SENDING:
                    self.reserve(source)
            for node in self.nodes:
                node.schedule(self.now_s)
            self.sound()

    @rule(index=NODES)
    def schedule(self, index):
        if len(self.nodes[index].steps) < 2:
            self.nodes[index].schedule(self.now_s)

    @rule(index=NODES)
    def update(self, index):
        if self.nodes[index].steps:
            self.nodes[index].update(self.now_s)

    @rule(index=NODES)
    def device_catches_up(self, index):
        self.nodes[index].run_all()

    # Hand-offs

    @precondition(lambda self: self.sources())
    @rule(data=st.data(), all_of_them=st.booleans())
    def ask_for_blocks(self, data, all_of_them):
        """At any time: a decode node may be asked before the prompt has been computed."""
        sources = self.sources()
        for source in sources if all_of_them else [data.draw(st.sampled_from(sources))]:
            self.reserve(source)

    def reserve(self, source: Request) -> bool:
        dst = self.other(self.node_of(source))
        target = Request(
            source.request_id,
            source.prompt_token_ids,
            source.sampling_params,
            arrival_s=source.arrival_s,
            max_total_tokens=MAX_TOKENS,
            seed=source.seed,
            priority=source.priority,
            cache_salt=source.cache_salt,
            deadline_s=source.deadline_s,
            known_output_token_ids=source.known_output_token_ids,
        )
        before = dst.kv.num_free_blocks, dst.kv.num_cached_blocks, dst.scheduler.load()
        try:
            answer = dst.scheduler.reserve(target, self.now_s)
        except ValidationError:  # its pool is too small
            return False
        if isinstance(answer, Deferred):
            assert answer.reason
            assert before == (
                dst.kv.num_free_blocks,
                dst.kv.num_cached_blocks,
                dst.scheduler.load(),
            )
            assert target.status is RequestStatus.WAITING
            return False
        assert isinstance(answer, Reserved)
        assert answer.num_reused_tokens <= target.num_tokens
        dst.requests.append(target)
        self.targets[source] = target
        return True

    @precondition(lambda self: self.ready())
    @rule(data=st.data(), num_blocks=st.integers(0, 3))
    def start_moving(self, data, num_blocks):
        self.start(data.draw(st.sampled_from(self.ready()))).copy(num_blocks)

    def start(self, source: Request) -> Move:
        target = self.targets[source]
        src = self.node_of(source)
        dst = self.other(src)
        name = source.request_id
        num_known = target.num_tokens
        first, end = target.num_computed_tokens // SIZE, -(-num_known // SIZE)
        src_blocks = src.kv.block_ids(name)[first:end]
        dst_blocks = dst.kv.block_ids(name)[first:end]
        src.kv.pin(src_blocks)
        dst.kv.pin(dst_blocks)
        contents = [
            true_prefix(source, position + 1) for position in range(first * SIZE, num_known)
        ]
        generations = dst.kv.generations(dst_blocks)
        move = Move(src, dst, source, target, src_blocks, dst_blocks, generations, contents)
        self.moves.append(move)
        move.check()
        return move

    @precondition(lambda self: self.moves)
    @rule(data=st.data(), num_blocks=st.integers(1, 3))
    def copy_some(self, data, num_blocks):
        data.draw(st.sampled_from(self.moves)).copy(num_blocks)

    @precondition(lambda self: self.moves)
    @rule(data=st.data(), succeeds=st.sampled_from([True, True, True, False]))
    def end_moving(self, data, succeeds):
        self.end(data.draw(st.sampled_from(self.moves)), succeeds)

    def end(self, move: Move, succeeds: bool) -> None:
        source, target = move.source, move.target
        failed = not move.src.pool
        if succeeds:
            move.copy(len(move.src_blocks))
        self.moves.remove(move)
        was_sending = source.status is RequestStatus.SENDING
        if (
            succeeds
            and was_sending
            and target.status is RequestStatus.RECEIVING
            and not failed
            and self.targets.get(source) is target
        ):
            new_tokens = source.token_ids[target.num_tokens :]
            move.dst.scheduler.receive(target, new_tokens, self.now_s)
            move.src.scheduler.finish(source, None, None, self.now_s)
            assert source.finish_reason is None
            del self.targets[source]
        # The last to let go.
        move.src.kv.unpin(move.src_blocks)
        move.dst.kv.unpin(move.dst_blocks)

    @precondition(lambda self: self.keepable())
    @rule(data=st.data())
    def keep(self, data):
        self.keep_one(data.draw(st.sampled_from(self.keepable())))

    def keepable(self) -> list[Request]:
        return [
            request
            for node in self.nodes
            for request in node.of_status(RequestStatus.SENDING)
            if not request.num_in_flight
        ]

    def keep_one(self, source: Request) -> None:
        """Also while it is being moved: the transfer goes on for a while."""
        self.node_of(source).scheduler.keep(source, self.now_s)
        self.end_target(source)

    def end_target(self, source: Request) -> None:
        target = self.targets.pop(source, None)
        if target is not None and target.status is RequestStatus.RECEIVING:
            self.node_of(target).scheduler.finish(target, "abort", None, self.now_s)

    @precondition(lambda self: self.targets)
    @rule(data=st.data())
    def hear_of_the_other_side(self, data):
        self.hear(data.draw(st.sampled_from(list(self.targets))))

    def hear(self, source: Request) -> None:
        """One side has ended: so does the target; a source that lives may be sent again."""
        target = self.targets[source]
        if source.is_finished or target.is_finished or not source.hands_off:
            self.end_target(source)

    # What befalls them

    @rule(seconds=st.integers(1, 2))
    def wait(self, seconds):
        self.now_s += seconds

    @precondition(lambda self: any(node.live() for node in self.nodes))
    @rule(data=st.data())
    def end_early(self, data):
        request = data.draw(
            st.sampled_from([request for node in self.nodes for request in node.live()])
        )
        node = self.node_of(request)
        assert node.scheduler.finish(request, "abort", None, self.now_s)
        assert not node.kv.holds_blocks(request.request_id)

    @rule(index=NODES)
    def reset_prefix_cache(self, index):
        self.nodes[index].kv.reset_prefix_cache()

    @rule(index=NODES, really=st.sampled_from([False, False, False, True]))
    def fail_one(self, index, really):
        if really:
            self.nodes[index].fail(self.now_s)

    @invariant()
    def sound(self):
        for node in self.nodes:
            node.check()
        for move in self.moves:
            move.check()

    def teardown(self):
        if not self.nodes:
            return
        for _ in range(300):
            for node in self.nodes:
                if len(node.steps) < 2:
                    node.schedule(self.now_s)
                if node.steps:
                    node.update(self.now_s)
            # Transfers end, and a hand-off that is deferred is given up.
            for move in self.moves.copy():
                self.end(move, succeeds=True)
            for source in list(self.targets):
                self.hear(source)
                # Early reservations of two nodes may keep each other's prompts waiting.
                if source.status in (RequestStatus.WAITING, RequestStatus.SWAPPED):
                    self.end_target(source)
            for source in self.ready():
                self.start(source)
            for source in self.keepable():
                if source not in self.targets and not self.reserve(source):
                    self.keep_one(source)
            self.sound()
            if not any(node.live() or node.steps for node in self.nodes) and not self.moves:
                break
        else:
            pytest.fail(f"did not end: {[node.live() for node in self.nodes]}")
        for node in self.nodes:
            assert node.kv.num_free_blocks == node.kv.num_blocks
            assert node.kv.num_pinned_blocks == 0
            assert node.kv.swap_allocator.num_used == 0
            assert node.kv.reset_prefix_cache()
            assert node.kv.allocator.largest_segment == node.kv.num_blocks


TestHandoffMachine = HandoffMachine.TestCase
TestHandoffMachine.settings = settings(
    max_examples=200, stateful_step_count=40, deadline=None, derandomize=True
)
