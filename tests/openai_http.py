"""A served fake engine and a client of its HTTP port."""

import contextlib
import json
import re
from collections.abc import AsyncIterator, Sequence
from typing import Any

import httpx

from tests.fake_engine import FakeEngine
from tests.http_wire import answering

FINGERPRINT = "fp_eb004e5ba0"
"""Of the fake's model."""


@contextlib.asynccontextmanager
async def client_of(engine: FakeEngine, **settings: Any) -> AsyncIterator[httpx.AsyncClient]:
    """A client of an HTTP port that serves `engine` alone; afterwards the engine must hold
    nothing."""
    async with (
        answering(engine=engine, **{"stream_interval_ms": 0.0, **settings}) as url,
        httpx.AsyncClient(base_url=url, timeout=20) as client,
    ):
        yield client
        await engine.wait_until_idle()


async def ask(client: httpx.AsyncClient, path: str, /, **body: Any) -> Any:
    """The JSON of an answer that is a success."""
    answer = await client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def complete(client: httpx.AsyncClient, /, **body: Any) -> Any:
    return await ask(client, "/v1/completions", **{"prompt": "ab", **body})


async def chat(client: httpx.AsyncClient, /, **body: Any) -> Any:
    messages = [{"role": "user", "content": "ab"}]
    return await ask(client, "/v1/chat/completions", **{"messages": messages, **body})


async def refused(client: httpx.AsyncClient, path: str, /, **body: Any) -> dict[str, Any]:
    """The error object of a 400."""
    answer = await client.post(path, json=body)
    assert answer.status_code == 400, (body, answer.text)
    error: dict[str, Any] = answer.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert len(answer.content) < 4000
    return error


def events(text: str) -> list[Any]:
    """What the events of a whole stream hold; the last must be [DONE]."""
    pieces = text.split("\n\n")
    assert pieces.pop() == ""
    assert pieces.pop() == "data: [DONE]"
    assert all(piece.startswith("data: {") for piece in pieces)
    return [json.loads(piece.removeprefix("data: ")) for piece in pieces]


def transcript(text: str) -> list[str]:
    """Lines of a stream without what differs between runs."""
    text = re.sub(r'"created":\d+,', "", text)
    text = text.replace(f'"system_fingerprint":"{FINGERPRINT}",', "")
    return [line for line in text.split("\n") if line]


def joined(chunks: Sequence[Any], index: int = 0) -> str:
    """The text of one choice of a stream."""
    texts = []
    for chunk in chunks:
        for choice in chunk["choices"]:
            if choice["index"] == index:
                texts.append(choice.get("text") or choice.get("delta", {}).get("content") or "")
    return "".join(texts)
