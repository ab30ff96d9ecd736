"""Connections between engines: who may connect, what must fit, what strangers get."""

from __future__ import annotations

import socket
import time

import pytest

from pallas_kernels.kv_layout import KVLayout
from tests.transfer_peer import LAYOUT, filled_pool, request
from transfer import listener
from transfer.config import TransferConfig
from transfer.engine import TransferEngine
from transfer.errors import (
    AuthenticationFailed,
    HandshakeMismatch,
    PeerLost,
    RequestError,
    TransferError,
)
from transfer.pool_access import NumpyPool


class TestListening:
    @pytest.mark.parametrize("host", ["0.0.0.0", "10.0.0.1", "example.org", "::"])
    def test_other_addresses_than_loopback_need_a_secret(self, host: str) -> None:
        with TransferEngine() as engine, pytest.raises(RequestError, match="without a secret"):
            engine.listen(host)

    def test_with_a_secret(self) -> None:
        with TransferEngine(secret="s") as engine:
            host, port = engine.listen("0.0.0.0")
            assert host == "0.0.0.0" and port > 0
            with pytest.raises(RequestError, match="listens on .* already"):
                engine.listen()

    def test_strangers_do_not_disturb_peers(self) -> None:
        config = TransferConfig(handshake_timeout_s=0.3)
        with TransferEngine(config) as here, TransferEngine() as there:
            address = here.listen()
            silent = [socket.create_connection(address) for _ in range(listener.MAX_OPENING)]
            noisy = socket.create_connection(address)
            noisy.sendall(b"GET / HTTP/1.1\r\n\r\n" * 10)
            deadline = time.monotonic() + 10
            while True:
                try:
                    there.connect(address)
                    break
                except TransferError:
                    assert time.monotonic() < deadline
            assert len(here.peers) == 1
            assert any(event.what == "refused" for event in here.events.snapshot())
            for sock in (*silent, noisy):
                sock.close()


class TestHandshake:
    def test_a_wrong_secret(self) -> None:
        with TransferEngine(secret="one") as here, TransferEngine(secret="two") as there:
            with pytest.raises(AuthenticationFailed):
                there.connect(here.listen())
            assert here.peers == there.peers == {}

    @pytest.mark.parametrize(
        ("change", "text"),
        [
            ({"block_size": 8}, "block_size 4 there, 8 here"),
            ({"dtype": "int32"}, "dtype float32 there, int32 here"),
            ({"num_layers": 3, "head_dim": 4}, "num_layers 2 there, 3 here, head_dim 8 there, 4"),
        ],
    )
    def test_pools_of_which_no_two_fit(self, change: dict[str, object], text: str) -> None:
        fields = {name: getattr(LAYOUT, name) for name in LAYOUT.__dataclass_fields__}
        other = KVLayout(**(fields | change))  # type: ignore[arg-type]
        with TransferEngine() as here, TransferEngine() as there:
            here.register_pool("b", NumpyPool(LAYOUT, 4))
            there.register_pool("a", NumpyPool(other, 4))
            with pytest.raises(HandshakeMismatch, match=text):
                there.connect(here.listen())
            assert here.peers == there.peers == {}
            # One that fits is enough.
            there.register_pool("c", NumpyPool(LAYOUT, 4))
            assert there.connect(here.listen_address) == ["b"]

    def test_nodes_registered_later_are_announced(self) -> None:
        with TransferEngine() as here, TransferEngine() as there:
            assert there.connect(here.listen()) == []
            there.register_pool("a", filled_pool(8, 1))
            here.register_pool("b", filled_pool(8, 2))
            deadline = time.monotonic() + 10
            while there.peers[here.engine_id] != ["b"] or here.peers[there.engine_id] != ["a"]:
                assert time.monotonic() < deadline
            there.submit(request([(0, 0, 8)])).wait(10)

    def test_nobody_listens(self) -> None:
        with TransferEngine() as engine, TransferEngine() as gone:
            address = gone.listen()
            gone.close()
            with pytest.raises(PeerLost, match="cannot connect to 127.0.0.1"):
                engine.connect(address)

    def test_a_peer_that_leaves_is_forgotten(self) -> None:
        with TransferEngine() as here:
            with TransferEngine() as there:
                there.register_pool("a", filled_pool(8, 1))
                there.connect(here.listen())
            deadline = time.monotonic() + 10
            while here.peers:
                assert time.monotonic() < deadline


class TestConfig:
    @pytest.mark.parametrize(
        ("settings", "text"),
        [
            ({"workers": 0}, "workers=0 must be above 0"),
            ({"chunk_bytes": -1}, "chunk_bytes=-1 must be above 0"),
            ({"inline_bytes": 9 << 20}, "at most half of max_frame_bytes"),
            ({"heartbeat_s": 10.0}, "must be below peer_timeout_s"),
        ],
    )
    def test_values_that_cannot_work(self, settings: dict[str, float], text: str) -> None:
        with pytest.raises(ValueError, match=text):
            TransferConfig(**settings)  # type: ignore[arg-type]
