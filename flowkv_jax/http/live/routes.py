"""`GET /` and `GET /live/state`."""

from __future__ import annotations

import asyncio
from typing import Annotated

import msgspec
from msgspec import Meta

from flowkv_jax.errors import UnprocessableError, ValidationError
from flowkv_jax.http.live.page import live_page
from flowkv_jax.http.live.state import live_state
from flowkv_jax.http.request import Request
from flowkv_jax.http.response import Headers, Response
from flowkv_jax.http.route import QueryParameter, Route
from flowkv_jax.http.surroundings import Surroundings
from flowkv_jax.trace.history import Marks
from flowkv_jax.trace.recorder import Recorder

Number = Annotated[int, Meta(ge=0, le=10**18 - 1)]

_NO_STORE = (b"cache-control", b"no-store")


def routes() -> list[Route]:
    return [
        Route("GET", "/", page, is_open=True, answer_type="text/html"),
        Route(
            "GET",
            "/live/state",
            state,
            statuses=(422,),
            query=(
                QueryParameter("instance", str, "as in the last answer"),
                QueryParameter("sample", Number, "as in the last answer"),
                QueryParameter("record", Number, "as in the last answer"),
                QueryParameter("decision", Number, "as in the last answer"),
            ),
        ),
    ]


async def page(_request: Request, _surroundings: Surroundings) -> Response:
    """The live page. It holds no data, and asks for the key if one is needed."""
    document = live_page()
    headers: Headers = (
        (b"content-security-policy", document.policy.encode()),
        (b"x-content-type-options", b"nosniff"),
        (b"referrer-policy", b"no-referrer"),
        (b"cache-control", b"no-cache"),
    )
    return Response(document.html, content_type=b"text/html; charset=utf-8", headers=headers)


async def state(request: Request, surroundings: Surroundings) -> Response:
    """What the live page shows: the cluster, and what is new behind the numbers given.

    Query: `instance`, `sample`, `record`, `decision`: as in the last answer; leave them out to get
    all that is remembered.
    """
    query = request.query()
    marks = Marks(
        number_of(query, "sample"), number_of(query, "record"), number_of(query, "decision")
    )
    model = surroundings.engine.model_info().served_model_name
    recorder, instance = recorder_of(surroundings), query.get("instance", "")

    def body() -> bytes:
        state = live_state(recorder, marks, instance, model=model, version=surroundings.version)
        return msgspec.json.encode(state)

    # Streams of other clients run on this thread.
    return Response(await asyncio.to_thread(body), headers=(_NO_STORE,))


def recorder_of(surroundings: Surroundings) -> Recorder:
    """
    Raises:
        UnprocessableError: there is none.
    """
    if surroundings.recorder is None:
        raise UnprocessableError("this server has no cluster to look at")
    return surroundings.recorder


def number_of(query: dict[str, str], name: str) -> int | None:
    """A parameter of the query; None if it is not given.

    Raises:
        ValidationError: it is no number.
    """
    text = query.get(name)
    if text is None:
        return None
    if not (text.isascii() and text.isdigit() and len(text) <= 18):
        raise ValidationError(
            f"{name}={text[:50]!r} must be a number of at most 18 digits",
            parameter=name,
            value=text[:50],
        )
    return int(text)
