"""The contention benchmark: its topology, its policies, its two hosts, and one short run."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import contention
from benchmarks.contention import Sample, Settings, measure, summarize, table
from benchmarks.contention_hosts import (
    DESTINATION,
    DIRECT_HOPS,
    LINK_ENDS,
    LLAMA_8B,
    POLICIES,
    RELAY_HOPS,
    SOURCE,
    SplitAlways,
    random_pool,
    two_link_topology,
)
from benchmarks.namespaces import Host, Hosts, NamespacesUnavailable, namespace_hosts
from tests.transfer_peer import LAYOUT, assert_moved, filled_pool, request
from transfer import MockNodeAgent, PathSelector, PathType, TransferRequest
from transfer.backends.tcp import TcpBackend
from transfer.config import TransferConfig
from transfer.engine import TransferEngine
from transfer.types import BlockRun, Candidate, PathDecision, PathPart

ROOT = Path(__file__).resolve().parents[1]
BUSY = 0.8
RATE = 50e6


def namespaces_of(pid: int) -> list[str]:
    folder = Path("/run/netns")
    return sorted(p.name for p in folder.glob(f"flowkv-{pid}-*")) if folder.exists() else []


class TestTopology:
    def test_two_ways_that_share_no_link(self) -> None:
        topology = two_link_topology(RATE, ("link0", "link1"))
        direct, relay = topology.paths(SOURCE, DESTINATION)
        assert (direct.hops, relay.hops) == (DIRECT_HOPS, RELAY_HOPS)
        assert set(direct.links).isdisjoint(relay.links)
        assert direct.bandwidth == relay.bandwidth == RATE / 1e9
        counters = [[topology.links[i].counters for i in path.links] for path in (direct, relay)]
        assert ("link0/tx",) in counters[0] and ("link1/tx",) in counters[1]

    @pytest.mark.parametrize(
        ("busy", "hops"),
        [
            ((0.0, 0.0), DIRECT_HOPS),
            ((0.85, 0.0), RELAY_HOPS),
            ((0.0, 0.85), DIRECT_HOPS),
            ((0.95, 0.85), DIRECT_HOPS),
        ],
    )
    def test_what_the_selector_chooses(self, busy: tuple[float, float], hops: object) -> None:
        topology = two_link_topology(RATE, ("link0", "link1"))
        agent = MockNodeAgent(topology)
        for ends, share in zip(LINK_ENDS, busy, strict=True):
            agent.set_utilization(*ends, share)
        block = LLAMA_8B.bytes_per_block
        asked = TransferRequest(SOURCE, DESTINATION, 16 * block, block_bytes=block)
        assert PathSelector(topology, agent).select(asked).hops == hops


class TestSplit:
    @given(st.tuples(st.floats(0, 1), st.floats(0, 1)), st.integers(1, 40), st.integers(1, 7))
    def test_parts_are_the_request(
        self, busy: tuple[float, float], num_blocks: int, size: int
    ) -> None:
        topology = two_link_topology(RATE, ("link0", "link1"))
        agent = MockNodeAgent(topology)
        for ends, share in zip(LINK_ENDS, busy, strict=True):
            agent.set_utilization(*ends, share)
        runs = [
            (start, 100 + start, min(size, num_blocks - start))
            for start in range(0, num_blocks, size)
        ]
        asked = request(runs, SOURCE, DESTINATION)
        decision = SplitAlways(agent, topology).select(asked)
        parts = decision.chosen.parts
        assert copies([run for part in parts for run in part.runs]) == copies(asked.runs)
        assert sum(part.data_bytes for part in parts) == asked.data_bytes
        spare = [max(1 - share, 0.01) for share in busy]
        blocks = {part.hops: part.data_bytes // LAYOUT.bytes_per_block for part in parts}
        for hops, share in zip((DIRECT_HOPS, RELAY_HOPS), spare, strict=True):
            assert abs(blocks.get(hops, 0) - num_blocks * share / sum(spare)) <= 1


def copies(runs: Sequence[BlockRun]) -> Counter[tuple[int, int]]:
    return Counter(
        (run.src_start + i, run.dst_start + i) for run in runs for i in range(run.num_blocks)
    )


class FixedSelector:
    """Always these parts."""

    def __init__(self, *parts: PathPart) -> None:
        self.parts = parts

    def select(self, request: TransferRequest) -> PathDecision:
        chosen = Candidate(PathType.SPLIT_PATH, self.parts, 0.0, {}, 1.0)
        return PathDecision(request, chosen, (chosen,), "fixed")

    def observe(self, hops: Sequence[str], data_bytes: int, seconds: float) -> None:
        return


def test_each_path_has_its_own_address() -> None:
    """Bytes of a split go over connections to the address of their part's path."""
    config = TransferConfig(inline_bytes=0)
    source_pool, destination_pool = filled_pool(64, 1), filled_pool(64, 2)
    with TransferEngine(config, secret="s", backends=[TcpBackend(config)]) as destination:
        destination.register_pool(DESTINATION, destination_pool)
        port = destination.listen("0.0.0.0")[1]
        addresses = {DIRECT_HOPS: ("127.0.0.2", port), RELAY_HOPS: ("127.0.0.3", port)}
        backend = TcpBackend(config, addresses)
        with TransferEngine(config, secret="s", backends=[backend]) as source:
            source.register_pool(SOURCE, source_pool)
            source.connect(("127.0.0.1", port))

            def dialled() -> Counter[str]:
                found = psutil.Process().net_connections("tcp4")
                return Counter(c.raddr.ip for c in found if c.raddr and c.raddr.port == port)

            assert dialled() == {"127.0.0.1": 1}
            asked = request([(0, 10, 20)], SOURCE, DESTINATION)
            block = asked.block_bytes
            near = PathPart(DIRECT_HOPS, 5 * block, (BlockRun(0, 10, 5),))
            far = PathPart(RELAY_HOPS, 15 * block, (BlockRun(5, 15, 15),))
            source.set_selector(FixedSelector(near, far))
            report = source.submit(asked).wait(10)
            assert report.routes == ((DIRECT_HOPS, "tcp"), (RELAY_HOPS, "tcp"))
            assert dialled() == {"127.0.0.1": 1, "127.0.0.2": 1, "127.0.0.3": 1}
            # Streams are kept, and kept apart.
            source.submit(asked).wait(10)
            assert dialled() == {"127.0.0.1": 1, "127.0.0.2": 1, "127.0.0.3": 1}
            # Without a selector the path is the direct one.
            source.set_selector(None)
            source.submit(asked).wait(10)
            assert dialled()["127.0.0.3"] == 1
            assert_moved(source_pool, destination_pool, asked)
            for engine_id in source.peers:
                source.disconnect(engine_id)
            ends = time.monotonic() + 10
            while dialled():
                assert time.monotonic() < ends, "a stream outlived its peer"
                time.sleep(0.005)


def sample(load: str, policy: str, seconds: float, *routes: str) -> Sample:
    busy = (0.0 if load == "idle" else 0.85, 0.0)
    return Sample(load, policy, seconds, 100_000_000, "Direct", routes, 0, busy, "because")


class TestReport:
    SAMPLES = (
        sample("steady", "adaptive", 2.0, "a > c > b"),
        sample("steady", "direct", 10.0, "a > b"),
        sample("idle", "direct", 2.0, "a > b"),
        sample("idle", "direct", 1.0, "a > b"),
        sample("idle", "direct", 4.0, "a > b"),
        sample("idle", "split", 1.0, "a > b", "a > c > b"),
        sample("steady", "adaptive", 4.0, "a > b"),
    )

    def test_rows(self) -> None:
        rows = summarize(self.SAMPLES)
        assert [(row.load, row.policy) for row in rows] == [
            ("idle", "direct"),
            ("idle", "split"),
            ("steady", "direct"),
            ("steady", "adaptive"),
        ]
        direct, split, _, adaptive = rows
        assert (direct.least_bytes_per_s, direct.median_bytes_per_s) == (25e6, 50e6)
        assert direct.most_bytes_per_s == 100e6
        assert (direct.ratio, split.ratio, adaptive.ratio) == (1.0, 2.0, 3.75)
        assert split.paths == {"Direct a > b + a > c > b": 1}
        assert adaptive.paths == {"Direct a > b": 1, "Direct a > c > b": 1}
        assert adaptive.utilization == (0.85, 0.0)

    def test_table_has_a_line_for_each_row(self) -> None:
        text = table(summarize(self.SAMPLES))
        assert "| steady | adaptive | 37.5 | 25.0 - 50.0 | 3.75 | 85%, 0% |" in text
        assert "- idle, split: 1 x Direct a > b + a > c > b (because)" in text


class TestNamespaces:
    def test_nothing_is_left_after_an_error(self) -> None:
        with pytest.raises(LookupError), ExitStack() as stack:
            try:
                stack.enter_context(namespace_hosts(2, RATE))
                assert len(namespaces_of(os.getpid())) == 2
            except NamespacesUnavailable as error:
                assert str(error)
            raise LookupError
        assert namespaces_of(os.getpid()) == []

    def test_says_what_is_missing(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setattr(os, "geteuid", lambda: 1000)
        with pytest.raises(NamespacesUnavailable, match="root"), namespace_hosts():
            pass
        before = signal.getsignal(signal.SIGTERM)
        try:
            assert contention.main([]) == 3
        finally:
            signal.signal(signal.SIGTERM, before)
        assert "needs root" in capsys.readouterr().err


@pytest.fixture(params=["namespaces", "loopback"])
def hosts(request: pytest.FixtureRequest) -> Iterator[Hosts]:
    """Two hosts and two links; where there can be no namespaces, two loopback addresses."""
    with ExitStack() as stack:
        try:
            if request.param == "namespaces":
                yield stack.enter_context(namespace_hosts(2, RATE))
                return
        except NamespacesUnavailable:
            pass
        host = Host((), ("127.0.0.1", "127.0.0.2"), ("lo", "lo"))
        yield Hosts(host, host)


def test_measures(hosts: Hosts) -> None:
    """Real processes; under load only where the links have a rate, and counters of their own."""
    has_links = hosts.source != hosts.destination
    loads = ("idle", "steady") if has_links else ("idle",)
    # Loopback's counters, shared with everyone here, are to say "idle".
    rate = RATE if has_links else 1e15
    samples = measure(hosts, Settings(1, 8 << 20, rate, 0.9, loads))
    assert [s.load for s in samples] == [load for load in loads for _ in POLICIES]
    direct, relay = " > ".join(DIRECT_HOPS), " > ".join(RELAY_HOPS)
    for s in samples:
        assert (s.data_bytes, s.retries) == (8 << 20, 0)
        expected: dict[str, list[tuple[str, ...]]] = {
            "direct": [(direct,)],
            "adaptive": [(direct, relay) if s.load == "idle" else (relay,)],
            # Of four blocks, a tenth of the way leaves the direct link none.
            "split": [(direct, relay) if s.load == "idle" else (relay,)],
        }
        if not has_links or (s.load == "steady") != (s.utilization[0] > BUSY):
            # What it saw of the links is what the processors had time for.
            expected["adaptive"] += [(direct,), (relay,), (relay, direct)]
        assert s.routes in expected[s.policy], s
        assert all(0.0 <= share <= 1.0 for share in s.utilization)


def test_ctrl_c_leaves_nothing() -> None:
    command = [sys.executable, "-m", "benchmarks.contention", "--mib", "8"]
    process = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    children: list[psutil.Process] = []
    ends = time.monotonic() + 30
    while process.poll() is None and len(children) < 2:
        assert time.monotonic() < ends
        children = psutil.Process(process.pid).children(recursive=True)
        time.sleep(0.02)
    if process.returncode is None:
        process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=30)
    # 3: this machine makes no namespaces, and it said so.
    assert process.returncode == 130 or (process.returncode == 3 and "no two hosts" in said)
    assert namespaces_of(process.pid) == []
    _, alive = psutil.wait_procs(children, timeout=30)
    assert alive == []


def test_report_is_json(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    samples = TestReport.SAMPLES
    contention.write_report(path, Settings(), samples, summarize(samples))
    report = json.loads(path.read_text(encoding="utf-8"))
    assert set(report) == {"settings", "rows", "samples", "environment"}
    assert len(report["samples"]) == len(samples)


@pytest.mark.parametrize(
    "arguments", [["--mib", "7"], ["--mib", "2"], ["--transfers", "0"], ["--load", "1"]]
)
def test_bad_arguments(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as exit_info:
        contention.main(arguments)
    assert exit_info.value.code == 2


def test_pools_differ_block_by_block() -> None:
    """Or a block that went to the wrong place would not be noticed."""
    rows = random_pool(4).rows
    assert len(np.unique(rows[:, :64], axis=0)) == 4
