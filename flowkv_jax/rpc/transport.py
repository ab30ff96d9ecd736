"""Addresses, TLS files and channel settings of both ends, and the rule of what may be bound.

The rule: an address that other hosts can reach needs TLS or tokens, or the operator's word
(`allow_insecure_bind`). Everything here is checked before a model is loaded or a port opened.
"""

from __future__ import annotations

import ipaddress
import json
import logging
import os
import socket
import ssl
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from flowkv_jax.config import ServerConfig
from flowkv_jax.errors import ConfigError, ValidationError
from flowkv_jax.rpc.auth import ApiKeys, load_api_keys

SERVICE = "flowkv.v1.FlowKV"
CLUSTER_SERVICE = "flowkv.v1.Cluster"

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ListenSettings:
    """A checked `ServerConfig`, with its files read.

    Attributes:
        address: what gRPC binds.
        http_address, admin_address: what HTTP binds; None for none. A Unix socket is gRPC's alone.
        credentials: gRPC's; None without TLS.
    """

    address: str
    http_address: str | None
    admin_address: str | None
    credentials: Any | None
    api_keys: ApiKeys
    enable_reflection: bool
    enable_admin: bool


def listen_settings(
    config: ServerConfig, environ: Mapping[str, str] = os.environ
) -> ListenSettings:
    """Check a server's configuration and read its files.

    Raises:
        ConfigError: a value out of range, a file that cannot be used (named), TLS files that do
            not belong together, a host that is no address, an open address without TLS or token,
            or an open admin port without a way to tell who calls.
    """
    _check_ranges(config)
    credentials = _server_credentials(config)
    api_keys = load_api_keys(config.api_key_file, environ)
    is_local = _is_local(config.host)
    if not is_local:
        _check_open_bind(config, has_tls=credentials is not None, has_keys=bool(api_keys))
    if config.admin_port is not None and not _is_local(config.admin_host):
        _check_open_admin(config, has_keys=bool(api_keys))
    return ListenSettings(
        address=_address(config.host, config.grpc_port),
        http_address=_http_address("host", config.host, config.port),
        admin_address=_http_address("admin_host", config.admin_host, config.admin_port),
        credentials=credentials,
        api_keys=api_keys,
        enable_reflection=(
            is_local if config.enable_reflection is None else config.enable_reflection
        ),
        enable_admin=is_local if config.enable_admin is None else config.enable_admin,
    )


def server_options(max_message_bytes: int) -> list[tuple[str, int]]:
    """Clients of this field ping every 30 s, idle or not, and gRPC's defaults answer that with
    GOAWAY; the first three settings allow it. The next two find out about hosts that vanished, so
    that their requests are aborted. The last stops two servers from sharing one port by accident.
    """
    return [
        ("grpc.http2.max_ping_strikes", 0),
        ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.keepalive_time_ms", 60_000),
        ("grpc.keepalive_timeout_ms", 20_000),
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.max_send_message_length", max_message_bytes),
        ("grpc.so_reuseport", 0),
    ]


def channel_options(target: str, max_message_bytes: int) -> list[tuple[str, Any]]:
    """Of a client. The service config retries UNAVAILABLE, which gRPC does only while nothing of
    the answer has arrived: a stream that began is never begun again.

    gRPC would ask the proxy of `http_proxy` for this machine's own addresses too.
    """
    retry = {
        "maxAttempts": 3,
        "initialBackoff": "0.2s",
        "maxBackoff": "2s",
        "backoffMultiplier": 2,
        "retryableStatusCodes": ["UNAVAILABLE"],
    }
    service_config = {"methodConfig": [{"name": [{"service": SERVICE}], "retryPolicy": retry}]}
    return [
        ("grpc.service_config", json.dumps(service_config)),
        ("grpc.enable_http_proxy", int(not _is_loopback(target))),
        ("grpc.enable_retries", 1),
        ("grpc.keepalive_time_ms", 30_000),
        ("grpc.keepalive_timeout_ms", 20_000),
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.max_send_message_length", max_message_bytes),
    ]


def _is_loopback(target: str) -> bool:
    """Whether `HOST:PORT` names this machine by itself; no name but localhost is looked up."""
    host = target.rpartition(":")[0].strip("[]")
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def channel_credentials(
    ca_file: str | None, cert_file: str | None, key_file: str | None
) -> Any | None:
    """Client side of TLS; None if no file is given.

    Raises:
        ValidationError: a file cannot be used (named), or one of cert_file and key_file is missing.
    """
    if ca_file is None and cert_file is None and key_file is None:
        return None
    if (cert_file is None) != (key_file is None):
        missing = "tls_cert_file" if cert_file is None else "tls_key_file"
        raise ValidationError(
            f"{missing} is missing: a client certificate needs both", parameter=missing
        )
    chain = key = None
    if cert_file is not None and key_file is not None:
        chain, key = _key_pair("tls_cert_file", cert_file, "tls_key_file", key_file)
    return grpc.ssl_channel_credentials(
        root_certificates=_authorities("tls_ca_file", ca_file) if ca_file is not None else None,
        private_key=key,
        certificate_chain=chain,
    )


def check_addresses_free(settings: ListenSettings) -> None:
    """`check_address_free` of all ports.

    Raises:
        ConfigError: one is taken, or two of them are the same; names the setting.
    """
    addresses = {
        "port": settings.http_address,
        "grpc_port": settings.address,
        "admin_port": settings.admin_address,
    }
    seen: dict[str, str] = {}
    for parameter, address in addresses.items():
        if address is None:
            continue
        if not address.endswith(":0") and address in seen:
            raise ConfigError(
                f"{parameter} and {seen[address]} are the same: {address}; give each its own",
                parameter=parameter,
                value=address,
            )
        seen[address] = parameter
        check_address_free(address, parameter)


def check_address_free(address: str, parameter: str = "grpc_port") -> None:
    """Whether a server could listen there now. Binding is what decides; this is the early answer,
    and for a Unix socket the only one: gRPC takes over a path that another server listens on.

    Args:
        parameter: the setting that chose the port.

    Raises:
        ConfigError: somebody listens there, or the address is not this machine's.
    """
    if address.startswith("unix-abstract:"):
        return
    if address.startswith("unix:"):
        path = address.removeprefix("unix:")
        _check_path_free(address, path.removeprefix("//") if path.startswith("//") else path)
        return
    host, _, port = address.rpartition(":")
    try:
        for family, kind, _, _, where in socket.getaddrinfo(
            host.strip("[]"), int(port), type=socket.SOCK_STREAM
        ):
            with socket.socket(family, kind) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                if family == socket.AF_INET6:
                    probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                probe.bind(where)
    except OSError as error:
        raise address_error(address, str(error.strerror), parameter) from error


def address_error(address: str, why: str, parameter: str = "grpc_port") -> ConfigError:
    return ConfigError(
        f"cannot listen on {address}: the port is in use, or the address is not this machine's "
        f"({why}); choose another {parameter} (0 takes a free one)",
        parameter=parameter,
        value=address,
    )


def _check_path_free(address: str, path: str) -> None:
    try:
        is_socket = stat.S_ISSOCK(os.stat(path).st_mode)
    except FileNotFoundError:
        return
    with socket.socket(socket.AF_UNIX) as probe:
        if is_socket and probe.connect_ex(path) != 0:
            return
    raise ConfigError(
        f"host={address}: {'another server listens there' if is_socket else 'is no socket'}",
        parameter="host",
        value=address,
    )


def _check_ranges(config: ServerConfig) -> None:
    bounds: tuple[tuple[str, float, float, float], ...] = (
        ("port", config.port or 0, 0, 65535),
        ("grpc_port", config.grpc_port, 0, 65535),
        ("admin_port", config.admin_port or 0, 0, 65535),
        ("max_message_bytes", config.max_message_bytes, 1024, 2**31 - 1),
        ("max_body_bytes", config.max_body_bytes, 1024, 2**31 - 1),
        ("max_header_bytes", config.max_header_bytes, 1024, 2**24),
        ("max_header_count", config.max_header_count, 8, 10_000),
        ("header_timeout_s", config.header_timeout_s, 0.1, 3600),
        ("body_timeout_s", config.body_timeout_s, 0.1, 3600),
        ("write_timeout_s", config.write_timeout_s, 0.1, 3600),
        ("keep_alive_timeout_s", config.keep_alive_timeout_s, 0.1, 3600),
        ("sse_keep_alive_s", config.sse_keep_alive_s, 0.1, 3600),
        ("drain_timeout_s", config.drain_timeout_s, 0, 86_400),
        ("stream_interval_ms", config.stream_interval_ms, 0, 60_000),
    )
    for name, value, low, high in bounds:
        if not low <= value <= high:
            raise ConfigError(
                f"{name}={value} must be in [{low}, {high}]", parameter=name, value=value
            )


def _address(host: str, port: int) -> str:
    if host.startswith("unix"):
        return host
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _http_address(parameter: str, host: str, port: int | None) -> str | None:
    if port is None:
        return None
    if host.startswith("unix"):
        if parameter == "admin_host":
            raise ConfigError(
                f"admin_host={host}: HTTP is not served there; use an address with a port",
                parameter=parameter,
                value=host,
            )
        _logger.warning("host=%s: gRPC alone is served there, HTTP is not", host)
        return None
    return _address(host, port)


def _is_local(host: str) -> bool:
    """Whether only this machine can reach the address."""
    if host.startswith(("unix:", "unix-abstract:")):
        return True
    if not host:
        raise ConfigError("host is empty; use 127.0.0.1, or 0.0.0.0 for every interface",
                          parameter="host", value=host)  # fmt: skip
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise ConfigError(
            f"host={host} is no address of this machine and no name that resolves: {error}",
            parameter="host",
            value=host,
        ) from error
    addresses = [str(entry[4][0]).partition("%")[0] for entry in found]
    return all(ipaddress.ip_address(address).is_loopback for address in addresses)


def _check_open_bind(config: ServerConfig, *, has_tls: bool, has_keys: bool) -> None:
    if not has_tls and not has_keys:
        if not config.allow_insecure_bind:
            raise ConfigError(
                f"host={config.host} can be reached from other machines, and there is neither TLS "
                "nor a token: set ssl_certfile and ssl_keyfile (ssl_ca_certs for client "
                "certificates), or api_key_file, or FLOWKV_API_KEY; or bind 127.0.0.1; or say "
                "allow_insecure_bind if the network itself is trusted",
                parameter="host",
                value=config.host,
            )
        _logger.warning("%s is served without TLS and without tokens", config.host)
    elif not has_tls:
        _logger.warning(
            "%s is served without TLS: tokens and texts can be read on the way", config.host
        )
    elif not has_keys and config.ssl_ca_certs is None:
        _logger.warning(
            "%s is served to anyone who reaches it: TLS without client certificates or tokens "
            "says who the server is, not who the client is",
            config.host,
        )


def _check_open_admin(config: ServerConfig, *, has_keys: bool) -> None:
    """Steering a server is not for whoever reaches it, whatever else the operator allows."""
    if not has_keys and config.ssl_ca_certs is None:
        raise ConfigError(
            f"admin_host={config.admin_host} can be reached from other machines: set api_key_file "
            "or FLOWKV_API_KEY, or ssl_ca_certs for client certificates; or use 127.0.0.1",
            parameter="admin_host",
            value=config.admin_host,
        )


def _server_credentials(config: ServerConfig) -> Any | None:
    cert_file, key_file, ca_file = config.ssl_certfile, config.ssl_keyfile, config.ssl_ca_certs
    if cert_file is None or key_file is None:
        given = {"ssl_certfile": cert_file, "ssl_keyfile": key_file, "ssl_ca_certs": ca_file}
        present = [name for name, path in given.items() if path is not None]
        if not present:
            return None
        missing = "ssl_certfile" if cert_file is None else "ssl_keyfile"
        raise ConfigError(
            f"{' and '.join(present)} given without {missing}; TLS needs certificate and key",
            parameter=missing,
        )
    chain, key = _key_pair("ssl_certfile", cert_file, "ssl_keyfile", key_file)
    authorities = _authorities("ssl_ca_certs", ca_file) if ca_file is not None else None
    return grpc.ssl_server_credentials(
        [(key, chain)],
        root_certificates=authorities,
        require_client_auth=authorities is not None,
    )


def _read_pem(parameter: str, path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(
            f"{parameter}={path}: cannot be read: {error.strerror}", parameter=parameter, value=path
        ) from error


def _key_pair(
    cert_parameter: str, cert_file: str, key_parameter: str, key_file: str
) -> tuple[bytes, bytes]:
    """Certificate chain and key. gRPC reports a bad file only as a failed bind, so OpenSSL is
    asked first."""
    chain, key = _read_pem(cert_parameter, cert_file), _read_pem(key_parameter, key_file)
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cert_file)
    except ssl.SSLError as error:
        raise ConfigError(
            f"{cert_parameter}={cert_file}: holds no PEM certificate",
            parameter=cert_parameter,
            value=cert_file,
        ) from error
    try:
        # The password callback keeps OpenSSL from asking the terminal.
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(cert_file, key_file, lambda: b"")
    except ssl.SSLError as error:
        raise ConfigError(
            f"{key_parameter}={key_file}: is not the unencrypted PEM key of {cert_file}",
            parameter=key_parameter,
            value=key_file,
        ) from error
    return chain, key


def _authorities(parameter: str, path: str) -> bytes:
    pem = _read_pem(parameter, path)
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(path)
    except ssl.SSLError as error:
        raise ConfigError(
            f"{parameter}={path}: holds no PEM certificate", parameter=parameter, value=path
        ) from error
    return pem
