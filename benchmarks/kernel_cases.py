"""What is timed: kernels on pools of real models, and how much work each has.

A case is a program and its inputs. A program does its operation many times in one call, in a chain:
attention's output is the next attention's queries, a written pool is the next one to write to.
Each time it takes another layer (or other blocks), as a model does, so that what a level-2 cache
holds of the last time is of no use; only a kv_write of few tokens is too small to leave the cache,
and shows what a launch costs. Nothing is made of zeros.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import block_copy, kv_write
from pallas_kernels.kv_layout import LAYER_MAJOR_AXES, POOL_AXES, KVLayout
from pallas_kernels.paged_attention import gpu, hopper, xla

DTYPE = "bfloat16"
LAYOUTS = {"block-major": POOL_AXES, "layer-major": LAYER_MAJOR_AXES}
_CACHE_BYTES = 256 << 20
"""Inputs that are used in turn are more than this together: several level-2 caches."""
_CHAIN_BYTES = 3 << 30
"""Moved by a program: about a millisecond of the fastest memory."""
_HOST_ELEMENTS = 1 << 20
"""Random arrays of no more are made on the host."""
_XLA_CHAIN = 2
"""Attention without a kernel loops on the host's command, and takes its time."""


@dataclass(frozen=True)
class Model:
    """The cache of a model, or of one tensor-parallel shard of it.

    Attributes:
        name: for people.
        layout: shape of a block.
        num_heads: N, query heads.
    """

    name: str
    layout: KVLayout
    num_heads: int

    @property
    def row_bytes(self) -> int:
        """K and V of one token in one layer."""
        return self.layout.bytes_per_token // self.layout.num_layers

    def pool_shape(self, num_blocks: int, axes: str) -> tuple[int, ...]:
        shape = self.layout.pool_shape(num_blocks)
        return tuple(shape[POOL_AXES.index(axis)] for axis in axes)


def _model(name: str, layers: int, heads: int, kv_heads: int, head_dim: int) -> Model:
    return Model(name, KVLayout(layers, 16, kv_heads, head_dim, DTYPE, 2), heads)


LLAMA_8B = _model("Llama-3.1-8B", 32, 32, 8, 128)
LLAMA_70B_TP4 = _model("Llama-3.1-70B/TP4", 80, 16, 2, 128)
TINY = _model("tiny", 2, 4, 2, 64)


@dataclass(frozen=True)
class Sizes:
    """How large the cases are.

    Attributes:
        models: what is served.
        decode_implementations: what decodes.
        decode: (rows, cached tokens of a row).
        prefill: (rows, query tokens, cached tokens with these).
        write_tokens: tokens of a kv_write.
        run_blocks: blocks of a copy.
        copies: copies in a program.
        longest_chain: operations in any other program, at most.
        split_rows, split_tokens, splits: rows, cached tokens and shares of the context of the
            table of splits.
        most_pool_bytes: the pool is no larger.
    """

    models: tuple[Model, ...]
    decode_implementations: tuple[str, ...]
    decode: tuple[tuple[int, int], ...]
    prefill: tuple[tuple[int, int, int], ...]
    write_tokens: tuple[int, ...]
    run_blocks: int
    copies: int
    longest_chain: int
    split_rows: tuple[int, ...]
    split_tokens: tuple[int, ...]
    splits: tuple[int | None, ...]
    most_pool_bytes: int


FULL = Sizes(
    models=(LLAMA_8B, LLAMA_70B_TP4),
    decode_implementations=("gpu", "hopper", "xla"),
    decode=((64, 2048), (8, 8192)),
    prefill=((4, 512, 4096), (1, 2048, 2048)),
    write_tokens=(64, 4096),
    run_blocks=64,
    copies=8,
    longest_chain=32,
    split_rows=(1, 8),
    split_tokens=(4096, 16384, 32768),
    splits=(1, 2, 4, 8, 16, None),
    most_pool_bytes=34 << 30,
)
QUICK = Sizes(
    models=(LLAMA_8B,),
    decode_implementations=("gpu", "hopper", "xla"),
    decode=((64, 2048),),
    prefill=((4, 512, 4096),),
    write_tokens=(64,),
    run_blocks=64,
    copies=4,
    longest_chain=32,
    split_rows=(1,),
    split_tokens=(4096,),
    splits=(1, 8, None),
    most_pool_bytes=17 << 30,
)
SMALLEST = Sizes(
    models=(TINY,),
    # The interpreter of the Hopper kernel takes a tenth of a second for a call.
    decode_implementations=("gpu", "xla"),
    decode=((2, 48),),
    prefill=((2, 16, 40),),
    write_tokens=(3,),
    run_blocks=2,
    copies=2,
    longest_chain=2,
    split_rows=(1,),
    split_tokens=(64,),
    splits=(2,),
    most_pool_bytes=32 * TINY.layout.bytes_per_block,
)
"""For a machine without a GPU: to see that everything runs."""


@dataclass(eq=False)
class Program:
    """A jitted function of a pool and other arrays, compiled when asked to.

    Attributes:
        function: takes the pool, then the arrays.
        shapes: of these arguments.
        donates: whether it takes the pool and returns it.
        operations: how often it does what it is measured for.
    """

    function: Callable[..., Any]
    shapes: tuple[Any, ...]
    donates: bool
    operations: int
    jitted: Any = field(init=False)

    def __post_init__(self) -> None:
        self.jitted = jax.jit(self.function, donate_argnums=0 if self.donates else ())

    def compile(self) -> None:
        """Later calls of `jitted` with such arguments do not compile again."""
        self.jitted.lower(*self.shapes).compile()


@dataclass(frozen=True)
class Case:
    """One measurement.

    Attributes:
        name: kernel and sizes, the same for all implementations and layouts.
        model, layout: of the pool; `layout` is a name from `LAYOUTS`.
        implementation: "gpu" (Pallas through Triton), "hopper" (through Mosaic), or "xla".
        num_splits: shares of the context; None where the kernel chooses or has none.
        table: "kernels" or "splits", where the result is shown.
        program: what to call.
        num_blocks: that the pool must have.
        make_inputs: the program's arrays but for the pool, from a generator of the host.
        bytes: of device memory that one operation must read and write.
        flops: that one operation must do.
    """

    name: str
    model: Model
    layout: str
    implementation: str
    num_splits: int | None
    table: str
    program: Program
    num_blocks: int
    make_inputs: Callable[[np.random.Generator], tuple[Any, ...]]
    bytes: int
    flops: int

    @property
    def title(self) -> str:
        """Names the case among all."""
        splits = f" splits={self.num_splits or 'auto'}" if self.table == "splits" else ""
        return f"{self.model.name} {self.layout} {self.name} {self.implementation}{splits}"


@dataclass(frozen=True)
class CaseMaker:
    """Cases on one pool.

    Attributes:
        interpret: see `pallas_kernels.triton.kernel_call`.
    """

    model: Model
    layout: str
    num_blocks: int
    sizes: Sizes
    interpret: bool | None = None

    @property
    def axes(self) -> str:
        return LAYOUTS[self.layout]

    @property
    def pool(self) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(self.model.pool_shape(self.num_blocks, self.axes), DTYPE)

    def _chain_length(self, moved_bytes: int) -> int:
        return min(self.sizes.longest_chain, max(4, _CHAIN_BYTES // moved_bytes))

    def kernels(self) -> Iterator[Case]:
        """Every kernel, and the same without Pallas."""
        for implementation in self.sizes.decode_implementations:
            if implementation == "hopper" and self.layout != "block-major":
                continue
            for rows, tokens in self.sizes.decode:
                yield from self._attention(implementation, rows, 1, [tokens])
        for implementation in ("gpu", "xla"):
            for rows, queries, tokens in self.sizes.prefill:
                yield from self._attention(implementation, rows, queries, [tokens])
            for tokens in self.sizes.write_tokens:
                yield self._write(implementation, tokens)
            for kernel in ("slice_run", "put_run", "gather_blocks", "scatter_blocks"):
                yield self._copy(implementation, kernel)

    def splits(self) -> Iterator[Case]:
        """Decode with few rows and long contexts, by shares of the context; block-major only."""
        if self.layout != "block-major":
            return
        for implementation in self.sizes.decode_implementations:
            if implementation == "xla":
                continue
            for rows in self.sizes.split_rows:
                for num_splits in self.sizes.splits:
                    yield from self._attention(
                        implementation, rows, 1, self.sizes.split_tokens, "splits", num_splits
                    )

    def _attention(
        self,
        implementation: str,
        rows: int,
        queries: int,
        contexts: Any,
        table: str = "kernels",
        num_splits: int | None = None,
    ) -> Iterator[Case]:
        """A case for each context, all of one program: length is no shape."""
        layout, heads = self.model.layout, self.model.num_heads
        table_width = layout.blocks_for(max(contexts))
        queries_bytes = 2 * rows * queries * heads * layout.head_dim * 2
        least_bytes = rows * min(contexts) * self.model.row_bytes + queries_bytes
        options: dict[str, Any] = {} if implementation == "hopper" else {"axes": self.axes}
        if implementation != "xla":
            options["interpret"] = self.interpret
            if queries == 1:
                options["num_splits"] = num_splits
        operations = _XLA_CHAIN if implementation == "xla" else self._chain_length(least_bytes)
        ints = partial(jax.ShapeDtypeStruct, dtype=jnp.int32)
        shapes = (
            jax.ShapeDtypeStruct((rows, queries, heads, layout.head_dim), DTYPE),
            ints((rows, table_width)),
            ints((rows,)),
            ints((rows,)),
        )
        program = Program(
            _attention_chain(implementation, options, layout, operations),
            (self.pool, *shapes),
            donates=False,
            operations=operations,
        )
        for tokens in contexts:
            # Query t of a row sees all that is cached but what comes after it.
            seen = rows * sum(tokens - queries + t + 1 for t in range(queries))
            yield Case(
                f"decode {rows} x {tokens}"
                if queries == 1
                else f"prefill {rows} x {queries} of {tokens}",
                self.model,
                self.layout,
                implementation,
                num_splits,
                table,
                program,
                rows * layout.blocks_for(tokens),
                partial(_attention_inputs, shapes, self.num_blocks, layout.block_size, tokens),
                bytes=rows * tokens * self.model.row_bytes + queries_bytes,
                flops=4 * heads * layout.head_dim * seen,
            )

    def _write(self, implementation: str, tokens: int) -> Case:
        layout = self.model.layout
        moved_bytes = 2 * tokens * self.model.row_bytes
        operations = self._chain_length(moved_bytes)
        new = jax.ShapeDtypeStruct((tokens, layout.num_kv_heads, layout.head_dim), DTYPE)
        pairs = min(operations, 1 + 2 * _CACHE_BYTES // moved_bytes)
        slots = jax.ShapeDtypeStruct((tokens,), jnp.int32)
        shapes = (slots, ((new, new),) * pairs)

        options: Any = {
            "implementation": implementation,
            "axes": self.axes,
            "interpret": self.interpret,
        }

        def write(kv: Any, layer: Any, pair: Any, slots: Any) -> Any:
            k, v = pair
            return kv_write.kv_write(kv, layer, k, v, slots, **options)

        step = jax.jit(write)

        def chain(kv: Any, slots: Any, news: Any) -> Any:
            for index in range(operations):
                layer = jnp.int32(index % layout.num_layers)
                kv = step(kv, layer, news[index % len(news)], slots)
            return kv

        return Case(
            f"kv_write {tokens}",
            self.model,
            self.layout,
            implementation,
            None,
            "kernels",
            Program(chain, (self.pool, *shapes), donates=True, operations=operations),
            layout.blocks_for(tokens),
            partial(_write_inputs, shapes, self.num_blocks * layout.block_size),
            bytes=moved_bytes,
            flops=0,
        )

    def _copy(self, implementation: str, kernel: str) -> Case:
        count, copies = self.sizes.run_blocks, self.sizes.copies
        is_run, takes_out = "run" in kernel, kernel in ("slice_run", "gather_blocks")
        options: dict[str, Any] = {
            "implementation": implementation,
            "axes": self.axes,
            "interpret": self.interpret,
        }
        if kernel == "slice_run":
            options["num_blocks"] = count
        place = jax.ShapeDtypeStruct(() if is_run else (count,), jnp.int32)
        new = jax.ShapeDtypeStruct(self.model.pool_shape(count, self.axes), DTYPE)
        shapes: tuple[Any, ...] = ((place,) * copies, () if takes_out else (new,) * 2)
        step = jax.jit(lambda *arrays: getattr(block_copy, kernel)(*arrays, **options))

        def take_out(kv: Any, places: Any, _: Any) -> Any:
            return [step(kv, place) for place in places]

        def put_back(kv: Any, places: Any, news: Any) -> Any:
            for index, place in enumerate(places):
                kv = step(kv, news[index % len(news)], place)
            return kv

        return Case(
            f"{kernel} {count}",
            self.model,
            self.layout,
            implementation,
            None,
            "kernels",
            Program(
                take_out if takes_out else put_back,
                (self.pool, *shapes),
                donates=not takes_out,
                operations=copies,
            ),
            count,
            partial(_copy_inputs, shapes, self.num_blocks, count),
            bytes=2 * count * self.model.layout.bytes_per_block,
            flops=0,
        )


def _attention_chain(
    implementation: str, options: dict[str, Any], layout: KVLayout, operations: int
) -> Callable[..., Any]:
    modules: dict[str, Any] = {"gpu": gpu, "hopper": hopper, "xla": xla}
    scale = layout.head_dim**-0.5

    # One function for all layers: it is traced and lowered once.
    @jax.jit
    def attend(q: Any, kv: Any, layer: Any, *rows: Any) -> Any:
        return modules[implementation].paged_attention(q, kv, layer, *rows, scale, **options)

    def chain(kv: Any, q: Any, *rows: Any) -> Any:
        for index in range(operations):
            q = attend(q, kv, jnp.int32(index % layout.num_layers), *rows)
        return q

    return chain


def _random(shape: Any, rng: np.random.Generator) -> jax.Array:
    """Made on the host if small, because nothing is compiled there."""
    if math.prod(shape.shape) <= _HOST_ELEMENTS:
        return jnp.asarray(rng.standard_normal(shape.shape, np.float32).astype(shape.dtype))
    key = jax.random.key(int(rng.integers(2**31)))
    return jax.random.normal(key, shape.shape, shape.dtype)


def _attention_inputs(
    shapes: Any, num_blocks: int, block_size: int, tokens: int, rng: np.random.Generator
) -> tuple[Any, ...]:
    """Rows of distinct blocks in random places; queries are the last of `tokens` tokens."""
    rows, queries = shapes[0].shape[:2]
    used = -(-tokens // block_size)
    tables = np.zeros(shapes[1].shape, np.int32)
    tables[:, :used] = rng.permutation(num_blocks)[: rows * used].reshape(rows, used)
    lens = np.full(rows, tokens, np.int32)
    return tuple(map(jnp.asarray, (_random(shapes[0], rng), tables, lens, lens - queries)))


def _write_inputs(shapes: Any, num_slots: int, rng: np.random.Generator) -> tuple[Any, ...]:
    slots, pairs = shapes
    chosen = rng.choice(num_slots, slots.shape[0], replace=False).astype(np.int32)
    news = tuple((_random(k, rng), _random(v, rng)) for k, v in pairs)
    return jnp.asarray(chosen), news


def _copy_inputs(
    shapes: Any, num_blocks: int, count: int, rng: np.random.Generator
) -> tuple[Any, ...]:
    """Runs or ids that do not overlap, as far as the pool goes."""
    places, news = shapes
    starts = rng.permutation(num_blocks // count)[: len(places)] * count
    ids = rng.permutation(num_blocks).astype(np.int32)
    chosen = []
    for index, place in enumerate(places):
        if place.shape:
            chosen.append(jnp.asarray(np.roll(ids, -index * count)[:count]))
        else:
            chosen.append(jnp.int32(starts[index % len(starts)]))
    return tuple(chosen), tuple(_random(new, rng) for new in news)
