"""What a server says of itself."""

from __future__ import annotations

from flowkv_jax.http.request import Request
from flowkv_jax.http.response import Response
from flowkv_jax.http.route import Route
from flowkv_jax.http.surroundings import Surroundings


def routes() -> list[Route]:
    return [Route("GET", "/health", health, is_open=True, answer_type="", statuses=(503,))]


async def health(_request: Request, surroundings: Surroundings) -> Response:
    """Whether the engine lives: 200, or 503 where it can serve nothing any more."""
    status = 200 if surroundings.engine.is_healthy else 503
    return Response(status=status, content_type=None)
