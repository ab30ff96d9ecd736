"""Bearer tokens.

Every method needs one but the health service, which orchestrators probe without secrets. The check
runs before the method is even looked up, so a caller without a token learns nothing of what exists.
Keys are held as SHA-256 digests; a presented token is compared with every one of them in constant
time, whichever matches.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Awaitable, Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

from flowkv_jax.errors import ConfigError

API_KEY_VARIABLE = "FLOWKV_API_KEY"
_OPEN_PREFIXES = ("/grpc.health.v1.Health/",)
_SCHEME = "bearer "


class ApiKeys:
    """The accepted tokens, unreadable."""

    def __init__(self, keys: Iterable[str]) -> None:
        self._digests = [_digest(key) for key in keys]

    def __bool__(self) -> bool:
        return bool(self._digests)

    def accepts(self, authorization: str | bytes | None) -> bool:
        """Whether an `authorization` value is `Bearer` and one of the keys."""
        if not isinstance(authorization, str) or not authorization.lower().startswith(_SCHEME):
            return False
        presented = _digest(authorization[len(_SCHEME) :].strip())
        matches = [hmac.compare_digest(presented, digest) for digest in self._digests]
        return any(matches)


def load_api_keys(api_key_file: str | None, environ: Mapping[str, str]) -> ApiKeys:
    """Keys of the file (one a line; blank lines and lines that begin with # are passed over) and
    of the environment variable FLOWKV_API_KEY.

    Raises:
        ConfigError: the file cannot be read or holds no key, the variable is set and empty, or a
            key cannot travel in a header (printable ASCII without spaces can).
    """
    keys: list[str] = []
    if api_key_file is not None:
        keys += _keys_of_file(api_key_file)
    variable = environ.get(API_KEY_VARIABLE)
    if variable is not None:
        if not variable.strip():
            raise ConfigError(
                f"{API_KEY_VARIABLE} is set and empty; unset it or give it a key",
                parameter=API_KEY_VARIABLE,
            )
        keys.append(variable.strip())
        check_key(variable.strip(), API_KEY_VARIABLE, API_KEY_VARIABLE)
    return ApiKeys(keys)


def _keys_of_file(path: str) -> list[str]:
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ConfigError(
            f"api_key_file={path}: cannot be read: {error.strerror}",
            parameter="api_key_file",
            value=path,
        ) from error
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"api_key_file={path}: is not UTF-8 text", parameter="api_key_file", value=path
        ) from error
    keys = [line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#")]
    if not keys:
        raise ConfigError(
            f"api_key_file={path}: holds no key; write one a line",
            parameter="api_key_file",
            value=path,
        )
    for number, key in enumerate(keys, start=1):
        check_key(key, "api_key_file", f"api_key_file={path}: key {number}")
    return keys


def check_key(key: str, parameter: str, where: str) -> None:
    """
    Raises:
        ConfigError: the key cannot travel in a header. The key itself is not in the message.
    """
    if not key or not key.isascii() or not key.isprintable() or " " in key:
        raise ConfigError(
            f"{where} must be printable ASCII without spaces, and not empty", parameter=parameter
        )


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", errors="surrogateescape")).digest()


class BearerTokenInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """Answers UNAUTHENTICATED in place of the handler unless a known token came along."""

    def __init__(self, keys: ApiKeys) -> None:
        self._keys = keys

    async def intercept_service(
        self,
        continuation: Callable[[Any], Awaitable[Any]],
        handler_call_details: Any,
    ) -> Any:
        method: str = handler_call_details.method
        if method.startswith(_OPEN_PREFIXES):
            return await continuation(handler_call_details)
        # More than one `authorization` header is refused: which one counts would be a guess.
        values = [
            value
            for key, value in handler_call_details.invocation_metadata or ()
            if key == "authorization"
        ]
        if len(values) == 1 and self._keys.accepts(values[0]):
            return await continuation(handler_call_details)
        # A stream-stream handler need not read a request, so it fits a method of any kind.
        return grpc.stream_stream_rpc_method_handler(_refuse)


async def _refuse(_requests: Any, context: Any) -> None:
    await context.abort(
        grpc.StatusCode.UNAUTHENTICATED,
        "this server needs a known token: send metadata 'authorization: Bearer <key>'",
    )
