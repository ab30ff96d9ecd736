"""Smooths what nodes report: the average over a sliding window of time.

Reports come at uneven intervals, so each counts for as long as it was the newest one:

    value     a       b         c          average at now =
    time   ---|-------|---------|----now     (a (tb - begin) + b (tc - tb) + c (now - tc)) / window
             begin = now - window

Time is the caller's. The newest report counts for at least one part in eight, so that a change
shows at once, and the window is never empty once there was a report.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

_LEAST_SHARE_OF_NEWEST = 1 / 8
_MAX_SAMPLES = 256  # more reports in a window than this say nothing new


class RateWindow:
    """How much of something came a second, over a sliding window; kept in thirty buckets."""

    _BUCKETS = 30

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        self._bucket_s = window_s / self._BUCKETS
        self._buckets: deque[tuple[float, float]] = deque()
        self._first_s: float | None = None

    def add(self, amount: float, now_s: float) -> None:
        """Count what came."""
        if self._first_s is None:
            self._first_s = now_s
        if self._buckets and now_s - self._buckets[-1][0] < self._bucket_s:
            since_s, total = self._buckets[-1]
            self._buckets[-1] = (since_s, total + amount)
        else:
            self._buckets.append((now_s, amount))

    def per_s(self, now_s: float) -> float:
        """Amount a second over the window; over the time since the first one, while that is less,
        but at least one bucket."""
        if self._first_s is None:
            return 0.0
        while self._buckets and self._buckets[0][0] <= now_s - self._window_s:
            self._buckets.popleft()
        span_s = min(max(now_s - self._first_s, self._bucket_s), self._window_s)
        return sum(amount for _, amount in self._buckets) / span_s


class LoadWindow:
    """A sliding window over tuples of metrics, all of one length; None is "not measured"."""

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        self._samples: deque[tuple[float, Sequence[float | None]]] = deque(maxlen=_MAX_SAMPLES)

    def add(self, values: Sequence[float | None], now_s: float) -> None:
        """Take in a report. Time never runs backwards: an earlier one counts as the newest's."""
        if self._samples:
            now_s = max(now_s, self._samples[-1][0])
        self._samples.append((now_s, values))

    def average(self, now_s: float) -> tuple[float | None, ...]:
        """Average of each metric over the window that ends now; empty before the first report."""
        samples = self._samples
        if not samples:
            return ()
        begin_s = now_s - self._window_s
        while len(samples) > 1 and samples[1][0] <= begin_s:
            samples.popleft()
        spans = []
        for index, (since_s, _) in enumerate(samples):
            until_s = samples[index + 1][0] if index + 1 < len(samples) else now_s
            spans.append(max(until_s - max(since_s, begin_s), 0.0))
        older_s = sum(spans[:-1])
        least_s = older_s * _LEAST_SHARE_OF_NEWEST / (1 - _LEAST_SHARE_OF_NEWEST)
        spans[-1] = max(spans[-1], least_s) or 1.0
        return tuple(
            _weighted(spans, [values[k] for _, values in samples])
            for k in range(len(samples[-1][1]))
        )


def _weighted(spans: Sequence[float], values: Sequence[float | None]) -> float | None:
    """Average of the values that are there; of equal weight if all of theirs are 0."""
    known = [(span, value) for span, value in zip(spans, values, strict=True) if value is not None]
    if not known:
        return None
    total = sum(span for span, _ in known)
    if total <= 0:
        return sum(value for _, value in known) / len(known)
    return sum(span * value for span, value in known) / total
