"""From a path as it came over the wire to its route, by Starlette's patterns.

Nothing is normalised: `//health`, `/health/`, `/Health` and `/%68ealth` are four paths that do not
exist. So the route whose handler runs is the one whose openness was looked at.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from urllib.parse import unquote_to_bytes

import starlette.routing

from flowkv_jax.http.request import Receive, Scope, Send
from flowkv_jax.http.route import Route


@dataclass(frozen=True, slots=True)
class Match:
    """Attributes:
    route: None if nothing answers this method there.
    methods: that are answered there; empty if nothing is.
    """

    route: Route | None
    parameters: Mapping[str, str]
    methods: Sequence[str] = ()


class Router:
    """Raises ValueError where two routes answer the same."""

    def __init__(self, routes: Sequence[Route]) -> None:
        self.routes = tuple(routes)
        names = [(route.method, route.path) for route in routes]
        for method, path in names:
            if names.count((method, path)) > 1:
                raise ValueError(f"two routes for {method} {path}")
        # HEAD is answered where GET is: Starlette adds it.
        self._lines = [
            (starlette.routing.Route(route.path, _Endpoint(), methods=[route.method]), route)
            for route in routes
        ]

    def match(self, method: str, path: str) -> Match:
        """`path` without the query. A fixed path goes before a pattern that fits it too."""
        scope = {"type": "http", "method": method, "path": path, "root_path": ""}
        methods: set[str] = set()
        fits: list[tuple[Route, Mapping[str, str]]] = []
        for line, route in self._lines:
            fit, found = line.matches(scope)
            # An empty parameter, and a line end at the end, fit Starlette's patterns.
            parameters = found.get("path_params", {})
            if fit is starlette.routing.Match.NONE or "\n" in path or "" in parameters.values():
                continue
            methods |= line.methods or set()
            if fit is starlette.routing.Match.FULL:
                fits.append((route, parameters))
        if not fits:
            return Match(None, {}, sorted(methods))
        route, parameters = min(fits, key=lambda fit: len(fit[1]))
        try:
            texts = {name: unquote_to_bytes(text).decode() for name, text in parameters.items()}
        except UnicodeDecodeError:
            return Match(None, {})
        return Match(route, texts, sorted(methods))


class _Endpoint:
    """Never called: `App` calls handlers itself, once it has decided who may."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        raise RuntimeError("routes are only looked up here")
