"""Samples how busy the links are, in a background thread.

Readers give byte counters (cumulative) and rates (bytes/s) by name, such as `gpu0/nvlink3/tx`; a
link names those whose sum is its traffic, and this module joins the two. A link's utilisation is
its traffic over the sliding window, over its nominal bandwidth. A link that no reader has ever
measured counts as idle. One whose counters were there and are gone for a whole window (a GPU that
fell off the bus) counts as full, so that no path is chosen over it, until they are back.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from transfer.graph import LinkType
from transfer.topology import Topology

# NVML says that its PCIe counters wrap. At 32 bits and full speed they do several times a second.
_WRAP = 1 << 32


@dataclass(frozen=True, slots=True)
class Reading:
    """What the readers saw at one moment.

    Attributes:
        counters: bytes since some fixed past, by counter name.
        rates: bytes/s at that moment, by counter name.
    """

    counters: Mapping[str, int] = field(default_factory=dict)
    rates: Mapping[str, float] = field(default_factory=dict)


class LoadReader(Protocol):
    """A source of readings; leaves out what it cannot read and does not raise for it."""

    def read(self) -> Reading: ...


class Meter:
    """Traffic by counter name over a sliding window. No thread, no clock.

    Args:
        window_s: length of the window.
    """

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        self._counters: dict[str, deque[tuple[float, int]]] = {}
        self._rates: dict[str, deque[tuple[float, float]]] = {}
        self._last: dict[str, tuple[int, int]] = {}

    def add(self, reading: Reading, now_s: float) -> None:
        """Take in a reading made at `now_s`; times must not descend."""
        for name, value in reading.counters.items():
            points = self._counters.setdefault(name, deque())
            points.append((now_s, self._unwrapped(name, value)))
            # One point stays beyond the window's start, so that the whole window is covered.
            while len(points) > 2 and points[1][0] <= now_s - self._window_s:
                points.popleft()
        for name, rate in reading.rates.items():
            rates = self._rates.setdefault(name, deque())
            rates.append((now_s, rate))
            while rates[0][0] < now_s - self._window_s:
                rates.popleft()

    def _unwrapped(self, name: str, value: int) -> int:
        """The counter as if it had neither wrapped at 32 bits nor been reset to 0."""
        before, offset = self._last.get(name, (value, 0))
        if value < before:
            offset += _WRAP if _WRAP // 4 <= before < _WRAP else before
        self._last[name] = (value, offset)
        return value + offset

    def bytes_per_s(self, name: str, now_s: float) -> float | None:
        """Traffic at `now_s`; None if it was measured and is gone for a window, 0 if never."""
        points, rates = self._counters.get(name), self._rates.get(name)
        newest = max([series[-1][0] for series in (points, rates) if series], default=now_s)
        if now_s - newest > self._window_s:
            return None
        if rates:
            return sum(rate for _, rate in rates) / len(rates)
        if points is None or len(points) < 2:
            return 0.0
        (begin_s, begin), (end_s, end) = points[0], points[-1]
        return (end - begin) / (end_s - begin_s) if end_s > begin_s else 0.0


class NodeAgent:
    """Keeps `utilization` fresh in a thread between `start` and `stop`; a context manager too.

    Args:
        topology: whose links to watch; may grow.
        sample_interval_ms: time between samples.
        window_ms: length of the sliding window.
        readers: where counters come from; None for NVML and sysfs, as far as they are there.
        clock: seconds, monotonic.

    Raises:
        ValueError: an interval is not above 0, or the window is shorter than it.
    """

    def __init__(
        self,
        topology: Topology,
        sample_interval_ms: float = 100.0,
        *,
        window_ms: float = 500.0,
        readers: Iterable[LoadReader] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if not 0 < sample_interval_ms < float("inf"):
            raise ValueError(f"{sample_interval_ms=} must be above 0, and finite")
        if not sample_interval_ms <= window_ms < float("inf"):
            raise ValueError(f"{window_ms=} must be at least {sample_interval_ms=}, and finite")
        self.topology = topology
        self._interval_s = sample_interval_ms / 1e3
        self._readers = None if readers is None else list(readers)
        self._clock = clock
        self._meter = Meter(window_ms / 1e3)
        self._utilization: tuple[float, ...] = (0.0,) * len(topology.links)
        self._lost: tuple[str, ...] = ()
        self._failure: Exception | None = None
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def utilization(self) -> Sequence[float]:
        """By link index, in [0, 1]; a new object at each sample."""
        return self._utilization

    @property
    def lost(self) -> tuple[str, ...]:
        """Names of counters that were there and are gone."""
        return self._lost

    @property
    def failure(self) -> Exception | None:
        """What a reader raised at the last sample, if one did; the agent goes on."""
        return self._failure

    @property
    def is_running(self) -> bool:
        return self._thread is not None

    def start(self) -> NodeAgent:
        """Begin to sample; returns itself. Does nothing if it runs already."""
        if self._thread is None:
            self._stopping.clear()
            self._thread = threading.Thread(target=self._run, name="node-agent", daemon=True)
            self._thread.start()
        return self

    def stop(self) -> None:
        """End the thread; does not wait for the interval to pass. May be called twice."""
        thread, self._thread = self._thread, None
        if thread is not None:
            self._stopping.set()
            thread.join()

    def __enter__(self) -> NodeAgent:
        return self.start()

    def __exit__(self, *exc_info: object) -> None:
        self.stop()

    def sample(self) -> None:
        """Take one sample now. What the thread does; for use without one."""
        if self._readers is None:
            measured = any(link.counters for link in self.topology.links)
            self._readers = default_readers() if measured else []
        self._failure = None
        for reader in self._readers:
            try:
                reading = reader.read()
            except Exception as error:  # One broken reader must not blind the others.
                self._failure = error
                continue
            self._meter.add(reading, self._clock())
        now_s = self._clock()
        lost: list[str] = []
        self._utilization = tuple(
            [self._busy(link.counters, link.bandwidth, now_s, lost) for link in self.topology.links]
        )
        self._lost = tuple(sorted(set(lost)))

    def _busy(
        self, counters: tuple[str, ...], bandwidth: float, now_s: float, lost: list[str]
    ) -> float:
        traffic = 0.0
        for name in counters:
            measured = self._meter.bytes_per_s(name, now_s)
            if measured is None:
                lost.append(name)
                return 1.0
            traffic += measured
        return min(traffic / (bandwidth * 1e9), 1.0)

    def _run(self) -> None:
        while not self._stopping.is_set():
            self.sample()
            self._stopping.wait(self._interval_s)


class MockNodeAgent:
    """Utilisations that a test or a demonstration sets. Starting and stopping do nothing."""

    def __init__(self, topology: Topology) -> None:
        self.topology = topology
        self._utilization: tuple[float, ...] = (0.0,) * len(topology.links)

    @property
    def utilization(self) -> Sequence[float]:
        """By link index, in [0, 1]; a new object at each change."""
        return self._utilization

    def set_utilization(self, src: str, dst: str, value: float, *, both_ways: bool = True) -> None:
        """Set one link, and the opposite one.

        Raises:
            UnknownNode: a name is no node.
            ValueError: no link joins them, or `value` is not in [0, 1].
        """
        indices = [self.topology.link_between(src, dst).index]
        if both_ways:
            indices.append(self.topology.link_between(dst, src).index)
        self._set(indices, value)

    def set_all(self, value: float, *link_types: LinkType) -> None:
        """Set all links of these types, or all links; ValueError if `value` is not in [0, 1]."""
        kinds = link_types or tuple(LinkType)
        self._set([k.index for k in self.topology.links if k.link_type in kinds], value)

    def start(self) -> MockNodeAgent:
        return self

    def stop(self) -> None:
        pass

    def __enter__(self) -> MockNodeAgent:
        return self

    def __exit__(self, *exc_info: object) -> None:
        pass

    def _set(self, indices: Sequence[int], value: float) -> None:
        if not 0 <= value <= 1:
            raise ValueError(f"utilization={value} must be in [0, 1]")
        busy = list(self._utilization)
        busy += [0.0] * (len(self.topology.links) - len(busy))
        for index in indices:
            busy[index] = value
        self._utilization = tuple(busy)


def default_readers() -> list[LoadReader]:
    """NVML, if it is there, and sysfs."""
    from transfer.nvml_reader import NvmlReader
    from transfer.sysfs_reader import SysfsReader

    nvml = NvmlReader.open()
    readers: list[LoadReader] = [SysfsReader()]
    return readers if nvml is None else [nvml, *readers]
