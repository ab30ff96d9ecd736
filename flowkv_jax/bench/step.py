"""`flowkv bench step`: where the device's time in a step goes, by leaving parts out.

A step is compiled whole, without attention, and with nothing but its matrix products; the three run
in turns, so that what else the machine does meets them alike. Differences of their medians are the
parts. The last part, sampling, is a program of its own and is timed as such. What the host does in
a step runs beside the device and is in `flowkv bench engine`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from statistics import median
from time import perf_counter
from typing import Any
from unittest.mock import patch

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from flowkv_jax.config import EngineConfig
from flowkv_jax.engine.build import resolve_attention, resolve_dtype
from flowkv_jax.engine.programs import Programs
from flowkv_jax.engine.sampling_batch import SamplingBatcher
from flowkv_jax.engine.sampling_state import SamplingState
from flowkv_jax.kv_cache.pool import KVPool
from flowkv_jax.models import layers, llama
from flowkv_jax.models.llama import Llama, StepInputs
from flowkv_jax.models.source import open_model
from flowkv_jax.models.weights import load_weights
from flowkv_jax.sampling_params import SamplingParams
from pallas_kernels.kv_layout import KVLayout

WHOLE, NO_ATTENTION, PRODUCTS = "whole", "without attention", "products"
_WARM_UP = 2


@dataclass(frozen=True)
class StepShape:
    """`rows` rows of `queries` tokens each, the last of them at position `context` - 1.

    In prefill the rows are consecutive tiles of one prompt, which ends at `context`.
    """

    rows: int
    queries: int
    context: int

    def __post_init__(self) -> None:
        for name in ("rows", "queries", "context"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        if self.is_prefill and self.context < self.rows * self.queries:
            raise ValueError(
                f"context={self.context} is below the {self.rows * self.queries} tokens computed"
            )

    @property
    def is_prefill(self) -> bool:
        return self.queries > 1

    def inputs(self, block_size: int) -> StepInputs:
        """Its arrays, over blocks that lie one after the other."""
        width = -(-self.context // block_size)
        tables = np.tile(np.arange(width, dtype=np.int32), (self.rows, 1))
        ends = np.full(self.rows, self.context, np.int32)
        if self.is_prefill:
            ends -= self.queries * np.arange(self.rows - 1, -1, -1, dtype=np.int32)
        else:
            tables += width * np.arange(self.rows, dtype=np.int32)[:, None]
        tokens = np.ones((self.rows, self.queries), np.int32)
        return StepInputs(*map(jnp.asarray, (tokens, ends - self.queries, ends, tables)))

    def num_blocks(self, block_size: int) -> int:
        width = -(-self.context // block_size)
        return width if self.is_prefill else width * self.rows


def run_step_benchmark(
    config: EngineConfig, shapes: Sequence[StepShape], *, repeat: int = 9
) -> list[dict[str, Any]]:
    """Time the parts of a step in each shape.

    Args:
        repeat: rounds; medians are reported.

    Returns:
        For each shape: its sizes, `*_ms` of the parts, `step_ms`, and `attention_share` of it.

    Raises:
        ValueError: `repeat` is below 1.
    """
    if repeat < 1:
        raise ValueError(f"{repeat=} must be at least 1")
    with open_model(config.model.model) as source:
        model = source.config
        is_cpu = jax.default_backend() == "cpu"
        dtype = jnp.dtype(resolve_dtype(config.model.dtype, is_cpu=is_cpu))
        attention = resolve_attention(config, model, dtype.name)
        weights = load_weights(nnx.eval_shape(lambda: Llama(model, dtype)), model, source)
    layout = KVLayout(
        num_layers=model.num_layers,
        block_size=config.cache.block_size,
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        dtype=dtype.name,
        dtype_bytes=dtype.itemsize,
    )

    def programs(variant: str) -> Programs:
        # Layers are traced once for each name of an implementation, and so for each variant.
        name = attention if variant == WHOLE else variant
        abstract = nnx.eval_shape(
            lambda: Llama(
                model,
                dtype,
                activation_dtype=jnp.dtype("float32") if is_cpu else None,
                attention=name,  # type: ignore[arg-type]
            )
        )
        return Programs(abstract, weights, layout.block_size)

    measured = [_measure(programs, layout, shape, model.vocab_size, repeat) for shape in shapes]
    return [{"attention_implementation": attention, "dtype": dtype.name} | m for m in measured]


def _forward(
    program: Programs, inputs: tuple[Any, ...], kv_PL2ZKH: jax.Array
) -> tuple[jax.Array, jax.Array]:
    return program.forward(kv_PL2ZKH, *inputs)


def _measure(
    programs: Callable[[str], Programs],
    layout: KVLayout,
    shape: StepShape,
    vocab_size: int,
    repeat: int,
) -> dict[str, Any]:
    pool = KVPool(layout, shape.num_blocks(layout.block_size), 0)
    inputs = (
        shape.inputs(layout.block_size),
        jnp.zeros(shape.rows, jnp.int32),
        np.zeros(shape.rows, np.int32),
    )
    variants = {name: programs(name) for name in (WHOLE, NO_ATTENTION, PRODUCTS)}
    sample = _sampler(variants[WHOLE], shape, vocab_size)
    times_s: dict[str, list[float]] = {name: [] for name in (*variants, "sampling")}
    for turn in range(_WARM_UP + repeat):
        for name, program in variants.items():
            # Only the first turn traces, and so sees what is left out.
            with _left_out(name, fresh=turn == 0):
                started = perf_counter()
                hidden_XD = pool.update(partial(_forward, program, inputs))
                hidden_XD.block_until_ready()
                times_s[name].append(perf_counter() - started)
            if name == WHOLE:
                started = perf_counter()
                sample(hidden_XD).block_until_ready()
                times_s["sampling"].append(perf_counter() - started)
    ms = {name: 1e3 * median(times[_WARM_UP:]) for name, times in times_s.items()}
    step_ms = ms[WHOLE] + ms["sampling"]
    return {
        "rows": shape.rows,
        "queries": shape.queries,
        "context": shape.context,
        "step_ms": step_ms,
        "attention_ms": ms[WHOLE] - ms[NO_ATTENTION],
        "products_ms": ms[PRODUCTS],
        "other_layers_ms": ms[NO_ATTENTION] - ms[PRODUCTS],
        "head_and_sampling_ms": ms["sampling"],
        "attention_share": (ms[WHOLE] - ms[NO_ATTENTION]) / step_ms,
    }


def _sampler(
    program: Programs, shape: StepShape, vocab_size: int
) -> Callable[[jax.Array], jax.Array]:
    """Output head and greedy sampling of one token a row (of the prompt's last row in prefill)."""
    state = SamplingState(
        SamplingParams(temperature=0.0), token_ids=(), num_prompt_tokens=0, seed=0
    )
    sampling, flags = SamplingBatcher(vocab_size).build(
        [state] * shape.rows, [shape.context] * shape.rows, shape.rows
    )
    offsets = np.full(shape.rows, shape.queries - 1, np.int32)
    slots = np.arange(shape.rows, dtype=np.int32)

    def sample(hidden_XD: jax.Array) -> jax.Array:
        tokens_S = jnp.zeros(shape.rows, jnp.int32)
        return program.sample(hidden_XD, offsets, tokens_S, slots, sampling, flags)[1]

    return sample


@contextmanager
def _left_out(name: str, *, fresh: bool) -> Iterator[None]:
    """Trace layers without the parts that variant `name` leaves out."""
    if not fresh:
        yield
        return
    with ExitStack() as replaced:
        for owner, attribute, stand_in in _REPLACEMENTS[name]:
            replaced.enter_context(patch.object(owner, attribute, stand_in))
        yield


def _no_attention(q_RTNH: jax.Array, *_: Any, **__: Any) -> jax.Array:
    return q_RTNH


_NO_ATTENTION = (llama, "paged_attention", _no_attention)
_REPLACEMENTS: dict[str, tuple[tuple[Any, str, Callable[..., Any]], ...]] = {
    WHOLE: (),
    NO_ATTENTION: (_NO_ATTENTION,),
    PRODUCTS: (
        _NO_ATTENTION,
        (llama, "kv_write", lambda kv_PL2ZKH, *_, **__: kv_PL2ZKH),
        (llama, "rotate", lambda x_XNH, *_: x_XNH),
        (layers.RMSNorm, "__call__", lambda _, x_XD: x_XD),
    ),
}
