"""What is exported of nodes: as they report it, gone when they are, and never backwards."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowkv_jax.controller import node_totals
from flowkv_jax.controller.node_totals import NodeTotals, PastLives
from flowkv_jax.controller.role import Role
from flowkv_jax.metrics import buckets
from flowkv_jax.metrics.distribution import Distribution, Histogram
from flowkv_jax.metrics.request_tallies import MAX_NODES, RequestTallies
from tests.controller_cluster import handoff, node_info, node_load, node_report
from tests.metered_cluster import MeteredCluster

PAIR = {"P": Role.PREFILL, "D": Role.DECODE}


def step_tokens(*values: int) -> Histogram:
    distribution = Distribution(buckets.STEP_TOKENS)
    for value in values:
        distribution.add(value)
    return distribution.histogram()


class TestReports:
    def test_load(self) -> None:
        cluster = MeteredCluster(PAIR)
        cluster.report(
            "D",
            load={
                "num_requests_running": 5,
                "num_requests_waiting": 4,
                "num_requests_swapped": 2,
                "num_requests_sending": 6,
                "num_requests_receiving": 3,
                "num_waiting_tokens": 70,
                "kv_cache_usage": 0.5,
                "num_free_blocks": 300,
                "fragmentation": 0.75,
                "token_budget_used": 0.125,
            },
        )
        for name, value in {
            "vllm:num_requests_running": 5,
            "vllm:num_requests_waiting": 9,
            "vllm:kv_cache_usage_perc": 0.5,
            "flowkv_num_requests_swapped": 2,
            "flowkv_num_requests_sending": 6,
            "flowkv_num_requests_receiving": 3,
            "flowkv_queued_tokens": 70,
            "flowkv_kv_blocks": 1000,
            "flowkv_kv_free_blocks": 300,
            "flowkv_kv_fragmentation": 0.75,
            "flowkv_token_budget_used": 0.125,
        }.items():
            assert cluster.value(name, engine="D") == value
        by_reason = "vllm:num_requests_waiting_by_reason"
        assert cluster.value(by_reason, engine="D", reason="capacity") == 6
        assert cluster.value(by_reason, engine="D", reason="deferred") == 3
        fetching = "vllm:num_requests_kv_fetch_by_stage"
        assert cluster.value(fetching, engine="D", stage="in_progress") == 3

    def test_steps(self) -> None:
        cluster = MeteredCluster(PAIR)
        cluster.report("P", step_tokens=step_tokens(1, 9, 300))
        name = "vllm:iteration_tokens_total"
        assert cluster.value(f"{name}_sum", engine="P") == 310
        assert cluster.value(f"{name}_bucket", engine="P", le="16.0") == 2
        assert cluster.value(f"{name}_count", engine="D") == 0

    def test_before_the_first_report(self) -> None:
        cluster = MeteredCluster({})
        cluster.controller.join(node_info("new"), 0.0)
        assert cluster.value("flowkv_node_epoch", engine="new") == 1
        assert cluster.value("vllm:num_preemptions_total", engine="new") == 0
        assert cluster.families()["vllm:num_requests_running"].samples == []

    def test_roles_and_regime(self) -> None:
        cluster = MeteredCluster(PAIR | {"Q": Role.PREFILL})
        assert cluster.value("flowkv_node_role", engine="P", role="prefill") == 1
        assert cluster.value("flowkv_node_role", engine="P", role="decode") == 0
        assert cluster.value("flowkv_node_state", engine="P", state="active") == 1
        assert cluster.value("flowkv_regime", regime="normal") == 1
        assert cluster.value("flowkv_regime", regime="extreme") == 0
        assert cluster.value("flowkv_role_load_threshold", level="high") == 0.6
        cluster.controller.request_role("P", Role.DECODE, 1.0)
        cluster.controller.drained("P", cluster.epochs["P"], 1.5)
        cluster.controller.tick(2.0)
        assert cluster.value("flowkv_node_role", engine="P", role="decode") == 1
        assert cluster.value("flowkv_role_switches_total", role="decode") == 1
        assert cluster.value("flowkv_decisions_total", kind="role") == 1
        assert cluster.value("flowkv_decisions_total", kind="node") == 3

    def test_loads(self) -> None:
        cluster = MeteredCluster(PAIR)
        cluster.report("P", load={"num_requests_waiting": 8})
        (node,) = (node for node in cluster.controller.snapshot(0.0).nodes if node.name == "P")
        for role, load in (("prefill", node.prefill_load), ("decode", node.decode_load)):
            assert load > 0
            assert cluster.value("flowkv_load_score", engine="P", role=role) == load


class TestNodesThatGo:
    def test_nothing_is_left_at_the_next_scrape(self) -> None:
        cluster = MeteredCluster({"stays": Role.PREFILL, "goes": Role.DECODE})
        cluster.submit(max_tokens=9)
        cluster.news("stays", 1.0, token_ids=(97,), scheduled_s=0.5)
        cluster.nodes["stays"].run(cluster.dispatcher)
        cluster.nodes["goes"].run(cluster.dispatcher)
        assert b"goes" in cluster.metrics.render()[0]
        cluster.leave("goes")
        body, _ = cluster.metrics.render()
        assert b"goes" not in body and b"stays" in body

    def test_what_it_did_is_known_when_it_comes_back(self) -> None:
        cluster = MeteredCluster({"A": Role.HYBRID})
        cluster.submit("a", max_tokens=1)
        cluster.news("A", 1.0, "a", token_ids=(97,), scheduled_s=0.5, finish_reason="length")
        cluster.leave("A")
        assert cluster.total("vllm:generation_tokens_total") == 0
        cluster.join("A")
        cluster.submit("b", max_tokens=1)
        cluster.news("A", 2.0, "b", token_ids=(97,), scheduled_s=1.5, finish_reason="length")
        assert cluster.value("vllm:generation_tokens_total", engine="A") == 2
        assert cluster.value("vllm:e2e_request_latency_seconds_count", engine="A") == 2

    def test_a_restart_adds_to_what_was_reported_last(self) -> None:
        cluster = MeteredCluster({"A": Role.HYBRID})
        counts = {"prefix_cache_queries": 100, "prefix_cache_hits": 40, "num_preemptions": 3}
        cluster.report("A", load=counts, step_tokens=step_tokens(8, 9))
        cluster.leave("A")
        cluster.join("A")
        # Nothing was reported yet in this life: `join` tells of zeros.
        assert cluster.value("vllm:prefix_cache_queries_total", engine="A") == 100
        cluster.report("A", load={"prefix_cache_queries": 5}, step_tokens=step_tokens(8))
        for name, value in {
            "prefix_cache_queries_total": 105,
            "prefix_cache_hits_total": 40,
            "num_preemptions_total": 3,
            "iteration_tokens_total_count": 3,
            "iteration_tokens_total_sum": 25,
        }.items():
            assert cluster.value(f"vllm:{name}", engine="A") == value

    def test_many_names_are_not_kept_for_ever(self) -> None:
        tallies = RequestTallies()
        tallies.joined("first and there", {"first and there"})
        for number in range(2 * MAX_NODES):
            tallies.handed_off(handoff(f"n{number}", "first and there", 100, 0.1))
            tallies.joined(f"n{number}", {"first and there", f"n{number}"})
        assert len(tallies.nodes) <= MAX_NODES + 1
        assert len(tallies.links) <= MAX_NODES
        assert "first and there" in tallies.nodes and "n0" not in tallies.nodes
        lives = PastLives()
        for number in range(2 * node_totals.MAX_NAMES):
            lives.ended(f"n{number}", node_report(node_load(num_preemptions=1)))
        assert lives.with_present("n0", None) == NodeTotals()
        assert lives.with_present(f"n{number}", None).num_preemptions == 1


@settings(max_examples=50, deadline=None)
@given(
    st.lists(
        st.one_of(
            st.just("restart"),
            st.tuples(st.integers(0, 50), st.lists(st.integers(1, 20000), max_size=3)),
        ),
        max_size=12,
    )
)
def test_totals_are_those_of_all_lives(events: list[Any]) -> None:
    """Whatever a node reports before it starts over, its totals are the sums of all that it did
    report, and never fall."""
    lives, report = PastLives(), None
    steps: list[int] = []  # of this life
    queries = all_queries = 0
    all_steps: list[int] = []
    last = NodeTotals()
    for event in events:
        if event == "restart":
            lives.ended("A", report)
            report, steps, queries = None, [], 0
        else:
            more, tokens = event
            queries, all_queries = queries + more, all_queries + more
            steps += tokens
            all_steps += tokens
            report = node_report(
                node_load(prefix_cache_queries=queries), step_tokens=step_tokens(*steps)
            )
        now = lives.with_present("A", report)
        assert now.prefix_cache_queries == all_queries >= last.prefix_cache_queries
        expected = step_tokens(*all_steps)
        assert now.step_tokens.total == expected.total
        assert sum(now.step_tokens.counts) == len(all_steps)
        if all_steps:
            assert now.step_tokens.counts == expected.counts
        last = now


class TestDistribution:
    @given(
        st.lists(st.floats(0, 1e4), max_size=30),
        st.lists(st.floats(0, 1e4), min_size=1, max_size=8, unique=True).map(sorted),
    )
    def test_counts_are_those_of_the_values(self, values: list[float], bounds: list[float]) -> None:
        distribution = Distribution(bounds)
        for value in values:
            distribution.add(value)
        found = distribution.histogram()
        assert len(found.counts) == len(bounds) + 1 and sum(found.counts) == len(values)
        for number, bound in enumerate(bounds):
            assert sum(found.counts[: number + 1]) == sum(value <= bound for value in values)
        assert found.total == pytest.approx(sum(values))
        assert found.up_to(1).counts == (found.counts[0], sum(found.counts[1:]))
        assert found + Histogram() == found == Histogram() + found

    def test_a_copy_is_another(self) -> None:
        one = Distribution((1.0,))
        one.add(0.5, 3)
        other = one.copy()
        one.add(2.0)
        assert other.histogram() == Histogram((3, 0), 1.5)

    def test_other_buckets_are_not_added(self) -> None:
        with pytest.raises(ValueError):
            Histogram((1, 2), 1.0) + Histogram((1,), 1.0)


def test_scrapes_from_several_threads_while_tokens_come() -> None:
    cluster = MeteredCluster({"A": Role.HYBRID})
    cluster.submit(max_tokens=400)
    errors: list[BaseException] = []

    def scrape() -> None:
        try:
            for _ in range(5):
                cluster.metrics.render()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=scrape) for _ in range(3)]
    for thread in threads:
        thread.start()
    for number in range(300):
        cluster.news("A", float(number), start=number, token_ids=(97,), scheduled_s=0.0)
    for thread in threads:
        thread.join()
    assert errors == []
    assert cluster.value("vllm:generation_tokens_total", engine="A") == 300
