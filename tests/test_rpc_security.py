"""Who may connect, and what may be bound. Certificates are made here."""

import asyncio
import datetime
import ipaddress
from pathlib import Path
from typing import Any

import grpc
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2_grpc

from flowkv_jax.config import ServerConfig
from flowkv_jax.errors import ClientError, ConfigError, RetryableRequestError, ValidationError
from flowkv_jax.rpc.auth import ApiKeys, load_api_keys
from flowkv_jax.rpc.client import Client
from flowkv_jax.rpc.flowkv.v1 import flowkv_pb2 as pb
from flowkv_jax.rpc.transport import listen_settings
from tests.fake_engine import FakeEngine, serving, stub_of

KEY = "correct-horse"


class Authority:
    """A certificate authority with what it signed, as PEM files in a folder."""

    def __init__(self, folder: Path, name: str) -> None:
        self._folder = folder
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        certificate = self._signed(self._name, self._key.public_key(), is_authority=True)
        self.ca_file = self._write(f"{name}-ca.pem", certificate)

    def issue(self, name: str) -> tuple[str, str]:
        """Certificate and key files of a host or client at loopback."""
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        certificate = self._signed(subject, key.public_key(), is_authority=False)
        pem = key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
        return self._write(f"{name}.pem", certificate), self._write(f"{name}-key.pem", pem)

    def _signed(self, subject: x509.Name, key: Any, *, is_authority: bool) -> bytes:
        now = datetime.datetime.now(datetime.UTC)
        names = [x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
        certificate = (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(days=1))
            .not_valid_after(now + datetime.timedelta(days=1))
            .add_extension(x509.BasicConstraints(ca=is_authority, path_length=None), critical=True)
            .add_extension(x509.SubjectAlternativeName(names), critical=False)
            .sign(self._key, hashes.SHA256())
        )
        return certificate.public_bytes(serialization.Encoding.PEM)

    def _write(self, name: str, pem: bytes) -> str:
        path = self._folder / name
        path.write_bytes(pem)
        return str(path)


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path, "ours")


def bearer(key: str) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {key}"),)


async def code_of(call: Any) -> grpc.StatusCode:
    try:
        await call
    except grpc.aio.AioRpcError as error:
        return error.code()
    return grpc.StatusCode.OK


METHODS = {
    "Generate": pb.GenerateRequest(text="x"),
    "Chat": pb.ChatRequest(),
    "Abort": pb.AbortRequest(request_ids=["x"]),
    "GetModelInfo": pb.GetModelInfoRequest(),
    "GetLoads": pb.GetLoadsRequest(),
    "Tokenize": pb.TokenizeRequest(),
    "Detokenize": pb.DetokenizeRequest(),
}


def test_the_list_of_methods_is_complete() -> None:
    assert set(METHODS) == set(pb.DESCRIPTOR.services_by_name["FlowKV"].methods_by_name)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    "metadata",
    [
        (),
        bearer("wrong"),
        bearer(""),
        bearer(KEY + "x"),
        bearer(KEY[:-1]),
        (("authorization", KEY),),
        (("authorization", f"Basic {KEY}"),),
        bearer(KEY) + bearer("wrong"),
        (("x-api-key", KEY),),
    ],
)
async def test_every_method_wants_the_token(method: str, metadata: Any) -> None:
    engine = FakeEngine()
    async with (
        serving(engine, {"FLOWKV_API_KEY": KEY}) as server,
        stub_of(server) as stub,
    ):
        call = getattr(stub, method)(METHODS[method], metadata=metadata)
        code = await code_of(call.read() if hasattr(call, "read") else call)
    assert code is grpc.StatusCode.UNAUTHENTICATED
    assert engine.received == []


async def test_reflection_and_unknown_methods_want_the_token_and_health_does_not() -> None:
    async with (
        serving(FakeEngine(), {"FLOWKV_API_KEY": KEY}) as server,
        grpc.aio.insecure_channel(server.address) as channel,
    ):
        reflection = reflection_pb2_grpc.ServerReflectionStub(channel)
        call = reflection.ServerReflectionInfo()
        reflected = await code_of(call.read())
        unknown = await code_of(channel.unary_unary("/flowkv.v1.FlowKV/Nothing")(b""))
        known = await code_of(
            channel.unary_unary("/flowkv.v1.FlowKV/Nothing")(b"", metadata=bearer(KEY))
        )
        health = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
    assert reflected is unknown is grpc.StatusCode.UNAUTHENTICATED
    assert known is grpc.StatusCode.UNIMPLEMENTED
    assert health.status == health_pb2.HealthCheckResponse.SERVING


async def test_client_with_and_without_the_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = tmp_path / "keys"
    keys.write_text(f"#comment\nother\n\n  {KEY}  \n")
    monkeypatch.delenv("FLOWKV_API_KEY", raising=False)
    async with serving(FakeEngine(), api_key_file=str(keys)) as server:

        def work() -> None:
            with Client(server.address) as client, pytest.raises(ClientError, match="token"):
                client.generate("a")
            commented_out = Client(server.address, api_key="#comment")
            with commented_out as client, pytest.raises(ClientError, match="token"):
                client.generate("a")
            for key in (KEY, "other"):
                with Client(server.address, api_key=key) as client:
                    assert len(client.generate("a")) == 1
            monkeypatch.setenv("FLOWKV_API_KEY", KEY)
            with Client(server.address) as client:
                assert client.model_info().served_model_name == "fake"

        await asyncio.to_thread(work)


def test_keys_are_not_kept_in_clear() -> None:
    keys = ApiKeys([KEY])
    assert KEY not in repr(vars(keys))
    assert keys.accepts(f"Bearer {KEY}")
    assert keys.accepts(f"bEaReR   {KEY}")
    assert not keys.accepts(None)
    assert not keys.accepts(f"Bearer {KEY}".encode())
    assert not ApiKeys([])
    assert not ApiKeys([]).accepts("Bearer ")


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (None, "cannot be read"),
        (b"", "holds no key"),
        (b"# only a comment\n", "holds no key"),
        (b"hunter2 hunter3\n", "without spaces"),
        ("naïve\n".encode(), "ASCII"),
        (b"\xff\xfe", "UTF-8"),
    ],
)
def test_bad_key_files(tmp_path: Path, content: bytes | None, complaint: str) -> None:
    path = tmp_path / "keys"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=complaint) as caught:
        load_api_keys(str(path), {})
    assert str(path) in str(caught.value)
    assert "hunter3" not in str(caught.value)


def test_a_client_key_that_cannot_travel() -> None:
    with pytest.raises(ValidationError, match="printable ASCII") as caught:
        Client(api_key="naïve secret")
    assert caught.value.parameter == "api_key"
    assert "secret" not in str(caught.value)


def test_an_empty_key_in_the_environment_is_refused() -> None:
    with pytest.raises(ConfigError, match="FLOWKV_API_KEY"):
        load_api_keys(None, {"FLOWKV_API_KEY": " "})


async def test_tls(authority: Authority) -> None:
    cert_file, key_file = authority.issue("server")
    settings = {"ssl_certfile": cert_file, "ssl_keyfile": key_file}
    async with serving(FakeEngine(), **settings) as server:

        def work() -> None:
            with Client(server.address, tls_ca_file=authority.ca_file) as client:
                assert len(client.generate("a")) == 1
            for options in ({}, {"tls": True}):
                untrusting = Client(server.address, **options)
                with untrusting as client, pytest.raises(RetryableRequestError):
                    client.generate("a")

        await asyncio.to_thread(work)


async def test_mutual_tls(authority: Authority, tmp_path: Path) -> None:
    cert_file, key_file = authority.issue("server")
    ours = authority.issue("client")
    theirs = Authority(tmp_path, "theirs").issue("stranger")
    settings = {
        "ssl_certfile": cert_file,
        "ssl_keyfile": key_file,
        "ssl_ca_certs": authority.ca_file,
    }
    async with serving(FakeEngine(), **settings) as server:

        def connect(pair: tuple[str, str] | None) -> Client:
            cert, key = pair or (None, None)
            return Client(
                server.address,
                tls_ca_file=authority.ca_file,
                tls_cert_file=cert,
                tls_key_file=key,
            )

        def work() -> None:
            with connect(ours) as client:
                assert client.health()
            for refused in (None, theirs):
                with connect(refused) as client, pytest.raises(RetryableRequestError):
                    client.health()

        await asyncio.to_thread(work)


def test_tls_files_are_named_in_errors(authority: Authority, tmp_path: Path) -> None:
    cert_file, key_file = authority.issue("server")
    _, other_key = authority.issue("other")
    garbage = tmp_path / "garbage.pem"
    garbage.write_text("no PEM at all")
    missing = str(tmp_path / "missing.pem")
    good = {"ssl_certfile": cert_file, "ssl_keyfile": key_file, "ssl_ca_certs": authority.ca_file}
    listen_settings(ServerConfig(**good), {})
    bad_files = [
        ("ssl_certfile", missing),
        ("ssl_keyfile", missing),
        ("ssl_ca_certs", missing),
        ("ssl_certfile", str(garbage)),
        ("ssl_keyfile", str(garbage)),
        ("ssl_ca_certs", str(garbage)),
        ("ssl_keyfile", other_key),
        ("ssl_certfile", str(tmp_path)),
    ]
    for name, path in bad_files:
        with pytest.raises(ConfigError) as caught:
            listen_settings(ServerConfig(**{**good, name: path}), {})
        assert path in str(caught.value)
        assert caught.value.parameter == name
    for name in ("ssl_certfile", "ssl_keyfile"):
        with pytest.raises(ConfigError) as caught:
            listen_settings(ServerConfig(**{**good, name: None}), {})
        assert caught.value.parameter == name
    with pytest.raises(ConfigError):
        listen_settings(ServerConfig(ssl_ca_certs=authority.ca_file), {})
    with pytest.raises(ValidationError, match="tls_key_file"):
        Client(tls_cert_file=cert_file)
    with pytest.raises(ValidationError, match=str(garbage)):
        Client(tls_ca_file=str(garbage))


OPEN_HOSTS = ["0.0.0.0", "::", "192.0.2.7"]


@pytest.mark.parametrize("host", OPEN_HOSTS)
def test_an_open_bind_needs_tls_or_token_or_a_word(host: str, authority: Authority) -> None:
    cert_file, key_file = authority.issue("server")
    with pytest.raises(ConfigError, match="allow_insecure_bind") as caught:
        listen_settings(ServerConfig(host=host), {})
    assert caught.value.parameter == "host"
    for settings, environ in (
        ({"allow_insecure_bind": True}, {}),
        ({"ssl_certfile": cert_file, "ssl_keyfile": key_file}, {}),
        ({}, {"FLOWKV_API_KEY": KEY}),
    ):
        made = listen_settings(ServerConfig(host=host, **settings), environ)
        assert not made.enable_reflection


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.2", "::1", "localhost", "unix:/run/f.sock"])
def test_a_local_bind_needs_nothing(host: str) -> None:
    assert listen_settings(ServerConfig(host=host), {}).enable_reflection


@pytest.mark.parametrize("host", ["", "no.such.host.invalid", "1.2.3.4.5"])
def test_hosts_that_are_none(host: str) -> None:
    with pytest.raises(ConfigError) as caught:
        listen_settings(ServerConfig(host=host, allow_insecure_bind=True), {})
    assert caught.value.parameter == "host"


@pytest.mark.parametrize(
    "setting",
    [
        {"grpc_port": -1},
        {"grpc_port": 65536},
        {"max_message_bytes": -1},
        {"drain_timeout_s": -1.0},
        {"drain_timeout_s": float("nan")},
        {"stream_interval_ms": -1.0},
    ],
)
def test_settings_out_of_range(setting: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as caught:
        listen_settings(ServerConfig(**setting), {})
    assert caught.value.parameter in setting
