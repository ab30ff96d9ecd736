"""The machine as a graph: where bytes can lie, and the links they cross.

A node is a *place*, where bytes lie (GPU, a process's memory, storage), or a *conduit*, which they
only cross (NVLink or PCIe switch, shared memory, network interface, fabric). Links are directed,
because every medium here is full duplex; `add_link` adds both directions. A path names the places
it visits, its hops, which is what a backend executes hop by hop, and the links it crosses, which
is what its load and its disjointness from other paths depend on.

Two GPUs under one NVSwitch have no link of their own: their path crosses each GPU's port, and a
relay through a third GPU would cross the same ports. Such relays are no candidates.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path as FilePath
from typing import TYPE_CHECKING

from transfer.errors import NoPath, UnknownNode
from transfer.graph import DEFAULT_LATENCY_US, Link, LinkType, Node, NodeType, Path
from transfer.path_enumeration import enumerate_paths

if TYPE_CHECKING:
    from transfer.nvml_reader import NvmlReader
    from transfer.sysfs_reader import SysfsReader


class Topology:
    """Nodes and links, and the paths between them, enumerated once.

    Nodes and links are only added. A link's index never changes. Adding forgets the enumerated
    paths and moves `revision`. Threads may read while one adds.
    """

    def __init__(self) -> None:
        self._nodes: dict[str, Node] = {}
        self._links: list[Link] = []
        self._outgoing: dict[str, list[Link]] = {}
        self._paths: dict[tuple[str, str], tuple[Path, ...]] = {}
        self._revision = 0
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"Topology({len(self._nodes)} nodes, {len(self._links)} links)"

    @property
    def revision(self) -> int:
        """Changes whenever a node or a link is added."""
        return self._revision

    @property
    def nodes(self) -> tuple[Node, ...]:
        """In the order in which they were added."""
        return tuple(self._nodes.values())

    @property
    def links(self) -> Sequence[Link]:
        """By index. Read only."""
        return self._links

    @property
    def num_cached_paths(self) -> int:
        return sum(map(len, list(self._paths.values())))

    def node(self, name: str) -> Node:
        """Raises `UnknownNode`."""
        try:
            return self._nodes[name]
        except KeyError:
            known = ", ".join(self._nodes) or "none"
            raise UnknownNode(f"unknown node {name!r}; there are: {known}") from None

    def node_names(self, *node_types: NodeType) -> list[str]:
        """Names of the nodes of these types, in the order in which they were added."""
        return [node.name for node in self._nodes.values() if node.node_type in node_types]

    def gpu_nodes(self) -> list[str]:
        """Names of the GPUs, host by host, ascending."""
        return self.node_names(NodeType.GPU)

    def outgoing(self, name: str) -> Sequence[Link]:
        """Links that leave a node, in the order in which they were added."""
        return self._outgoing[self.node(name).name]

    def link_between(self, src: str, dst: str) -> Link:
        """The link from `src` to `dst`.

        Raises:
            UnknownNode: a name is no node.
            ValueError: no link joins them.
        """
        self.node(dst)
        for link in self.outgoing(src):
            if link.dst == dst:
                return link
        raise ValueError(f"no link from {src!r} to {dst!r}")

    def add_node(self, name: str, node_type: NodeType, *, host: str = "") -> Node:
        """Raises ValueError if the name is empty or taken."""
        if not name:
            raise ValueError("a node's name must not be empty")
        with self._lock:
            if name in self._nodes:
                raise ValueError(f"node {name!r} is already in the topology")
            node = self._nodes[name] = Node(name, node_type, host)
            self._outgoing[name] = []
            self._forget_paths()
        return node

    def add_link(
        self,
        a: str,
        b: str,
        link_type: LinkType,
        *,
        bandwidth: float,
        latency_us: float | None = None,
        counters: tuple[tuple[str, ...], tuple[str, ...]] = ((), ()),
    ) -> None:
        """Join two nodes, both ways.

        Args:
            bandwidth: GB/s in each direction.
            latency_us: one way; None for the medium's usual one.
            counters: byte counters of the direction a to b, and of b to a.

        Raises:
            UnknownNode: a name is no node.
            ValueError: they are one node or joined already, or a number is out of range.
        """
        self.node(a), self.node(b)
        if latency_us is None:
            latency_us = DEFAULT_LATENCY_US[link_type]
        if not 0 < bandwidth < float("inf"):
            raise ValueError(f"{bandwidth=} of link {a!r} - {b!r} must be above 0 GB/s and finite")
        if not 0 <= latency_us < float("inf"):
            raise ValueError(f"{latency_us=} of link {a!r} - {b!r} must be 0 or more, and finite")
        if a == b:
            raise ValueError(f"a link joins two nodes, not {a!r} with itself")
        with self._lock:
            if any(link.dst == b for link in self._outgoing[a]):
                raise ValueError(f"{a!r} and {b!r} are joined already")
            for src, dst, names in ((a, b, counters[0]), (b, a, counters[1])):
                index = len(self._links)
                link = Link(index, src, dst, link_type, bandwidth, latency_us, names)
                self._links.append(link)
                self._outgoing[src].append(link)
            self._forget_paths()

    def add_process(self, name: str, *, host: str = "") -> Node:
        """A process's memory as a place, joined to its host's conduits and storage.

        It gets the links of the first place of type HOST on that host, which discovery and the
        mock factories make. A process of another machine is a node of type HOST with that machine's
        name as its `host`, and a link to `network` or `fabric`.

        Raises:
            ValueError: the name is taken, or the host has no such place.
        """
        for template in self.nodes:
            if template.node_type is NodeType.HOST and template.host == host:
                break
        else:
            raise ValueError(f"no place of type 'host' on host {host!r} to attach {name!r} to")
        node = self.add_node(name, NodeType.HOST, host=host)
        for link in list(self.outgoing(template.name)):
            back = self.link_between(link.dst, template.name)
            self.add_link(
                name,
                link.dst,
                link.link_type,
                bandwidth=link.bandwidth,
                latency_us=link.latency_us,
                counters=(link.counters, back.counters),
            )
        return node

    def paths(self, src: str, dst: str) -> tuple[Path, ...]:
        """Candidate paths: the direct one, relays through GPUs, relays through storage.

        Raises:
            UnknownNode: a name is no node.
            NoPath: nothing joins the two.
            ValueError: the two are one, or bytes cannot lie at one of them.
        """
        found = self._paths.get((src, dst))
        if found is not None:
            return found
        for name in (src, dst):
            if not self.node(name).node_type.is_place:
                raise ValueError(
                    f"{name!r} is a {self.node(name).node_type.value} node: bytes only cross it"
                )
        if src == dst:
            raise ValueError(f"source and destination are both {src!r}: nothing to transfer")
        with self._lock:
            found = tuple(enumerate_paths(self, src, dst))
            if not found:
                raise NoPath(f"no path from {src!r} to {dst!r}")
            self._paths[src, dst] = found
        return found

    def enumerate_all(self, names: Iterable[str] | None = None) -> int:
        """Enumerate paths between all GPUs (or `names`) now; returns how many are cached."""
        names = self.gpu_nodes() if names is None else list(names)
        for src in names:
            for dst in names:
                if src != dst:
                    self.paths(src, dst)
        return self.num_cached_paths

    def discover(
        self, nvml: NvmlReader | None = None, sysfs: SysfsReader | None = None
    ) -> Topology:
        """Fill this topology with what the machine has; returns itself.

        GPUs, NVLink and PCIe come from NVML, network interfaces and NUMA nodes from sysfs; a
        machine with neither still has memory, shared memory, a network and storage.

        Args:
            nvml, sysfs: where to read; None for this machine's own.

        Raises:
            ValueError: the topology has nodes already.
        """
        from transfer.discovery import discover

        discover(self, nvml, sysfs)
        return self

    @staticmethod
    def make_mock_dgx(num_gpus: int = 8) -> Topology:
        """One host whose GPUs are joined pairwise; see `transfer.mock_topology`."""
        from transfer.mock_topology import mock_dgx

        return mock_dgx(num_gpus)

    @staticmethod
    def make_mock_two_hosts(gpus_per_host: int = 4) -> Topology:
        """Two such hosts, an interface for each GPU, one storage; see `transfer.mock_topology`."""
        from transfer.mock_topology import mock_two_hosts

        return mock_two_hosts(gpus_per_host)

    @staticmethod
    def from_file(path: str | os.PathLike[str]) -> Topology:
        """A topology from YAML; see `transfer.topology_file`."""
        from transfer.topology_file import read_topology

        return read_topology(FilePath(path))

    def _forget_paths(self) -> None:
        self._paths = {}
        self._revision += 1
