"""One call, from arrival to status: errors become statuses here, and one log line says how it went.
Logs name requests and never quote prompts or answers.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Any, Self

from grpc_status import rpc_status

from flowkv_jax.errors import FlowKVError, grpc_status_name, is_expected
from flowkv_jax.outputs import RequestOutput
from flowkv_jax.rpc.limits import MAX_REQUEST_ID_CHARACTERS
from flowkv_jax.rpc.status import status_of

_logger = logging.getLogger(__name__)


class CallLog:
    """Surrounds a handler's body; handlers fill in the attributes as they learn them.

    Leaving it with an error ends the call with that error's status, by raising
    `grpc.aio.AbortError`. Cancellation (the client went away, or the deadline passed) goes through.
    """

    def __init__(self, context: Any, method: str, clock: Callable[[], float]) -> None:
        self._context = context
        self._method = method
        self._clock = clock
        self._started_s = clock()
        self.request_id = "-"
        self.num_prompt_tokens = 0
        self.num_completion_tokens = 0

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        _error_type: type[BaseException] | None,
        error: BaseException | None,
        _traceback: TracebackType | None,
    ) -> None:
        self.end(error)
        if isinstance(error, Exception):
            await self._context.abort_with_status(rpc_status.to_status(status_of(error)))

    def name(self, request_ids: Iterable[str]) -> None:
        """Of several requests."""
        self.request_id = ",".join(request_ids)[:MAX_REQUEST_ID_CHARACTERS]

    def count(self, output: RequestOutput) -> None:
        """Add what an answer has brought."""
        self.num_prompt_tokens = len(output.prompt_token_ids)
        self.num_completion_tokens += sum(len(c.delta_token_ids) for c in output.outputs)

    def end(self, error: BaseException | None) -> None:
        """Write the line. Called by itself where a request is not all of its call."""
        if error is None:
            self._write(logging.INFO, "OK")
        elif isinstance(error, asyncio.CancelledError):
            self._write(logging.INFO, "CANCELLED")
        elif isinstance(error, Exception):
            level = logging.INFO if is_expected(error) else logging.WARNING
            self._write(level, grpc_status_name(error), type(error).__name__)
            if not isinstance(error, FlowKVError):
                _logger.error(
                    "%s request_id=%r failed", self._method, self.request_id, exc_info=error
                )

    def _write(self, level: int, status: str, error_name: str = "") -> None:
        # The name of an error, not its message: that may quote what the client sent.
        _logger.log(
            level,
            "%s request_id=%r status=%s duration_ms=%.1f prompt_tokens=%d completion_tokens=%d%s",
            self._method,
            self.request_id,
            status,
            (self._clock() - self._started_s) * 1000,
            self.num_prompt_tokens,
            self.num_completion_tokens,
            f" error={error_name}" if error_name else "",
        )
