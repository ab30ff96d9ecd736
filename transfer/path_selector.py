"""Chooses the path of each transfer, and learns from those that ended.

The selector holds the state that its pure parts (`path_scoring`, `path_choice`, `split`) do not:
per pair of places the last winner and the weighing under the newest sample, and per path what
observed transfers say of its nominal bandwidth. Candidates are enumerated once a pair, weighed
once a sample, and compared once a request.

Bursts. What was chosen since the last sample is not in it, so its bytes are counted as in flight,
for `in_flight_s` or until their transfer is observed. Candidates are compared as what is in flight
leaves them; an advantage of the last winner, which is there against noise in samples, does not
apply while its links are shared. Counting begins with the first observation: a selector that is
only asked would fill links that nobody uses.

Observation. A transfer of b bytes in s seconds over a path of nominal bandwidth c whose busiest
link was at utilisation u shows a capacity of at least b / s, and of about b / s + u c if the others
kept what they had, but says nothing above c unless b / s does. So the capacity is taken as
max(b / s, min(c, b / s + u c)), or with n b / s in place of u c, if that is more: n transfers were
in flight beside it at its beginning or end, which no sample may have shown. The ratio to c, clamped
to [0.1, 10], goes into an exponential average that scales the path's spare bandwidth. A path made
unattractive by it would not be used again and so never recover: after `probe_interval_s` without a
transfer one request that is not TTFT-sensitive takes it, provided that it would win at its nominal
bandwidth.
"""

from __future__ import annotations

import copy
import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from transfer.errors import NoPath
from transfer.graph import Path
from transfer.in_flight import InFlight
from transfer.lazy_decision import LazyDecision
from transfer.path_choice import Choice, Why, choose, part_sizes
from transfer.path_scoring import Weighing, shared, weigh
from transfer.selector_config import SelectorConfig
from transfer.topology import Topology
from transfer.types import PathDecision, TransferRequest

CORRECTION_RANGE = (0.1, 10.0)
# In a smaller transfer the cost of the call, not the link, is what was measured.
MIN_OBSERVED_BYTES = 1 << 20


class LoadSource(Protocol):
    """What the selector reads: `NodeAgent`, `MockNodeAgent`, or your own."""

    @property
    def utilization(self) -> Sequence[float]:
        """By link index, in [0, 1]. A new sample is a new object; none is changed."""
        ...


@dataclass(slots=True)
class _Observed:
    """A path's average of observed over nominal bandwidth, and when it was last tried."""

    correction: float
    last_s: float


@dataclass(slots=True)
class _Pair:
    """One source and destination.

    Attributes:
        weighing: of the candidates, made under `sample` and `revisions`.
        doubted: indices of candidates that are corrected downwards.
        incumbents: last winner, for TTFT-sensitive requests and for the others.
    """

    weighing: Weighing
    sample: Sequence[float] | None
    revisions: tuple[int, int]
    doubted: tuple[int, ...]
    incumbents: dict[bool, tuple[int, ...]]


class PathSelector:
    """Chooses paths. Threads may share one.

    Args:
        topology: may grow while in use.
        agent: source of samples; None for links that are always idle.
        config: read at every decision; None for the defaults.
        clock: seconds, monotonic; probing depends on it, and how long bytes are in flight.
    """

    def __init__(
        self,
        topology: Topology,
        agent: LoadSource | None = None,
        config: SelectorConfig | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.topology = topology
        self.config = SelectorConfig() if config is None else config
        self._agent = agent
        self._clock = clock
        self._lock = threading.Lock()
        self._pairs: dict[tuple[str, str], _Pair] = {}
        self._observed: dict[tuple[str, ...], _Observed] = {}
        # None until something is observed.
        self._in_flight: InFlight | None = None
        self._frozen_config = copy.copy(self.config)
        self._thresholds: list[float] = []

    def select(self, request: TransferRequest) -> PathDecision:
        """Choose for one request. Moves nothing.

        Raises:
            UnknownNode: `src` or `dst` is no node of the topology.
            NoPath: nothing joins them.
            ValueError: they are one place, or bytes cannot lie at one of them.
        """
        agent = self._agent
        sample: Sequence[float] = () if agent is None else agent.utilization
        ttft_sensitive, data_bytes = request.ttft_sensitive, request.data_bytes
        with self._lock:
            pair = self._pair(request.src, request.dst, sample)
            weighing, in_flight = pair.weighing, self._in_flight
            incumbent = pair.incumbents.get(ttft_sensitive, ())
            if in_flight is not None:
                now_s = self._clock()
                in_flight.expire(now_s - weighing.config.in_flight_s)
                weighing = shared(weighing, in_flight, data_bytes)
            is_shared = weighing is not pair.weighing
            choice = choose(
                weighing,
                data_bytes,
                ttft_sensitive=ttft_sensitive,
                block_bytes=request.block_bytes,
                incumbent=() if is_shared else incumbent,
            )
            if not is_shared:
                pair.incumbents[ttft_sensitive] = choice.indices
            if pair.doubted and not ttft_sensitive:
                choice = self._probe(pair, data_bytes, choice)
            if in_flight is not None:
                sizes = part_sizes(weighing, choice.indices, data_bytes)
                for index, size in zip(choice.indices, sizes, strict=True):
                    in_flight.assign(weighing.paths[index], size, now_s)
        return LazyDecision(request, weighing, choice)

    def observe(self, hops: Sequence[str], data_bytes: int, seconds: float) -> None:
        """Learn from a transfer that ended, which is not in flight any more.

        Transfers under 1 MiB teach nothing of a path's bandwidth.

        Args:
            hops: as in the decision's part.
            data_bytes: moved over them.
            seconds: from first to last byte.

        Raises:
            UnknownNode: a hop is no node of the topology.
            NoPath: the hops are no candidate path.
            ValueError: fewer than two hops, or a number is not above 0.
        """
        if len(hops) < 2:
            raise ValueError(f"{hops=} needs a source and a destination")
        if data_bytes < 1 or not 0 < seconds < math.inf:
            raise ValueError(f"{data_bytes=} and {seconds=} must be above 0, and finite")
        route = tuple(hops)
        path = next((p for p in self.topology.paths(route[0], route[-1]) if p.hops == route), None)
        if path is None:
            raise NoPath(f"{' > '.join(route)} is no candidate path of the topology")
        with self._lock:
            if self._in_flight is None:
                self._in_flight = InFlight()
            others = self._in_flight.end(route)
        if data_bytes < MIN_OBSERVED_BYTES:
            return
        measured = data_bytes / seconds / 1e9
        sample: Sequence[float] = () if self._agent is None else self._agent.utilization
        busiest = max([sample[i] for i in path.links if i < len(sample)], default=0.0)
        nominal = path.bandwidth
        beside = max(busiest * nominal, others * measured)
        ratio = max(measured, min(nominal, measured + beside)) / nominal
        low, high = CORRECTION_RANGE
        ratio = min(max(ratio, low), high)
        with self._lock:
            now, weight = self._clock(), self.config.observation_weight
            known = self._observed.setdefault(route, _Observed(1.0, now))
            known.correction += weight * (ratio - known.correction)
            known.last_s = now
            pair = self._pairs.get((route[0], route[-1]))
            if pair is not None:
                pair.sample = None

    def correction(self, hops: Sequence[str]) -> float:
        """Observed over nominal bandwidth of a path; 1 when nothing was observed."""
        with self._lock:
            known = self._observed.get(tuple(hops))
            return 1.0 if known is None else known.correction

    def _pair(self, src: str, dst: str, sample: Sequence[float]) -> _Pair:
        """The pair's weighing under this sample, made if it is not there."""
        revisions = (self.topology.revision, self.config.revision)
        pair = self._pairs.get((src, dst))
        if pair is not None and pair.sample is sample and pair.revisions == revisions:
            return pair
        paths, links = self.topology.paths(src, dst), self.topology.links
        config = self._frozen_config
        if config.revision != revisions[1] or len(self._thresholds) != len(links):
            config = self._frozen_config = copy.copy(self.config)
            self._thresholds = [config.threshold(link.link_type) for link in links]
        utilization = sample
        if len(sample) < len(links):
            utilization = (*sample, *[0.0] * (len(links) - len(sample)))
        corrections: dict[tuple[str, ...], float] = {}
        doubted: tuple[int, ...] = ()
        if self._observed:
            corrections = self._corrections(paths)
            doubted = tuple(i for i, p in enumerate(paths) if corrections.get(p.hops, 1.0) < 1.0)
        weighing = weigh(paths, links, utilization, self._thresholds, config, corrections)
        incumbents: dict[bool, tuple[int, ...]] = {}
        if pair is not None and pair.weighing.paths is paths:
            incumbents = pair.incumbents
        pair = _Pair(weighing, sample, revisions, doubted, incumbents)
        self._pairs[src, dst] = pair
        return pair

    def _corrections(self, paths: Sequence[Path]) -> dict[tuple[str, ...], float]:
        observed = self._observed
        return {p.hops: observed[p.hops].correction for p in paths if p.hops in observed}

    def _probe(self, pair: _Pair, data_bytes: int, choice: Choice) -> Choice:
        """A doubted path that is due and would win at its nominal bandwidth, else `choice`."""
        now = self._clock()
        weighing = pair.weighing
        for index in pair.doubted:
            route = weighing.paths[index].hops
            known = self._observed[route]
            if index in choice.indices or now - known.last_s < weighing.config.probe_interval_s:
                continue
            known.last_s = now
            others = self._corrections(weighing.paths)
            del others[route]
            trusting = weigh(
                weighing.paths,
                weighing.links,
                weighing.utilization,
                self._thresholds,
                weighing.config,
                others,
            )
            if choose(trusting, data_bytes).indices == (index,):
                return Choice((index,), Why.PROBE)
        return choice
