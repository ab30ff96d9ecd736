"""Transfers between two hosts: secrets, both directions, and a link that goes dead in the middle.

Each test runs between network namespaces and between loopback addresses; a machine that makes no
namespaces runs it between loopback addresses both times.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from benchmarks.namespaces import NamespacesUnavailable
from tests.transfer_peer import LAYOUT
from tests.two_hosts import (
    EngineProcess,
    TwoHosts,
    engine_process,
    loopback_network,
    namespace_network,
)

SECRET = "between the two of us"
NUM_BLOCKS = 12_000
LARGE = 10_000
"""Blocks: 20 MB, and so two seconds between the two hosts."""


NETWORKS = {"namespaces": namespace_network, "loopback": loopback_network}


@pytest.fixture(params=NETWORKS)
def two_hosts(request: pytest.FixtureRequest) -> Iterator[TwoHosts]:
    with ExitStack() as stack:
        try:
            network = stack.enter_context(NETWORKS[request.param]())
        except NamespacesUnavailable:
            network = stack.enter_context(loopback_network())
        yield network


@pytest.fixture
def start(two_hosts: TwoHosts) -> Iterator[Callable[[str], EngineProcess]]:
    """Start the engine of "a", on the source's host, or of "b", on the destination's."""
    with ExitStack() as stack:

        def start_one(node: str, secret: str = SECRET) -> EngineProcess:
            is_source = node == "a"
            command = two_hosts.source_command if is_source else two_hosts.destination_command
            process = engine_process(
                command,
                node,
                NUM_BLOCKS,
                secret=secret,
                seed=1 if is_source else 2,
                backends=two_hosts.backends,
            )
            return stack.enter_context(process)

        yield start_one


def until(condition: Callable[[], bool]) -> None:
    """Wait for something that another process does."""
    ends = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < ends, "it never happened"
        time.sleep(0.01)


def wait_arrived(engine: EngineProcess, arrival: list[str]) -> None:
    """The source hears of it first."""
    until(lambda: arrival in engine.arrivals())


def assert_nothing_left(*engines: EngineProcess) -> None:
    for engine in engines:
        assert engine.num_pinned() == 0
        assert engine.close() == [[], 0]


Start = Callable[..., EngineProcess]


def test_blocks_cross_in_both_directions(two_hosts: TwoHosts, start: Start) -> None:
    source, destination = start("a"), start("b")
    address = two_hosts.reach(destination.listen(two_hosts.listen_on))
    assert source.connect(*address) == ["b"]
    until(lambda: destination.num_peers() == 1)
    before = two_hosts.carried_bytes()
    # With the offer; over data streams; and back over streams that the source opens.
    for engine, dst, runs in (
        (source, "b", [(5, 0, 3)]),
        (source, "b", [(1000, 300, 100), (7, 10, 200)]),
        (destination, "a", [(300, 3000, 100), (10, 2000, 200)]),
    ):
        name = engine.submit(dst, runs)
        assert engine.wait(name) == ["completed", "NoneType", "tcp"]
        other = destination if engine is source else source
        for src_start, dst_start, count in runs:
            assert engine.crc(src_start, count) == other.crc(dst_start, count)
        wait_arrived(other, [name, "completed", "NoneType"])
    assert two_hosts.carried_bytes() - before > 300 * LAYOUT.bytes_per_block
    assert_nothing_left(source, destination)


@pytest.mark.parametrize("given", ["another", ""])
def test_who_has_not_the_secret_is_refused(two_hosts: TwoHosts, start: Start, given: str) -> None:
    stranger, source, destination = start("a", given), start("a"), start("b")
    untouched = destination.crc(0, NUM_BLOCKS)
    address = two_hosts.reach(destination.listen(two_hosts.listen_on))
    name, text = stranger.connect(*address)
    assert name == "AuthenticationFailed"
    assert "secret" in text
    until(lambda: any("AuthenticationFailed" in why for why in destination.refusals()))
    assert destination.num_peers() == stranger.num_peers() == 0
    name, text = stranger.submit("b", [(0, 0, 1)])
    assert name == "UnknownNode"
    assert destination.crc(0, NUM_BLOCKS) == untouched
    # It has not kept anyone else out.
    assert source.connect(*address) == ["b"]
    assert source.wait(source.submit("b", [(0, 0, 1)]))[0] == "completed"
    assert_nothing_left(stranger, source, destination)


def test_listening_to_other_hosts_takes_a_secret(two_hosts: TwoHosts, start: Start) -> None:
    destination = start("b", "")
    name, text = destination.listen(two_hosts.listen_on)
    assert name == "RequestError"
    assert "secret" in text and two_hosts.listen_on in text
    assert_nothing_left(destination)


def test_link_lost_in_the_middle(two_hosts: TwoHosts, start: Start) -> None:
    source, destination = start("a"), start("b")
    outside = destination.crc(LARGE, NUM_BLOCKS - LARGE)
    address = two_hosts.reach(destination.listen(two_hosts.listen_on))
    source.connect(*address)
    before = two_hosts.carried_bytes()
    name = source.submit("b", [(0, 0, LARGE)])
    until(lambda: two_hosts.carried_bytes() - before > 1_000_000)
    assert source.num_pinned() == destination.num_pinned() == LARGE
    two_hosts.cut()
    assert source.wait(name)[:2] == ["failed", "PeerLost"]
    # The source's blocks are its own again. The destination's stay with the transfer until the
    # destination, which nobody can tell, has noticed by itself.
    assert source.num_pinned() == source.num_peers() == 0
    until(lambda: destination.num_pinned() == 0)
    until(lambda: destination.num_peers() == 0)
    wait_arrived(destination, [name, "failed", "PeerLost"])
    assert len(destination.arrivals()) == 1
    assert destination.crc(LARGE, NUM_BLOCKS - LARGE) == outside
    assert source.submit("b", [(0, 0, 1)])[0] == "PeerLost"

    two_hosts.mend()
    assert source.connect(*address) == ["b"]
    again = source.submit("b", [(0, 0, 1000)])
    assert source.wait(again) == ["completed", "NoneType", "tcp"]
    assert source.crc(0, 1000) == destination.crc(0, 1000)
    assert_nothing_left(source, destination)
