"""What runs on the two hosts of `benchmarks.contention`, each in a process of its own.

    source         a TransferEngine with a pool, a NodeAgent, and a selector for each policy
    destination    a TransferEngine with a pool, listening on every address
    load           sends at a set rate over one link, all the time
    sink           what the load is sent to

The topology is that of two hosts with an interface for each GPU, two on the source's side:

    prefill/gpu0 -- prefill/nic0 === link0 === decode/nic0 -- decode/gpu0      the direct path
        |                                                          |
    prefill/gpu1 -- prefill/nic1 === link1 === decode/nic1 --------+           the relay

Here both of the source's places are the memory of one process, so that the relay's first hop, which
NVLink would carry, costs nothing. What is real are the two links, their byte counters, the
decision, and the transfer over the link that was chosen.
"""

from __future__ import annotations

import json
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np

from pallas_kernels.kv_layout import KVLayout
from transfer import NodeAgent, PathSelector, Topology
from transfer.backends.tcp import TcpBackend
from transfer.config import TransferConfig
from transfer.connection import Address
from transfer.engine import TransferEngine
from transfer.graph import LinkType, NodeType
from transfer.path_selector import LoadSource
from transfer.pool_access import NumpyPool
from transfer.runtime import Selector
from transfer.split import split_runs
from transfer.sysfs_reader import SysfsReader
from transfer.types import (
    BlockRun,
    Candidate,
    PathDecision,
    PathPart,
    PathType,
    TransferRequest,
    Verification,
)

SOURCE, RELAY, DESTINATION = "prefill/gpu0", "prefill/gpu1", "decode/gpu0"
DIRECT_HOPS = (SOURCE, DESTINATION)
RELAY_HOPS = (SOURCE, RELAY, DESTINATION)
LINK_ENDS = (("prefill/nic0", "decode/nic0"), ("prefill/nic1", "decode/nic1"))
"""Of link 0, which the direct path crosses, and link 1, which the relay crosses."""
POLICIES = ("direct", "adaptive", "split")

LLAMA_8B = KVLayout(
    num_layers=32, block_size=16, num_kv_heads=8, head_dim=128, dtype="bfloat16", dtype_bytes=2
)
"""Llama-3.1-8B's: 2 MiB a block."""
SAMPLE_MS, WINDOW_MS = 50.0, 500.0
_LOCAL_GB_PER_S = 10.0
_TCP_STREAMS = TransferConfig().streams
_DATAGRAM_BYTES, _DATAGRAMS_A_CALL = 1400, 16
_UDP_SEGMENT = 103
_UDP_HEADERS, _TCP_HEADERS, _TCP_PAYLOAD = 42, 66, 1448
"""Bytes a packet, from Ethernet up: a link's rate counts them."""


def two_link_topology(bytes_per_s: float, interfaces: Sequence[str]) -> Topology:
    """The picture above.

    Args:
        bytes_per_s: of each link in each direction.
        interfaces: the source's, whose counters measure links 0 and 1.
    """
    topology = Topology()
    for place in (SOURCE, RELAY, DESTINATION):
        topology.add_node(place, NodeType.GPU, host=place.split("/")[0])
    topology.add_link(SOURCE, RELAY, LinkType.NVLINK, bandwidth=_LOCAL_GB_PER_S)
    for place, ends, interface in zip((SOURCE, RELAY), LINK_ENDS, interfaces, strict=True):
        for nic in ends:
            topology.add_node(nic, NodeType.NETWORK, host=nic.split("/")[0])
        topology.add_link(place, ends[0], LinkType.CNIC, bandwidth=_LOCAL_GB_PER_S)
        topology.add_link(ends[1], DESTINATION, LinkType.CNIC, bandwidth=_LOCAL_GB_PER_S)
        counters = ((f"{interface}/tx",), (f"{interface}/rx",))
        topology.add_link(*ends, LinkType.TCP, bandwidth=bytes_per_s / 1e9, counters=counters)
    return topology


class SplitAlways:
    """A `Selector` that divides every transfer between both paths, by what their links can spare.

    Args:
        agent: says how busy links are.
        topology: of `two_link_topology`.
    """

    def __init__(self, agent: LoadSource, topology: Topology) -> None:
        self._agent = agent
        self._links = [topology.link_between(*ends) for ends in LINK_ENDS]

    def select(self, request: TransferRequest) -> PathDecision:
        sample = self._agent.utilization
        spare = [link.bandwidth * max(1 - sample[link.index], 0.01) for link in self._links]
        parts = []
        for hops, runs in zip(
            (DIRECT_HOPS, RELAY_HOPS), split_runs(request.runs, spare), strict=True
        ):
            num_bytes = sum(run.num_blocks for run in runs) * request.block_bytes
            if runs:
                parts.append(PathPart(hops, num_bytes, runs))
        chosen = Candidate(PathType.SPLIT_PATH, tuple(parts), 0.0, {}, sum(spare))
        shares = " : ".join(f"{part.data_bytes / request.data_bytes:.2f}" for part in parts)
        return PathDecision(request, chosen, (chosen,), f"always; shares {shares}")

    def observe(self, hops: Sequence[str], data_bytes: int, seconds: float) -> None:
        return


class NotingSelector:
    """Passes on to another selector, and keeps its last decision."""

    def __init__(self, selector: Selector) -> None:
        self._selector = selector
        self.reason = ""

    def select(self, request: TransferRequest) -> PathDecision:
        decision = self._selector.select(request)
        self.reason = decision.reason
        return decision

    def observe(self, hops: Sequence[str], data_bytes: int, seconds: float) -> None:
        self._selector.observe(hops, data_bytes, seconds)


class SourceHost:
    """The source's process: moves blocks by any of the policies.

    Args:
        secret: of both engines.
        addresses: the destination's listener on link 0 and link 1. Control goes over link 0.
        interfaces: ours on the two links.
        bytes_per_s: of each link.
        num_blocks: of one transfer. The pool has twice as many, sent half by half, so that
            no transfer finds its own blocks at the destination already.
    """

    def __init__(
        self,
        secret: str,
        addresses: Sequence[Address],
        interfaces: Sequence[str],
        bytes_per_s: float,
        num_blocks: int,
    ) -> None:
        config = TransferConfig()
        direct, relay = [(host, port) for host, port in addresses]
        by_path = {DIRECT_HOPS: direct, RELAY_HOPS: relay}
        self._num_blocks = num_blocks
        self._num_moved = 0
        self._topology = two_link_topology(bytes_per_s, interfaces)
        self._links = [self._topology.link_between(*ends) for ends in LINK_ENDS]
        self._agent = NodeAgent(
            self._topology, SAMPLE_MS, window_ms=WINDOW_MS, readers=[SysfsReader()]
        )
        self._selectors: dict[str, NotingSelector | None] = {
            "direct": None,
            "adaptive": NotingSelector(PathSelector(self._topology, self._agent)),
            "split": NotingSelector(SplitAlways(self._agent, self._topology)),
        }
        with ExitStack() as stack:
            backend = TcpBackend(config, by_path)
            self._engine = stack.enter_context(
                TransferEngine(config, secret=secret, backends=[backend])
            )
            self._engine.register_pool(SOURCE, random_pool(2 * num_blocks))
            self._engine.connect(direct)
            stack.enter_context(self._agent)
            self._stack = stack.pop_all()

    def utilization(self) -> list[float]:
        """Of links 0 and 1, over the last window."""
        sample = self._agent.utilization
        return [sample[link.index] for link in self._links]

    def settle(self, load: float, timeout_s: float = 30.0) -> list[float]:
        """Wait until the last transfer has left the window and link 0 shows `load` again.

        Raises:
            TimeoutError: it does not within `timeout_s`.
        """
        time.sleep((WINDOW_MS + 2 * SAMPLE_MS) / 1e3)
        ends = time.monotonic() + timeout_s
        while abs((seen := self.utilization())[0] - load) > 0.03 or seen[1] > 0.03:
            if time.monotonic() >= ends:
                raise TimeoutError(f"the links are at {seen}, not at [{load}, 0], {timeout_s} s on")
            time.sleep(SAMPLE_MS / 1e3)
        return seen

    def transfer(self, policy: str) -> dict[str, Any]:
        """Move the next half of the pool, checksums verified. Returns how it went."""
        selector = self._selectors[policy]
        self._engine.set_selector(selector)
        start = self._num_moved % 2 * self._num_blocks
        self._num_moved += 1
        # Four runs, as of a pool that is not quite fresh.
        size = max(1, self._num_blocks // 4)
        runs = [
            BlockRun(start + first, first, min(size, self._num_blocks - first))
            for first in reversed(range(0, self._num_blocks, size))
        ]
        block_bytes = LLAMA_8B.bytes_per_block
        request = TransferRequest(
            SOURCE,
            DESTINATION,
            self._num_blocks * block_bytes,
            tuple(runs),
            block_bytes,
            verification=Verification.CHECKSUM,
        )
        busy = self.utilization()
        report = self._engine.submit(request).wait(120)
        return {
            "seconds": report.seconds,
            "data_bytes": report.data_bytes,
            "path_type": str(report.path_type),
            "routes": [" > ".join(hops) for hops, _ in report.routes],
            "retries": report.retries,
            "utilization": busy,
            "reason": selector.reason if selector is not None else "no selector",
        }

    def close(self) -> None:
        self._stack.close()


def random_pool(num_blocks: int) -> NumpyPool:
    size = num_blocks * LLAMA_8B.bytes_per_block
    return NumpyPool(
        LLAMA_8B, num_blocks, np.random.default_rng(0).integers(0, 256, size, np.uint8)
    )


def serve_source(**options: Any) -> None:
    """Answers each line, [method of `SourceHost`, *arguments] in JSON, with one line."""
    host = SourceHost(**options)
    try:
        for line in sys.stdin:
            method, *arguments = json.loads(line)
            try:
                answer = {"answer": getattr(host, method)(*arguments)}
            except Exception as error:
                answer = {"error": f"{type(error).__name__}: {error}"}
            print(json.dumps(answer), flush=True)
    finally:
        host.close()


def serve_destination(secret: str, num_blocks: int, address: str) -> None:
    """Prints the port, then works until its input ends."""
    config = TransferConfig()
    with TransferEngine(config, secret=secret, backends=[TcpBackend(config)]) as engine:
        engine.register_pool(DESTINATION, NumpyPool(LLAMA_8B, num_blocks))
        print(engine.listen(address)[1], flush=True)
        sys.stdin.read()


def serve_sink(address: str) -> None:
    """Prints its port, for UDP and for TCP, then takes what comes until its input ends."""
    datagrams = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    datagrams.bind((address, 0))
    port = datagrams.getsockname()[1]
    # Never read: where the kernel drops them, they have crossed the link.
    streams = socket.create_server((address, port))

    def read(stream: socket.socket) -> None:
        buffer = bytearray(1 << 18)
        while stream.recv_into(buffer):
            pass

    def accept() -> None:
        while True:
            stream, _ = streams.accept()
            threading.Thread(target=read, args=(stream,), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    print(port, flush=True)
    sys.stdin.read()


def serve_load(kind: str, address: Address, bytes_per_s: float) -> None:
    """Sends until its input ends. `kind`: "yielding" (TCP) or "steady" (UDP).

    Args:
        bytes_per_s: headers included, as long as nobody else wants the link.
    """
    host, port = address
    if kind == "steady":
        socks = [_datagrams((host, port))]
    else:
        # As many streams as a transfer has, so that TCP shares the link evenly with it.
        socks = [socket.create_connection((host, port)) for _ in range(_TCP_STREAMS)]
    for sock in socks:
        rate = bytes_per_s / len(socks)
        threading.Thread(target=_send, args=(sock, rate), daemon=True).start()
    print("sending", flush=True)
    sys.stdin.read()


def _datagrams(address: Address) -> socket.socket:
    sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    sock.connect(address)
    # One call, many datagrams.
    sock.setsockopt(socket.IPPROTO_UDP, _UDP_SEGMENT, _DATAGRAM_BYTES)
    return sock


def _send(sock: socket.socket, bytes_per_s: float) -> None:
    """Send at a rate. What could not be sent in time is not made up for."""
    is_udp = sock.type == socket.SOCK_DGRAM
    payload, headers = (_DATAGRAM_BYTES, _UDP_HEADERS) if is_udp else (_TCP_PAYLOAD, _TCP_HEADERS)
    piece = bytes(payload * _DATAGRAMS_A_CALL)
    interval_s = len(piece) * (1 + headers / payload) / bytes_per_s
    due_s = time.monotonic()
    while True:
        sock.sendall(piece)
        due_s += interval_s
        left_s = due_s - time.monotonic()
        if left_s > 0:
            time.sleep(left_s)
        elif left_s < -0.01:
            due_s = time.monotonic()


ROLES: dict[str, Callable[..., None]] = {
    "source": serve_source,
    "destination": serve_destination,
    "sink": serve_sink,
    "load": serve_load,
}

if __name__ == "__main__":
    ROLES[sys.argv[1]](**json.loads(sys.argv[2]))
