"""What a server says of itself: whether it lives, what it serves, how busy it is."""

from __future__ import annotations

import asyncio
from typing import Literal

import msgspec

from flowkv_jax.errors import ModelNotFoundError
from flowkv_jax.http.request import Request
from flowkv_jax.http.response import Response, json_response
from flowkv_jax.http.route import Route
from flowkv_jax.http.surroundings import Surroundings
from flowkv_jax.load import ModelInfo, NodeLoad
from flowkv_jax.rpc.engine_protocol import ServingEngine


class Version(msgspec.Struct, frozen=True):
    """Of flowkv."""

    version: str


class ModelCard(msgspec.Struct, frozen=True):
    """The served model, as OpenAI's clients and vLLM's tools read it.

    Attributes:
        created: when the server started, in Unix seconds.
        root: where the model was read from.
        max_model_len: prompt plus output, in tokens.
    """

    id: str
    created: int
    root: str
    max_model_len: int
    object: Literal["model"] = "model"
    owned_by: str = "flowkv"
    parent: str | None = None


class ModelList(msgspec.Struct, frozen=True):
    """All that is served: one."""

    data: list[ModelCard]
    object: Literal["list"] = "list"


class LoadOfNode(msgspec.Struct, frozen=True):
    """A node; `load` is null before its first report."""

    name: str
    role: str
    state: str
    load: NodeLoad | None


class Loads(msgspec.Struct, frozen=True):
    """All nodes together, and each."""

    total: NodeLoad
    nodes: list[LoadOfNode]


def routes() -> list[Route]:
    loads_routes = [Route("GET", path, loads, answer=Loads) for path in ("/v1/loads", "/load")]
    return [
        Route("GET", "/health", health, is_open=True, answer_type="", statuses=(503,)),
        Route("GET", "/ready", ready, is_open=True, answer_type="", statuses=(503,)),
        Route("GET", "/version", version, answer=Version),
        Route("GET", "/v1/models", models, answer=ModelList),
        Route("GET", "/v1/models/{model:path}", model, answer=ModelCard, statuses=(404,)),
        Route("GET", "/metrics", metrics, answer_type="text/plain"),
        *loads_routes,
    ]


async def health(_request: Request, surroundings: Surroundings) -> Response:
    """Whether the engine lives: 503 where it can serve nothing any more."""
    return _empty(surroundings.engine.is_healthy)


async def ready(_request: Request, surroundings: Surroundings) -> Response:
    """Whether a request would be served now: 503 while the server drains, and without a node."""
    engine = surroundings.engine
    is_ready = surroundings.live.is_accepting and engine.is_healthy
    return _empty(is_ready and await asyncio.to_thread(_has_node, engine))


def _has_node(engine: ServingEngine) -> bool:
    return engine.cluster is None or bool(engine.cluster.snapshot().nodes)


def _empty(is_good: bool) -> Response:
    return Response(status=200 if is_good else 503, content_type=None)


async def version(_request: Request, surroundings: Surroundings) -> Response:
    """The version of flowkv."""
    return json_response(Version(surroundings.version))


async def models(_request: Request, surroundings: Surroundings) -> Response:
    """The served model, as a list."""
    return json_response(ModelList([_card(surroundings)]))


async def model(request: Request, surroundings: Surroundings) -> Response:
    """The served model."""
    check_model(request.path_parameters["model"], surroundings.engine.model_info())
    return json_response(_card(surroundings))


def check_model(name: str | None, info: ModelInfo) -> None:
    """
    Args:
        name: as a request has it; nothing means the one that is served.

    Raises:
        ModelNotFoundError: it is another.
    """
    if name and name != info.served_model_name:
        raise ModelNotFoundError(
            f"the model {name[:200]!r} is not served here; {info.served_model_name!r} is"
        )


def _card(surroundings: Surroundings) -> ModelCard:
    info = surroundings.engine.model_info()
    return ModelCard(
        info.served_model_name, surroundings.started_unix_s, info.model, info.max_model_len
    )


async def metrics(request: Request, surroundings: Surroundings) -> Response:
    """Metrics, as Prometheus reads them."""
    accept = request.header(b"accept") or ""
    render = surroundings.engine.metrics.render
    body, content_type = await asyncio.to_thread(render, accept)
    return Response(body, content_type=content_type.encode("latin-1"))


async def loads(_request: Request, surroundings: Surroundings) -> Response:
    """Queues and cache use of all nodes together, and of each."""
    return json_response(await asyncio.to_thread(_loads, surroundings.engine))


def _loads(engine: ServingEngine) -> Loads:
    nodes = [] if engine.cluster is None else engine.cluster.snapshot().nodes
    return Loads(
        engine.get_loads(),
        [LoadOfNode(n.name, n.role.value, n.state.value, n.load) for n in nodes],
    )
