"""What an answer must look like: a JSON schema, a regular expression, a list, or a grammar.

This is the value that travels with a request; its checks bound size and depth, so that nothing
large reaches a compiler. Whether a schema, expression or grammar means anything is found out when
it is compiled (`engine.grammar`), before a node hears of the request.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flowkv_jax.checks import bad_value
from flowkv_jax.errors import UnprocessableError, ValidationError

MAX_SCHEMA_BYTES = 64 * 1024
MAX_SCHEMA_DEPTH = 64
MAX_REGEX_BYTES = 8 * 1024
MAX_GRAMMAR_BYTES = 64 * 1024
MAX_GBNF_BYTES = 8 * 1024
"""Less than of Lark's form: the time to convert it grows with its square."""
MAX_CHOICES = 1024
MAX_CHOICES_BYTES = 64 * 1024

_KINDS = ("json", "regex", "choice", "grammar", "json_object")
_GBNF_RULE = re.compile(r"^[ \t]*[\w-]+[ \t]*::=", re.MULTILINE)
# Of vLLM's structure; dropping one would change what the answer may be.
_NOT_SERVED = frozenset(
    {
        "structural_tag",
        "whitespace_pattern",
        "disable_any_whitespace",
        "disable_additional_properties",
    }
)
# What these say is so here anyway: there is one compiler, and nothing to fall back to.
_WITHOUT_EFFECT = frozenset({"disable_fallback", "backend"})


@dataclass(frozen=True, kw_only=True)
class StructuredOutputs:
    """The form of an answer; exactly one of the attributes is given.

    Attributes:
        json: a JSON schema, as a dict, a bool, or JSON text; kept as text. At most 64 KiB, and 64
            levels deep.
        regex: a regular expression that the whole answer matches (Rust's syntax: no look-around,
            no back-references). At most 8 KiB.
        choice: the answer is one of these. At most 1024, and 64 KiB together.
        grammar: in Lark's form, or GBNF (which writes `::=`). At most 64 KiB, or 8 KiB of GBNF.
        json_object: the answer is any JSON object.

    Raises:
        ValidationError: none or several are given, or one has a wrong type or is too large.
    """

    json: str | Mapping[str, Any] | bool | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    json_object: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.json_object, bool):
            raise _bad("json_object", self.json_object, "must be true or false")
        given = [name for name in _KINDS if self._is_given(name)]
        if len(given) != 1:
            raise ValidationError(
                f"structured_outputs must have exactly one of {', '.join(_KINDS)}; it has "
                f"{' and '.join(given) or 'none'}",
                parameter="structured_outputs",
                value=given,
            )
        if self.json is not None:
            object.__setattr__(self, "json", _schema_text(self.json))
        if self.regex is not None:
            _check_text("regex", self.regex, MAX_REGEX_BYTES)
        if self.grammar is not None:
            _check_text("grammar", self.grammar, MAX_GRAMMAR_BYTES)
            if self.is_gbnf:
                _check_text("grammar", self.grammar, MAX_GBNF_BYTES)
        if self.choice is not None:
            object.__setattr__(self, "choice", _checked_choices(self.choice))

    def _is_given(self, name: str) -> bool:
        value = getattr(self, name)
        return bool(value) if name == "json_object" else value is not None

    @property
    def kind(self) -> str:
        """Which attribute is given."""
        return next(name for name in _KINDS if self._is_given(name))

    @property
    def is_gbnf(self) -> bool:
        """`grammar` is given, in GBNF."""
        return self.grammar is not None and _GBNF_RULE.search(self.grammar) is not None

    @property
    def text(self) -> str:
        """What is given, as text: the same text of the same kind means the same form."""
        if self.choice is not None:
            return json.dumps(self.choice)
        return str(self.json or self.regex or self.grammar or "")

    def to_mapping(self) -> dict[str, Any]:
        """`from_mapping` of it is an equal object; holds only what JSON can."""
        kind = self.kind
        value = getattr(self, kind)
        return {kind: list(value) if kind == "choice" else value}

    @classmethod
    def from_mapping(cls, mapping: Any) -> StructuredOutputs:
        """From {"json": ...}, {"regex": ...} and so on; a key with None counts as left out.

        Raises:
            UnprocessableError: an option of vLLM's that is not served.
            ValidationError: unknown key, or as the constructor.
        """
        if not isinstance(mapping, Mapping):
            raise bad_value(
                "structured_outputs", mapping, f"must map one of {', '.join(_KINDS)} to its value"
            )
        values: dict[str, Any] = {}
        for key, value in mapping.items():
            if key in _KINDS:
                values[key] = False if key == "json_object" and value is None else value
            elif key in _NOT_SERVED:
                if value is not None and value is not False:
                    raise UnprocessableError(
                        f"structured_outputs.{key} is not served here; leave it out"
                    )
            elif key not in _WITHOUT_EFFECT:
                raise ValidationError(
                    f"structured_outputs has an unknown key {key!r:.100}; there are "
                    f"{', '.join(_KINDS)}",
                    parameter="structured_outputs",
                    value=key,
                )
        return cls(**values)


def _bad(name: str, value: Any, complaint: str) -> ValidationError:
    return bad_value(f"structured_outputs.{name}", value, complaint)


def _check_text(name: str, value: Any, max_bytes: int) -> None:
    if not isinstance(value, str):
        raise _bad(name, value, "must be text")
    if not value:
        raise _bad(name, value, "is empty")
    if _num_bytes(name, value) > max_bytes:
        raise _bad(name, value, f"has {_num_bytes(name, value)} bytes; at most {max_bytes}")
    if "\0" in value:
        raise _bad(name, value, "holds a NUL character, which no answer can have")


def _num_bytes(name: str, value: str) -> int:
    try:
        return len(value.encode())
    except UnicodeEncodeError as error:
        raise _bad(name, value, f"cannot be encoded as UTF-8: {error}") from None


def _schema_text(given: Any) -> str:
    """The schema as JSON text; the order of its keys stays, for answers follow it."""
    schema = given
    if isinstance(given, str):
        _check_text("json", given, MAX_SCHEMA_BYTES)
        try:
            schema = json.loads(given)
        except ValueError as error:
            raise _bad("json", given, f"is no JSON: {error!s:.200}") from None
        except RecursionError:
            raise _too_deep() from None
    if not isinstance(schema, Mapping | bool):
        raise _bad("json", schema, "must be a JSON schema: an object, or true or false")
    _check_depth(schema)
    if isinstance(given, str):
        return given
    try:
        text = json.dumps(_plain(schema), allow_nan=False, ensure_ascii=False)
    except (TypeError, ValueError) as error:
        raise _bad("json", schema, f"is no JSON: {error!s:.200}") from None
    _check_text("json", text, MAX_SCHEMA_BYTES)
    return text


def _plain(value: Any) -> Any:
    """Mappings as dicts: `json` knows no others. `_check_depth` bounds the recursion."""
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value


def _check_depth(schema: Any) -> None:
    level: list[Any] = [schema]
    for _ in range(MAX_SCHEMA_DEPTH):
        below: list[Any] = []
        for value in level:
            if isinstance(value, Mapping):
                below.extend(value.values())
            elif isinstance(value, list | tuple):
                below.extend(value)
            if len(below) > MAX_SCHEMA_BYTES:  # each value takes at least a byte of text
                raise _bad("json", "...", f"is too large; at most {MAX_SCHEMA_BYTES} bytes")
        if not below:
            return
        level = below
    raise _too_deep()


def _too_deep() -> ValidationError:
    return _bad("json", "...", f"is nested too deep; at most {MAX_SCHEMA_DEPTH} levels")


def _checked_choices(given: Any) -> tuple[str, ...]:
    if isinstance(given, str | bytes) or not isinstance(given, Sequence):
        raise _bad("choice", given, "must be a list of strings")
    if not 1 <= len(given) <= MAX_CHOICES:
        raise _bad("choice", given, f"has {len(given)} entries; from 1 to {MAX_CHOICES}")
    total = 0
    for value in given:
        if not isinstance(value, str) or not value:
            raise _bad("choice", value, "must be a string that is not empty")
        total += _num_bytes("choice", value)
    if total > MAX_CHOICES_BYTES:
        raise _bad("choice", given, f"has {total} bytes together; at most {MAX_CHOICES_BYTES}")
    return tuple(dict.fromkeys(given))
