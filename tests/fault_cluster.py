"""A server over workers that meet faults, its streams, and the tokens that have to come of them."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flowkv_jax import Client, Engine, SamplingParams
from flowkv_jax.errors import FlowKVError
from flowkv_jax.rpc.client_stream import OutputStream
from tests.cluster_fakes import wait_for
from tests.cluster_serve import Front, Process, environment, flowkv
from tests.fault_rules import FOLDER_VARIABLE, Action, FaultFolder, Rule

NUM_BLOCKS = 128
WORKER_SIZES = (
    *("--max-num-seqs=8", "--max-model-len=1024", f"--num-blocks={NUM_BLOCKS}"),
    *("--debug", "--no-warmup"),
)
SIZES = (
    *(*WORKER_SIZES, "--lease-s=1.5", "--worker-cpus=off"),
    "--no-enable-role-switch",  # whoever is asked for, does the work
)
GREEDY = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
SEEDED = SamplingParams(
    temperature=0.9,
    seed=11,
    max_tokens=40,
    ignore_eos=True,
    repetition_penalty=1.1,
    presence_penalty=0.4,
    frequency_penalty=0.2,
)
LENGTHS = (3, 40, 150)
_numbers = itertools.count()


@dataclass
class Asked:
    """Some requests, no prompt of which was ever asked before: nothing of them is cached."""

    prompts: list[list[int]]
    params: list[SamplingParams]

    @classmethod
    def new(cls, num_tokens: int = 40, lengths: Sequence[int] = LENGTHS) -> Asked:
        """A greedy request of each length, and a seeded one with penalties."""
        prompts = []
        for length in (*lengths, 33):
            first = 3 + next(_numbers) * 7 % 400
            prompts.append([3 + (first + i * i) % 500 for i in range(length)])
        params = [GREEDY.replace(max_tokens=num_tokens)] * len(lengths)
        return cls(prompts, [*params, SEEDED.replace(max_tokens=num_tokens)])


class Streams:
    """Requests as streams, each read by a thread of its own."""

    def __init__(self, client: Client, asked: Asked, timeout: float | None = None) -> None:
        self.tokens: list[list[int]] = [[] for _ in asked.prompts]
        self.errors: list[FlowKVError | None] = [None] * len(asked.prompts)
        self._threads = []
        for index, (prompt, params) in enumerate(zip(asked.prompts, asked.params, strict=True)):
            stream = client.generate(
                {"prompt_token_ids": prompt}, params, stream=True, timeout=timeout
            )
            thread = threading.Thread(target=self._read, args=(index, stream))
            thread.start()
            self._threads.append(thread)

    def _read(self, index: int, stream: OutputStream) -> None:
        try:
            for output in stream:
                self.tokens[index] += output.outputs[0].delta_token_ids
        except FlowKVError as error:
            self.errors[index] = error

    @property
    def have_begun(self) -> bool:
        return all(tokens or error for tokens, error in zip(self.tokens, self.errors, strict=True))

    def join(self) -> None:
        for thread in self._threads:
            thread.join()


@dataclass
class FaultCluster:
    front: Front
    client: Client
    faults: FaultFolder
    engine: Engine
    names: tuple[str, ...] = ("prefill-0", "decode-0")
    _last: dict[str, Any] = field(default_factory=dict)

    def epochs(self) -> dict[str, int]:
        return {node.name: node.epoch for node in self.client.cluster.snapshot().nodes}

    def expected(self, asked: Asked) -> list[list[int]]:
        """What one node by itself answers."""
        prompts = [{"prompt_token_ids": prompt} for prompt in asked.prompts]
        return [o.outputs[0].token_ids for o in self.engine.generate(prompts, asked.params)]

    def require_answers(self, streams: Streams, asked: Asked) -> None:
        """All streams end with what one node answers."""
        streams.join()
        assert streams.errors == [None] * len(asked.prompts), self.told
        assert streams.tokens == self.expected(asked), self.told

    def wait_until_clean(self) -> None:
        """All wanted nodes are there, know each other and hold nothing, and nothing is under way at
        the front."""
        try:
            wait_for(lambda: set(self.epochs()) == set(self.names), "every node has come (back)")
            for name in self.names:
                wait_for(lambda name=name: self._is_clean(name), f"{name} holds nothing")
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self._last}\n{self.told}") from None
        nothing = {"num_live": 0, "num_waiting": 0, "num_pending": 0}
        wait_for(lambda: self.faults.ask("front") == nothing, "nothing is under way at the front")
        nodes = self.client.cluster.snapshot().nodes
        assert all(node.booked_work == node.booked_blocks == 0 for node in nodes), nodes

    def _is_clean(self, name: str) -> bool:
        self._last = state = self.faults.ask(name)
        assert "error" not in state, state
        held = ("num_pinned_blocks", "num_handoffs", "num_sequences", "has_work")
        knows = set(self.names) - {name} <= set(state["peers"])
        is_free = state["num_free_blocks"] == state["num_blocks"]
        return knows and is_free and not any(state[what] for what in held)

    def order(self, faults: Mapping[str, Sequence[Rule]]) -> None:
        """Have these processes meet faults, and the others none."""
        self.faults.share_anew()
        for name in self.names:
            self.faults.order(name, faults.get(name, ()))

    def fired(self) -> set[str]:
        """Points of faults that have come true since they were ordered."""
        return {point for name in self.names for point in self.faults.fired(name)}

    def run_with(self, faults: Mapping[str, Sequence[Rule]], asked: Asked | None = None) -> None:
        """Streams while processes meet faults: the faults come, every answer is right, those
        killed come back, and nothing is left over."""
        asked = asked or Asked.new()
        self.wait_until_clean()
        before = self.epochs()
        self.order(faults)
        self.require_answers(Streams(self.client, asked), asked)
        points = {rule.point for rules in faults.values() for rule in rules}
        assert self.fired() == points, self.told
        for name, rules in faults.items():
            kills = {rule.point for rule in rules if rule.action is Action.KILL}
            if kills & set(self.faults.fired(name)):
                wait_for(lambda name=name: self.epochs().get(name, 0) > before[name], name)
        self.wait_until_clean()

    @property
    def told(self) -> str:
        """What processes said, and what became of the last requests, for people."""
        lines = list(self.front.lines)
        with contextlib.suppress(FlowKVError):
            lines += [repr(decision) for decision in self.client.cluster.decisions(12)]
            lines += [repr(record) for record in self.client.cluster.records(4)]
        return "\n".join(lines)


@contextlib.contextmanager
def fault_cluster(
    model: Path,
    folder: Path,
    engine: Engine,
    *arguments: str,
    nodes: tuple[int, int] = (1, 1),
) -> Iterator[FaultCluster]:
    """A server whose workers are started, and started again, by itself.

    Args:
        folder: for caches and faults.
        engine: answers alone, for comparison.
    """
    with (
        fault_front(model, folder, *arguments, nodes=nodes) as front,
        Client(front.address) as client,
    ):
        yield FaultCluster(front, client, FaultFolder(folder / "faults"), engine, names_of(nodes))
        front.process.terminate()
        front.wait()


@contextlib.contextmanager
def fault_front(
    model: Path, folder: Path, *arguments: str, nodes: tuple[int, int] = (1, 1)
) -> Iterator[Front]:
    """A server process that answers questions; killed at the end if it has not ended."""
    roles = (f"--prefill-nodes={nodes[0]}", f"--decode-nodes={nodes[1]}")
    command = ("serve", "--port=0", "--grpc-port=0", f"--model={model}", *roles, *SIZES, *arguments)
    with flowkv(*command, env=fault_environment(folder), module="tests.fault_front") as process:
        yield Front(process.process, process.lines)


@contextlib.contextmanager
def fault_worker(
    model: Path, folder: Path, controller: str, name: str, *arguments: str, **more: str
) -> Iterator[Process]:
    """A worker that nobody starts again; killed at the end if it has not ended."""
    role = name.partition("-")[0]
    command = (
        *("worker", f"--controller={controller}", f"--role={role}", f"--name={name}"),
        *(f"--model={model}", *WORKER_SIZES, *arguments),
    )
    env = fault_environment(folder, **more)
    with flowkv(*command, env=env, module="tests.fault_worker") as process:
        yield process


def names_of(nodes: tuple[int, int]) -> tuple[str, ...]:
    """Of workers, by how many of each role there are."""
    counts = zip(("prefill", "decode"), nodes, strict=True)
    return tuple(f"{role}-{index}" for role, count in counts for index in range(count))


def fault_environment(folder: Path, **more: str) -> dict[str, str]:
    """Of processes that share caches, and meet faults, in a folder."""
    (folder / "faults").mkdir(exist_ok=True)
    return environment(folder / "cache", **{FOLDER_VARIABLE: str(folder / "faults")}, **more)
