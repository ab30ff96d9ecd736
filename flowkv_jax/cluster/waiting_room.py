"""How many requests may wait for their first token, and when to come back if too many do."""

from __future__ import annotations

from flowkv_jax.errors import MaxQueuedTokensError, QueueOverflowError

_MIN_RETRY_S, _MAX_RETRY_S = 0.05, 30.0
_FIRST_GUESS_S = 1.0
_NEWEST_SHARE = 0.1  # of the running mean of the time between two that leave


class WaitingRoom:
    """Counts requests, and tokens of their prompts, from `enter` to `leave`. One owner.

    Args:
        max_requests: bound on requests.
        max_tokens: bound on prompt tokens; None for no bound. A prompt longer than the bound is
            let into an empty room: trying again later would not help it.
    """

    def __init__(self, max_requests: int, max_tokens: int | None) -> None:
        for name, bound in (("max_requests", max_requests), ("max_tokens", max_tokens)):
            if bound is not None and bound < 1:
                raise ValueError(f"{name}={bound} must be at least 1")
        self._max_requests = max_requests
        self._max_tokens = max_tokens
        self._interval_s: float | None = None
        self._last_left_s: float | None = None
        self.num_requests = 0
        self.num_tokens = 0

    def require_room(self, num_tokens: int) -> None:
        """Refuse what would exceed a bound.

        Raises:
            QueueOverflowError: by requests.
            MaxQueuedTokensError: by tokens.
        """
        if self.num_requests >= self._max_requests:
            raise QueueOverflowError(
                f"{self.num_requests} requests wait for their first token,"
                f" max_waiting_requests={self._max_requests}; try again later",
                retry_after_s=self._retry_after_s(1),
            )
        bound = self._max_tokens
        if bound is not None and self.num_requests and self.num_tokens + num_tokens > bound:
            surplus = (self.num_tokens + num_tokens - bound) / self.num_tokens
            raise MaxQueuedTokensError(
                f"{self.num_tokens} prompt tokens wait and this request has {num_tokens},"
                f" max_waiting_tokens={bound}; try again later",
                retry_after_s=self._retry_after_s(min(surplus, 1.0) * self.num_requests),
            )

    def enter(self, num_tokens: int) -> None:
        self.num_requests += 1
        self.num_tokens += num_tokens

    def leave(self, num_tokens: int, now_s: float) -> None:
        self.num_requests -= 1
        self.num_tokens -= num_tokens
        if self._last_left_s is not None:
            interval_s = now_s - self._last_left_s
            mean_s = interval_s if self._interval_s is None else self._interval_s
            self._interval_s = mean_s + _NEWEST_SHARE * (interval_s - mean_s)
        # Nobody is kept waiting by what happens while nobody waits.
        self._last_left_s = now_s if self.num_requests else None

    def _retry_after_s(self, num_to_leave: float) -> float:
        """Until so many have left, at the pace of late."""
        interval_s = _FIRST_GUESS_S if self._interval_s is None else self._interval_s
        return min(max(num_to_leave * interval_s, _MIN_RETRY_S), _MAX_RETRY_S)
