"""From a decision of the selector to legs with backends. Decides only; imports no JAX.

Backend of a leg, unless the caller names one:

    both pools in this process       local
    a path through storage           storage
    same host                        shared_memory
    otherwise the first that serves  nixl, collective, then jax_pull for JAX pools, tcp
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from transfer.backends.base import LinkBackend, Peer
from transfer.errors import NoPath
from transfer.pool_access import PoolAccess
from transfer.types import BlockRun, Candidate, PathType, TransferRequest

LOCAL = "local"


@dataclass(frozen=True, slots=True)
class Leg:
    """One leg of a route: generations are those of its own runs."""

    hops: tuple[str, ...]
    runs: tuple[BlockRun, ...]
    backend: str
    src_generations: tuple[int, ...] = ()
    dst_generations: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Route:
    """A path that can be executed."""

    path_type: PathType
    legs: tuple[Leg, ...]

    def __str__(self) -> str:
        ways = [f"{' -> '.join(leg.hops)} by {leg.backend}" for leg in self.legs]
        return f"{self.path_type}: {' and '.join(ways)}"


@dataclass(frozen=True, slots=True)
class Way:
    """What there is to choose from for one pair of nodes.

    Attributes:
        peer: None where both pools are in this process.
        backends: of this engine, by name.
        source: the source's pool.
    """

    peer: Peer | None
    backends: Mapping[str, LinkBackend]
    source: PoolAccess


def routes_for(
    request: TransferRequest, candidates: Sequence[Candidate], way: Way, backend: str | None
) -> list[Route]:
    """Ways to execute a request, best first.

    Args:
        candidates: the selector's, chosen one first; empty where there is no selector.
        backend: name of the backend to use; None to choose.

    Raises:
        NoPath: none can be executed; says why for each backend.
    """
    routes, whys = [], []
    tried: list[tuple[PathType, Sequence[tuple[tuple[str, ...], tuple[BlockRun, ...]]]]] = [
        (c.path_type, [(part.hops, part.runs or request.runs) for part in c.parts])
        for c in candidates
    ]
    if not tried:
        tried = [(PathType.DIRECT, [((request.src, request.dst), request.runs)])]
    for path_type, parts in tried:
        try:
            names = _backends(path_type, way, backend)
        except NoPath as error:
            whys.append(f"{path_type}: {error}")
            continue
        first, *others = names
        routes.append(_route(request, path_type, parts, first))
        # With one candidate only, the other backends are what is left to try.
        if len(tried) == 1:
            routes.extend(_route(request, path_type, parts, name) for name in others)
    if not routes:
        raise NoPath("; ".join(whys))
    return routes


def _backends(path_type: PathType, way: Way, named: str | None) -> list[str]:
    """Names that can serve, best first; at least one, or `NoPath`."""
    if way.peer is None:
        if named not in (None, LOCAL):
            raise NoPath(f"both nodes are in this process: backend {LOCAL!r}, not {named!r}")
        return [LOCAL]
    if named is not None:
        order = [named]
    elif path_type is PathType.STORAGE_RELAY:
        order = ["storage"]
    else:
        pull = ["jax_pull", "tcp"] if way.source.is_device_pool else ["tcp"]
        order = (["shared_memory"] if way.peer.same_host else []) + ["nixl", "collective", *pull]
    found = [name for name in order if name in way.backends and not _why_not(name, way, way.peer)]
    if not found:
        raise NoPath(", ".join(f"{name}: {_why_not(name, way, way.peer)}" for name in order))
    return found


def _why_not(name: str, way: Way, peer: Peer) -> str:
    backend = way.backends.get(name)
    if backend is None:
        return f"not set up here; there are {sorted(way.backends)}"
    return backend.why_not(peer)


def _route(
    request: TransferRequest,
    path_type: PathType,
    parts: Sequence[tuple[tuple[str, ...], tuple[BlockRun, ...]]],
    backend: str,
) -> Route:
    legs = []
    for hops, runs in parts:
        src = _generations(request.runs, request.src_generations, runs)
        dst = _generations(request.runs, request.dst_generations, runs)
        legs.append(Leg(hops, runs, backend, src, dst))
    return Route(path_type, tuple(legs))


def _generations(
    all_runs: Sequence[BlockRun],
    generations: tuple[int, ...],
    runs: Sequence[BlockRun],
) -> tuple[int, ...]:
    """Those of `generations`, given for `all_runs` in order, that belong to `runs`."""
    if not generations or runs == all_runs:
        return generations
    by_destination = {}
    position = 0
    for run in all_runs:
        for i in range(run.num_blocks):
            by_destination[run.dst_start + i] = generations[position + i]
        position += run.num_blocks
    return tuple(by_destination[run.dst_start + i] for run in runs for i in range(run.num_blocks))
