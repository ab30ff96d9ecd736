"""What a load client will ask, and when: drawn before the first request is sent, from a seed.

A workload is a list of cells; a cell is a list of requests with the times of their sending. Prompts
are token ids, uniform over the middle of the vocabulary, where no model keeps its special tokens.

Arrivals are a Poisson process that is known to have n arrivals in n / rate seconds: n + 1
exponential gaps, scaled to that sum. So the offered rate is exact, also of a short cell, and gaps
vary as in the open process. `burstiness` is the gamma distribution's shape, as `vllm bench serve`
has it: 1 is Poisson, below 1 burstier, above 1 more even. Rate `inf` sends everything at once.

The same seed gives the same prompts and times. Times do not depend on lengths, and scale with the
rate, so that cells of a sweep are the same experiment, faster or slower.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from flowkv_jax.checks import bad_value, check_int, check_real
from flowkv_jax.load import ModelInfo

_MARGIN_TOKENS = 1000
"""Left out at both ends of a vocabulary (a tenth of it, if that is less)."""

SHORT, LONG = "short", "long"
"""Groups of an interference workload."""


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    """One request to come.

    Attributes:
        send_at_s: after the cell's start.
        max_tokens: tokens to generate.
        group: figures are told apart by it; empty if all are alike.
    """

    send_at_s: float
    prompt_token_ids: tuple[int, ...]
    max_tokens: int
    group: str = ""


@dataclass(frozen=True, slots=True)
class Cell:
    """Requests that are measured together.

    Attributes:
        name: says what differs from the workload's other cells.
        input_len: of prompts in tokens; None if they differ by themselves.
        request_rate: offered, requests a second; may be `inf`.
        requests: by time of sending.
        notes: what a reader of the figures must know.
    """

    name: str
    input_len: int | None
    request_rate: float
    requests: tuple[PlannedRequest, ...]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RandomWorkload:
    """Prompts of random tokens, a cell for each length and rate.

    Attributes:
        input_lens: tokens of a prompt, one cell each.
        output_len: tokens of an answer.
        request_rates: requests a second; one cell each; `inf` for all at once.
        num_prompts: requests of a cell.
        burstiness: shape of the gaps' gamma distribution.
        prefix_len: the first so many of a prompt's tokens are one of `num_prefixes` prefixes.
        num_prefixes: used in turn.
        seed: of everything.

    Raises:
        ValidationError: a value out of range.
    """

    input_lens: tuple[int, ...]
    output_len: int
    request_rates: tuple[float, ...]
    num_prompts: int
    burstiness: float = 1.0
    prefix_len: int = 0
    num_prefixes: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        _check_common(self.request_rates, self.num_prompts, self.burstiness, self.seed)
        if not self.input_lens:
            raise bad_value("input_len", self.input_lens, "must have one or more lengths")
        for length in self.input_lens:
            check_int("input_len", length, 1)
        check_int("output_len", self.output_len, 1)
        check_int("num_prefixes", self.num_prefixes, 1)
        check_int("prefix_len", self.prefix_len, 0, min(self.input_lens))

    def cells(self, model: ModelInfo) -> list[Cell]:
        """
        Raises:
            ValidationError: prompt and answer do not fit the model.
        """
        check_fits(model, max(self.input_lens), self.output_len)
        found = []
        for length in self.input_lens:
            prompts = self._prompts(TokenSource(model), length)
            for rate in self.request_rates:
                times = arrival_times(self.num_prompts, rate, self.burstiness, self.seed)
                requests = tuple(
                    PlannedRequest(time, prompt, self.output_len)
                    for time, prompt in zip(times, prompts, strict=True)
                )
                found.append(Cell(f"{length} @ {rate_text(rate)}", length, rate, requests))
        return found

    def _prompts(self, tokens: TokenSource, length: int) -> list[tuple[int, ...]]:
        prefixes = [tokens.draw(self.prefix_len, self.seed, 1, i) for i in range(self.num_prefixes)]
        return [
            prefixes[i % len(prefixes)]
            + tokens.draw(length - self.prefix_len, self.seed, 0, length, i)
            for i in range(self.num_prompts)
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class InterferenceWorkload:
    """Short prompts with long answers, and a long prompt at fixed intervals: what does prefill do
    to those who decode? Figures of the two groups are apart.

    Attributes:
        input_len, output_len: of the short ones.
        request_rates, num_prompts, burstiness: of the short ones; one cell a rate.
        long_input_len, long_output_len: of the long ones.
        long_interval_s: between long ones; the first comes one interval after the start.
        num_long_prompts: in a cell.
        seed: of everything.

    Raises:
        ValidationError: a value out of range.
    """

    input_len: int
    output_len: int
    request_rates: tuple[float, ...]
    num_prompts: int
    long_input_len: int
    long_output_len: int
    long_interval_s: float
    num_long_prompts: int
    burstiness: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        _check_common(self.request_rates, self.num_prompts, self.burstiness, self.seed)
        for name in ("input_len", "output_len", "long_input_len", "long_output_len"):
            check_int(name, getattr(self, name), 1)
        check_int("num_long_prompts", self.num_long_prompts, 1)
        check_real("long_interval", self.long_interval_s, 0.0, low_open=True)

    def cells(self, model: ModelInfo) -> list[Cell]:
        """
        Raises:
            ValidationError: prompt and answer do not fit the model.
        """
        check_fits(model, self.input_len, self.output_len)
        check_fits(model, self.long_input_len, self.long_output_len)
        tokens = TokenSource(model)
        long = [
            PlannedRequest(
                (i + 1) * self.long_interval_s,
                tokens.draw(self.long_input_len, self.seed, 1, i),
                self.long_output_len,
                LONG,
            )
            for i in range(self.num_long_prompts)
        ]
        found = []
        for rate in self.request_rates:
            times = arrival_times(self.num_prompts, rate, self.burstiness, self.seed)
            short = [
                PlannedRequest(
                    time, tokens.draw(self.input_len, self.seed, 0, i), self.output_len, SHORT
                )
                for i, time in enumerate(times)
            ]
            both = tuple(sorted(short + long, key=lambda request: request.send_at_s))
            name = f"{self.input_len} @ {rate_text(rate)} + {self.long_input_len}"
            found.append(Cell(name, self.input_len, rate, both))
        return found


class TokenSource:
    """Random ids of a model that are no special tokens."""

    def __init__(self, model: ModelInfo) -> None:
        margin = min(_MARGIN_TOKENS, model.vocab_size // 10)
        ids = np.arange(margin, model.vocab_size - margin)
        self._ids = ids[~np.isin(ids, model.eos_token_ids)]

    def draw(self, count: int, *key: int) -> tuple[int, ...]:
        """`count` ids. The same key (numbers of at least 0) gives the same ids."""
        generator = np.random.default_rng(key)
        return tuple(self._ids[generator.integers(0, len(self._ids), count)].tolist())


def arrival_times(count: int, rate: float, burstiness: float, seed: int) -> list[float]:
    """Rising times in [0, count / rate) seconds; all 0 for an infinite rate."""
    if math.isinf(rate):
        return [0.0] * count
    gaps = np.random.default_rng((seed, 2)).gamma(burstiness, size=count + 1)
    # A share of the whole below 1, but for rounding: the last gap may be too small to count.
    shares = np.cumsum(gaps[:-1]) / np.sum(gaps)
    return [float(share) * count / rate for share in shares]


def check_fits(model: ModelInfo, input_len: int, output_len: int) -> None:
    """
    Raises:
        ValidationError: a prompt of `input_len` and an answer of `output_len` tokens do not fit.
    """
    if input_len + output_len > model.max_model_len:
        raise bad_value(
            "input_len",
            input_len,
            f"with output_len={output_len} does not fit the server's max_model_len="
            f"{model.max_model_len}; ask for less, or serve with a larger one",
        )


def rate_text(rate: float) -> str:
    return "inf" if math.isinf(rate) else f"{rate:.3g}/s"


def _check_common(
    request_rates: Sequence[float], num_prompts: int, burstiness: float, seed: int
) -> None:
    if not request_rates:
        raise bad_value("request_rate", request_rates, "must have one or more rates")
    for rate in request_rates:
        if not rate > 0:
            raise bad_value("request_rate", rate, "must be above 0 (inf sends all at once)")
    check_int("num_prompts", num_prompts, 1)
    check_real("burstiness", burstiness, 0.0, low_open=True)
    check_int("seed", seed, 0)
