"""The live page and what it asks for; how it looks is for tests/browser."""

from __future__ import annotations

import asyncio
import base64
import dataclasses
import hashlib
import io
import json
import re
import shutil
import subprocess
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import Any

import httpx
import pytest

from flowkv_jax import cli
from flowkv_jax.commands import Context
from flowkv_jax.errors import ConfigError
from flowkv_jax.http.live.page import SCRIPTS, live_page
from flowkv_jax.trace.history import Marks
from flowkv_jax.trace.recorder import Recorder
from tests.fake_engine import FakeEngine, serving
from tests.recorded_cluster import MOVED, SNAPSHOT, RecordedView
from tests.test_trace import check_rules

KEY = {"FLOWKV_API_KEY": "sesame"}
BEARER = {"Authorization": "Bearer sesame"}


@asynccontextmanager
async def cluster_server(
    view: RecordedView | None, environ: dict[str, str] | None = None
) -> AsyncIterator[str]:
    """URL of a server whose recorder has looked at `view`."""
    engine = FakeEngine()
    engine.cluster = view
    async with serving(engine, environ, port=0) as server:
        assert server.http_address is not None
        if view is not None:
            headers = BEARER if environ else {}
            async with httpx.AsyncClient(base_url=server.http_address, headers=headers) as client:
                while (await client.get("/live/state")).json()["cluster"] is None:
                    await asyncio.sleep(0.01)
        yield server.http_address


async def get(url: str, path: str, **options: Any) -> httpx.Response:
    async with httpx.AsyncClient(base_url=url) as client:
        return await client.get(path, **options)


class TestDocument:
    def test_the_policy_allows_what_is_inside_and_nothing_else(self) -> None:
        page = live_page()
        html = page.html.decode()
        (script,) = re.findall(r"<script>(.*?)</script>", html, re.DOTALL)
        (style,) = re.findall(r"<style>(.*?)</style>", html, re.DOTALL)
        directives = dict(one.split(" ", 1) for one in page.policy.split("; "))
        for text, directive in ((script, "script-src"), (style, "style-src")):
            digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
            assert directives.pop(directive) == f"'sha256-{digest}'"
        assert directives == {
            "default-src": "'none'", "connect-src": "'self'", "img-src": "data:",
            "base-uri": "'none'", "form-action": "'none'", "frame-ancestors": "'none'",
        }  # fmt: skip

    def test_it_needs_nothing_from_elsewhere(self) -> None:
        html = live_page().html.decode()
        addresses = set(re.findall(r"(?:https?:)?//[\w.-]+\.\w+[^\s'\"]*", html))
        assert addresses == {"http://www.w3.org/2000/svg"}  # a name, not fetched
        assert not re.search(r"@import|url\(|src=", html)

    def test_nothing_can_become_markup_or_code(self) -> None:
        html = live_page().html.decode()
        forbidden = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|new Function"
        assert not re.search(forbidden, html)
        # The policy would ignore them.
        assert not re.search(r"\sstyle=|\son\w+=\"", html)

    def test_scripts_ask_for_elements_that_exist(self) -> None:
        html = live_page().html.decode()
        there = re.findall(r'\bid="([\w-]+)"', html)
        assert len(there) == len(set(there))
        asked = set(re.findall(r'byId\("([\w-]+)"\)', html))
        assert asked and asked <= set(there)

    def test_every_asset_is_in_it(self) -> None:
        assets = resources.files("flowkv_jax.http.live").joinpath("assets")
        names = {one.name for one in assets.iterdir()}
        assert names == {*SCRIPTS, "page.html", "style.css"}

    def test_its_script_parses(self, tmp_path: Path) -> None:
        (script,) = re.findall(r"<script>(.*?)</script>", live_page().html.decode(), re.DOTALL)
        assert script.count("{") == script.count("}") and script.count("(") == script.count(")")
        if node := shutil.which("node"):
            file = tmp_path / "page.js"
            file.write_text(script)
            subprocess.run([node, "--check", str(file)], check=True, timeout=60)


class TestRoutes:
    async def test_the_page_is_open_and_the_data_is_not(self) -> None:
        async with cluster_server(RecordedView(), KEY) as url:
            page = await get(url, "/")
            assert page.status_code == 200
            assert page.headers["content-type"] == "text/html; charset=utf-8"
            assert page.headers["content-security-policy"] == live_page().policy
            assert page.headers["x-content-type-options"] == "nosniff"
            assert page.content == live_page().html
            assert b"prefill-0" not in page.content
            for path in ("/live/state", "/trace"):
                assert (await get(url, path)).status_code == 401
                assert (await get(url, path, headers=BEARER)).status_code == 200

    async def test_state_tells_all_and_then_what_is_new(self) -> None:
        view = RecordedView()
        view.all_records[-1] = replace(MOVED, number=8)
        async with cluster_server(view) as url:
            answer = await get(url, "/live/state")
            assert answer.headers["cache-control"] == "no-store"
            state = answer.json()
            assert state["cluster"] == json.loads(json.dumps(SNAPSHOT.to_dict()))
            assert state["model"] == "fake"
            assert [one["number"] for one in state["records"]] == [4, 5, 6, 7, 8]
            assert state["records"][-1]["lost_places"][0]["node"] == "decode-1"
            assert [one["number"] for one in state["decisions"]] == [3, 4, 5, 6, 7]
            sample = dict(zip(state["fields"]["sample"], state["samples"][0], strict=True))
            assert (sample["regime"], sample["prefill_load"]) == ("imbalanced", 0.77)
            node = dict(zip(state["fields"]["node"], sample["nodes"][1], strict=True))
            assert (node["name"], node["role"], node["kv_cache_usage"]) == (
                "prefill-0", "prefill", 0.72,
            )  # fmt: skip
            marks = state["marks"] | {"instance": state["instance"]}
            news = (await get(url, "/live/state", params=marks)).json()
            assert news["records"] == news["decisions"] == []
            assert len(news["samples"]) <= 1 and news["cluster"] is not None
            stranger = (await get(url, "/live/state", params=marks | {"instance": "x"})).json()
            assert len(stranger["records"]) == 5

    async def test_numbers_that_are_none_are_refused(self) -> None:
        async with cluster_server(RecordedView()) as url:
            for query in ("sample=-1", "record=x", "decision=" + "9" * 30, "sample="):
                answer = await get(url, f"/live/state?{query}")
                assert answer.status_code == 400, query
                assert query.partition("=")[0] in answer.json()["error"]["message"]

    async def test_without_a_cluster_there_is_nothing_to_look_at(self) -> None:
        async with cluster_server(None) as url:
            assert (await get(url, "/")).status_code == 200
            for path in ("/live/state", "/trace"):
                answer = await get(url, path)
                assert answer.status_code == 422
                assert "no cluster" in answer.json()["error"]["message"]


class TestTrace:
    async def test_it_is_a_timeline_of_the_latest(self) -> None:
        async with cluster_server(RecordedView()) as url:
            answer = await get(url, "/trace")
            assert "flowkv-trace.json" in answer.headers["content-disposition"]
            check_rules(answer.json())
            assert answer.json()["otherData"]["num_requests"] == 5
            few = (await get(url, "/trace?format=chrome&limit=2")).json()
            names = {e["args"].get("request_id") for e in few["traceEvents"] if e["ph"] == "X"}
            assert names == {"req-7", "req-8"}
            for query in ("format=other", "limit=x"):
                assert (await get(url, f"/trace?{query}")).status_code == 400

    async def test_one_that_has_just_ended_is_in_it(self) -> None:
        view = RecordedView()
        async with cluster_server(view) as url:
            await get(url, "/trace")
            view.all_records.append(dataclasses.replace(view.all_records[-1], number=9))
            assert (await get(url, "/trace")).json()["otherData"]["num_requests"] == 6

    async def test_the_command_saves_it(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        file = tmp_path / "out.json"
        context = Context(stdout=io.StringIO(), stderr=io.StringIO())
        monkeypatch.setenv("FLOWKV_API_KEY", "sesame")
        async with cluster_server(RecordedView(), KEY) as url:
            argv = ["trace", "--server", url, "-o", str(file), "--limit", "3"]
            assert await asyncio.to_thread(cli.main, argv, context) == 0
            assert "3 sequences" in context.stdout.getvalue()  # type: ignore[attr-defined]
            assert "ui.perfetto.dev" in context.stdout.getvalue()  # type: ignore[attr-defined]
            check_rules(json.loads(file.read_bytes()))
            argv = ["trace", "--server", url, "-o", "-"]
            context = Context(stdout=io.StringIO(), stderr=io.StringIO())
            assert await asyncio.to_thread(cli.main, argv, context) == 0
            check_rules(json.loads(context.stdout.getvalue()))  # type: ignore[attr-defined]
            monkeypatch.setenv("FLOWKV_API_KEY", "wrong")
            assert await asyncio.to_thread(cli.main, argv, context) == 2
            assert "FLOWKV_API_KEY" in context.stderr.getvalue()  # type: ignore[attr-defined]

    @pytest.mark.parametrize(
        ("argv", "message"),
        [
            (["--server", "127.0.0.1:8000"], "must be a URL"),
            (["--server", "http://127.0.0.1:9"], "no server answers"),
            (["--limit", "0"], "limit=0"),
        ],
    )
    def test_the_command_says_what_is_wrong(self, argv: list[str], message: str) -> None:
        context = Context(stdout=io.StringIO(), stderr=io.StringIO())
        assert cli.main(["trace", *argv], context) in (1, 2)
        assert message in context.stderr.getvalue()  # type: ignore[attr-defined]


class TestRecorder:
    def test_it_goes_on_when_a_look_fails(self, caplog: pytest.LogCaptureFixture) -> None:
        view = RecordedView()
        looks = iter([ConfigError("away"), ConfigError("away"), None])

        def snapshot() -> Any:
            error = next(looks, None)
            if error is not None:
                raise error
            return SNAPSHOT

        view.snapshot = snapshot  # type: ignore[method-assign]
        recorder = Recorder(view, interval_s=0.001)
        recorder.start()
        while recorder.history.since(Marks()).latest is None:
            time.sleep(0.001)
        recorder.close()
        recorder.close()
        assert [one.message for one in caplog.records] == ["the cluster could not be looked at"]
