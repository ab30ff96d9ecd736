"""Errors between processes: the name of a class of `flowkv_jax.errors`, and what it says. No JAX.

Nothing that comes over the wire is looked up anywhere else than in that one tree.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

import msgspec

from flowkv_jax import errors
from flowkv_jax.errors import FlowKVError, GenerationError, RetryableRequestError, ValidationError

MAX_TEXT = 4096


class WireError(msgspec.Struct, frozen=True, array_like=True):
    """An error on its way.

    Attributes:
        name: of its class.
        text: for people.
        parameter: of a `ValidationError`.
        retry_after_s: of a `RetryableRequestError`.
    """

    name: Annotated[str, msgspec.Meta(max_length=128)]
    text: Annotated[str, msgspec.Meta(max_length=MAX_TEXT)]
    parameter: Annotated[str, msgspec.Meta(max_length=MAX_TEXT)] | None = None
    retry_after_s: float | None = None


def error_to_wire(error: BaseException) -> WireError:
    """Anything outside the tree goes as the `GenerationError` that it is to the request."""
    for cls in type(error).__mro__:
        if _CLASS_OF_NAME.get(cls.__name__) is cls:
            return WireError(
                cls.__name__,
                str(error)[:MAX_TEXT],
                error.parameter if isinstance(error, ValidationError) else None,
                error.retry_after_s if isinstance(error, RetryableRequestError) else None,
            )
    return WireError(GenerationError.__name__, f"{type(error).__name__}: {error}"[:MAX_TEXT])


def error_from_wire(wire: WireError) -> FlowKVError:
    """An error of the class it had; `GenerationError` where the name says nothing here."""
    cls = _CLASS_OF_NAME.get(wire.name, GenerationError)
    if issubclass(cls, ValidationError):
        return cls(wire.text, parameter=wire.parameter)
    if issubclass(cls, RetryableRequestError):
        return cls(wire.text, retry_after_s=wire.retry_after_s)
    return cls(wire.text)


def _tree(root: type[FlowKVError]) -> Iterator[type[FlowKVError]]:
    yield root
    for cls in root.__subclasses__():
        yield from _tree(cls)


# Subclasses that live beside their raisers stand for the class of the tree they refine.
_CLASS_OF_NAME = {
    cls.__name__: cls for cls in _tree(FlowKVError) if cls.__module__ == errors.__name__
}
