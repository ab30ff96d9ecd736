"""One self-contained document out of the files in `assets/`, and the policy it is served under.

The policy names the inline style and script by their hashes and allows nothing else but requests to
the server the page came from: no outside asset can be loaded, and text that got into the page as
markup could run nothing.
"""

from __future__ import annotations

import base64
import hashlib
from dataclasses import dataclass
from functools import cache
from importlib import resources

SCRIPTS = (
    "format.js",
    "draw.js",
    "store.js",
    "nodes.js",
    "scores.js",
    "handoffs.js",
    "links.js",
    "latency.js",
    "log.js",
    "main.js",
)
"""In the order they run; they share one strict function scope."""


@dataclass(frozen=True, slots=True)
class Page:
    """The document, UTF-8, and its Content-Security-Policy."""

    html: bytes
    policy: str


@cache
def live_page() -> Page:
    """Put together once."""
    style = _asset("style.css")
    script = '(function () {\n"use strict";\n' + "\n".join(map(_asset, SCRIPTS)) + "\n})();\n"
    html = _asset("page.html").replace("{style}", style).replace("{script}", script)
    policy = "; ".join(
        (
            "default-src 'none'",
            f"script-src '{_hash(script)}'",
            f"style-src '{_hash(style)}'",
            "connect-src 'self'",
            "img-src data:",
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
        )
    )
    return Page(html.encode(), policy)


def _asset(name: str) -> str:
    return resources.files(__package__).joinpath("assets", name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
