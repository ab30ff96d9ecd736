"""Errors that only HTTP has. All others keep their class, and `flowkv_jax.errors` its status."""

from __future__ import annotations

from flowkv_jax.errors import ClientError
from flowkv_jax.http.response import Headers


class HttpError(ClientError):
    """A request that no handler should see, or whose form is wrong.

    Attributes:
        status: of the answer.
        code: OpenAI's `code`, where it has one.
    """

    def __init__(
        self, status: int, message: str, *, code: str | None = None, headers: Headers = ()
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.headers = headers


class ClientGone(Exception):
    """Nobody is there any more to read the answer."""
