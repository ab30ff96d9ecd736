"""200 random JSON schemas over HTTP: every answer of the real model is valid under its schema.

Schemas are bounded (strings, arrays, depth), so that a whole answer fits `max_tokens` however the
model goes on: an answer cut off by length has failed too.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import jsonschema
from checklist import num_unfinished, require, run_checks, surroundings, wait_until

SEED = 20261130
NUM_SCHEMAS = 200
CONCURRENCY = 8
MAX_TOKENS = 700
MAX_DEPTH = 3
WORDS = ("name", "age", "city", "tags", "size", "kind", "note", "when", "ok", "id", "größe", 'a"b')

Schema = dict[str, Any]


def _string(draw: random.Random, depth: int) -> Schema:
    schema: Schema = {"type": "string", "maxLength": draw.randint(1, 12)}
    if draw.random() < 0.4:
        schema["minLength"] = draw.randint(0, schema["maxLength"])
    return schema


def _pattern(draw: random.Random, depth: int) -> Schema:
    patterns = ("^[a-z]{2,6}$", "^[0-9]{3}-[0-9]{2}$", "^(yes|no|perhaps)$", r"^v\d\.\d{1,2}$")
    return {"type": "string", "pattern": draw.choice(patterns)}


def _format(draw: random.Random, depth: int) -> Schema:
    # Not "time" and "date-time": a fraction of a second may have digits without end.
    return {"type": "string", "format": draw.choice(("date", "uuid", "ipv4"))}


def _integer(draw: random.Random, depth: int) -> Schema:
    low = draw.choice((-1000, -7, 0, 1, 3))
    return {"type": "integer", "minimum": low, "maximum": low + draw.choice((0, 1, 9, 5000))}


def _exclusive(draw: random.Random, depth: int) -> Schema:
    low = draw.randint(-20, 20)
    return {"type": "integer", "exclusiveMinimum": low, "exclusiveMaximum": low + 10}


def _scalar(draw: random.Random, depth: int) -> Schema:
    return {"type": draw.choice(("boolean", "null"))}


def _fixed(draw: random.Random, depth: int) -> Schema:
    values: list[Any] = ["red", "blue", 7, -2.5, True, None, "ü €", "", {"a": 1}, [1, 2]]
    if draw.random() < 0.3:
        return {"const": draw.choice(values)}
    return {"enum": draw.sample(values, draw.randint(1, 5))}


def _array(draw: random.Random, depth: int) -> Schema:
    low = draw.randint(0, 2)
    return {
        "type": "array",
        "items": _any(draw, depth + 1),
        "minItems": low,
        "maxItems": low + draw.randint(0, 2),
    }


def _tuple(draw: random.Random, depth: int) -> Schema:
    items = [_any(draw, depth + 1) for _ in range(draw.randint(1, 3))]
    return {"type": "array", "prefixItems": items, "items": False, "minItems": len(items)}


def _object(draw: random.Random, depth: int) -> Schema:
    names = draw.sample(WORDS, draw.randint(1, 4))
    return {
        "type": "object",
        "properties": {name: _any(draw, depth + 1) for name in names},
        "required": [name for name in names if draw.random() < 0.7],
        "additionalProperties": False,
    }


def _either(draw: random.Random, depth: int) -> Schema:
    return {"anyOf": [_any(draw, depth + 1) for _ in range(draw.randint(2, 3))]}


def _referring(draw: random.Random, depth: int) -> Schema:
    names = draw.sample(WORDS, 2)
    return {
        "type": "object",
        "properties": {name: {"$ref": "#/$defs/part"} for name in names},
        "required": names,
        "additionalProperties": False,
        "$defs": {"part": _object(draw, MAX_DEPTH)},
    }


LEAVES: tuple[Callable[[random.Random, int], Schema], ...] = (
    *(_string, _pattern, _format, _integer, _exclusive, _scalar, _fixed),
)
INNER = (_array, _tuple, _object, _object, _either)


def _any(draw: random.Random, depth: int) -> Schema:
    kinds = LEAVES if depth >= MAX_DEPTH else (*LEAVES, *INNER)
    return draw.choice(kinds)(draw, depth)


def random_schema(number: int) -> Schema:
    """The schema of this number: the same in every run."""
    draw = random.Random(f"{SEED}-{number}")
    return draw.choice((_object, _object, _array, _either, _referring))(draw, 0)


def _ask(client: httpx.Client, number: int) -> str | None:
    """What is wrong with the answer, or None."""
    schema = random_schema(number)
    jsonschema.Draft202012Validator.check_schema(schema)
    body = {
        "model": surroundings.model,
        "messages": [{"role": "user", "content": f"Make up example data, number {number}."}],
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": f"schema_{number}", "schema": schema, "strict": True},
        },
        "max_tokens": MAX_TOKENS,
        "temperature": (0.0, 0.8, 1.2)[number % 3],
        "seed": number,
        "stream": number % 4 == 3,
    }
    response = client.post("/v1/chat/completions", json=body)
    if response.status_code != 200:
        return f"status {response.status_code}: {response.text[:300]}"
    text, reason = _content(response, streamed=body["stream"])
    if reason != "stop":
        return f"finished by {reason!r} after {text[-80:]!r}"
    try:
        jsonschema.validate(
            json.loads(text), schema, format_checker=jsonschema.FormatChecker(("date", "ipv4"))
        )
    except (ValueError, jsonschema.ValidationError) as error:
        return f"{str(error).splitlines()[0]} in {text[:200]!r}"
    return None


def _content(response: httpx.Response, *, streamed: bool) -> tuple[str, str | None]:
    if not streamed:
        choice = response.json()["choices"][0]
        return choice["message"]["content"], choice["finish_reason"]
    text, reason = "", None
    for line in response.text.splitlines():
        if line.startswith("data: {"):
            for choice in json.loads(line[6:])["choices"]:
                text += choice["delta"].get("content") or ""
                reason = choice["finish_reason"] or reason
    return text, reason


def check_every_answer_validates() -> None:
    with (
        httpx.Client(base_url=surroundings.http, timeout=300) as client,
        ThreadPoolExecutor(CONCURRENCY) as pool,
    ):
        answers = list(pool.map(lambda number: _ask(client, number), range(NUM_SCHEMAS)))
    wrong = {number: answer for number, answer in enumerate(answers) if answer is not None}
    for number, answer in wrong.items():
        print(f"schema {number}: {json.dumps(random_schema(number))}\n    {answer}")
    first = next(iter(wrong.items()), None)
    require(not wrong, f"{len(wrong)} of {NUM_SCHEMAS} answers; the first: {first}")


def check_one_bad_schema_fails_alone() -> None:
    good = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
    schemas = [good, {"type": "object", "properties": 3}, good, {"type": "strnig"}, good]
    with httpx.Client(base_url=surroundings.http, timeout=60) as client:

        def ask(schema: Schema) -> int:
            form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
            body = {
                "model": surroundings.model,
                "messages": [{"role": "user", "content": "Make up data."}],
                "response_format": form,
                "max_tokens": 50,
            }
            return client.post("/v1/chat/completions", json=body).status_code

        with ThreadPoolExecutor(5) as pool:
            statuses = list(pool.map(ask, schemas))
    require(statuses == [200, 400, 200, 400, 200], f"statuses: {statuses}")


def check_nothing_is_left_behind() -> None:
    wait_until(lambda: num_unfinished(surroundings.http) == 0, "nothing runs or waits")


if __name__ == "__main__":
    run_checks(__name__)
