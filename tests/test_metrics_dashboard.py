"""The Grafana boards ask for what there is, and the committed files are what the module makes."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from flowkv_jax import Engine, SamplingParams
from flowkv_jax.metrics.dashboard import BOARDS, board_text, main
from flowkv_jax.metrics.grafana import Dashboard
from tests.metered_cluster import families_of

FOLDER = Path(__file__).parent.parent / "docs" / "grafana"
_BY = re.compile(r"by \(([^)]*)\)")
_SELECTOR = re.compile(r"((?:vllm:|flowkv_|process_)[a-z0-9_:]+)(?:\{([^}]*)\})?")


@pytest.fixture(scope="module", params=BOARDS, ids=lambda board: board.uid)
def board(request: pytest.FixtureRequest) -> Dashboard:
    chosen: Dashboard = request.param
    return chosen


@pytest.fixture(scope="module")
def exported(tiny_model: Callable[..., object], xla_cache: object) -> dict[str, set[str]]:
    """Samples of one prefill and one decode node after two requests: name -> labels."""
    with Engine(
        str(tiny_model("gqa_tied")),
        prefill_nodes=1,
        decode_nodes=1,
        max_num_seqs=4,
        max_num_batched_tokens=128,
        num_blocks=64,
        max_model_len=512,
        compilation_cache_dir=str(xla_cache),
    ) as engine:
        params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
        engine.generate([[1, 2, 3], list(range(4, 40))], params)
        labels: dict[str, set[str]] = {}
        for family in families_of(engine.metrics).values():
            for sample in family.samples:
                labels.setdefault(sample.name, set()).update(sample.labels)
        return labels


def test_files_are_as_made() -> None:
    assert {path.name for path in FOLDER.glob("*.json")} == {f"{b.uid}.json" for b in BOARDS}
    for board in BOARDS:
        text = (FOLDER / f"{board.uid}.json").read_text(encoding="utf-8")
        assert text == board_text(board), "run: make dashboards"


def test_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["dashboard", str(tmp_path / "new")])
    main()
    for board in BOARDS:
        assert (tmp_path / "new" / f"{board.uid}.json").read_text() == board_text(board)
    monkeypatch.setattr("sys.argv", ["dashboard"])
    with pytest.raises(SystemExit, match="usage"):
        main()


def test_every_metric_is_exported(board: Dashboard, exported: dict[str, set[str]]) -> None:
    assert len(board.metrics) > 30
    assert board.metrics <= exported.keys()


def test_every_label_is_exported(board: Dashboard, exported: dict[str, set[str]]) -> None:
    """Those that are selected by, and those that a line is named after."""
    for row in board.rows:
        for panel in row.panels:
            for query in panel.queries:
                shown = set(re.findall(r"\{\{(\w+)\}\}", query.legend))
                summed = set(re.findall(r"\w+", " ".join(_BY.findall(query.expression))))
                assert not summed or shown <= summed, query
                for name, selectors in _SELECTOR.findall(query.expression):
                    selected = set(re.findall(r"(\w+)=", selectors))
                    known = exported[name] | {"instance"}  # Prometheus adds this one
                    assert selected | shown | (summed - {"le"}) <= known, query


def test_panels_have_places_of_their_own(board: Dashboard) -> None:
    panels: list[dict[str, Any]] = json.loads(board_text(board))["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        cells = set(_cells(panel["gridPos"]))
        assert not cells & taken, panel["title"]
        assert all(x < 24 for x, _ in cells)
        taken |= cells


def _cells(place: dict[str, int]) -> Iterator[tuple[int, int]]:
    for x in range(place["x"], place["x"] + place["w"]):
        for y in range(place["y"], place["y"] + place["h"]):
            yield x, y


def test_thresholds_that_operators_know() -> None:
    (flowkv,) = BOARDS
    panels = {panel.title: panel for row in flowkv.rows for panel in row.panels}
    assert panels["Queued requests"].thresholds[1:] == ((10, "yellow"), (50, "red"))
    assert panels["Blocks in use"].thresholds[1:] == ((0.9, "orange"), (0.98, "red"))
    assert [row.title for row in flowkv.rows] == ["Overview", "KV cache", "Disaggregation"]
