"""A benchmark of guidellm over chat completions, and one over completions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from checklist import num_unfinished, require, require_equal, run_checks, surroundings, wait_until
from tool import program, run_tool

NUM_REQUESTS, PROMPT_TOKENS, OUTPUT_TOKENS = 12, 64, 16


def _benchmark(request_format: str) -> dict[str, Any]:
    path = Path(surroundings.scratch) / f"{request_format.strip('/').replace('/', '-')}.json"
    backend = f"kind=openai_http,target={surroundings.http},model={surroundings.model}"
    data = f"kind=synthetic_text,prompt_tokens={PROMPT_TOKENS},output_tokens={OUTPUT_TOKENS}"
    run_tool(
        [
            *(program("guidellm"), "run", "--disable-progress"),
            *("--backend", f"{backend},request_format={request_format}"),
            *("--tokenizer", f"kind=hf_auto,model={surroundings.tokenizer}"),
            *("--data", data),
            *("--profile", "kind=concurrent,streams=4"),
            *("--constraint", f"kind=max_requests,count={NUM_REQUESTS}"),
            *("--output", f"kind=json,path={path}"),
        ]
    )
    (benchmark,) = json.loads(path.read_text(encoding="utf-8"))["benchmarks"]
    return dict(benchmark)


def _check(request_format: str) -> None:
    benchmark = _benchmark(request_format)
    totals = benchmark["metrics"]["request_totals"]
    require_equal(totals["successful"], NUM_REQUESTS, "requests that succeeded")
    require_equal(totals["errored"], 0, "requests that failed")
    for request in benchmark["requests"]["successful"]:
        require_equal(request["output_tokens"], OUTPUT_TOKENS, "output tokens of a request")
        require(request["time_to_first_token_ms"] > 0, "no time to first token was measured")
        require(request["prompt_tokens"] >= PROMPT_TOKENS, f"{request['prompt_tokens']} in prompt")
    wait_until(lambda: num_unfinished(surroundings.http) == 0, "no request is left behind")


def check_chat_completions() -> None:
    _check("/v1/chat/completions")


def check_completions() -> None:
    _check("/v1/completions")


if __name__ == "__main__":
    run_checks(__name__)
