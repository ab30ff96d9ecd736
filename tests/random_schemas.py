"""Random JSON schemas whose every answer ends: strings, lists and numbers are bounded."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

Schema = dict[str, Any]

_WORDS = ("name", "age", "id", "a b", "ä", "x/y", "items", "on", "when", 'quo"te')
_VALUES = ("red", "green", "", "a\nb", 'say "hi"', "é🙂", 0, -7, 3.25, True, None)


def random_schema(seed: int) -> Schema:
    """The same for the same seed; some name their parts and refer to them."""
    generator = random.Random(seed)
    schema = _schema(generator, 3)
    if generator.random() < 0.3:
        names = ("part", "other")
        schema = {
            "$defs": {name: _schema(generator, 1) for name in names},
            "type": "object",
            "properties": {
                "first": {"$ref": "#/$defs/part"},
                "second": {"anyOf": [{"$ref": "#/$defs/other"}, {"type": "null"}]},
                "third": {"type": "array", "items": {"$ref": "#/$defs/part"}, "maxItems": 2},
            },
            "required": ["first", "third"],
            "additionalProperties": False,
        }
    return schema


def _schema(generator: random.Random, depth: int) -> Schema:
    kinds: list[Callable[[random.Random], Schema]] = [_string, _integer, _number, _enum, _const]
    if depth and generator.random() < 0.8:
        return generator.choice((_object, _object, _array, _any_of))(generator, depth)
    return generator.choice(kinds)(generator)


def _string(generator: random.Random) -> Schema:
    if generator.random() < 0.25:
        patterns = ("^[a-f0-9]{4}$", "^(ab|cd)+e?$", "^[A-Z][a-z]{0,5}$", "^\\d{2}:\\d{2}$")
        return {"type": "string", "pattern": generator.choice(patterns), "maxLength": 9}
    low = generator.randint(0, 3)
    return {"type": "string", "minLength": low, "maxLength": low + generator.randint(0, 6)}


def _integer(generator: random.Random) -> Schema:
    low = generator.randint(-1000, 1000)
    return {"type": "integer", "minimum": low, "maximum": low + generator.randint(0, 5000)}


def _number(generator: random.Random) -> Schema:
    low = generator.randint(-50, 50)
    bound = generator.choice(("maximum", "exclusiveMaximum"))
    return {"type": "number", "minimum": low, bound: low + generator.randint(1, 90)}


def _enum(generator: random.Random) -> Schema:
    return {"enum": generator.sample(_VALUES, generator.randint(1, 4))}


def _const(generator: random.Random) -> Schema:
    return generator.choice(
        ({"const": generator.choice(_VALUES)}, {"type": "boolean"}, {"type": "null"})
    )


def _object(generator: random.Random, depth: int) -> Schema:
    names = generator.sample(_WORDS, generator.randint(0, 4))
    return {
        "type": "object",
        "properties": {name: _schema(generator, depth - 1) for name in names},
        "required": [name for name in names if generator.random() < 0.6],
        "additionalProperties": False,
    }


def _array(generator: random.Random, depth: int) -> Schema:
    low = generator.randint(0, 2)
    items = _schema(generator, depth - 1)
    return {
        "type": "array",
        "items": items,
        "minItems": low,
        "maxItems": low + generator.randint(0, 2),
    }


def _any_of(generator: random.Random, depth: int) -> Schema:
    return {"anyOf": [_schema(generator, depth - 1) for _ in range(generator.randint(2, 3))]}
