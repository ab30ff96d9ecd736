"""A cluster elsewhere, as one of this process: `Client.cluster`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import grpc

from flowkv_jax.cluster.dispatch_events import SequenceRecord
from flowkv_jax.controller.decision_log import Decision
from flowkv_jax.controller.role import Role
from flowkv_jax.controller.snapshot import ClusterSnapshot
from flowkv_jax.errors import FlowKVError, UnprocessableError
from flowkv_jax.rpc import cluster_wire
from flowkv_jax.rpc.flowkv.v1 import cluster_pb2 as pb
from flowkv_jax.rpc.flowkv.v1 import cluster_pb2_grpc as pb_grpc

Call = Callable[[Any, Any, float | None], Any]
"""Method, message and timeout in seconds -> response; raises `FlowKVError`."""


class ClusterClient:
    """A `ClusterView` of a server. Made by `Client.cluster`; lives as long as its client.

    Every method raises `UnprocessableError` where the server does not offer the service, or the
    error that the server answers with. `timeout` is in seconds; None takes the client's. A server
    limits how many entries it gives at once.
    """

    def __init__(self, channel: Any, call: Call) -> None:
        self._stub = pb_grpc.ClusterStub(channel)  # type: ignore[no-untyped-call]
        self._call_method = call

    def is_offered(self, *, timeout: float | None = None) -> bool:
        """Whether the server shows a cluster at all.

        Raises:
            FlowKVError: the server cannot be asked.
        """
        try:
            self._call(self._stub.GetRequests, pb.GetRequestsRequest(limit=1), timeout)
        except UnprocessableError as error:
            if _is_unimplemented(error):
                return False
            raise
        return True

    def snapshot(self, *, timeout: float | None = None) -> ClusterSnapshot:
        """All nodes as they stand; times are the server's."""
        response = self._call(self._stub.GetCluster, pb.GetClusterRequest(), timeout)
        return cluster_wire.snapshot_from_wire(response)

    def decisions(
        self, limit: int, after: int | None = None, *, timeout: float | None = None
    ) -> list[Decision]:
        """See `ClusterView.decisions`."""
        request = pb.GetDecisionsRequest(limit=limit, after_number=after)
        response = self._call(self._stub.GetDecisions, request, timeout)
        return [cluster_wire.decision_from_wire(one) for one in response.decisions]

    def records(
        self, limit: int, after: int | None = None, *, timeout: float | None = None
    ) -> list[SequenceRecord]:
        """See `ClusterView.records`."""
        request = pb.GetRequestsRequest(limit=limit, after_number=after)
        response = self._call(self._stub.GetRequests, request, timeout)
        return [cluster_wire.record_from_wire(one) for one in response.requests]

    def set_role(self, name: str, role: Role, *, timeout: float | None = None) -> None:
        """See `ClusterView.set_role`.

        Raises:
            UnprocessableError: the node is leaving, or the server takes no administration.
        """
        request = pb.SetRoleRequest(node=name, role=cluster_wire.role_to_wire(role))
        self._call(self._stub.SetRole, request, timeout)

    def drain(self, name: str, *, timeout: float | None = None) -> None:
        """See `ClusterView.drain`.

        Raises:
            UnprocessableError: the server takes no administration.
        """
        self._call(self._stub.Drain, pb.DrainRequest(node=name), timeout)

    def _call(self, method: Any, message: Any, timeout: float | None) -> Any:
        try:
            return self._call_method(method, message, timeout)
        except FlowKVError as error:
            if _is_unimplemented(error):
                raise UnprocessableError(
                    "the server does not offer flowkv.v1.Cluster: it is older, or shows no cluster"
                ) from error.__cause__
            raise


def _is_unimplemented(error: FlowKVError) -> bool:
    cause = error.__cause__
    return isinstance(cause, grpc.Call) and cause.code() is grpc.StatusCode.UNIMPLEMENTED
