"""Settings of hand-offs between servers that an outside router drives. No JAX."""

from __future__ import annotations

from typing import Literal

from flowkv_jax.config_section import Section
from flowkv_jax.errors import ConfigError
from flowkv_jax.kv_transfer.addresses import parse_networks

KVRole = Literal["kv_producer", "kv_consumer", "kv_both"]

_MAX_PORT = 65535


class KVTransferConfig(Section, frozen=True, kw_only=True):
    """K/V handed over between servers, by an outside router (`kv_transfer_params` of requests).

    Attributes:
        kv_role: this server's part: kv_producer (computes prompts for others), kv_consumer (decodes
            what others have computed), kv_both; None for none.
        kv_host: address at which the other servers reach this one. Other than loopback it takes a
            secret that all of them share: cluster_secret_file, or FLOWKV_CLUSTER_SECRET.
        kv_port: likewise; 0 takes a free one.
        kv_peers: networks whose servers may be asked for K/V, such as 10.0.0.0/8,192.168.7.4; None
            for loopback only where kv_host is loopback, and otherwise for loopback and private
            networks.
        kv_hold_s: how long a computed prompt's cached blocks are kept for the server that is to
            decode it.
        kv_load_timeout_s: how long the other server may take to hand a prompt over, before
            kv_load_failure_policy says what follows.
    """

    kv_role: KVRole | None = None
    kv_host: str = "127.0.0.1"
    kv_port: int = 14579
    kv_peers: str | None = None
    kv_hold_s: float = 30.0
    kv_load_timeout_s: float = 30.0

    def __post_init__(self) -> None:
        self.require_positive("kv_hold_s", "kv_load_timeout_s")
        if not 0 <= self.kv_port <= _MAX_PORT:
            raise ConfigError(
                f"kv_port={self.kv_port} must be in [0, {_MAX_PORT}]",
                parameter="kv_port",
                value=self.kv_port,
            )
        if self.kv_host in ("", "0.0.0.0", "::"):
            raise ConfigError(
                f"kv_host={self.kv_host!r} must be an address that the other servers can be told, "
                "such as this machine's in their network",
                parameter="kv_host",
                value=self.kv_host,
            )
        if self.kv_peers is not None:
            parse_networks(self.kv_peers)

    @property
    def computes_for_others(self) -> bool:
        return self.kv_role in ("kv_producer", "kv_both")

    @property
    def decodes_for_others(self) -> bool:
        return self.kv_role in ("kv_consumer", "kv_both")
