"""The thread that looks at a cluster once a second, for its history."""

from __future__ import annotations

import logging
import secrets
import threading
from collections.abc import Callable

from flowkv_jax.rpc.cluster_view import ClusterView
from flowkv_jax.trace.history import ClusterHistory

INTERVAL_S = 1.0

_logger = logging.getLogger(__name__)


class Recorder:
    """Runs from `start` to `close`.

    Args:
        count_gaps: see `ClusterHistory`.

    Attributes:
        history: what it has seen.
        instance: drawn once; numbers of another instance mean nothing.
        interval_s: time between two looks.
    """

    def __init__(
        self,
        view: ClusterView,
        count_gaps: Callable[[], tuple[int, ...]] = tuple,
        interval_s: float = INTERVAL_S,
    ) -> None:
        self.history = ClusterHistory(view, count_gaps)
        self.instance = secrets.token_hex(8)
        self.interval_s = interval_s
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="flowkv-recorder", daemon=True)

    def start(self) -> None:
        """Look for the first time, and begin."""
        self._thread.start()

    def close(self) -> None:
        """End the thread; may wait for a look to end. Idempotent."""
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        has_failed = False
        while True:
            try:
                self.history.look()
                has_failed = False
            except Exception:  # whoever only watches must not end for it; told once a spell
                if not has_failed:
                    _logger.exception("the cluster could not be looked at")
                has_failed = True
            if self._stopping.wait(self.interval_s):
                return
