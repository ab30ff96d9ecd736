"""How fast a node computes, from its own steps. Pure: times are arguments."""

from __future__ import annotations

import statistics
from collections import deque
from typing import NamedTuple

from flowkv_jax.engine.step import ScheduledStep
from flowkv_jax.metrics.buckets import STEP_TOKENS
from flowkv_jax.metrics.distribution import Distribution, Histogram

_STEPS_REMEMBERED = 1024


class Pace(NamedTuple):
    """Means since last asked.

    Attributes:
        prefill_tokens_per_s: over steps that computed prompts; None if there was none.
        decode_step_s: of a step that only decoded; None if there was none.
        utilisation: share of the time in which a step ran, in [0, 1].
    """

    prefill_tokens_per_s: float | None
    decode_step_s: float | None
    utilisation: float


class StepMeter:
    """Sums up steps between two `take`s. One owner."""

    def __init__(self, now_s: float) -> None:
        self._since_s = self._last_done_s = now_s
        self._host_s: deque[float] = deque(maxlen=_STEPS_REMEMBERED)
        self._num_steps = 0
        self._tokens = Distribution(STEP_TOKENS)
        self._clear(now_s)

    def count(self, host_s: float, *, is_empty: bool) -> None:
        """The host has spent `host_s` on a step, beside waiting for the device."""
        self._num_steps += not is_empty
        self._host_s.append(host_s)

    def stats(self) -> dict[str, float]:
        """Steps so far, and the median host time of the latest ones in ms. Any thread."""
        recent = list(self._host_s)
        return {
            "num_steps": float(self._num_steps),
            "host_ms_per_step": 1e3 * statistics.median(recent) if recent else 0.0,
        }

    @property
    def tokens(self) -> Histogram:
        """Tokens a step, of all steps so far that computed any. Any thread."""
        return self._tokens.histogram()

    def done(self, step: ScheduledStep, started_s: float, now_s: float) -> None:
        """A step was dispatched at `started_s` and is done; it ran from then, or from when the one
        before it was done."""
        seconds = max(0.0, now_s - max(started_s, self._last_done_s))
        self._last_done_s = now_s
        self._busy_s += seconds
        if step.num_tokens:
            self._tokens.add(step.num_tokens)
        if step.prefills:
            self._prefill_tokens += sum(sequence.num_tokens for sequence in step.prefills)
            self._prefill_s += seconds
        elif step.decodes:
            self._decode_steps += 1
            self._decode_s += seconds

    def take(self, now_s: float) -> Pace:
        """What was measured since the last call."""
        elapsed_s = now_s - self._since_s
        pace = Pace(
            self._prefill_tokens / self._prefill_s if self._prefill_s > 0 else None,
            self._decode_s / self._decode_steps if self._decode_steps else None,
            min(1.0, self._busy_s / elapsed_s) if elapsed_s > 0 else 0.0,
        )
        self._clear(now_s)
        return pace

    def _clear(self, now_s: float) -> None:
        self._since_s = now_s
        self._prefill_tokens, self._prefill_s = 0, 0.0
        self._decode_steps, self._decode_s = 0, 0.0
        self._busy_s = 0.0
