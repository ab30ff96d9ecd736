"""vllm-htop reads `/metrics`, once as JSON and as its screen."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import select
import signal
import subprocess
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
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
    replicas = state["replicas"]
    print(json.dumps(state))
    require(replicas, "no replica")
    require_equal({replica["status"] for replica in replicas}, {"OK"}, "the status")
    require_equal(state["aggregate"]["up"], len(replicas), "replicas that are up")
    require(all(0 <= replica["kv_pct"] <= 100 for replica in replicas), "kv_pct out of range")
    lifetime = [replica["lifetime"] for replica in replicas]
    for key, least in (("prompt_tokens_total", 3), ("gen_tokens_total", 24), ("requests_total", 3)):
        total = sum(counts[key] or 0 for counts in lifetime)
        require(total >= least, f"{key} is {total} after 3 requests of 8 tokens")
    for key in ("ttft", "tpot", "e2e"):
        medians = [replica["latency_seconds"][key]["p50"] for replica in replicas]
        require(any(median and median > 0 for median in medians), f"{key}: {medians}")


def check_screen() -> None:
    with ThreadPoolExecutor(1) as pool:
        load = pool.submit(_generate, 12)
        screen = _screen_for(4.0)
        load.result()
    state: dict[str, Any] = json.loads(_run("--output", "json").strip().splitlines()[-1])
    engines = [replica["engine"] for replica in state["replicas"]]
    # It draws one replica in full, and several as a table.
    for word in ("Throughput", "Latency") if len(engines) == 1 else engines:
        require(word in screen, f"no {word!r} on the screen: {screen!r}")
    last = screen.split("Monitor")[-1]
    for word in ("DOWN", "nan", "Traceback", "collecting first sample"):
        require(word not in last, f"{word!r} on the screen: {last!r}")


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


def _screen_for(seconds: float) -> str:
    """What it draws on a terminal within this time, until Ctrl-C."""
    terminal, inner = pty.openpty()
    command = [program("vllm-htop"), "--url", surroundings.http, "--interval", "0.5"]
    with subprocess.Popen(command, stdin=inner, stdout=inner, stderr=inner) as process:
        os.close(inner)
        drawn = b""
        ends_at = time.monotonic() + seconds
        try:
            while (left := ends_at - time.monotonic()) > 0:
                if select.select([terminal], [], [], left)[0]:
                    drawn += os.read(terminal, 1 << 16)
            require_equal(process.poll(), None, "the exit status while it should run")
        finally:
            process.send_signal(signal.SIGINT)
            drawn += _rest(terminal)
            os.close(terminal)
    return drawn.decode("utf-8", errors="replace")


def _rest(terminal: int) -> bytes:
    rest = b""
    # Linux answers EIO when the program at the other end is gone.
    with contextlib.suppress(OSError):
        while piece := os.read(terminal, 1 << 16):
            rest += piece
    return rest


if __name__ == "__main__":
    run_checks(__name__)
