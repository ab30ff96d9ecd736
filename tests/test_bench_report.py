"""The engine benchmark's arithmetic, its report and its comparison, over an engine that counts."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from flowkv_jax import cli
from flowkv_jax.bench import engine as bench
from flowkv_jax.commands import Context
from flowkv_jax.config import EngineConfig
from flowkv_jax.errors import ConfigError, NotFoundError, ServerError
from flowkv_jax.load import ModelInfo
from flowkv_jax.outputs import CompletionOutput, RequestOutput
from flowkv_jax.sampling_params import SamplingParams

PREFILL_S, STEP_S = 0.5, 0.25


class CountingEngine:
    """A call takes `PREFILL_S` for the first token and `STEP_S` for each later one."""

    def __init__(self, *, stats: dict[str, Any] | None = None, lost_tokens: int = 0) -> None:
        self.now_s = 0.0
        self.calls: list[tuple[int, SamplingParams]] = []
        self.config: EngineConfig | None = None
        self._stats = stats if stats is not None else {"host_ms_per_step": 0.75}
        self._lost_tokens = lost_tokens

    def __enter__(self) -> CountingEngine:
        return self

    def __exit__(self, *exception: object) -> None:
        pass

    def clock(self) -> float:
        return self.now_s

    def stats(self) -> dict[str, Any]:
        return self._stats

    def model_info(self) -> ModelInfo:
        return ModelInfo("m", "m", "llama", "float32", 2048, 100, (2,), 1, 1, 4, 16, 64, False)

    def generate(self, prompts: list[list[int]], params: SamplingParams) -> list[RequestOutput]:
        assert params.max_tokens is not None
        self.calls.append((len(prompts), params))
        self.now_s += PREFILL_S + STEP_S * (params.max_tokens - 1)
        token_ids = list(range(params.max_tokens - self._lost_tokens))
        return [
            RequestOutput(str(i), None, prompt, [CompletionOutput(0, "", token_ids)], True)
            for i, prompt in enumerate(prompts)
        ]


def measure(engine: CountingEngine, cell: bench.Cell, repeat: int = 3) -> bench.CellResult:
    return bench.measure_cell(cast(Any, engine), cell, repeat=repeat, seed=1, clock=engine.clock)


def peer_line(**changes: Any) -> str:
    row = {
        "kind": "offline",
        "system": "other",
        "dtype": "float32",
        "scenario": "b8",
        "prefill_tok_s": 100.0,
        "decode_tok_s": 10.0,
    }
    return json.dumps(row | changes)


def test_formulas() -> None:
    cell = bench.Cell("c", batch=4, prompt_tokens=32, new_tokens=9)
    result = measure(CountingEngine(), cell)
    assert result.prefill_tok_s == pytest.approx(4 * 32 / PREFILL_S)
    assert result.decode_tok_s == pytest.approx(4 / STEP_S)
    assert result.host_ms_per_step == 0.75
    assert result.first_token_ids == tuple(range(8))
    assert all(0 <= r.others_cpu_share <= 1 for r in result.repetitions)


def test_calls_are_greedy_and_ignore_the_end() -> None:
    engine = CountingEngine(stats={})
    result = measure(engine, bench.Cell("c", 2, 8, 5), repeat=2)
    assert result.host_ms_per_step is None
    assert [(n, p.max_tokens) for n, p in engine.calls] == [
        (2, 2),  # warm-up
        *[(2, 1), (2, 5)] * 2,
    ]
    assert all(p.ignore_eos and p.temperature == 0 and not p.detokenize for _, p in engine.calls)


def test_median_forgets_one_noisy_repetition() -> None:
    cell = bench.Cell("c", 1, 10, 11)
    repetitions = tuple(bench.Repetition(1.0, t, 0.0) for t in (2.0, 3.0, 99.0))
    result = bench.CellResult(cell, repetitions, None, ())
    assert result.decode_tok_s == pytest.approx(10 / 2.0)


def test_too_few_tokens_are_an_error() -> None:
    with pytest.raises(ServerError, match="asked for 2 tokens"):
        measure(CountingEngine(lost_tokens=1), bench.Cell("c", 1, 8, 4))


def test_prompts_depend_on_seed_and_shape_only() -> None:
    cell = bench.CELLS["b8"]
    prompts = bench.random_prompts(cell, 49152, 1234)
    assert prompts == bench.random_prompts(cell, 49152, 1234)
    assert prompts != bench.random_prompts(cell, 49152, 1235)
    array = np.array(prompts)
    assert array.shape == (8, 128)
    assert array.min() >= bench.FIRST_PROMPT_ID and array.max() < 49152


def test_peers_are_medians_of_known_cells(tmp_path: Path) -> None:
    log = tmp_path / "results.jsonl"
    lines = [peer_line(decode_tok_s=speed) for speed in (10.0, 30.0, 20.0)]
    lines += ["", peer_line(scenario="unknown"), '{"kind": "served"}']
    log.write_text("\n".join(lines))
    assert bench.read_peers(log, ["b8"]) == [
        bench.PeerResult("other", "float32", "b8", 100.0, 20.0, 3)
    ]


@pytest.mark.parametrize("line", ["{", "[]", '{"system": 1}', peer_line(decode_tok_s="fast")])
def test_bad_peer_line_is_named(tmp_path: Path, line: str) -> None:
    log = tmp_path / "results.jsonl"
    log.write_text(peer_line() + "\n" + line + "\n")
    with pytest.raises(ConfigError, match=r"results\.jsonl:2"):
        bench.read_peers(log, ["b8"])


def test_no_peer_file(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="nowhere"):
        bench.read_peers(tmp_path / "nowhere", ["b8"])


class TestCommand:
    def run(self, *argv: str) -> tuple[int, str, str, CountingEngine]:
        engine = CountingEngine()
        stdout, stderr = io.StringIO(), io.StringIO()

        def factory(config: EngineConfig) -> Any:
            engine.config = config
            return engine

        context = Context(io.StringIO(), stdout, stderr, factory, lambda *_: Path("nowhere"))
        status = cli.main(["bench", *argv], context)
        return status, stdout.getvalue(), stderr.getvalue(), engine

    def test_json_report(self, tmp_path: Path) -> None:
        report = tmp_path / "report.json"
        status, text, _, engine = self.run(
            *("engine", "--json", "--cells", "single,b8", "--repeat", "1", "-o", str(report))
        )
        assert status == 0
        document = json.loads(text)
        assert json.loads(report.read_text()) == document
        assert [cell["name"] for cell in document["cells"]] == ["single", "b8"]
        for key in ("versions", "device", "commit", "seed", "config", "host", "resident_bytes"):
            assert key in document
        assert document["host"]["load_average"]
        assert document["config"]["cache"]["enable_prefix_caching"] is False
        assert engine.config is not None and not engine.config.cache.enable_prefix_caching

    def test_table_shows_ratios(self, tmp_path: Path) -> None:
        log = tmp_path / "results.jsonl"
        log.write_text(peer_line(decode_tok_s=1e-6))
        status, text, _, _ = self.run(
            *("engine", "--cells", "single,b8", "--repeat", "1", "--compare", str(log))
        )
        assert status == 0
        assert "other float32" in text
        assert text.count("x)") == 2
        assert "host time per decode step: single 0.75 ms, b8 0.75 ms" in text

    @pytest.mark.parametrize(
        "argv", [["--cells", "b9"], ["--cells", ","], ["--repeat", "0"], ["--compare", "nowhere"]]
    )
    def test_bad_arguments(self, argv: list[str]) -> None:
        status, _, stderr, engine = self.run("engine", *argv)
        assert status == 2
        assert stderr.startswith("flowkv bench: error: ")
        assert engine.config is None

    def test_allocator(self) -> None:
        arguments = ("--num-blocks", "500", "--iterations", "20", "--request-blocks", "8")
        status, text, _, _ = self.run("allocator", *arguments, "--json")
        assert status == 0
        assert json.loads(text)["num_blocks"] == 500
        status, text, _, _ = self.run("allocator", *arguments)
        assert status == 0 and "median_us" in text

    def test_allocator_bad_argument(self) -> None:
        status, _, stderr, _ = self.run("allocator", "--occupancy", "2")
        assert status == 2 and "occupancy" in stderr


def test_others_cpu_share_is_measured() -> None:
    with bench._others_cpu() as share:
        pass
    assert 0 <= share() <= 1
