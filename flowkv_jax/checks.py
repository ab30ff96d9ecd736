"""Checks of values that come from outside. Each raises `ValidationError` with value and bound."""

from __future__ import annotations

import math
from collections.abc import Sequence
from numbers import Integral, Real
from typing import Any

from flowkv_jax.errors import ValidationError

_SHOWN_CHARACTERS = 100


def bad_value(name: str, value: Any, complaint: str) -> ValidationError:
    """The error "name=value complaint", the value shortened: input is not echoed at length."""
    try:
        shown = repr(value)
    except ValueError:  # an int of more digits than Python prints
        shown = f"<{type(value).__name__}>"
    if len(shown) > _SHOWN_CHARACTERS:
        shown = shown[:_SHOWN_CHARACTERS] + "..."
    return ValidationError(f"{name}={shown} {complaint}", parameter=name, value=value)


def check_int(name: str, value: Any, low: int, high: int | None = None) -> None:
    """A whole number in [low, high]. A bool is an int to Python and never one to a caller."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise bad_value(name, value, "must be a whole number")
    if int(value) < low or (high is not None and int(value) > high):
        bounds = f"at least {low}" if high is None else f"in [{low}, {high}]"
        raise bad_value(name, value, f"must be {bounds}")


def check_real(
    name: str,
    value: Any,
    low: float = -math.inf,
    high: float = math.inf,
    *,
    low_open: bool = False,
) -> None:
    """A finite number in [low, high], or in (low, high] with `low_open`."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise bad_value(name, value, "must be a number")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise bad_value(name, value, "must be a finite number")
    if number < low or number > high or (low_open and number == low):
        if high == math.inf:
            raise bad_value(name, value, f"must be {'above' if low_open else 'at least'} {low}")
        raise bad_value(name, value, f"must be in {'(' if low_open else '['}{low}, {high}]")


MAX_STRING_CHARACTERS = 4096


def check_strings(name: str, values: Any, max_entries: int) -> None:
    """A sequence of short, non-empty strings (a lone string is not one)."""
    _check_sequence(name, values, "strings", max_entries)
    for value in values:
        if not isinstance(value, str) or not value:
            raise bad_value(name, value, "must be a string that is not empty")
        if len(value) > MAX_STRING_CHARACTERS:
            raise bad_value(
                name,
                value[:20],
                f"begins a string of {len(value)} characters; at most {MAX_STRING_CHARACTERS}",
            )


def check_ids(name: str, values: Any, max_entries: int | None = None) -> None:
    """A sequence of whole numbers, 0 or above."""
    _check_sequence(name, values, "token ids", max_entries)
    for value in values:
        check_int(name, value, 0)


def _check_sequence(name: str, values: Any, kind: str, max_entries: int | None) -> None:
    if isinstance(values, str | bytes) or not isinstance(values, Sequence):
        raise bad_value(name, values, f"must be a list of {kind}")
    if max_entries is not None and len(values) > max_entries:
        raise bad_value(name, values, f"has {len(values)} entries; at most {max_entries}")
