"""A client of streamed completions that costs little itself: it counts events, parses nothing."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from typing import Any


async def stream_completion(host: str, port: int, body: Mapping[str, Any]) -> AsyncIterator[bytes]:
    """The payloads of a `/v1/completions` stream, without the closing [DONE].

    Raises:
        RuntimeError: the answer is no stream; with what the server said.
    """
    reader, writer = await asyncio.open_connection(host, port, limit=1 << 20)
    try:
        payload = json.dumps(body).encode()
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: {host}:{port}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(payload)}\r\n"
            "Connection: close\r\n\r\n"
        )
        writer.write(head.encode() + payload)
        status = await reader.readline()
        if b" 200 " not in status:
            raise RuntimeError((status + await reader.read()).decode(errors="replace"))
        while line := await reader.readline():
            # Chunk sizes of the transfer encoding, headers and blank lines begin otherwise.
            if line.startswith(b"data: ") and not line.startswith(b"data: [DONE]"):
                yield line[6:].rstrip()
    finally:
        writer.close()
