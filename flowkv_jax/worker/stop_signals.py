"""SIGTERM and Ctrl-C for a worker: first drain, then stop, then end the process. No JAX."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from types import FrameType

from flowkv_jax.worker.member import Member

EXIT_IMPATIENT = 130
_SIGNALS = (signal.SIGTERM, signal.SIGINT)


@contextlib.contextmanager
def stop_on_signals(member: Member) -> Iterator[None]:
    """While inside: the first signal lets running sequences finish, the second ends them, the
    third ends the process as it is. For the main thread."""
    num_signals = 0

    def handle(number: int, frame: FrameType | None) -> None:
        nonlocal num_signals
        num_signals += 1
        if num_signals == 1:
            member.drain()
        elif num_signals == 2:
            member.stop()
        else:
            os._exit(EXIT_IMPATIENT)

    before = {number: signal.signal(number, handle) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
