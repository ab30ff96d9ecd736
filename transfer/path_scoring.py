"""The score of a path. Pure: loads in, numbers out.

    score = w_bandwidth * bandwidth - w_queue_delay * congestion - w_hops * hops
            - w_qos_risk * qos_risk - w_latency * ttft_latency

This is flexFlow's formula. Its terms are dimensionless and in [0, 1], as follows.

    bandwidth     what the path has to spare, over what the widest candidate of the same pair of
                  places has when idle, at most 1. A link of capacity c at utilisation u spares
                  c (1 - u), a path the least of its links, times what observed transfers say
                  of its nominal bandwidth. Transfers just assigned, which u does not show yet,
                  share that with the request.
    congestion    w / (1 + w) for w = u / (2 (1 - u)), the mean wait in an M/D/1 queue in units
                  of its service time (all slices are alike); equal to u / (2 - u). Its worst
                  link counts.
    hops          (hops - 1) / (MAX_HOPS - 1): 0 for the direct path, 1 for the longest.
    qos_risk      0 up to half of a link's threshold, then linearly 1 at the threshold and above.
                  The worst link counts.
    ttft_latency  t / (t + budget) for t the seconds until the last byte arrives when each hop
                  waits for the whole of it; 0 unless the request is TTFT-sensitive.

A split has the sum of its parts' spare bandwidth, its longest time, and the worst of the rest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from transfer.graph import Link, Path
from transfer.in_flight import InFlight
from transfer.selector_config import SelectorConfig

MAX_HOPS = 3  # The most that `path_enumeration` makes.
# A full link still moves something; without a floor its time would be infinite.
MIN_SPARE_SHARE = 0.01
_MAX_USED = 1.0 - MIN_SPARE_SHARE
_INFINITE = float("inf")


def bandwidth_term(spare: float, reference: float) -> float:
    """Both GB/s."""
    return spare / reference if spare < reference else 1.0


def congestion_term(utilization: float) -> float:
    return utilization / (2.0 - utilization)


def hops_term(num_hops: int) -> float:
    return (num_hops - 1) / (MAX_HOPS - 1) if num_hops < MAX_HOPS else 1.0


def qos_risk_term(utilization: float, threshold: float) -> float:
    risk = 2.0 * utilization / threshold - 1.0
    if risk <= 0.0:
        return 0.0
    return risk if risk < 1.0 else 1.0


def latency_term(seconds: float, budget_s: float) -> float:
    return seconds / (seconds + budget_s)


_HOPS_TERMS = [0.0, *map(hops_term, range(1, MAX_HOPS + 1))]


class PathLoad(NamedTuple):
    """What one sample says about one path.

    Attributes:
        spare: GB/s left over, corrected by observation.
        congestion, qos_risk, hops: terms, unweighted.
        s_per_byte: while a pipeline of hops is full.
        serial_s_per_byte: when each hop waits for the whole.
        crowded_link: index of a link above its threshold, -1 for none.
        score: without the latency term.
    """

    spare: float
    congestion: float
    qos_risk: float
    hops: float
    s_per_byte: float
    serial_s_per_byte: float
    crowded_link: int
    score: float


class Weighing(NamedTuple):
    """Every candidate of one pair of places under one sample. Nothing in it changes.

    Attributes:
        paths: candidates; the first is the baseline: the direct path, where there is one.
        loads: theirs.
        links: the topology's, by index.
        utilization: the sample, by link index.
        reference: GB/s of the widest candidate when idle.
        config: a copy that nobody sets.
    """

    paths: tuple[Path, ...]
    loads: list[PathLoad]
    links: Sequence[Link]
    utilization: Sequence[float]
    reference: float
    config: SelectorConfig

    def seconds(self, index: int, data_bytes: int, ttft_sensitive: bool) -> float:
        """Predicted time of `data_bytes` over a candidate."""
        load = self.loads[index]
        rate = load.serial_s_per_byte if ttft_sensitive else load.s_per_byte
        return self.paths[index].latency_s + data_bytes * rate


def weigh(
    paths: tuple[Path, ...],
    links: Sequence[Link],
    utilization: Sequence[float],
    thresholds: Sequence[float],
    config: SelectorConfig,
    corrections: Mapping[tuple[str, ...], float],
) -> Weighing:
    """Weigh all candidates.

    Args:
        utilization: by link index, in [0, 1].
        thresholds: by link index, in (0, 1].
        corrections: observed over nominal bandwidth, by hops; 1 for those not in it.
    """
    reference = max([path.bandwidth for path in paths])
    w_bandwidth, w_queue_delay = config.w_bandwidth, config.w_queue_delay
    w_hops, w_qos_risk = config.w_hops, config.w_qos_risk
    loads = []
    # This loop is most of a decision's time after a new sample: plain comparisons, no calls to
    # min and max.
    for path in paths:
        busiest = pressure = serial = 0.0
        crowded, spare = -1, _INFINITE
        for leg in path.legs:
            leg_spare = _INFINITE
            for index in leg:
                used, left = utilization[index], links[index].bandwidth
                if used:
                    left *= 1.0 - used if used < _MAX_USED else MIN_SPARE_SHARE
                    if used > busiest:
                        busiest = used
                    share = used / thresholds[index]
                    if share > pressure:
                        pressure, crowded = share, index
                if left < leg_spare:
                    leg_spare = left
            serial += 1.0 / leg_spare
            if leg_spare < spare:
                spare = leg_spare
        if corrections:
            correction = corrections.get(path.hops, 1.0)
            spare *= correction
            serial /= correction
        congestion = congestion_term(busiest) if busiest else 0.0
        risk = qos_risk_term(pressure, 1.0) if pressure > 0.5 else 0.0
        hops = _HOPS_TERMS[len(path.legs)]
        bandwidth = bandwidth_term(spare, reference) if spare < reference else 1.0
        score = (
            w_bandwidth * bandwidth - w_queue_delay * congestion - w_hops * hops - w_qos_risk * risk
        )
        if pressure <= 1.0:
            crowded = -1
        loads.append(
            PathLoad(spare, congestion, risk, hops, 1e-9 / spare, serial * 1e-9, crowded, score)
        )
    return Weighing(paths, loads, links, utilization, reference, config)


def shared(weighing: Weighing, in_flight: InFlight, data_bytes: int) -> Weighing:
    """The weighing as a request of `data_bytes` meets it among what is in flight.

    Transfers that share a link get equal parts of it for as long as they last. So while b bytes
    of the request pass, each of n others moves at most b, and all of them at most the B bytes they
    have: the request is left b / (b + min(B, n b)) of what the path has to spare. The worst link
    counts.

    Returns:
        `weighing` itself where no candidate has anything in flight.
    """
    on_link = in_flight.on_link
    if not on_link:
        return weighing
    w_bandwidth, reference = weighing.config.w_bandwidth, weighing.reference
    loads: list[PathLoad] | None = None
    for index, path in enumerate(weighing.paths):
        others = 0
        for link in path.links:
            totals = on_link.get(link)
            if totals is not None:
                moved = totals[0] * data_bytes
                if moved > totals[1]:
                    moved = totals[1]
                if moved > others:
                    others = moved
        if not others:
            continue
        if loads is None:
            loads = weighing.loads.copy()
        spare, congestion, risk, hops, s_per_byte, serial, crowded, score = loads[index]
        slowdown = (data_bytes + others) / data_bytes
        left = spare / slowdown
        lost = (spare if spare < reference else reference) - (
            left if left < reference else reference
        )
        score -= w_bandwidth * lost / reference
        loads[index] = PathLoad(
            left, congestion, risk, hops, s_per_byte * slowdown, serial * slowdown, crowded, score
        )
    if loads is None:
        return weighing
    return Weighing(
        weighing.paths, loads, weighing.links, weighing.utilization, reference, weighing.config
    )


def score_terms(
    config: SelectorConfig,
    *,
    bandwidth: float,
    congestion: float,
    hops: float,
    qos_risk: float,
    latency: float,
) -> dict[str, float]:
    """The score's summands by name, signed and weighted, from the unweighted terms."""
    return {
        "bandwidth": config.w_bandwidth * bandwidth,
        "queue_delay": -config.w_queue_delay * congestion,
        "hops": -config.w_hops * hops,
        "qos_risk": -config.w_qos_risk * qos_risk,
        "latency": -config.w_latency * latency,
    }
