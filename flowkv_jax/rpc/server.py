"""The gRPC port: one listener for all of its services, a part of `flowkv_jax.serving.Server`.

Health calls that watch, and streams that show the cluster, never end by themselves; `close` ends
them.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

import grpc
import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from smg_grpc_proto.generated import vllm_engine_pb2_grpc as vllm_grpc

from flowkv_jax.config import ServerConfig
from flowkv_jax.rpc.answering import Answering
from flowkv_jax.rpc.auth import BearerTokenInterceptor
from flowkv_jax.rpc.cluster_servicer import ClusterServicer
from flowkv_jax.rpc.engine_protocol import ServingEngine
from flowkv_jax.rpc.flowkv.v1 import cluster_pb2_grpc as cluster_grpc
from flowkv_jax.rpc.flowkv.v1 import flowkv_pb2_grpc as pb_grpc
from flowkv_jax.rpc.inference import kserve_pb2_grpc as kserve_grpc
from flowkv_jax.rpc.kserve_servicer import KSERVE_SERVICE, KServeServicer
from flowkv_jax.rpc.live_requests import LiveRequests
from flowkv_jax.rpc.servicer import FlowKVServicer
from flowkv_jax.rpc.transport import (
    CLUSTER_SERVICE,
    SERVICE,
    ListenSettings,
    address_error,
    check_address_free,
    server_options,
)
from flowkv_jax.rpc.vllm_servicer import VLLM_SERVICE, VllmServicer

# Lets statuses written a moment ago reach the wire. Health calls that watch never end by
# themselves and are cut off after it.
_LAST_WORDS_S = 0.25

_Status = health_pb2.HealthCheckResponse

_logger = logging.getLogger(__name__)


class GrpcServer:
    """A front door; see `flowkv_jax.serving.FrontDoor`. Make, start and close it on one event loop.

    Args:
        engine: stays the caller's. Its `cluster` is shown and steered by `flowkv.v1.Cluster`, which
            is offered only with it.
        settings: made of `config`.
        live: shared with the server's other doors.
        on_engine_dead: called when a request met a dead engine.
        clock: monotonic seconds, for message intervals and durations in logs.
    """

    def __init__(
        self,
        engine: ServingEngine,
        config: ServerConfig,
        settings: ListenSettings,
        live: LiveRequests,
        *,
        on_engine_dead: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engine = engine
        self._config = config
        self._settings = settings
        self._live = live
        self._cluster = engine.cluster
        self._on_engine_dead = on_engine_dead
        self._clock = clock
        self._address: str | None = None
        self._server: Any = None
        self._health: Any = None
        self._cluster_servicer: ClusterServicer | None = None

    @property
    def address(self) -> str:
        """Where it listens, with the port that was given.

        Raises:
            RuntimeError: not started.
        """
        if self._address is None:
            raise RuntimeError("the server has not been started")
        return self._address

    @property
    def _services(self) -> tuple[str, ...]:
        always = (SERVICE, KSERVE_SERVICE, VLLM_SERVICE)
        return always if self._cluster is None else (*always, CLUSTER_SERVICE)

    async def start(self) -> None:
        """Open the port and answer; health is unknown until `show_health`.

        Raises:
            ConfigError: the address is in use or cannot be bound.
        """
        interceptors = []
        if self._settings.api_keys:
            interceptors.append(BearerTokenInterceptor(self._settings.api_keys))
        self._server = grpc.aio.server(
            interceptors=interceptors, options=server_options(self._config.max_message_bytes)
        )
        self._add_services()
        self._address = _bind(self._server, self._settings)
        await self._server.start()
        _logger.info("serving on %s", self._address)

    async def show_health(self, is_serving: bool) -> None:
        """Tell health, and whoever watches it, of every service."""
        status = _Status.SERVING if is_serving else _Status.NOT_SERVING
        for service in ("", *self._services):
            await self._health.set(service, status)

    async def leave_health(self) -> None:
        """See `FrontDoor.leave_health`."""
        await self._health.enter_graceful_shutdown()

    async def close(self) -> None:
        """See `FrontDoor.close`."""
        if self._cluster_servicer is not None:
            self._cluster_servicer.close()
        await self._server.stop(_LAST_WORDS_S)

    def _add_services(self) -> None:
        answering = Answering(
            self._engine,
            self._live,
            stream_interval_s=self._config.stream_interval_ms / 1000,
            on_engine_dead=self._on_engine_dead,
            clock=self._clock,
        )
        servicer = FlowKVServicer(answering)
        pb_grpc.add_FlowKVServicer_to_server(servicer, self._server)  # type: ignore[no-untyped-call]
        kserve_grpc.add_GRPCInferenceServiceServicer_to_server(  # type: ignore[no-untyped-call]
            KServeServicer(answering), self._server
        )
        vllm_grpc.add_VllmEngineServicer_to_server(
            VllmServicer(answering, is_admin=self._settings.enable_admin), self._server
        )
        if self._cluster is not None:
            self._cluster_servicer = ClusterServicer(
                self._cluster, is_admin=self._settings.enable_admin, clock=self._clock
            )
            add_cluster = cluster_grpc.add_ClusterServicer_to_server
            add_cluster(self._cluster_servicer, self._server)  # type: ignore[no-untyped-call]
        self._health = health.aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        if self._settings.enable_reflection:
            names = (*self._services, health.SERVICE_NAME, reflection.SERVICE_NAME)
            reflection.enable_server_reflection(names, self._server)


def _bind(server: Any, settings: ListenSettings) -> str:
    check_address_free(settings.address)
    try:
        if settings.credentials is None:
            port = server.add_insecure_port(settings.address)
        else:
            port = server.add_secure_port(settings.address, settings.credentials)
    except RuntimeError as error:
        raise address_error(settings.address, str(error)) from error
    if settings.address.startswith("unix"):
        return settings.address
    return f"{settings.address.rpartition(':')[0]}:{port}"
