"""What the HTTP front door costs: CPU time a streamed token, and time to the first token.

    python -m benchmarks.front_door
    python -m benchmarks.front_door --beside vllm=http://127.0.0.1:8100,PID

Streams: a server with its node in a worker process answers many streams at once; counted is the CPU
time of the front process alone (reading from the worker, text, JSON, sockets), which does the same
whatever the model is. `--beside` puts the same load on another OpenAI-compatible server, in turns
with ours; PID is its process that speaks HTTP, if it computes in another.

First token: one engine in this process, asked by `Engine.generate()` and over HTTP in turns. The
client's own time counts as the server's.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import statistics
import sys
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any
from urllib.parse import urlsplit

import psutil
from rich.console import Console
from rich.table import Table

from benchmarks.http_stream import stream_completion
from benchmarks.served import serving

_PROMPT_IDS = 32
_VOCABULARY = 40_000


@dataclass(frozen=True, slots=True)
class Target:
    """A server to load; `pid` is the process whose CPU time counts."""

    name: str
    host: str
    port: int
    pid: int
    model: str


@dataclass(frozen=True, slots=True)
class StreamCost:
    """One round on one server."""

    name: str
    tokens: int
    events: int
    wall_s: float
    front_cpu_s: float

    @property
    def cpu_us_per_token(self) -> float:
        return 1e6 * self.front_cpu_s / self.tokens


def prompt(number: int) -> list[int]:
    """Token ids that no other number shares a beginning with."""
    return [(7919 * number + 104_729 * i) % _VOCABULARY + 100 for i in range(_PROMPT_IDS)]


async def load(target: Target, num_streams: int, max_tokens: int, first: int) -> StreamCost:
    """`num_streams` answers of `max_tokens` tokens at once."""
    process = psutil.Process(target.pid)

    def cpu_s() -> float:
        times = process.cpu_times()
        return times.user + times.system

    async def one(number: int) -> int:
        body = {
            "model": target.model,
            "prompt": prompt(number),
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
        }
        return sum([1 async for _ in stream_completion(target.host, target.port, body)])

    before_s, began_s = cpu_s(), time.perf_counter()
    events = await asyncio.gather(*(one(first + i) for i in range(num_streams)))
    wall_s, used_s = time.perf_counter() - began_s, cpu_s() - before_s
    return StreamCost(target.name, num_streams * max_tokens, sum(events), wall_s, used_s)


async def compare_streams(
    targets: Sequence[Target], num_streams: int, max_tokens: int, rounds: int
) -> list[StreamCost]:
    """Rounds in turns over the targets, after one that does not count."""
    for target in targets:
        await load(target, num_streams, 16, 0)
    found = []
    for number in range(rounds):
        for target in targets:
            first = (number + 1) * num_streams
            found.append(await load(target, num_streams, max_tokens, first))
    return found


@contextlib.asynccontextmanager
async def served_in_process(engine: Any) -> AsyncIterator[int]:
    """The HTTP port of an engine of this process."""
    from flowkv_jax.config import ServerConfig
    from flowkv_jax.serving import Server

    server = Server(engine, ServerConfig(port=0, grpc_port=0))
    await server.start()
    try:
        yield urlsplit(server.http_address).port
    finally:
        await server.stop()


async def first_token_ms(engine: Any, repetitions: int) -> dict[str, list[float]]:
    """Milliseconds to the first token of `Engine.generate()` and of HTTP, asked in turns."""

    def direct(number: int) -> float:
        began_s = time.perf_counter()
        params = {"max_tokens": 2, "temperature": 0, "ignore_eos": True}
        stream = engine.generate(prompt(number), params, stream=True)
        next(iter(stream))
        took_s = time.perf_counter() - began_s
        for _ in stream:
            pass
        return 1e3 * took_s

    async def over_http(port: int, number: int) -> float:
        body = {
            "model": engine.model_info().served_model_name,
            "prompt": prompt(number),
            "max_tokens": 2,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
        }
        began_s, took_s = time.perf_counter(), 0.0
        async for _ in stream_completion("127.0.0.1", port, body):
            took_s = took_s or time.perf_counter() - began_s
        return 1e3 * took_s

    times: dict[str, list[float]] = {"generate": [], "http": []}
    async with served_in_process(engine) as port:
        for number in range(-3, repetitions):
            took = await asyncio.to_thread(direct, 1000 + 2 * number)
            over = await over_http(port, 1001 + 2 * number)
            if number >= 0:
                times["generate"].append(took)
                times["http"].append(over)
    return times


def _beside(text: str, model: str) -> Target:
    name, _, rest = text.partition("=")
    url, _, pid = rest.rpartition(",")
    parts = urlsplit(url)
    if not (name and parts.hostname and parts.port and pid.isdigit()):
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=http://HOST:PORT,PID")
    return Target(name, parts.hostname, parts.port, int(pid), model)


def _stream_rounds(args: argparse.Namespace) -> list[StreamCost]:
    sizes = ["--max-num-seqs", str(max(32, args.streams)), "--workers=spawn"]
    with serving([*sizes, *args.serve_arguments]) as served:
        host, _, port = served.http_address.rpartition(":")
        ours = Target("flowkv", host, int(port), served.pid, args.model)
        others = [_beside(text, args.beside_model) for text in args.beside]
        targets = [ours, *others]
        return asyncio.run(compare_streams(targets, args.streams, args.tokens, args.rounds))


def _first_token(args: argparse.Namespace) -> dict[str, list[float]]:
    from flowkv_jax import Engine

    with Engine() as engine:
        return asyncio.run(first_token_ms(engine, args.repetitions))


def report(costs: Sequence[StreamCost], first: dict[str, list[float]]) -> dict[str, Any]:
    """Medians, and ours over the others."""
    names = list(dict.fromkeys(cost.name for cost in costs))
    streams = {}
    for name in names:
        rounds = [cost for cost in costs if cost.name == name]
        streams[name] = {
            "cpu_us_per_token": statistics.median(cost.cpu_us_per_token for cost in rounds),
            "tokens_per_s": statistics.median(cost.tokens / cost.wall_s for cost in rounds),
            "tokens_per_event": statistics.median(cost.tokens / cost.events for cost in rounds),
        }
    ours = streams.get("flowkv", {}).get("cpu_us_per_token")
    ratios = {
        name: ours / figures["cpu_us_per_token"]
        for name, figures in streams.items()
        if ours and name != "flowkv"
    }
    medians = {name: statistics.median(times) for name, times in first.items() if times}
    return {
        "streams": streams,
        "cpu_ratio": ratios,
        "first_token_ms": medians,
        "added_ttft_ms": medians["http"] - medians["generate"] if medians else None,
        "rounds": [asdict(cost) for cost in costs],
    }


def show(result: dict[str, Any]) -> None:
    """A table for people."""
    console = Console()
    table = Table(title="front process, streams over HTTP", title_justify="left")
    for column in ("server", "CPU us / token", "tokens / s", "tokens / event", "ours / it"):
        table.add_column(column, justify="left" if column == "server" else "right")
    for name, figures in result["streams"].items():
        ratio = result["cpu_ratio"].get(name)
        table.add_row(
            name,
            f"{figures['cpu_us_per_token']:.1f}",
            f"{figures['tokens_per_s']:.0f}",
            f"{figures['tokens_per_event']:.2f}",
            "" if ratio is None else f"{ratio:.2f}",
        )
    console.print(table)
    if result["first_token_ms"]:
        medians = result["first_token_ms"]
        console.print(
            f"time to first token: Engine.generate() {medians['generate']:.1f} ms, HTTP "
            f"{medians['http']:.1f} ms, added {result['added_ttft_ms']:.1f} ms"
        )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.front_door", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--streams", type=int, default=32, help="at once (default: 32)")
    parser.add_argument("--tokens", type=int, default=128, help="of each answer (default: 128)")
    parser.add_argument("--rounds", type=int, default=3, help="on each server (default: 3)")
    parser.add_argument(
        "--repetitions", type=int, default=30, help="of each first token; 0 leaves it out"
    )
    parser.add_argument("--model", default="smollm2-135m-instruct", help="our served name")
    parser.add_argument("--beside", action="append", default=[], metavar="NAME=URL,PID")
    parser.add_argument("--beside-model", default="m", help="their served name (default: m)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("serve_arguments", nargs="*", help="after --: more flags of flowkv serve")
    args = parser.parse_args(arguments)
    first = _first_token(args) if args.repetitions else {}
    costs = _stream_rounds(args) if args.rounds else []
    result = report(costs, first)
    if args.json:
        print(json.dumps(result))
    else:
        show(result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
