"""A worker's node from one membership to the next: nothing is held, nothing is told twice."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from flowkv_jax.cluster.node_port import StopOrder
from flowkv_jax.config import EngineConfig, load_config
from flowkv_jax.controller.role import Role
from flowkv_jax.engine.build import build_engine
from flowkv_jax.handoff.agent import HandoffAgent
from flowkv_jax.handoff.exchange import Exchange
from flowkv_jax.sampling_params import SamplingParams
from flowkv_jax.sequence import SequenceUpdate
from flowkv_jax.worker.engine_node import EngineNode, MemberNode
from flowkv_jax.worker.peer_links import PeerLinks
from tests.cluster_fakes import spec, wait_for

NUM_BLOCKS = 64


class Worker:
    """An `EngineNode` on a tiny model, and what it says."""

    def __init__(self, model: Path) -> None:
        overrides = {"model": str(model), "num_blocks": NUM_BLOCKS, "debug": True}
        config = load_config(EngineConfig, overrides=overrides | {"max_num_seqs": 4})
        built = build_engine(config, num_nodes=1, records_prefix_events=True)
        parts = built.nodes[0]
        self.said: list[tuple[str, SequenceUpdate]] = []
        self.node = MemberNode(
            "nobody",
            parts.runner,
            parts.scheduler,
            parts.kv,
            vocab_size=built.model_info.vocab_size,
            eos_token_ids=(),
            deliver=self.deliver,
            debug=True,
        )
        self.exchange = Exchange()
        links = PeerLinks(self.exchange, on_unreachable=lambda name: None)
        handoffs = HandoffAgent(self.node, links, built.layout, config.handoff)
        self.node.attach(handoffs)
        self.local = EngineNode(self.node, handoffs, links, self.exchange, parts.pool.access)

    def deliver(self, node: str, updates: Sequence[SequenceUpdate]) -> Sequence[StopOrder]:
        self.said += [(node, update) for update in updates]
        return ()

    def start(self, sequence_id: str, num_tokens: int) -> None:
        params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
        one = spec(sequence_id, 40, 40 + num_tokens, sampling_params=params)
        self.local.start([one]).result()


@pytest.fixture(scope="module")
def worker(tiny_model: Callable[[str], Path]) -> Iterator[Worker]:
    made = Worker(tiny_model("gqa_tied"))
    yield made
    made.local.close()


def test_memberships_follow_each_other(worker: Worker) -> None:
    local = worker.local
    local.enter("a", 1, Role.HYBRID)
    assert worker.exchange.transfers.holds("a")
    worker.start("long", 900)
    wait_for(lambda: worker.said)
    assert not local.is_idle
    local.leave()
    num_said = len(worker.said)
    assert {name for name, _ in worker.said} == {"a"}
    assert local.is_idle and worker.node.load.num_free_blocks == NUM_BLOCKS

    local.enter("b", 4, Role.DECODE)
    assert not worker.exchange.transfers.holds("a") and worker.exchange.transfers.holds("b")
    first, second = local.report(), local.report()
    assert first.prefixes_cleared and not first.added_blocks
    assert len(second.added_blocks) >= 2, "the prompt's blocks are cached still"
    worker.start("short", 5)
    wait_for(lambda: worker.said[-1][1].finish_reason)
    wait_for(lambda: local.is_idle)
    later = worker.said[num_said:]
    assert {(name, update.sequence_id) for name, update in later} == {("b", "short")}
    assert sum(len(update.token_ids) for _, update in later) == 5
    assert later[0][1].num_cached_tokens == 32
    local.leave()


def test_a_busy_node_reports_what_it_said_last(worker: Worker) -> None:
    local = worker.local
    local.enter("b", 5, Role.HYBRID)
    known = local.report()
    may_go_on = hold_thread(worker)
    assert local.report().load == known.load
    assert not local.is_idle
    may_go_on()
    wait_for(lambda: local.is_idle)
    local.leave()


def hold_thread(worker: Worker) -> Callable[[], None]:
    """Hold the node's thread until the answer is called."""
    held, released = threading.Event(), threading.Event()

    def hold() -> None:
        held.set()
        assert released.wait(60)

    worker.node.post(hold)
    assert held.wait(60)
    return released.set


def test_a_dead_node_is_not_alive_and_leaves(worker: Worker) -> None:
    worker.local.enter("b", 6, Role.HYBRID)
    worker.node.shutdown()
    assert not worker.local.is_alive
    assert worker.local.is_idle
    assert worker.local.report().load.num_blocks == NUM_BLOCKS
    worker.local.leave()
