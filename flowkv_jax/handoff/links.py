"""Which ways hand-offs may take, and the selector that weighs them. No JAX."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from flowkv_jax.errors import ConfigError
from transfer.node_agent import NodeAgent
from transfer.path_selector import PathSelector
from transfer.topology_file import TopologyFileError, read_topology
from transfer.types import PathDecision, TransferRequest


class LinkSelector:
    """Chooses paths over the topology of a file whose nodes are named as those of the cluster are.

    Samples the links' load in the background until closed, as far as this machine can tell it.

    Raises:
        ConfigError: the file cannot be read, or says what it may not.
    """

    def __init__(self, path: str) -> None:
        try:
            topology = read_topology(Path(path))
        except (OSError, TopologyFileError) as error:
            raise ConfigError(
                f"handoff_links={path!r}: {error}", parameter="handoff_links", value=path
            ) from error
        self._agent = NodeAgent(topology)
        self._agent.start()
        self._selector = PathSelector(topology, self._agent)

    def select(self, request: TransferRequest) -> PathDecision:
        """See `PathSelector.select`."""
        return self._selector.select(request)

    def observe(self, hops: Sequence[str], data_bytes: int, seconds: float) -> None:
        """See `PathSelector.observe`."""
        self._selector.observe(hops, data_bytes, seconds)

    def close(self) -> None:
        """End the sampling. Idempotent."""
        self._agent.stop()
