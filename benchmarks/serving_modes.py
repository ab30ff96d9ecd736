"""Colocated and disaggregated serving beside each other, on the same cores and the same requests.

    python -m benchmarks.serving_modes --out DIR

Starts `flowkv serve` for each mode and repetition, in turn, and `flowkv bench serve` against it:

    colocated    one hybrid worker on all cores
    1p1d         a prefill and a decode worker on half of the cores each; aligned runs
    block-major  the same, a call for each block
    layer-major  the same, a call for each block, layer and K or V

and prints them side by side; a report's figures are the medians over repetitions. Workloads:
`random` (three lengths of prompts by rates, after FlowKV's Table 1, scaled), `interference` (short
streams while long prompts arrive) and `trace` (a Mooncake trace, scaled). No node changes its role.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.served import serving

MODES: dict[str, list[str]] = {
    "colocated": ["--hybrid-nodes", "1", "--workers", "spawn"],
    "1p1d": ["--prefill-nodes", "1", "--decode-nodes", "1"],
    "block-major": ["--prefill-nodes", "1", "--decode-nodes", "1",
                    "--handoff-strategy", "block-major"],
    "layer-major": ["--prefill-nodes", "1", "--decode-nodes", "1",
                    "--handoff-strategy", "layer-major"],
}  # fmt: skip

WORKLOADS: dict[str, list[str]] = {
    "random": ["--dataset-name", "random", "--input-len", "128,512,1024", "--output-len", "64"],
    "interference": ["--dataset-name", "interference", "--input-len", "64", "--output-len", "128",
                     "--long-input-len", "1024", "--long-interval", "2"],
    "trace": ["--dataset-name", "trace"],
}  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.serving_modes",
                                     description=__doc__.split("\n", 1)[0])  # fmt: skip
    add = parser.add_argument
    add("--out", type=Path, required=True, help="folder for reports; made if missing")
    add("--modes", default=",".join(MODES), help="with commas (default: all)")
    add("--workload", choices=WORKLOADS, default="random")
    add("--repeat", type=int, default=1, help="runs of each mode, in turn (default: 1)")
    add("--serve", default="", metavar="FLAGS", help="more flags for every server, in one string")
    add("rest", nargs="*", help="after --: more flags of `flowkv bench serve`")
    args = parser.parse_args(argv)
    modes = args.modes.split(",")
    if unknown := [mode for mode in modes if mode not in MODES]:
        parser.error(f"unknown modes {unknown}; there are {list(MODES)}")
    args.out.mkdir(parents=True, exist_ok=True)
    reports: dict[str, list[dict[str, Any]]] = {mode: [] for mode in modes}
    for turn in range(args.repeat):
        for mode in modes:
            file = args.out / f"{args.workload}-{mode}-{turn}.json"
            report = _measure(mode, args.workload, args.serve.split(), args.rest, file)
            reports[mode].append(report)
    medians = [median_report(each) for each in reports.values()]
    files = []
    for mode, report in zip(modes, medians, strict=True):
        files.append(args.out / f"{args.workload}-{mode}.json")
        files[-1].write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    return subprocess.call(
        [sys.executable, "-m", "flowkv_jax.cli", "bench", "serve-compare", *map(str, files)]
    )


def median_report(reports: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One report whose every number is the median of that number over `reports`."""
    merged: dict[str, Any] = _merge(list(reports))
    return merged


def _merge(values: list[Any]) -> Any:
    first = values[0]
    if isinstance(first, dict):
        return {k: _merge([v[k] for v in values if isinstance(v, dict) and k in v]) for k in first}
    if isinstance(first, list):
        if all(isinstance(v, list) and len(v) == len(first) for v in values):
            return [_merge([v[i] for v in values]) for i in range(len(first))]
        return first
    if isinstance(first, int | float) and not isinstance(first, bool):
        numbers = [v for v in values if isinstance(v, int | float)]
        return statistics.median(numbers)
    return first


def _measure(
    mode: str, workload: str, serve: Sequence[str], rest: Sequence[str], file: Path
) -> dict[str, Any]:
    fixed_roles = ["--no-enable-role-switch"]
    with serving([*MODES[mode], *fixed_roles, *serve]) as served:
        before = served.cpu_seconds()
        status = subprocess.call(
            [sys.executable, "-m", "flowkv_jax.cli", "bench", "serve", "--target", served.address,
             "--label", mode, "--json", str(file), *WORKLOADS[workload], *rest]
        )  # fmt: skip
        after = served.cpu_seconds()
    if status:
        raise SystemExit(f"flowkv bench serve ended with status {status} in mode {mode}")
    report: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    report["cpu_seconds"] = {name: after[name] - before[name] for name in after}
    return report


if __name__ == "__main__":
    raise SystemExit(main())
