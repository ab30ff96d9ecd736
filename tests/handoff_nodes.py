"""Real nodes without threads or devices, and a wire between them on which nothing goes by itself.

A `StillNode` is `engine.node.Node` whose thread is the test: it takes a message, or runs a step,
when it is told to. Its device runs steps late but in order, and checks every K/V that they read:
a position's K/V are the salt and all tokens up to it, so a block that was reused, overwritten or
filled from elsewhere is found by whoever reads it. Tokens are those of `scripted_nodes`.

`Wire` carries notifications, first in first out for each pair of nodes, and transfers, which copy
a block at a time, complete, fail, or are found to be stale, when told to.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from types import SimpleNamespace
from typing import Any

from flowkv_jax.cluster.node_port import Deliver
from flowkv_jax.config import HandoffConfig, SchedulerConfig
from flowkv_jax.engine.model_runner import StepResult
from flowkv_jax.engine.node import Node
from flowkv_jax.engine.scheduler import Scheduler
from flowkv_jax.engine.step import ScheduledStep
from flowkv_jax.handoff.agent import HandoffAgent
from flowkv_jax.kv_cache.manager import KVCacheManager
from flowkv_jax.request import Request, RequestStatus
from pallas_kernels.kv_layout import KVLayout
from tests.scripted_nodes import EOS, next_token
from transfer.arrival import Arrival
from transfer.errors import BlocksBusy, Cancelled, PeerLost, StaleGeneration, TransferError
from transfer.handle import TransferHandle
from transfer.lifecycle import TransferState
from transfer.strategies import Strategy
from transfer.types import TransferRequest

SIZE = 2
MAX_MODEL_LEN = 24
LAYOUT = KVLayout(
    num_layers=1, block_size=SIZE, num_kv_heads=1, head_dim=1, dtype="float32", dtype_bytes=4
)
HANDOFF_WAIT_S = 5.0


@lru_cache(maxsize=4096)
def true_tokens(seed: int, prompt: tuple[int, ...], count: int) -> tuple[int, ...]:
    """The first tokens of a sequence that no end token ends."""
    if count <= len(prompt):
        return prompt[:count]
    before = true_tokens(seed, prompt, count - 1)
    return (*before, next_token(seed, before))


def kv_at(request: Request, position: int) -> tuple[object, ...]:
    prompt = tuple(request.prompt_token_ids)
    return (request.cache_salt, *true_tokens(request.seed, prompt, position + 1))


class DeviceFailure(Exception):
    """Injected."""


@dataclass
class LateStep:
    """A step under way; block tables are those of its dispatch."""

    device: LateDevice
    step: ScheduledStep
    tables: dict[str, list[int]]
    dispatched_s: float = 0.0
    tokens: tuple[int, ...] | None = None

    def collect(self) -> StepResult:
        self.device.run_until(self)
        assert self.tokens is not None
        samples: Any = SimpleNamespace(logprob=[-0.5], rank=[1], top_ids=None, top_logprobs=None)
        return StepResult(self.tokens, tuple((samples, 0) for _ in self.tokens))


class LateDevice:
    """In the place of a `ModelRunner`."""

    def __init__(self, kv: KVCacheManager) -> None:
        self.pool: dict[int, object] = {}
        self.fails_next = False
        self._kv = kv
        self._host: dict[int, object] = {}
        self._steps: deque[LateStep] = deque()

    def dispatch(self, step: ScheduledStep) -> LateStep:
        sequences = step.prefills + step.decodes
        ids = [sequence.request.request_id for sequence in sequences]
        late = LateStep(self, step, {name: self._kv.block_ids(name) for name in ids})
        self._steps.append(late)
        return late

    def sample(self, late: LateStep, state_of: object) -> None:
        """Its tokens are made when it runs."""

    def reset(self) -> None:
        self.pool.clear()
        self._steps.clear()

    def run_until(self, last: LateStep | None = None) -> None:
        while self._steps and (last is None or last.tokens is None):
            self._run(self._steps.popleft())

    def _run(self, late: LateStep) -> None:
        if self.fails_next:
            self.fails_next = False
            raise DeviceFailure("injected")
        step = late.step
        for runs, source, target in (
            (step.swap_out, self.pool, self._host),
            (step.swap_in, self._host, self.pool),
        ):
            for src, dst, num_blocks in runs:
                for offset in range(num_blocks * SIZE):
                    target[dst * SIZE + offset] = source.get(src * SIZE + offset)
        sequences = step.prefills + step.decodes
        for request, start, _, _ in sequences:
            if request.is_finished:
                continue  # reads what it likes: its token is dropped
            for position in range(start):
                found = self.pool.get(slot(late.tables[request.request_id], position))
                assert found == kv_at(request, position), (request.request_id, position, found)
        for request, start, num_tokens, _ in sequences:
            for position in range(start, start + num_tokens):
                where = slot(late.tables[request.request_id], position)
                self.pool[where] = kv_at(request, position)
        late.tokens = tuple(
            true_tokens(request.seed, tuple(request.prompt_token_ids), start + count + 1)[-1]
            for request, start, count, _ in step.sampling
        )


def slot(table: Sequence[int], position: int) -> int:
    return table[position // SIZE] * SIZE + position % SIZE


class StillNode(Node):
    """A node whose thread is the test.

    Attributes:
        is_gone: its process was killed. is_lost: and whoever dispatches has heard of it.
    """

    def __init__(
        self,
        name: str,
        wire: Wire,
        deliver: Deliver,
        *,
        num_blocks: int = 16,
        num_swap_blocks: int = 0,
        enable_prefix_caching: bool = True,
        enable_overlap: bool = True,
        scheduler: SchedulerConfig | None = None,
    ) -> None:
        self.blocks = KVCacheManager(
            num_blocks,
            SIZE,
            enable_prefix_caching=enable_prefix_caching,
            num_swap_blocks=num_swap_blocks,
        )
        self.device = LateDevice(self.blocks)
        self.is_gone = self.is_lost = False
        self.in_flight: LateStep | None = None
        self.wire = wire
        config = scheduler or SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=12)
        self.plan = Scheduler(
            config, self.blocks, max_model_len=MAX_MODEL_LEN, eos_token_ids=(EOS,), prefill_tile=2
        )
        super().__init__(
            name,
            self.device,  # type: ignore[arg-type]
            self.plan,
            self.blocks,
            vocab_size=128,
            eos_token_ids=(EOS,),
            deliver=deliver,
            enable_overlap=enable_overlap,
            debug=True,
            clock=lambda: wire.now_s,
        )
        self.agent = HandoffAgent(
            self,
            WireEnd(wire, self),
            LAYOUT,
            HandoffConfig(handoff_wait_s=HANDOFF_WAIT_S),
        )
        self.attach(self.agent)
        wire.nodes[name] = self

    def _begin(self) -> None:
        self._collector.close()
        self._thread = threading.current_thread()

    def _await(self, in_flight: LateStep) -> StepResult:  # type: ignore[override]
        return in_flight.collect()

    @property
    def has_died(self) -> bool:
        """Without its process: what others send it is never read."""
        return self._dead is not None

    @property
    def acts(self) -> bool:
        return not self.is_gone and not self.has_died

    # What a test has it do

    def take_one(self) -> bool:
        """One message; False if there is none."""
        if not self.acts or self._mailbox._messages.empty():
            return False
        self._mailbox.take()
        return True

    def hear(self) -> None:
        while self.take_one():
            pass

    def tend(self) -> None:
        if self.acts:
            self._tend_handoffs()

    def run_step(self) -> None:
        """One turn of the node's loop, after its messages."""
        if not self.acts:
            return
        try:
            self.in_flight = self._step(self.in_flight)  # type: ignore[assignment, arg-type]
            if self.in_flight is not None:
                self._num_failures = 0
        except DeviceFailure as error:
            self.in_flight = None
            self._num_failures = 0
            self._recover(error)

    def turn(self) -> None:
        self.tend()
        self.hear()
        self.tend()
        self.run_step()

    def die(self, error: Exception) -> None:
        """Its thread ends; its process, pool and transfers live on."""
        self._die(error, is_asked_for=False)  # type: ignore[arg-type]

    # What must hold

    @property
    def is_quiet(self) -> bool:
        nothing_said = self._mailbox._messages.empty()
        return not self.acts or (nothing_said and self.in_flight is None and not self._served.all())

    def check(self) -> None:
        self.blocks.check()
        for served in self._served.all():
            assert self.plan.get(served.request.request_id) is served.request
            holds = served.request.status not in (RequestStatus.WAITING, RequestStatus.SWAPPED)
            assert self.blocks.holds_blocks(served.request.request_id) == holds

    def check_empty(self) -> None:
        """Nothing is left of anything."""
        self.check()
        assert len(self.agent) == 0
        assert self._served.all() == []
        assert self.blocks.num_pinned_blocks == 0
        assert self.blocks.num_free_blocks == self.blocks.num_blocks
        assert self.blocks.swap_allocator.num_used == 0
        assert not self.plan.has_work and not self.plan.is_waiting_for_transfers


@dataclass(eq=False)
class WireTransfer:
    """K/V on their way; goes on although both sides have ended, until it is final."""

    wire: Wire
    src: StillNode
    dst: StillNode
    request: TransferRequest
    name: str
    is_taken_in: bool = False
    is_cancelled: bool = False
    num_copied: int = 0
    handle: TransferHandle = field(init=False)
    answer: TransferError | None = None
    is_answered: bool = False

    def __post_init__(self) -> None:
        self.handle = TransferHandle(self.name, self.cancel)
        runs = self.request.runs
        self.sources = [r.src_start + i for r in runs for i in range(r.num_blocks)]
        self.destinations = [r.dst_start + i for r in runs for i in range(r.num_blocks)]
        assert all(self.src.blocks.allocator.is_pinned(block) for block in self.sources)

    def cancel(self) -> None:
        self.is_cancelled = True
        if not self.is_taken_in and not self.is_answered:
            self.over(Cancelled("cancelled"), tag="")

    @property
    def is_stale(self) -> bool:
        now = self.dst.blocks.generations(self.destinations)
        is_stale = tuple(now) != tuple(self.request.dst_generations)
        is_given_up = self.request.tag not in self.dst.agent._receiver._by_handoff
        assert is_stale <= is_given_up
        return is_stale

    def go_on(self, num_blocks: int) -> None:
        """Be taken in, or copy some blocks."""
        if self.is_answered:
            return
        if not self.is_taken_in:
            busy = self.wire.written_at(self.dst)
            if not busy.isdisjoint(self.destinations):
                self.over(BlocksBusy("written by another"))
            elif self.is_stale:
                self.over(StaleGeneration("given up before"))
            else:
                self.is_taken_in = True
            return
        end = min(self.num_copied + num_blocks, len(self.sources))
        for index in range(self.num_copied, end):
            for offset in range(SIZE):
                value = self.src.device.pool.get(self.sources[index] * SIZE + offset)
                self.dst.device.pool[self.destinations[index] * SIZE + offset] = value
        self.num_copied = end

    def finish(self) -> None:
        """To the end, if it can be."""
        while not self.is_answered and self.num_copied < len(self.sources):
            self.go_on(len(self.sources))
        if not self.is_answered:
            self.over(StaleGeneration("given up meanwhile") if self.is_stale else None)

    def over(self, error: TransferError | None, tag: str | None = None) -> None:
        """Final at the destination."""
        assert not self.is_answered
        self.is_answered, self.answer = True, error
        states = TransferState
        state = states.COMPLETED
        if error is not None:
            state = states.CANCELLED if isinstance(error, Cancelled) else states.FAILED
        tag = self.request.tag if tag is None else tag
        if tag:
            arrival = Arrival(self.name, self.dst.name, state, error, tag, "direct", "wire")
            self.dst.agent.on_arrival(arrival)

    def acknowledge(self, error: TransferError | None = None) -> None:
        """Final at the source, with the destination's answer, or `error` for want of one."""
        if not self.is_answered:
            return
        self.wire.transfers.remove(self)
        error = error or self.answer
        state = TransferState.COMPLETED if error is None else TransferState.FAILED
        self.handle.finish(state, None, error)


class Wire:
    """Between all nodes.

    Attributes:
        nodes: by name: the latest life of each.
        letters: notifications that have not arrived.
        transfers: those that are not final at their source.
        losses: (node, name of one that it has yet to hear is gone).
        is_prompt: transfers are over before `submit` returns.
    """

    def __init__(self) -> None:
        self.now_s = 0.0
        self.nodes: dict[str, StillNode] = {}
        self.letters: dict[tuple[str, str], deque[bytes]] = {}
        self.transfers: list[WireTransfer] = []
        self.losses: list[tuple[StillNode, str]] = []
        self.is_prompt = False
        self._num_transfers = 0

    def written_at(self, node: StillNode) -> set[int]:
        """Blocks that a transfer is writing."""
        return {
            block
            for transfer in self.transfers
            if transfer.dst is node and transfer.is_taken_in and not transfer.is_answered
            for block in transfer.destinations
        }

    def check(self) -> None:
        """Blocks that a transfer reads or may write to are nobody else's to have."""
        for transfer in self.transfers:
            if transfer.src.acts:
                assert all(map(transfer.src.blocks.allocator.is_pinned, transfer.sources))
            if transfer.dst.acts and transfer.is_taken_in and not transfer.is_answered:
                assert all(map(transfer.dst.blocks.allocator.is_pinned, transfer.destinations))

    def deliver(self, pair: tuple[str, str]) -> None:
        """The oldest notification of a pair arrives."""
        letters = self.letters.get(pair)
        if letters:
            payload = letters.popleft()
            node = self.nodes[pair[1]]
            if not node.is_gone:
                node.agent.on_notification(payload)

    def kill(self, node: StillNode) -> None:
        """Its process ends. Peers hear of it when told to."""
        node.is_gone = True
        for pair in [pair for pair in self.letters if pair[1] == node.name]:
            del self.letters[pair]
        self.losses += [(peer, node.name) for peer in self.nodes.values() if not peer.is_gone]
        self.losses = [loss for loss in self.losses if not loss[0].is_gone]

    def hear_of_loss(self, loss: tuple[StillNode, str]) -> None:
        """A node hears that its connection to another one is over: nothing comes any more."""
        self.losses.remove(loss)
        peer, name = loss
        self.letters.pop((name, peer.name), None)
        gone = self.nodes[name]
        for transfer in list(self.transfers):
            ends = (transfer.src, transfer.dst)
            if ends == (peer, gone):
                transfer.is_answered = True
                transfer.acknowledge(PeerLost("gone"))
            elif ends == (gone, peer):
                if not transfer.is_answered:
                    transfer.over(PeerLost("gone"))
                self.transfers.remove(transfer)
        peer.agent.on_lost([name])


class WireEnd:
    """What one node sees of the wire: `handoff.surroundings.Transfers`."""

    def __init__(self, wire: Wire, node: StillNode) -> None:
        self._wire = wire
        self._node = node

    def notify(self, node: str, payload: bytes) -> None:
        self._require(node)
        self._wire.letters.setdefault((self._node.name, node), deque()).append(payload)

    def submit(
        self,
        request: TransferRequest,
        *,
        backend: str | None = None,
        strategy: Strategy = Strategy.ALIGNED_RUNS,
    ) -> TransferHandle:
        wire, dst = self._wire, self._require(request.dst)
        wire._num_transfers += 1
        transfer = WireTransfer(wire, self._node, dst, request, f"t{wire._num_transfers}")
        wire.transfers.append(transfer)
        if wire.is_prompt:
            transfer.finish()
            transfer.acknowledge()
        return transfer.handle

    def pinned(self, node: str, block_ids: list[int]) -> list[int]:
        assert node == self._node.name
        return sorted(self._wire.written_at(self._node).intersection(block_ids))

    def _require(self, name: str) -> StillNode:
        node = self._wire.nodes.get(name)
        if node is None or (node.is_gone and (self._node, name) not in self._wire.losses):
            raise PeerLost(f"{name} is not connected")
        return node
