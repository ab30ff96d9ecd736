"""The line between the two halves of one leg, as `backends.base.Link` describes it."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

from transfer.errors import DeadlineExceeded, ProtocolError, TransferError

MAX_WAITING_NOTES = 4096


class LegLink:
    """One end of the line.

    Args:
        send: hands a note to the channel.
        clock: the engine's.
        deadline_s: time on that clock at which the leg is over; None for no deadline.
    """

    def __init__(
        self,
        send: Callable[[bytes], None],
        clock: Callable[[], float],
        deadline_s: float | None,
    ) -> None:
        self._send = send
        self._clock = clock
        self._deadline_s = deadline_s
        self._condition = threading.Condition()
        self._notes: deque[bytes] = deque()
        self._digest: int | None = None
        self._is_confirmed = False
        self._error: TransferError | None = None
        self._on_stop: list[Callable[[], None]] = []

    def put(self, body: bytes) -> None:
        self.check()
        self._send(body)

    def get(self, timeout_s: float | None = None) -> bytes:
        with self._condition:
            self._wait(lambda: bool(self._notes), timeout_s)
            return self._notes.popleft()

    def check(self) -> None:
        if self._error is not None:
            raise self._error
        if self._deadline_s is not None and self._clock() >= self._deadline_s:
            raise DeadlineExceeded("the transfer ran past its deadline")

    def on_stop(self, callback: Callable[[], None]) -> None:
        with self._condition:
            if self._error is None:
                self._on_stop.append(callback)
                return
        callback()

    def digest(self) -> int:
        """The source's checksum; waits for it."""
        with self._condition:
            self._wait(lambda: self._digest is not None, None)
            assert self._digest is not None
            return self._digest

    def wait_confirmed(self) -> None:
        """Wait until the source has confirmed its generations."""
        with self._condition:
            self._wait(lambda: self._is_confirmed, None)

    def confirm(self) -> None:
        with self._condition:
            self._is_confirmed = True
            self._condition.notify_all()

    def deliver(self, body: bytes) -> None:
        """A note came from the other half."""
        with self._condition:
            if len(self._notes) < MAX_WAITING_NOTES:
                self._notes.append(body)
                self._condition.notify_all()
                return
        self.stop(ProtocolError(f"more than {MAX_WAITING_NOTES} notes wait for a backend"))

    def deliver_digest(self, digest: int) -> None:
        with self._condition:
            self._digest = digest
            self._condition.notify_all()

    def stop(self, error: TransferError) -> None:
        """The leg is over: every call of the half raises `error` from now on. Idempotent."""
        with self._condition:
            if self._error is not None:
                return
            self._error = error
            callbacks, self._on_stop = self._on_stop, []
            self._condition.notify_all()
        for callback in callbacks:
            callback()

    def _wait(self, ready: Callable[[], bool], timeout_s: float | None) -> None:
        """Wait for `ready`, under the condition. An error counts only where nothing is ready."""
        ends = None if timeout_s is None else self._clock() + timeout_s
        while not ready():
            self.check()
            now = self._clock()
            if ends is not None and now >= ends:
                raise TimeoutError(f"nothing came from the other half within {timeout_s} s")
            left = [end - now for end in (ends, self._deadline_s) if end is not None]
            self._condition.wait(min(left, default=None))
