"""`GET /trace`: the latest requests as a timeline."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Literal

import msgspec

from flowkv_jax.errors import ValidationError
from flowkv_jax.http.live.routes import Number, number_of, recorder_of
from flowkv_jax.http.request import Request
from flowkv_jax.http.response import Response
from flowkv_jax.http.route import QueryParameter, Route
from flowkv_jax.http.surroundings import Surroundings
from flowkv_jax.trace.chrome import chrome_trace
from flowkv_jax.trace.history import NUM_RECORDS, ClusterHistory, Marks

DEFAULT_LIMIT = 1000
_FORMATS = ("chrome",)


def routes() -> list[Route]:
    query = (
        QueryParameter("format", Literal["chrome"], "of the timeline"),
        QueryParameter("limit", Number, "of sequences, at most as many as are remembered"),
    )
    return [Route("GET", "/trace", trace, statuses=(422,), query=query)]


async def trace(request: Request, surroundings: Surroundings) -> Response:
    """The latest requests as Chrome trace JSON, to open in Perfetto.

    Query: `format`: chrome; `limit`: of sequences, at most as many as are remembered.
    """
    query = request.query()
    wanted = query.get("format", _FORMATS[0])
    if wanted not in _FORMATS:
        raise ValidationError(
            f"format={wanted[:50]!r} is none of {', '.join(_FORMATS)}",
            parameter="format",
            value=wanted[:50],
        )
    limit = number_of(query, "limit")
    limit = DEFAULT_LIMIT if limit is None else min(limit, NUM_RECORDS)
    history = recorder_of(surroundings).history
    body = await asyncio.to_thread(_encoded, history, limit)
    disposition = (b"content-disposition", b'attachment; filename="flowkv-trace.json"')
    return Response(body, headers=(disposition, (b"cache-control", b"no-store")))


def _encoded(history: ClusterHistory, limit: int) -> bytes:
    history.look()  # the latest requests may have ended since the recorder looked
    memory = history.since(Marks())
    records = memory.records[len(memory.records) - min(limit, len(memory.records)) :]
    return msgspec.json.encode(chrome_trace(dataclasses.replace(memory, records=records)))
