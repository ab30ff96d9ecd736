"""A port that answers HTTP: uvicorn's connections, opened and ended by us."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import ssl
from email.utils import formatdate

import uvicorn
from uvicorn.server import ServerState

from flowkv_jax.config import ServerConfig
from flowkv_jax.http.app import App
from flowkv_jax.http.protocol import protocol_factory
from flowkv_jax.rpc.transport import address_error

_BACKLOG = 2048
_LAST_WORDS_S = 0.25
"""Lets answers written a moment ago reach the wire. Streams that never end by themselves are cut
off after it."""

_logger = logging.getLogger(__name__)


class HttpServer:
    """A front door; see `flowkv_jax.serving.FrontDoor`. Make, start and close it on one event loop.

    Args:
        address: `HOST:PORT` to bind; port 0 takes a free one.
        parameter: the setting that chose the port.
    """

    def __init__(self, app: App, config: ServerConfig, address: str, parameter: str) -> None:
        self._config = config
        self._wanted = address
        self._parameter = parameter
        self._bound: str | None = None
        self._state = ServerState()
        self._settings = uvicorn.Config(
            app,
            loop="none",
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="error",  # what strangers send wrong is not worth a line each
            access_log=False,
            proxy_headers=False,
            server_header=False,
            timeout_keep_alive=config.keep_alive_timeout_s,  # type: ignore[arg-type]
            ssl_certfile=config.ssl_certfile,
            ssl_keyfile=config.ssl_keyfile,
            ssl_ca_certs=config.ssl_ca_certs,
            ssl_cert_reqs=ssl.CERT_NONE if config.ssl_ca_certs is None else ssl.CERT_REQUIRED,
        )
        self._listeners: list[asyncio.Server] = []
        self._clock_task: asyncio.Task[None] | None = None

    @property
    def address(self) -> str:
        """Where it listens, as a URL.

        Raises:
            RuntimeError: not started.
        """
        if self._bound is None:
            raise RuntimeError("the server has not been started")
        return self._bound

    async def start(self) -> None:
        """Open the port and answer.

        Raises:
            ConfigError: the address is in use or cannot be bound.
        """
        self._settings.load()
        tls = self._settings.ssl
        self._tell_time()
        factory = protocol_factory(self._settings, self._state, self._config)
        loop = asyncio.get_running_loop()
        sockets = _bind(self._wanted, self._parameter)
        timeout_s = self._config.header_timeout_s if tls is not None else None
        for bound in sockets:
            self._listeners.append(
                await loop.create_server(
                    factory,
                    sock=bound,
                    ssl=tls,
                    ssl_handshake_timeout=timeout_s,
                    backlog=_BACKLOG,
                )
            )
        host = self._wanted.rpartition(":")[0]
        scheme = "http" if tls is None else "https"
        self._bound = f"{scheme}://{host}:{sockets[0].getsockname()[1]}"
        self._clock_task = loop.create_task(self._keep_time())
        _logger.info("serving on %s", self._bound)

    async def show_health(self, is_serving: bool) -> None:
        """Nothing is pushed over HTTP: who asks, hears."""

    async def leave_health(self) -> None:
        """Likewise."""

    async def close(self) -> None:
        """End every connection. Answers that are complete are sent."""
        for listener in self._listeners:
            listener.close()
        for connection in list(self._state.connections):
            connection.shutdown()
        if self._state.tasks:
            await asyncio.wait(set(self._state.tasks), timeout=_LAST_WORDS_S)
        for task in list(self._state.tasks):
            task.cancel()
        for connection in list(self._state.connections):
            if (transport := connection.transport) is not None:
                transport.close()
        if self._clock_task is not None:
            self._clock_task.cancel()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LAST_WORDS_S):
                for listener in self._listeners:
                    await listener.wait_closed()

    async def _keep_time(self) -> None:
        while True:
            await asyncio.sleep(1.0)
            self._tell_time()

    def _tell_time(self) -> None:
        self._state.default_headers = [(b"date", formatdate(usegmt=True).encode())]


def _bind(address: str, parameter: str) -> list[socket.socket]:
    """A socket for each address that the host's name stands for, all of one port."""
    host, _, port_text = address.rpartition(":")
    port = int(port_text)
    sockets: list[socket.socket] = []
    try:
        found = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)
        for family, kind, protocol, _, where in dict.fromkeys(found):
            made = socket.socket(family, kind, protocol)
            sockets.append(made)
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            made.bind((where[0], port, *where[2:]))
            port = made.getsockname()[1]
            made.setblocking(False)
    except OSError as error:
        for made in sockets:
            made.close()
        raise address_error(address, str(error.strerror or error), parameter) from error
    return sockets
