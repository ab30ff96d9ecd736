"""Whatever crosses, gets lost, refuses or dies: every answer is right, and nothing is left behind.

Nodes act, hand off, speak, die, hang, come back and join in any order; callers come, abort and
leave, some of them from within their sinks; the router lags behind, and knows nothing of nodes that
other servers lend. In the end every node that lives runs until it is quiet, and then every request
must have ended as it should.
"""

from __future__ import annotations

import random

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
from flowkv_jax.errors import (
    DeadlineExceeded,
    GenerationError,
    QueueOverflowError,
    RetryableRequestError,
    ValidationError,
)
from flowkv_jax.sequence import SequenceUpdate
from tests.scripted_nodes import Caller, ScriptedNode, ScriptedRouter, new_caller, right_answer

MAX_NODES = 4
MAX_WAITING = 40
ROLES = ("prefill", "decode", "hybrid", "lent")


class DispatcherMachine(RuleBasedStateMachine):
    """Attributes:
    nodes: the latest node of each name, dead and lost ones too.
    lost: names that the dispatcher has been told are gone.
    ghosts: news of nodes whose name another one has taken.
    """

    @initialize(
        seed=st.integers(0, 2**16),
        policy=st.sampled_from(["recompute", "recompute", "fail"]),
        roles=st.sampled_from(
            [
                ("hybrid",),
                ("prefill", "decode"),
                ("hybrid", "decode", "decode"),
                ("hybrid", "lent"),
                ("hybrid", "decode", "lent", "lent"),
            ]
        ),
    )
    def begin(self, seed: int, policy: str, roles: tuple[str, ...]) -> None:
        self.now_s = 0.0
        self.policy = policy
        self.router = ScriptedRouter()
        self.router.lot = random.Random(seed)
        self.dispatcher = Dispatcher(
            self.router,
            kv_load_failure_policy=policy,  # type: ignore[arg-type]
            max_waiting_requests=MAX_WAITING,
            hash_block_size=2,
            max_placements=10**6,
            clock=lambda: self.now_s,
        )
        self.nodes: dict[str, ScriptedNode] = {}
        self.roles: dict[str, str] = {}
        self.lost: set[str] = set()
        self.ghosts: list[tuple[str, list[SequenceUpdate]]] = []
        self.told_before: list[tuple[str, list[SequenceUpdate]]] = []
        self.callers: list[Caller] = []
        self.aborted: set[str] = set()
        self.faults: list[Exception] = []
        self.all_nodes: list[ScriptedNode] = []
        for role in roles:
            self.join(role)

    # Nodes that come and go

    @precondition(lambda self: len(self.nodes) - len(self.lost) < MAX_NODES)
    @rule(role=st.sampled_from(ROLES), takes_old_name=st.booleans())
    def join(self, role: str, takes_old_name: bool = False) -> None:
        is_lent = role == "lent"
        name = f"{'L' if is_lent else 'N'}{len(self.nodes)}"
        old_names = [n for n in sorted(self.nodes) if (self.roles[n] == "lent") == is_lent]
        if takes_old_name and old_names:
            name = self.some(old_names)
            old = self.nodes[name]
            old.is_dead = True
            self.ghosts += [(name, updates) for updates in old.news]
        node = ScriptedNode(name, self.nodes)
        self.lost.discard(name)
        self.roles[name] = role
        self.all_nodes.append(node)
        self.router_learns()
        self.dispatcher.add_node(node)

    @rule(index=st.integers(0, 9))
    def die(self, index: int) -> None:
        """A process is killed; nobody has noticed yet."""
        self.node(index).is_dead = True

    @precondition(lambda self: self.present)
    @rule(index=st.integers(0, 9), router_knows=st.booleans())
    def lose(self, index: int, router_knows: bool) -> None:
        """A node is found to be gone. If it only hung, it goes on and knows nothing of it."""
        node = self.present[index % len(self.present)]
        self.lose_one(node)
        if router_knows:
            self.router_learns()

    def lose_one(self, node: ScriptedNode) -> None:
        self.lost.add(node.name)
        self.dispatcher.lose_node(node.name, "no sign of life")

    @rule()
    def router_learns(self) -> None:
        names = sorted(self.nodes.keys() - self.lost)
        self.router.prefill = [n for n in names if self.roles[n] in ("prefill", "hybrid")]
        self.router.decode = [n for n in names if self.roles[n] in ("decode", "hybrid")]

    # Nodes at work

    @rule(index=st.integers(0, 9))
    def hear(self, index: int) -> None:
        self.node(index).hear()

    @rule(index=st.integers(0, 9))
    def work(self, index: int) -> None:
        self.node(index).work()

    @rule(index=st.integers(0, 9))
    def speak(self, index: int) -> None:
        """What is under way arrives, even from a node that has died since."""
        node = self.node(index)
        if node.news:
            self.told_before.append((node.name, node.speak(self.dispatcher)))

    @rule(
        index=st.integers(0, 9),
        outcome=st.sampled_from(["done", "done", "refused", "half", "unacknowledged"]),
    )
    def move(self, index: int, outcome: str) -> None:
        node = self.node(index)
        leaving = [key for key, held in node.held.items() if held.phase == "leaving"]
        if leaving and not node.is_dead:
            node.move(self.some(leaving), outcome)

    @rule(
        index=st.integers(0, 9),
        is_heard=st.booleans(),
        then=st.sampled_from(["", "", "source is lost", "target is lost"]),
    )
    def overtake(self, index: int, is_heard: bool, then: str) -> None:
        """Decode nodes are done with what a prefill node has not told the beginning of."""
        source = self.node(index)
        source.hear()
        source.work()
        for key in [key for key, held in source.held.items() if held.phase == "leaving"]:
            target = self.nodes.get(source.held[key].target or "")
            if target is not None and not source.is_dead:
                source.move(key)
                for _ in range(3):
                    target.work()
                while is_heard and target.news:
                    target.speak(self.dispatcher)
                if then:
                    self.lose_one(source if then.startswith("source") else target)

    @rule()
    def all_work(self) -> None:
        """All make progress, and none of it is known yet."""
        for node in self.nodes.values():
            node.hear()
            node.work()

    @rule(is_backwards=st.booleans())
    def all_speak(self, is_backwards: bool) -> None:
        nodes = list(self.nodes.values())
        for node in reversed(nodes) if is_backwards else nodes:
            while node.news:
                node.speak(self.dispatcher)

    @rule(index=st.integers(0, 9))
    def run(self, index: int) -> None:
        self.node(index).run(self.dispatcher)

    # Trouble

    @rule(index=st.integers(0, 9), is_retryable=st.booleans())
    def refuse(self, index: int, is_retryable: bool) -> None:
        error: Exception = ValidationError("injected")
        if is_retryable:
            error = QueueOverflowError("injected")
        self.faults.append(error)
        self.node(index).refusals.append(error)

    @rule(index=st.integers(0, 9), is_retryable=st.booleans())
    def fail_one(self, index: int, is_retryable: bool) -> None:
        node = self.node(index)
        if node.held and not node.is_dead:
            key = self.some(list(node.held))
            del node.held[key]
            error: Exception = GenerationError("injected")
            if is_retryable:
                error = RetryableRequestError("injected")
            self.faults.append(error)
            node.news.append(
                [SequenceUpdate(sequence_id=key.sequence_id, attempt=key.attempt, error=error)]
            )

    @precondition(lambda self: self.told_before)
    @rule()
    def tell_again(self) -> None:
        name, updates = self.some(self.told_before[-4:])
        # A node repeats what carries tokens; of a question or an ending there is one only.
        again = [u for u in updates if u.token_ids and u.finish_reason is None]
        self.nodes[name].carry_out(
            [o for o in self.dispatcher.deliver(name, again) if o.key not in self.nodes[name].held]
        )

    @precondition(lambda self: self.ghosts)
    @rule()
    def ghost_speaks(self) -> None:
        self.dispatcher.deliver(*self.ghosts.pop(0))

    # Callers

    @rule(
        prompt=st.lists(st.integers(1, 9), min_size=1, max_size=5),
        max_tokens=st.integers(1, 20),
        n=st.sampled_from([1, 1, 1, 2, 3]),
        has_stop=st.booleans(),
        timeout_s=st.sampled_from([None, None, 5.0]),
        gives_up_after=st.sampled_from([None, None, None, None, None, None, 1, 2]),
        borrows=st.sampled_from([True, True, True, False]),
    )
    def submit(
        self,
        prompt: list[int],
        max_tokens: int,
        n: int,
        has_stop: bool,
        timeout_s: float | None,
        gives_up_after: int | None,
        borrows: bool,
    ) -> None:
        caller = new_caller(
            f"r{len(self.callers)}",
            prompt=prompt,
            max_tokens=max_tokens,
            n=n,
            seed=len(self.callers),
            arrival_s=self.now_s,
            deadline_s=None if timeout_s is None else self.now_s + timeout_s,
            stop=["abc", "ee", "fg"] if has_stop else None,
        )
        if gives_up_after is not None:
            caller.then = lambda c: len(c.outputs) == gives_up_after and self.abort_one(c)
        lent = [name for name, role in self.roles.items() if role == "lent"]
        if borrows and lent:
            caller.submission.prefill_node = self.some(lent)
        caller.accepted = self.dispatcher.submit(caller.submission)
        self.callers.append(caller)

    @precondition(lambda self: self.callers)
    @rule(index=st.integers(0, 20))
    def abort(self, index: int) -> None:
        if index < len(self.callers):
            self.abort_one(self.callers[index])

    def abort_one(self, caller: Caller) -> None:
        if not caller.is_done:
            self.aborted.add(caller.submission.request_id)
        if self.router.lot.random() < 0.5:
            self.dispatcher.abort([caller.submission.request_id])
        else:
            self.dispatcher.withdraw([caller.submission])

    @rule(seconds=st.sampled_from([0.1, 1.0, 6.0]))
    def wait(self, seconds: float) -> None:
        self.now_s += seconds
        self.dispatcher.tick()

    # What must hold

    @invariant()
    def all_is_consistent(self) -> None:
        self.dispatcher.check()
        for caller in self.callers:
            self.check_caller(caller)
        for node in self.all_nodes:
            if self.roles[node.name] == "lent":
                assert all(call[0] != "redirect" or call[2] is not None for call in node.calls)
                assert all(spec.decode_node is not None for spec in node.specs)

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
        error = self.error_of(caller)
        if isinstance(error, DeadlineExceeded):
            deadline_s = caller.submission.specs[0].deadline_s
            assert deadline_s is not None and deadline_s <= self.now_s
        elif isinstance(error, GenerationError) and self.policy == "fail":
            assert error in self.faults or "kv_load_failure_policy" in str(error)
        elif isinstance(error, QueueOverflowError):
            assert f"max_waiting_requests={MAX_WAITING}" in str(error)
        elif error is not None:
            assert error in self.faults and not isinstance(error, RetryableRequestError)

    def error_of(self, caller: Caller) -> BaseException | None:
        if caller.accepted is not None and caller.accepted.done() and caller.accepted.exception():
            return caller.accepted.exception()
        return caller.error

    def teardown(self) -> None:
        if not hasattr(self, "dispatcher"):
            return
        for name, node in self.nodes.items():
            if node.is_dead and name not in self.lost:
                self.lost.add(name)
                self.dispatcher.lose_node(name, "no sign of life")
        self.join("hybrid")
        for _ in range(100):
            for node in list(self.nodes.values()):
                if not node.is_dead:
                    node.run(self.dispatcher)
            self.dispatcher.tick()
            self.all_is_consistent()
        for caller in self.callers:
            assert caller.is_done or self.error_of(caller) is not None, "somebody waits for ever"
            assert caller.accepted is not None and caller.accepted.done()
        for node in self.present:
            assert node.is_empty, f"{node.name} holds {node.held} {node.half_received}"
        assert not self.router.open
        assert self.dispatcher.num_live == self.dispatcher.num_waiting == 0
        records = self.dispatcher.finished_records()
        refused = sum(isinstance(self.error_of(c), QueueOverflowError) for c in self.callers)
        sequences = sum(len(caller.submission.specs) for caller in self.callers)
        assert refused or len(records) == sequences

    # Choosing

    @property
    def present(self) -> list[ScriptedNode]:
        """Nodes that the dispatcher counts on."""
        return [node for name, node in self.nodes.items() if name not in self.lost]

    def node(self, index: int) -> ScriptedNode:
        nodes = list(self.nodes.values())
        return nodes[index % len(nodes)]

    def some(self, choices):  # type: ignore[no-untyped-def]
        assert self.router.lot is not None
        return self.router.lot.choice(choices)


TestDispatcherMachine = DispatcherMachine.TestCase
TestDispatcherMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
