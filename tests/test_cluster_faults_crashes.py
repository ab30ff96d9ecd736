"""kill -9 of workers at every state of a hand-off: streams end right, and nothing is left over."""

from __future__ import annotations

import contextlib
import json
import random
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from flowkv_jax import Engine
from tests.cluster_fakes import wait_for
from tests.cluster_serve import environment, flowkv
from tests.fault_cluster import NUM_BLOCKS, Asked, FaultCluster, Streams, fault_cluster
from tests.fault_rules import Action, Rule

P, D = "prefill-0", "decode-0"
UNTOLD = Rule("say:token", Action.DROP, count=0)
SLOW = Rule("receiving", Action.DELAY, seconds=0.5)


@pytest.fixture(scope="module")
def cluster(
    tiny_model: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[FaultCluster]:
    model = tiny_model("gqa_tied")
    with (
        Engine(str(model), max_num_seqs=8, max_model_len=1024, num_blocks=NUM_BLOCKS) as engine,
        fault_cluster(model, tmp_path_factory.mktemp("crashes"), engine) as made,
    ):
        yield made


@pytest.mark.parametrize(
    "faults",
    [
        pytest.param({P: [Rule("sent:reserve")]}, id="p-has-asked"),
        pytest.param({P: [Rule("heard:granted")]}, id="p-was-granted"),
        pytest.param({P: [Rule("sent:filled")]}, id="p-has-filled"),
        pytest.param({P: [Rule("submitted")], D: [SLOW]}, id="p-is-moving"),
        pytest.param({P: [Rule("moved")]}, id="p-has-moved"),
        pytest.param({P: [UNTOLD, Rule("moved")]}, id="p-has-moved-and-not-told"),
        pytest.param({D: [Rule("heard:reserve")]}, id="d-is-asked"),
        pytest.param({D: [Rule("sent:granted")]}, id="d-has-granted"),
        pytest.param({D: [Rule("receiving")]}, id="d-is-receiving"),
        pytest.param({D: [Rule("received")]}, id="d-has-received"),
        pytest.param({D: [Rule("arrived")]}, id="d-has-it-and-does-not-run-it"),
        pytest.param({D: [Rule("say:arrived")]}, id="d-runs-it-and-has-not-told"),
        pytest.param({D: [Rule("say:token", nth=20)]}, id="d-decodes"),
        pytest.param({P: [Rule("submitted")], D: [Rule("receiving")]}, id="both"),
    ],
)
def test_streams_go_on_when_workers_are_killed(
    cluster: FaultCluster, faults: dict[str, list[Rule]]
) -> None:
    cluster.run_with(faults)


def test_requests_wait_for_workers_that_are_started_again(cluster: FaultCluster) -> None:
    cluster.wait_until_clean()
    before = cluster.epochs()
    for name in cluster.names:
        cluster.front.worker(name).kill()
    asked = Asked.new()
    cluster.require_answers(Streams(cluster.client, asked), asked)
    wait_for(lambda: cluster.epochs() == {name: epoch + 1 for name, epoch in before.items()})
    cluster.wait_until_clean()


def test_load_while_workers_are_killed(cluster: FaultCluster, tmp_path: Path) -> None:
    cluster.wait_until_clean()
    cluster.order({})
    report = tmp_path / "report.json"
    arguments = (
        *("--target", cluster.front.address, "--request-rate=8", "--num-prompts=40"),
        *("--input-len=48", "--output-len=24", "--num-warmups=0", "--check-answers=20"),
        *("--output", str(report)),
    )
    chance = random.Random(1)
    num_killed = 0
    with flowkv("bench", "serve", *arguments, env=environment(tmp_path)) as load:
        wait_for(lambda: cluster.faults.ask("front")["num_live"], "the first request")
        while load.process.poll() is None:
            victims = sorted(set(cluster.epochs()))
            if victims and num_killed < 3:
                cluster.front.worker(chance.choice(victims)).kill()
                num_killed += 1
            with contextlib.suppress(subprocess.TimeoutExpired):
                load.process.wait(1.5)
        assert load.wait() == 0, load.lines
    (cell,) = json.loads(report.read_text())["cells"]
    assert (cell["completed"], cell["failed"]) == (40, 0), cell
    assert num_killed
    cluster.wait_until_clean()
