r"""One call as a model writes it, read a piece at a time: {"name": "f", "arguments": {...}}.

    before {  -> between members -> key -> before : -> value begins -> value -> between .. -> over

Members may come in any order, `parameters` is another word for `arguments`, others are passed over.
Arguments are handed on as they were written; only if they are a JSON string its text is. What comes
before the name waits for it. The reader follows nesting and strings and does not otherwise judge
JSON: arguments that are cut off or broken are the caller's to see.
"""

from __future__ import annotations

import enum

import msgspec

_SPACE = " \t\r\n"
_ARGUMENT_KEYS = ("arguments", "parameters")


class _Place(enum.Enum):
    BEFORE = enum.auto()
    BETWEEN = enum.auto()
    KEY = enum.auto()
    COLON = enum.auto()
    VALUE_BEGINS = enum.auto()
    VALUE = enum.auto()
    OVER = enum.auto()
    BROKEN = enum.auto()


class CallReader:
    """Reads one call. `is_over` and `is_broken` say how it ended.

    Attributes:
        name: None until it is known.
    """

    def __init__(self) -> None:
        self.name: str | None = None
        self._place = _Place.BEFORE
        self._key = ""
        self._string: list[str] = []
        self._value: list[str] = []
        self._depth = 0
        self._in_string = False
        self._is_escaped = False
        self._is_text_value = False
        self._has_arguments = False
        self._ready: list[str] = []

    @property
    def is_over(self) -> bool:
        return self._place is _Place.OVER

    @property
    def is_broken(self) -> bool:
        """It is no call."""
        return self._place is _Place.BROKEN

    def feed(self, text: str, start: int) -> int:
        """Read on from `text[start]`; returns where it stopped, at the end or behind the call."""
        position = start
        while position < len(text):
            place = self._place
            if place is _Place.VALUE:
                position = self._in_value(text, position)
            elif place is _Place.KEY:
                self._in_key(text[position])
                position += 1
            elif place is _Place.OVER or place is _Place.BROKEN:
                break
            else:
                position += self._outside(text[position])
        return position

    def take_arguments(self) -> str:
        """What of the arguments has become known; empty while the name is not."""
        if self.name is None:
            return ""
        if self._place is _Place.VALUE and self._key in _ARGUMENT_KEYS and not self._is_text_value:
            self._ready += self._value
            self._value = []
        taken = "".join(self._ready)
        self._ready = []
        return taken

    def _outside(self, character: str) -> int:
        """Between the parts; returns how many characters it used."""
        place = self._place
        if character in _SPACE:
            return 1
        if place is _Place.BEFORE and character == "{":
            self._place = _Place.BETWEEN
        elif place is _Place.BETWEEN and character == '"':
            self._place = _Place.KEY
            self._string = []
        elif place is _Place.BETWEEN and character == ",":
            pass
        elif place is _Place.BETWEEN and character == "}":
            self._end()
        elif place is _Place.COLON and character == ":":
            self._place = _Place.VALUE_BEGINS
        elif place is _Place.VALUE_BEGINS:
            self._place = _Place.VALUE
            self._value, self._depth = [], 0
            self._in_string = self._is_escaped = False
            self._is_text_value = character == '"'
            return 0
        else:
            self._place = _Place.BROKEN
        return 1

    def _in_key(self, character: str) -> None:
        if character == '"' and not self._is_escaped:
            self._key = "".join(self._string)
            self._place = _Place.COLON
            return
        self._is_escaped = character == "\\" and not self._is_escaped
        self._string.append(character)

    def _in_value(self, text: str, start: int) -> int:
        """Follow a value to its end or the text's."""
        position = start
        while position < len(text):
            character = text[position]
            if self._in_string:
                if self._is_escaped:
                    self._is_escaped = False
                elif character == "\\":
                    self._is_escaped = True
                elif character == '"':
                    self._in_string = False
            elif character == '"':
                self._in_string = True
            elif character in "{[":
                self._depth += 1
            elif character in "}]" and self._depth:
                self._depth -= 1
                if self._depth == 0:
                    return self._value_ends(text, start, position + 1)
            elif self._depth == 0 and character in ",}":
                return self._value_ends(text, start, position)
            position += 1
        self._value.append(text[start:])
        return position

    def _value_ends(self, text: str, start: int, end: int) -> int:
        """The value is complete with `text[start:end]`; returns where to read on."""
        self._value.append(text[start:end])
        self._place = _Place.BETWEEN
        if self._key == "name" and self.name is None:
            name = _string_of("".join(self._value))
            if name:
                self.name = name
            else:
                self._place = _Place.BROKEN
        elif self._key in _ARGUMENT_KEYS and not self._has_arguments:
            self._has_arguments = True
            self._ready += self._arguments_of(self._value)
        self._value = []
        return end

    def _arguments_of(self, value: list[str]) -> list[str]:
        if not self._is_text_value:
            return value
        written = "".join(value)
        text = _string_of(written)
        return [written if text is None else text]

    def _end(self) -> None:
        if self.name is None:
            self._place = _Place.BROKEN
            return
        if not self._has_arguments:
            self._ready.append("{}")
        self._place = _Place.OVER


def _string_of(value: str) -> str | None:
    try:
        return msgspec.json.decode(value.strip(), type=str)
    except msgspec.DecodeError:
        return None
