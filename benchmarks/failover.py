"""How long streams stand still when a worker is killed: from `kill -9` to each one's next token.

    python -m benchmarks.failover --kill decode --streams 8 --repeat 5

Starts `flowkv serve` with workers, opens streams, kills a worker once all of them flow, waits until
all have ended, and compares every answer with the same request served undisturbed. Streams that
were not on the killed worker show that nothing else stands still.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from benchmarks.served import Served, serving
from flowkv_jax.rpc.client import Client
from flowkv_jax.sampling_params import SamplingParams

_START_TIMEOUT_S, _RESTORE_TIMEOUT_S = 120.0, 120.0


@dataclass
class Stream:
    """One answer and when its tokens came, in seconds of this process's clock."""

    prompt: list[int]
    tokens: list[int] = field(default_factory=list)
    times_s: list[float] = field(default_factory=list)
    error: str | None = None

    def run(self, client: Client, num_tokens: int) -> None:
        params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
        try:
            for output in client.generate([self.prompt], params, stream=True):
                now_s = time.monotonic()
                for token in output.outputs[0].delta_token_ids:
                    self.tokens.append(token)
                    self.times_s.append(now_s)
        except Exception as error:
            self.error = f"{type(error).__name__}: {error}"

    def stalled_s(self, at_s: float) -> float | None:
        """From `at_s` to the next token; None if none came later."""
        return next((t - at_s for t in self.times_s if t > at_s), None)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.failover",
                                     description=__doc__.split("\n", 1)[0])  # fmt: skip
    add = parser.add_argument
    add("--kill", choices=("prefill", "decode"), default="decode", help="role of the victim")
    add("--prefill-nodes", type=int, default=1)
    add("--decode-nodes", type=int, default=1)
    add("--streams", type=int, default=8)
    add("--prompt-len", type=int, default=256, help="tokens (default: 256)")
    add("--output-len", type=int, default=128, help="tokens (default: 128)")
    add("--repeat", type=int, default=5, help="kills (default: 5)")
    add("--json", action="store_true", help="print JSON")
    add("--serve", default="", metavar="FLAGS", help="more flags for the server, in one string")
    args = parser.parse_args(argv)
    flags = ["--prefill-nodes", str(args.prefill_nodes), "--decode-nodes", str(args.decode_nodes)]
    rounds = []
    with serving([*flags, *args.serve.split()]) as served, Client(served.address) as client:
        wanted = {role: len(served.worker_pids(role)) for role in ("prefill", "decode")}
        for turn in range(args.repeat):
            rounds.append(_round(args, served, client, turn))
            _wait_restored(served, wanted)
    report = _summary(rounds)
    print(json.dumps(report, indent=2) if args.json else _text(report))
    return 1 if report["failed"] or report["different"] else 0


def _round(
    args: argparse.Namespace, served: Served, client: Client, turn: int
) -> dict[str, list[float] | int]:
    chooser = random.Random(turn)
    streams = [
        Stream([chooser.randrange(1000, 40_000) for _ in range(args.prompt_len)])
        for _ in range(args.streams)
    ]
    threads = [
        threading.Thread(target=stream.run, args=(client, args.output_len)) for stream in streams
    ]
    for thread in threads:
        thread.start()
    _wait(lambda: all(len(s.tokens) >= 8 or s.error for s in streams), _START_TIMEOUT_S)
    victim = served.worker_pids(args.kill)[0]
    at_s = time.monotonic()
    os.kill(victim, signal.SIGKILL)
    for thread in threads:
        thread.join()
    stalls = [s.stalled_s(at_s) for s in streams if len(s.tokens) and s.times_s[-1] > at_s]
    different = 0
    for stream in streams:
        again = Stream(stream.prompt)
        again.run(client, args.output_len)
        different += again.tokens != stream.tokens
    return {
        "stalls_s": [s for s in stalls if s is not None],
        "failed": sum(s.error is not None for s in streams),
        "different": different,
    }


def _wait_restored(served: Served, wanted: dict[str, int]) -> None:
    _wait(
        lambda: all(len(served.worker_pids(role)) >= count for role, count in wanted.items()),
        _RESTORE_TIMEOUT_S,
    )
    time.sleep(10.0)  # it has to load its model and join


def _wait(is_so: object, timeout_s: float) -> None:
    ends_s = time.monotonic() + timeout_s
    while not is_so():  # type: ignore[operator]
        if time.monotonic() > ends_s:
            raise SystemExit(f"waited {timeout_s:g} s in vain")
        time.sleep(0.005)


def _summary(rounds: Sequence[dict]) -> dict:
    stalls = sorted(s for one in rounds for s in one["stalls_s"])
    return {
        "kills": len(rounds),
        "streams": len(stalls),
        "stall_ms": {
            "p50": 1e3 * statistics.median(stalls) if stalls else None,
            "max": 1e3 * stalls[-1] if stalls else None,
        },
        "failed": sum(one["failed"] for one in rounds),
        "different": sum(one["different"] for one in rounds),
    }


def _text(report: dict) -> str:
    stall = report["stall_ms"]
    return (
        f"{report['kills']} kills, {report['streams']} streams: next token after"
        f" p50 {stall['p50'] or 0:.0f} ms, max {stall['max'] or 0:.0f} ms;"
        f" {report['failed']} failed, {report['different']} with other tokens"
    )


if __name__ == "__main__":
    raise SystemExit(main())
