"""The ASGI application: the table of routes, and what surrounds every handler."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from flowkv_jax.errors import EngineDeadError, FlowKVError, http_status, is_expected
from flowkv_jax.http import inference_routes, status_routes, token_routes
from flowkv_jax.http.admin_routes import admin_routes
from flowkv_jax.http.error_answer import error_event, error_response
from flowkv_jax.http.errors import ClientGone, HttpError
from flowkv_jax.http.event_stream import DONE, event
from flowkv_jax.http.live import routes as live_routes
from flowkv_jax.http.live import trace_route
from flowkv_jax.http.openai import endpoints as openai_endpoints
from flowkv_jax.http.openapi import openapi_route
from flowkv_jax.http.request import Receive, Request, Scope, Send
from flowkv_jax.http.response import Response
from flowkv_jax.http.route import Route
from flowkv_jax.http.router import Router
from flowkv_jax.http.security import check_host, check_key, request_id_of
from flowkv_jax.http.surroundings import Surroundings

_CLIENT_GONE_STATUS = 499
_UNKNOWN_PATH = "(unknown path)"

_logger = logging.getLogger(__name__)


def all_routes() -> list[Route]:
    """The table of the public port. Each module of routes adds a line here."""
    routes = [
        *status_routes.routes(),
        *token_routes.routes(),
        *openai_endpoints.routes(),
        *inference_routes.routes(),
        *live_routes.routes(),
        *trace_route.routes(),
    ]
    return [*routes, openapi_route(routes)]


def make_app(surroundings: Surroundings, routes: Sequence[Route] | None = None) -> App:
    """The application of the public port.

    Args:
        routes: None for `all_routes()`.
    """
    return App(surroundings, all_routes() if routes is None else routes)


def make_admin_app(surroundings: Surroundings) -> App:
    """The application of the admin port."""
    routes = admin_routes()
    return App(surroundings, [*routes, openapi_route(routes)])


class App:
    """Answers requests; see the package."""

    def __init__(self, surroundings: Surroundings, routes: Sequence[Route]) -> None:
        self._surroundings = surroundings
        self._router = Router(routes)

    @property
    def routes(self) -> tuple[Route, ...]:
        return self._router.routes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            raise RuntimeError(f"{scope['type']} is not served")
        given_id = next((v for k, v in scope["headers"] if k == b"x-request-id"), None)
        config = self._surroundings.config
        request = Request(scope, receive, send, request_id_of(given_id), config)
        began_s = self._surroundings.clock()
        match = self._router.match(request.method, request.path)
        request.path_parameters = match.parameters
        status, error = _CLIENT_GONE_STATUS, None
        try:
            response = await self._answer(request, match.route, match.methods)
            if response is not None:
                await _send(send, request, response)
            status = 200 if response is None else response.status
        except ClientGone:
            pass
        except Exception as caught:
            error = caught
            status = await self._tell(request, send, caught)
        finally:
            duration_ms = (self._surroundings.clock() - began_s) * 1000
            _log(request, match.route, status, duration_ms, error)

    async def _answer(
        self, request: Request, route: Route | None, methods: Sequence[str]
    ) -> Response | None:
        check_host(request)
        check_key(request, route, self._surroundings.api_keys)
        if route is not None:
            return await route.handler(request, self._surroundings)
        if methods:
            allow = ", ".join(methods).encode()
            raise HttpError(
                405,
                f"{request.method} is not answered here",
                code="method_not_allowed",
                headers=((b"allow", allow),),
            )
        raise HttpError(404, "there is nothing at this path", code="not_found")

    async def _tell(self, request: Request, send: Send, error: Exception) -> int:
        """Answer with an error, as far as that is possible still."""
        if isinstance(error, EngineDeadError):
            self._surroundings.on_engine_dead()
        events = request.event_stream
        if events is None or not events.has_started:
            response = error_response(error)
            await _send(send, request, response)
            return response.status
        if not events.has_ended:
            await events.send(event(error_event(error)) + DONE)
            await events.end()
        return error.status if isinstance(error, HttpError) else http_status(error).status


async def _send(send: Send, request: Request, response: Response) -> None:
    headers = [
        (b"content-length", str(len(response.body)).encode()),
        (b"x-request-id", request.request_id.encode("latin-1")),
        *response.headers,
    ]
    if response.content_type is not None:
        headers.append((b"content-type", response.content_type))
    await send({"type": "http.response.start", "status": response.status, "headers": headers})
    body = b"" if request.method == "HEAD" else response.body
    await send({"type": "http.response.body", "body": body, "more_body": False})


def _log(
    request: Request,
    route: Route | None,
    status: int,
    duration_ms: float,
    error: Exception | None,
) -> None:
    """One line a request, without what the client wrote: no query, no unknown path, no message."""
    if error is not None and not isinstance(error, FlowKVError):
        _logger.error("request_id=%r failed", request.request_id, exc_info=error)
    level = logging.INFO if error is None or is_expected(error) else logging.WARNING
    if level == logging.INFO and route is not None and route.is_open:
        level = logging.DEBUG
    _logger.log(
        level,
        "%s %s request_id=%r status=%d duration_ms=%.1f prompt_tokens=%d completion_tokens=%d%s",
        request.method if route is not None else "?",
        route.path if route is not None else _UNKNOWN_PATH,
        request.request_id,
        status,
        duration_ms,
        request.num_prompt_tokens,
        request.num_completion_tokens,
        f" error={type(error).__name__}" if error is not None else "",
    )
