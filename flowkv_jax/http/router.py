"""From a path as it came over the wire to its route.

Nothing is normalised: `//health`, `/health/`, `/Health` and `/%68ealth` are four paths that do not
exist. So the route whose handler runs is the one whose openness was looked at.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from urllib.parse import unquote_to_bytes

from flowkv_jax.http.route import Route

_PARAMETER = re.compile(r"\\\{(\w+)(:path)?\\\}")


@dataclass(frozen=True, slots=True)
class Match:
    """Attributes:
    route: None if nothing answers this method there.
    methods: that are answered there; empty if nothing is.
    """

    route: Route | None
    parameters: Mapping[str, str]
    methods: Sequence[str] = ()


_NOTHING = Match(None, {})


class Router:
    """Raises ValueError where two routes answer the same."""

    def __init__(self, routes: Sequence[Route]) -> None:
        self.routes = tuple(routes)
        self._exact: dict[str, dict[str, Route]] = {}
        self._patterns: list[tuple[re.Pattern[str], dict[str, Route]]] = []
        by_path: dict[str, dict[str, Route]] = {}
        for route in routes:
            by_method = by_path.setdefault(route.path, {})
            if route.method in by_method:
                raise ValueError(f"two routes for {route.method} {route.path}")
            by_method[route.method] = route
        for path, by_method in by_path.items():
            if "{" in path:
                self._patterns.append((_pattern(path), by_method))
            else:
                self._exact[path] = by_method

    def match(self, method: str, path: str) -> Match:
        """`path` without the query. HEAD is answered where GET is."""
        if (by_method := self._exact.get(path)) is not None:
            return _of(by_method, method, {})
        for pattern, by_method in self._patterns:
            if (found := pattern.fullmatch(path)) is not None:
                try:
                    texts = {k: unquote_to_bytes(v).decode() for k, v in found.groupdict().items()}
                except UnicodeDecodeError:
                    return _NOTHING
                return _of(by_method, method, texts)
        return _NOTHING


def _of(by_method: Mapping[str, Route], method: str, parameters: Mapping[str, str]) -> Match:
    route = by_method.get("GET" if method == "HEAD" else method)
    methods = sorted({*by_method, *(("HEAD",) if "GET" in by_method else ())})
    return Match(route, parameters, methods)


def _pattern(path: str) -> re.Pattern[str]:
    def group(found: re.Match[str]) -> str:
        return f"(?P<{found[1]}>{'.+' if found[2] else '[^/]+'})"

    return re.compile(_PARAMETER.sub(group, re.escape(path)), re.DOTALL)
