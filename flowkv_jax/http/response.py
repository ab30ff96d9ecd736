"""An answer that is complete before it is sent."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec

Headers = tuple[tuple[bytes, bytes], ...]


@dataclass(frozen=True, slots=True)
class Response:
    """Attributes:
    content_type: None for an answer without a body.
    headers: names in lower case, values without line ends.
    """

    body: bytes = b""
    status: int = 200
    content_type: bytes | None = b"application/json"
    headers: Headers = ()


def json_response(value: Any, status: int = 200, headers: Headers = ()) -> Response:
    """Anything msgspec encodes, as JSON."""
    return Response(msgspec.json.encode(value), status, headers=headers)
