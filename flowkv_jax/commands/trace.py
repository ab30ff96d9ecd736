"""`flowkv trace`: the latest requests of a running server as a timeline, in a file."""

from __future__ import annotations

import argparse
import json
import os
import ssl
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from flowkv_jax.checks import check_int
from flowkv_jax.commands import Context
from flowkv_jax.errors import (
    AuthenticationError,
    RetryableRequestError,
    ServerError,
    UnprocessableError,
    ValidationError,
)

_TIMEOUT_S = 30.0
_MAX_LIMIT = 1_000_000


def configure(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--server",
        default="http://127.0.0.1:8000",
        metavar="URL",
        help="its HTTP address (default: %(default)s); a key is taken from FLOWKV_API_KEY",
    )
    add("--output", "-o", default="flowkv-trace.json", metavar="FILE",
        help="where the timeline goes, - for standard output (default: %(default)s)")  # fmt: skip
    add("--limit", type=int, default=1000, metavar="N",
        help="sequences, the latest ones (default: %(default)s)")  # fmt: skip
    add("--tls-ca-file", metavar="FILE", help="PEM file of the authorities, for https")


def run(args: argparse.Namespace, context: Context) -> int:
    """
    Raises:
        ValidationError: the address is no URL of a server, or a number is out of range.
        RetryableRequestError: no server answers.
        AuthenticationError: it wants a key, or another one.
        UnprocessableError: it has no timeline.
        ServerError: it answers something else.
        OSError: the file cannot be written.
    """
    check_int("limit", args.limit, 1, _MAX_LIMIT)
    body = _fetch(_address(args.server, args.limit), args.server, args.tls_ca_file)
    if args.output == "-":
        print(body.decode(), file=context.stdout)
        return 0
    count = _num_requests(body)
    Path(args.output).write_bytes(body)
    print(
        f"{args.output}: {count} sequence{'' if count == 1 else 's'}, {len(body) / 1e6:.1f} MB\n"
        "Open https://ui.perfetto.dev and drop the file there (it stays on this machine), "
        "or chrome://tracing.",
        file=context.stdout,
    )
    return 0


def _address(server: str, limit: int) -> str:
    parts = urlsplit(server)
    if parts.scheme not in ("http", "https") or not parts.netloc or parts.query or parts.fragment:
        raise ValidationError(
            f"server={server!r} must be a URL as http://127.0.0.1:8000",
            parameter="server",
            value=server,
        )
    return f"{server.rstrip('/')}/trace?format=chrome&limit={limit}"


def _fetch(address: str, server: str, ca_file: str | None) -> bytes:
    request = urllib.request.Request(address)
    key = os.environ.get("FLOWKV_API_KEY")
    if key:
        request.add_header("Authorization", f"Bearer {key}")
    tls = ssl.create_default_context(cafile=ca_file) if address.startswith("https") else None
    try:
        with urllib.request.urlopen(request, timeout=_TIMEOUT_S, context=tls) as answer:
            body: bytes = answer.read()
            return body
    except urllib.error.HTTPError as error:
        with error:
            raise _refusal(error.code, server, error.read()) from None
    except (urllib.error.URLError, TimeoutError, ConnectionError) as error:
        reason = getattr(error, "reason", error)
        raise RetryableRequestError(
            f"no server answers at {server} ({reason}); start one with `flowkv serve`, or say "
            "where it is with --server URL"
        ) from error


def _refusal(status: int, server: str, body: bytes) -> Exception:
    try:
        reason = json.loads(body)["error"]["message"]
    except (ValueError, KeyError, TypeError):
        reason = f"HTTP {status}"
    if status == 401:
        return AuthenticationError(f"{server}: {reason} (set FLOWKV_API_KEY)")
    if status in (404, 422):
        return UnprocessableError(f"{server} has no timeline: {reason}")
    return ServerError(f"{server} answers: {reason}")


def _num_requests(body: bytes) -> int:
    try:
        document: Any = json.loads(body)
        return int(document["otherData"]["num_requests"])
    except (ValueError, KeyError, TypeError) as error:
        raise ServerError("the server's answer is no timeline") from error
