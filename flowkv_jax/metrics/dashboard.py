"""The Grafana board in `docs/grafana`.

    python -m flowkv_jax.metrics.dashboard docs/grafana

A test holds the files to this module, and each metric asked for to what an engine exports.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from flowkv_jax.metrics.grafana import Dashboard, Panel, Query, Row, Threshold

_MODEL = 'model_name=~"$model_name"'
_NODE = f'{_MODEL},engine=~"$engine"'
_GREEN: Threshold = (None, "green")


def _rate(metric: str, by: str = "", labels: str = _NODE) -> str:
    per = f" by ({by})" if by else ""
    return f"sum{per} (rate({metric}{{{labels}}}[$__rate_interval]))"


def _quantile(share: float, histogram: str, by: str = "", labels: str = _NODE) -> str:
    per = ", ".join(("le", by)) if by else "le"
    return f"histogram_quantile({share}, {_rate(f'{histogram}_bucket', per, labels)})"


def _mean(histogram: str, by: str = "", labels: str = _NODE) -> str:
    return f"{_rate(f'{histogram}_sum', by, labels)} / {_rate(f'{histogram}_count', by, labels)}"


def _quantiles(histogram: str, labels: str = _NODE) -> list[Query]:
    return [
        Query(_quantile(share, histogram, labels=labels), name)
        for share, name in ((0.5, "median"), (0.9, "p90"), (0.99, "p99"))
    ]


_QUEUED = (_GREEN, (10, "yellow"), (50, "red"))
_USED = (_GREEN, (0.9, "orange"), (0.98, "red"))

_OVERVIEW = Row(
    "Overview",
    [
        Panel(
            title="Queued requests",
            meaning="Requests that wait to be computed, those that no node serves yet included. The"
            " first number to look at: above 10 callers notice, above 50 capacity is short.",
            queries=[
                Query(f"sum(vllm:num_requests_waiting{{{_MODEL}}})", "queued"),
            ],
            kind="stat",
            thresholds=_QUEUED,
            columns=4,
        ),
        Panel(
            title="Requests",
            meaning="Requests in the batches that are computed, and those that wait.",
            queries=[
                Query(
                    f"sum by (engine) (vllm:num_requests_running{{{_NODE}}})", "running {{engine}}"
                ),
                Query(
                    f"sum by (engine) (vllm:num_requests_waiting{{{_MODEL}}})", "waiting {{engine}}"
                ),
            ],
            thresholds=_QUEUED,
            columns=10,
        ),
        Panel(
            title="Tokens a second",
            meaning="Prompt tokens of requests that got their first token, and tokens given out.",
            queries=[
                Query(_rate("vllm:prompt_tokens_total"), "prompt"),
                Query(_rate("vllm:generation_tokens_total"), "output"),
            ],
            columns=10,
        ),
        Panel(
            title="Time to first token",
            meaning="From arrival to first token.",
            queries=_quantiles("vllm:time_to_first_token_seconds"),
            unit="s",
        ),
        Panel(
            title="Time between tokens",
            meaning="From a token of a stream to the next.",
            queries=_quantiles("vllm:inter_token_latency_seconds"),
            unit="s",
        ),
        Panel(
            title="Time of a request",
            meaning="From arrival to end.",
            queries=_quantiles("vllm:e2e_request_latency_seconds"),
            unit="s",
        ),
        Panel(
            title="Where the time goes",
            meaning="Mean times of finished requests: waiting, prefill, decode.",
            queries=[
                Query(_mean("vllm:request_queue_time_seconds"), "queue"),
                Query(_mean("vllm:request_prefill_time_seconds"), "prefill"),
                Query(_mean("vllm:request_decode_time_seconds"), "decode"),
            ],
            unit="s",
            stacks=True,
        ),
        Panel(
            title="Ends and refusals a second",
            meaning="Requests by how they ended, and those refused because a queue was full.",
            queries=[
                Query(
                    _rate("vllm:request_success_total", "finished_reason", _MODEL),
                    "{{finished_reason}}",
                ),
                Query(
                    _rate("vllm:admission_rejections_total", "reason", _MODEL),
                    "refused: {{reason}}",
                ),
            ],
            unit="reqps",
        ),
        Panel(
            title="Prompt and answer lengths",
            meaning="Mean tokens of a request.",
            queries=[
                Query(_mean("vllm:request_prompt_tokens"), "prompt"),
                Query(_mean("vllm:request_generation_tokens"), "answer"),
            ],
        ),
        Panel(
            title="Tokens a step",
            meaning="Mean tokens that a node computes in a step.",
            queries=[Query(_mean("vllm:iteration_tokens_total", "engine"), "{{engine}}")],
        ),
        Panel(
            title="Front process",
            meaning="Processors that the process clients talk to keeps busy. It holds the nodes too"
            " where they are no processes of their own.",
            queries=[Query("rate(process_cpu_seconds_total[$__rate_interval])", "{{instance}}")],
        ),
        Panel(
            title="Prompt tokens that wait",
            meaning="Tokens of prompts without a first token, and how long the nodes' queues are"
            " predicted to take.",
            queries=[
                Query(f"sum(flowkv_waiting_prompt_tokens{{{_MODEL}}})", "tokens"),
                Query(f"sum by (engine) (flowkv_queued_tokens{{{_NODE}}})", "at {{engine}}"),
            ],
        ),
    ],
)

_CACHE = Row(
    "KV cache",
    [
        Panel(
            title="Blocks in use",
            meaning="Share of each node's blocks that live requests hold; prefill nodes too.",
            queries=[Query(f"vllm:kv_cache_usage_perc{{{_NODE}}}", "{{engine}}")],
            unit="percentunit",
            thresholds=_USED,
            maximum=1,
        ),
        Panel(
            title="Fragmentation",
            meaning="1 - largest free segment / free blocks. At 0 every hand-off can be one call.",
            queries=[Query(f"flowkv_kv_fragmentation{{{_NODE}}}", "{{engine}}")],
            unit="percentunit",
            maximum=1,
        ),
        Panel(
            title="Free blocks",
            meaning="Blocks that can be handed out now.",
            queries=[Query(f"flowkv_kv_free_blocks{{{_NODE}}}", "{{engine}}")],
        ),
        Panel(
            title="Prefix hit rate",
            meaning="Share of prompt tokens that were found in the prefix cache.",
            queries=[
                Query(
                    f"{_rate('vllm:prefix_cache_hits_total', 'engine')} / "
                    f"{_rate('vllm:prefix_cache_queries_total', 'engine')}",
                    "{{engine}}",
                )
            ],
            unit="percentunit",
            maximum=1,
        ),
        Panel(
            title="Prompt tokens by source",
            meaning="Prompt tokens that were computed, and that were cached.",
            queries=[Query(_rate("vllm:prompt_tokens_by_source_total", "source"), "{{source}}")],
            stacks=True,
        ),
        Panel(
            title="Preemptions a second",
            meaning="Requests that lost their blocks to others, and those in the host's memory.",
            queries=[
                Query(_rate("vllm:num_preemptions_total", "engine"), "preempted {{engine}}"),
                Query(f"flowkv_num_requests_swapped{{{_NODE}}}", "swapped {{engine}}"),
            ],
        ),
        Panel(
            title="Requests that wait, by reason",
            meaning="For capacity, or for K/V on their way in.",
            queries=[
                Query(
                    f"sum by (reason) (vllm:num_requests_waiting_by_reason{{{_MODEL}}})",
                    "{{reason}}",
                )
            ],
            stacks=True,
        ),
    ],
)

_DISAGGREGATION = Row(
    "Disaggregation",
    [
        Panel(
            title="Hand-off time",
            meaning="From the reservation at the decode node, or the end of prefill if that is"
            " later, to the acknowledgement.",
            queries=_quantiles("flowkv_handoff_seconds", f'{_MODEL},phase="total"'),
            unit="s",
        ),
        Panel(
            title="Hand-off phases",
            meaning="Mean times of waiting for room at the decode node, and of moving blocks.",
            queries=[Query(_mean("flowkv_handoff_seconds", "phase", _MODEL), "{{phase}}")],
            unit="s",
        ),
        Panel(
            title="Calls and runs of a transfer",
            meaning="Mean calls that move a sequence's blocks, and runs that they make: 1 is what"
            " block-major pools and contiguous allocation are for.",
            queries=[
                Query(_mean("flowkv_kv_transfer_calls", "path, backend", _MODEL), "calls {{path}}"),
                Query(_mean("flowkv_kv_transfer_runs", "path, backend", _MODEL), "runs {{path}}"),
            ],
        ),
        Panel(
            title="Bytes a second by path",
            meaning="K/V moved between nodes.",
            queries=[
                Query(
                    _rate("flowkv_kv_transfer_bytes_sum", "path, backend", _MODEL),
                    "{{path}} over {{backend}}",
                )
            ],
            unit="Bps",
            stacks=True,
        ),
        Panel(
            title="Speed of a transfer",
            meaning="Bytes for each second that a transfer takes.",
            queries=[
                Query(
                    f"{_rate('flowkv_kv_transfer_bytes_sum', 'path, backend', _MODEL)} / "
                    f"{_rate('flowkv_kv_transfer_seconds_sum', 'path, backend', _MODEL)}",
                    "{{path}} over {{backend}}",
                )
            ],
            unit="Bps",
        ),
        Panel(
            title="Bytes a second between nodes",
            meaning="K/V moved, by where from and where to.",
            queries=[
                Query(
                    _rate("flowkv_link_bytes_total", "source, destination", _MODEL),
                    "{{source}} to {{destination}}",
                )
            ],
            unit="Bps",
        ),
        Panel(
            title="Sequences on their way",
            meaning="Prompts that are computed and have not left, and blocks reserved for those to"
            " come.",
            queries=[
                Query(f"flowkv_num_requests_sending{{{_NODE}}}", "leaving {{engine}}"),
                Query(f"flowkv_num_requests_receiving{{{_NODE}}}", "coming to {{engine}}"),
            ],
        ),
        Panel(
            title="Load of the roles",
            meaning="Dashed: at or under the lower limit a role is idle, at or above the higher one"
            " overloaded. One of each is the imbalanced regime, in which a node is lent; both"
            " overloaded, or both idle for long, the extreme one, in which nodes come or go.",
            queries=[
                Query(f"flowkv_role_load{{{_MODEL}}}", "{{role}}"),
                Query(f"flowkv_role_load_threshold{{{_MODEL}}}", "limit {{level}}"),
            ],
            dashed="limit .*",
        ),
        Panel(
            title="Load scores",
            meaning="C of each node by the weights of both roles.",
            queries=[Query(f"flowkv_load_score{{{_NODE}}}", "{{engine}} as {{role}}")],
            maximum=1,
        ),
        Panel(
            title="Regime",
            meaning="What the scheduler found.",
            queries=[Query(f"flowkv_regime{{{_MODEL}}} == 1", "{{regime}}")],
            kind="state-timeline",
        ),
        Panel(
            title="Roles of the nodes",
            meaning="What each node does.",
            queries=[Query(f"flowkv_node_role{{{_NODE}}} == 1", "{{engine}}: {{role}}")],
            kind="state-timeline",
        ),
        Panel(
            title="Role switches and decisions a minute",
            meaning="Changes of roles that were carried out, by role taken; decisions by kind.",
            queries=[
                Query(f"60 * {_rate('flowkv_role_switches_total', 'role', _MODEL)}", "to {{role}}"),
                Query(f"60 * {_rate('flowkv_decisions_total', 'kind', _MODEL)}", "{{kind}}"),
            ],
        ),
        Panel(
            title="Failovers a minute",
            meaning="Sequences that lost their place or had to go elsewhere, by reason, and those"
            " that were placed anew.",
            queries=[
                Query(
                    f"60 * {_rate('flowkv_lost_places_total', 'reason', _MODEL)}",
                    "lost: {{reason}}",
                ),
                Query(
                    f"60 * {_rate('flowkv_redirects_total', 'reason', _MODEL)}",
                    "redirected: {{reason}}",
                ),
                Query(f"60 * {_rate('flowkv_failovers_total', '', _MODEL)}", "placed anew"),
            ],
        ),
        Panel(
            title="Failed transfers a minute",
            meaning="Hand-offs that failed, by where they were to go.",
            queries=[
                Query(
                    f"60 * {_rate('vllm:nixl_num_failed_transfers_total', 'engine')}",
                    "to {{engine}}",
                )
            ],
        ),
        Panel(
            title="Placements a second",
            meaning="Sequences given to each node, by what for.",
            queries=[
                Query(_rate("flowkv_placements_total", "engine, role"), "{{role}} at {{engine}}")
            ],
        ),
    ],
)

BOARDS = (
    Dashboard(
        uid="flowkv",
        title="flowkv",
        rows=(_OVERVIEW, _CACHE, _DISAGGREGATION),
        variables=(
            ("model_name", "flowkv_waiting_requests"),
            ("engine", "flowkv_node_epoch"),
        ),
        marks=(
            Query(
                f"increase(flowkv_role_switches_total{{{_MODEL}}}[$__interval]) > 0",
                "role switched",
            ),
        ),
    ),
)


def board_text(board: Dashboard) -> str:
    """As it is written to its file."""
    return json.dumps(board.to_json(), indent=2) + "\n"


def main() -> None:
    """Write every board into the folder that is named on the command line."""
    if len(sys.argv) != 2:
        sys.exit("usage: python -m flowkv_jax.metrics.dashboard FOLDER")
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    for board in BOARDS:
        (folder / f"{board.uid}.json").write_text(board_text(board), encoding="utf-8")


if __name__ == "__main__":
    main()
