"""Two hosts on one Linux machine: network namespaces, and links between them of a known rate.

    with namespace_hosts(num_links=2, rate_bytes_per_s=50e6) as hosts:
        subprocess.Popen([*hosts.source.command, sys.executable, ...])

    source  link0 10.77.0.1 ------- 10.77.0.2 link0  destination
            link1 10.77.1.1 ------- 10.77.1.2 link1

A link is a pair of virtual Ethernet interfaces, each with a token bucket (`tc tbf`) in front of it,
so the two directions do not share the rate. Beyond it a packet waits, up to `QUEUE_MS`, and is
then dropped, as at a switch's port. Needs root, and `ip` and `tc` of iproute2; the machine's own
interfaces and routes stay as they are. Everything is gone once the block is left.
"""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

QUEUE_MS = 20
BURST_BYTES = 128 << 10
"""What a bucket holds: two of the largest packets that a sender hands down in one piece."""
CONGESTION_CONTROL = "cubic"
"""Of both hosts' TCP, whatever the machine's own is."""

_numbers = itertools.count()


class NamespacesUnavailable(RuntimeError):
    """This machine makes no network namespaces for us; the text says what is missing."""


@dataclass(frozen=True)
class Host:
    """One side.

    Attributes:
        command: what to put before a program's arguments to run it on this host.
        addresses: one for each link.
        interfaces: names of this host's ends of the links, in the same order.
    """

    command: tuple[str, ...]
    addresses: tuple[str, ...]
    interfaces: tuple[str, ...]


@dataclass(frozen=True)
class Hosts:
    """Both sides."""

    source: Host
    destination: Host

    def set_link(self, index: int, *, up: bool) -> None:
        """Take a link down, or up again. What is on its way is lost; nobody is told."""
        host = self.source
        _run(*host.command, "ip", "link", "set", host.interfaces[index], "up" if up else "down")

    def sent_bytes(self, index: int) -> int:
        """What the source has sent over a link so far, headers included."""
        host = self.source
        path = f"/sys/class/net/{host.interfaces[index]}/statistics/tx_bytes"
        return int(_run(*host.command, "cat", path))


@contextmanager
def namespace_hosts(num_links: int = 1, rate_bytes_per_s: float | None = None) -> Iterator[Hosts]:
    """Make the two hosts.

    Args:
        num_links: links between them, at most 250.
        rate_bytes_per_s: of each link and direction, headers included; None for no limit.

    Raises:
        NamespacesUnavailable: not root, no iproute2, or the kernel refuses.
    """
    number = next(_numbers)
    names = [f"flowkv-{os.getpid()}-{number}-{side}" for side in ("source", "destination")]
    made: list[str] = []
    try:
        try:
            _check_machine()
            for name in names:
                made.append(name)
                _run("ip", "netns", "add", name)
            hosts = _joined(names, num_links, rate_bytes_per_s)
        except subprocess.CalledProcessError as error:
            raise NamespacesUnavailable(
                f"`{' '.join(error.cmd)}` failed: {error.stderr.strip()}"
            ) from None
        yield hosts
    finally:
        for name in made:
            # The links go with it. The last one may not have been made.
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)


def _check_machine() -> None:
    if os.geteuid() != 0:
        raise NamespacesUnavailable("making network namespaces needs root")
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            raise NamespacesUnavailable(f"`{tool}` is missing: install iproute2")


def _joined(names: list[str], num_links: int, rate_bytes_per_s: float | None) -> Hosts:
    interfaces = tuple(f"link{i}" for i in range(num_links))
    hosts = []
    for side, name in enumerate(names, start=1):
        addresses = tuple(f"10.77.{i}.{side}" for i in range(num_links))
        hosts.append(Host(("ip", "netns", "exec", name), addresses, interfaces))
    source, destination = names
    for interface in interfaces:
        ends = ["peer", "name", interface, "netns", destination]
        _run("ip", "link", "add", interface, "netns", source, "type", "veth", *ends)
    for name, host in zip(names, hosts, strict=True):
        _run("ip", "-n", name, "link", "set", "lo", "up")
        for interface, address in zip(interfaces, host.addresses, strict=True):
            _run("ip", "-n", name, "address", "add", f"{address}/24", "dev", interface)
            # Without batches of packets, or counters miss the headers of all but the first.
            _run("ip", "-n", name, "link", "set", interface, "gso_max_segs", "1")
            _run("ip", "-n", name, "link", "set", interface, "up")
            # A namespace may not set its default to one that the machine's owner has not allowed;
            # its routes may name any.
            network = f"{address.rpartition('.')[0]}.0/24"
            route = ["route", "change", network, "dev", interface, "proto", "kernel"]
            route += ["scope", "link", "src", address, "congctl", CONGESTION_CONTROL]
            _run("ip", "-n", name, *route)
            if rate_bytes_per_s is not None:
                bucket = f"rate {rate_bytes_per_s * 8:.0f}bit burst {BURST_BYTES}"
                bucket += f" latency {QUEUE_MS}ms"
                shape = ["qdisc", "add", "dev", interface, "root", "tbf", *bucket.split()]
                _run("tc", "-n", name, *shape)
    return Hosts(*hosts)


def _run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout
