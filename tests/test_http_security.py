"""Who may ask what over HTTP: keys on every route, odd paths, hosts, TLS, what may be bound."""

import logging
import socket
import ssl
from pathlib import Path
from typing import Any

import httpx
import pytest

from flowkv_jax.config import ServerConfig
from flowkv_jax.errors import ConfigError
from flowkv_jax.http.admin_routes import admin_routes
from flowkv_jax.http.app import all_routes
from flowkv_jax.http.openapi import openapi_route
from flowkv_jax.http.route import Route
from flowkv_jax.http.router import Router
from flowkv_jax.rpc.transport import check_addresses_free, listen_settings
from tests.fake_engine import FakeEngine, serving
from tests.http_wire import answering, exchange, request
from tests.test_rpc_security import Authority

KEY = "the-key"
OPEN = {"/", "/health", "/ready", "/v2/health/live", "/v2/health/ready"}
"""The page holds no data; probes have no secrets."""

KEYS = {
    "none": {},
    "wrong": {"Authorization": "Bearer another"},
    "empty": {"Authorization": "Bearer "},
    "no scheme": {"Authorization": KEY},
    "another scheme": {"Authorization": f"Basic {KEY}"},
    "another header": {"X-Api-Key": KEY},
    "longer": {"Authorization": f"Bearer {KEY}x"},
    "shorter": {"Authorization": f"Bearer {KEY[:-1]}"},
    "case": {"Authorization": f"Bearer {KEY.upper()}"},
}


def tables() -> list[Route]:
    return [*all_routes(), *admin_routes(), openapi_route([])]


def test_what_is_open() -> None:
    assert {route.path for route in tables() if route.is_open} == OPEN
    assert all(route.method == "GET" for route in tables() if route.is_open)


@pytest.mark.parametrize("headers", KEYS.values(), ids=KEYS)
async def test_every_route_needs_a_key(headers: dict[str, str]) -> None:
    async with serving(FakeEngine(), {"FLOWKV_API_KEY": KEY}, port=0, admin_port=0) as server:
        tables = [(server.http_address, all_routes()), (server.admin_address, admin_routes())]
        for url, routes in tables:
            assert url is not None
            for route in routes:
                path = route.path.replace("{model:path}", "fake").replace("{model}", "fake")
                answer = await exchange(url, request(route.method, path, headers))
                if route.is_open:
                    assert answer.status == 200
                else:
                    assert answer.status == 401, path
                    assert answer.error["code"] == "invalid_api_key"
                    assert answer.headers["www-authenticate"] == "Bearer"


async def test_any_of_the_keys_opens() -> None:
    async with answering(keys=["one", "two"]) as url:
        for scheme in ("Bearer one", "bearer two", "BEARER   one"):
            answer = await exchange(url, request("GET", "/version", {"Authorization": scheme}))
            assert answer.status == 200
        twice = request("GET", "/version", {"Authorization": "Bearer one", "authorization": "x"})
        assert (await exchange(url, twice)).status == 400


ODD_PATHS = [
    "//health",
    "/health/",
    "/health//",
    "/Health",
    "/HEALTH",
    "/./health",
    "/%2e/health",
    "/%68ealth",
    "/health%2f",
    "/health%20",
    "/health%00",
    "/health;x=1",
    "/health/../version",
    "/health/%2e%2e/version",
    "/..%2fversion",
    "/version?/health",
    "/version#/health",
    "/%2fhealth",
    "/v1/models/../../health",
    "/ready/x",
    "//",
    "/%",
    "/version%3f/health",
    "http://x/version",
    "http://health/version",
    "http://x//health",
    "/nothing",
]


@pytest.mark.parametrize("path", ODD_PATHS)
@pytest.mark.parametrize("method", ["GET", "POST", "HEAD", "OPTIONS", "DELETE"])
async def test_odd_paths_need_a_key(path: str, method: str) -> None:
    async with answering(keys=[KEY]) as url:
        answer = await exchange(url, request(method, path))
        assert answer.status in (400, 401), path
        with_key = await exchange(url, request(method, path, {"Authorization": f"Bearer {KEY}"}))
        assert with_key.status in (200, 400, 404, 405)


@pytest.mark.parametrize(
    "path", ["/health?x=1", "/health#x", "http://x/health", "http://y:1/health"]
)
async def test_ways_to_write_an_open_path(path: str) -> None:
    async with answering(keys=[KEY]) as url:
        assert (await exchange(url, request("GET", path))).status == 200


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "PATCH", "TRACE"])
async def test_open_paths_are_open_to_get_alone(method: str) -> None:
    async with answering(keys=[KEY]) as url:
        for path in OPEN:
            assert (await exchange(url, request(method, path))).status == 401


@pytest.mark.parametrize(
    ("host", "is_good"),
    [
        ("x", True),
        ("127.0.0.1:8000", True),
        ("[::1]:8000", True),
        ("example.com", True),
        ("a_b.internal:1", True),
        ("", False),
        ("x/version", False),
        ("x/health?", False),
        ("x#", False),
        ("user@x", False),
        ("x:", False),
        ("x:port", False),
        ("x y", False),
        ("[::1", False),
        ("x, y", False),
        ("x\\y", False),
    ],
)
async def test_hosts(host: str, is_good: bool) -> None:
    async with answering(keys=[KEY]) as url:
        answer = await exchange(url, request("GET", "/health", {"Host": host}))
        assert answer.status == (200 if is_good else 400)
        # Whatever it says, it opens nothing.
        assert (await exchange(url, request("GET", "/version", {"Host": host}))).status in (
            400,
            401,
        )


async def test_a_host_is_needed_once() -> None:
    async with answering() as url:
        none = b"GET /health HTTP/1.1\r\nConnection: close\r\n\r\n"
        assert (await exchange(url, none)).status == 400
        twice = request("GET", "/health", {"host": "y"})
        assert (await exchange(url, twice)).status == 400


@pytest.mark.parametrize(
    ("given", "is_kept"),
    [("abc-1", True), ("x" * 256, True), ("x" * 257, False), ("a\tb", False), ("\xe9", False)],
)
async def test_request_ids(given: str, is_kept: bool) -> None:
    async with answering() as url:
        answer = await exchange(url, request("GET", "/version", {"X-Request-Id": given}))
        assert (answer.headers["x-request-id"] == given) is is_kept
        assert answer.headers["x-request-id"].isalnum() or is_kept


async def test_no_other_origin_is_let_in() -> None:
    async with answering() as url:
        headers = {"Origin": "http://evil", "Access-Control-Request-Method": "POST"}
        answer = await exchange(url, request("OPTIONS", "/v1/completions", headers))
        assert answer.status == 405
        assert not [name for name in answer.headers if name.startswith("access-control")]
        # What a page can send without asking first is no JSON.
        form = {"Origin": "http://evil", "Content-Type": "text/plain"}
        answer = await exchange(url, request("POST", "/tokenize", form, b'{"prompt": "a"}'))
        assert answer.status == 415


async def test_logs_tell_nothing_of_what_was_written(caplog: pytest.LogCaptureFixture) -> None:
    secret = "rosebud"
    asked = f'{{"prompt": "{secret}", "max_tokens": 2, "stop": 1, "{secret}": 2}}'.encode()
    headers = {
        "Content-Type": "application/json",
        "Authorization": f"Bearer {secret}",
        "Cookie": secret,
        "User-Agent": secret,
    }
    with caplog.at_level(logging.DEBUG):
        async with answering(keys=[secret]) as url:
            good = asked.replace(b'"stop": 1, ', b"")
            for path, body, status in [
                ("/v1/completions", good, 200),
                ("/v1/completions", asked, 400),
                ("/tokenize", b"{" + secret.encode(), 400),
                (f"/version?{secret}", b"", 405),
                (f"/{secret}", b"", 404),
                (f"/v1/models/{secret}", b"", 405),
            ]:
                answer = await exchange(url, request("POST", path, headers, body))
                assert answer.status == status, path
            answer = await exchange(url, request("GET", f"/v1/models/{secret}", headers))
            assert answer.status == 404
    lines = [r.getMessage() for r in caplog.records if r.name == "flowkv_jax.http.app"]
    assert len(lines) == 7
    assert lines[0].startswith("POST /v1/completions request_id='")
    assert lines[0].endswith("prompt_tokens=8 completion_tokens=2")
    told = [r.getMessage() for r in caplog.records if r.name.startswith(("flowkv_jax", "uvicorn"))]
    ignored = f"the field {secret!r} of a request is not known, and ignored"
    assert [line for line in told if secret in line] == [ignored]


def test_two_routes_for_one_path_are_a_mistake() -> None:
    async def handler(*_: Any) -> None:
        return None

    with pytest.raises(ValueError, match="two routes"):
        Router([Route("GET", "/x", handler), Route("GET", "/x", handler)])


# TLS


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path, "ours")


async def status_of(url: str, context: ssl.SSLContext) -> int | None:
    """None where no connection came about."""
    try:
        async with httpx.AsyncClient(base_url=url, verify=context) as client:
            return (await client.get("/health")).status_code
    except httpx.TransportError:
        return None


async def test_tls(authority: Authority) -> None:
    certificate, key = authority.issue("server")
    trusting = ssl.create_default_context(cafile=authority.ca_file)
    async with answering(ssl_certfile=certificate, ssl_keyfile=key) as url:
        assert url.startswith("https://")
        assert await status_of(url, trusting) == 200
        assert await status_of(url, ssl.create_default_context()) is None
        plain = url.replace("https", "http")
        assert await status_of(plain, trusting) is None
        old = ssl.create_default_context(cafile=authority.ca_file)
        with pytest.warns(DeprecationWarning):
            old.maximum_version = ssl.TLSVersion.TLSv1_1
        assert await status_of(url, old) is None


async def test_mutual_tls(authority: Authority, tmp_path: Path) -> None:
    certificate, key = authority.issue("server")
    settings = {"ssl_certfile": certificate, "ssl_keyfile": key, "ssl_ca_certs": authority.ca_file}
    known = ssl.create_default_context(cafile=authority.ca_file)
    known.load_cert_chain(*authority.issue("client"))
    stranger = ssl.create_default_context(cafile=authority.ca_file)
    stranger.load_cert_chain(*Authority(tmp_path, "theirs").issue("stranger"))
    async with answering(**settings) as url:
        assert await status_of(url, known) == 200
        assert await status_of(url, stranger) is None
        assert await status_of(url, ssl.create_default_context(cafile=authority.ca_file)) is None


# What may be bound


def test_ports_that_are_the_same() -> None:
    config = ServerConfig(port=7001, grpc_port=7001)
    with pytest.raises(ConfigError, match="same") as caught:
        check_addresses_free(listen_settings(config, {}))
    assert caught.value.parameter == "grpc_port"
    check_addresses_free(listen_settings(ServerConfig(port=0, grpc_port=0, admin_port=0), {}))


@pytest.mark.parametrize("parameter", ["port", "admin_port"])
async def test_a_port_in_use_is_named(parameter: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        settings = {"port": 0, "grpc_port": 0, parameter: taken.getsockname()[1]}
        config = ServerConfig(**settings)
        with pytest.raises(ConfigError, match=f"another {parameter} ") as caught:
            check_addresses_free(listen_settings(config, {}))
        assert caught.value.parameter == parameter
        with pytest.raises(ConfigError) as caught:
            async with serving(FakeEngine(), **settings):
                raise AssertionError("it was bound twice")
        assert caught.value.parameter == parameter


def test_an_open_admin_port_needs_to_know_who_calls(tmp_path: Path) -> None:
    config = ServerConfig(admin_host="0.0.0.0", allow_insecure_bind=True, admin_port=0)
    with pytest.raises(ConfigError, match="admin_host") as caught:
        listen_settings(config, {})
    assert caught.value.parameter == "admin_host"
    assert listen_settings(config, {"FLOWKV_API_KEY": KEY}).admin_address == "0.0.0.0:0"
    opened = ServerConfig(host="0.0.0.0", allow_insecure_bind=True, admin_port=0)
    assert listen_settings(opened, {}).admin_address == "127.0.0.1:0", "unless it is asked for"
    with pytest.raises(ConfigError, match="admin_host"):
        listen_settings(ServerConfig(admin_host=f"unix:{tmp_path}/s", admin_port=0), {})


def test_a_unix_socket_is_grpcs_alone(tmp_path: Path) -> None:
    assert listen_settings(ServerConfig(host=f"unix:{tmp_path}/s"), {}).http_address is None


@pytest.mark.parametrize(
    "setting",
    [
        {"port": 65536},
        {"port": -1},
        {"admin_port": 65536},
        {"max_body_bytes": 0},
        {"max_header_bytes": 1},
        {"max_header_count": 0},
        {"header_timeout_s": 0.0},
        {"body_timeout_s": float("nan")},
        {"keep_alive_timeout_s": -1.0},
        {"sse_keep_alive_s": 0.0},
    ],
)
def test_settings_out_of_range(setting: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as caught:
        listen_settings(ServerConfig(**setting), {})
    assert caught.value.parameter == next(iter(setting))
