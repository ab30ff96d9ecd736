"""Who may ask, decided before a handler is looked at.

Every route needs a key unless it says that it is open; a path that does not exist needs one too, so
that nobody learns what exists. The Host header decides nothing and must be well formed.
"""

from __future__ import annotations

import re
import uuid

from flowkv_jax.errors import AuthenticationError
from flowkv_jax.http.errors import HttpError
from flowkv_jax.http.request import Request
from flowkv_jax.http.route import Route
from flowkv_jax.rpc.auth import ApiKeys
from flowkv_jax.rpc.limits import MAX_REQUEST_ID_CHARACTERS

_HOST = re.compile(
    r"(?:[A-Za-z0-9._-]{1,255}|\[[0-9A-Fa-f:.]{2,45}(?:%25[A-Za-z0-9._-]+)?\])(?::\d{1,5})?"
)


def check_host(request: Request) -> None:
    """
    Raises:
        HttpError: 400, the Host header is missing, doubled or no host.
    """
    host = request.header(b"host")
    if host is None and request.scope["http_version"] == "1.0":
        return
    if host is None or _HOST.fullmatch(host) is None:
        raise HttpError(400, "the Host header is missing or malformed")


def check_key(request: Request, route: Route | None, keys: ApiKeys) -> None:
    """
    Raises:
        AuthenticationError: a key is needed, and a known one did not come along.
        HttpError: 400, several came.
    """
    if not keys or (route is not None and route.is_open):
        return
    if not keys.accepts(request.header(b"authorization")):
        raise AuthenticationError(
            "this server needs a known API key: send the header 'Authorization: Bearer <key>'"
        )


def request_id_of(given: bytes | None) -> str:
    """The client's id if it may go into headers and logs, else one made here."""
    if given is not None and len(given) <= MAX_REQUEST_ID_CHARACTERS:
        text = given.decode("latin-1")
        if text and text.isascii() and text.isprintable():
            return text
    return uuid.uuid4().hex
