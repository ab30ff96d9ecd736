"""A server: one engine behind all its front doors, from start to end.

    CREATED -> SERVING -> DRAINING -> STOPPED
       |          '-------------------^   (stopped at once)
       '------------------------------^   (never started)

Draining goes in this order: health says NOT_SERVING and `/ready` 503 (whoever watches hears it at
once), new requests are refused with UNAVAILABLE or 503, running ones finish; those still running
after `drain_timeout_s` are ended with the same error; then connections close. Streams that never
end by themselves, as health calls that watch, do not hold the drain up.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import logging
import os
import signal
import time
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, Protocol

from flowkv_jax import __version__
from flowkv_jax.config import ServerConfig
from flowkv_jax.errors import RetryableRequestError
from flowkv_jax.http.app import make_admin_app, make_app
from flowkv_jax.http.server import HttpServer
from flowkv_jax.http.surroundings import Surroundings
from flowkv_jax.rpc.engine_protocol import ServingEngine
from flowkv_jax.rpc.live_requests import LiveRequests
from flowkv_jax.rpc.server import GrpcServer
from flowkv_jax.rpc.transport import listen_settings
from flowkv_jax.trace.recorder import Recorder

HEALTH_INTERVAL_S = 1.0
"""How often an idle server asks whether its engine lives."""

# For what is not a request: telling watchers, and closing what was aborted.
_CLOSING_TIMEOUT_S = 5.0

_logger = logging.getLogger(__name__)


class FrontDoor(Protocol):
    """A port, as its server drives it: `start`, health as it changes, at last `close`."""

    @property
    def address(self) -> str:
        """Where it listens; once started."""
        ...

    async def start(self) -> None:
        """
        Raises:
            ConfigError: the address is in use or cannot be bound.
        """
        ...

    async def show_health(self, is_serving: bool) -> None: ...

    async def leave_health(self) -> None:
        """Say NOT_SERVING for good. May wait for a watcher that does not read."""
        ...

    async def close(self) -> None:
        """Close every connection; requests have ended."""
        ...


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


class Server:
    """Serves one engine over gRPC and HTTP. Make, start and stop it on one event loop.

    Args:
        engine: stays the caller's; it is not shut down here. `flowkv.v1.Cluster` and the live page
            are offered only where it has a `cluster`.
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
        environ: Mapping[str, str] = os.environ,
        health_interval_s: float = HEALTH_INTERVAL_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engine = engine
        self._config = config
        self._health_interval_s = health_interval_s
        self._state = ServerState.CREATED
        self._live = LiveRequests()
        self._stopped = asyncio.Event()
        self._engine_suspect = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        settings = listen_settings(config, environ)
        self._grpc = GrpcServer(
            engine,
            config,
            settings,
            self._live,
            on_engine_dead=self._engine_suspect.set,
            clock=clock,
        )
        self._recorder: Recorder | None = None
        if (cluster := engine.cluster) is not None:
            count_gaps = engine.metrics.inter_token_s
            self._recorder = Recorder(cluster, lambda: count_gaps().counts)
        surroundings = Surroundings(
            engine=engine,
            config=config,
            live=self._live,
            api_keys=settings.api_keys,
            version=__version__,
            started_unix_s=int(time.time()),
            on_engine_dead=self._engine_suspect.set,
            drain_server=lambda: self._spawn(self.drain()),
            clock=clock,
            recorder=self._recorder,
        )
        self._http: HttpServer | None = None
        if settings.http_address is not None:
            app = make_app(surroundings)
            self._http = HttpServer(app, config, settings.http_address, "port")
        self._admin: HttpServer | None = None
        if settings.admin_address is not None:
            admin = make_admin_app(surroundings)
            self._admin = HttpServer(admin, config, settings.admin_address, "admin_port")
        doors: list[FrontDoor | None] = [self._grpc, self._http, self._admin]
        self._doors = [door for door in doors if door is not None]
        self._opened: list[FrontDoor] = []

    @property
    def state(self) -> ServerState:
        return self._state

    @property
    def address(self) -> str:
        """Where gRPC listens, with the port that was given.

        Raises:
            RuntimeError: not started.
        """
        return self._grpc.address

    @property
    def http_address(self) -> str | None:
        """Where HTTP listens, as a URL; None where it is not served.

        Raises:
            RuntimeError: not started.
        """
        return None if self._http is None else self._http.address

    @property
    def admin_address(self) -> str | None:
        """Where the admin port listens, as a URL; None where it is not served.

        Raises:
            RuntimeError: not started.
        """
        return None if self._admin is None else self._admin.address

    @property
    def description(self) -> str:
        """All addresses, for people."""
        http = "" if self._http is None else f" on {self._http.address}"
        admin = "" if self._admin is None else f"; admin on {self._admin.address}"
        return f"{http}; gRPC on {self._grpc.address}{admin}"

    @property
    def num_live_requests(self) -> int:
        return len(self._live)

    async def start(self) -> None:
        """Open the ports and answer.

        Raises:
            ConfigError: an address is in use or cannot be bound.
            RuntimeError: started before.
        """
        if self._state is not ServerState.CREATED:
            raise RuntimeError(f"the server is {self._state.name} and cannot be started")
        try:
            for door in self._doors:
                await door.start()
                self._opened.append(door)
        except BaseException:
            await self._close_doors()
            self._finish()
            raise
        self._move_to(ServerState.SERVING)
        if self._recorder is not None and self._http is not None:
            self._recorder.start()
        for door in self._opened:
            await door.show_health(True)
        self._spawn(self._watch_engine())

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
        await self._live.wait_until_empty(_CLOSING_TIMEOUT_S)
        await self._close_doors()
        if self._recorder is not None:
            await asyncio.to_thread(self._recorder.close)
        self._finish()

    async def _close_doors(self) -> None:
        await asyncio.gather(*(door.close() for door in self._opened))

    def _finish(self) -> None:
        if self._state is ServerState.CREATED:
            self._move_to(ServerState.STOPPED)
        current = asyncio.current_task()
        for task in self._tasks:
            if task is not current:
                task.cancel()
        self._stopped.set()
        _logger.info("stopped")

    async def _leave_health(self) -> None:
        # A watcher that stops reading holds the health service's lock; it must not hold us.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_CLOSING_TIMEOUT_S):
                await asyncio.gather(*(door.leave_health() for door in self._opened))

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
                for door in self._opened:
                    await door.show_health(is_healthy)
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

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _move_to(self, state: ServerState) -> None:
        if (self._state, state) not in LEGAL_MOVES:
            raise RuntimeError(f"illegal move {self._state.name} -> {state.name}")
        self._state = state
