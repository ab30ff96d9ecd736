"""`flowkv serve` over worker processes: answers, and what becomes of them when workers die."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from flowkv_jax import Client, Engine, RequestOutput, SamplingParams
from flowkv_jax.rpc.client_stream import OutputStream
from tests.cluster_fakes import wait_for
from tests.cluster_serve import Front, environment, serving

SIZES = ("--max-num-seqs=8", "--max-model-len=1024", "--num-blocks=256", "--debug", "--no-warmup")
PROMPTS = [list(range(5 + i, 5 + i + length)) for i, length in enumerate((1, 15, 16, 17, 100, 300))]
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
LONG = SamplingParams(temperature=0.0, max_tokens=700, ignore_eos=True)
SEEDED = SamplingParams(temperature=1.0, seed=7, max_tokens=24, ignore_eos=True)


@dataclass
class Cluster:
    front: Front
    client: Client
    engine: Engine

    def epochs(self) -> dict[str, int]:
        return {node.name: node.epoch for node in self.client.cluster.snapshot().nodes}

    def is_whole(self) -> bool:
        """Both nodes are there and hold nothing."""
        loads = self.client.get_loads()
        return len(self.epochs()) == 2 and loads.num_blocks == loads.num_free_blocks == 512

    def expected(self, params: SamplingParams) -> list[list[int]]:
        outputs = self.engine.generate([{"prompt_token_ids": p} for p in PROMPTS], params)
        return [output.outputs[0].token_ids for output in outputs]


@pytest.fixture(scope="module")
def cluster(
    tiny_model: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Cluster]:
    model = str(tiny_model("gqa_tied"))
    env = environment(tmp_path_factory.mktemp("cache"))
    nodes = ("--prefill-nodes=1", "--decode-nodes=1", "--lease-s=1.5")
    with (
        serving(f"--model={model}", *nodes, *SIZES, env=env) as (front, client),
        Engine(model, max_num_seqs=8, max_model_len=1024, num_blocks=256) as engine,
    ):
        yield Cluster(front, client, engine)


@pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_answers_are_those_of_one_node(cluster: Cluster, params: SamplingParams) -> None:
    wait_for(cluster.is_whole)
    outputs = cluster.client.generate([{"prompt_token_ids": p} for p in PROMPTS], params)
    assert [output.outputs[0].token_ids for output in outputs] == cluster.expected(params)
    records = cluster.client.cluster.records(len(PROMPTS))
    assert all(record.handoff is not None for record in records), cluster.front.lines
    assert {(record.prefill_node, record.decode_node) for record in records} == {
        ("prefill-0", "decode-0")
    }
    wait_for(cluster.is_whole, "every block is free")


class Streams:
    """All prompts as streams, each read by a thread of its own."""

    def __init__(self, client: Client) -> None:
        self.outputs: list[list[RequestOutput]] = [[] for _ in PROMPTS]
        streams = [client.generate({"prompt_token_ids": p}, LONG, stream=True) for p in PROMPTS]
        self._threads = [
            threading.Thread(target=self._read, args=(index, stream))
            for index, stream in enumerate(streams)
        ]
        for thread in self._threads:
            thread.start()

    def _read(self, index: int, stream: OutputStream) -> None:
        for output in stream:
            self.outputs[index].append(output)

    def are_under_way(self) -> bool:
        """All have begun; fails if one has ended."""
        assert not any(outputs and outputs[-1].finished for outputs in self.outputs)
        return all(self.outputs)

    def tokens(self) -> list[list[int]]:
        """Of each, put together from its pieces."""
        for thread in self._threads:
            thread.join()
        return [
            [token for output in outputs for token in output.outputs[0].delta_token_ids]
            for outputs in self.outputs
        ]


@pytest.mark.parametrize(
    ("victims", "number"),
    [
        (("prefill-0",), signal.SIGKILL),
        (("decode-0",), signal.SIGKILL),
        (("prefill-0", "decode-0"), signal.SIGKILL),
        (("decode-0",), signal.SIGSTOP),
    ],
    ids=["prefill", "decode", "both", "stopped"],
)
def test_streams_go_on_when_workers_are_lost(
    cluster: Cluster, victims: tuple[str, ...], number: signal.Signals
) -> None:
    wait_for(cluster.is_whole)
    before = cluster.epochs()
    streams = Streams(cluster.client)
    wait_for(streams.are_under_way)
    for name in victims:
        cluster.front.worker(name).send_signal(number)
    assert streams.tokens() == cluster.expected(LONG)
    after = {name: epoch + (name in victims) for name, epoch in before.items()}
    wait_for(lambda: cluster.epochs() == after, "the launcher restores the workers")
    wait_for(cluster.is_whole, "every block is free")
