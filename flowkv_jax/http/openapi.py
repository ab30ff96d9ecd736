"""`/openapi.json`: the table of routes and the structures of bodies, as OpenAPI 3.1."""

from __future__ import annotations

import http
import re
from collections.abc import Sequence
from typing import Any

import msgspec

from flowkv_jax.http.error_answer import ErrorBody
from flowkv_jax.http.request import Request
from flowkv_jax.http.response import Response
from flowkv_jax.http.route import Route
from flowkv_jax.http.surroundings import Surroundings

_PARAMETER = re.compile(r"\{(\w+)(?::path)?\}")
_EVERYWHERE = (400, 431, 500)
_WITH_BODY = (408, 413, 415)
_REFERENCE = "#/components/schemas/{name}"


def openapi_route(routes: Sequence[Route]) -> Route:
    """A route that describes these, and itself."""
    made: list[bytes] = []

    async def openapi(_request: Request, surroundings: Surroundings) -> Response:
        """This document."""
        if not made:
            needs_key = bool(surroundings.api_keys)
            made.append(_document([*routes, route], surroundings.version, needs_key=needs_key))
        return Response(made[0])

    route = Route("GET", "/openapi.json", openapi, answer=dict[str, Any])
    return route


def _document(routes: Sequence[Route], version: str, *, needs_key: bool) -> bytes:
    types = _types(routes)
    schemas, components = msgspec.json.schema_components(types, ref_template=_REFERENCE)
    schema_of = dict(zip((id(kind) for kind in types), schemas, strict=True))
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        operation = _operation(route, schema_of, needs_key=needs_key)
        path = _PARAMETER.sub(r"{\1}", route.path)
        paths.setdefault(path, {})[route.method.lower()] = operation
    document: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {"title": "flowkv", "version": version},
        "paths": paths,
        "components": {"schemas": components},
    }
    if needs_key:
        document["components"]["securitySchemes"] = {
            "key": {"type": "http", "scheme": "bearer", "description": "an API key of this server"}
        }
    return msgspec.json.encode(document)


def _types(routes: Sequence[Route]) -> list[Any]:
    """Every type that has a schema, each object once. The routes keep them alive, so their
    identities stay what they are."""
    types: list[Any] = [ErrorBody]
    for route in routes:
        types += [kind for kind in (route.body, route.answer) if kind is not None]
        types += [parameter.type for parameter in route.query]
    return list({id(kind): kind for kind in types}.values())


def _operation(route: Route, schema_of: dict[int, Any], *, needs_key: bool) -> dict[str, Any]:
    summary = (route.handler.__doc__ or "").strip().splitlines()[0]
    operation: dict[str, Any] = {"summary": summary, "responses": _responses(route, schema_of)}
    parameters = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
        for name in _PARAMETER.findall(route.path)
    ]
    parameters += [
        {
            "name": parameter.name,
            "in": "query",
            "description": parameter.description,
            "schema": schema_of[id(parameter.type)],
        }
        for parameter in route.query
    ]
    if parameters:
        operation["parameters"] = parameters
    if route.body is not None:
        schema = schema_of[id(route.body)]
        operation["requestBody"] = {
            "required": not route.is_body_optional,
            "content": {"application/json": {"schema": schema}},
        }
    if needs_key:
        operation["security"] = [] if route.is_open else [{"key": []}]
        if not route.is_open:
            operation["responses"]["401"] = _error(401, schema_of)
    return operation


def _responses(route: Route, schema_of: dict[int, Any]) -> dict[str, Any]:
    content: dict[str, Any] = {}
    if route.answer is not None:
        content[route.answer_type] = {"schema": schema_of[id(route.answer)]}
    elif route.answer_type:
        is_text = route.answer_type in ("text/plain", "text/html")
        content[route.answer_type] = {"schema": {"type": "string"}} if is_text else {}
    if route.has_events:
        content["text/event-stream"] = {}
    success: dict[str, Any] = {"description": "success"}
    if content:
        success["content"] = content
    responses: dict[str, Any] = {"200": success}
    is_empty = not route.answer_type
    statuses = {*_EVERYWHERE, *(_WITH_BODY if route.body is not None else ())}
    for status in sorted(statuses):
        responses[str(status)] = _error(status, schema_of)
    for status in route.statuses:
        told = {"description": _phrase(status)} if is_empty and status == 503 else None
        responses[str(status)] = told or _error(status, schema_of)
    return responses


def _phrase(status: int) -> str:
    return "Request Cancelled" if status == 499 else http.HTTPStatus(status).phrase


def _error(status: int, schema_of: dict[int, Any]) -> dict[str, Any]:
    return {
        "description": _phrase(status),
        "content": {"application/json": {"schema": schema_of[id(ErrorBody)]}},
    }
