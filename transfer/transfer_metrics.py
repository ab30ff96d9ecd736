"""Counters of transfers by path and backend. Imports no JAX."""

from __future__ import annotations

import threading
from dataclasses import dataclass

from transfer.types import PathType


@dataclass(frozen=True, slots=True)
class PathMetrics:
    """What went over one kind of path by one backend.

    Attributes:
        transfers: legs that arrived.
        failures: legs that did not.
        retries: legs of a second or later attempt.
        calls, runs, data_bytes: of the legs that arrived.
        seconds: their durations, summed.
    """

    transfers: int = 0
    failures: int = 0
    retries: int = 0
    calls: int = 0
    runs: int = 0
    data_bytes: int = 0
    seconds: float = 0.0


class TransferMetrics:
    """Adds up; any thread may call."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._by_path: dict[tuple[PathType, str], PathMetrics] = {}

    def add(self, path_type: PathType, backend: str, more: PathMetrics) -> None:
        key = (path_type, backend)
        with self._lock:
            old = self._by_path.get(key, PathMetrics())
            self._by_path[key] = PathMetrics(
                transfers=old.transfers + more.transfers,
                failures=old.failures + more.failures,
                retries=old.retries + more.retries,
                calls=old.calls + more.calls,
                runs=old.runs + more.runs,
                data_bytes=old.data_bytes + more.data_bytes,
                seconds=old.seconds + more.seconds,
            )

    def snapshot(self) -> dict[tuple[PathType, str], PathMetrics]:
        """(path type, backend) -> counters."""
        with self._lock:
            return dict(self._by_path)
