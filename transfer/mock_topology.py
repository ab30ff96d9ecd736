"""Topologies for development and tests without the hardware.

    mock_dgx(8): gpu0 ... gpu7    every pair with its own NVLink, 25 GB/s
                 pcie             every GPU on it, 25 GB/s; host memory, 25 GB/s
                 host             process memory, on shared memory `shm`, 10 GB/s
                 storage          behind the host's storage interface, 3 GB/s
    mock_two_hosts(4):            two of those, names prefixed by `host0/` and `host1/`; for each
                                  GPU a compute interface on one fabric, 25 GB/s; one storage

Pairwise NVLink is what 4-GPU A100 hosts have. Hosts with an NVSwitch are different: see
`transfer.topology`.
"""

from __future__ import annotations

from transfer.graph import LinkType, NodeType
from transfer.topology import Topology

NVLINK_GB_PER_S = 25.0
PCIE_GB_PER_S = 25.0
CNIC_GB_PER_S = 25.0
SHARED_MEMORY_GB_PER_S = 10.0
STORAGE_GB_PER_S = 3.0


def mock_dgx(num_gpus: int) -> Topology:
    """Raises ValueError unless `num_gpus` is at least 1."""
    topology = Topology()
    topology.add_node("storage", NodeType.STORAGE)
    _add_host(topology, num_gpus, "", "")
    return topology


def mock_two_hosts(gpus_per_host: int) -> Topology:
    """Raises ValueError unless `gpus_per_host` is at least 1."""
    topology = Topology()
    topology.add_node("storage", NodeType.STORAGE)
    topology.add_node("fabric", NodeType.NETWORK)
    for host in ("host0", "host1"):
        prefix = f"{host}/"
        gpus = _add_host(topology, gpus_per_host, host, prefix)
        for index, place in enumerate([*gpus, f"{prefix}pcie"]):
            nic = f"{prefix}nic{index}"
            topology.add_node(nic, NodeType.NETWORK, host=host)
            topology.add_link(place, nic, LinkType.CNIC, bandwidth=CNIC_GB_PER_S)
            topology.add_link(nic, "fabric", LinkType.RDMA, bandwidth=CNIC_GB_PER_S)
    return topology


def _add_host(topology: Topology, num_gpus: int, host: str, prefix: str) -> list[str]:
    if num_gpus < 1:
        raise ValueError(f"{num_gpus=} must be at least 1")
    pcie, memory, shared = f"{prefix}pcie", f"{prefix}host", f"{prefix}shm"
    gpus = [f"{prefix}gpu{i}" for i in range(num_gpus)]
    for gpu in gpus:
        topology.add_node(gpu, NodeType.GPU, host=host)
    topology.add_node(memory, NodeType.HOST, host=host)
    topology.add_node(pcie, NodeType.SWITCH, host=host)
    topology.add_node(shared, NodeType.SHARED_MEMORY, host=host)
    for i, gpu in enumerate(gpus):
        for other in gpus[i + 1 :]:
            topology.add_link(gpu, other, LinkType.NVLINK, bandwidth=NVLINK_GB_PER_S)
        topology.add_link(gpu, pcie, LinkType.PCIE, bandwidth=PCIE_GB_PER_S)
    topology.add_link(memory, pcie, LinkType.PCIE, bandwidth=PCIE_GB_PER_S)
    topology.add_link(memory, shared, LinkType.SHARED_MEMORY, bandwidth=SHARED_MEMORY_GB_PER_S)
    topology.add_link(pcie, "storage", LinkType.SNIC, bandwidth=STORAGE_GB_PER_S)
    return gpus
