"""Hand-offs between whole nodes, whatever crosses, fails or dies on the way.

Nodes, dispatcher and both sides of every hand-off are the real ones; devices, wire and router are
scripted (`handoff_nodes`, `scripted_nodes`). Each K/V that a step reads is checked, each token that
a caller hears, and the books of every node after every rule. In the end all that live run until
they are quiet: every request has ended as it should, and no node holds anything.
"""

from __future__ import annotations

import logging
import random

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

from flowkv_jax.cluster.dispatcher import Dispatcher
from flowkv_jax.config import SchedulerConfig
from flowkv_jax.errors import DeadlineExceeded, EngineDeadError, GenerationError, ValidationError
from tests.handoff_nodes import HANDOFF_WAIT_S, MAX_MODEL_LEN, StillNode, Wire
from tests.scripted_nodes import Caller, ScriptedRouter, new_caller, right_answer
from transfer.errors import PeerLost

INDEX = st.integers(0, 11)


class Complaints(logging.Handler):
    """What is logged as an error: a bug, unless a test has injected it."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        if type(error).__name__ != "DeviceFailure":
            self.records.append(record)


class AgentsMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.complaints = Complaints()
        logging.getLogger("flowkv_jax").addHandler(self.complaints)
        self.callers: list[Caller] = []
        self.aborted: set[str] = set()
        self.num_faults = 0

    @initialize(
        seed=st.integers(0, 2**16),
        policy=st.sampled_from(["recompute", "recompute", "fail"]),
        roles=st.sampled_from(["pd", "pd", "hh", "pdd", "ppd", "hhh"]),
    )
    def begin(self, seed: int, policy: str, roles: str) -> None:
        self.policy = policy
        self.wire = Wire()
        self.router = ScriptedRouter()
        self.router.lot = random.Random(seed)
        self.dispatcher = Dispatcher(
            self.router,
            kv_load_failure_policy=policy,  # type: ignore[arg-type]
            max_waiting_requests=100,
            max_placements=10**6,
            clock=lambda: self.wire.now_s,
        )
        self.names = {f"{role}{i}": role for i, role in enumerate(roles)}
        self.past: list[StillNode] = []
        draw = random.Random(seed).choice
        self.settings = [
            {
                "num_blocks": draw([12, 12, 14, 20]),
                "num_swap_blocks": draw([0, 8]),
                "enable_prefix_caching": draw([True, True, False]),
                "enable_overlap": draw([True, True, False]),
                "scheduler": SchedulerConfig(
                    max_num_seqs=draw([1, 2, 4]),
                    max_num_batched_tokens=draw([4, 12]),
                    preemption_mode=draw(["auto", "recompute"]),
                ),
            }
            for _ in roles
        ]
        for name in self.names:
            self.join(name)

    def join(self, name: str) -> None:
        if name in self.wire.nodes:
            self.past.append(self.wire.nodes[name])
        number = list(self.names).index(name)
        node = StillNode(name, self.wire, self.dispatcher.deliver, **self.settings[number])
        node._on_death = lambda error: self.lose(node)
        self.dispatcher.add_node(node)
        self.router_learns()

    def router_learns(self) -> None:
        fit = [n for n, node in self.wire.nodes.items() if not node.is_lost]
        self.router.prefill = [n for n in fit if self.names[n] in "ph"]
        self.router.decode = [n for n in fit if self.names[n] in "dh"]
        if not self.router.decode:
            self.router.decode = self.router.prefill
        if not self.router.prefill:
            self.router.prefill = self.router.decode

    def lose(self, node: StillNode) -> None:
        node.is_lost = True
        self.router_learns()
        self.dispatcher.lose_node(node.name, "gone")

    def node(self, index: int) -> StillNode:
        nodes = list(self.wire.nodes.values())
        return nodes[index % len(nodes)]

    # Callers

    @rule(
        prompt=st.lists(st.integers(1, 2), min_size=1, max_size=9),
        max_tokens=st.integers(1, 12),
        n=st.sampled_from([1, 1, 1, 2]),
        has_stop=st.booleans(),
        timeout_s=st.sampled_from([None, None, None, 3.0, 9.0]),
    )
    def submit(
        self, prompt: list[int], max_tokens: int, n: int, has_stop: bool, timeout_s: float | None
    ) -> None:
        now_s = self.wire.now_s
        caller = new_caller(
            f"r{len(self.callers)}",
            prompt=prompt,
            max_tokens=max_tokens,
            n=n,
            seed=len(self.callers) // 2,
            arrival_s=now_s,
            deadline_s=None if timeout_s is None else now_s + timeout_s,
            stop=["a", "ce"] if has_stop else None,
        )
        assert len(prompt) + max_tokens <= MAX_MODEL_LEN
        caller.accepted = self.dispatcher.submit(caller.submission)
        self.callers.append(caller)

    @precondition(lambda self: self.callers)
    @rule(index=INDEX)
    def abort(self, index: int) -> None:
        caller = self.callers[-1 - index % len(self.callers)]
        if not caller.is_done:
            self.aborted.add(caller.submission.request_id)
            self.dispatcher.abort([caller.submission.request_id])

    @rule(seconds=st.sampled_from([0.5, 2.0, HANDOFF_WAIT_S]))
    def wait(self, seconds: float) -> None:
        self.wire.now_s += seconds
        self.dispatcher.tick()

    @rule(index=INDEX)
    def migrate(self, index: int) -> None:
        self.dispatcher.migrate(self.node(index).name)

    # Nodes at work

    @rule(index=INDEX)
    def take_one(self, index: int) -> None:
        self.node(index).take_one()

    @rule(index=INDEX, count=st.integers(1, 4))
    def turn(self, index: int, count: int) -> None:
        for _ in range(count):
            self.node(index).turn()

    @rule(index=INDEX)
    def step_alone(self, index: int) -> None:
        self.node(index).run_step()

    @rule(index=INDEX)
    def device_catches_up(self, index: int) -> None:
        node = self.node(index)
        if node.acts and not node.device.fails_next:
            node.device.run_until()

    @rule(count=st.integers(1, 6), num_blocks=st.sampled_from([0, 0, 1, 100]))
    def all_go_on(self, count: int, num_blocks: int) -> None:
        """As things usually go, with slow or fast transfers."""
        for _ in range(count):
            for node in list(self.wire.nodes.values()):
                node.turn()
            self.carry(num_blocks)
            self.check()

    def carry(self, num_blocks: int) -> None:
        """Every notification, and some blocks of every transfer."""
        for pair in list(self.wire.letters):
            while self.wire.letters.get(pair):
                self.wire.deliver(pair)
        for transfer in list(self.wire.transfers):
            if not transfer.src.is_gone:
                transfer.go_on(num_blocks)
            if num_blocks == 100:
                transfer.finish()
                transfer.acknowledge()

    # The wire

    @precondition(lambda self: any(self.wire.letters.values()))
    @rule(index=INDEX)
    def letter(self, index: int) -> None:
        pairs = [pair for pair, letters in self.wire.letters.items() if letters]
        self.wire.deliver(pairs[index % len(pairs)])

    @rule(is_prompt=st.booleans())
    def small_transfers(self, is_prompt: bool) -> None:
        self.wire.is_prompt = is_prompt

    @precondition(lambda self: self.wire.transfers)
    @rule(
        index=INDEX,
        what=st.sampled_from(
            ["copy", "copy", "finish", "finish", "fail", "acknowledge", "acknowledge", "lose"]
        ),
    )
    def transfer(self, index: int, what: str) -> None:
        transfer = self.wire.transfers[index % len(self.wire.transfers)]
        if transfer.src.is_gone and what in ("copy", "finish"):
            return
        if what == "copy":
            transfer.go_on(1)
        elif what == "finish" and not transfer.is_answered:
            transfer.finish()
        elif what == "fail" and not transfer.is_answered:
            self.num_faults += 1
            transfer.over(PeerLost("injected"))
        elif what == "acknowledge":
            transfer.acknowledge()
        elif what == "lose" and transfer.is_answered:
            self.num_faults += 1
            transfer.acknowledge(PeerLost("the acknowledgement was lost"))

    # Trouble

    @rule(index=INDEX)
    def device_fails(self, index: int) -> None:
        node = self.node(index)
        if node.acts and node.in_flight is not None:
            self.num_faults += 1
            node.device.fails_next = True

    @rule(index=INDEX, is_noticed=st.booleans())
    def die(self, index: int, is_noticed: bool) -> None:
        node = self.node(index)
        if node.acts and self.some_other_acts(node):
            self.num_faults += 1
            self.wire.kill(node)
            if is_noticed:
                self.lose(node)

    @rule(index=INDEX)
    def thread_dies(self, index: int) -> None:
        node = self.node(index)
        if node.acts and self.some_other_acts(node):
            self.num_faults += 1
            node.die(EngineDeadError("injected"))

    def some_other_acts(self, node: StillNode) -> bool:
        return any(n.acts for n in self.wire.nodes.values() if n is not node)

    @rule(index=INDEX)
    def notice(self, index: int) -> None:
        node = self.node(index)
        if node.is_gone and not node.is_lost:
            self.lose(node)

    @precondition(lambda self: self.wire.losses)
    @rule(index=INDEX)
    def hear_of_loss(self, index: int) -> None:
        self.wire.hear_of_loss(self.wire.losses[index % len(self.wire.losses)])

    @rule(index=INDEX)
    def come_back(self, index: int) -> None:
        node = self.node(index)
        heard = all(name != node.name for _, name in self.wire.losses)
        if node.is_gone and node.is_lost and heard:
            self.join(node.name)

    def walk(self, name: str, draw: random.Random) -> None:
        """One rule, with arguments by lot, where it applies."""
        index = draw.randrange(12)
        match name:
            case "submit":
                prompt = [draw.choice([1, 2]) for _ in range(draw.randint(1, 9))]
                timeout_s = draw.choice([None] * 8 + [3.0, 9.0])
                n, has_stop = draw.choice([1, 1, 1, 2]), draw.random() < 0.2
                self.submit(prompt, draw.randint(1, 12), n, has_stop, timeout_s)
            case "abort" if not self.callers:
                pass
            case "wait":
                self.wait(draw.choice([0.5, 2.0, HANDOFF_WAIT_S]))
            case "turn":
                self.turn(index, draw.randint(1, 4))
            case "all_go_on":
                self.all_go_on(draw.randint(1, 6), draw.choice([0, 0, 1, 100]))
            case "letter" if not any(self.wire.letters.values()):
                pass
            case "small_transfers":
                self.small_transfers(draw.random() < 0.3)
            case "transfer" if not self.wire.transfers:
                pass
            case "transfer":
                what = ["copy", "finish", "finish", "fail", "acknowledge", "acknowledge", "lose"]
                self.transfer(index, draw.choice(what))
            case "die":
                self.die(index, draw.random() < 0.5)
            case "hear_of_loss" if not self.wire.losses:
                pass
            case _:
                getattr(self, name)(index)

    # What must hold

    @invariant()
    def sound(self) -> None:
        if hasattr(self, "dispatcher"):
            self.check()

    def check(self) -> None:
        assert not self.complaints.records, self.complaints.records[0].getMessage()
        self.dispatcher.check()
        self.wire.check()
        for node in self.wire.nodes.values():
            if node.acts:
                node.check()
        for caller in self.callers:
            self.check_caller(caller)

    def check_caller(self, caller: Caller) -> None:
        assert not caller.is_told_too_much
        for index, spec in enumerate(caller.submission.specs):
            token_ids, text, finish_reason = right_answer(spec)
            told = caller.told(index)
            assert told == token_ids[: len(told)]
            answers = [a for o in caller.outputs for a in o.outputs if a.index == index]
            ended = [a for a in answers if a.finish_reason is not None]
            assert len(ended) <= 1
            if ended and ended[0].finish_reason == "abort":
                assert caller.submission.request_id in self.aborted
            elif ended:
                assert (told, ended[0].finish_reason) == (token_ids, finish_reason)
                assert "".join(answer.delta_text for answer in answers) == text
        if isinstance(caller.error, DeadlineExceeded):
            deadline_s = caller.submission.specs[0].deadline_s
            assert deadline_s is not None and deadline_s <= self.wire.now_s
        elif caller.error is not None:
            # One that a node refuses for good needs more than that node's pool.
            assert isinstance(caller.error, GenerationError | ValidationError), caller.error
            assert self.num_faults or self.policy == "fail", caller.error

    def teardown(self) -> None:
        try:
            if hasattr(self, "dispatcher"):
                self.settle()
        finally:
            logging.getLogger("flowkv_jax").removeHandler(self.complaints)

    def settle(self) -> None:
        while self.wire.losses:
            self.wire.hear_of_loss(self.wire.losses[0])
        for node in list(self.wire.nodes.values()):
            if node.is_gone and not node.is_lost:
                self.lose(node)
        for _ in range(400):
            for node in list(self.wire.nodes.values()):
                node.turn()
            self.carry(100)
            self.check()
            self.wire.now_s += 0.25
            self.dispatcher.tick()
            if self.is_over:
                break
        for caller in self.callers:
            assert caller.is_done or caller.accepted.exception(0), "somebody waits for ever"
        assert not self.wire.transfers
        assert self.dispatcher.num_live == 0
        for node in self.wire.nodes.values():
            if node.acts:
                node.turn()
                node.turn()
                node.check_empty()

    @property
    def is_over(self) -> bool:
        return (
            all(caller.is_done for caller in self.callers)
            and all(node.is_quiet for node in self.wire.nodes.values())
            and not any(self.wire.letters.values())
            and not self.wire.transfers
        )


WALK = {
    "submit": 6,
    "abort": 2,
    "wait": 1,
    "migrate": 1,
    "take_one": 6,
    "turn": 10,
    "step_alone": 6,
    "device_catches_up": 2,
    "all_go_on": 2,
    "letter": 12,
    "small_transfers": 1,
    "transfer": 10,
    "device_fails": 1,
    "die": 1,
    "thread_dies": 0.2,
    "notice": 2,
    "hear_of_loss": 2,
    "come_back": 2,
}
"""How often a walk does what."""


@pytest.mark.parametrize("seed", range(60))
def test_long_walks(seed: int):
    """Longer than what hypothesis makes up, and busier."""
    draw = random.Random(seed)
    machine = AgentsMachine()
    try:
        machine.begin(
            seed, draw.choice(["recompute", "fail"]), draw.choice(["pd", "pd", "hh", "ppd", "hhh"])
        )
        for name in draw.choices(list(WALK), list(WALK.values()), k=250):
            machine.walk(name, draw)
            machine.check()
    finally:
        machine.teardown()


TestAgents = AgentsMachine.TestCase
TestAgents.settings = settings(max_examples=60, stateful_step_count=50, deadline=None)
