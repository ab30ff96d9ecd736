"""The metrics that dashboards, autoscalers and monitors of vLLM read, by vLLM's names.

`engine` is a node's name. What the front holds itself (sequences that no node serves, or that ended
without one) has no such label. The order is vLLM's too: some readers take the first name that
contains what they look for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import get_args

from prometheus_client.core import Metric

from flowkv_jax.controller.node_totals import NodeTotals
from flowkv_jax.load import NodeLoad
from flowkv_jax.metrics import buckets
from flowkv_jax.metrics.distribution import Distribution, Histogram
from flowkv_jax.metrics.families import Labels, counter, gauge, histogram
from flowkv_jax.metrics.node_tally import NodeTally
from flowkv_jax.metrics.reading import Reading, ServedModel
from flowkv_jax.outputs import FinishReason


class VllmMetrics:
    """One scrape's families.

    Args:
        reading: whose nodes are exported, and nothing of nodes that are not there.
    """

    def __init__(self, reading: Reading, model: ServedModel) -> None:
        self._reading = reading
        self._model = model
        self._front: Labels = {"model_name": model.name}
        names = [node.name for node in reading.snapshot.nodes]
        self._labels = {name: {"model_name": model.name, "engine": name} for name in names}
        self._loads = {n.name: n.load for n in reading.snapshot.nodes if n.load is not None}
        self._tallies = {name: reading.requests.nodes.get(name) or NodeTally() for name in names}

    def collect(self) -> Iterator[Metric]:
        yield from self._queues()
        yield from self._cache()
        yield from self._tokens()
        yield from self._ends()
        yield from self._sizes()
        yield from self._times()
        yield from self._transfers()

    # What nodes report

    def _queues(self) -> Iterator[Metric]:
        num_pending = float(self._reading.num_pending)
        yield self._load_gauge(
            "num_requests_running",
            "Requests in the batches that are computed.",
            lambda load: load.num_requests_running,
        )
        # As in vLLM, one that was preempted, or whose K/V are on their way in, waits.
        waiting = [(self._labels[n], _num_waiting(load)) for n, load in self._loads.items()]
        yield gauge(
            "vllm:num_requests_waiting",
            "Requests that wait to be computed.",
            [(self._front, num_pending), *waiting],
        )
        by_reason = [({**self._front, "reason": "capacity"}, num_pending)]
        for name, load in self._loads.items():
            receiving = float(load.num_requests_receiving)
            for reason, number in (
                ("capacity", _num_waiting(load) - receiving),
                ("deferred", receiving),
            ):
                by_reason.append(({**self._labels[name], "reason": reason}, number))
        yield gauge(
            "vllm:num_requests_waiting_by_reason",
            "Requests that wait: for capacity, or for what is deferred (their K/V to come).",
            by_reason,
        )
        yield gauge(
            "vllm:num_requests_kv_fetch_by_stage",
            "Requests whose K/V come from another node, by stage.",
            [
                ({**self._labels[name], "stage": "in_progress"}, load.num_requests_receiving)
                for name, load in self._loads.items()
            ],
        )

    def _cache(self) -> Iterator[Metric]:
        yield self._load_gauge(
            "kv_cache_usage_perc",
            "Share of the KV cache's blocks that live requests hold, 0 to 1.",
            lambda load: load.kv_cache_usage,
        )
        yield gauge(
            "vllm:cache_config_info",
            "The KV cache's configuration, in labels.",
            [
                (
                    {
                        **self._labels[name],
                        **self._model.cache_facts,
                        "block_size": str(self._model.block_size),
                        "num_gpu_blocks": str(load.num_blocks),
                    },
                    1.0,
                )
                for name, load in self._loads.items()
            ],
        )
        yield self._total(
            "prefix_cache_queries",
            "Prompt tokens that were looked for in the prefix cache.",
            lambda totals: totals.prefix_cache_queries,
        )
        yield self._total(
            "prefix_cache_hits",
            "Prompt tokens that were found in the prefix cache.",
            lambda totals: totals.prefix_cache_hits,
        )
        block_size = self._model.block_size
        yield self._count(
            "external_prefix_cache_queries",
            "Tokens of sequences that came from another node.",
            lambda tally: tally.num_blocks_expected * block_size,
        )
        yield self._count(
            "external_prefix_cache_hits",
            "Tokens of these whose K/V were moved here.",
            lambda tally: tally.num_blocks_received * block_size,
        )
        yield self._total(
            "num_preemptions",
            "How often requests lost their place in the batch, and their blocks.",
            lambda totals: totals.num_preemptions,
        )

    # What the dispatcher counts

    def _tokens(self) -> Iterator[Metric]:
        yield self._count(
            "prompt_tokens",
            "Prompt tokens of requests that got their first token here.",
            lambda tally: tally.num_prompt_tokens,
        )
        sources: dict[str, Callable[[NodeTally], int]] = {
            "local_compute": lambda tally: tally.num_prompt_tokens - _num_given(tally),
            "local_cache_hit": lambda tally: tally.num_cached_tokens,
            "external_kv_transfer": lambda tally: tally.num_external_tokens,
        }
        yield counter(
            "vllm:prompt_tokens_by_source",
            "Prompt tokens by where their K/V came from.",
            [
                ({**self._labels[name], "source": source}, count(tally))
                for name, tally in self._tallies.items()
                for source, count in sources.items()
            ],
        )
        yield self._count(
            "prompt_tokens_cached",
            "Prompt tokens that did not have to be computed.",
            _num_given,
        )
        yield self._count(
            "generation_tokens",
            "Tokens that came from here.",
            lambda tally: tally.num_output_tokens,
        )

    def _ends(self) -> Iterator[Metric]:
        ended = [(self._front, self._reading.requests.nodes[None])]
        ended += [(self._labels[name], tally) for name, tally in self._tallies.items()]
        yield counter(
            "vllm:request_success",
            "Requests that ended, by how.",
            [
                ({**labels, "finished_reason": reason}, tally.ends[reason])
                for labels, tally in ended
                for reason in get_args(FinishReason)
            ],
        )
        yield counter(
            "vllm:admission_rejections",
            "Requests refused because a queue was full, by its bound.",
            [
                ({**self._front, "reason": reason}, number)
                for reason, number in self._reading.requests.refusals.items()
            ],
        )

    def _sizes(self) -> Iterator[Metric]:
        for name, meaning, values in (
            ("request_prompt_tokens", "Prompt tokens of a request.", _field("prompt_tokens")),
            ("request_generation_tokens", "Tokens of an answer.", _field("output_tokens")),
        ):
            yield self._token_counts(name, meaning, values)
        totals = self._reading.totals
        yield histogram(
            "vllm:iteration_tokens_total",
            "Tokens computed in a step.",
            buckets.STEP_TOKENS,
            [
                (labels, totals[name].step_tokens)
                for name, labels in self._labels.items()
                if name in totals
            ],
        )
        yield self._distribution(
            "request_params_n", "Answers asked for by a request.", _field("num_answers")
        )
        yield self._token_counts(
            "request_params_max_tokens", "max_tokens of a request.", _field("max_tokens")
        )

    def _times(self) -> Iterator[Metric]:
        for name, meaning, field in (
            ("time_to_first_token_seconds", "From arrival to first token.", "first_token_s"),
            ("inter_token_latency_seconds", "From a token to the next.", "inter_token_s"),
            (
                "request_time_per_output_token_seconds",
                "Mean time of a request's tokens after its first.",
                "per_output_token_s",
            ),
            ("e2e_request_latency_seconds", "From arrival to end.", "whole_s"),
            ("request_queue_time_seconds", "From arrival to the first step.", "queue_s"),
            ("request_inference_time_seconds", "From first step to last token.", "inference_s"),
            ("request_prefill_time_seconds", "From first step to first token.", "prefill_s"),
            ("request_decode_time_seconds", "From first token to last token.", "decode_s"),
            ("request_num_preemptions", "Preemptions of a request.", "num_preemptions"),
        ):
            yield self._distribution(name, meaning, _field(field))
        yield self._token_counts(
            "request_prefill_kv_computed_tokens",
            "Prompt tokens of a request that were computed, not found in the cache.",
            _field("computed_tokens"),
        )

    def _transfers(self) -> Iterator[Metric]:
        for name, meaning, field in (
            ("nixl_xfer_time_seconds", "Moving the K/V of a hand-off to here.", "transfer_s"),
            ("nixl_post_time_seconds", "From when they were complete to that.", "overhead_s"),
            ("nixl_bytes_transferred", "Bytes moved by a hand-off.", "transfer_bytes"),
            ("nixl_num_descriptors", "Transfer calls of a hand-off.", "num_descriptors"),
        ):
            yield self._distribution(name, meaning, _field(field))
        requests = self._reading.requests
        for name, meaning, counts in (
            (
                "nixl_num_failed_transfers",
                "Hand-offs to here that failed.",
                requests.failed_transfers,
            ),
            (
                "nixl_num_failed_notifications",
                "Hand-offs from here whose acknowledgement was lost.",
                requests.lost_acknowledgements,
            ),
            (
                "nixl_num_kv_expired_reqs",
                "Prompts held here for another server that nobody came for in time.",
                self._reading.num_expired_holds,
            ),
        ):
            samples = [(labels, counts.get(node, 0)) for node, labels in self._labels.items()]
            yield counter(f"vllm:{name}", meaning, samples)

    # Families over nodes

    def _load_gauge(self, name: str, meaning: str, value: Callable[[NodeLoad], float]) -> Metric:
        samples = [(self._labels[node], value(load)) for node, load in self._loads.items()]
        return gauge(f"vllm:{name}", meaning, samples)

    def _total(self, name: str, meaning: str, value: Callable[[NodeTotals], float]) -> Metric:
        totals = self._reading.totals
        there = [node for node in self._labels if node in totals]
        samples = [(self._labels[node], value(totals[node])) for node in there]
        return counter(f"vllm:{name}", meaning, samples)

    def _count(self, name: str, meaning: str, value: Callable[[NodeTally], float]) -> Metric:
        samples = [(self._labels[node], value(tally)) for node, tally in self._tallies.items()]
        return counter(f"vllm:{name}", meaning, samples)

    def _distribution(
        self, name: str, meaning: str, value: Callable[[NodeTally], Distribution]
    ) -> Metric:
        bounds = value(NodeTally()).bounds
        samples = [
            (self._labels[node], value(tally).histogram()) for node, tally in self._tallies.items()
        ]
        return histogram(f"vllm:{name}", meaning, bounds, samples)

    def _token_counts(
        self, name: str, meaning: str, value: Callable[[NodeTally], Distribution]
    ) -> Metric:
        """Up to the longest context, as vLLM has it."""
        bounds = buckets.request_tokens(self._model.max_model_len)
        samples: list[tuple[Labels, Histogram]] = [
            (self._labels[node], value(tally).histogram().up_to(len(bounds)))
            for node, tally in self._tallies.items()
        ]
        return histogram(f"vllm:{name}", meaning, bounds, samples)


def _field(name: str) -> Callable[[NodeTally], Distribution]:
    def value(tally: NodeTally) -> Distribution:
        distribution: Distribution = getattr(tally, name)
        return distribution

    return value


def _num_given(tally: NodeTally) -> int:
    """Prompt tokens that were not computed here."""
    return tally.num_cached_tokens + tally.num_external_tokens


def _num_waiting(load: NodeLoad) -> float:
    return load.num_requests_waiting + load.num_requests_swapped + load.num_requests_receiving
