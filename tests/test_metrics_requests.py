"""What is exported of requests: exact counts and sums, each once, at the node that did the work."""

from __future__ import annotations

import math

import pytest

from flowkv_jax.controller.role import Role
from flowkv_jax.errors import EngineDeadError, RetryableRequestError
from flowkv_jax.sequence import HandoffReport
from tests.metered_cluster import MeteredCluster, samples_of
from tests.scripted_nodes import ScriptedNode, new_caller

PAIR = {"P": Role.PREFILL, "D": Role.DECODE}


def handoff(**changes: object) -> HandoffReport:
    values: dict[str, object] = {
        "src": "P", "dst": "D", "path": "Direct", "backend": "tcp", "runs": 2, "calls": 2,
        "data_bytes": 3000, "num_blocks": 4, "num_reused_blocks": 1, "deferred_s": 0.25,
        "transfer_s": 0.5, "total_s": 0.625,
    }  # fmt: skip
    return HandoffReport(**(values | changes))  # type: ignore[arg-type]


def check_histogram(cluster: MeteredCluster, name: str, engine: str, values: list[float]) -> None:
    """A histogram holds exactly these values."""
    assert cluster.value(f"{name}_count", engine=engine) == len(values), name
    assert cluster.value(f"{name}_sum", engine=engine) == pytest.approx(math.fsum(values)), name
    for labels, count in samples_of(cluster.metrics, f"{name}_bucket"):
        if labels["engine"] == engine:
            bound = float(labels["le"])
            assert count == sum(value <= bound for value in values), (name, bound)


class TestTimes:
    def test_one_node(self) -> None:
        cluster = MeteredCluster({"A": Role.HYBRID})
        cluster.submit(prompt=range(10), max_tokens=4, arrival_s=0.0)
        cluster.news("A", 2.0, token_ids=(97,), scheduled_s=0.5, num_cached_tokens=4)
        cluster.news("A", 2.25, start=1, token_ids=(97,))
        cluster.news("A", 3.5, start=2, token_ids=(97,))
        cluster.news("A", 3.75, start=3, token_ids=(97,), finish_reason="length")
        for name, values in {
            "time_to_first_token_seconds": [2.0],
            "inter_token_latency_seconds": [0.25, 1.25, 0.25],
            "e2e_request_latency_seconds": [3.75],
            "request_queue_time_seconds": [0.5],
            "request_prefill_time_seconds": [1.5],
            "request_decode_time_seconds": [1.75],
            "request_inference_time_seconds": [3.25],
            "request_time_per_output_token_seconds": [1.75 / 3],
            "request_prompt_tokens": [10],
            "request_prefill_kv_computed_tokens": [6],
            "request_generation_tokens": [4],
            "request_params_n": [1],
            "request_params_max_tokens": [4],
            "request_num_preemptions": [0],
        }.items():
            check_histogram(cluster, f"vllm:{name}", "A", values)
        for counter, value in {
            "prompt_tokens": 10,
            "prompt_tokens_cached": 4,
            "generation_tokens": 4,
        }.items():
            assert cluster.value(f"vllm:{counter}_total", engine="A") == value
        for source, value in {"local_compute": 6, "local_cache_hit": 4}.items():
            name = "vllm:prompt_tokens_by_source_total"
            assert cluster.value(name, engine="A", source=source) == value
        ends = "vllm:request_success_total"
        assert cluster.value(ends, engine="A", finished_reason="length") == 1
        assert cluster.total(ends) == 1

    def test_tokens_that_come_together_share_their_gap(self) -> None:
        cluster = MeteredCluster({"A": Role.HYBRID})
        cluster.submit(max_tokens=8)
        cluster.news("A", 1.0, token_ids=(97, 97), scheduled_s=0.5)
        cluster.news("A", 3.0, start=1, token_ids=(97, 97, 97, 97, 97))  # one is known
        check_histogram(cluster, "vllm:inter_token_latency_seconds", "A", [0.5] * 4)
        assert cluster.value("vllm:generation_tokens_total", engine="A") == 6

    def test_answers_of_one_request_count_each_but_the_request_once(self) -> None:
        cluster = MeteredCluster({"A": Role.HYBRID})
        cluster.submit(prompt=(1, 2), n=2, max_tokens=1)
        for name in ("r", "r#1"):
            cluster.news("A", 1.0, name, token_ids=(97,), scheduled_s=0.5, finish_reason="length")
        check_histogram(cluster, "vllm:request_params_n", "A", [2])
        check_histogram(cluster, "vllm:e2e_request_latency_seconds", "A", [1.0, 1.0])
        assert cluster.value("vllm:prompt_tokens_total", engine="A") == 4

    def test_token_buckets_end_at_the_longest_context(self) -> None:
        cluster = MeteredCluster({"A": Role.HYBRID})  # 100 tokens
        cluster.submit(prompt=range(150), max_tokens=1)
        cluster.news("A", 1.0, token_ids=(97,), scheduled_s=0.5, finish_reason="length")
        name = "vllm:request_prompt_tokens_bucket"
        assert cluster.value(name, engine="A", le="100.0") == 0
        assert cluster.value(name, engine="A", le="+Inf") == 1
        bounds = [labels["le"] for labels, _ in samples_of(cluster.metrics, name)]
        assert bounds == ["1.0", "2.0", "5.0", "10.0", "20.0", "50.0", "100.0", "+Inf"]


class TestHandOff:
    def test_work_counts_where_it_was_done(self) -> None:
        cluster = MeteredCluster(PAIR)
        cluster.submit(prompt=range(40), max_tokens=3)
        cluster.news("P", 1.0, token_ids=(97,), scheduled_s=0.5)
        cluster.news("D", 1.5, start=1, handoff=handoff())
        cluster.news("D", 2.0, start=1, token_ids=(97,))
        cluster.news("D", 2.25, start=2, token_ids=(97,), finish_reason="length")
        check_histogram(cluster, "vllm:time_to_first_token_seconds", "P", [1.0])
        check_histogram(cluster, "vllm:time_to_first_token_seconds", "D", [])
        check_histogram(cluster, "vllm:inter_token_latency_seconds", "P", [])
        check_histogram(cluster, "vllm:inter_token_latency_seconds", "D", [1.0, 0.25])
        check_histogram(cluster, "vllm:e2e_request_latency_seconds", "D", [2.25])
        assert cluster.value("vllm:generation_tokens_total", engine="P") == 1
        assert cluster.value("vllm:generation_tokens_total", engine="D") == 2
        assert cluster.value("flowkv_placements_total", engine="P", role="prefill") == 1
        assert cluster.value("flowkv_placements_total", engine="D", role="decode") == 1
        assert cluster.total("flowkv_placements_total") == 2

    def test_transfers(self) -> None:
        cluster = MeteredCluster(PAIR)
        cluster.submit(max_tokens=3)
        cluster.news("P", 1.0, token_ids=(97,), scheduled_s=0.5)
        cluster.news("D", 1.5, start=1, handoff=handoff())
        labels = {"path": "Direct", "backend": "tcp"}
        for name, value in {"calls": 2, "runs": 2, "bytes": 3000, "seconds": 0.5}.items():
            assert cluster.value(f"flowkv_kv_transfer_{name}_sum", **labels) == value
            assert cluster.value(f"flowkv_kv_transfer_{name}_count", **labels) == 1
        for phase, value in {"deferred": 0.25, "transfer": 0.5, "total": 0.625}.items():
            assert cluster.value("flowkv_handoff_seconds_sum", phase=phase) == value
        link = {"source": "P", "destination": "D"}
        assert cluster.value("flowkv_link_bytes_total", **link) == 3000
        assert cluster.value("flowkv_link_handoffs_total", **link) == 1
        for name, values in {
            "nixl_xfer_time_seconds": [0.5],
            "nixl_post_time_seconds": [0.125],
            "nixl_bytes_transferred": [3000],
            "nixl_num_descriptors": [2],
        }.items():
            check_histogram(cluster, f"vllm:{name}", "D", values)
        for name, blocks in {"queries": 4, "hits": 3}.items():
            counter = f"vllm:external_prefix_cache_{name}_total"
            assert cluster.value(counter, engine="D") == 16 * blocks

    def test_nothing_that_did_not_move_is_a_transfer(self) -> None:
        cluster = MeteredCluster(PAIR)
        cluster.submit(max_tokens=3)
        cluster.news("P", 1.0, token_ids=(97,), scheduled_s=0.5)
        all_there = handoff(calls=0, runs=0, data_bytes=0, num_reused_blocks=4, path="none")
        cluster.news("D", 1.5, start=1, handoff=all_there)
        assert cluster.value("flowkv_handoff_seconds_count", phase="total") == 1
        assert cluster.total("flowkv_kv_transfer_calls_count") == 0
        check_histogram(cluster, "vllm:nixl_xfer_time_seconds", "D", [])

    def test_one_that_fails(self) -> None:
        cluster = MeteredCluster(PAIR | {"E": Role.DECODE})
        cluster.submit(max_tokens=3)
        cluster.news("P", 1.0, token_ids=(97,), scheduled_s=0.5)
        for at_s in (1.1, 1.2):
            cluster.nodes["P"].hear()
            (held,) = cluster.nodes["P"].held.values()
            target = held.target
            cluster.news("P", at_s, start=1, handoff_error="no", decode_node=target)
        assert cluster.value("flowkv_redirects_total", reason="handoff_failed") == 2
        assert cluster.total("vllm:nixl_num_failed_transfers_total") == 2


class TestOtherServers:
    def test_a_prompt_that_another_server_computed(self) -> None:
        """Its node is none of ours: what it did counts where the K/V came to."""
        cluster = MeteredCluster({"D": Role.HYBRID})
        cluster.dispatcher.add_node(ScriptedNode("theirs", cluster.nodes))
        caller = new_caller(prompt=range(8), max_tokens=3)
        caller.submission.prefill_node = "theirs"
        caller.accepted = cluster.dispatcher.submit(caller.submission)
        cluster.news("theirs", 1.0, token_ids=(97,), scheduled_s=0.5, num_cached_tokens=8)
        cluster.news("D", 1.5, start=1, handoff=handoff(src="theirs"))
        cluster.news("D", 2.0, start=1, token_ids=(97, 98), finish_reason="length")
        check_histogram(cluster, "vllm:time_to_first_token_seconds", "D", [1.0])
        assert cluster.value("vllm:prompt_tokens_total", engine="D") == 8
        assert cluster.value("vllm:prompt_tokens_cached_total", engine="D") == 8
        assert cluster.value("vllm:generation_tokens_total", engine="D") == 3
        for source, value in {"external_kv_transfer": 8, "local_compute": 0}.items():
            name = "vllm:prompt_tokens_by_source_total"
            assert cluster.value(name, engine="D", source=source) == value
        assert b"theirs" not in cluster.metrics.render()[0]


class TestEnds:
    def test_aborts_are_counted_and_no_times_of_theirs(self) -> None:
        cluster = MeteredCluster({"A": Role.HYBRID})
        cluster.submit()
        cluster.news("A", 1.0, token_ids=(97,), scheduled_s=0.5)
        cluster.dispatcher.abort(["r"])
        ends = "vllm:request_success_total"
        assert cluster.value(ends, engine="A", finished_reason="abort") == 1
        check_histogram(cluster, "vllm:e2e_request_latency_seconds", "A", [])
        check_histogram(cluster, "vllm:time_to_first_token_seconds", "A", [1.0])

    def test_what_no_node_had_to_do_with_has_no_engine(self) -> None:
        cluster = MeteredCluster({})
        cluster.submit(prompt=range(7))
        assert cluster.value("vllm:num_requests_waiting") == 1
        assert cluster.value("vllm:num_requests_waiting_by_reason", reason="capacity") == 1
        assert cluster.value("flowkv_pending_sequences") == 1
        assert cluster.value("flowkv_waiting_requests") == 1
        assert cluster.value("flowkv_waiting_prompt_tokens") == 7
        cluster.dispatcher.abort(["r"])
        assert cluster.value("vllm:request_success_total", finished_reason="abort") == 1
        assert cluster.value("vllm:num_requests_waiting") == 0

    def test_refusals_by_bound(self) -> None:
        cluster = MeteredCluster({}, max_waiting_requests=2, max_waiting_tokens=10)
        cluster.submit("a", prompt=range(6))
        cluster.submit("b", prompt=range(6))
        name = "vllm:admission_rejections_total"
        assert cluster.value(name, reason="max_num_queued_tokens") == 1
        cluster.submit("c", prompt=range(2))
        cluster.submit("d", prompt=range(2))
        assert cluster.value(name, reason="max_num_queued_reqs") == 1
        cluster.submit("c")  # its name is in use: no queue is full
        assert cluster.total(name) == 2


class TestFailover:
    @pytest.mark.parametrize(
        ("error", "reason"),
        [(RetryableRequestError("full"), "node_refused"), (EngineDeadError("x"), "node_refused")],
    )
    def test_a_node_that_refuses(self, error: Exception, reason: str) -> None:
        cluster = MeteredCluster({"A": Role.HYBRID, "B": Role.HYBRID})
        for node in cluster.nodes.values():
            node.refusals.append(error)
        cluster.submit()
        for node in cluster.nodes.values():
            node.hear()
        assert cluster.value("flowkv_lost_places_total", reason=reason) >= 1
        assert cluster.value("flowkv_failovers_total") >= 1

    def test_a_node_that_is_lost(self) -> None:
        cluster = MeteredCluster({"A": Role.HYBRID})
        cluster.submit()
        cluster.news("A", 1.0, token_ids=(97,), scheduled_s=0.5)
        cluster.leave("A")
        assert cluster.value("flowkv_lost_places_total", reason="node_lost") == 1
        assert cluster.value("flowkv_failovers_total") == 0
        cluster.join("B")
        assert cluster.value("flowkv_failovers_total") == 1
        assert cluster.total("flowkv_lost_places_total") == 1
        # The prompt is computed again, and that is no first token.
        cluster.news("B", 2.0, start=1, token_ids=(97,), scheduled_s=1.5)
        check_histogram(cluster, "vllm:time_to_first_token_seconds", "B", [])
        check_histogram(cluster, "vllm:inter_token_latency_seconds", "B", [1.0])
