"""The server's life.

    CREATED -> SERVING -> DRAINING -> STOPPED
       |          '-------------------^   (stopped at once)
       '------------------------------^   (never started)

Draining goes in this order: health says NOT_SERVING (whoever watches hears it at once), new
requests are refused with UNAVAILABLE, running ones finish; those still running after
`drain_timeout_s` are aborted with UNAVAILABLE; then connections close. Health calls that watch do
not hold the drain up.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import logging
import os
import signal
import time
from collections.abc import Callable, Mapping
from typing import Any

import grpc
import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from flowkv_jax.config import ServerConfig
from flowkv_jax.errors import RetryableRequestError
from flowkv_jax.rpc.answering import Answering
from flowkv_jax.rpc.auth import BearerTokenInterceptor
from flowkv_jax.rpc.cluster_servicer import ClusterServicer
from flowkv_jax.rpc.cluster_view import ClusterView
from flowkv_jax.rpc.engine_protocol import ServingEngine
from flowkv_jax.rpc.flowkv.v1 import cluster_pb2_grpc as cluster_grpc
from flowkv_jax.rpc.flowkv.v1 import flowkv_pb2_grpc as pb_grpc
from flowkv_jax.rpc.live_requests import LiveRequests
from flowkv_jax.rpc.servicer import FlowKVServicer
from flowkv_jax.rpc.transport import (
    CLUSTER_SERVICE,
    SERVICE,
    ListenSettings,
    address_error,
    check_address_free,
    listen_settings,
    server_options,
)

HEALTH_INTERVAL_S = 1.0
"""How often an idle server asks whether its engine lives."""

# For what is not a request: telling watchers, and closing what was aborted.
_CLOSING_TIMEOUT_S = 5.0
# Lets statuses written a moment ago reach the wire. Health calls that watch never end by
# themselves and are cut off after it.
_LAST_WORDS_S = 0.25

_Status = health_pb2.HealthCheckResponse

_logger = logging.getLogger(__name__)


class ServerState(enum.Enum):
    CREATED = enum.auto()
    SERVING = enum.auto()
    DRAINING = enum.auto()
    STOPPED = enum.auto()


LEGAL_MOVES: frozenset[tuple[ServerState, ServerState]] = frozenset(
    {
        (ServerState.CREATED, ServerState.SERVING),
        (ServerState.CREATED, ServerState.STOPPED),
        (ServerState.SERVING, ServerState.DRAINING),
        (ServerState.SERVING, ServerState.STOPPED),
        (ServerState.DRAINING, ServerState.STOPPED),
    }
)


class GrpcServer:
    """Serves one engine over gRPC. Make, start and stop it on one event loop.

    Args:
        engine: stays the caller's; it is not shut down here.
        cluster: shown and steered by `flowkv.v1.Cluster`, which is offered only with it.
        environ: where FLOWKV_API_KEY is looked up.
        health_interval_s: see `HEALTH_INTERVAL_S`.
        clock: monotonic seconds, for message intervals and durations in logs.

    Raises:
        ConfigError: as `transport.listen_settings`.
    """

    def __init__(
        self,
        engine: ServingEngine,
        config: ServerConfig,
        *,
        cluster: ClusterView | None = None,
        environ: Mapping[str, str] = os.environ,
        health_interval_s: float = HEALTH_INTERVAL_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engine = engine
        self._config = config
        self._cluster = cluster
        self._settings = listen_settings(config, environ)
        self._health_interval_s = health_interval_s
        self._clock = clock
        self._state = ServerState.CREATED
        self._address: str | None = None
        self._live = LiveRequests()
        self._stopped = asyncio.Event()
        self._engine_suspect = asyncio.Event()
        self._server: Any = None
        self._health: Any = None
        self._cluster_servicer: ClusterServicer | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def state(self) -> ServerState:
        return self._state

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
        return (SERVICE,) if self._cluster is None else (SERVICE, CLUSTER_SERVICE)

    @property
    def num_live_requests(self) -> int:
        return len(self._live)

    async def start(self) -> None:
        """Open the port and answer.

        Raises:
            ConfigError: the address is in use or cannot be bound.
            RuntimeError: started before.
        """
        if self._state is not ServerState.CREATED:
            raise RuntimeError(f"the server is {self._state.name} and cannot be started")
        interceptors = []
        if self._settings.api_keys:
            interceptors.append(BearerTokenInterceptor(self._settings.api_keys))
        self._server = grpc.aio.server(
            interceptors=interceptors, options=server_options(self._config.max_message_bytes)
        )
        self._add_services()
        self._address = _bind(self._server, self._settings)
        await self._server.start()
        self._move_to(ServerState.SERVING)
        await self._report_health(_Status.SERVING)
        self._spawn(self._watch_engine())
        _logger.info("serving on %s", self._address)

    def install_signal_handlers(self) -> None:
        """SIGTERM and SIGINT: the first drains, the second stops at once. Main thread only."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal, number)

    async def wait(self) -> None:
        """Until the server has stopped, by a signal or by a call from elsewhere."""
        await self._stopped.wait()

    async def drain(self) -> None:
        """Stop as the module describes. Later calls wait for the first one's end."""
        if self._state is ServerState.CREATED:
            self._finish()
        if self._state is ServerState.SERVING:
            self._move_to(ServerState.DRAINING)
            _logger.info("draining: %d requests are running", len(self._live))
            self._live.refuse_new()
            await self._leave_health()
            if not await self._live.wait_until_empty(self._config.drain_timeout_s):
                _logger.warning("aborting %d requests after %.1f s of draining",
                                len(self._live), self._config.drain_timeout_s)  # fmt: skip
            await self._close()
        await self._stopped.wait()

    async def stop(self) -> None:
        """Abort what is running and stop."""
        if self._state is ServerState.CREATED:
            self._finish()
        if self._state in (ServerState.SERVING, ServerState.DRAINING):
            self._live.refuse_new()
            await self._close()
        await self._stopped.wait()

    async def _close(self) -> None:
        """Abort what is left and close every connection. Runs through only once."""
        if self._state is ServerState.STOPPED:
            return
        self._move_to(ServerState.STOPPED)
        await self._leave_health()
        self._live.stop_all(RetryableRequestError("the server shut down during the request"))
        if self._cluster_servicer is not None:
            self._cluster_servicer.close()
        await self._live.wait_until_empty(_CLOSING_TIMEOUT_S)
        await self._server.stop(_LAST_WORDS_S)
        self._finish()

    def _finish(self) -> None:
        if self._state is ServerState.CREATED:
            self._move_to(ServerState.STOPPED)
        current = asyncio.current_task()
        for task in self._tasks:
            if task is not current:
                task.cancel()
        self._stopped.set()
        _logger.info("stopped")

    def _add_services(self) -> None:
        answering = Answering(
            self._engine,
            self._live,
            stream_interval_s=self._config.stream_interval_ms / 1000,
            on_engine_dead=self._engine_suspect.set,
            clock=self._clock,
        )
        servicer = FlowKVServicer(answering)
        pb_grpc.add_FlowKVServicer_to_server(servicer, self._server)  # type: ignore[no-untyped-call]
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

    async def _report_health(self, status: Any) -> None:
        for service in ("", *self._services):
            await self._health.set(service, status)

    async def _leave_health(self) -> None:
        # A watcher that stops reading holds the health service's lock; it must not hold us.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_CLOSING_TIMEOUT_S):
                await self._health.enter_graceful_shutdown()

    async def _watch_engine(self) -> None:
        """Tell health when the engine dies, and when one whose nodes come back is there again."""
        was_healthy = True
        while True:
            is_healthy = self._engine.is_healthy
            if is_healthy is not was_healthy:
                was_healthy = is_healthy
                if is_healthy:
                    _logger.warning("the engine can serve again: health is SERVING")
                else:
                    _logger.error("the engine can serve nothing: health is NOT_SERVING")
                await self._report_health(_Status.SERVING if is_healthy else _Status.NOT_SERVING)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._health_interval_s):
                    await self._engine_suspect.wait()
            self._engine_suspect.clear()

    def _on_signal(self, number: int) -> None:
        name = signal.Signals(number).name
        if self._state is ServerState.SERVING:
            _logger.info("%s: draining; once more stops at once", name)
            self._spawn(self.drain())
        else:
            _logger.warning("%s: stopping at once", name)
            self._spawn(self.stop())

    def _spawn(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _move_to(self, state: ServerState) -> None:
        if (self._state, state) not in LEGAL_MOVES:
            raise RuntimeError(f"illegal move {self._state.name} -> {state.name}")
        self._state = state


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
