"""`flowkv bench structured`: what a form of the answers costs decode.

The same prompts are answered freely and held to a JSON schema, in turns within one run, so that
what else the machine does meets both alike; who goes first changes too. As in `flowkv bench engine`
a repetition times a call for one new token a prompt and one for `new_tokens`, and decode is the
difference. The schema is of a list so long that no answer ends by itself.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from statistics import median
from typing import TYPE_CHECKING, Any

from flowkv_jax.errors import ServerError
from flowkv_jax.sampling_params import SamplingParams
from flowkv_jax.structured_outputs import StructuredOutputs

if TYPE_CHECKING:
    from flowkv_jax.engine.engine import Engine

_MIN_ITEMS = 1000
SCHEMA: Mapping[str, Any] = {
    "type": "array",
    "minItems": _MIN_ITEMS,
    "items": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 30},
            "age": {"type": "integer", "minimum": 0, "maximum": 120},
            "role": {"enum": ["admin", "author", "reader"]},
            "tags": {"type": "array", "items": {"type": "string", "maxLength": 12}, "maxItems": 3},
        },
        "required": ["name", "age", "role", "tags"],
        "additionalProperties": False,
    },
}


def run_structured_benchmark(
    engine: Engine,
    *,
    batch: int,
    new_tokens: int,
    repeat: int,
    clock: Callable[[], float] = time.perf_counter,
) -> list[dict[str, Any]]:
    """Decode speed of free answers, then of answers held to `SCHEMA`: medians, and what is lost.

    `slower_percent` is the median over repetitions of the two times of one repetition.

    Raises:
        ValueError: a number is too small.
        ServerError: an answer had another number of tokens than asked for.
    """
    for name, value, low in (("batch", batch, 1), ("new_tokens", new_tokens, 2)):
        if value < low:
            raise ValueError(f"{name}={value} must be at least {low}")
    if repeat < 1:
        raise ValueError(f"{repeat=} must be at least 1")
    prompts = [f"The users of team {number}, as a JSON list:\n" for number in range(batch)]
    forms = (None, StructuredOutputs(json=SCHEMA))
    for form in forms:  # two tokens compile every shape
        _generate(engine, prompts, form, 2)
    times_s: dict[int, list[float]] = {0: [], 1: []}
    for repetition in range(repeat):
        for which in (0, 1) if repetition % 2 == 0 else (1, 0):
            start = clock()
            _generate(engine, prompts, forms[which], 1)
            middle = clock()
            _generate(engine, prompts, forms[which], new_tokens)
            end = clock()
            times_s[which].append(max((end - middle) - (middle - start), 1e-9))
    slower = median(held / free for free, held in zip(times_s[0], times_s[1], strict=True)) - 1
    rows = []
    for which, answers, lost in ((0, "free", 0.0), (1, "json schema", slower)):
        step_s = median(times_s[which]) / (new_tokens - 1)
        rows.append(
            {
                "answers": answers,
                "batch": batch,
                "new_tokens": new_tokens,
                "decode_tok_s": batch / step_s,
                "ms_per_step": 1e3 * step_s,
                "slower_percent": 100 * lost,
            }
        )
    return rows


def _generate(
    engine: Engine, prompts: list[str], form: StructuredOutputs | None, num_tokens: int
) -> None:
    params = SamplingParams(
        temperature=0.0,
        max_tokens=num_tokens,
        ignore_eos=form is None,
        structured_outputs=form,
        detokenize=False,
    )
    lengths = {len(output.outputs[0].token_ids) for output in engine.generate(prompts, params)}
    if lengths != {num_tokens}:
        raise ServerError(f"asked for {num_tokens} tokens a prompt, got {sorted(lengths)}")
