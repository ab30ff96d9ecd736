"""What work is predicted to take: prefill from measured rates, hand-offs from measured ones.

Prefill of n tokens over k cached ones on a node that computes r tokens a second:

    seconds = n (1 + (k + n / 2) / attention_context_tokens) / r

The bracket is attention, whose work grows with the tokens before: k + n / 2 on average.

r is the median of the node's last reports, of which the first few are a prior: the default rate
times the node's relative speed, or the median of the nodes that are known. So the first prompts of
a node, which wait for compilation, do not make it look a hundred times slower than it is.

A hand-off of b bytes from one node to another takes latency + b / bandwidth, fitted by least
squares to the pair's hand-offs with exponential forgetting. Two points on the default line are
part of every fit, at 0 and 64 MiB, so that the fit is always determined; they weigh little.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from statistics import median

import numpy as np
import numpy.typing as npt

from flowkv_jax.controller.config import ControllerConfig

_PRIOR_SAMPLES = 3
_RATE_SAMPLES = 15
_FORGETTING = 0.9
_PRIOR_WEIGHT = 0.05
_PRIOR_BYTES = float(64 << 20)
_MAX_SECONDS = 3600.0


def prefill_seconds(
    uncached_tokens: npt.ArrayLike,
    cached_tokens: npt.ArrayLike,
    tokens_per_s: npt.ArrayLike,
    attention_context_tokens: int,
) -> npt.NDArray[np.float64]:
    """Predicted seconds of a prefill; arguments broadcast. See the module for the formula."""
    n = np.asarray(uncached_tokens, np.float64)
    context = np.asarray(cached_tokens, np.float64) + n / 2
    rate = np.asarray(tokens_per_s, np.float64)
    seconds: npt.NDArray[np.float64] = n * (1 + context / attention_context_tokens) / rate
    return seconds


class PrefillRates:
    """Measured prefill rates of nodes, in tokens a second, by name."""

    def __init__(self, default_tokens_per_s: float) -> None:
        self._default = default_tokens_per_s
        self._speeds: dict[str, float] = {}
        self._samples: dict[str, deque[float]] = {}
        self._measured: dict[str, int] = {}

    def join(self, name: str, relative_speed: float) -> float:
        """Begin with the prior; returns the estimate."""
        known = [
            self.estimate(other) / self._speeds[other]
            for other, count in self._measured.items()
            if count > _PRIOR_SAMPLES
        ]
        prior = (median(known) if known else self._default) * relative_speed
        self._speeds[name] = relative_speed
        self._samples[name] = deque([prior] * _PRIOR_SAMPLES, maxlen=_RATE_SAMPLES)
        self._measured[name] = 0
        return prior

    def leave(self, name: str) -> None:
        for of_node in (self._speeds, self._samples, self._measured):
            of_node.pop(name, None)

    def observe(self, name: str, tokens_per_s: float) -> float:
        """Take in a measured rate, above 0; returns the new estimate."""
        self._samples[name].append(tokens_per_s)
        self._measured[name] += 1
        return self.estimate(name)

    def estimate(self, name: str) -> float:
        return median(self._samples[name])


@dataclass(slots=True)
class _Fit:
    """Decayed sums of a pair's hand-offs: weight, bytes, seconds, bytes^2, bytes * seconds."""

    w: float = 0.0
    x: float = 0.0
    y: float = 0.0
    xx: float = 0.0
    xy: float = 0.0

    def add(self, data_bytes: float, seconds: float) -> None:
        f = _FORGETTING
        self.w = f * self.w + 1
        self.x = f * self.x + data_bytes
        self.y = f * self.y + seconds
        self.xx = f * self.xx + data_bytes * data_bytes
        self.xy = f * self.xy + data_bytes * seconds

    def line(self, latency_s: float, s_per_byte: float) -> tuple[float, float]:
        """(latency, seconds per byte) of the fit with the prior line; neither is negative."""
        p, b = _PRIOR_WEIGHT, _PRIOR_BYTES
        far_s = latency_s + b * s_per_byte
        w, x, y = self.w + 2 * p, self.x + p * b, self.y + p * (latency_s + far_s)
        xx, xy = self.xx + p * b * b, self.xy + p * b * far_s
        slope = max((w * xy - x * y) / (w * xx - x * x), 0.0)
        intercept = (y - slope * x) / w
        if intercept < 0:
            return 0.0, xy / xx
        return intercept, slope


class TransferTimes:
    """Measured hand-offs by slots of their source and destination."""

    def __init__(self, config: ControllerConfig) -> None:
        self._latency_s = config.default_transfer_latency_s
        self._near = 1 / config.default_transfer_bytes_per_s
        self._far = 1 / config.default_cross_host_bytes_per_s
        self._fits: dict[int, dict[int, _Fit]] = {}
        # Row of a source: latency and seconds per byte by destination; NaN where none is measured.
        self._rows: dict[int, npt.NDArray[np.float64]] = {}

    def observe(self, src: int, dst: int, same_host: bool, data_bytes: int, seconds: float) -> None:
        """Take in a hand-off that ended; those that moved nothing say nothing."""
        if data_bytes <= 0 or not 0 < seconds < _MAX_SECONDS:
            return
        fit = self._fits.setdefault(src, {}).setdefault(dst, _Fit())
        fit.add(float(data_bytes), seconds)
        line = fit.line(self._latency_s, self._near if same_host else self._far)
        self._row(src, dst + 1)[:, dst] = line

    def leave(self, slot: int) -> None:
        """Forget a node: its slot may become another's."""
        self._fits.pop(slot, None)
        self._rows.pop(slot, None)
        for src, of_pair in self._fits.items():
            if of_pair.pop(slot, None) is not None:
                self._rows[src][:, slot] = np.nan

    def predict(
        self, src: int, host_id: npt.NDArray[np.int64], data_bytes: npt.NDArray[np.float64]
    ) -> npt.NDArray[np.float64]:
        """Seconds from `src` to each slot, for the bytes that each would need; 0 to itself."""
        latency_s = np.full(len(host_id), self._latency_s)
        s_per_byte = np.where(host_id == host_id[src], self._near, self._far)
        if src in self._rows:
            row = self._row(src, len(host_id))[:, : len(host_id)]
            is_measured = ~np.isnan(row[0])
            np.copyto(latency_s, row[0], where=is_measured)
            np.copyto(s_per_byte, row[1], where=is_measured)
        seconds: npt.NDArray[np.float64] = latency_s + data_bytes * s_per_byte
        seconds[src] = 0.0
        return seconds

    def _row(self, src: int, num_slots: int) -> npt.NDArray[np.float64]:
        row = self._rows.get(src)
        if row is None or row.shape[1] < num_slots:
            longer = np.full((2, max(8, 2 * num_slots)), np.nan)
            if row is not None:
                longer[:, : row.shape[1]] = row
            row = self._rows[src] = longer
        return row
