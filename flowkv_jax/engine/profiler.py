"""JAX's profiler, for administrators: one profile at a time in a process, and never without end.

    IDLE -> RUNNING -> IDLE      stopped, or its time was up

It works on a thread of its own: writing what was recorded takes seconds.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import jax

from flowkv_jax.cluster.messages import MAX_PROFILE_S
from flowkv_jax.errors import UnprocessableError

_logger = logging.getLogger(__name__)


class Profiler:
    """Any thread.

    Args:
        directory: where profiles are written, in a folder for each name; None refuses all.
    """

    def __init__(self, directory: str | None) -> None:
        self._directory = directory
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="flowkv-profiler")
        self._timer: threading.Timer | None = None
        self._was_used = False

    def start(self, name: str, duration_s: float) -> Future[bool]:
        """Record from now on, until `stop` or for at most `duration_s`, which is cut to
        `MAX_PROFILE_S`.

        The future fails with `UnprocessableError` where there is no directory, or a profile is
        being recorded.
        """
        self._was_used = True
        return self._thread.submit(self._start, name, min(duration_s, MAX_PROFILE_S))

    def stop(self) -> Future[bool]:
        """Write what was recorded.

        The future fails with `UnprocessableError` where nothing is.
        """
        return self._thread.submit(self._stop, None)

    def close(self) -> None:
        """Stop what is recorded. Idempotent."""
        if self._was_used:
            with contextlib.suppress(RuntimeError):  # it was closed before
                self._thread.submit(self._stop_if_running)
        self._thread.shutdown()

    # The profiler's own thread

    def _start(self, name: str, duration_s: float) -> bool:
        if self._directory is None:
            raise UnprocessableError("profiles are written nowhere: set profile_dir")
        if self._timer is not None:
            raise UnprocessableError("a profile is being recorded")
        folder = Path(self._directory) / (name or "node")
        try:
            folder.mkdir(parents=True, exist_ok=True)
            jax.profiler.start_trace(folder)
        except (OSError, RuntimeError) as error:
            raise UnprocessableError(f"no profile can be recorded: {error}") from error
        timer = threading.Timer(duration_s, self._on_time_up)
        timer.daemon = True
        self._timer = timer
        timer.start()
        _logger.warning("recording a profile for at most %g s into %s", duration_s, folder)
        return True

    def _on_time_up(self) -> None:
        timer = threading.current_thread()
        try:
            self._thread.submit(self._stop, timer)
        except RuntimeError:
            return  # it was closed, and has written it

    def _stop(self, timer: threading.Thread | None) -> bool:
        """`timer` ends only the profile that it was made for."""
        if timer is not None and timer is not self._timer:
            return False
        if self._timer is None:
            raise UnprocessableError("no profile is being recorded")
        self._timer.cancel()
        self._timer = None
        jax.profiler.stop_trace()  # type: ignore[no-untyped-call]
        _logger.warning("the profile has been written")
        return True

    def _stop_if_running(self) -> None:
        if self._timer is not None:
            self._stop(None)
