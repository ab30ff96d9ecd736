"""The handlers of `flowkv.v1.Cluster`: they ask a `ClusterView`, on a thread, and change nothing
but what `SetRole` and `Drain` are told to."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from typing import Any

from flowkv_jax.checks import check_int, check_real
from flowkv_jax.errors import (
    NotFoundError,
    QueueOverflowError,
    RetryableRequestError,
    UnprocessableError,
)
from flowkv_jax.rpc import cluster_wire
from flowkv_jax.rpc.call_log import CallLog
from flowkv_jax.rpc.cluster_view import ClusterView
from flowkv_jax.rpc.flowkv.v1 import cluster_pb2 as pb
from flowkv_jax.rpc.flowkv.v1 import cluster_pb2_grpc as pb_grpc

DEFAULT_LIMIT = 100
MAX_DECISIONS = 256
MAX_REQUESTS = 1024
"""Entries of one answer; they are long, and gRPC's default client takes 4 MiB."""
MIN_WATCH_INTERVAL_S, MAX_WATCH_INTERVAL_S = 0.1, 60.0
MAX_WATCHERS = 64
_MAX_NAME_CHARACTERS = 256


class ClusterServicer(pb_grpc.ClusterServicer):
    """Answers calls by asking `view`.

    Args:
        is_admin: callers may change roles and drain nodes.
    """

    def __init__(
        self,
        view: ClusterView,
        *,
        is_admin: bool,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._view = view
        self._is_admin = is_admin
        self._clock = clock
        self._num_watchers = 0
        self._closing = asyncio.Event()

    def close(self) -> None:
        """End every watch with UNAVAILABLE."""
        self._closing.set()

    async def GetCluster(
        self, _request: pb.GetClusterRequest, context: Any
    ) -> pb.GetClusterResponse:
        async with CallLog(context, "GetCluster", self._clock):
            return await asyncio.to_thread(self._cluster)

    async def WatchCluster(
        self, request: pb.WatchClusterRequest, context: Any
    ) -> AsyncIterator[pb.GetClusterResponse]:
        async with CallLog(context, "WatchCluster", self._clock):
            interval_s = request.interval_s if request.HasField("interval_s") else 1.0
            check_real("interval_s", interval_s, MIN_WATCH_INTERVAL_S, MAX_WATCH_INTERVAL_S)
            if self._num_watchers >= MAX_WATCHERS:
                raise QueueOverflowError(f"{MAX_WATCHERS} calls watch this cluster already")
            self._num_watchers += 1
            try:
                while not self._closing.is_set():
                    yield await asyncio.to_thread(self._cluster)
                    with suppress(TimeoutError):
                        await asyncio.wait_for(self._closing.wait(), interval_s)
            finally:
                self._num_watchers -= 1
            raise RetryableRequestError("the server shuts down")

    async def GetDecisions(
        self, request: pb.GetDecisionsRequest, context: Any
    ) -> pb.GetDecisionsResponse:
        async with CallLog(context, "GetDecisions", self._clock):
            limit, after = _page(request, MAX_DECISIONS)
            return await asyncio.to_thread(self._decisions, limit, after)

    async def GetRequests(
        self, request: pb.GetRequestsRequest, context: Any
    ) -> pb.GetRequestsResponse:
        async with CallLog(context, "GetRequests", self._clock):
            limit, after = _page(request, MAX_REQUESTS)
            return await asyncio.to_thread(self._requests, limit, after)

    async def SetRole(self, request: pb.SetRoleRequest, context: Any) -> pb.SetRoleResponse:
        async with CallLog(context, "SetRole", self._clock):
            self._check_admin()
            role = cluster_wire.role_from_wire(request.role)
            name = request.node
            node = await asyncio.to_thread(self._steer, self._view.set_role, name, role)
            return pb.SetRoleResponse(node=node)

    async def Drain(self, request: pb.DrainRequest, context: Any) -> pb.DrainResponse:
        async with CallLog(context, "Drain", self._clock):
            self._check_admin()
            node = await asyncio.to_thread(self._steer, self._view.drain, request.node)
            return pb.DrainResponse(node=node)

    # On a thread

    def _cluster(self) -> pb.GetClusterResponse:
        return cluster_wire.snapshot_to_wire(self._view.snapshot())

    def _decisions(self, limit: int, after: int | None) -> pb.GetDecisionsResponse:
        oldest = self._view.decisions(1, 0)
        return pb.GetDecisionsResponse(
            decisions=map(cluster_wire.decision_to_wire, self._view.decisions(limit, after)),
            oldest_number=oldest[0].number if oldest else 0,
        )

    def _requests(self, limit: int, after: int | None) -> pb.GetRequestsResponse:
        oldest = self._view.records(1, 0)
        return pb.GetRequestsResponse(
            requests=map(cluster_wire.record_to_wire, self._view.records(limit, after)),
            oldest_number=oldest[0].number if oldest else 0,
        )

    def _steer(self, order: Callable[..., None], name: str, *args: Any) -> pb.Node:
        """Carry out an order, and show the node after it."""
        if len(name) > _MAX_NAME_CHARACTERS:
            raise NotFoundError(f"no node has a name of {len(name)} characters")
        order(name, *args)
        for node in self._view.snapshot().nodes:
            if node.name == name:
                return cluster_wire.node_to_wire(node)
        raise NotFoundError(f"node {name!r} has left")

    def _check_admin(self) -> None:
        if not self._is_admin:
            raise UnprocessableError(
                "this server takes no administration over gRPC; start it with --enable-admin"
            )


def _page(request: Any, most: int) -> tuple[int, int | None]:
    """Limit and number of a request for entries.

    Raises:
        ValidationError: one of them is negative.
    """
    limit = request.limit if request.HasField("limit") else DEFAULT_LIMIT
    check_int("limit", limit, 1)
    if not request.HasField("after_number"):
        return min(limit, most), None
    check_int("after_number", request.after_number, 0)
    return min(limit, most), request.after_number
