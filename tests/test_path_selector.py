"""The score term by term, who wins when, hysteresis, observation, and what a decision says."""

from __future__ import annotations

import copy
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from transfer import (
    BlockRun,
    MockNodeAgent,
    NodeAgent,
    PathDecision,
    PathSelector,
    PathType,
    SelectorConfig,
    Topology,
    TransferRequest,
    path_scoring,
)
from transfer.errors import NoPath, UnknownNode
from transfer.graph import LinkType, NodeType
from transfer.lazy_decision import rate_text

ROOT = Path(__file__).resolve().parents[1]
MIB = 1 << 20
WEIGHTS = ("w_bandwidth", "w_queue_delay", "w_hops", "w_qos_risk", "w_latency")


def two_paths() -> Topology:
    """a > b and a > x > b, 10 GB/s a link."""
    topology = Topology()
    for name in ("a", "x", "b"):
        topology.add_node(name, NodeType.GPU)
    for src, dst in (("a", "b"), ("a", "x"), ("x", "b")):
        topology.add_link(src, dst, LinkType.NVLINK, bandwidth=10)
    return topology


class Bench:
    """A mock host, its agent and a selector with a clock that tests move."""

    def __init__(self, topology: Topology | None = None, **settings: Any) -> None:
        self.topology = topology or Topology.make_mock_dgx(8)
        self.agent = MockNodeAgent(self.topology)
        self.config = SelectorConfig(**settings)
        self.now_s = 0.0
        self.selector = PathSelector(
            self.topology, self.agent, self.config, clock=lambda: self.now_s
        )

    def select(
        self, src: str = "gpu0", dst: str = "gpu7", data_bytes: int = 64 * MIB, **settings: Any
    ) -> PathDecision:
        return self.selector.select(TransferRequest(src, dst, data_bytes, **settings))


def only(weight: str, **settings: Any) -> Bench:
    """A bench in which one term counts."""
    return Bench(**{name: 0.0 for name in WEIGHTS if name != weight}, **settings)


def by_hops(decision: PathDecision) -> dict[tuple[str, ...], float]:
    return {c.hops: c.score for c in decision.candidates}


DIRECT, RELAY = ("gpu0", "gpu7"), ("gpu0", "gpu1", "gpu7")
STORAGE = ("gpu0", "storage", "gpu7")


class TestTerms:
    def test_bandwidth(self) -> None:
        bench = only("w_bandwidth")
        bench.agent.set_utilization(*DIRECT, 0.4)
        scores = by_hops(bench.select())
        assert scores[DIRECT] == pytest.approx(0.6)
        assert scores[RELAY] == 1.0
        assert scores[STORAGE] == pytest.approx(3 / 25)

    def test_queue_delay(self) -> None:
        bench = only("w_queue_delay")
        bench.agent.set_utilization("gpu1", "gpu7", 0.5)
        scores = by_hops(bench.select())
        assert scores[RELAY] == pytest.approx(-0.5 / 3)
        assert scores[DIRECT] == 0.0

    def test_hops(self) -> None:
        bench = only("w_hops")
        scores = by_hops(bench.select())
        assert scores[DIRECT] == 0.0
        assert scores[RELAY] == scores[STORAGE] == pytest.approx(-0.1)

    def test_qos_risk(self) -> None:
        bench = only("w_qos_risk")
        scores = {}
        for busy in (0.4, 0.6, 0.8, 1.0):
            bench.agent.set_utilization(*DIRECT, busy)
            scores[busy] = by_hops(bench.select())[DIRECT]
        assert scores == pytest.approx({0.4: 0.0, 0.6: -0.15, 0.8: -0.3, 1.0: -0.3})

    def test_latency(self) -> None:
        bench = only("w_latency", ttft_budget_ms=10)
        assert set(by_hops(bench.select()).values()) == {0.0}
        scores = by_hops(bench.select(data_bytes=250_000_000, ttft_sensitive=True))
        # 10 ms over one link of 25 GB/s; a relay waits for the whole of it on each of two.
        assert scores[DIRECT] == pytest.approx(-0.25, abs=1e-4)
        assert scores[RELAY] == pytest.approx(-0.5 * 20 / 30, abs=1e-4)

    @given(
        st.floats(0, 1),
        st.floats(0.01, 1),
        st.floats(1e-3, 1e3),
        st.integers(1, 9),
        st.floats(0, 9),
    )
    def test_every_term_is_within_0_and_1(
        self, busy: float, threshold: float, spare: float, hops: int, seconds: float
    ) -> None:
        for term in (
            path_scoring.bandwidth_term(spare, 25.0),
            path_scoring.congestion_term(busy),
            path_scoring.hops_term(hops),
            path_scoring.qos_risk_term(busy, threshold),
            path_scoring.latency_term(seconds, 0.01),
        ):
            assert 0 <= term <= 1

    @pytest.mark.parametrize("busy", [0.1, 0.5, 0.9])
    def test_congestion_is_the_squashed_wait_of_a_queue(self, busy: float) -> None:
        wait = busy / (2 * (1 - busy))
        assert path_scoring.congestion_term(busy) == pytest.approx(wait / (1 + wait))

    def test_weights_scale_terms_and_terms_add_up(self) -> None:
        bench = Bench()
        bench.agent.set_all(0.5)
        decision = bench.select(ttft_sensitive=True, block_bytes=MIB)
        for candidate in decision.candidates:
            assert sum(candidate.terms.values()) == pytest.approx(candidate.score)
            assert set(candidate.terms) == {
                "bandwidth",
                "queue_delay",
                "hops",
                "qos_risk",
                "latency",
            }
        assert decision.candidates == tuple(
            sorted(decision.candidates, key=lambda c: (bool(c.rejected), -c.score))
        )


class TestWhoWins:
    def test_idle(self) -> None:
        decision = Bench().select()
        assert (decision.chosen_type, decision.hops) == (PathType.DIRECT, DIRECT)
        assert decision.estimated_bandwidth == 25.0

    def test_contention(self) -> None:
        bench = Bench()
        bench.agent.set_utilization(*DIRECT, 0.85)
        decision = bench.select()
        assert decision.chosen_type is PathType.NVLINK_RELAY
        assert decision.estimated_bandwidth == 25.0
        assert "nvlink gpu0->gpu7 at 85%, threshold 80%" in decision.reason

    def test_storage_when_everything_else_is_saturated(self) -> None:
        bench = Bench()
        bench.agent.set_all(0.97, LinkType.NVLINK)
        assert bench.select().chosen_type is PathType.STORAGE_RELAY
        bench = Bench(Topology.make_mock_two_hosts(4))
        ends = ("host0/gpu0", "host1/gpu0")
        assert bench.select(*ends).chosen_type is PathType.CROSS_NODE_RELAY
        bench.agent.set_all(0.97, LinkType.RDMA)
        assert bench.select(*ends).chosen_type is PathType.STORAGE_RELAY

    def test_another_interface_across_hosts(self) -> None:
        bench = Bench(Topology.make_mock_two_hosts(4))
        bench.agent.set_utilization("host0/nic0", "fabric", 0.9)
        decision = bench.select("host0/gpu0", "host1/gpu3")
        assert decision.hops == ("host0/gpu0", "host0/gpu1", "host1/gpu3")
        bench.agent.set_utilization("host1/nic3", "fabric", 0.9)
        decision = bench.select("host0/gpu0", "host1/gpu3")
        assert len(decision.hops) == 4
        assert decision.chosen_type is PathType.CROSS_NODE_RELAY

    def test_direct_is_the_fallback(self) -> None:
        bench = Bench()
        bench.agent.set_all(1.0)
        decision = bench.select()
        assert decision.hops == DIRECT
        assert "nothing else is better" in decision.reason
        rejected = [c for c in decision.candidates if c.rejected]
        assert len(rejected) == len(decision.candidates) - 1
        assert decision.fallbacks == ()

    @pytest.mark.parametrize(
        ("link_type", "threshold", "src", "dst"),
        [
            (LinkType.NVLINK, "nvlink_util_threshold", "host0/gpu0", "host0/gpu1"),
            (LinkType.RDMA, "rdma_util_threshold", "host0/gpu0", "host1/gpu0"),
            (LinkType.CNIC, "cnic_util_threshold", "host0/gpu0", "host1/gpu0"),
            (LinkType.SNIC, "snic_util_threshold", "host0/gpu0", "host1/gpu0"),
        ],
    )
    def test_threshold_of_each_class(
        self, link_type: LinkType, threshold: str, src: str, dst: str
    ) -> None:
        bench = Bench(Topology.make_mock_two_hosts(3))
        limit = getattr(bench.config, threshold)

        relays = {
            path.hops
            for path in bench.topology.paths(src, dst)[1:]
            if any(bench.topology.links[i].link_type is link_type for i in path.links)
        }
        assert relays

        def crossing() -> list[str]:
            return [c.rejected for c in bench.select(src, dst).candidates if c.hops in relays]

        bench.agent.set_all(limit, link_type)
        assert not any(crossing())
        bench.agent.set_all(limit + 0.01, link_type)
        assert all(crossing())
        setattr(bench.config, threshold, 1.0)
        assert not any(crossing())

    def test_relay_margin(self) -> None:
        bench = Bench(relay_benefit_margin=0.0)
        bench.agent.set_utilization(*DIRECT, 0.15)
        assert bench.select().chosen_type is PathType.NVLINK_RELAY
        bench = Bench(relay_benefit_margin=0.5)
        bench.agent.set_utilization(*DIRECT, 0.15)
        assert bench.select().chosen_type is PathType.DIRECT

    def test_a_better_score_does_not_buy_a_slower_transfer(self) -> None:
        bench = Bench()
        # Storage scores higher than a crowded link, but has less to spare.
        bench.agent.set_all(0.85, LinkType.NVLINK)
        decision = bench.select()
        assert by_hops(decision)[STORAGE] > by_hops(decision)[DIRECT]
        assert decision.hops == DIRECT
        # And a small message is there sooner over one crowded link than over two idle ones.
        bench = Bench()
        bench.agent.set_utilization(*DIRECT, 0.85)
        assert bench.select(data_bytes=4096).hops == DIRECT

    def test_ttft_sensitive_requests_count_every_hop(self) -> None:
        bench = Bench()
        bench.agent.set_utilization(*DIRECT, 0.4)
        assert bench.select().chosen_type is PathType.NVLINK_RELAY
        assert bench.select(ttft_sensitive=True).hops == DIRECT
        bench.agent.set_utilization(*DIRECT, 0.7)
        assert bench.select(ttft_sensitive=True).chosen_type is PathType.NVLINK_RELAY

    def test_a_relay_where_no_nvlink_joins_the_two(self) -> None:
        topology = Topology()
        for name in ("gpu0", "gpu1", "gpu2"):
            topology.add_node(name, NodeType.GPU)
        topology.add_node("pcie", NodeType.SWITCH)
        for name in ("gpu0", "gpu1", "gpu2"):
            topology.add_link(name, "pcie", LinkType.PCIE, bandwidth=12)
        topology.add_link("gpu0", "gpu1", LinkType.NVLINK, bandwidth=50)
        topology.add_link("gpu1", "gpu2", LinkType.NVLINK, bandwidth=50)
        bench = Bench(topology)
        assert bench.select(dst="gpu2").hops == ("gpu0", "gpu1", "gpu2")
        bench.agent.set_utilization("gpu1", "gpu2", 0.9)
        assert bench.select(dst="gpu2").hops == ("gpu0", "gpu2")

    def test_without_an_agent_links_are_idle(self) -> None:
        selector = PathSelector(Topology.make_mock_dgx(2))
        assert selector.select(TransferRequest("gpu0", "gpu1", 1)).reason

    def test_a_growing_topology(self) -> None:
        bench = Bench(Topology.make_mock_dgx(2))
        bench.agent.set_utilization("gpu0", "gpu1", 0.9)
        assert bench.select(dst="gpu1").hops[1] != "gpu2"
        bench.topology.add_node("gpu2", NodeType.GPU)
        for gpu in ("gpu0", "gpu1"):
            bench.topology.add_link(gpu, "gpu2", LinkType.NVLINK, bandwidth=25)
        assert bench.select(dst="gpu1").hops == ("gpu0", "gpu2", "gpu1")


class TestSplit:
    def half_busy(self, **settings: Any) -> Bench:
        bench = Bench(**settings)
        bench.agent.set_all(0.5, LinkType.NVLINK)
        return bench

    def test_disjoint_halves(self) -> None:
        decision = self.half_busy().select(block_bytes=MIB)
        assert decision.chosen_type is PathType.SPLIT_PATH
        assert decision.estimated_bandwidth == 25.0
        first, second = decision.chosen.parts
        assert (first.data_bytes, second.data_bytes) == (32 * MIB, 32 * MIB)
        assert first.hops == DIRECT and second.hops == RELAY

    def test_idle_paths_halve_a_bulk_move(self) -> None:
        decision = Bench().select(block_bytes=MIB)
        assert decision.chosen_type is PathType.SPLIT_PATH
        assert [part.hops for part in decision.chosen.parts] == [DIRECT, RELAY]
        assert decision.reason.endswith("50.0 GB/s to spare against 25.0 GB/s")

    def test_storage_joins_no_split(self) -> None:
        """Two processes of one host, which no relay but storage joins."""
        topology = Topology()
        for name in ("prefill", "decode"):
            topology.add_node(name, NodeType.HOST)
        topology.add_node("storage", NodeType.STORAGE)
        topology.add_link("prefill", "decode", LinkType.SHARED_MEMORY, bandwidth=10)
        for name in ("prefill", "decode"):
            topology.add_link(name, "storage", LinkType.SNIC, bandwidth=8)
        decision = Bench(topology).select(
            "prefill", "decode", data_bytes=1024 * MIB, block_bytes=MIB
        )
        assert decision.chosen_type is PathType.DIRECT
        assert {c.path_type for c in decision.candidates} == {
            PathType.DIRECT,
            PathType.STORAGE_RELAY,
        }

    def test_idle_and_urgent_is_direct(self) -> None:
        """A relay's second hop would wait for the whole of its part."""
        decision = Bench().select(block_bytes=MIB, ttft_sensitive=True)
        assert decision.chosen_type is PathType.DIRECT

    def test_flexflow_table_has_no_blocks(self) -> None:
        bench = Bench()
        assert bench.select().chosen_type is PathType.DIRECT
        bench.agent.set_utilization(*DIRECT, 0.85)
        assert bench.select().chosen_type is PathType.NVLINK_RELAY

    @pytest.mark.parametrize(
        ("num_blocks", "is_split"), [(2, False), (3, False), (4, True), (5, True)]
    )
    def test_parts_of_two_blocks(self, num_blocks: int, is_split: bool) -> None:
        decision = Bench().select(data_bytes=num_blocks * 64 * MIB, block_bytes=64 * MIB)
        assert (decision.chosen_type is PathType.SPLIT_PATH) == is_split
        assert all(part.data_bytes >= 128 * MIB for part in decision.chosen.parts)

    def test_a_little_noise_does_not_cost_a_part_its_second_block(self) -> None:
        bench = Bench()
        bench.agent.set_utilization(*DIRECT, 0.001)
        decision = bench.select(data_bytes=256 * MIB, block_bytes=64 * MIB)
        assert [part.data_bytes for part in decision.chosen.parts] == [128 * MIB, 128 * MIB]

    def test_a_short_move_stays_whole(self) -> None:
        """Predicted 2 us and 0.5 ms over one path of 25 GB/s."""
        data_bytes = 12_500_000
        settings = {"data_bytes": data_bytes, "block_bytes": data_bytes // 100}
        assert Bench().select(**settings).chosen_type is PathType.DIRECT
        assert Bench(min_split_ms=0.51).select(**settings).chosen_type is PathType.DIRECT
        bench = Bench(min_split_ms=0.5)
        assert bench.select(**settings).chosen_type is PathType.SPLIT_PATH

    @given(st.floats(0, 0.8), st.floats(0, 0.8), st.integers(1, 400))
    def test_the_faster_way_is_taken(self, direct: float, relay: float, num_blocks: int) -> None:
        """Between two places with two paths, held to the times that the runs would take."""
        bench = Bench(two_paths())
        bench.agent.set_utilization("a", "b", direct)
        bench.agent.set_utilization("a", "x", relay)
        decision = bench.select("a", "b", data_bytes=num_blocks * MIB, block_bytes=MIB)
        rates = {("a", "b"): 10e9 * (1 - direct), ("a", "x", "b"): 10e9 * (1 - relay)}
        parts = decision.chosen.parts
        seconds = max(part.data_bytes / rates[part.hops] for part in parts)
        whole = num_blocks * MIB / rates[parts[0].hops]
        if len(parts) > 1:
            assert num_blocks >= 4 and whole >= 1.99e-3
            assert seconds < whole * 0.85
            assert min(part.data_bytes for part in parts) >= 2 * MIB
        elif whole >= 2e-3:
            # What the whole parts of a split could have saved is within the margin.
            together = num_blocks * MIB / sum(rates.values()) + 2 * MIB / min(rates.values())
            assert together >= whole * 0.84

    def test_runs_are_dealt_out(self) -> None:
        runs = (BlockRun(0, 100, 48), BlockRun(60, 7, 16))
        decision = self.half_busy().select(runs=runs, block_bytes=MIB)
        parts = decision.chosen.parts
        assert [sum(r.num_blocks for r in part.runs) for part in parts] == [32, 32]
        assert [part.data_bytes for part in parts] == [32 * MIB, 32 * MIB]

    @pytest.mark.parametrize(
        "settings",
        [
            {"data_bytes": MIB, "block_bytes": MIB},
            {"block_bytes": 0},
            {"data_bytes": 2, "block_bytes": 1},
        ],
        ids=["one block", "no cut allowed", "too small to pay"],
    )
    def test_what_is_not_split(self, settings: dict[str, int]) -> None:
        assert self.half_busy().select(**settings).chosen_type is PathType.DIRECT

    def test_a_few_blocks(self) -> None:
        """Whole blocks: 5 of them are 3 and 2, which saves two fifths, not a half."""
        bench = self.half_busy(split_benefit_margin=0.39)
        settings = {"data_bytes": 160 * MIB, "block_bytes": 32 * MIB}
        assert bench.select(**settings).chosen_type is PathType.SPLIT_PATH
        bench = self.half_busy(split_benefit_margin=0.41)
        assert bench.select(**settings).chosen_type is PathType.DIRECT

    def test_disabled(self) -> None:
        bench = self.half_busy(enable_split_path=False)
        assert bench.select(block_bytes=MIB).chosen_type is PathType.DIRECT

    def test_margin(self) -> None:
        bench = self.half_busy(split_benefit_margin=0.6)
        decision = bench.select(block_bytes=MIB)
        assert decision.chosen_type is PathType.DIRECT
        assert PathType.SPLIT_PATH in {c.path_type for c in decision.fallbacks}

    def test_three_parts(self) -> None:
        bench = Bench(max_split_paths=3)
        bench.agent.set_all(0.75, LinkType.NVLINK)
        assert len(bench.select(block_bytes=MIB).chosen.parts) == 3

    def test_nothing_disjoint(self) -> None:
        topology = Topology()
        for name in ("gpu0", "gpu1", "gpu2"):
            topology.add_node(name, NodeType.GPU)
        topology.add_node("switch", NodeType.SWITCH)
        for name in ("gpu0", "gpu1", "gpu2"):
            topology.add_link(name, "switch", LinkType.NVLINK, bandwidth=25)
        bench = Bench(topology)
        bench.agent.set_all(0.5)
        decision = bench.select(dst="gpu1", block_bytes=MIB)
        assert decision.chosen_type is PathType.DIRECT
        assert decision.reason == "the only path"


class TestHysteresis:
    def test_equal_relays_do_not_alternate(self) -> None:
        bench = Bench()
        bench.agent.set_utilization(*DIRECT, 0.9)
        first = bench.select().hops
        for step in range(20):
            # The one in use looks a little worse, then a little better, than the others.
            bench.agent.set_all(0.02 * (step % 2), LinkType.NVLINK)
            bench.agent.set_utilization(*DIRECT, 0.9)
            bench.agent.set_utilization(*first[:2], 0.02 * ((step + 1) % 2))
            assert bench.select().hops == first

    def test_a_clearly_better_relay_takes_over(self) -> None:
        bench = Bench()
        bench.agent.set_utilization(*DIRECT, 0.9)
        first = bench.select().hops
        bench.agent.set_utilization(*first[:2], 0.3)
        second = bench.select().hops
        assert second != first and len(second) == 3

    def test_noise_at_the_margin_does_not_switch_back_and_forth(self) -> None:
        bench = Bench()
        switches, last = 0, bench.select().hops
        for step in range(40):
            bench.agent.set_utilization(*DIRECT, 0.14 + 0.02 * (step % 2))
            hops = bench.select().hops
            switches, last = switches + (hops != last), hops
        assert switches <= 1

    def test_direct_comes_back_when_it_is_free_again(self) -> None:
        bench = Bench()
        bench.agent.set_utilization(*DIRECT, 0.9)
        assert bench.select().hops != DIRECT
        bench.agent.set_utilization(*DIRECT, 0.0)
        assert bench.select().hops == DIRECT

    def test_pairs_are_apart(self) -> None:
        bench = Bench()
        bench.agent.set_utilization(*DIRECT, 0.9)
        bench.select()
        assert bench.select("gpu0", "gpu6").chosen_type is PathType.DIRECT


class TestObservation:
    def slow(self, bench: Bench, share: float, times: int = 30) -> None:
        for _ in range(times):
            bench.selector.observe(DIRECT, 25_000_000, 1e-3 / share)

    def test_a_slow_path_is_corrected_and_left(self) -> None:
        bench = Bench()
        self.slow(bench, 0.5)
        assert bench.selector.correction(DIRECT) == pytest.approx(0.5, abs=0.01)
        decision = bench.select()
        assert decision.chosen_type is PathType.NVLINK_RELAY
        direct = next(c for c in decision.candidates if c.hops == DIRECT)
        assert direct.estimated_bandwidth == pytest.approx(12.5, abs=0.1)

    def test_one_outlier_is_only_weighed_in(self) -> None:
        bench = Bench(observation_weight=0.25)
        bench.selector.observe(DIRECT, 25_000_000, 2e-3)
        assert bench.selector.correction(DIRECT) == pytest.approx(0.875)

    @pytest.mark.parametrize(("share", "expected"), [(1e-6, 0.1), (1e6, 10.0), (3.0, 3.0)])
    def test_clamped(self, share: float, expected: float) -> None:
        bench = Bench()
        self.slow(bench, share, times=60)
        assert bench.selector.correction(DIRECT) == pytest.approx(expected, abs=0.01)

    def test_others_traffic_is_not_the_paths_fault(self) -> None:
        bench = Bench()
        bench.agent.set_utilization(*DIRECT, 0.85)
        self.slow(bench, 0.52)
        assert bench.selector.correction(DIRECT) == 1.0

    def test_small_transfers_teach_nothing(self) -> None:
        bench = Bench()
        bench.selector.observe(DIRECT, 4096, 1.0)
        assert bench.selector.correction(DIRECT) == 1.0

    def test_probing_lets_a_path_recover(self) -> None:
        bench = Bench(probe_interval_s=5.0)
        self.slow(bench, 0.3)
        bench.now_s = 4.9
        assert bench.select().hops != DIRECT
        bench.now_s = 5.1
        assert bench.select(ttft_sensitive=True).hops != DIRECT
        probe = bench.select()
        assert probe.hops == DIRECT and "tried again" in probe.reason
        assert bench.select().hops != DIRECT  # one request, not all of them
        for _ in range(30):
            bench.selector.observe(DIRECT, 25_000_000, 1e-3)
        assert bench.select().hops == DIRECT

    def test_no_probe_of_a_path_that_would_lose_anyway(self) -> None:
        bench = Bench()
        for _ in range(30):
            bench.selector.observe(RELAY, 25_000_000, 1e-2)
        bench.now_s = 100.0
        assert bench.select().hops == DIRECT

    @pytest.mark.parametrize(
        ("hops", "data_bytes", "seconds", "message"),
        [
            (["gpu0"], MIB, 1.0, "needs a source and a destination"),
            (DIRECT, 0, 1.0, "data_bytes=0"),
            (DIRECT, MIB, 0.0, "seconds=0.0"),
            (DIRECT, MIB, float("nan"), "seconds=nan"),
            (["gpu0", "gpu9"], MIB, 1.0, "unknown node 'gpu9'"),
            (["gpu0", "host", "gpu7"], MIB, 1.0, "gpu0 > host > gpu7 is no candidate path"),
        ],
    )
    def test_bad_observations(
        self, hops: list[str], data_bytes: int, seconds: float, message: str
    ) -> None:
        with pytest.raises(ValueError, match=message):
            Bench().selector.observe(hops, data_bytes, seconds)


class TestDecision:
    def test_one_readable_line(self) -> None:
        bench = Bench(Topology.make_mock_dgx(3))
        bench.agent.set_utilization("gpu0", "gpu2", 0.85)
        text = str(bench.select(dst="gpu2"))
        assert "\n" not in text
        assert text.startswith("NVLinkRelay gpu0 > gpu1 > gpu2 25.0 GB/s score +0.90")
        assert "Direct gpu0 > gpu2 3.8 GB/s score -0.52" in text

    @pytest.mark.parametrize(
        ("gb_per_s", "text"),
        [
            (1234.0, "1234 GB/s"),
            (25.0, "25.0 GB/s"),
            (9.996, "10.0 GB/s"),
            (0.9996, "1.00 GB/s"),
            (0.9994, "999 MB/s"),
            (0.0312, "31.2 MB/s"),
            (0.00125, "1.25 MB/s"),
            (4.2e-7, "0.42 kB/s"),
        ],
    )
    def test_bandwidths_have_three_digits(self, gb_per_s: float, text: str) -> None:
        assert rate_text(gb_per_s) == text

    def test_reason_of_a_slow_relay(self) -> None:
        topology = Topology()
        for name in ("a", "x", "b"):
            topology.add_node(name, NodeType.GPU)
        for src, dst in (("a", "b"), ("a", "x"), ("x", "b")):
            topology.add_link(src, dst, LinkType.TCP, bandwidth=0.05)
        bench = Bench(topology)
        bench.agent.set_utilization("a", "b", 0.5)
        assert bench.select("a", "b").reason == "50.0 MB/s to spare against 25.0 MB/s"

    def test_says_what_was_true_when_it_was_made(self) -> None:
        bench = Bench()
        bench.agent.set_utilization(*DIRECT, 0.85)
        decision = bench.select()
        bench.agent.set_all(0.0)
        bench.config.w_bandwidth = 7.0
        bench.select()
        assert by_hops(decision)[RELAY] == pytest.approx(0.9)
        assert "85%" in decision.reason

    def test_is_a_value(self) -> None:
        decision = Bench().select(block_bytes=MIB)
        plain = copy.copy(decision)
        assert (plain.chosen, plain.candidates) == (decision.chosen, decision.candidates)
        assert decision.chosen in decision.candidates
        assert any(c is decision.chosen for c in decision.candidates)
        with pytest.raises(AttributeError):
            decision.reason = "other"  # type: ignore[misc]

    def test_fallbacks_are_best_first(self) -> None:
        bench = Bench()
        bench.agent.set_utilization(*DIRECT, 0.85)
        scores = [c.score for c in bench.select().fallbacks]
        assert len(scores) == 7 and scores == sorted(scores, reverse=True)


class TestConfig:
    def test_flexflow_defaults(self) -> None:
        config = SelectorConfig()
        assert [getattr(config, name) for name in WEIGHTS] == [1.0, 0.5, 0.2, 0.3, 0.5]
        assert (config.nvlink_util_threshold, config.rdma_util_threshold) == (0.80, 0.80)
        assert (config.cnic_util_threshold, config.snic_util_threshold) == (0.70, 0.85)
        assert (config.relay_benefit_margin, config.split_benefit_margin) == (0.10, 0.15)
        assert (config.enable_split_path, config.max_split_paths) == (True, 2)

    @pytest.mark.parametrize(
        ("name", "value", "message"),
        [
            ("w_hops", -1, "w_hops=-1 must not be negative"),
            ("w_hops", "1", "w_hops='1' must be a finite number"),
            ("w_hops", float("nan"), "w_hops=nan"),
            ("nvlink_util_threshold", 80, r"nvlink_util_threshold=80 must be in \(0, 1\]"),
            ("max_split_paths", 1, "set enable_split_path=False"),
            ("max_split_paths", 2.5, "whole number"),
            ("enable_split_path", 1, "must be True or False"),
            ("split_benefit_margin", 1.0, r"in \[0, 1\)"),
            ("observation_weight", 1.1, r"in \[0, 1\]"),
            ("ttft_budget_ms", 0, "above 0"),
        ],
    )
    def test_values_are_checked_when_set(self, name: str, value: Any, message: str) -> None:
        config = SelectorConfig()
        before = getattr(config, name)
        with pytest.raises(ValueError, match=message):
            setattr(config, name, value)
        with pytest.raises(ValueError, match=message):
            SelectorConfig(**{name: value})
        assert getattr(config, name) == before

    def test_misspelt(self) -> None:
        with pytest.raises(AttributeError, match="did you mean 'relay_benefit_margin'"):
            SelectorConfig().relay_benefit_margn = 0.2  # type: ignore[attr-defined]

    def test_a_running_selector_sees_changes(self) -> None:
        bench = Bench()
        bench.agent.set_utilization(*DIRECT, 0.15)
        bench.config.relay_benefit_margin = 0.5
        assert bench.select().hops == DIRECT
        bench.config.relay_benefit_margin = 0.0
        assert bench.select().chosen_type is PathType.NVLINK_RELAY


class TestBadInput:
    def test_unknown_node(self) -> None:
        with pytest.raises(UnknownNode, match="unknown node 'gpu8'"):
            Bench().select(dst="gpu8")

    def test_no_path(self) -> None:
        topology = Topology.make_mock_dgx(1)
        topology.add_node("gpu1", NodeType.GPU)
        with pytest.raises(NoPath):
            Bench(topology).select(dst="gpu1")

    @pytest.mark.parametrize("data_bytes", [0, -1])
    def test_no_bytes(self, data_bytes: int) -> None:
        with pytest.raises(ValueError, match=f"data_bytes={data_bytes}"):
            Bench().select(data_bytes=data_bytes)


def test_flexflow_usage() -> None:
    """flexFlow's usage with the import changed."""
    topo = Topology.make_mock_dgx(8)
    agent = NodeAgent(topo, sample_interval_ms=100)
    agent.start()
    try:
        cfg = SelectorConfig()
        cfg.relay_benefit_margin = 0.10
        cfg.enable_split_path = True
        selector = PathSelector(topo, agent, cfg)
        gpus = topo.gpu_nodes()
        req = TransferRequest(src=gpus[0], dst=gpus[7], data_bytes=64 * 1024 * 1024)
        decision = selector.select(req)
        assert str(decision.chosen_type) == "Direct"
        assert decision.estimated_bandwidth == 25.0
        assert decision.hops == ("gpu0", "gpu7")
    finally:
        agent.stop()


def test_deciding_needs_no_jax() -> None:
    script = (
        "import sys, transfer\n"
        "topology = transfer.Topology().discover()\n"
        "assert set(transfer.__all__) <= set(dir(transfer))\n"
        "assert not {'jax', 'jaxlib', 'flax'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60, cwd=ROOT)


def test_threads_share_a_selector() -> None:
    bench = Bench()
    failures: list[BaseException] = []

    def work(number: int) -> None:
        try:
            for step in range(200):
                bench.select(f"gpu{number}", f"gpu{(number + 1) % 4}")
                bench.selector.observe(
                    (f"gpu{number}", f"gpu{(number + 1) % 4}"), 2 * MIB, 1e-3 + step * 1e-6
                )
                bench.agent.set_all(step / 200)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


@given(
    st.lists(st.floats(0, 1), min_size=24, max_size=24),
    st.integers(1, 1 << 34),
    st.booleans(),
    st.sampled_from([0, 16384]),
)
def test_invariants(
    loads: list[float], data_bytes: int, ttft_sensitive: bool, block_bytes: int
) -> None:
    bench = Bench(Topology.make_mock_dgx(4))
    links = bench.topology.links
    for link in links:
        if link.link_type is LinkType.NVLINK:
            bench.agent.set_utilization(link.src, link.dst, loads[link.index % 24], both_ways=False)
    decision = bench.select(
        dst="gpu3", data_bytes=data_bytes, ttft_sensitive=ttft_sensitive, block_bytes=block_bytes
    )
    chosen = decision.chosen
    assert not chosen.rejected
    assert sum(part.data_bytes for part in chosen.parts) == data_bytes
    by_route = {p.hops: p for p in bench.topology.paths("gpu0", "gpu3")}
    used = [i for part in chosen.parts for i in by_route[part.hops].links]
    assert len(set(used)) == len(used)
    if chosen.hops != ("gpu0", "gpu3") or len(chosen.parts) > 1:
        for index in used:
            busy = bench.agent.utilization[index]
            assert busy <= bench.config.threshold(links[index].link_type)
    # Asked again under the same load it says the same.
    again = bench.select(
        dst="gpu3", data_bytes=data_bytes, ttft_sensitive=ttft_sensitive, block_bytes=block_bytes
    )
    assert again.chosen == chosen
