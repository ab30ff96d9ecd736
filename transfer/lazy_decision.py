"""A `PathDecision` that builds its candidates when someone looks at them.

Deciding takes microseconds; spelling out every loser takes longer, and most are never read. All
that is built later comes from values that no one changes, so it says what was true at the time.
"""

from __future__ import annotations

from functools import cached_property

from transfer.path_choice import Choice, Why, split_load
from transfer.path_scoring import Weighing, latency_term, score_terms
from transfer.split import split_bytes, split_runs
from transfer.types import Candidate, PathDecision, PathPart, PathType, TransferRequest


def rate_text(gb_per_s: float) -> str:
    """Three significant digits in the unit that suits them: `25.0 GB/s`, `31.2 MB/s`."""
    scale, unit = 1.0, "GB/s"
    for smaller in ("MB/s", "kB/s"):
        # Half a unit in the last place, so that nothing is printed as 1000 of the smaller one.
        if gb_per_s * scale >= 0.9995:
            break
        scale, unit = scale * 1e3, smaller
    value = gb_per_s * scale
    digits = 2 if value < 9.995 else 1 if value < 99.95 else 0
    return f"{value:.{digits}f} {unit}"


class LazyDecision(PathDecision):
    """See `PathDecision`."""

    def __init__(self, request: TransferRequest, weighing: Weighing, choice: Choice) -> None:
        # Frozen, as its parent is: these are set once, past its guard.
        object.__setattr__(self, "request", request)
        self.__dict__["_of"] = (weighing, choice)

    def __reduce__(self) -> tuple[type[PathDecision], tuple[object, ...]]:
        return PathDecision, (self.request, self.chosen, self.candidates, self.reason)

    # Each overrides a field of the parent with what computes it.
    @cached_property
    def candidates(self) -> tuple[Candidate, ...]:
        """Usable ones first, best first."""
        weighing, choice = self._parts
        indices: list[tuple[int, ...]] = [(i,) for i in range(len(weighing.paths))]
        if choice.considered_split:
            indices.append(choice.considered_split)
        built = [
            self.chosen if parts == choice.indices else self._candidate(parts) for parts in indices
        ]
        return tuple(sorted(built, key=lambda c: (bool(c.rejected), -c.score)))

    @cached_property
    def chosen(self) -> Candidate:
        return self._candidate(self._parts[1].indices)

    @cached_property
    def reason(self) -> str:
        weighing, (indices, why, _) = self._parts
        if why is Why.ONLY_PATH:
            return str(why.value)
        direct, text = weighing.loads[0], str(why.value)
        share = f"{weighing.config.relay_benefit_margin:.0%}"
        if why is Why.DIRECT:
            text = f"no other path beats the first by {share}"
        elif why is Why.RELAY:
            text = (
                f"{rate_text(self.estimated_bandwidth)} to spare against {rate_text(direct.spare)}"
            )
        elif why is Why.SPLIT:
            single = max(weighing.loads[i].spare for i in indices)
            text += f": {rate_text(self.estimated_bandwidth)} to spare against {rate_text(single)}"
        if direct.crowded_link >= 0:
            text += f"; {self._crowded(direct.crowded_link)}"
        return text

    @property
    def _parts(self) -> tuple[Weighing, Choice]:
        parts: tuple[Weighing, Choice] = self.__dict__["_of"]
        return parts

    def _crowded(self, index: int) -> str:
        weighing = self._parts[0]
        link = weighing.links[index]
        limit = weighing.config.threshold(link.link_type)
        return f"{link} at {weighing.utilization[index]:.0%}, threshold {limit:.0%}"

    def _candidate(self, indices: tuple[int, ...]) -> Candidate:
        weighing, request = self._parts[0], self.request
        load = split_load(
            weighing,
            indices,
            request.data_bytes,
            block_bytes=request.block_bytes,
            ttft_sensitive=request.ttft_sensitive,
        )
        config = weighing.config
        rejected = ""
        if len(indices) == 1:
            crowded = weighing.loads[indices[0]].crowded_link
            # The first candidate is the fallback: it is weighed like the others, never rejected.
            rejected = self._crowded(crowded) if crowded >= 0 and indices != (0,) else ""
            path_type = weighing.paths[indices[0]].path_type
        else:
            path_type = PathType.SPLIT_PATH
        latency = 0.0
        if request.ttft_sensitive:
            latency = latency_term(load.seconds, config.ttft_budget_ms / 1e3)
        terms = score_terms(
            config,
            bandwidth=load.bandwidth,
            congestion=load.congestion,
            hops=load.hops,
            qos_risk=load.qos_risk,
            latency=latency,
        )
        return Candidate(
            path_type=path_type,
            parts=self._path_parts(indices),
            score=load.score,
            terms=terms,
            estimated_bandwidth=load.spare,
            rejected=rejected,
        )

    def _path_parts(self, indices: tuple[int, ...]) -> tuple[PathPart, ...]:
        weighing, request = self._parts[0], self.request
        if len(indices) == 1:
            hops = weighing.paths[indices[0]].hops
            return (PathPart(hops, request.data_bytes, request.runs),)
        rates = [weighing.loads[i].spare for i in indices]
        if request.runs:
            dealt = split_runs(request.runs, rates)
            sizes = [sum(r.num_blocks for r in part) * request.block_bytes for part in dealt]
        else:
            sizes = split_bytes(request.data_bytes, request.block_bytes, rates)
            dealt = [()] * len(sizes)
        return tuple(
            PathPart(weighing.paths[i].hops, size, runs)
            for i, size, runs in zip(indices, sizes, dealt, strict=True)
            if size
        )
