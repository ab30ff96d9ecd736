"""One line of the table of routes."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from flowkv_jax.http.request import Request
from flowkv_jax.http.response import Response
from flowkv_jax.http.surroundings import Surroundings

Handler = Callable[[Request, Surroundings], Awaitable[Response | None]]


@dataclass(frozen=True, slots=True)
class QueryParameter:
    """What may stand in a route's query, for `/openapi.json`.

    Attributes:
        type: what msgspec makes the schema of.
    """

    name: str
    type: Any
    description: str


@dataclass(frozen=True, slots=True)
class Route:
    """What answers a method at a path.

    Attributes:
        path: compared byte for byte with what came over the wire. `{name}` stands for one segment,
            `{name:path}` at the end for all that follow; their decoded texts are
            `Request.path_parameters`.
        handler: the first line of its docstring is the summary in `/openapi.json`.
        is_open: answered without a key. Everything else needs one where the server has keys.
        body: msgspec type of the JSON body, for `/openapi.json`; None for no body.
        is_body_optional: nothing at all stands for an empty object.
        answer: msgspec type of the JSON answer, for `/openapi.json`; None for none.
        answer_type: media type of the answer, where it is no JSON.
        has_events: may be answered by server-sent events, too.
        statuses: beside 200, and those that every route may answer.
        query: all that it reads of the query; the rest is passed over.
    """

    method: str
    path: str
    handler: Handler
    is_open: bool = False
    body: Any = None
    is_body_optional: bool = False
    answer: Any = None
    answer_type: str = "application/json"
    has_events: bool = False
    statuses: tuple[int, ...] = ()
    query: tuple[QueryParameter, ...] = ()
