"""Models are told apart by what would change their caches."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest

from flowkv_jax.cluster.facts import ModelFacts, differences, named_facts
from flowkv_jax.errors import NotFoundError
from flowkv_jax.models.source import ModelSource, open_model
from flowkv_jax.worker.fingerprint import config_digest, model_facts, weights_digest
from pallas_kernels.kv_layout import KVLayout


@dataclasses.dataclass
class Inner:
    theta: float = 1e4


@dataclasses.dataclass
class Config:
    num_layers: int = 2
    rope: Inner = dataclasses.field(default_factory=Inner)


def test_config() -> None:
    assert config_digest(Config()) == config_digest(Config())
    assert config_digest(Config()) != config_digest(Config(num_layers=3))
    assert config_digest(Config()) != config_digest(Config(rope=Inner(1e6)))


def facts_of(source: ModelSource, layout: KVLayout) -> ModelFacts:
    return model_facts(source.architecture.name, source.config, source.path, layout)


def test_of_a_model(tiny_model: Callable[[str], Path]) -> None:
    layout = KVLayout(
        num_layers=2, block_size=16, num_kv_heads=2, head_dim=8, dtype="float32", dtype_bytes=4
    )
    with open_model(str(tiny_model("gqa_tied"))) as source:
        first = facts_of(source, layout)
        assert first == facts_of(source, layout)
    with open_model(str(tiny_model("mha_untied"))) as source:
        other = facts_of(source, dataclasses.replace(layout, block_size=32))
    found = differences(named_facts(first), other)
    assert [text.split()[0] for text in found] == ["model", "weights", "block_size"]


def test_place_and_name_do_not_count(tmp_path: Path) -> None:
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).write_bytes(b"weights")
    assert weights_digest(tmp_path / "a.gguf") == weights_digest(tmp_path / "b.gguf")


def test_a_folder_is_all_of_its_files(tmp_path: Path) -> None:
    (tmp_path / "model-1.safetensors").write_bytes(b"one")
    first = weights_digest(tmp_path)
    (tmp_path / "README.md").write_text("x", encoding="utf-8")
    assert weights_digest(tmp_path) == first
    (tmp_path / "model-2.safetensors").write_bytes(b"two")
    assert weights_digest(tmp_path) != first


@pytest.mark.parametrize("position", [0, 100_000, 5_000_000, 9_999_999])
def test_large_files_differ_if_their_weights_do(tmp_path: Path, position: int) -> None:
    plain = tmp_path / "plain.gguf"
    tuned = tmp_path / "tuned.gguf"
    plain.write_bytes(bytes(10_000_000))
    data = bytearray(10_000_000)
    # Training leaves no long stretch of weights as it was.
    start = max(0, position - 200_000)
    data[start : position + 200_000] = b"\1" * len(data[start : position + 200_000])
    tuned.write_bytes(data)
    assert weights_digest(plain) != weights_digest(tuned)


def test_nothing_there(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="no weight files"):
        weights_digest(tmp_path)
