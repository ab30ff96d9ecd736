"""Nodes, reports, and a small simulated cluster for tests of the controller."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

from flowkv_jax.controller.actions import Action, AddNode, RemoveNode, SwitchRole
from flowkv_jax.controller.config import ControllerConfig
from flowkv_jax.controller.controller import Controller
from flowkv_jax.controller.role import Role
from flowkv_jax.controller.routing import RouteQuery
from flowkv_jax.controller.snapshot import NodeInfo, NodeReport
from flowkv_jax.load import NodeLoad
from flowkv_jax.sequence import HandoffReport

BLOCK_SIZE = 16


def node_info(name: str, role: Role = Role.HYBRID, **changes: Any) -> NodeInfo:
    settings: dict[str, Any] = {
        "num_blocks": 1000,
        "block_size": BLOCK_SIZE,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 256,
        "host": "one",
        "block_bytes": 1 << 20,
    }
    return NodeInfo(name=name, role=role, **(settings | changes))


def node_load(**changes: Any) -> NodeLoad:
    settings: dict[str, Any] = {
        "num_requests_running": 0,
        "num_requests_waiting": 0,
        "num_requests_swapped": 0,
        "num_waiting_tokens": 0,
        "kv_cache_usage": 0.0,
        "num_blocks": 1000,
        "num_free_blocks": 1000,
        "fragmentation": 0.0,
        "prefix_cache_queries": 0,
        "prefix_cache_hits": 0,
        "num_preemptions": 0,
        "token_budget_used": 0.0,
    }
    return NodeLoad(**(settings | changes))


def node_report(load: NodeLoad | None = None, **changes: Any) -> NodeReport:
    return NodeReport(load=load or node_load(), **changes)


def query(sequence_id: str = "s", num_tokens: int = 160, **changes: Any) -> RouteQuery:
    return RouteQuery(sequence_id=sequence_id, num_tokens=num_tokens, **changes)


def handoff(src: str, dst: str, data_bytes: int, total_s: float, blocks: int = 10) -> HandoffReport:
    return HandoffReport(
        src, dst, "Direct", "local", 1, 1, data_bytes, blocks, 0, 0.0, total_s, total_s
    )


@dataclass(eq=False)
class SimulatedSequence:
    booking: int
    prefill_node: str
    decode_node: str
    prompt_tokens: float
    output_tokens: float


@dataclass(eq=False)
class SimulatedNode:
    """Computes `prefill_rate` prompt tokens a second, and `decode_rate` tokens a sequence."""

    info: NodeInfo
    epoch: int
    prompts: deque[SimulatedSequence] = field(default_factory=deque)
    decodes: list[SimulatedSequence] = field(default_factory=list)


class SimulatedCluster:
    """A controller whose nodes really take time, on a clock moved by hand.

    Hand-offs are instant while the decode node has a slot; without one the sequence waits at its
    prefill node, which reports it as being sent.
    """

    step_s = 0.1
    prefill_rate = 1000.0
    decode_rate = 20.0
    launch_s = 5.0

    def __init__(self, roles: dict[str, Role], config: ControllerConfig) -> None:
        self.controller = Controller(config)
        self.now_s = 0.0
        self.nodes: dict[str, SimulatedNode] = {}
        self.sending: list[SimulatedSequence] = []
        self.launching: list[tuple[float, Role]] = []
        self.actions: list[tuple[float, Action]] = []
        self.first_token_s: list[float] = []
        self._arrived: dict[int, float] = {}
        self._owed = 0.0
        self._launched = 0
        for name, role in roles.items():
            self.join(name, role)

    def join(self, name: str, role: Role) -> None:
        info = node_info(name, role)
        self.nodes[name] = SimulatedNode(info, self.controller.join(info, self.now_s))

    def run(
        self, seconds: float, *, requests_per_s: float, prompt_tokens: int, output_tokens: int
    ) -> None:
        """Let time pass under a steady load."""
        for _ in range(round(seconds / self.step_s)):
            self.now_s += self.step_s
            self._owed += requests_per_s * self.step_s
            while self._owed >= 1:
                self._owed -= 1
                self._arrive(prompt_tokens, output_tokens)
            self._work()
            self._report()
            self._act()
        self.controller.check()

    def role_of(self, name: str) -> Role:
        views = self.controller.snapshot(self.now_s).nodes
        return next(view.role for view in views if view.name == name)

    def _arrive(self, prompt_tokens: int, output_tokens: int) -> None:
        placement = self.controller.place(
            query(f"at {self.now_s}", prompt_tokens, max_new_tokens=output_tokens), self.now_s
        )
        sequence = SimulatedSequence(
            placement.booking,
            placement.prefill_node,
            placement.decode_node,
            prompt_tokens,
            output_tokens,
        )
        self._arrived[sequence.booking] = self.now_s
        self.nodes[placement.prefill_node].prompts.append(sequence)

    def _work(self) -> None:
        for node in self.nodes.values():
            budget = self.prefill_rate * self.step_s
            while node.prompts and budget > 0:
                head = node.prompts[0]
                done = min(budget, head.prompt_tokens)
                head.prompt_tokens -= done
                budget -= done
                if head.prompt_tokens <= 0:
                    node.prompts.popleft()
                    self.controller.prefilled(head.booking, self.now_s)
                    self.first_token_s.append(self.now_s - self._arrived[head.booking])
                    self.sending.append(head)
            for sequence in list(node.decodes):
                sequence.output_tokens -= self.decode_rate * self.step_s
                if sequence.output_tokens <= 0:
                    node.decodes.remove(sequence)
                    self.controller.ended(sequence.booking, self.now_s)
        for sequence in list(self.sending):
            target = self.nodes[sequence.decode_node]
            if len(target.decodes) < target.info.max_num_seqs:
                self.sending.remove(sequence)
                target.decodes.append(sequence)
                if sequence.prefill_node != sequence.decode_node:
                    report = handoff(sequence.prefill_node, sequence.decode_node, 1 << 20, 0.01)
                    self.controller.moved(sequence.booking, report, self.now_s)

    def _report(self) -> None:
        for name, node in self.nodes.items():
            out = [s for s in self.sending if s.prefill_node == name]
            load = node_load(
                num_requests_running=len(node.decodes) + bool(node.prompts),
                num_requests_waiting=max(len(node.prompts) - 1, 0),
                num_waiting_tokens=int(sum(s.prompt_tokens for s in list(node.prompts)[1:])),
                num_requests_sending=len(out),
                token_budget_used=1.0 if node.prompts else len(node.decodes) / 256,
                kv_cache_usage=min((len(node.decodes) + len(out)) / 16, 1.0),
            )
            rate = self.prefill_rate if node.prompts else None
            report = node_report(load, prefill_tokens_per_s=rate)
            self.controller.report(name, node.epoch, report, self.now_s)

    def _act(self) -> None:
        for action in self.controller.tick(self.now_s):
            self.actions.append((self.now_s, action))
            if isinstance(action, AddNode):
                self.launching.append((self.now_s + self.launch_s, action.role))
            elif isinstance(action, RemoveNode):
                node = self.nodes.pop(action.node)
                assert not node.prompts and not node.decodes
                self.controller.leave(action.node, self.now_s, "removed")
        for ready_s, role in list(self.launching):
            if ready_s <= self.now_s:
                self.launching.remove((ready_s, role))
                self._launched += 1
                self.join(f"new{self._launched}", role)

    def switches(self) -> list[SwitchRole]:
        return [action for _, action in self.actions if isinstance(action, SwitchRole)]
