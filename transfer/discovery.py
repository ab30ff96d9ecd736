"""This machine as a topology.

    gpu0 ...       NVLink to its peers, or to `nvswitch`; PCIe to its NUMA node
    numa0 ...      one conduit a NUMA node, joined to one another, to `host` and to `storage`
    mlx5_0 ...     on its NUMA node, and on the GPUs below the same PCIe switch; RDMA to `fabric`
    eth0 ...       on its NUMA node; TCP to `network`
    host, shm      memory of processes, and what joins them

Bandwidths are nominal: NVML's and sysfs's link speeds where they say, else the constants below,
which observed transfers correct. `Topology.add_process` adds the places of further processes.
"""

from __future__ import annotations

from collections import defaultdict
from itertools import combinations
from typing import TYPE_CHECKING

from transfer.graph import LinkType, NodeType
from transfer.nvml_reader import Gpu, NvLink, NvmlReader
from transfer.sysfs_reader import SysfsReader

if TYPE_CHECKING:
    from transfer.topology import Topology

NUMA_GB_PER_S = 20.0
HOST_MEMORY_GB_PER_S = 50.0
SHARED_MEMORY_GB_PER_S = 10.0
STORAGE_GB_PER_S = 2.0
NETWORK_GB_PER_S = 1.25
NIC_SLOT_GB_PER_S = 32.0


def discover(
    topology: Topology, nvml: NvmlReader | None = None, sysfs: SysfsReader | None = None
) -> None:
    """Fill an empty topology; see `Topology.discover`."""
    if topology.nodes:
        raise ValueError(f"discovery fills an empty topology; this has {len(topology.nodes)} nodes")
    nvml = nvml or NvmlReader.open()
    sysfs = sysfs or SysfsReader()
    gpus = nvml.gpus() if nvml else []
    for gpu in gpus:
        topology.add_node(gpu.name, NodeType.GPU)
    topology.add_node("host", NodeType.HOST)
    topology.add_node("storage", NodeType.STORAGE)
    topology.add_node("shm", NodeType.SHARED_MEMORY)
    topology.add_link("host", "shm", LinkType.SHARED_MEMORY, bandwidth=SHARED_MEMORY_GB_PER_S)
    _add_numa_nodes(topology, sysfs.numa_nodes())
    for gpu in gpus:
        numa = _numa_name(topology, sysfs.pci_numa_node(gpu.pci_bus_id))
        counters = ((f"{gpu.name}/pcie/tx",), (f"{gpu.name}/pcie/rx",))
        topology.add_link(
            gpu.name, numa, LinkType.PCIE, bandwidth=gpu.pcie_bandwidth, counters=counters
        )
    _add_nvlinks(topology, gpus)
    _add_rdma(topology, sysfs, gpus)
    _add_network(topology, sysfs)


def _add_numa_nodes(topology: Topology, numbers: list[int]) -> None:
    names = [f"numa{number}" for number in numbers]
    for name in names:
        topology.add_node(name, NodeType.SWITCH)
        topology.add_link("host", name, LinkType.PCIE, bandwidth=HOST_MEMORY_GB_PER_S)
        topology.add_link(name, "storage", LinkType.SNIC, bandwidth=STORAGE_GB_PER_S)
    for a, b in combinations(names, 2):
        topology.add_link(a, b, LinkType.PCIE, bandwidth=NUMA_GB_PER_S)


def _numa_name(topology: Topology, number: int) -> str:
    known = [n for n in topology.node_names(NodeType.SWITCH) if n.startswith("numa")]
    name = f"numa{number}"
    return name if name in known else known[0]


def _add_nvlinks(topology: Topology, gpus: list[Gpu]) -> None:
    by_bus_id = {gpu.pci_bus_id: gpu for gpu in gpus}
    for gpu in gpus:
        towards: dict[str, list[NvLink]] = defaultdict(list)
        for link in gpu.nvlinks:
            if link.peer_pci_bus_id is None:
                towards["nvswitch"].append(link)
            elif (peer := by_bus_id.get(link.peer_pci_bus_id)) and peer.index > gpu.index:
                # The other end reports the same link; it is added once, from the lower index.
                towards[peer.name].append(link)
        for other, links in towards.items():
            if other == "nvswitch" and other not in topology.node_names(NodeType.SWITCH):
                topology.add_node(other, NodeType.SWITCH)
            names = [f"{gpu.name}/nvlink{link.index}" for link in links]
            topology.add_link(
                gpu.name,
                other,
                LinkType.NVLINK,
                bandwidth=sum(link.bandwidth for link in links),
                counters=(tuple(f"{n}/tx" for n in names), tuple(f"{n}/rx" for n in names)),
            )


def _add_rdma(topology: Topology, sysfs: SysfsReader, gpus: list[Gpu]) -> None:
    nics = sysfs.rdma_nics()
    if nics:
        topology.add_node("fabric", NodeType.NETWORK)
    ancestors = {gpu.name: sysfs.pci_ancestors(gpu.pci_bus_id) for gpu in gpus}
    seen: set[str] = set()
    for nic in nics:
        name = nic.name if nic.name not in seen else f"{nic.name}:{nic.port}"
        seen.add(nic.name)
        topology.add_node(name, NodeType.NETWORK)
        counters = ((f"{nic.name}/{nic.port}/tx",), (f"{nic.name}/{nic.port}/rx",))
        topology.add_link(name, "fabric", LinkType.RDMA, bandwidth=nic.bandwidth, counters=counters)
        numa = _numa_name(topology, nic.numa_node)
        topology.add_link(numa, name, LinkType.CNIC, bandwidth=NIC_SLOT_GB_PER_S)
        own = sysfs.pci_ancestors(nic.pci_bus_id) if nic.pci_bus_id else ()
        for gpu in gpus:
            # Host bridge and root port in common: a PCIe switch lies above both.
            if len(own) > 1 and own[:2] == ancestors[gpu.name][:2]:
                topology.add_link(gpu.name, name, LinkType.CNIC, bandwidth=gpu.pcie_bandwidth)


def _add_network(topology: Topology, sysfs: SysfsReader) -> None:
    topology.add_node("network", NodeType.NETWORK)
    for interface in sysfs.network_interfaces():
        topology.add_node(interface.name, NodeType.NETWORK)
        numa = _numa_name(topology, interface.numa_node)
        bandwidth = interface.bandwidth or NETWORK_GB_PER_S
        counters = ((f"{interface.name}/tx",), (f"{interface.name}/rx",))
        topology.add_link(numa, interface.name, LinkType.CNIC, bandwidth=NIC_SLOT_GB_PER_S)
        topology.add_link(
            interface.name, "network", LinkType.TCP, bandwidth=bandwidth, counters=counters
        )
