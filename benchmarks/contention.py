"""What does choosing the path bring when the direct link is busy? Real bytes over two real links.

    python -m benchmarks.contention                    as root; about two minutes
    python -m benchmarks.contention --transfers 3 --mib 16 --json contention.json

Two hosts, made of network namespaces, are joined by two links of the same rate. A process on one
moves blocks of a KV pool to a process on the other through the transfer engine, by TCP, checksums
verified, in turn

    direct      without a selector: always over link 0
    adaptive    over what `PathSelector` chooses, with loads from a `NodeAgent` that reads the
                interfaces' byte counters: link 0, link 1, or both
    split       always over both, divided by what the agent says they can spare

while link 0 is idle, and while somebody else's traffic takes most of it: `yielding` is TCP with as
many streams as a transfer, which shares the link with whoever else wants it; `steady` is UDP, which
gives way to nobody. Between transfers the agent's window is let run empty of our own.

`benchmarks.contention_hosts` shows the topology. The choice, its input and the use of the chosen
link are the project's; sharing one link among its flows is TCP's and the kernel's work.

Exit status: 0; 1 if a process failed; 2 for wrong arguments; 3 where this machine makes no
namespaces.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.contention_hosts import LLAMA_8B, POLICIES
from benchmarks.namespaces import Host, Hosts, NamespacesUnavailable, namespace_hosts
from flowkv_jax.environment import host_facts, versions

ROOT = Path(__file__).resolve().parents[1]
LOADS = ("idle", "yielding", "steady")
MIB = 1 << 20


@dataclass(frozen=True)
class Settings:
    """What was asked for.

    Attributes:
        transfers: of each policy under each load.
        data_bytes: of one transfer, whole blocks.
        link_bytes_per_s: of each link in each direction, headers included.
        load: share of link 0 that the other traffic takes.
        loads: which of `LOADS`.
    """

    transfers: int = 5
    data_bytes: int = 32 * MIB
    link_bytes_per_s: float = 25e6
    load: float = 0.85
    loads: tuple[str, ...] = LOADS

    @property
    def num_blocks(self) -> int:
        return self.data_bytes // LLAMA_8B.bytes_per_block


@dataclass(frozen=True)
class Sample:
    """One transfer.

    Attributes:
        load, policy: what it belongs to.
        seconds: from submission to acknowledgement.
        data_bytes: moved.
        path_type, routes: the path.
        retries: attempts that failed before.
        utilization: of links 0 and 1, as the agent saw them when the path was chosen.
        reason: the selector's.
    """

    load: str
    policy: str
    seconds: float
    data_bytes: int
    path_type: str
    routes: tuple[str, ...]
    retries: int
    utilization: tuple[float, float]
    reason: str

    @property
    def bytes_per_s(self) -> float:
        return self.data_bytes / self.seconds


class Process:
    """A process of `contention_hosts` on one of the hosts. Ends with its input.

    Args:
        host: where; its processes get no signal of the terminal.
        role: see `contention_hosts`. options: of that role.
    """

    def __init__(self, host: Host, role: str, **options: Any) -> None:
        self._role = role
        module = [sys.executable, "-m", "benchmarks.contention_hosts"]
        self._process = subprocess.Popen(
            [*host.command, *module, role, json.dumps(options)],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def line(self) -> str:
        """The next line it says; RuntimeError where it has ended."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline().strip()
        if not line:
            raise RuntimeError(f"the {self._role} process ended; see above")
        return line

    def ask(self, method: str, *arguments: object) -> Any:
        """Call a method over there; RuntimeError where it raises."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([method, *arguments]) + "\n")
        self._process.stdin.flush()
        said = json.loads(self.line())
        if "error" in said:
            raise RuntimeError(f"{method} on the {self._role} failed: {said['error']}")
        return said["answer"]

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()


def measure(hosts: Hosts, settings: Settings) -> list[Sample]:
    """Run every policy under every load; policies take turns.

    Raises:
        RuntimeError: a process failed, or a load did not come up.
    """
    secret = secrets.token_hex(16)
    samples = []
    with contextlib.ExitStack() as stack:
        num_blocks = settings.num_blocks
        destination = stack.enter_context(
            Process(
                hosts.destination,
                "destination",
                secret=secret,
                num_blocks=2 * num_blocks,
                address="0.0.0.0",
            )
        )
        port = int(destination.line())
        source = stack.enter_context(
            Process(
                hosts.source,
                "source",
                secret=secret,
                addresses=[(address, port) for address in hosts.destination.addresses],
                interfaces=hosts.source.interfaces,
                bytes_per_s=settings.link_bytes_per_s,
                num_blocks=num_blocks,
            )
        )
        for policy in POLICIES:
            # Opens the data streams.
            source.ask("transfer", policy)
        for load in settings.loads:
            with _load(hosts, load, settings):
                share = 0.0 if load == "idle" else settings.load
                for turn in range(settings.transfers):
                    for i in range(len(POLICIES)):
                        policy = POLICIES[(turn + i) % len(POLICIES)]
                        source.ask("settle", share)
                        samples.append(_sample(load, policy, source.ask("transfer", policy)))
    return samples


def _sample(load: str, policy: str, said: dict[str, Any]) -> Sample:
    said["routes"], said["utilization"] = tuple(said["routes"]), tuple(said["utilization"])
    return Sample(load, policy, **said)


@contextlib.contextmanager
def _load(hosts: Hosts, kind: str, settings: Settings) -> Iterator[None]:
    """Other traffic on link 0."""
    if kind == "idle":
        yield
        return
    address = hosts.destination.addresses[0]
    with Process(hosts.destination, "sink", address=address) as sink:
        options = {
            "kind": kind,
            "address": (address, int(sink.line())),
            "bytes_per_s": settings.load * settings.link_bytes_per_s,
        }
        with Process(hosts.source, "load", **options) as load:
            load.line()
            yield


@dataclass(frozen=True)
class Row:
    """One policy under one load.

    Attributes:
        median_bytes_per_s, least_bytes_per_s, most_bytes_per_s: of its transfers.
        ratio: of its median to that of `direct` under the same load.
        utilization: median over transfers, of links 0 and 1.
        paths: how often each was taken, such as "CrossNodeRelay a > b".
        reason: of the last transfer.
    """

    load: str
    policy: str
    median_bytes_per_s: float
    least_bytes_per_s: float
    most_bytes_per_s: float
    ratio: float
    utilization: tuple[float, float]
    paths: dict[str, int]
    reason: str


def summarize(samples: Sequence[Sample]) -> list[Row]:
    """Rows in the order in which loads and policies are named; `direct` must be among them."""
    rows = []
    for load in LOADS:
        of_load = [sample for sample in samples if sample.load == load]
        direct = median([s.bytes_per_s for s in of_load if s.policy == "direct"] or [1.0])
        for policy in POLICIES:
            mine = [sample for sample in of_load if sample.policy == policy]
            if not mine:
                continue
            rates = [sample.bytes_per_s for sample in mine]
            paths = [f"{s.path_type} {' + '.join(s.routes)}" for s in mine]
            busy = tuple(median(sample.utilization[i] for sample in mine) for i in range(2))
            rows.append(
                Row(
                    load=load,
                    policy=policy,
                    median_bytes_per_s=median(rates),
                    least_bytes_per_s=min(rates),
                    most_bytes_per_s=max(rates),
                    ratio=median(rates) / direct,
                    utilization=(busy[0], busy[1]),
                    paths={path: paths.count(path) for path in sorted(set(paths))},
                    reason=mine[-1].reason,
                )
            )
    return rows


def table(rows: Sequence[Row]) -> str:
    """A Markdown table of all rows, and below it what was chosen and why."""
    lines = [
        "| link 0 | policy | MB/s median | least - most | over direct | busy: link 0, link 1 |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        spread = f"{row.least_bytes_per_s / 1e6:.1f} - {row.most_bytes_per_s / 1e6:.1f}"
        busy = f"{row.utilization[0]:.0%}, {row.utilization[1]:.0%}"
        lines.append(
            f"| {row.load} | {row.policy} | {row.median_bytes_per_s / 1e6:.1f} | {spread} "
            f"| {row.ratio:.2f} | {busy} |"
        )
    lines.append("")
    for row in rows:
        paths = ", ".join(f"{count} x {path}" for path, count in row.paths.items())
        lines.append(f"- {row.load}, {row.policy}: {paths} ({row.reason})")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="benchmarks.contention", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--transfers", type=int, default=5, help="of each policy under each load")
    parser.add_argument("--mib", type=int, default=32, help="MiB of one transfer, even, from 8 up")
    parser.add_argument("--mbit", type=float, default=200.0, help="Mbit/s of each link")
    parser.add_argument("--load", type=float, default=0.85, help="share that other traffic takes")
    parser.add_argument("--loads", nargs="+", choices=LOADS, default=LOADS, help="which to run")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything there")
    args = parser.parse_args(arguments)
    if args.transfers < 1 or args.mib < 8 or args.mib % 2 or args.mbit <= 0:
        parser.error("--transfers from 1, --mib even from 8, --mbit above 0")
    if not 0 < args.load < 1:
        parser.error("--load must be between 0 and 1")
    settings = Settings(
        args.transfers, args.mib * MIB, args.mbit * 1e6 / 8, args.load, tuple(args.loads)
    )
    # A polite end takes the same way out as Ctrl-C: through every `finally`.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        with namespace_hosts(2, settings.link_bytes_per_s) as hosts:
            samples = measure(hosts, settings)
    except NamespacesUnavailable as error:
        print(f"contention: no two hosts here: {error}", file=sys.stderr)
        return 3
    except RuntimeError as error:
        print(f"contention: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    rows = summarize(samples)
    print(
        f"{args.mib} MiB a transfer, {args.transfers} each, links of {args.mbit:.0f} Mbit/s, "
        f"load {args.load:.0%}, {os.cpu_count()} cores\n\n{table(rows)}"
    )
    if args.json is not None:
        write_report(args.json, settings, samples, rows)
    return 0


def write_report(
    path: Path, settings: Settings, samples: Sequence[Sample], rows: Sequence[Row]
) -> None:
    """Everything, as JSON, with what this machine is."""
    report = {
        "settings": asdict(settings),
        "rows": [asdict(row) for row in rows],
        "samples": [asdict(sample) for sample in samples],
        "environment": {"host": host_facts(), "versions": versions()},
    }
    path.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
