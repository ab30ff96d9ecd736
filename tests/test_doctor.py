"""`flowkv doctor` says what is here and what would be used, with or without a model."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest

from flowkv_jax import cli
from flowkv_jax.commands import Context, doctor
from flowkv_jax.config import EngineConfig, load_config
from pallas_kernels.kv_layout import KVLayout
from tests.tiny_models import write_tiny_model

CPU = {"platform": "cpu", "devices": [{"id": 0, "kind": "cpu", "memory_bytes": None}]}
HOST = {"memory_available_bytes": 8 << 30}
LAYOUT = KVLayout(
    num_layers=2, block_size=16, num_kv_heads=2, head_dim=8, dtype="float32", dtype_bytes=4
)


def run_doctor(*argv: str) -> tuple[int, str]:
    stdout = io.StringIO()
    status = cli.main(["doctor", *argv], Context(io.StringIO(), stdout, io.StringIO()))
    return status, stdout.getvalue()


@pytest.fixture(autouse=True)
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setenv("FLOWKV_CACHE_DIR", str(folder))
    return folder


def test_without_a_model(empty_cache: Path) -> None:
    status, text = run_doctor("--json")
    document = json.loads(text)
    assert (status, document["problems"]) == (0, [])
    assert document["versions"]["jax"]
    assert document["device"]["devices"]
    assert document["cache"]["folder"] == str(empty_cache)
    assert document["cache"]["models"] == {}
    assert "num_blocks" not in document["plan"]
    assert not empty_cache.exists()


def test_text_names_every_section() -> None:
    status, text = run_doctor()
    assert status == 0
    titles = [line for line in text.splitlines() if not line.startswith(" ")]
    assert titles == [
        "versions",
        "machine",
        "cache folder",
        "devices",
        "an engine would use",
        "no problems found",
    ]


def test_problems_make_the_status_1(tmp_path: Path) -> None:
    status, text = run_doctor("--model", str(tmp_path / "nowhere"), "--tensor-parallel-size", "999")
    assert status == 1
    assert "nowhere" in text
    assert "tensor_parallel_size=999 exceeds" in text


def test_cache_folder_that_is_a_file(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    problems: list[str] = []
    facts = doctor.cache_facts(file / "cache", problems)
    assert not facts["is_writable"]
    assert any("FLOWKV_CACHE_DIR" in problem for problem in problems)


@pytest.mark.parametrize(
    ("platform", "dtype", "chosen"),
    [("cpu", "auto", "float32"), ("gpu", "auto", "bfloat16"), ("cpu", "float16", "float16")],
)
def test_dtype(platform: str, dtype: str, chosen: str) -> None:
    config = load_config(EngineConfig, None, {"dtype": dtype})
    assert doctor.plan(config, CPU | {"platform": platform}, HOST, [])["dtype"] == chosen


@pytest.mark.parametrize(
    ("settings", "is_cpu", "num_blocks"),
    [
        ({"num_blocks": 7}, True, 7),
        ({"kv_cache_memory_bytes": 10 * LAYOUT.bytes_per_block + 1}, True, 10),
        ({"max_num_seqs": 3}, True, 3 * 2048 // 16),
        ({}, False, None),
    ],
)
def test_pool_size(settings: dict[str, Any], is_cpu: bool, num_blocks: int | None) -> None:
    config = load_config(EngineConfig, None, settings)
    assert doctor._num_blocks(config, LAYOUT, 4096, is_cpu, 8 << 30, []) == num_blocks


def test_no_room_for_one_block_is_a_problem() -> None:
    problems: list[str] = []
    assert doctor._num_blocks(EngineConfig(), LAYOUT, 4096, True, 100, problems) is None
    assert len(problems) == 1


def test_with_a_model(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "model", "gqa_tied")
    status, text = run_doctor("--model", str(folder), "--num-blocks", "9", "--json")
    document = json.loads(text)
    assert (status, document["problems"]) == (0, [])
    assert document["plan"]["num_blocks"] == 9
    assert document["plan"]["pool_bytes"] == 9 * 16 * document["plan"]["kv_bytes_per_token"]
    assert document["plan"]["weight_bytes"] > 0
