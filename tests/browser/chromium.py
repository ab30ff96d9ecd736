"""A headless Chromium, driven over its debugging pipe: no package, no port.

Messages are JSON ended by a zero byte, on the child's descriptors 3 (in) and 4 (out).
"""

from __future__ import annotations

import base64
import json
import os
import queue
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
_TIMEOUT_S = 30.0

# The pipe's ends are to be 3 and 4, whatever they are here.
_LAUNCH = """
import fcntl, os, sys
ends = [fcntl.fcntl(int(end), fcntl.F_DUPFD, 10) for end in sys.argv[1:3]]
for end, wanted in zip(ends, (3, 4)):
    os.dup2(end, wanted)
    os.close(end)
os.execv(sys.argv[3], sys.argv[3:])
"""


def find_chromium() -> str | None:
    """Path of the first that is installed; FLOWKV_CHROMIUM overrides."""
    given = os.environ.get("FLOWKV_CHROMIUM")
    if given:
        return given
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Chromium:
    """One browser with one page.

    Attributes:
        complaints: what the console said at levels above info, and exceptions nobody caught.
    """

    def __init__(
        self, binary: str, profile: Path, *, width: int = 1440, height: int = 1100
    ) -> None:
        to_child, ours_out = os.pipe()
        ours_in, from_child = os.pipe()
        self._process = subprocess.Popen(
            [
                sys.executable,
                "-c",
                _LAUNCH,
                str(to_child),
                str(from_child),
                binary,
                "--headless=new",
                "--no-sandbox",
                "--disable-gpu",
                "--disable-dev-shm-usage",
                "--hide-scrollbars",
                "--no-first-run",
                "--disable-background-networking",
                "--disable-component-update",
                f"--user-data-dir={profile}",
                "--remote-debugging-pipe",
                "about:blank",
            ],
            pass_fds=(to_child, from_child),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_child)
        os.close(from_child)
        self._out = os.fdopen(ours_out, "wb", buffering=0)
        self._in = os.fdopen(ours_in, "rb")
        self._answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._last_id = 0
        self._session: str | None = None
        self.complaints: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        targets = self.call("Target.getTargets")["targetInfos"]
        page = next(one for one in targets if one["type"] == "page")
        attached = self.call("Target.attachToTarget", targetId=page["targetId"], flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")
        self.call("Emulation.setFocusEmulationEnabled", enabled=True)
        self.resize(width, height)

    def close(self) -> None:
        self._out.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._reader.join(10)
        self._in.close()

    def call(self, method: str, **params: Any) -> Any:
        self._last_id += 1
        message = {"id": self._last_id, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        self._out.write(json.dumps(message).encode() + b"\0")
        while True:
            answer = self._answers.get(timeout=_TIMEOUT_S)
            if answer is None:
                raise RuntimeError("the browser has ended")
            if answer["id"] == self._last_id:
                break
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']}")
        return answer["result"]

    # The page

    def resize(self, width: int, height: int) -> None:
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height,
                  deviceScaleFactor=1, mobile=False)  # fmt: skip

    def prefer(self, scheme: str) -> None:
        """`light` or `dark`."""
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.call("Emulation.setEmulatedMedia", features=features)

    def open(self, url: str) -> None:
        self.call("Page.navigate", url=url)
        self.wait_for("document.readyState === 'complete' && location.href !== 'about:blank'")

    def evaluate(self, expression: str) -> Any:
        """The value of an expression of JavaScript; a promise is waited for."""
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True,
                           awaitPromise=True)  # fmt: skip
        if "exceptionDetails" in result:
            raise RuntimeError(f"{expression}: {result['exceptionDetails']}")
        return result["result"].get("value")

    def wait_for(self, expression: str, timeout_s: float = _TIMEOUT_S) -> Any:
        """The value of an expression once it is true."""
        ends_s = time.monotonic() + timeout_s
        while not (value := self.evaluate(expression)):
            if time.monotonic() > ends_s:
                raise TimeoutError(f"not within {timeout_s:g} s: {expression}")
            time.sleep(0.05)
        return value

    def press(self, key: str, code: int, *, text: str = "", modifiers: int = 0) -> None:
        """A key goes down and up."""
        common = {"key": key, "code": key, "windowsVirtualKeyCode": code, "modifiers": modifiers}
        kind = "keyDown" if text else "rawKeyDown"
        self.call("Input.dispatchKeyEvent", type=kind, text=text, **common)
        self.call("Input.dispatchKeyEvent", type="keyUp", **common)

    def type(self, text: str) -> None:
        self.call("Input.insertText", text=text)

    def screenshot(self, *, whole: bool = False) -> bytes:
        """PNG of what is seen, or of the whole page."""
        params: dict[str, Any] = {"format": "png"}
        if whole:
            size = self.call("Page.getLayoutMetrics")["cssContentSize"]
            params["captureBeyondViewport"] = True
            params["clip"] = {"x": 0, "y": 0, "scale": 1, "width": size["width"],
                              "height": size["height"]}  # fmt: skip
        return base64.b64decode(self.call("Page.captureScreenshot", **params)["data"])

    def _read(self) -> None:
        buffered = b""
        while chunk := self._in.read1(1 << 20):
            *messages, buffered = (buffered + chunk).split(b"\0")
            for text in messages:
                message = json.loads(text)
                if "id" in message:
                    self._answers.put(message)
                elif (note := _HEARD.get(message["method"])) is not None:
                    self.complaints += note(message["params"])
        self._answers.put(None)


def _of_console(params: dict[str, Any]) -> list[str]:
    if params["type"] not in ("error", "warning", "assert"):
        return []
    return [" ".join(str(one.get("value", one.get("description"))) for one in params["args"])]


def _of_log(params: dict[str, Any]) -> list[str]:
    entry = params["entry"]
    is_bad = entry["level"] in ("error", "warning")
    return [f"{entry['text']} ({entry.get('url', '')})"] if is_bad else []


_HEARD: dict[str, Callable[[dict[str, Any]], list[str]]] = {
    "Runtime.exceptionThrown": lambda params: [str(params["exceptionDetails"])],
    "Runtime.consoleAPICalled": _of_console,
    "Log.entryAdded": _of_log,
}
