"""Nouns of the topology graph: nodes, directed links, and paths over them."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from transfer.types import PathType


class NodeType(enum.Enum):
    """What a node is; `is_place` where bytes can lie there."""

    GPU = "gpu"
    HOST = "host"
    STORAGE = "storage"
    SHARED_MEMORY = "shared_memory"
    NETWORK = "network"
    SWITCH = "switch"

    @property
    def is_place(self) -> bool:
        return self in (NodeType.GPU, NodeType.HOST, NodeType.STORAGE)


class LinkType(enum.Enum):
    """The medium of a link. CNIC and SNIC lead to a compute and to a storage interface."""

    NVLINK = "nvlink"
    PCIE = "pcie"
    CNIC = "cnic"
    RDMA = "rdma"
    TCP = "tcp"
    SNIC = "snic"
    SHARED_MEMORY = "shared_memory"


# One direction, one way, microseconds: the order of magnitude that software sees.
DEFAULT_LATENCY_US = {
    LinkType.NVLINK: 2.0,
    LinkType.PCIE: 3.0,
    LinkType.CNIC: 3.0,
    LinkType.RDMA: 2.0,
    LinkType.TCP: 25.0,
    LinkType.SNIC: 200.0,
    LinkType.SHARED_MEMORY: 1.0,
}


@dataclass(frozen=True, slots=True)
class Node:
    """A place or a conduit.

    Attributes:
        name: unique in the topology.
        node_type: what it is.
        host: the machine it belongs to; empty for what belongs to none (fabric, shared storage).
    """

    name: str
    node_type: NodeType
    host: str = ""


@dataclass(frozen=True, slots=True)
class Link:
    """One direction of a connection.

    Attributes:
        index: position in `Topology.links`.
        src, dst: names of its ends.
        link_type: its medium.
        bandwidth: nominal, GB/s (1e9 bytes) in this direction.
        latency_us: one way.
        counters: names of the byte counters whose sum is this link's traffic; see
            `transfer.node_agent`. Empty where nothing measures it.
    """

    index: int
    src: str
    dst: str
    link_type: LinkType
    bandwidth: float
    latency_us: float
    counters: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.link_type.value} {self.src}->{self.dst}"


@dataclass(frozen=True, slots=True)
class Path:
    """One way from a place to another.

    Attributes:
        path_type: its kind; never `SPLIT_PATH`, which is several of these.
        hops: the places, from source to destination.
        legs: for each hop the indices of the links it crosses, in order.
        links: all of those.
        latency_s: sum over the links.
        bandwidth: nominal, GB/s: that of the slowest link.
    """

    path_type: PathType
    hops: tuple[str, ...]
    legs: tuple[tuple[int, ...], ...]
    links: tuple[int, ...]
    latency_s: float
    bandwidth: float
