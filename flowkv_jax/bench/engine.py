"""`flowkv bench engine`: prefill and decode speed of the engine through its public API.

A cell is `batch` prompts of `prompt_tokens` random vocabulary ids (fixed by seed), all submitted at
once, greedy, end-of-sequence ignored, no text made, prefix caching off. One repetition times two
calls, `t1_s` for one new token a prompt and `t_s` for `new_tokens`:

    prefill_tok_s = batch * prompt_tokens / t1_s
    decode_tok_s  = batch * (new_tokens - 1) / (t_s - t1_s)

The second formula takes the prefill out of the longer call, so it holds for any engine that can be
asked for n tokens. A cell's figure is the median over repetitions of each of the two.
"""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import psutil

from flowkv_jax import environment
from flowkv_jax.config import EngineConfig
from flowkv_jax.errors import ConfigError, NotFoundError, ServerError, ValidationError
from flowkv_jax.outputs import RequestOutput
from flowkv_jax.sampling_params import SamplingParams

if TYPE_CHECKING:
    from flowkv_jax.engine.engine import Engine

# Below this stand the control tokens of the vocabularies we have met.
FIRST_PROMPT_ID = 17


@dataclass(frozen=True, slots=True)
class Cell:
    """One row of the benchmark."""

    name: str
    batch: int
    prompt_tokens: int
    new_tokens: int


CELLS: Mapping[str, Cell] = {
    cell.name: cell
    for cell in (
        Cell("single", 1, 128, 128),
        Cell("b8", 8, 128, 128),
        Cell("b32", 32, 128, 128),
        Cell("long_b4", 4, 1024, 32),
    )
}


@dataclass(frozen=True, slots=True)
class Repetition:
    """Two timed calls.

    Attributes:
        others_cpu_share: share of this machine's cores that other processes used meanwhile, in
            [0, 1]; a noisy repetition shows here.
    """

    t1_s: float
    t_s: float
    others_cpu_share: float


@dataclass(frozen=True, slots=True)
class CellResult:
    """One measured cell.

    Attributes:
        host_ms_per_step: everything but the device call, median over the engine's last steps; None
            where the engine keeps no such figure.
        first_token_ids: of the first prompt's answer, to see that two runs did the same work.
    """

    cell: Cell
    repetitions: tuple[Repetition, ...]
    host_ms_per_step: float | None
    first_token_ids: tuple[int, ...]

    @property
    def prefill_tok_s(self) -> float:
        tokens = self.cell.batch * self.cell.prompt_tokens
        return statistics.median(tokens / r.t1_s for r in self.repetitions)

    @property
    def decode_tok_s(self) -> float:
        tokens = self.cell.batch * (self.cell.new_tokens - 1)
        return statistics.median(tokens / max(1e-9, r.t_s - r.t1_s) for r in self.repetitions)

    def to_dict(self) -> dict[str, Any]:
        return {
            **asdict(self.cell),
            "prefill_tok_s": self.prefill_tok_s,
            "decode_tok_s": self.decode_tok_s,
            "host_ms_per_step": self.host_ms_per_step,
            "first_token_ids": list(self.first_token_ids),
            "repetitions": [asdict(r) for r in self.repetitions],
        }


@dataclass(frozen=True, slots=True)
class PeerResult:
    """Median speeds of another system in one cell, read from its log."""

    system: str
    dtype: str
    cell: str
    prefill_tok_s: float
    decode_tok_s: float
    num_repetitions: int

    @property
    def label(self) -> str:
        return f"{self.system} {self.dtype}"


def random_prompts(cell: Cell, vocab_size: int, seed: int) -> list[list[int]]:
    """`batch` prompts of `prompt_tokens` ids, the same for the same arguments.

    Raises:
        ValidationError: the vocabulary has no ids past the control tokens.
    """
    if vocab_size <= FIRST_PROMPT_ID:
        raise ValidationError(
            f"{vocab_size=} must exceed {FIRST_PROMPT_ID}", parameter="vocab_size", value=vocab_size
        )
    generator = np.random.default_rng([seed, cell.batch, cell.prompt_tokens])
    shape = (cell.batch, cell.prompt_tokens)
    prompts: list[list[int]] = generator.integers(FIRST_PROMPT_ID, vocab_size, size=shape).tolist()
    return prompts


def benchmark_config(config: EngineConfig) -> EngineConfig:
    """`config` with prefix caching off: a repeated prompt must be computed again."""
    cache = msgspec.structs.replace(config.cache, enable_prefix_caching=False)
    return msgspec.structs.replace(config, cache=cache)


def measure_cell(
    engine: Engine,
    cell: Cell,
    *,
    repeat: int,
    seed: int,
    clock: Callable[[], float] = time.perf_counter,
) -> CellResult:
    """Warm the cell's shapes up, then time it `repeat` times.

    Raises:
        ServerError: the engine returned another number of tokens than asked for.
    """
    prompts = random_prompts(cell, engine.model_info().vocab_size, seed)
    # Two tokens compile every shape: context length is none.
    _generate(engine, prompts, 2)
    repetitions = []
    outputs: list[RequestOutput] = []
    for _ in range(repeat):
        with _others_cpu() as share:
            start = clock()
            _generate(engine, prompts, 1)
            middle = clock()
            outputs = _generate(engine, prompts, cell.new_tokens)
            end = clock()
        repetitions.append(Repetition(middle - start, end - middle, share()))
    return CellResult(
        cell=cell,
        repetitions=tuple(repetitions),
        host_ms_per_step=_host_ms_per_step(engine),
        first_token_ids=tuple(outputs[0].outputs[0].token_ids[:8]),
    )


def report(
    config: EngineConfig,
    engine: Engine,
    results: Sequence[CellResult],
    peers: Sequence[PeerResult],
    *,
    seed: int,
) -> dict[str, Any]:
    """Everything needed to read the figures later, JSON-ready."""
    return {
        "benchmark": "engine",
        "when": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "commit": environment.source_commit(),
        "versions": environment.versions(),
        "host": environment.host_facts(),
        "device": environment.device_facts(),
        "resident_bytes": psutil.Process().memory_info().rss,
        "seed": seed,
        "config": msgspec.to_builtins(config),
        "model": engine.model_info().to_dict(),
        "cells": [result.to_dict() for result in results],
        "peers": [asdict(peer) for peer in peers],
    }


def read_peers(path: Path, cells: Sequence[str]) -> list[PeerResult]:
    """Medians of other systems from a log with one JSON object a line.

    Lines with `kind` other than "offline" are left out; the others need `system`, `dtype`,
    `scenario` (our cell name), `prefill_tok_s` and `decode_tok_s`.

    Raises:
        NotFoundError: no such file.
        ConfigError: a line is not such an object.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise NotFoundError(f"{path}: cannot read results: {error.strerror}") from error
    runs: dict[tuple[str, str, str], list[tuple[float, float]]] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            if row["kind"] == "offline" and row["scenario"] in cells:
                speeds = (float(row["prefill_tok_s"]), float(row["decode_tok_s"]))
                runs.setdefault((row["system"], row["dtype"], row["scenario"]), []).append(speeds)
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(
                f"{path}:{number}: not a benchmark result: {error!r}", parameter="compare"
            ) from error
    return [
        PeerResult(
            *key,
            prefill_tok_s=statistics.median(prefill for prefill, _ in speeds),
            decode_tok_s=statistics.median(decode for _, decode in speeds),
            num_repetitions=len(speeds),
        )
        for key, speeds in runs.items()
    ]


def _generate(engine: Engine, prompts: list[list[int]], num_tokens: int) -> list[RequestOutput]:
    params = SamplingParams(
        temperature=0.0, max_tokens=num_tokens, ignore_eos=True, detokenize=False
    )
    outputs = list(engine.generate(prompts, params))
    lengths = {len(output.outputs[0].token_ids) for output in outputs}
    if lengths != {num_tokens}:
        raise ServerError(f"asked for {num_tokens} tokens a prompt, got {sorted(lengths)}")
    return outputs


def _host_ms_per_step(engine: Engine) -> float | None:
    value = engine.stats().get("host_ms_per_step")
    return None if value is None else float(value)


@contextmanager
def _others_cpu() -> Iterator[Callable[[], float]]:
    """Give a function that tells, after the block, what share of the machine others used in it."""

    def busy_s() -> float:
        times = psutil.cpu_times()
        return times.user + times.system + getattr(times, "nice", 0.0)

    def own_s() -> float:
        times = psutil.Process().cpu_times()
        return times.user + times.system

    start = (time.perf_counter(), busy_s(), own_s())
    end = start
    yield lambda: min(
        1.0,
        max(0.0, (end[1] - start[1]) - (end[2] - start[2]))
        / max(1e-9, (end[0] - start[0]) * (os.cpu_count() or 1)),
    )
    end = (time.perf_counter(), busy_s(), own_s())
