"""Discovery on recorded machines, and on this one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.recorded_machine import RecordedMachine
from transfer import PathType, Topology
from transfer.graph import LinkType, NodeType
from transfer.nvml_reader import sysfs_bus_id
from transfer.sysfs_reader import SysfsReader

Record = Callable[[str], RecordedMachine]


@pytest.fixture
def record(tmp_path: Path) -> Record:
    return lambda name: RecordedMachine(name, tmp_path / "sys")


def discovered(machine: RecordedMachine) -> Topology:
    return Topology().discover(nvml=machine.nvml, sysfs=machine.sysfs)


class TestDgxA100:
    def test_gpus_reach_each_other_through_the_switches(self, record: Record) -> None:
        topology = discovered(record("dgx_a100"))
        assert topology.gpu_nodes() == [f"gpu{i}" for i in range(8)]
        direct = topology.paths("gpu0", "gpu7")[0]
        assert direct.path_type is PathType.DIRECT
        assert direct.bandwidth == 300.0
        assert [str(topology.links[i]) for i in direct.links] == [
            "nvlink gpu0->nvswitch",
            "nvlink nvswitch->gpu7",
        ]

    def test_no_relay_crosses_the_same_ports(self, record: Record) -> None:
        paths = discovered(record("dgx_a100")).paths("gpu0", "gpu7")
        assert [p.path_type for p in paths] == [PathType.DIRECT, PathType.STORAGE_RELAY]

    def test_interfaces_are_near_the_gpus_of_their_switch(self, record: Record) -> None:
        topology = discovered(record("dgx_a100"))
        near = {link.dst for link in topology.outgoing("gpu2") if link.link_type is LinkType.CNIC}
        assert near == {"mlx5_2", "mlx5_3"}
        assert topology.link_between("mlx5_2", "fabric").bandwidth == 25.0

    def test_a_port_that_is_down_is_left_out(self, record: Record) -> None:
        names = discovered(record("dgx_a100")).node_names(NodeType.NETWORK)
        assert "mlx5_4" not in names and "mlx5_9" in names

    def test_only_real_ethernet_counts(self, record: Record) -> None:
        topology = discovered(record("dgx_a100"))
        tcp = [k.src for k in topology.links if k.link_type is LinkType.TCP and k.dst == "network"]
        assert tcp == ["enp225s0f0"]
        assert topology.link_between("enp225s0f0", "network").bandwidth == 12.5

    def test_counters_are_named(self, record: Record) -> None:
        topology = discovered(record("dgx_a100"))
        link = topology.link_between("gpu3", "nvswitch")
        assert link.counters == tuple(f"gpu3/nvlink{i}/tx" for i in range(12))
        assert topology.link_between("nvswitch", "gpu3").counters[0] == "gpu3/nvlink0/rx"
        assert topology.link_between("fabric", "mlx5_0").counters == ("mlx5_0/1/rx",)

    def test_numa_nodes(self, record: Record) -> None:
        topology = discovered(record("dgx_a100"))
        assert topology.link_between("gpu0", "numa3").link_type is LinkType.PCIE
        assert topology.link_between("gpu0", "numa3").bandwidth == pytest.approx(31.5, abs=0.1)


class TestL20:
    def test_pcie_only(self, record: Record) -> None:
        topology = discovered(record("l20_pcie"))
        assert not any(link.link_type is LinkType.NVLINK for link in topology.links)
        near, far = topology.paths("gpu0", "gpu1")[0], topology.paths("gpu0", "gpu3")[0]
        assert near.bandwidth == pytest.approx(31.5, abs=0.1)
        assert far.bandwidth == 20.0  # between the sockets

    def test_an_rdma_port_is_no_tcp_port_too(self, record: Record) -> None:
        topology = discovered(record("l20_pcie"))
        assert topology.link_between("mlx5_bond_0", "fabric").bandwidth == pytest.approx(3.125)
        assert "bond0" not in topology.node_names(NodeType.NETWORK)

    def test_nvlink_pairs(self, record: Record) -> None:
        machine = record("l20_pcie")
        machine.fake.gpus[0] |= {"version": 4, "peers": [1, 1]}
        machine.fake.gpus[1] |= {"version": 4, "peers": [0, 0]}
        topology = discovered(machine)
        link = topology.link_between("gpu1", "gpu0")
        assert (link.link_type, link.bandwidth) == (LinkType.NVLINK, 50.0)
        assert link.counters == ("gpu0/nvlink0/rx", "gpu0/nvlink1/rx")

    def test_a_lost_gpu_is_left_out(self, record: Record) -> None:
        machine = record("l20_pcie")
        machine.fake.lost.add(2)
        assert discovered(machine).gpu_nodes() == ["gpu0", "gpu1", "gpu3"]


class TestNoGpu:
    def test_what_there_always_is(self, record: Record) -> None:
        topology = discovered(record("no_gpu"))
        assert topology.gpu_nodes() == []
        assert topology.node_names(NodeType.HOST) == ["host"]
        assert topology.node_names(NodeType.SHARED_MEMORY) == ["shm"]
        assert topology.node_names(NodeType.NETWORK) == ["network", "eth0"]
        assert topology.node_names(NodeType.STORAGE) == ["storage"]
        assert topology.link_between("eth0", "network").bandwidth == 1.25

    def test_processes_meet_in_shared_memory(self, record: Record) -> None:
        topology = discovered(record("no_gpu"))
        topology.add_process("prefill")
        topology.add_process("decode")
        direct, storage = topology.paths("prefill", "decode")
        assert [str(topology.links[i]) for i in direct.links] == [
            "shared_memory prefill->shm",
            "shared_memory shm->decode",
        ]
        assert storage.hops == ("prefill", "storage", "decode")

    def test_a_process_elsewhere(self, record: Record) -> None:
        topology = discovered(record("no_gpu"))
        topology.add_process("prefill")
        topology.add_node("decode", NodeType.HOST, host="other")
        topology.add_link("decode", "network", LinkType.TCP, bandwidth=2.5)
        path = topology.paths("prefill", "decode")[0]
        assert path.path_type is PathType.CROSS_NODE_RELAY
        assert path.bandwidth == 1.25

    def test_this_machine(self) -> None:
        topology = Topology().discover()
        assert {"host", "shm", "storage", "network"} <= {node.name for node in topology.nodes}

    def test_only_an_empty_topology_is_filled(self) -> None:
        with pytest.raises(ValueError, match="this has 12 nodes"):
            Topology.make_mock_dgx(8).discover()


class TestReaders:
    def test_bus_ids(self) -> None:
        assert sysfs_bus_id("00000000:B7:00.0") == "0000:b7:00.0"
        assert sysfs_bus_id(b"0000:0c:00.1") == "0000:0c:00.1"

    def test_nvlink_traffic_in_bytes(self, record: Record) -> None:
        machine = record("dgx_a100")
        machine.fake.traffic_kib[5, 139, 11] = 3
        reading = machine.nvml.read()
        assert reading.counters["gpu5/nvlink11/rx"] == 3072
        assert len([name for name in reading.counters if "nvlink" in name]) == 8 * 12 * 2

    def test_pcie_is_counted_or_else_measured(self, record: Record) -> None:
        machine = record("l20_pcie")
        assert "gpu0/pcie/tx" in machine.nvml.read().counters
        machine.fake.counts_pcie = False
        reading = machine.nvml.read()
        assert "gpu0/pcie/tx" not in reading.counters
        assert reading.rates["gpu0/pcie/tx"] == 5e9

    def test_interface_traffic(self, record: Record) -> None:
        machine = record("l20_pcie")
        machine.write("class/infiniband/mlx5_bond_0/ports/1/counters/port_xmit_data", 100)
        machine.write("class/net/eth1/statistics/rx_bytes", 77)
        counters = machine.sysfs.read().counters
        assert counters["mlx5_bond_0/1/tx"] == 400
        assert counters["eth1/rx"] == 77

    def test_a_machine_without_sysfs(self, tmp_path: Path) -> None:
        topology = Topology().discover(
            nvml=RecordedMachine("no_gpu", tmp_path / "sys").nvml,
            sysfs=SysfsReader(tmp_path / "none"),
        )
        assert "numa0" in topology.node_names(NodeType.SWITCH)
