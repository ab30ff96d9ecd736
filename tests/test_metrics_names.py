"""Names, types, labels and buckets, as readers of vLLM's metrics know them."""

from __future__ import annotations

import pytest

from flowkv_jax.controller.role import Role
from flowkv_jax.metrics.serving_metrics import ServingMetrics
from tests.metered_cluster import OPENMETRICS, MeteredCluster, families_of

LATENCY = (
    "0.3 0.5 0.8 1.0 1.5 2.0 2.5 5.0 10.0 15.0 20.0 30.0 40.0 50.0 60.0 120.0 240.0 480.0 960.0"
    " 1920.0 7680.0"
)
FIRST_TOKEN = (
    "0.001 0.005 0.01 0.02 0.04 0.06 0.08 0.1 0.25 0.5 0.75 1.0 2.5 5.0 7.5 10.0 20.0 40.0 80.0"
    " 160.0 640.0 2560.0"
)
INTER_TOKEN = (
    "0.01 0.025 0.05 0.075 0.1 0.15 0.2 0.3 0.4 0.5 0.75 1.0 2.5 5.0 7.5 10.0 20.0 40.0 80.0"
)
TOKENS = "1.0 2.0 5.0 10.0 20.0 50.0 100.0"
STEP = "1.0 8.0 16.0 32.0 64.0 128.0 256.0 512.0 1024.0 2048.0 4096.0 8192.0 16384.0"
TRANSFER = "0.005 0.01 0.025 0.05 0.075 0.1 0.2 0.3 0.5 0.75 1.0 5.0"
BYTES = (
    "2048.0 8192.0 32768.0 131072.0 524288.0 2.097152e+06 8.388608e+06 3.3554432e+07"
    " 1.34217728e+08 5.36870912e+08 2.147483648e+09 8.589934592e+09"
)
DESCRIPTORS = (
    "10.0 20.0 30.0 50.0 75.0 100.0 200.0 400.0 1000.0 2000.0 4000.0 10000.0 20000.0 50000.0"
)
HISTOGRAMS = {
    "time_to_first_token_seconds": FIRST_TOKEN,
    "inter_token_latency_seconds": INTER_TOKEN,
    "request_time_per_output_token_seconds": INTER_TOKEN,
    "e2e_request_latency_seconds": LATENCY,
    "request_queue_time_seconds": LATENCY,
    "request_inference_time_seconds": LATENCY,
    "request_prefill_time_seconds": LATENCY,
    "request_decode_time_seconds": LATENCY,
    "request_prompt_tokens": TOKENS,
    "request_generation_tokens": TOKENS,
    "request_prefill_kv_computed_tokens": TOKENS,
    "request_params_max_tokens": TOKENS,
    "request_params_n": "1.0 2.0 5.0 10.0 20.0",
    "request_num_preemptions": "1.0 2.0 3.0 4.0 5.0 10.0 20.0",
    "iteration_tokens_total": STEP,
    "nixl_xfer_time_seconds": TRANSFER,
    "nixl_post_time_seconds": f"0.001 {TRANSFER}",
    "nixl_bytes_transferred": BYTES,
    "nixl_num_descriptors": DESCRIPTORS,
}
GAUGES = {
    "num_requests_running": "",
    "num_requests_waiting": "",
    "num_requests_waiting_by_reason": "reason=capacity,deferred",
    "num_requests_kv_fetch_by_stage": "stage=in_progress",
    "kv_cache_usage_perc": "",
}
COUNTERS = {
    "prompt_tokens": "",
    "prompt_tokens_by_source": "source=external_kv_transfer,local_cache_hit,local_compute",
    "prompt_tokens_cached": "",
    "generation_tokens": "",
    "prefix_cache_queries": "",
    "prefix_cache_hits": "",
    "external_prefix_cache_queries": "",
    "external_prefix_cache_hits": "",
    "num_preemptions": "",
    "request_success": "finished_reason=abort,error,length,stop",
    "nixl_num_failed_transfers": "",
    "nixl_num_failed_notifications": "",
    "nixl_num_kv_expired_reqs": "",
}


@pytest.fixture(scope="module")
def cluster() -> MeteredCluster:
    return MeteredCluster({"P": Role.PREFILL, "D": Role.DECODE})


def labels_beside_engine(cluster: MeteredCluster, name: str, sample: str) -> str:
    """The label that splits a node's samples, with its values."""
    values: dict[str, set[str]] = {}
    for one in cluster.families()[name].samples:
        if one.name == sample and one.labels.get("engine") == "P":
            assert one.labels["model_name"] == "m"
            for label, value in one.labels.items():
                values.setdefault(label, set()).add(value)
    assert values.keys() >= {"engine", "model_name"}, name
    return "".join(
        f"{label}={','.join(sorted(found))}"
        for label, found in values.items()
        if label not in ("engine", "model_name")
    )


@pytest.mark.parametrize("name", HISTOGRAMS)
def test_histograms(cluster: MeteredCluster, name: str) -> None:
    family = cluster.families()[f"vllm:{name}"]
    assert family.type == "histogram"
    for engine in ("P", "D"):
        mine = [sample for sample in family.samples if sample.labels["engine"] == engine]
        bounds = [s.labels["le"] for s in mine if s.name == f"vllm:{name}_bucket"]
        assert bounds == [*HISTOGRAMS[name].split(), "+Inf"]
        assert all(s.labels.keys() - {"le"} == {"engine", "model_name"} for s in mine)


@pytest.mark.parametrize("name", GAUGES)
def test_gauges(cluster: MeteredCluster, name: str) -> None:
    assert cluster.families()[f"vllm:{name}"].type == "gauge"
    assert labels_beside_engine(cluster, f"vllm:{name}", f"vllm:{name}") == GAUGES[name]


@pytest.mark.parametrize("name", COUNTERS)
def test_counters(cluster: MeteredCluster, name: str) -> None:
    assert cluster.families()[f"vllm:{name}"].type == "counter"
    assert labels_beside_engine(cluster, f"vllm:{name}", f"vllm:{name}_total") == COUNTERS[name]


def test_cache_config(cluster: MeteredCluster) -> None:
    family = cluster.families()["vllm:cache_config_info"]
    assert {sample.labels["engine"] for sample in family.samples} == {"P", "D"}
    for sample in family.samples:
        assert (sample.labels["block_size"], sample.labels["num_gpu_blocks"]) == ("16", "1000")
        assert sample.labels["cache_dtype"] == "f32" and sample.value == 1


def test_no_other_vllm_metrics(cluster: MeteredCluster) -> None:
    """What is exported under vLLM's name means what it says there: no name of our own."""
    known = HISTOGRAMS.keys() | GAUGES.keys() | COUNTERS.keys()
    known |= {"cache_config_info", "admission_rejections"}
    found = {name.removeprefix("vllm:") for name in cluster.families() if name.startswith("vllm:")}
    assert found == known


def test_readers_that_take_the_first_name_that_fits(cluster: MeteredCluster) -> None:
    """vllm-htop looks for a part of a name."""
    names = [name for name in cluster.families() if name.startswith("vllm:")]
    for part, wanted in {
        "num_requests_waiting": "vllm:num_requests_waiting",
        "prompt_tokens": "vllm:prompt_tokens",
        "generation_tokens": "vllm:generation_tokens",
        "prefix_cache_queries": "vllm:prefix_cache_queries",
        "prefix_cache_hits": "vllm:prefix_cache_hits",
        "time_per_output_token": "vllm:request_time_per_output_token_seconds",
    }.items():
        assert next(name for name in names if part in name) == wanted


class TestFormats:
    def test_both_say_the_same(self, cluster: MeteredCluster) -> None:
        text, openmetrics = cluster.families(), cluster.families(OPENMETRICS)
        mine = [name for name in text if not name.startswith("process_")]
        assert mine == [name for name in openmetrics if not name.startswith("process_")]
        for name in mine:
            assert text[name].samples == openmetrics[name].samples
            assert text[name].type == openmetrics[name].type

    @pytest.mark.parametrize(
        ("accept", "wanted"),
        [
            ("", "text/plain; version=0.0.4"),
            ("*/*", "text/plain; version=0.0.4"),
            ("text/plain;version=0.0.4", "text/plain; version=0.0.4"),
            ("application/openmetrics-text", "application/openmetrics-text; version=1.0.0"),
            (
                "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.6,"
                "application/openmetrics-text;version=0.0.1;q=0.5,"
                "text/plain;version=1.0.0;q=0.3,text/plain;version=0.0.4;q=0.2,*/*;q=0.1",
                "application/openmetrics-text; version=1.0.0",
            ),
            (
                "text/plain;version=0.0.4;q=0.6,application/openmetrics-text;q=0.5",
                "text/plain; version=0.0.4",
            ),
            ("application/openmetrics-text;q=0", "text/plain; version=0.0.4"),
            ("application/openmetrics-text;q=x", "text/plain; version=0.0.4"),
            (";;,,;q=1,\x00", "text/plain; version=0.0.4"),
        ],
    )
    def test_accept(self, cluster: MeteredCluster, accept: str, wanted: str) -> None:
        body, content_type = cluster.metrics.render(accept)
        assert content_type == f"{wanted}; charset=utf-8"
        assert body.endswith(b"# EOF\n") == ("openmetrics" in wanted)
        # Names with a colon are not escaped, whatever the format.
        assert b"vllm:prompt_tokens_total{" in body and b"vllm_prompt" not in body

    def test_the_process(self, cluster: MeteredCluster) -> None:
        """vllm-htop tells the age of the server by the first of these."""
        families = cluster.families()
        assert families["process_start_time_seconds"].samples[0].value > 0
        assert families["process_cpu_seconds"].samples[0].value > 0


def test_engines_of_one_process_do_not_meet() -> None:
    one, other = (MeteredCluster({name: Role.HYBRID}) for name in ("A", "B"))
    one.submit("x")
    one.news("A", 1.0, "x", token_ids=(97,), scheduled_s=0.5)
    assert one.total("vllm:generation_tokens_total") == 1
    assert other.total("vllm:generation_tokens_total") == 0
    assert isinstance(one.metrics, ServingMetrics)
    assert families_of(one.metrics).keys() == families_of(other.metrics).keys()
