"""A line now and then while shapes are compiled: the first start may take minutes. No JAX."""

from __future__ import annotations

import time
from collections.abc import Callable

_SAY_EVERY_S = 5.0


class CompilingProgress:
    """A callback of `warmup`; says nothing if all is done within seconds."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._next_s = time.monotonic() + _SAY_EVERY_S

    def __call__(self, done: int, total: int) -> None:
        if time.monotonic() >= self._next_s and done < total:
            self._next_s = time.monotonic() + _SAY_EVERY_S
            self._say(f"compiling: {done} of {total} shapes")
