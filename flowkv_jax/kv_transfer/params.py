"""`kv_transfer_params`: what a router and the two servers of a hand-off say to each other. No JAX.

    to the prefilling server     {"do_remote_decode": true, "do_remote_prefill": false}
    from it, to the decoding one {"do_remote_prefill": true, "remote_engine_id": ..., ...}

Keys are vLLM's, and `remote_node` is ours. They come from outside: what does not matter here is
passed over, and everything else is checked.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flowkv_jax.checks import bad_value, check_int
from flowkv_jax.cluster.facts import NODE_NAME_PATTERN
from flowkv_jax.errors import UnprocessableError
from flowkv_jax.kv_transfer.config import KVRole

_NAME = "kv_transfer_params"
_MAX_KEYS = 64
_MAX_ID_CHARACTERS = 1024
_MAX_HOST_CHARACTERS = 256
_MAX_PORT = 65535


@dataclass(frozen=True, slots=True)
class RemoteDecode:
    """The prompt is computed here, and decoded by another server."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RemotePrefill:
    """The prompt has been computed by another server.

    Attributes:
        engine_id, node: which server, and which of its nodes.
        host, port: where it is.
        request_id: of the request there, under which it holds the prompt's blocks.
    """

    engine_id: str
    node: str
    host: str
    port: int
    request_id: str


def read_params(
    params: Mapping[str, Any] | None, role: KVRole | None
) -> RemoteDecode | RemotePrefill | None:
    """A request's part in a hand-off; None for a request like any other.

    Args:
        role: this server's.

    Raises:
        ValidationError: they are malformed; names the key.
        UnprocessableError: this server has not that part.
    """
    if params is None:
        return None
    if not isinstance(params, Mapping) or len(params) > _MAX_KEYS:
        raise bad_value(_NAME, params, f"must be a mapping of at most {_MAX_KEYS} keys")
    decodes_elsewhere = _flag(params, "do_remote_decode")
    prefilled_elsewhere = _flag(params, "do_remote_prefill")
    if decodes_elsewhere and prefilled_elsewhere:
        raise bad_value(
            f"{_NAME}.do_remote_prefill", True, "and do_remote_decode exclude each other"
        )
    if decodes_elsewhere:
        _require_role(role, "do_remote_decode", ("kv_producer", "kv_both"))
        return RemoteDecode()
    if prefilled_elsewhere:
        _require_role(role, "do_remote_prefill", ("kv_consumer", "kv_both"))
        return RemotePrefill(
            engine_id=_text(params, "remote_engine_id", _MAX_ID_CHARACTERS),
            node=_node(params),
            host=_text(params, "remote_host", _MAX_HOST_CHARACTERS),
            port=_port(params),
            request_id=_text(params, "remote_request_id", _MAX_ID_CHARACTERS),
        )
    return None


def answer_params(
    remote: RemotePrefill, block_ids: Sequence[int], tensor_parallel_size: int
) -> dict[str, Any]:
    """What the prefilling server answers, for the decoding one.

    Args:
        remote: this server, as the other one is to reach it.
        block_ids: what is held for it.
    """
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_engine_id": remote.engine_id,
        "remote_request_id": remote.request_id,
        "remote_block_ids": list(block_ids),
        "remote_host": remote.host,
        "remote_port": remote.port,
        "tp_size": tensor_parallel_size,
        "remote_node": remote.node,
    }


def _require_role(role: KVRole | None, key: str, roles: tuple[KVRole, ...]) -> None:
    if role not in roles:
        has = "no kv_role" if role is None else f"kv_role={role}"
        raise UnprocessableError(
            f"{_NAME} with {key}: this server has {has}; it takes {' or '.join(roles)}"
        )


def _flag(params: Mapping[str, Any], key: str) -> bool:
    value = params.get(key)
    if value is not None and not isinstance(value, bool):
        raise bad_value(f"{_NAME}.{key}", value, "must be true or false")
    return bool(value)


def _text(params: Mapping[str, Any], key: str, max_characters: int) -> str:
    value = params.get(key)
    if not isinstance(value, str) or not 0 < len(value) <= max_characters:
        complaint = f"must be text of 1 to {max_characters} characters"
        raise bad_value(f"{_NAME}.{key}", value, complaint)
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise bad_value(f"{_NAME}.{key}", value, "holds half of a surrogate pair") from error
    return value


def _node(params: Mapping[str, Any]) -> str:
    node = params.get("remote_node")
    if not isinstance(node, str) or not node or not re.match(NODE_NAME_PATTERN, node):
        complaint = "must name a node, as a server of this kind answers it"
        raise bad_value(f"{_NAME}.remote_node", node, complaint)
    return node


def _port(params: Mapping[str, Any]) -> int:
    port = params.get("remote_port")
    check_int(f"{_NAME}.remote_port", port, 1, _MAX_PORT)
    return int(port)  # type: ignore[arg-type]
