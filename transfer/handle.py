"""What a caller holds of a transfer it has submitted."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

from transfer.callbacks import call_back
from transfer.errors import TransferError
from transfer.lifecycle import TransferState
from transfer.types import PathType


@dataclass(frozen=True, slots=True)
class TransferReport:
    """How a completed transfer went.

    Attributes:
        transfer: its name.
        path_type: the kind of path that worked.
        routes: (hops, backend) of each leg.
        data_bytes, runs, calls: moved by that attempt.
        seconds: from submission to the last acknowledgement.
        retries: attempts that failed before it.
    """

    transfer: str
    path_type: PathType
    routes: tuple[tuple[tuple[str, ...], str], ...]
    data_bytes: int
    runs: int
    calls: int
    seconds: float
    retries: int

    @property
    def way(self) -> tuple[str, str]:
        """(kind of path, backends): by name, different backends joined by "+"."""
        return self.path_type.value, "+".join(dict.fromkeys(name for _, name in self.routes))


class TransferHandle:
    """A submitted transfer. Any thread may use it.

    Attributes:
        transfer: its name; the destination's engine knows it by the same.
    """

    def __init__(self, transfer: str, cancel: Callable[[], None]) -> None:
        self.transfer = transfer
        self._cancel = cancel
        self._final = threading.Condition(threading.Lock())
        self._is_final = False
        self._callbacks: list[Callable[[TransferHandle], object]] = []
        self._state = TransferState.QUEUED
        self._report: TransferReport | None = None
        self._error: TransferError | None = None

    @property
    def state(self) -> TransferState:
        return self._state

    @property
    def error(self) -> TransferError | None:
        """Why it failed or was cancelled; None before that, and for a completed one."""
        return self._error

    def poll(self) -> TransferState:
        """Where it stands; never blocks."""
        return self._state

    def wait(self, timeout_s: float | None = None) -> TransferReport:
        """Wait until the transfer is final: its blocks are then free to be used again.

        Raises:
            TimeoutError: it is not final yet after `timeout_s`; it goes on.
            TransferError: it failed, ran past its deadline, or was cancelled.
        """
        if not self._is_final:
            with self._final:
                if not self._final.wait_for(lambda: self._is_final, timeout_s):
                    raise TimeoutError(
                        f"transfer {self.transfer} is {self._state.value} after {timeout_s} s"
                    )
        return self.report

    @property
    def report(self) -> TransferReport:
        """How it went; what `wait` would return or raise, for those who know that it is final.

        Raises:
            TimeoutError: it is not final yet.
            TransferError: as `wait`.
        """
        if not self._is_final:
            raise TimeoutError(f"transfer {self.transfer} is {self._state.value}, not final")
        if self._error is not None:
            raise self._error
        assert self._report is not None
        return self._report

    def add_done_callback(self, callback: Callable[[TransferHandle], object]) -> None:
        """Call `callback(handle)` once, when the transfer is final; at once if it is.

        It is called in the thread that learns of the end: one of the engine's, or that of a caller
        of `cancel` or `close`. It must be quick; it may use the engine. What it raises is logged.
        """
        with self._final:
            if not self._is_final:
                self._callbacks.append(callback)
                return
        call_back(callback, self)

    def cancel(self) -> None:
        """Ask for the transfer to stop. Idempotent, returns at once; `wait` tells when it has.

        It can still complete, if everything had arrived before.
        """
        self._cancel()

    def set_state(self, state: TransferState) -> None:
        """For the engine."""
        self._state = state

    def finish(
        self, state: TransferState, report: TransferReport | None, error: TransferError | None
    ) -> None:
        """For the engine, which holds no lock: the transfer is final."""
        with self._final:
            self._report, self._error, self._state = report, error, state
            self._is_final = True
            callbacks, self._callbacks = self._callbacks, []
            self._final.notify_all()
        for callback in callbacks:
            call_back(callback, self)
