"""Which of the weighed paths wins. Pure.

The baseline (the direct path, or the first candidate between places that have none) is never
eliminated: it wins unless another is better. Another path must

- cross no link above its threshold,
- beat the baseline's score, and its predicted time, by the relay margin.

Of those that do, the highest score wins.

A split adds link-disjoint paths to the winner, also where all are idle: it is about time, and the
score's bandwidth term ends at what one path has. It is chosen when its predicted time saves more
than the split margin of the winner's, the winner alone would take `min_split_ms`, and every part
has `MIN_PART_BLOCKS`, so that each further call moves enough to pay for itself. When the first
byte is urgent (TTFT-sensitive), a split must also score higher. Storage joins no split: it is the
way left when others are crowded, and not worth writing everything down for its share.

Whoever won last time (the incumbent) keeps an advantage, so that noise in the samples does not
make equal paths alternate: it needs no margin over the baseline or the single path, and another
relay must beat it by the switch margin.
"""

from __future__ import annotations

import enum
import math
from typing import NamedTuple

from transfer.path_scoring import Weighing, bandwidth_term, latency_term
from transfer.split import shares
from transfer.types import PathType

# One block is no run: a call of its own for it is the scattered move that runs avoid.
MIN_PART_BLOCKS = 2


class Why(enum.Enum):
    """What decided."""

    ONLY_PATH = "the only path"
    DIRECT = "no other path beats the direct one by its margin"
    FALLBACK = "the direct path is crowded, and nothing else is better"
    RELAY = "beats the direct path"
    INCUMBENT = "in use, and no other path beats it by the switch margin"
    SPLIT = "link-disjoint paths together beat the best single one"
    PROBE = "tried again after being observed slow"


class Choice(NamedTuple):
    """Indices of the winner's candidates (several for a split), and what decided.

    `considered_split` are the indices of the best split, when one was weighed.
    """

    indices: tuple[int, ...]
    why: Why
    considered_split: tuple[int, ...] = ()


def choose(
    weighing: Weighing,
    data_bytes: int,
    *,
    block_bytes: int = 0,
    ttft_sensitive: bool = False,
    incumbent: tuple[int, ...] = (),
) -> Choice:
    """Choose for one request.

    Args:
        data_bytes: at least 1.
        block_bytes: grain at which a split may cut; 0 for no split.
        incumbent: indices of the last winner for this pair; empty for none.
    """
    config = weighing.config
    scores = [load.score for load in weighing.loads]
    if ttft_sensitive:
        budget_s = config.ttft_budget_ms / 1e3
        for index, score in enumerate(scores):
            seconds = weighing.seconds(index, data_bytes, True)
            scores[index] = score - config.w_latency * latency_term(seconds, budget_s)
    best, why = _best_single(
        weighing, scores, data_bytes, ttft_sensitive, incumbent[0] if incumbent else 0
    )
    single_seconds = weighing.seconds(best, data_bytes, ttft_sensitive)
    is_small = single_seconds * 1e3 < config.min_split_ms
    if is_small or not block_bytes or not config.enable_split_path:
        return Choice((best,), why)
    # In every term but bandwidth a split is at best as good as the path it adds to.
    is_wide = weighing.loads[best].spare >= weighing.reference
    if (is_wide and ttft_sensitive) or weighing.loads[best].crowded_link >= 0:
        return Choice((best,), why)
    max_parts = min(data_bytes // (MIN_PART_BLOCKS * block_bytes), config.max_split_paths)
    parts = disjoint_parts(weighing, best, max_parts)
    if len(parts) < 2:
        return Choice((best,), why)
    sizes = part_sizes(weighing, parts, data_bytes)
    if min(sizes) < MIN_PART_BLOCKS * block_bytes:
        num_blocks = -(-data_bytes // block_bytes)
        if min(shares(num_blocks, [weighing.loads[i].spare for i in parts])) < MIN_PART_BLOCKS:
            return Choice((best,), why)
    saving = 0.0 if parts == incumbent else config.split_benefit_margin
    seconds = _split_seconds(weighing, parts, sizes, block_bytes, ttft_sensitive)
    is_better = seconds < single_seconds * (1.0 - saving)
    if is_better and ttft_sensitive:
        split = split_load(
            weighing, parts, data_bytes, block_bytes=block_bytes, ttft_sensitive=True
        )
        is_better = split.score > scores[best]
    return Choice(parts if is_better else (best,), Why.SPLIT if is_better else why, parts)


def _best_single(
    weighing: Weighing,
    scores: list[float],
    data_bytes: int,
    ttft_sensitive: bool,
    current: int,
) -> tuple[int, Why]:
    """The winner among single paths; `current` is the incumbent's index, 0 for none."""
    loads, config = weighing.loads, weighing.config
    margin = config.relay_benefit_margin
    direct_seconds = weighing.seconds(0, data_bytes, ttft_sensitive)
    bar = scores[0] + margin * abs(scores[0])
    seconds_bar = direct_seconds / (1.0 + margin)
    best, best_score, kept = 0, -math.inf, False
    for index in range(1, len(scores)):
        score, is_current = scores[index], index == current
        # The incumbent is looked at even when another scores higher.
        if score <= best_score and not is_current:
            continue
        if score <= (scores[0] if is_current else bar) or loads[index].crowded_link >= 0:
            continue
        seconds = weighing.seconds(index, data_bytes, ttft_sensitive)
        if seconds > (direct_seconds if is_current else seconds_bar):
            continue
        if score > best_score:
            best, best_score = index, score
        kept = kept or is_current
    if kept and best != current and scores[best] - scores[current] < config.switch_margin:
        return current, Why.INCUMBENT
    if best != 0:
        return best, Why.RELAY
    if len(scores) == 1:
        return 0, Why.ONLY_PATH
    return 0, Why.FALLBACK if loads[0].crowded_link >= 0 else Why.DIRECT


def disjoint_parts(weighing: Weighing, first: int, max_parts: int) -> tuple[int, ...]:
    """`first` and, widest first, uncrowded paths that share no link with one already taken.

    Storage relays are not added.
    """
    paths, loads = weighing.paths, weighing.loads
    taken = set(paths[first].links)
    parts = [first]
    while len(parts) < max_parts:
        widest, spare = -1, 0.0
        for index, load in enumerate(loads):
            usable = load.spare > spare and load.crowded_link < 0
            if not usable or paths[index].path_type is PathType.STORAGE_RELAY:
                continue
            if taken.isdisjoint(paths[index].links):
                widest, spare = index, load.spare
        if widest < 0:
            break
        taken.update(paths[widest].links)
        parts.append(widest)
    return tuple(parts)


def part_sizes(weighing: Weighing, parts: tuple[int, ...], data_bytes: int) -> list[int]:
    """Bytes of each part by spare bandwidth, rounded down; whole blocks are not minded."""
    if len(parts) == 1:
        return [data_bytes]
    spare = [weighing.loads[i].spare for i in parts]
    per_spare = data_bytes / sum(spare)
    return [int(part * per_spare) for part in spare]


def _split_seconds(
    weighing: Weighing,
    parts: tuple[int, ...],
    sizes: list[int],
    block_bytes: int,
    ttft_sensitive: bool,
) -> float:
    """Predicted time of the slowest part, its bytes rounded up to whole blocks."""
    slowest = 0.0
    for i, size in zip(parts, sizes, strict=True):
        if block_bytes and len(parts) > 1:
            size = -(-size // block_bytes) * block_bytes
        seconds = weighing.seconds(i, size, ttft_sensitive)
        if seconds > slowest:
            slowest = seconds
    return slowest


class SplitLoad(NamedTuple):
    """Unweighted terms of a split, its predicted seconds and its score."""

    spare: float
    bandwidth: float
    congestion: float
    qos_risk: float
    hops: float
    latency: float
    seconds: float
    score: float


def split_load(
    weighing: Weighing,
    parts: tuple[int, ...],
    data_bytes: int,
    *,
    block_bytes: int,
    ttft_sensitive: bool,
) -> SplitLoad:
    """Weigh parts together, each with its share by spare bandwidth, rounded up to whole blocks."""
    loads, config = weighing.loads, weighing.config
    spare = sum([loads[i].spare for i in parts])
    sizes = part_sizes(weighing, parts, data_bytes)
    seconds = _split_seconds(weighing, parts, sizes, block_bytes, ttft_sensitive)
    bandwidth = bandwidth_term(spare, weighing.reference)
    congestion = max([loads[i].congestion for i in parts])
    qos_risk = max([loads[i].qos_risk for i in parts])
    hops = max([loads[i].hops for i in parts])
    latency = latency_term(seconds, config.ttft_budget_ms / 1e3) if ttft_sensitive else 0.0
    score = (
        config.w_bandwidth * bandwidth
        - config.w_queue_delay * congestion
        - config.w_hops * hops
        - config.w_qos_risk * qos_risk
        - config.w_latency * latency
    )
    return SplitLoad(spare, bandwidth, congestion, qos_risk, hops, latency, seconds, score)
