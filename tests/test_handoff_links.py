"""Paths of hand-offs chosen over a file of links."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from flowkv_jax import Engine, SamplingParams
from flowkv_jax.errors import ConfigError
from flowkv_jax.handoff.links import LinkSelector
from transfer.types import PathType, TransferRequest

LINKS = """
nodes:
  - {names: [prefill-0, decode-0], type: host}
  - {name: storage, type: storage}
links:
  - {between: [prefill-0, decode-0], type: shared_memory, bandwidth_gb_per_s: 10}
  - {between: [[prefill-0, decode-0], storage], type: snic, bandwidth_gb_per_s: 1}
"""


@pytest.fixture
def links(tmp_path: Path) -> str:
    file = tmp_path / "links.yaml"
    file.write_text(LINKS)
    return str(file)


def test_the_direct_path_wins_on_idle_links(links: str) -> None:
    selector = LinkSelector(links)
    request = TransferRequest(src="prefill-0", dst="decode-0", data_bytes=1 << 20)
    assert selector.select(request).chosen_type is PathType.DIRECT
    selector.close()
    selector.close()


@pytest.mark.parametrize("text", ["nodes: 3", "{", "nodes: [{name: a, type: moon}]"])
def test_a_file_that_says_nothing_sensible_is_named(tmp_path: Path, text: str) -> None:
    file = tmp_path / "bad.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=r"handoff_links=.*bad\.yaml"):
        LinkSelector(str(file))
    with pytest.raises(ConfigError, match=r"handoff_links=.*missing\.yaml"):
        LinkSelector(str(tmp_path / "missing.yaml"))


def test_an_engine_hands_off_over_them(make_engine: Callable[..., Engine], links: str) -> None:
    prompt = np.random.default_rng(0).integers(3, 512, 40).tolist()
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    expected = make_engine().generate(prompt, params)[0].outputs[0].token_ids
    engine = make_engine(prefill_nodes=1, decode_nodes=1, handoff_links=links)
    assert engine.generate(prompt, params)[0].outputs[0].token_ids == expected
    (record,) = engine._cluster.dispatcher.finished_records()
    assert record.handoff is not None and record.handoff.path == "Direct"


def test_a_node_that_the_file_does_not_know_keeps_what_it_has(
    make_engine: Callable[..., Engine], tmp_path: Path
) -> None:
    file = tmp_path / "others.yaml"
    file.write_text(LINKS.replace("decode-0", "elsewhere"))
    prompt = np.random.default_rng(0).integers(3, 512, 40).tolist()
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    engine = make_engine(prefill_nodes=1, decode_nodes=1, handoff_links=str(file))
    assert engine.generate(prompt, params)[0].finished
    (record,) = engine._cluster.dispatcher.finished_records()
    assert record.handoff is None and record.decode_node == "prefill-0"


def test_loads_are_those_of_the_busiest_link(links: str) -> None:
    selector = LinkSelector(links)
    (load,) = selector.loads("prefill-0", ["prefill-0", "decode-0", "stranger"])
    # Nothing measures process memory.
    assert (load.dst, load.medium, load.utilisation) == ("decode-0", "shared_memory", None)
    assert load.bytes_per_s == 10e9 and 0 < load.threshold <= 1
    assert selector.loads("stranger", ["decode-0"]) == ()
    selector.close()
