"""Which ways hand-offs may take, and the selector that weighs them. No JAX."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path as FilePath

from flowkv_jax.errors import ConfigError
from flowkv_jax.load import LinkLoad
from transfer.errors import NoPath, UnknownNode
from transfer.graph import Path
from transfer.node_agent import NodeAgent
from transfer.path_selector import PathSelector
from transfer.topology_file import TopologyFileError, read_topology
from transfer.types import PathDecision, PathType, TransferRequest


class LinkSelector:
    """Chooses paths over the topology of a file whose nodes are named as those of the cluster are.

    Samples the links' load in the background until closed, as far as this machine can tell it.

    Raises:
        ConfigError: the file cannot be read, or says what it may not.
    """

    def __init__(self, path: str) -> None:
        try:
            topology = read_topology(FilePath(path))
        except (OSError, TopologyFileError) as error:
            raise ConfigError(
                f"handoff_links={path!r}: {error}", parameter="handoff_links", value=path
            ) from error
        self._topology = topology
        self._agent = NodeAgent(topology)
        self._agent.start()
        self._selector = PathSelector(topology, self._agent)

    def select(self, request: TransferRequest) -> PathDecision:
        """See `PathSelector.select`."""
        return self._selector.select(request)

    def observe(self, hops: Sequence[str], data_bytes: int, seconds: float) -> None:
        """See `PathSelector.observe`."""
        self._selector.observe(hops, data_bytes, seconds)

    def loads(self, src: str, dsts: Iterable[str]) -> tuple[LinkLoad, ...]:
        """How busy the ways from a node to others are, as far as the file tells of them and they
        are joined directly. Any thread."""
        found = []
        for dst in dsts:
            if dst == src:
                continue
            # ValueError: what is named so in the file holds no bytes.
            with suppress(UnknownNode, NoPath, ValueError):
                path = self._topology.paths(src, dst)[0]
                if path.path_type is PathType.DIRECT:
                    found.append(self._load(dst, path))
        return tuple(found)

    def _load(self, dst: str, path: Path) -> LinkLoad:
        links, busy = self._topology.links, self._agent.utilization
        use = {i: busy[i] for i in path.links if links[i].counters and i < len(busy)}
        index = max(use or path.links, key=lambda i: use.get(i, 0.0))
        medium = links[index].link_type
        threshold = self._selector.config.threshold(medium)
        return LinkLoad(dst, medium.value, use.get(index), threshold, path.bandwidth * 1e9)

    def close(self) -> None:
        """End the sampling. Idempotent."""
        self._agent.stop()
