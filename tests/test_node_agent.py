"""Sliding windows, the sampling thread, vanished devices, and the mock."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from tests.recorded_machine import RecordedMachine
from transfer import MockNodeAgent, NodeAgent, Topology
from transfer.errors import UnknownNode
from transfer.graph import LinkType, NodeType
from transfer.node_agent import Meter, Reading

TX, RX = 138, 139


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class TestMeter:
    def test_rate_over_the_window(self) -> None:
        meter = Meter(window_s=1.0)
        for tenth in range(31):
            # 1,000 bytes/s until 2 s, then 5,000.
            total = 100 * min(tenth, 20) + 500 * max(tenth - 20, 0)
            meter.add(Reading({"x": total}), tenth / 10)
        assert meter.bytes_per_s("x", 3.0) == pytest.approx(5000)

    def test_half_a_window_of_traffic(self) -> None:
        meter = Meter(window_s=1.0)
        for tenth in range(11):
            meter.add(Reading({"x": 200 * max(tenth - 5, 0)}), tenth / 10)
        assert meter.bytes_per_s("x", 1.0) == pytest.approx(1000)

    def test_never_measured_is_idle(self) -> None:
        meter = Meter(window_s=1.0)
        assert meter.bytes_per_s("x", 5.0) == 0.0
        meter.add(Reading({"x": 10**9}), 5.0)
        assert meter.bytes_per_s("x", 5.0) == 0.0

    @pytest.mark.parametrize("before", [10**12, 5000])
    def test_a_reset_counter_starts_at_0(self, before: int) -> None:
        meter = Meter(window_s=1.0)
        for now_s, total in ((0.0, before), (0.1, 100), (0.2, 200)):
            meter.add(Reading({"x": total}), now_s)
        assert meter.bytes_per_s("x", 0.2) == pytest.approx(1000)

    def test_a_counter_of_32_bits_wraps(self) -> None:
        meter = Meter(window_s=1.0)
        for tenth in range(31):
            meter.add(Reading({"x": 30 * 10**8 * tenth % 2**32}), tenth / 10)
        assert meter.bytes_per_s("x", 3.0) == pytest.approx(30e9)

    def test_gone_for_a_window(self) -> None:
        meter = Meter(window_s=1.0)
        meter.add(Reading({"x": 0}), 0.0)
        meter.add(Reading({"x": 100}), 0.5)
        assert meter.bytes_per_s("x", 1.5) == pytest.approx(200)
        assert meter.bytes_per_s("x", 1.6) is None

    def test_rates_are_averaged(self) -> None:
        meter = Meter(window_s=1.0)
        for now_s, rate in ((0.0, 99.0), (1.5, 10.0), (2.0, 20.0)):
            meter.add(Reading(rates={"x": rate}), now_s)
        assert meter.bytes_per_s("x", 2.0) == pytest.approx(15)


class TestSampling:
    @pytest.fixture
    def machine(self, tmp_path: Path) -> RecordedMachine:
        return RecordedMachine("dgx_a100", tmp_path / "sys")

    def test_nvlink_and_rdma_traffic(self, machine: RecordedMachine) -> None:
        topology = Topology().discover(nvml=machine.nvml, sysfs=machine.sysfs)
        clock = Clock()
        agent = NodeAgent(topology, readers=[machine.nvml, machine.sysfs], clock=clock)
        agent.sample()
        clock.now_s = 0.1
        # 12 links of 25 GB/s; half of that for 100 ms. And a quarter of 25 GB/s on the interface.
        for link in range(12):
            machine.fake.traffic_kib[0, TX, link] = int(12.5e9 * 0.1 / 1024)
        machine.write("class/infiniband/mlx5_0/ports/1/counters/port_rcv_data", int(6.25e8 / 4))
        agent.sample()
        busy = agent.utilization
        assert busy[topology.link_between("gpu0", "nvswitch").index] == pytest.approx(0.5)
        assert busy[topology.link_between("nvswitch", "gpu0").index] == 0.0
        assert busy[topology.link_between("fabric", "mlx5_0").index] == pytest.approx(0.25)
        assert agent.lost == () and agent.failure is None

    def test_a_vanished_gpu_counts_as_full_until_it_is_back(self, machine: RecordedMachine) -> None:
        topology = Topology().discover(nvml=machine.nvml, sysfs=machine.sysfs)
        clock = Clock()
        agent = NodeAgent(topology, window_ms=500, readers=[machine.nvml], clock=clock)
        agent.sample()
        machine.fake.lost.add(2)
        lost = topology.link_between("gpu2", "nvswitch").index
        clock.now_s = 0.4
        agent.sample()
        assert agent.utilization[lost] == 0.0
        clock.now_s = 1.0
        agent.sample()
        assert agent.utilization[lost] == 1.0
        assert agent.utilization[topology.link_between("gpu3", "nvswitch").index] == 0.0
        assert {name.split("/")[0] for name in agent.lost} == {"gpu2"}
        machine.fake.lost.clear()
        clock.now_s = 1.1
        agent.sample()
        assert agent.utilization[lost] == 0.0 and agent.lost == ()

    def test_a_broken_reader_does_not_blind_the_others(self, machine: RecordedMachine) -> None:
        class Broken:
            def read(self) -> Reading:
                raise RuntimeError("driver gone")

        topology = Topology().discover(nvml=machine.nvml, sysfs=machine.sysfs)
        clock = Clock()
        agent = NodeAgent(topology, readers=[Broken(), machine.sysfs], clock=clock)
        agent.sample()
        clock.now_s = 0.1
        machine.write("class/infiniband/mlx5_0/ports/1/counters/port_rcv_data", int(2.5e9 / 4))
        agent.sample()
        assert agent.utilization[topology.link_between("fabric", "mlx5_0").index] == 1.0
        assert str(agent.failure) == "driver gone"

    def test_links_added_later_are_watched(self) -> None:
        topology = Topology.make_mock_dgx(2)
        agent = NodeAgent(topology, readers=[])
        topology.add_node("gpu2", NodeType.GPU)
        topology.add_link("gpu2", "gpu0", LinkType.NVLINK, bandwidth=1)
        agent.sample()
        assert len(agent.utilization) == len(topology.links)


class TestThread:
    def test_samples_until_stopped(self) -> None:
        third = threading.Event()
        reads: list[int] = []

        class Reader:
            def read(self) -> Reading:
                reads.append(len(reads))
                if len(reads) == 3:
                    third.set()
                return Reading()

        before = threading.active_count()
        with NodeAgent(
            Topology.make_mock_dgx(2), sample_interval_ms=1, readers=[Reader()]
        ) as agent:
            assert agent.is_running and third.wait(30)
            assert agent.start() is agent
            assert threading.active_count() == before + 1
        assert not agent.is_running
        assert threading.active_count() == before
        count = len(reads)
        agent.stop()
        agent.sample()
        assert len(reads) == count + 1

    def test_stops_without_waiting_for_the_interval(self) -> None:
        agent = NodeAgent(
            Topology.make_mock_dgx(2), sample_interval_ms=1e7, window_ms=1e7, readers=[]
        ).start()
        agent.stop()  # Would time out if it waited the interval's three hours.
        assert not agent.is_running

    def test_starts_again(self) -> None:
        agent = NodeAgent(Topology.make_mock_dgx(2), readers=[])
        for _ in range(2):
            agent.start()
            agent.stop()

    @pytest.mark.parametrize(
        ("interval", "window", "message"),
        [
            (0, 100, "sample_interval_ms=0"),
            (float("nan"), 100, "sample_interval_ms=nan"),
            (200, 100, "window_ms=100 must be at least sample_interval_ms=200"),
        ],
    )
    def test_bad_intervals(self, interval: float, window: float, message: str) -> None:
        with pytest.raises(ValueError, match=message):
            NodeAgent(Topology(), interval, window_ms=window)


class TestMock:
    def test_set(self) -> None:
        topology = Topology.make_mock_dgx(3)
        agent = MockNodeAgent(topology)
        before = agent.utilization
        agent.set_utilization("gpu0", "gpu1", 0.5, both_ways=False)
        assert agent.utilization[topology.link_between("gpu0", "gpu1").index] == 0.5
        assert agent.utilization[topology.link_between("gpu1", "gpu0").index] == 0.0
        assert agent.utilization is not before and set(before) == {0.0}
        agent.set_all(0.9, LinkType.SNIC)
        assert sum(value == 0.9 for value in agent.utilization) == 2

    def test_bad_input(self) -> None:
        agent = MockNodeAgent(Topology.make_mock_dgx(2))
        with pytest.raises(ValueError, match=r"utilization=1.5 must be in \[0, 1\]"):
            agent.set_all(1.5)
        with pytest.raises(UnknownNode, match="'gpu5'"):
            agent.set_utilization("gpu0", "gpu5", 0.1)
        with pytest.raises(ValueError, match="no link from 'gpu0' to 'shm'"):
            agent.set_utilization("gpu0", "shm", 0.1)
