"""kill -9 of workers at every state of a hand-off: streams end right, and nothing is left over."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from flowkv_jax import Engine
from tests.fault_cluster import NUM_BLOCKS, FaultCluster, fault_cluster
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
