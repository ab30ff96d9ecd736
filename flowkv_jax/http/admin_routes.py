"""What steers a server: roles, drains, caches, aborts, profiles. Served on a port of its own.

Every act leaves a line in the log. No browser is among the callers: a page of anybody's could post
to this machine's loopback, so whatever comes with an Origin is refused.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from flowkv_jax.checks import bad_value
from flowkv_jax.cluster.messages import MAX_PROFILE_S
from flowkv_jax.controller.role import Role
from flowkv_jax.controller.snapshot import NodeView
from flowkv_jax.errors import (
    NotFoundError,
    RequestCancelled,
    UnprocessableError,
    ValidationError,
)
from flowkv_jax.http.errors import HttpError
from flowkv_jax.http.json_body import decode_json
from flowkv_jax.http.request import Request
from flowkv_jax.http.response import Response, json_response
from flowkv_jax.http.route import Handler, Route
from flowkv_jax.http.surroundings import Surroundings
from flowkv_jax.rpc.cluster_view import ClusterView

_logger = logging.getLogger(__name__)

_NodeName = Annotated[str, Meta(pattern=r"^[A-Za-z0-9._-]{1,64}$")]
_RoleName = Literal["prefill", "decode", "hybrid"]


class SwitchRoleRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Attributes:
    node: may be left out where there is only one.
    """

    new_role: _RoleName
    node: _NodeName | None = None


class SwitchRoleResponse(msgspec.Struct, frozen=True):
    """SGLang's shape. The node first finishes what it has of the old role."""

    success: bool
    node: str
    old_role: _RoleName
    new_role: _RoleName


class DrainRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Attributes:
    node: that gets no more work and leaves.
    drain_all: the whole server drains, and ends.
    """

    node: _NodeName | None = None
    drain_all: bool = False


class DrainResponse(msgspec.Struct, frozen=True):
    """The drain has begun."""

    success: bool
    node: str | None


class AbortRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Attributes:
    request_id: as the request gave it (`request_id`, X-Request-Id), or the `id` of its answer.
    abort_all: all that are running.
    """

    request_id: Annotated[str, Meta(min_length=1, max_length=512)] | None = None
    abort_all: bool = False


class AbortResponse(msgspec.Struct, frozen=True):
    """How many requests were ended."""

    num_aborted: int


class ProfileRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Attributes:
    duration_s: after which the profile ends by itself.
    """

    duration_s: Annotated[float, Meta(gt=0, le=MAX_PROFILE_S)] = 60.0


class NoFields(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An empty object, or nothing at all."""


class Success(msgspec.Struct, frozen=True):
    """False for caches that are in use: they are forgotten once let go."""

    success: bool


def admin_routes() -> list[Route]:
    """The table of the admin port, but for what describes it."""
    abort_body = Annotated[AbortRequest, _one_or_all("request_id", "abort_all")]
    drain_body = Annotated[DrainRequest, _one_or_all("node", "drain_all")]
    return [
        _route("/pd_role_switch", switch_role, SwitchRoleRequest, SwitchRoleResponse, 404, 422),
        _route("/drain", drain, drain_body, DrainResponse, 404, 422),
        _route("/reset_prefix_cache", reset_prefix_cache, NoFields, Success, 422, 503),
        _route("/flush_cache", reset_prefix_cache, NoFields, Success, 422, 503),
        _route("/abort_request", abort_request, abort_body, AbortResponse, 404),
        _route("/start_profile", start_profile, ProfileRequest, Success, 422, 503),
        _route("/stop_profile", stop_profile, NoFields, Success, 422, 503),
    ]


def _one_or_all(one: str, all_of_them: str) -> Meta:
    """Exactly one of two fields must be given."""
    is_one = {one: {"type": "string"}, all_of_them: {"const": False}}
    is_all = {one: {"type": "null"}, all_of_them: {"const": True}}
    alternatives = [
        {"required": [one], "properties": is_one},
        {"required": [all_of_them], "properties": is_all},
    ]
    return Meta(extra_json_schema={"oneOf": alternatives})


def _route(path: str, handler: Handler, body: object, answer: object, *statuses: int) -> Route:
    async def audited(request: Request, surroundings: Surroundings) -> Response | None:
        if request.header(b"origin") is not None:
            raise HttpError(403, "the admin port answers no browser", code="forbidden")
        outcome = "failed: cancelled"
        try:
            response = await handler(request, surroundings)
            outcome = "done"
            return response
        except Exception as error:
            outcome = f"failed: {type(error).__name__}"
            raise
        finally:
            client = request.scope["client"]
            _logger.warning(
                "admin %s %srequest_id=%r client=%s %s",
                *(path, "".join(f"{what} " for what in request.acts_on), request.request_id),
                *(client[0] if client else "-", outcome),
            )

    audited.__doc__ = handler.__doc__
    return Route(
        "POST",
        path,
        audited,
        body=body,
        is_body_optional=body in (DrainRequest, NoFields, ProfileRequest),
        answer=answer,
        statuses=(403, *statuses),
    )


async def switch_role(request: Request, surroundings: Surroundings) -> Response:
    """Give a node another role for good."""
    asked = await request.json(SwitchRoleRequest)
    request.acts_on = [f"node={asked.node}", f"new_role={asked.new_role}"]
    cluster = _cluster_of(surroundings)

    def switch() -> SwitchRoleResponse:
        node = _node_of(cluster, asked.node)
        cluster.set_role(node.name, Role(asked.new_role))
        return SwitchRoleResponse(True, node.name, node.role.value, asked.new_role)

    return json_response(await asyncio.to_thread(switch))


async def drain(request: Request, surroundings: Surroundings) -> Response:
    """Give a node no more work, or drain the whole server; the answer does not wait for the end."""
    asked = await request.json(DrainRequest)
    request.acts_on = ["all" if asked.node is None else f"node={asked.node}"]
    if (asked.node is None) is not asked.drain_all:
        raise ValidationError("give exactly one of node and drain_all=true", parameter="node")
    if asked.node is None:
        surroundings.drain_server()
    else:
        await asyncio.to_thread(_cluster_of(surroundings).drain, asked.node)
    return json_response(DrainResponse(True, asked.node))


async def reset_prefix_cache(request: Request, surroundings: Surroundings) -> Response:
    """Forget cached prompts, on all nodes."""
    decode_json(await _body(request), NoFields)
    is_done = await asyncio.to_thread(surroundings.engine.reset_prefix_cache)
    return json_response(Success(is_done))


async def abort_request(request: Request, surroundings: Surroundings) -> Response:
    """End one request, or all."""
    asked = await request.json(AbortRequest)
    request.acts_on = ["all" if asked.request_id is None else f"aborts={asked.request_id!r}"]
    if (asked.request_id is None) is not asked.abort_all:
        raise ValidationError(
            "give exactly one of request_id and abort_all=true", parameter="request_id"
        )
    error = RequestCancelled("aborted by an administrator")
    if asked.request_id is None:
        return json_response(AbortResponse(surroundings.live.stop_all(error)))
    num_aborted = surroundings.live.stop(asked.request_id, error)
    if not num_aborted:
        num_aborted = await asyncio.to_thread(surroundings.engine.abort, asked.request_id)
    if not num_aborted:
        raise NotFoundError(f"no live request has the id {asked.request_id!r:.300}")
    return json_response(AbortResponse(num_aborted))


async def start_profile(request: Request, surroundings: Surroundings) -> Response:
    """Record a JAX profile on every node, into the folder of the server's configuration."""
    asked = decode_json(await _body(request), ProfileRequest)
    await asyncio.to_thread(surroundings.engine.start_profile, asked.duration_s)
    return json_response(Success(True))


async def stop_profile(request: Request, surroundings: Surroundings) -> Response:
    """Write the profiles that are being recorded."""
    decode_json(await _body(request), NoFields)
    await asyncio.to_thread(surroundings.engine.stop_profile)
    return json_response(Success(True))


async def _body(request: Request) -> bytes:
    """The body of a call that may be made without one."""
    if request.header(b"content-type") is not None:
        return await request.json_bytes() or b"{}"
    if await request.read_body():
        raise HttpError(415, "the body must come with Content-Type: application/json")
    return b"{}"


def _cluster_of(surroundings: Surroundings) -> ClusterView:
    """
    Raises:
        UnprocessableError: there is none.
    """
    cluster = surroundings.engine.cluster
    if cluster is None:
        raise UnprocessableError("this server has no nodes to steer")
    return cluster


def _node_of(cluster: ClusterView, name: str | None) -> NodeView:
    """
    Raises:
        NotFoundError: there is none of this name.
        ValidationError: no name, and several nodes.
    """
    nodes = {node.name: node for node in cluster.snapshot().nodes}
    if name is None and len(nodes) == 1:
        return next(iter(nodes.values()))
    if name is None:
        names = ", ".join(nodes)
        raise bad_value("node", name, f"must name one of the nodes: {names[:500]}")
    if name not in nodes:
        raise NotFoundError(f"there is no node {name!r}")
    return nodes[name]
