"""A worker joins a front on another host, and the network between them goes away and comes back.

Each test runs between network namespaces and between loopback addresses; a machine that makes no
namespaces runs it between loopback addresses both times.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator

import pytest

from benchmarks.namespaces import NamespacesUnavailable
from tests.cluster_front import NUM_TOKENS
from tests.cluster_worker import ROOT, worker_process
from tests.two_hosts import TwoHosts, loopback_network, namespace_network

NETWORKS = {"namespaces": namespace_network, "loopback": loopback_network}


@pytest.fixture(params=NETWORKS)
def two_hosts(request: pytest.FixtureRequest) -> Iterator[TwoHosts]:
    with contextlib.ExitStack() as stack:
        try:
            network = stack.enter_context(NETWORKS[request.param]())
        except NamespacesUnavailable:
            network = stack.enter_context(loopback_network())
        yield network


@contextlib.contextmanager
def front_process(two_hosts: TwoHosts) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [
            *two_hosts.destination_command,
            sys.executable,
            "-m",
            "tests.cluster_front",
            two_hosts.listen_on,
        ],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        yield process
    finally:
        assert process.stdin is not None and process.stdout is not None
        process.stdin.close()
        process.wait(60)
        process.stdout.close()


def next_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    line = process.stdout.readline().strip()
    assert line, "the front ended"
    return line


def test_a_worker_of_another_host(two_hosts: TwoHosts) -> None:
    with front_process(two_hosts) as front:
        port = int(next_line(front).split()[1])
        options = {"front_timeout_s": 0.5, "dial_timeout_s": 0.5, "join_timeout_s": None}
        with worker_process(
            two_hosts.reach(port), command=two_hosts.source_command, **options
        ) as worker:
            assert next_line(front).startswith("joined hybrid-0 1")
            assert next_line(front) == f"tokens hybrid-0 {NUM_TOKENS}"
            two_hosts.cut()
            assert next_line(front).startswith("lost hybrid-0 silent for")
            two_hosts.mend()
            # The same worker, which gave up the silent front and found it again.
            assert next_line(front).startswith("joined hybrid-0 2")
            assert next_line(front) == f"tokens hybrid-0 {NUM_TOKENS}"
            assert worker.poll() is None
