"""What a server tells routers of its part in hand-offs between servers. Plain values, no JAX."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

from flowkv_jax.kv_transfer.config import KVRole

CONNECTOR = "NixlConnector"
"""What routers take this contract for: vLLM's, where the decoding server fetches the K/V."""
PROTOCOL_VERSION = 1
_DIGEST_CHARACTERS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class KVTransferInfo:
    """See the module.

    Attributes:
        connector: name of the contract, for routers.
        role: kv_producer (prefills for others), kv_consumer (decodes for others), or kv_both.
        engine_id: of this server's life; another one after a restart.
        host, port: where its transfer engine listens.
        block_size: tokens in a block.
        cache_dtype: of the K/V.
        tensor_parallel_size: devices of a replica.
        pairing_protocol: equal for two servers exactly if K/V of one can be used by the other.
    """

    connector: str
    role: KVRole
    engine_id: str
    host: str
    port: int
    block_size: int
    cache_dtype: str
    tensor_parallel_size: int
    pairing_protocol: str


def pairing_protocol(facts: Mapping[str, object], version: str) -> str:
    """A text that is equal for servers that understand each other and whose K/V are alike.

    Args:
        facts: see `cluster.facts.named_facts`.
        version: of this program.
    """
    text = "\n".join([version, *(f"{name}={facts[name]}" for name in sorted(facts))])
    digest = hashlib.sha256(text.encode()).hexdigest()[:_DIGEST_CHARACTERS]
    return f"flowkv/{PROTOCOL_VERSION}:block-major:{digest}"
