"""Which paths between two places are worth weighing. Pure.

A leg goes from place to place over conduits, the shortest way; it is what one backend call
executes. Candidates are the direct leg, relays through one GPU of either host, relays through a
GPU of each host when the two differ, and relays through storage. Process memory relays nothing,
and nothing between two processes' memories goes through a GPU.
A GPU relay that crosses every link of the direct leg cannot be better and is left out; storage
stays, as the way left when the direct leg fails.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from itertools import pairwise
from typing import TYPE_CHECKING

from transfer.graph import Link, Node, NodeType, Path
from transfer.types import PathType

if TYPE_CHECKING:
    from transfer.topology import Topology

MAX_PATHS = 32


def enumerate_paths(topology: Topology, src: str, dst: str) -> list[Path]:
    """About `MAX_PATHS` at most: the direct one if there is one, GPU relays best first, storage."""
    legs = _Legs(topology)
    direct = legs.path((src, dst))
    found = [] if direct is None else [direct]
    relays: list[Path] = []
    storage: list[Path] = []
    for hops in _relay_hops(topology, src, dst):
        path = legs.path(hops)
        if path is None or len(set(path.links)) < len(path.links):
            continue
        if path.path_type is PathType.STORAGE_RELAY:
            storage.append(path)
        elif direct is None or not set(direct.links) <= set(path.links):
            relays.append(path)
    relays.sort(key=lambda path: (len(path.hops), path.latency_s, -path.bandwidth))
    return found + relays[: MAX_PATHS - len(found) - len(storage)] + storage


def _relay_hops(topology: Topology, src: str, dst: str) -> Iterator[tuple[str, ...]]:
    ends = (src, dst)
    has_gpu = any(topology.node(name).node_type is NodeType.GPU for name in ends)
    src_host, dst_host = topology.node(src).host, topology.node(dst).host
    gpus: dict[str, list[str]] = {src_host: [], dst_host: []}
    for node in topology.nodes:
        if node.name in ends:
            continue
        if node.node_type is NodeType.STORAGE:
            yield (src, node.name, dst)
        elif has_gpu and node.node_type is NodeType.GPU and node.host in gpus:
            gpus[node.host].append(node.name)
            yield (src, node.name, dst)
    if src_host != dst_host:
        # Rail by rail: every interface is tried once on each side, not every pair of them.
        for a, b in zip(gpus[src_host], gpus[dst_host], strict=False):
            yield (src, a, b, dst)


class _Legs:
    """Shortest conduit-only ways out of each place, found once."""

    def __init__(self, topology: Topology) -> None:
        self._topology = topology
        self._from: dict[str, dict[str, list[Link]]] = {}

    def path(self, hops: tuple[str, ...]) -> Path | None:
        legs = []
        for a, b in pairwise(hops):
            leg = self._reach(a).get(b)
            if leg is None:
                return None
            legs.append(leg)
        crossed = [link for leg in legs for link in leg]
        return Path(
            path_type=self._type(hops),
            hops=hops,
            legs=tuple(tuple(link.index for link in leg) for leg in legs),
            links=tuple(link.index for link in crossed),
            latency_s=sum(link.latency_us for link in crossed) / 1e6,
            bandwidth=min(link.bandwidth for link in crossed),
        )

    def _type(self, hops: tuple[str, ...]) -> PathType:
        nodes = [self._topology.node(name) for name in hops]
        if any(_is_storage(node) for node in nodes[1:-1]):
            return PathType.STORAGE_RELAY
        ends = (nodes[0], nodes[-1])
        if ends[0].host != ends[1].host and not any(_is_storage(node) for node in ends):
            return PathType.CROSS_NODE_RELAY
        return PathType.DIRECT if len(hops) == 2 else PathType.NVLINK_RELAY

    def _reach(self, start: str) -> dict[str, list[Link]]:
        """Breadth first, over conduits, to every place: the shortest, quickest, widest way."""
        if start in self._from:
            return self._from[start]
        legs: dict[str, list[Link]] = {start: []}
        queue = deque([start])
        while queue:
            name = queue.popleft()
            if name != start and self._topology.node(name).node_type.is_place:
                continue
            for link in self._topology.outgoing(name):
                leg = [*legs[name], link]
                known = legs.get(link.dst)
                if known is None:
                    legs[link.dst] = leg
                    queue.append(link.dst)
                elif len(known) == len(leg) and _rank(leg) < _rank(known):
                    legs[link.dst] = leg
        del legs[start]
        self._from[start] = legs
        return legs


def _is_storage(node: Node) -> bool:
    return node.node_type is NodeType.STORAGE


def _rank(leg: list[Link]) -> tuple[float, float]:
    return sum(link.latency_us for link in leg), -min(link.bandwidth for link in leg)
