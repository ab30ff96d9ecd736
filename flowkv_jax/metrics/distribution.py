"""Values counted by buckets: what becomes a histogram, and what is added for every token."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Histogram:
    """A distribution at one moment.

    Attributes:
        counts: values by bucket: (previous bound, bound] for each bound, then those above the
            last. Empty stands for no values.
        total: sum of all values.
    """

    counts: tuple[int, ...] = ()
    total: float = 0.0

    def __add__(self, other: Histogram) -> Histogram:
        """Of the values of both. Raises `ValueError` unless the buckets are as many."""
        if not self.counts or not other.counts:
            return self if self.counts else other
        pairs = zip(self.counts, other.counts, strict=True)
        return Histogram(tuple(a + b for a, b in pairs), self.total + other.total)

    def up_to(self, num_bounds: int) -> Histogram:
        """With the first bounds only; values beyond are above the last of them."""
        counts = self.counts
        if num_bounds + 1 >= len(counts):
            return self
        return Histogram((*counts[:num_bounds], sum(counts[num_bounds:])), self.total)


class Distribution:
    """Counts values. One owner; a count costs a few hundred nanoseconds.

    Args:
        bounds: rising; a value belongs to the first bound that is not below it.
    """

    __slots__ = ("_bounds", "_counts", "_total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._total: float = 0

    def add(self, value: float, times: int = 1) -> None:
        """Count a value, so many times."""
        self._counts[bisect_left(self._bounds, value)] += times
        self._total += value * times

    def copy(self) -> Distribution:
        other = Distribution(self._bounds)
        other._counts, other._total = self._counts.copy(), self._total
        return other

    @property
    def bounds(self) -> Sequence[float]:
        return self._bounds

    def histogram(self) -> Histogram:
        """As it is now. A reader on another thread may find the newest value in one half only."""
        return Histogram(tuple(self._counts), self._total)


def counting(bounds: Sequence[float]) -> Callable[[], Distribution]:
    """Makes empty distributions over these bounds."""
    return lambda: Distribution(bounds)
