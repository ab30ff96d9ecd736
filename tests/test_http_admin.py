"""The admin port: what it steers, and what it writes into the log."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from flowkv_jax.controller.role import Role
from flowkv_jax.errors import RetryableRequestError
from flowkv_jax.serving import Server, ServerState
from tests.fake_engine import FakeEngine, serving
from tests.recorded_cluster import DECODE, SNAPSHOT, RecordedView


@contextlib.asynccontextmanager
async def administered(
    engine: FakeEngine, **settings: Any
) -> AsyncIterator[tuple[Server, httpx.AsyncClient]]:
    async with serving(engine, port=0, admin_port=0, **settings) as server:
        assert server.admin_address is not None
        async with httpx.AsyncClient(base_url=server.admin_address) as client:
            yield server, client


async def asked(engine: FakeEngine, path: str, body: Any = None, **more: Any) -> httpx.Response:
    async with administered(engine) as (_, client):
        return await client.post(path, json=body, **more)


def clustered() -> tuple[FakeEngine, RecordedView]:
    engine, view = FakeEngine(), RecordedView()
    engine.cluster = view
    return engine, view


async def test_it_is_off_unless_asked_for() -> None:
    async with serving(FakeEngine(), port=0) as server:
        assert server.admin_address is None
        assert "admin" not in server.description
        async with httpx.AsyncClient(base_url=server.http_address or "") as client:
            for path in ("/drain", "/pd_role_switch", "/flush_cache"):
                assert (await client.post(path)).status_code == 404


async def test_the_admin_port_answers_nothing_else() -> None:
    async with administered(FakeEngine()) as (server, client):
        assert server.description.endswith(f"; admin on {server.admin_address}")
        for path in ("/v1/completions", "/metrics", "/health"):
            assert (await client.get(path)).status_code == 404
        paths = (await client.get("/openapi.json")).json()["paths"]
        assert "/pd_role_switch" in paths and "/v1/completions" not in paths


# Roles and drains


async def test_a_role_is_switched() -> None:
    engine, view = clustered()
    answer = await asked(engine, "/pd_role_switch", {"node": "prefill-0", "new_role": "decode"})
    assert answer.json() == {
        "success": True,
        "node": "prefill-0",
        "old_role": "prefill",
        "new_role": "decode",
    }
    assert view.orders == [("prefill-0", Role.DECODE)]


async def test_the_only_node_needs_no_name() -> None:
    engine, view = clustered()
    body = {"new_role": "hybrid"}
    answer = await asked(engine, "/pd_role_switch", body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "node"
    assert "prefill-0" in answer.json()["error"]["message"]
    view.snapshot_now = type(SNAPSHOT)(
        **{**{n: getattr(SNAPSHOT, n) for n in SNAPSHOT.__slots__}, "nodes": (DECODE,)}
    )
    assert (await asked(engine, "/pd_role_switch", body)).json()["node"] == "decode-0"


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/pd_role_switch", {"node": "nobody", "new_role": "decode"}, 404),
        ("/pd_role_switch", {"node": "prefill-0", "new_role": "PREFILL"}, 400),
        ("/pd_role_switch", {"node": "prefill-0"}, 400),
        ("/pd_role_switch", {"node": "a b", "new_role": "decode"}, 400),
        ("/pd_role_switch", {"node": "prefill-0", "new_role": "decode", "x": 1}, 400),
        ("/drain", {"node": "nobody"}, 404),
        ("/drain", {"nodes": "prefill-0"}, 400),
        ("/drain", [], 400),
        ("/drain", {}, 400),
        ("/drain", {"drain_all": False}, 400),
        ("/drain", {"node": "decode-0", "drain_all": True}, 400),
        ("/abort_request", {}, 400),
        ("/abort_request", {"abort_all": False}, 400),
        ("/abort_request", {"request_id": "x", "abort_all": True}, 400),
        ("/abort_request", {"request_id": ""}, 400),
        ("/abort_request", {"request_id": "nobody"}, 404),
        ("/start_profile", {"duration_s": 0}, 400),
        ("/start_profile", {"duration_s": 1e9}, 400),
        ("/start_profile", {"output_dir": "/etc"}, 400),
        ("/stop_profile", {}, 422),
        ("/flush_cache", {"x": 1}, 400),
    ],
)
async def test_what_cannot_be_done(path: str, body: Any, status: int) -> None:
    engine, view = clustered()
    answer = await asked(engine, path, body)
    assert answer.status_code == status
    assert answer.json()["error"]["message"]
    assert view.orders == [] and engine.profiles == []


async def test_without_nodes_there_are_no_roles() -> None:
    answer = await asked(FakeEngine(), "/pd_role_switch", {"new_role": "decode"})
    assert answer.status_code == 422


async def test_a_node_is_drained() -> None:
    engine, view = clustered()
    answer = await asked(engine, "/drain", {"node": "decode-0"})
    assert answer.json() == {"success": True, "node": "decode-0"}
    assert view.orders == [("decode-0", "drain")]


async def test_the_server_is_drained() -> None:
    async with administered(FakeEngine()) as (server, client):
        answer = await client.post("/drain", json={"drain_all": True})
        assert answer.json() == {"success": True, "node": None}
        await asyncio.wait_for(server.wait(), 20)
        assert server.state is ServerState.STOPPED


# Caches, profiles, aborts


@pytest.mark.parametrize("path", ["/reset_prefix_cache", "/flush_cache"])
async def test_caches_are_forgotten(path: str) -> None:
    assert (await asked(FakeEngine(), path)).json() == {"success": True}
    assert (await asked(FakeEngine(), path, {})).json() == {"success": True}


async def test_profiles() -> None:
    engine = FakeEngine()
    async with administered(engine) as (_, client):
        assert (await client.post("/start_profile")).json() == {"success": True}
        assert (await client.post("/start_profile", json={"duration_s": 2})).status_code == 200
        assert engine.profiles == [60.0, 2.0]
        assert (await client.post("/stop_profile")).json() == {"success": True}
        assert engine.profiles == []


@pytest.mark.parametrize("name", ["x-request-id", "request_id", "answer", "all"])
async def test_a_request_is_aborted(name: str) -> None:
    engine = FakeEngine()
    pause = engine.pause_before(1)
    body = {"prompt": "a", "max_tokens": 5, "stream": True}
    headers = {"x-request-id": "mine"}
    if name == "request_id":
        body["request_id"] = "named"
    async with administered(engine) as (server, admin):
        client = httpx.AsyncClient(base_url=server.http_address or "")
        async with (
            client,
            client.stream("POST", "/v1/completions", json=body, headers=headers) as answer,
        ):
            lines = answer.aiter_lines()
            first = await anext(lines)
            await pause.reached.wait()
            answer_id = first.partition('"id":"')[2].partition('"')[0]
            wanted = {"x-request-id": "mine", "request_id": "named", "answer": answer_id}
            order = {"abort_all": True} if name == "all" else {"request_id": wanted[name]}
            told = await admin.post("/abort_request", json=order)
            assert told.json() == {"num_aborted": 1}
            rest = [line async for line in lines]
        await engine.wait_until_idle()
    assert rest[-2:] == ["data: [DONE]", ""]
    assert any("request_cancelled" in line for line in rest)


# Who calls


async def test_no_page_of_a_browser_steers() -> None:
    engine, view = clustered()
    for origin in ("http://evil", "http://127.0.0.1:1", "null"):
        answer = await asked(engine, "/drain", {"node": "decode-0"}, headers={"origin": origin})
        assert answer.status_code == 403
    async with administered(engine) as (_, client):
        answer = await client.post("/drain", content=b'{"node": "decode-0"}')
        assert answer.status_code == 415
        headers = {"content-type": "text/plain"}
        answer = await client.post("/drain", content=b"{}", headers=headers)
        assert answer.status_code == 415
    assert view.orders == []


async def test_every_act_leaves_a_line(caplog: pytest.LogCaptureFixture) -> None:
    engine, _ = clustered()
    with caplog.at_level(logging.WARNING, "flowkv_jax.http.admin_routes"):
        async with administered(engine) as (_, client):
            headers = {"x-request-id": "who-1"}
            await client.post("/drain", json={"node": "decode-0"}, headers=headers)
            await client.post("/drain", json={"node": "nobody"})
    done, failed = (record.message for record in caplog.records)
    assert done == "admin /drain node=decode-0 request_id='who-1' client=127.0.0.1 done"
    assert "node=nobody" in failed and failed.endswith("failed: NotFoundError")


async def test_a_cluster_that_does_not_answer() -> None:
    engine = FakeEngine()

    def lost() -> bool:
        raise RetryableRequestError("node decode-0 is not connected")

    engine.reset_prefix_cache = lost  # type: ignore[method-assign]
    answer = await asked(engine, "/flush_cache")
    assert answer.status_code == 503 and answer.headers["retry-after"] == "1"
