"""Messages that never come, bytes that are wrong, links that are slow, and what a hand-off over
TCP meets beside: streams end right, and nothing is left over."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from flowkv_jax import Engine
from flowkv_jax.errors import DeadlineExceeded
from tests.cluster_fakes import wait_for
from tests.fault_cluster import NUM_BLOCKS, Asked, FaultCluster, Streams, fault_cluster
from tests.fault_rules import Action, Rule

P, D, E = "prefill-0", "decode-0", "decode-1"
WAIT_S, TIMEOUT_S = 1.0, 2.0


@pytest.fixture(scope="module")
def cluster(
    tiny_model: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[FaultCluster]:
    model = tiny_model("gqa_tied")
    folder = tmp_path_factory.mktemp("messages")
    settings = (
        *("--handoff-backend=tcp", "--verify-handoffs"),
        *(f"--handoff-wait-s={WAIT_S}", f"--handoff-timeout-s={TIMEOUT_S}"),
    )
    with (
        Engine(str(model), max_num_seqs=8, max_model_len=1024, num_blocks=NUM_BLOCKS) as engine,
        fault_cluster(model, folder, engine, *settings, nodes=(1, 2)) as made,
    ):
        yield made


def lost(kind: str, count: int = 2) -> Rule:
    return Rule(kind, Action.DROP, count=count)


def either(rule: Rule) -> dict[str, list[Rule]]:
    """For whichever decode node comes to it."""
    return {D: [rule], E: [rule]}


@pytest.mark.parametrize(
    "faults",
    [
        pytest.param({P: [lost("send:reserve")]}, id="reserve"),
        pytest.param(either(lost("send:granted")), id="granted"),
        pytest.param({P: [lost("lose:offer", 1)]}, id="offer"),
        pytest.param(either(lost("lose:done")), id="done"),
    ],
)
def test_lost_messages(cluster: FaultCluster, faults: dict[str, list[Rule]]) -> None:
    cluster.run_with(faults)


def test_a_wrong_byte(cluster: FaultCluster) -> None:
    cluster.run_with(either(Rule("received", Action.CORRUPT, count=2)))


@pytest.mark.parametrize("seconds", [0.4, TIMEOUT_S + 0.5], ids=["slow", "too-slow"])
def test_a_slow_link(cluster: FaultCluster, seconds: float) -> None:
    cluster.run_with(either(Rule("receiving", Action.DELAY, count=2, seconds=seconds)))


def test_nothing_had_to_move_and_nobody_says_so(cluster: FaultCluster) -> None:
    asked = Asked.new(lengths=(32, 64))
    cluster.wait_until_clean()
    cluster.order(either(lost("send:taken")))

    def ask_again() -> set[str]:
        cluster.require_answers(Streams(cluster.client, asked), asked)
        cluster.wait_until_clean()
        return cluster.fired()

    assert wait_for(ask_again, "a decode node that has all blocks already") == {"send:taken"}


def test_a_reservation_is_given_up_and_nobody_says_so(cluster: FaultCluster) -> None:
    cluster.wait_until_clean()
    late = [Rule("heard:granted", Action.DELAY, count=4, seconds=0.5)]
    cluster.order({P: late} | either(lost("send:released", 4)))
    streams = Streams(cluster.client, Asked.new(num_tokens=200), timeout=0.4)
    streams.join()
    assert all(isinstance(error, DeadlineExceeded) for error in streams.errors), streams.errors
    cluster.wait_until_clean()
    assert "send:released" in cluster.fired()


# Nodes that are killed while others could take their part


@pytest.mark.parametrize(
    "faults",
    [
        pytest.param(either(Rule("sent:granted", shared=True)), id="has-granted"),
        pytest.param(either(Rule("received", shared=True)), id="has-received"),
        pytest.param({D: [Rule("heard:reserve")], E: [Rule("heard:reserve")]}, id="both"),
        pytest.param({D: [Rule("say:token", nth=5)], E: [Rule("arrived")]}, id="both-later"),
        pytest.param({P: [Rule("submitted")]}, id="source"),
    ],
)
def test_the_other_decode_node_takes_over(
    cluster: FaultCluster, faults: dict[str, list[Rule]]
) -> None:
    cluster.run_with(faults, Asked.new(lengths=(3, 40, 150, 20, 60)))


def test_a_worker_dies_again_while_it_starts(cluster: FaultCluster) -> None:
    cluster.wait_until_clean()
    before = cluster.epochs()[D]
    asked = Asked.new(num_tokens=400)
    cluster.order({D: [Rule("say:token", nth=3)], E: []})
    streams = Streams(cluster.client, asked)
    for point in ("joining", "joined"):
        wait_for(lambda: cluster.faults.fired(D), "it was killed")
        cluster.faults.order(D, [Rule(point)])
    wait_for(lambda: cluster.faults.fired(D), "and again")
    cluster.require_answers(streams, asked)
    # The one that died before it had joined was no member.
    wait_for(lambda: cluster.epochs().get(D) == before + 2)
    cluster.wait_until_clean()
