"""A profile by aiperf, which reads `/metrics` beside."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from checklist import num_unfinished, require, require_equal, run_checks, surroundings, wait_until
from tool import program, run_tool

NUM_REQUESTS, OUTPUT_TOKENS = 12, 16


def _profile(endpoint: str) -> Path:
    folder = Path(surroundings.scratch) / endpoint
    run_tool(
        [
            *(program("aiperf"), "profile", "--model", surroundings.model),
            *("--url", surroundings.http, "--endpoint-type", endpoint, "--streaming"),
            *("--tokenizer", surroundings.tokenizer),
            *("--isl", "64", "--isl-stddev", "0", "--osl", str(OUTPUT_TOKENS)),
            *("--extra-inputs", "ignore_eos:true", "--use-server-token-count"),
            *("--concurrency", "4", "--request-count", str(NUM_REQUESTS), "--random-seed", "1"),
            *("--ui", "none", "--no-gpu-telemetry", "--workers-max", "2"),
            *("--output-artifact-dir", str(folder)),
        ]
    )
    return folder


def _read(folder: Path, name: str) -> dict[str, Any]:
    (path,) = folder.rglob(name)
    return dict(json.loads(path.read_text(encoding="utf-8")))


def check_chat_completions() -> None:
    folder = _profile("chat")
    figures = _read(folder, "profile_export_aiperf.json")
    require_equal(figures["request_count"]["avg"], NUM_REQUESTS, "requests that succeeded")
    require(not (figures.get("error_request_count") or {}).get("avg"), "requests failed")
    require_equal(figures["output_sequence_length"]["avg"], OUTPUT_TOKENS, "output tokens")
    require(figures["time_to_first_token"]["avg"] > 0, "no time to first token")
    require(figures["inter_token_latency"]["avg"] > 0, "no time between tokens")
    wait_until(lambda: num_unfinished(surroundings.http) == 0, "no request is left behind")
    metrics = json.dumps(_read(folder, "server_metrics_export.json"))
    for name in ("vllm:generation_tokens", "vllm:time_to_first_token_seconds"):
        require(name in metrics, f"aiperf found no {name} in /metrics")


def check_completions() -> None:
    figures = _read(_profile("completions"), "profile_export_aiperf.json")
    require_equal(figures["request_count"]["avg"], NUM_REQUESTS, "requests that succeeded")


if __name__ == "__main__":
    run_checks(__name__)
