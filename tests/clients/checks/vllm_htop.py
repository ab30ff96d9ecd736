"""vllm-htop reads `/metrics`, once as JSON and as its screen."""

from __future__ import annotations

import json
import urllib.request
from typing import Any

from checklist import get, require, require_equal, run_checks, surroundings
from tool import program, run_tool


def _generate(num_requests: int) -> None:
    body = json.dumps(
        {"model": surroundings.model, "prompt": "Count: one, two,", "max_tokens": 8}
    ).encode()
    for _ in range(num_requests):
        request = urllib.request.Request(
            f"{surroundings.http}/v1/completions",
            data=body,
            headers={"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=60) as response:
            response.read()


def _run(*flags: str) -> str:
    return run_tool([program("vllm-htop"), "--url", surroundings.http, "--once", *flags])


def check_json() -> None:
    _generate(3)
    state: dict[str, Any] = json.loads(_run("--output", "json").strip().splitlines()[-1])
    (replica,) = state["replicas"]
    require_equal(replica["status"], "OK", "the status")
    require_equal(replica["model"], surroundings.model, "the model")
    require_equal(state["aggregate"]["up"], 1, "replicas that are up")
    print(json.dumps(state))


def check_screen() -> None:
    screen = _run("--output", "detail")
    require(surroundings.model in screen, f"no model on the screen: {screen[:300]!r}")
    for word in ("DOWN", "nan", "Traceback"):
        require(word not in screen, f"{word!r} on the screen")
    table = _run("--output", "table")
    require("OK" in table, f"the table: {table[:300]!r}")


def check_counters_grow() -> None:
    def generated() -> float:
        status, body = get(f"{surroundings.http}/metrics")
        require_equal(status, 200, "the status of /metrics")
        lines = body.decode().splitlines()
        return sum(
            float(line.rpartition(" ")[2])
            for line in lines
            if line.startswith("vllm:generation_tokens_total")
        )

    before = generated()
    _generate(2)
    require_equal(generated() - before, 16, "vllm:generation_tokens_total after 2 times 8 tokens")


if __name__ == "__main__":
    run_checks(__name__)
