"""The live page as people meet it: data, keys, keyboard, narrow screens, bad connections."""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from flowkv_jax.controller.role import Role
from flowkv_jax.controller.snapshot import ClusterSnapshot
from tests.browser.chromium import Chromium, find_chromium
from tests.fake_engine import FakeEngine, serving
from tests.recorded_cluster import (
    DECODE,
    HANDOFF,
    MOVED,
    NOW_S,
    PREFILL,
    RECORD,
    ROUTE,
    SNAPSHOT,
    SWITCH,
    RecordedView,
)

TAB, ENTER, LEFT = ("Tab", 9), ("Enter", 13), ("ArrowLeft", 37)
EVIL = "<img src=x onerror=document.title='gotcha'>"


class MovingView(RecordedView):
    """Whose clock goes on. With `is_alone` it is one node that does everything."""

    def __init__(self, *, is_alone: bool = False) -> None:
        super().__init__()
        self._began_s = time.monotonic()
        if is_alone:
            node = replace(PREFILL, name="hybrid-0", role=Role.HYBRID, home_role=Role.HYBRID)
            self.snapshot_now = replace(SNAPSHOT, nodes=(node,))
            self.all_records, self.all_decisions = [], []
            return
        decode = replace(DECODE, role=Role.DECODE)
        self.snapshot_now = replace(SNAPSHOT, nodes=(decode, PREFILL))
        self.all_records = [
            replace(RECORD, number=n, request_id=f"req-{n}", sequence_id=f"req-{n}",
                    handed_off_s=NOW_S - 80 + n, ended_s=NOW_S - 79 + n, decode_s=0.01 * n,
                    handoff=replace(HANDOFF, total_s=0.004 + 0.0002 * n))
            for n in range(1, 80)
        ]  # fmt: skip
        self.all_records.append(
            replace(
                MOVED,
                number=80,
                request_id=EVIL,
                sequence_id=EVIL,
                handed_off_s=NOW_S,
                ended_s=NOW_S,
            )  # fmt: skip
        )
        self.all_decisions = [
            replace(ROUTE, number=1, time_s=NOW_S - 3),
            replace(SWITCH, number=2, time_s=NOW_S - 2),
        ]

    def snapshot(self) -> ClusterSnapshot:
        return replace(self.snapshot_now, now_s=NOW_S + time.monotonic() - self._began_s)


@contextmanager
def page_of(view: RecordedView, keys: dict[str, str] | None = None, port: int = 0) -> Iterator[str]:
    """URL of a server in a thread of its own."""
    engine = FakeEngine()
    engine.cluster = view
    started: queue.SimpleQueue[Any] = queue.SimpleQueue()

    async def serve() -> None:
        ended = asyncio.Event()
        async with serving(engine, keys, port=port) as server:
            loop = asyncio.get_running_loop()
            started.put((server.http_address, lambda: loop.call_soon_threadsafe(ended.set)))
            await ended.wait()

    thread = threading.Thread(target=asyncio.run, args=(serve(),))
    thread.start()
    url, end = started.get(timeout=30)
    try:
        yield url + "/"
    finally:
        end()
        thread.join(30)


@pytest.fixture(scope="session")
def binary() -> str:
    found = find_chromium()
    if found is None:
        pytest.exit(
            "no Chromium found: install one (Debian: apt-get install chromium), or set "
            "FLOWKV_CHROMIUM to its path",
            returncode=1,
        )
    return found


@pytest.fixture
def browser(binary: str, tmp_path: Any) -> Iterator[Chromium]:
    chromium = Chromium(binary, tmp_path / "profile")
    try:
        yield chromium
    finally:
        chromium.close()


def state_is(browser: Chromium, state: str) -> None:
    browser.wait_for(f"document.body && document.body.dataset.state === '{state}'")


def text_of(browser: Chromium, selector: str) -> str:
    return str(browser.evaluate(f"document.querySelector({selector!r}).innerText"))


_FOCUSED = """(() => {
    const element = document.activeElement;
    if (element === document.body) return "";
    return element.id || element.getAttribute("aria-label") || element.innerText.split("\\n")[0];
})()"""


def focused(browser: Chromium) -> str:
    """What has the focus, by id, label or text."""
    return str(browser.evaluate(_FOCUSED))


def next_place(browser: Chromium) -> str:
    browser.press(*TAB)
    return focused(browser)


def test_data_arrives_and_nothing_complains(browser: Chromium) -> None:
    browser.call(
        "Page.addScriptToEvaluateOnNewDocument",
        source="window.shift = 0; new PerformanceObserver(list => { for (const one of "
        "list.getEntries()) window.shift += one.value; }).observe("
        "{ type: 'layout-shift', buffered: true });",
    )
    with page_of(MovingView()) as url:
        browser.open(url)
        state_is(browser, "live")
        browser.wait_for("document.querySelectorAll('.node').length === 2")
        assert "prefill-0" in text_of(browser, "#node-list")
        assert "72 % held by requests" in text_of(browser, "#node-list")
        assert text_of(browser, "#fig-regime") == "imbalanced"
        assert "25 %" in text_of(browser, ".heat")  # of the configured link
        rows = browser.evaluate("[...document.querySelectorAll('.gantt tbody tr')]"
                                ".map(row => row.innerText)")  # fmt: skip
        assert "Direct" in rows[1] and "14.7 MB" in rows[1]
        assert "p50" in text_of(browser, "#latency")
        assert "failover" in text_of(browser, "#events")
        assert "decode-0" in text_of(browser, "#routes")
        paths = "document.querySelectorAll('#scores path.line').length"
        browser.wait_for(f"{paths} >= 4")
        time.sleep(2.5)  # two more rounds
        assert browser.evaluate("window.shift") < 0.1
        state_is(browser, "live")
    assert browser.complaints == []


def test_names_of_clients_are_text(browser: Chromium) -> None:
    with page_of(MovingView()) as url:
        browser.open(url)
        browser.wait_for("document.body.innerText.includes('onerror') || "
                         "document.querySelector('[title*=onerror]') !== null")  # fmt: skip
        assert browser.evaluate("document.querySelectorAll('img').length") == 0
        assert "FlowKV" in browser.evaluate("document.title")
    assert browser.complaints == []


def test_one_node_has_no_hand_offs(browser: Chromium) -> None:
    with page_of(MovingView(is_alone=True)) as url:
        browser.open(url)
        browser.wait_for("document.querySelectorAll('.node').length === 1")
        assert "one node" in text_of(browser, "#links")
        assert "one node" in text_of(browser, "#handoffs")
        assert text_of(browser, "#fig-regime") == "one node"
    assert browser.complaints == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [320, 360, 768, 1440])
def test_it_fits(browser: Chromium, width: int, scheme: str) -> None:
    browser.prefer(scheme)
    browser.resize(width, 800)
    with page_of(MovingView()) as url:
        browser.open(url)
        browser.wait_for("document.querySelectorAll('.node').length === 2")
        assert browser.evaluate("document.documentElement.scrollWidth") <= width
        assert _contrast(browser, "#status-text") >= 4.5
        assert _contrast(browser, ".note") >= 4.5
        assert _contrast(browser, ".badge") >= 4.5


_COLOURS = """(() => {
    let element = document.querySelector("%s");
    const text = getComputedStyle(element).color;
    let back = "rgba(0, 0, 0, 0)";
    for (; element && back === "rgba(0, 0, 0, 0)"; element = element.parentElement)
        back = getComputedStyle(element).backgroundColor;
    return [text, back];
})()"""


def _contrast(browser: Chromium, selector: str) -> float:
    """WCAG's ratio of an element's text to what is behind it."""
    colours = browser.evaluate(_COLOURS % selector)
    lights = []
    for colour in colours:
        levels = [int(part) / 255 for part in colour.strip("rgba()").split(",")[:3]]
        linear = [x / 12.92 if x <= 0.04045 else ((x + 0.055) / 1.055) ** 2.4 for x in levels]
        lights.append(0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2] + 0.05)
    return max(lights) / min(lights)


def test_keyboard_reaches_and_works_everything(browser: Chromium) -> None:
    with page_of(MovingView()) as url:
        browser.open(url)
        browser.wait_for("document.querySelectorAll('.log details').length >= 3")
        reached = []
        for place in iter(partial(next_place, browser), ""):  # until the page has been left
            reached.append(place)
            outline = "getComputedStyle(document.activeElement).outlineStyle"
            assert browser.evaluate(outline) != "none", f"{reached[-1]} does not show its focus"
            if reached[-1] == "2 min":
                browser.press(*ENTER, text="\r")
                pressed = "document.activeElement.getAttribute('aria-pressed')"
                assert browser.evaluate(pressed) == "true"
            if reached[-1].startswith("Time:"):
                before = text_of(browser, ".readout")
                for _ in range(3):
                    browser.press(*LEFT)
                assert browser.evaluate("document.querySelectorAll('.cursor').length") == 3
                assert before
        wanted = ["Skip to the nodes", "pause", "2 min", "Latest hand-offs", "events", "routes"]
        assert [one for one in reached if one in wanted] == wanted
        opened = "document.querySelectorAll('#routes details[open] td').length"
        browser.evaluate("document.querySelector('#routes summary').focus()")
        browser.press(*ENTER, text="\r")
        assert browser.wait_for(f"{opened} > 3")
        assert "queue" in text_of(browser, "#routes details[open]")
        browser.evaluate("document.getElementById('pause').focus()")
        browser.press(*ENTER, text="\r")
        state_is(browser, "paused")
        browser.press(*ENTER, text="\r")
        state_is(browser, "live")
    assert browser.complaints == []


def test_the_key_is_asked_for_and_kept_in_the_tab(browser: Chromium) -> None:
    with page_of(MovingView(), {"FLOWKV_API_KEY": "sesame"}) as url:
        browser.open(url)
        state_is(browser, "key")
        assert focused(browser) == "key"
        browser.type("wrong")
        browser.press(*ENTER, text="\r")
        browser.wait_for("document.getElementById('key-error').innerText !== ''")
        browser.type("sesame")
        browser.press(*ENTER, text="\r")
        state_is(browser, "live")
        browser.wait_for("document.querySelectorAll('.node').length === 2")
        browser.call("Page.reload")
        state_is(browser, "live")
        addresses = browser.evaluate(
            "[location.href, ...performance.getEntriesByType('resource').map(one => one.name)]"
        )
        assert not any("sesame" in address for address in addresses)
        assert browser.evaluate("localStorage.length") == 0
        assert browser.evaluate("document.cookie") == ""
    # What the browser itself says of an answer with 401.
    assert all("401" in one for one in browser.complaints)


def test_a_server_that_goes_away_is_told_and_its_return_seen(browser: Chromium) -> None:
    with page_of(MovingView()) as url:
        browser.open(url)
        state_is(browser, "live")
    state_is(browser, "off")
    assert "disconnected" in text_of(browser, "#status")
    assert "prefill-0" in text_of(browser, "#node-list")  # the last that is known
    port = int(url.rstrip("/").rpartition(":")[2])
    with page_of(MovingView(is_alone=True), port=port):
        browser.wait_for("document.querySelectorAll('.node').length === 1")
        state_is(browser, "live")
        assert "hybrid-0" in text_of(browser, "#node-list")
