"""JSON from strangers into typed values: strict, bounded in depth, with bounded error texts."""

from __future__ import annotations

import re
from typing import Any, TypeVar

import msgspec
import numpy as np

from flowkv_jax.errors import ValidationError

MAX_DEPTH = 64
"""Deepest nesting of lists and objects in a body."""
MAX_QUOTED_CHARACTERS = 200
"""How much of a client's own text an error repeats."""

BodyT = TypeVar("BodyT")

_PATH = re.compile(r" - at `(?:key in )?\$([^`]*)`$")


def decode_json(body: bytes, body_type: type[BodyT]) -> BodyT:
    """The value; nothing is converted (`"1"` is no number).

    Raises:
        ValidationError: no JSON, something behind it, nested too deep, a key of the outermost
            object twice, or not of the type. `parameter` is the place, as `messages[0].role`.
    """
    structure = _structure(body) if b"{" in body else None
    if structure is not None and structure.depth > MAX_DEPTH:
        raise ValidationError(f"the body is nested more than {MAX_DEPTH} deep")
    try:
        if structure is not None and body.lstrip()[:1] == b"{":
            _check_keys_once(body, structure.num_members)
        return msgspec.json.decode(body, type=body_type)
    except msgspec.ValidationError as error:
        raise _told(error) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValidationError(f"the body is no valid JSON: {_short(str(error))}") from error


def _check_keys_once(body: bytes, num_members: int) -> None:
    names = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    if len(names) != num_members:
        raise ValidationError("the body gives a key more than once")


class _Structure(msgspec.Struct, frozen=True):
    depth: int
    num_members: int


def _structure(body: bytes) -> _Structure:
    """Depth, and members of the outermost object, without decoding. What is no JSON gives numbers
    of no meaning, and is found out later."""
    text = body.replace(b"\\\\", b"").replace(b'\\"', b"")
    data = np.frombuffer(text, dtype=np.uint8)
    is_outside = np.cumsum(data == ord('"'), dtype=np.uint8) & 1 == 0
    opens = ((data == ord("{")) | (data == ord("["))) & is_outside
    closes = ((data == ord("}")) | (data == ord("]"))) & is_outside
    depths = np.cumsum(opens.astype(np.int8) - closes.astype(np.int8), dtype=np.int32)
    colons = (data == ord(":")) & is_outside & (depths == 1)
    return _Structure(int(depths.max(initial=0)), int(np.count_nonzero(colons)))


def _told(error: msgspec.ValidationError) -> ValidationError:
    cause = error.__cause__
    found = _PATH.search(str(error))
    parameter = found[1].lstrip(".") if found is not None else None
    if isinstance(cause, ValidationError):
        return ValidationError(
            bounded(str(cause)), parameter=cause.parameter or parameter, value=cause.value
        )
    text = str(error)[: found.start()] if found is not None else str(error)
    where = f"{_short(parameter)}: " if parameter else ""
    return ValidationError(where + _short(text), parameter=parameter or None)


def bounded(text: str) -> str:
    """An error's text for the wire: never much longer than a page."""
    return _cut(text, 10 * MAX_QUOTED_CHARACTERS)


def _short(value: Any) -> str:
    return _cut(str(value), MAX_QUOTED_CHARACTERS)


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else text[: most - 3] + "..."
