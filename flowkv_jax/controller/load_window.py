"""Smooths what nodes report: the average over a sliding window of time.

Reports come at uneven intervals, so each counts for as long as it was the newest one:

    value     a       b         c          average at now =
    time   ---|-------|---------|----now     (a (tb - begin) + b (tc - tb) + c (now - tc)) / window
             begin = now - window

Time is the caller's. Reports within a sixteenth of the window are averaged first. The newest ones
count for at least one part in eight, so that a change shows at once, and the window is never empty
once there was a report.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

_LEAST_SHARE_OF_NEWEST = 1 / 8
_LEAST_SPAN_S = 1e-9
_MAX_BUCKETS = 16


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


@dataclass(slots=True)
class _Bucket:
    """Reports of a short time: since when, their mean, and how many measured each metric."""

    since_s: float
    means: list[float]
    counts: list[int]

    def add(self, values: Sequence[float | None]) -> None:
        for k, value in enumerate(values):
            if value is not None:
                self.counts[k] += 1
                self.means[k] += (value - self.means[k]) / self.counts[k]


class LoadWindow:
    """A sliding window over tuples of metrics, all of one length; None is "not measured"."""

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        self._buckets: deque[_Bucket] = deque()

    def add(self, values: Sequence[float | None], now_s: float) -> None:
        """Take in a report. Time never runs backwards: an earlier one counts as the newest's."""
        buckets, bucket_s = self._buckets, self._window_s / _MAX_BUCKETS
        if not buckets or now_s - buckets[-1].since_s >= bucket_s:
            buckets.append(_Bucket(now_s, [0.0] * len(values), [0] * len(values)))
        buckets[-1].add(values)

    def average(self, now_s: float) -> tuple[float | None, ...]:
        """Average of each metric over the window that ends now; empty before the first report."""
        buckets = self._buckets
        if not buckets:
            return ()
        begin_s = now_s - self._window_s
        while len(buckets) > 1 and buckets[1].since_s <= begin_s:
            buckets.popleft()
        spans = self._spans(begin_s, now_s)
        averages: list[float | None] = []
        for k in range(len(buckets[-1].means)):
            total = weight = 0.0
            for span, bucket in zip(spans, buckets, strict=True):
                if bucket.counts[k]:
                    total += span * bucket.means[k]
                    weight += span
            averages.append(total / weight if weight > 0 else None)
        return tuple(averages)

    def _spans(self, begin_s: float, now_s: float) -> list[float]:
        """For how long each bucket was the newest, in the window; none is 0."""
        since = [max(bucket.since_s, begin_s) for bucket in self._buckets]
        spans = [
            max(until_s - since_s, _LEAST_SPAN_S)
            for since_s, until_s in zip(since, [*since[1:], now_s], strict=True)
        ]
        older_s = sum(spans[:-1])
        spans[-1] = max(spans[-1], older_s * _LEAST_SHARE_OF_NEWEST / (1 - _LEAST_SHARE_OF_NEWEST))
        return spans
