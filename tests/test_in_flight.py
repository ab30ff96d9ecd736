"""Bytes in flight: booked and released exactly, and what a burst between two samples does."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from transfer import (
    MockNodeAgent,
    PathDecision,
    PathSelector,
    PathType,
    SelectorConfig,
    Topology,
    TransferRequest,
    path_scoring,
)
from transfer.graph import LinkType, NodeType
from transfer.in_flight import InFlight

MIB = 1 << 20
DIRECT = ("a", "b")


def relays(count: int) -> Topology:
    """a > b, and a > x0 > b and so on: equal relays, 10 GB/s a link."""
    topology = Topology()
    middle = [f"x{i}" for i in range(count)]
    for name in ("a", "b", *middle):
        topology.add_node(name, NodeType.GPU)
    topology.add_link("a", "b", LinkType.NVLINK, bandwidth=10)
    for name in middle:
        topology.add_link("a", name, LinkType.NVLINK, bandwidth=10)
        topology.add_link(name, "b", LinkType.NVLINK, bandwidth=10)
    return topology


class Bench:
    """A selector that has been told of one transfer, and so counts; the clock is the test's."""

    def __init__(self, num_relays: int = 2, **config: Any) -> None:
        self.topology = relays(num_relays)
        self.agent = MockNodeAgent(self.topology)
        self.now_s = 0.0
        self.selector = PathSelector(
            self.topology, self.agent, SelectorConfig(**config), clock=lambda: self.now_s
        )
        self.selector.observe(DIRECT, 1, 1.0)

    def select(self, data_bytes: int = 64 * MIB, **settings: Any) -> PathDecision:
        return self.selector.select(TransferRequest("a", "b", data_bytes, **settings))

    def burst(self, count: int, **settings: Any) -> Counter[tuple[str, ...]]:
        return Counter(self.select(**settings).hops for _ in range(count))


class Booking(RuleBasedStateMachine):
    """`InFlight` against a list of what is in it."""

    def __init__(self) -> None:
        super().__init__()
        self.paths = relays(2).paths("a", "b")
        self.in_flight = InFlight()
        self.model: list[tuple[int, int, float]] = []
        self.now_s = 0.0

    @rule(which=st.integers(0, 2), data_bytes=st.integers(0, 1 << 40))
    def assign(self, which: int, data_bytes: int) -> None:
        self.in_flight.assign(self.paths[which], data_bytes, self.now_s)
        self.model.append((which, data_bytes, self.now_s))

    @rule(which=st.integers(0, 2))
    def end(self, which: int) -> None:
        others = self.in_flight.end(self.paths[which].hops)
        oldest = next((entry for entry in self.model if entry[0] == which), None)
        if oldest is None:
            assert others == 0
        else:
            self.model.remove(oldest)
            assert others >= sum(entry[0] == which for entry in self.model)

    @rule(seconds=st.sampled_from([0.0, 0.1, 1.0]), lasts_s=st.sampled_from([0.0, 0.3, 1.0]))
    def expire(self, seconds: float, lasts_s: float) -> None:
        self.now_s += seconds
        self.in_flight.expire(self.now_s - lasts_s)
        self.model = [entry for entry in self.model if entry[2] > self.now_s - lasts_s]

    @invariant()
    def totals_are_what_is_in_it(self) -> None:
        expected: dict[int, list[int]] = {}
        for which, data_bytes, _ in self.model:
            for link in self.paths[which].links:
                totals = expected.setdefault(link, [0, 0])
                totals[0] += 1
                totals[1] += data_bytes
        assert self.in_flight.on_link == expected


Booking.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestBooking = Booking.TestCase


class TestShare:
    def weighing(self) -> path_scoring.Weighing:
        topology = relays(1)
        count = len(topology.links)
        return path_scoring.weigh(
            topology.paths("a", "b"),
            topology.links,
            [0.0] * count,
            [0.8] * count,
            SelectorConfig(),
            {},
        )

    def test_nothing_in_flight(self) -> None:
        weighing = self.weighing()
        assert path_scoring.shared(weighing, InFlight(), MIB) is weighing

    @given(st.lists(st.integers(1, 1 << 30), min_size=1, max_size=5), st.integers(1, 1 << 30))
    def test_equal_parts_while_they_last(self, others: list[int], data_bytes: int) -> None:
        """Between all getting their equal part throughout, and waiting for all of them."""
        weighing, in_flight = self.weighing(), InFlight()
        for other in others:
            in_flight.assign(weighing.paths[0], other, 0.0)
        shared = path_scoring.shared(weighing, in_flight, data_bytes)
        share = shared.loads[0].spare / weighing.loads[0].spare
        at_most = sum(min(other, data_bytes) for other in others)
        assert 1 / (1 + len(others)) <= share * (1 + 1e-9)
        assert data_bytes / (data_bytes + sum(others)) <= share * (1 + 1e-9)
        assert share <= data_bytes / (data_bytes + at_most) * (1 + 1e-9)
        fall = weighing.loads[0].score - shared.loads[0].score
        assert fall == pytest.approx(1 - share)
        assert shared.seconds(0, data_bytes, False) == pytest.approx(
            weighing.paths[0].latency_s + data_bytes / (10e9 * share)
        )
        assert shared.loads[1] == weighing.loads[1]


class TestBurst:
    @pytest.mark.parametrize("count", [2, 7, 40, 300])
    def test_equal_paths_share_evenly(self, count: int) -> None:
        bench = Bench(num_relays=3)
        bench.agent.set_utilization("a", "b", 0.9, both_ways=False)
        taken = bench.burst(count)
        evenly = [taken[("a", f"x{i}", "b")] for i in range(3)]
        assert max(evenly) - min(evenly) <= 1
        # It has a tenth of what a relay has.
        assert taken[DIRECT] <= max(evenly) / 10 + 1

    def test_the_last_winner_does_not_keep_them(self) -> None:
        """Its advantage is against noise, not against what is known to be on its way."""
        bench = Bench(switch_margin=2.0)
        bench.agent.set_utilization("a", "b", 0.9, both_ways=False)
        first = bench.select().hops
        assert bench.select().hops != first
        bench.now_s += 1.0
        for _ in range(5):
            assert bench.select().hops == first
            bench.selector.observe(first, 1, 1.0)

    def test_direct_gives_way_and_comes_back(self) -> None:
        bench = Bench()
        taken = [bench.select().hops for _ in range(3)]
        assert taken[0] == DIRECT and len(set(taken)) == 3
        for hops in taken:
            bench.selector.observe(hops, 64 * MIB, 64 * MIB / 10e9)
        assert bench.select().hops == DIRECT

    def test_splits_take_what_is_free(self) -> None:
        bench = Bench(num_relays=3)
        routes = []
        for _ in range(2):
            decision = bench.select(block_bytes=MIB)
            assert decision.chosen_type is PathType.SPLIT_PATH
            routes += [part.hops for part in decision.chosen.parts]
        assert len(set(routes)) == 4

    def test_each_part_ends_by_itself(self) -> None:
        bench = Bench(num_relays=1)
        first, second = bench.select(block_bytes=MIB).chosen.parts
        bench.selector.observe(second.hops, second.data_bytes, second.data_bytes / 10e9)
        assert bench.select().hops == second.hops
        assert first.hops == DIRECT

    def test_a_burst_is_not_taken_for_a_slow_path(self) -> None:
        """Each of two had half of it. Those amid four met two at once, not all three."""
        for count, at_least in ((2, 1.0), (4, 0.9)):
            bench = Bench(num_relays=0)
            for _ in range(count):
                bench.select()
            for _ in range(count):
                bench.selector.observe(DIRECT, 64 * MIB, count * 64 * MIB / 10e9)
            assert at_least - 1e-9 <= bench.selector.correction(DIRECT) <= 1.0

    def test_one_alone_teaches_as_before(self) -> None:
        bench = Bench(num_relays=0)
        bench.select()
        bench.selector.observe(DIRECT, 64 * MIB, 64 * MIB / 5e9)
        assert bench.selector.correction(DIRECT) == pytest.approx(0.875)

    def test_expires(self) -> None:
        bench = Bench(in_flight_s=0.3)
        assert bench.select().hops == DIRECT
        bench.now_s = 0.29
        assert bench.select().hops != DIRECT
        bench.now_s = 0.31
        assert bench.select().hops == DIRECT

    def test_a_decision_shows_what_was_left(self) -> None:
        bench = Bench(num_relays=1)
        bench.select()
        decision = bench.select()
        assert decision.reason == "10.0 GB/s to spare against 5.00 GB/s"
        bench.now_s = 1.0
        bench.select()
        assert decision.candidates[1].estimated_bandwidth == 5.0

    def test_a_small_one_does_not_flee_a_large_one(self) -> None:
        """It gets half of the link at once, and so is there before it could cross two."""
        bench = Bench()
        bench.select()
        assert bench.select(data_bytes=4096).hops == DIRECT

    def test_counts_nothing_unless_told(self) -> None:
        bench = Bench(in_flight_s=0.0)
        assert set(bench.burst(20)) == {DIRECT}
        topology = relays(2)
        asked_only = PathSelector(topology, MockNodeAgent(topology))
        request = TransferRequest("a", "b", 64 * MIB)
        assert {asked_only.select(request).hops for _ in range(20)} == {DIRECT}

    def test_other_pairs_see_shared_links(self) -> None:
        """From x0 to b directly, once a > x0 > b is taken; from a to x1 nothing is."""
        bench = Bench(num_relays=1)
        bench.agent.set_utilization("a", "b", 0.9, both_ways=False)
        assert bench.select().hops == ("a", "x0", "b")
        decision = bench.selector.select(TransferRequest("x0", "b", 64 * MIB))
        assert decision.estimated_bandwidth == 5.0
        opposite = bench.selector.select(TransferRequest("b", "x0", 64 * MIB))
        assert opposite.estimated_bandwidth == 10.0
