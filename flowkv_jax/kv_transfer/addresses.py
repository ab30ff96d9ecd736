"""Which addresses a server connects to because a request says so. Pure, no JAX.

`kv_transfer_params` come through a router, and whoever can write them must not make this server
talk to arbitrary hosts. So an address must be a literal one (no name that somebody else's DNS
answers), in a network that is allowed. Whoever is met there has to know the secret besides.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence

from flowkv_jax.errors import ConfigError

Network = ipaddress.IPv4Network | ipaddress.IPv6Network

_LOOPBACK = ("127.0.0.0/8", "::1/128")
# Link-local ones are left out: clouds answer there with what only the machine may know.
_PRIVATE = ("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "100.64.0.0/10", "fc00::/7")
_MAX_NETWORKS = 256


def parse_networks(text: str) -> tuple[Network, ...]:
    """Networks and single addresses from a list such as "10.0.0.0/8,192.168.7.4".

    Raises:
        ConfigError: it is none.
    """
    parts = [part.strip() for part in text.split(",")]
    try:
        if len(parts) > _MAX_NETWORKS:
            raise ValueError(f"{len(parts)} networks, at most {_MAX_NETWORKS}")
        return tuple(ipaddress.ip_network(part) for part in parts)
    except ValueError as error:
        raise ConfigError(
            f"kv_peers={text[:200]!r} must be a list of networks or addresses such as "
            f"10.0.0.0/8,192.168.7.4: {error}",
            parameter="kv_peers",
            value=text,
        ) from None


def default_networks(*, is_loopback: bool) -> tuple[Network, ...]:
    """What may be connected to where nobody says it.

    Args:
        is_loopback: this server is reached over loopback only.
    """
    texts = _LOOPBACK if is_loopback else (*_LOOPBACK, *_PRIVATE)
    return tuple(ipaddress.ip_network(text) for text in texts)


def is_allowed(host: str, networks: Sequence[Network]) -> bool:
    """Whether `host` is a literal address in one of the networks."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    address = address if mapped is None else mapped
    return any(address in network for network in networks)
