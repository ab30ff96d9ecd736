"""A recorded trace as a workload, scaled to a model and a machine.

The format is Mooncake's: JSON lines with `timestamp` (ms), `input_length`, `output_length` (tokens)
and `hash_ids`, one a block of 512 prompt tokens. Equal ids stand for equal text with everything
before it equal too, so a prompt is made of one random piece for each id: prompts share prefixes
exactly where the trace's did, at whatever scale.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from flowkv_jax.bench.serve_workload import Cell, PlannedRequest, TokenSource, rate_text
from flowkv_jax.checks import bad_value, check_int, check_real
from flowkv_jax.errors import NotFoundError, ValidationError
from flowkv_jax.load import ModelInfo

BLOCK_TOKENS = 512
"""Of the trace's hash ids, at scale 1."""


@dataclass(frozen=True, slots=True)
class TraceEntry:
    """One line of a trace."""

    timestamp_ms: float
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceWorkload:
    """The first requests of a trace.

    Attributes:
        path: of the file.
        num_prompts: requests taken, from the beginning.
        length_scale: times every length: prompts, answers, hashed blocks.
        rate_scale: above 1 plays the trace faster; when no `request_rates` are given.
        request_rates: the trace is played as fast as gives these mean rates; one cell each.
        seed: of the tokens.

    Raises:
        ValidationError: a value out of range.
    """

    path: Path
    num_prompts: int
    length_scale: float = 1.0
    rate_scale: float = 1.0
    request_rates: tuple[float, ...] = ()
    seed: int = 0

    def __post_init__(self) -> None:
        check_int("num_prompts", self.num_prompts, 1)
        check_real("length_scale", self.length_scale, 0.0, low_open=True)
        check_real("rate_scale", self.rate_scale, 0.0, low_open=True)
        check_int("seed", self.seed, 0)
        for rate in self.request_rates:
            if not rate > 0:
                raise bad_value("request_rate", rate, "must be above 0 (inf sends all at once)")
        if self.request_rates and self.rate_scale != 1.0:
            raise bad_value("rate_scale", self.rate_scale, "contradicts request_rate; give one")

    def cells(self, model: ModelInfo) -> list[Cell]:
        """
        Raises:
            ValidationError: the file is no such trace, or its times cannot be scaled to the rate.
            NotFoundError: there is no such file.
        """
        entries = list(read_trace(self.path, self.num_prompts))
        if not entries:
            raise bad_value("dataset_path", str(self.path), "has no request")
        shaped, notes = self._shaped(entries, model)
        span_s = (entries[-1].timestamp_ms - entries[0].timestamp_ms) / 1e3
        speeds = [self._speed(rate, len(entries), span_s) for rate in self.request_rates]
        found = []
        for speed in speeds or [self.rate_scale]:
            requests = tuple(
                PlannedRequest(
                    (entry.timestamp_ms - entries[0].timestamp_ms) / 1e3 / speed, prompt, output
                )
                for entry, (prompt, output) in zip(entries, shaped, strict=True)
            )
            last_s = requests[-1].send_at_s
            rate = (len(entries) - 1) / last_s if last_s > 0 else math.inf
            found.append(Cell(f"trace @ {rate_text(rate)}", None, rate, requests, notes))
        return found

    def _speed(self, rate: float, count: int, span_s: float) -> float:
        if math.isinf(rate):
            return math.inf
        if span_s <= 0:
            raise bad_value(
                "request_rate",
                rate,
                f"cannot be reached: the first {count} requests of the trace came at once; take "
                "more (num_prompts)",
            )
        return rate * span_s / (count - 1)

    def _shaped(
        self, entries: list[TraceEntry], model: ModelInfo
    ) -> tuple[list[tuple[tuple[int, ...], int]], tuple[str, ...]]:
        """(prompt, output tokens) of each entry, and what was done to them."""
        tokens = TokenSource(model)
        block_tokens = max(1, round(BLOCK_TOKENS * self.length_scale))

        @lru_cache(maxsize=4096)
        def piece(hash_id: int) -> tuple[int, ...]:
            return tokens.draw(block_tokens, self.seed, 3, hash_id)

        shaped, num_clipped = [], 0
        for entry in entries:
            output = max(1, round(entry.output_length * self.length_scale))
            wanted = max(1, round(entry.input_length * self.length_scale))
            kept_output = min(output, max(1, model.max_model_len // 2))
            length = min(wanted, model.max_model_len - kept_output)
            num_clipped += (length, kept_output) != (wanted, output)
            # Rounding may leave a token or two beyond the last block.
            needed = entry.hash_ids[: -(-length // block_tokens)]
            prompt = tuple(token for hash_id in needed for token in piece(hash_id))[:length]
            shaped.append((prompt, kept_output))
        notes = [_sharing(entries)]
        if num_clipped:
            notes.append(
                f"{num_clipped} of {len(entries)} requests were longer than the model takes "
                f"({model.max_model_len} tokens), and were clipped."
            )
        return shaped, tuple(notes)


def read_trace(path: Path, count: int) -> Iterator[TraceEntry]:
    """The first `count` entries.

    Raises:
        ValidationError: a line is no such entry.
        NotFoundError: there is no such file.
    """
    try:
        with path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                if number > count:
                    return
                yield _entry(line, f"{path}:{number}")
    except FileNotFoundError:
        raise NotFoundError(f"--dataset-path: there is no file {path}") from None


def _entry(line: str, where: str) -> TraceEntry:
    try:
        values: dict[str, Any] = json.loads(line)
        entry = TraceEntry(
            float(values["timestamp"]),
            int(values["input_length"]),
            int(values["output_length"]),
            tuple(int(hash_id) for hash_id in values["hash_ids"]),
        )
    except (ValueError, KeyError, TypeError) as error:
        raise ValidationError(
            f"{where} is no request of a Mooncake trace (timestamp, input_length, output_length, "
            f"hash_ids): {error!r:.100}",
            parameter="dataset_path",
        ) from error
    num_blocks = -(-entry.input_length // BLOCK_TOKENS)
    if entry.input_length < 1 or len(entry.hash_ids) < num_blocks or min(entry.hash_ids) < 0:
        raise ValidationError(
            f"{where}: input_length={entry.input_length} needs {num_blocks} hash ids of at least "
            f"0, one a block of {BLOCK_TOKENS} tokens; there are {len(entry.hash_ids)}",
            parameter="dataset_path",
        )
    return entry


def _sharing(entries: list[TraceEntry]) -> str:
    uses = Counter(hash_id for entry in entries for hash_id in entry.hash_ids)
    total = sum(uses.values())
    repeated = total - len(uses)
    return f"{repeated / total:.0%} of the trace's prompt blocks had been seen before in the cell."
