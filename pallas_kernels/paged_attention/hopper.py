"""Decode attention for Hopper, in Pallas' Mosaic GPU backend: asynchronous copies, online softmax.

A program (a warpgroup of 128 threads) serves some query heads of one KV head of one row, over one
share of the row's context. The protocol:

- A *chunk* is a few blocks, keys and values of one KV head. The TMA unit copies each of its blocks,
  [2, Z, H], straight from the pool into a *stage* of shared memory and arrives on that stage's
  barrier; `chunk_blocks` arrivals mean that the stage is full. The first chunks are asked for all
  at once. Then each turn waits for its stage, uses it up, and asks for the chunk `stages` turns
  ahead to be put there. Before that the 128 threads meet at a fence between their own accesses
  and those of the TMA unit (`commit_smem`), so none of them still reads what is overwritten.
- Table entries past a row's last block are never read: a last chunk that is not full repeats the
  last block, whose positions are then masked. So every stage gets the same number of arrivals.
- A stage is used a *tile* of tokens at a time, and every token slot of a tile keeps an online
  softmax of its own over the tokens that pass through it. No turn exchanges anything between
  warps; slots are merged once, at the end. Shares of the context are merged in the same way
  outside the kernel (`partial_softmax.merge`).
- Products are made in registers, in float32. Decode uses a cached element for a handful of heads
  and is bound by memory; as a product of tensor cores its queries would be padded to 64 rows.
- What lies past a row's end may be anything, NaN too. So scores and values there are replaced:
  a weight of zero would not be enough.

No flat offset is formed. A copy names its block by coordinates in a view of the pool,
[P*L, 2, Z, K, H], as many axes as a TMA descriptor has; each coordinate is an int32. A pool may
have any number of elements as long as P*L fits (`unsupported`).

Where the default backend is no GPU, the kernel runs in JAX's interpreter of this backend, which
simulates memory spaces, copies and barriers. The interpreter knows nothing of which thread holds
what; `Plan.layout` is checked by lowering for CUDA.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial, reduce
from inspect import Parameter, signature
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.kv_layout import KEY, VALUE
from pallas_kernels.paged_attention.partial_softmax import MASKED, choose_splits, merge

MAX_HEAD_DIM = 256
MAX_BLOCK_SIZE = 256
"""A TMA copy takes up to 256 elements along an axis (CUDA driver API, cuTensorMapEncodeTiled)."""
MAX_ROWS = 65535
"""They are a grid's third axis (CUDA programming guide, technical specifications)."""

_THREADS = 128
_WARPS = 4
_REGISTERS = 200
"""For arrays, of the 255 of a thread. So bounded, ptxas 12.9 spilled nothing for sm_90a in any of
56 shapes (head dims 16 to 256, G 1 to 16, 16 and 32 bits)."""
_SHARED_BYTES = 218 * 1024
"""For stages: the 227 KiB of a block of threads, less 8 KiB for sums and 1 KiB for barriers."""
_SUM_BYTES = 8 * 1024
_STAGES_BYTES = 96 * 1024
"""Wanted for all stages of a program. Two programs fit on a multiprocessor then, and the memory
has enough to do while they compute."""
_MAX_STAGES = 6
_MAX_HEADS = 8
_CHUNK_TOKENS = (64, 32)
_LANES_AND_VECTOR = ((8, 4), (8, 2), (16, 4), (16, 2), (16, 1))
_LOG2_E = math.log2(math.e)


@dataclass(frozen=True)
class Plan:
    """What a program holds, and where.

    Attributes:
        heads: query heads of one KV head that a program serves; divides G.
        chunk_blocks: blocks in a stage.
        stages: chunks in shared memory at a time.
        lanes: threads that share a token.
        vector: consecutive elements of a token in one thread.
        head_dim: H.
    """

    heads: int
    chunk_blocks: int
    stages: int
    lanes: int
    vector: int
    head_dim: int

    @property
    def tile_tokens(self) -> int:
        return _THREADS // self.lanes

    @property
    def layout(self) -> Any:
        """Threads of a [tile_tokens, H] tile: a quarter of the tokens to each of four warps, and
        `lanes` threads of it to a token."""
        tokens, width = self.tile_tokens, self.lanes * self.vector
        return plgpu.Layout.TILED(
            plgpu.Tiling(((tokens, width), (tokens // _WARPS, width), (self.vector,))),
            warp_dims=(-5,),
            lane_dims=(-3, -2),
            vector_dim=-1,
        )

    def registers(self, block_size: int) -> int:
        """Elements of 32 bits that a thread holds: of query, weighted values, scores of a chunk,
        peak and total for each head, and a tile of keys or values."""
        part = self.head_dim // self.lanes
        tiles = self.chunk_blocks * block_size // self.tile_tokens
        return self.heads * (2 * part + tiles + 2) + 2 * part


def paged_attention(
    q_RTNH: jax.Array,
    kv_PL2ZKH: jax.Array,
    layer: jax.Array,
    block_tables_RM: jax.Array,
    kv_lens_R: jax.Array,
    q_starts_R: jax.Array,
    scale: float,
    *,
    num_splits: int | None = None,
    interpret: bool | None = None,
) -> jax.Array:
    """See `paged_attention.api`; decode (T = 1) only.

    Args:
        num_splits: shares of a row's context; None chooses by the size of the batch.
        interpret: run in the interpreter; None means wherever the default backend is no GPU.

    Raises:
        ValueError: what `unsupported` or `unsupported_device` says.
    """
    del q_starts_R  # the single query is the newest token, so kv_len alone is the mask
    has_gpu = jax.default_backend() == "gpu"
    interpret = not has_gpu if interpret is None else interpret
    why_not = unsupported(q_RTNH, kv_PL2ZKH)
    if has_gpu and not interpret:
        why_not = why_not or unsupported_device(jax.devices()[0])
    if why_not:
        raise ValueError(f"implementation='hopper' cannot serve this: {why_not}")
    num_blocks, num_layers, _, block_size, num_kv_heads, head_dim = kv_PL2ZKH.shape
    num_rows, _, num_heads, _ = q_RTNH.shape
    plan = make_plan(num_heads // num_kv_heads, head_dim, block_size, q_RTNH.dtype.itemsize)
    if num_splits is None:
        num_programs = num_rows * num_heads // plan.heads
        num_splits = choose_splits(num_programs, block_tables_RM.shape[1] * block_size)
    if kv_PL2ZKH.dtype != q_RTNH.dtype:
        kv_PL2ZKH = lax.bitcast_convert_type(kv_PL2ZKH, q_RTNH.dtype)
    pool_X2ZKH = kv_PL2ZKH.reshape(num_blocks * num_layers, *kv_PL2ZKH.shape[2:])
    kernel = partial(
        _decode_kernel,
        tile=_Tile(plan, interpret),
        num_layers=num_layers,
        scale_log2=scale * _LOG2_E,
    )
    out_RSNH, peak_RSN, total_RSN = _call(
        kernel,
        (q_RTNH, pool_X2ZKH, layer.reshape(1), block_tables_RM, kv_lens_R),
        plan,
        num_splits,
        interpret,
    )
    if num_splits == 1:
        return out_RSNH
    return merge(out_RSNH, peak_RSN, total_RSN)[:, None].astype(q_RTNH.dtype)


def unsupported(
    q_RTNH: jax.Array | jax.ShapeDtypeStruct, kv_PL2ZKH: jax.Array | jax.ShapeDtypeStruct
) -> str:
    """Why these shapes and dtypes cannot be served, with value and bound; empty if they can."""
    num_rows, num_queries, _, head_dim = q_RTNH.shape
    num_blocks, num_layers, _, block_size = kv_PL2ZKH.shape[:4]
    if num_queries != 1:
        return f"decode has 1 query a row, not {num_queries}; prefill goes to 'gpu'"
    if q_RTNH.dtype not in (jnp.float32, jnp.bfloat16, jnp.float16):
        return f"dtype {q_RTNH.dtype} is none of float32, bfloat16, float16"
    if head_dim % 16 or not 0 < head_dim <= MAX_HEAD_DIM:
        return f"{head_dim=} is no multiple of 16 up to {MAX_HEAD_DIM}"
    if block_size % 8 or not 0 < block_size <= MAX_BLOCK_SIZE:
        return f"{block_size=} is no multiple of 8 up to {MAX_BLOCK_SIZE}"
    stages_bytes = 2 * _block_bytes(block_size, head_dim, q_RTNH.dtype.itemsize)
    if stages_bytes > _SHARED_BYTES:
        return (
            f"two blocks of one KV head, {block_size=} times {head_dim=}, are {stages_bytes} "
            f"bytes; shared memory holds {_SHARED_BYTES}"
        )
    if num_rows > MAX_ROWS:
        return f"{num_rows} rows are more than {MAX_ROWS}"
    if num_blocks * num_layers >= 2**31:
        return f"{num_blocks=} times {num_layers=} is not below 2**31"
    return ""


def unsupported_device(device: Any) -> str:
    """Why a GPU cannot run this, with its compute capability; empty if it can."""
    capability = str(device.compute_capability)
    if capability.partition(".")[0] not in ("9", "10"):
        return f"compute capability {capability} is neither 9.x nor 10.x"
    return ""


def make_plan(group: int, head_dim: int, block_size: int, element_bytes: int) -> Plan:
    """The plan with most heads, then longest chunks, then fewest lanes, that fits a thread.

    Keys and values are read once for the heads that a program serves, and fewer lanes exchange less
    for each score.

    Args:
        group: G, query heads of a KV head.
        block_size: Z; with `head_dim` one that `unsupported` lets through.
        element_bytes: of the pool's dtype.
    """
    block_bytes = _block_bytes(block_size, head_dim, element_bytes)
    plans = (
        Plan(heads, chunk_blocks, _num_stages(chunk_blocks * block_bytes), *shape, head_dim)
        for heads in range(min(group, _MAX_HEADS), 0, -1)
        if group % heads == 0
        for chunk_blocks in (max(1, tokens // block_size) for tokens in _CHUNK_TOKENS)
        if 2 * chunk_blocks * block_bytes <= _SHARED_BYTES
        for shape in _LANES_AND_VECTOR
        if head_dim % math.prod(shape) == 0
    )
    return next(
        plan
        for plan in plans
        if block_size % plan.tile_tokens == 0 and plan.registers(block_size) <= _REGISTERS
    )


def _block_bytes(block_size: int, head_dim: int, element_bytes: int) -> int:
    """Keys and values of one KV head."""
    return 2 * block_size * head_dim * element_bytes


def _num_stages(chunk_bytes: int) -> int:
    return max(2, min(_STAGES_BYTES // chunk_bytes, _MAX_STAGES))


def _call(
    kernel: Callable[..., None],
    arguments: tuple[jax.Array, ...],
    plan: Plan,
    num_splits: int,
    interpret: bool,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Output of each share, then what `merge` needs of it; normalised if there is one share."""
    q_R1NH, pool_X2ZKH = arguments[:2]
    num_rows, _, num_heads, head_dim = q_R1NH.shape
    sums = jax.ShapeDtypeStruct((num_rows, num_splits, num_heads), jnp.float32)
    dtype = q_R1NH.dtype if num_splits == 1 else jnp.float32
    stages = (plan.stages, plan.chunk_blocks, 2, pool_X2ZKH.shape[2], head_dim)
    call = plgpu.kernel(
        kernel,
        out_type=(jax.ShapeDtypeStruct((*sums.shape, head_dim), dtype), sums, sums),
        scratch_types={
            "stages_ref": plgpu.SMEM(stages, pool_X2ZKH.dtype),
            "barriers_ref": plgpu.Barrier(num_arrivals=plan.chunk_blocks, num_barriers=plan.stages),
        },
        compiler_params=plgpu.CompilerParams(
            approx_math=True,
            reduction_scratch_bytes=_SUM_BYTES,
            lowering_semantics=plgpu.LoweringSemantics.Lane,
        ),
        grid=(num_rows, num_heads // plan.heads, num_splits),
        grid_names=("row", "part", "split"),
        kernel_name="flowkv_hopper_decode_attention",
        interpret=_interpreter() if interpret else False,
    )
    out: tuple[jax.Array, jax.Array, jax.Array] = call(*arguments)
    return out


def _interpreter() -> Any:
    # JAX has no public name for it yet.
    from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams

    return InterpretGPUParams()


class _Sums(NamedTuple):
    """One head's online softmax in each token slot Y of a tile, in base 2."""

    peak_Y: jax.Array
    total_Y: jax.Array
    out_YH: jax.Array


@dataclass(frozen=True)
class _Tile:
    """Arrays in registers over a tile, [Y, H] or one of its axes, laid out as the plan says."""

    plan: Plan
    interpret: bool

    @property
    def shape(self) -> tuple[int, int]:
        return self.plan.tile_tokens, self.plan.head_dim

    def nothing(self) -> _Sums:
        """Sums over no tokens."""
        slots = jnp.zeros(self.shape[:1], jnp.float32)
        return _Sums(
            self._place(slots + MASKED, 1),
            self._place(slots, 1),
            self._place(jnp.zeros(self.shape, jnp.float32)),
        )

    def slots(self) -> jax.Array:
        """int32[Y], 0 to Y - 1."""
        return self._place(lax.iota(jnp.int32, self.shape[0]), 1)

    def load(self, shared_ref: Any) -> jax.Array:
        """float32[Y, H] from shared memory."""
        return self._place(shared_ref[...]).astype(jnp.float32)

    def load_query(self, global_ref: Any) -> jax.Array:
        """float32[Y, H], H elements of global memory for every token."""
        layout = self.plan.layout.reduce(0)
        q_H = global_ref[...] if self.interpret else _load_global(global_ref, layout)
        return self._place(lax.broadcast_in_dim(q_H.astype(jnp.float32), self.shape, (1,)))

    def store(self, global_ref: Any, x_H: jax.Array) -> None:
        """H elements to global memory."""
        x_H = x_H.astype(global_ref.dtype)
        if self.interpret or not hasattr(plgpu, "store"):  # JAX 0.10 stores in any layout
            global_ref[...] = x_H
        else:
            plgpu.store(global_ref, x_H, optimized=False)

    def along_head(self, x_Y: jax.Array) -> jax.Array:
        """[Y, H], the same for all of H."""
        return self._place(lax.broadcast_in_dim(x_Y, self.shape, (0,)))

    def _place(self, x: jax.Array, *reduced_axes: int) -> jax.Array:
        if self.interpret:
            return x
        layout = self.plan.layout
        return plgpu.layout_cast(x, layout.reduce(reduced_axes) if reduced_axes else layout)


@dataclass(frozen=True)
class _Context:
    """Chunks of one row's cache, and the stages they are copied to."""

    pool_ref: Any
    table_ref: Any
    stages_ref: Any
    barriers_ref: Any
    layer: jax.Array
    kv_head: jax.Array
    num_layers: int
    num_blocks: jax.Array

    def start(self, chunk: jax.Array, stage: jax.Array | int) -> None:
        """Ask for a chunk; `stage` must be used up."""
        chunk_blocks = self.stages_ref.shape[1]
        for n in range(chunk_blocks):
            entry = jnp.minimum(chunk * chunk_blocks + n, self.num_blocks - 1)
            block = self.table_ref[entry]
            pool_row = block * self.num_layers + self.layer
            plgpu.copy_gmem_to_smem(
                self.pool_ref.at[pool_row, :, :, self.kv_head, :],
                self.stages_ref.at[stage, n],
                self.barriers_ref.at[stage],
            )

    def tiles(self, stage: jax.Array, half: int, tile_tokens: int) -> list[Any]:
        """References to the tiles of a chunk's keys or values, in order of position."""
        _, chunk_blocks, _, block_size, _ = self.stages_ref.shape
        return [
            self.stages_ref.at[stage, n, half, pl.ds(start, tile_tokens)]
            for n in range(chunk_blocks)
            for start in range(0, block_size, tile_tokens)
        ]


def _decode_kernel(
    q_ref: Any,
    pool_ref: Any,
    layer_ref: Any,
    tables_ref: Any,
    lens_ref: Any,
    *out_refs: Any,
    stages_ref: Any,
    barriers_ref: Any,
    tile: _Tile,
    num_layers: int,
    scale_log2: float,
) -> None:
    plan = tile.plan
    row, part, split = (lax.axis_index(name) for name in ("row", "part", "split"))
    num_splits, num_heads = out_refs[0].shape[1:3]
    block_size, num_kv_heads = pool_ref.shape[2:4]
    chunk_tokens = plan.chunk_blocks * block_size
    first_head = part * plan.heads
    length = lens_ref[row]
    context = _Context(
        pool_ref,
        tables_ref.at[row],
        stages_ref,
        barriers_ref,
        layer=layer_ref[0],
        kv_head=_divide(first_head, num_heads // num_kv_heads),
        num_layers=num_layers,
        num_blocks=_divide_up(length, block_size),
    )
    num_chunks = _divide_up(length, chunk_tokens)
    split_chunks = _divide_up(num_chunks, num_splits)
    first = split * split_chunks
    end = jnp.minimum(first + split_chunks, num_chunks)
    for n in range(plan.stages):
        pl.when(first + n < end)(partial(context.start, first + n, n))
    queries = [
        tile.load_query(q_ref.at[row, 0, first_head + n]) * scale_log2 for n in range(plan.heads)
    ]
    slots_Y = tile.slots()

    def turn(chunk: jax.Array, sums: list[_Sums]) -> list[_Sums]:
        stage = lax.rem(chunk - first, jnp.int32(plan.stages))
        plgpu.barrier_wait(barriers_ref.at[stage])
        left_Y = length - chunk * chunk_tokens - slots_Y
        sums = _attend(tile, context, stage, queries, left_Y, sums)
        plgpu.commit_smem()  # reads of the stage come before the copies that overwrite it
        later = chunk + plan.stages
        pl.when(later < end)(partial(context.start, later, stage))
        return sums

    all_sums = lax.fori_loop(first, end, turn, [tile.nothing()] * plan.heads)
    for n, sums in enumerate(all_sums):
        _store(tile, sums, (row, split, first_head + n), *out_refs)


def _attend(
    tile: _Tile,
    context: _Context,
    stage: jax.Array,
    queries: list[jax.Array],
    left_Y: jax.Array,
    sums: list[_Sums],
) -> list[_Sums]:
    """Sums that have also seen the chunk in a stage.

    Args:
        queries: float32[Y, H] a head, scaled for base 2.
        left_Y: tokens of the row from this slot of the chunk's first tile on; slot y of the
            chunk's tile i holds a token of the row if left_Y[y] > i * Y.
    """
    tokens = tile.plan.tile_tokens
    scores: list[list[jax.Array]] = [[] for _ in queries]
    for i, key_ref in enumerate(context.tiles(stage, KEY, tokens)):
        key_YH = tile.load(key_ref)
        for head_scores, q_YH in zip(scores, queries, strict=True):
            score_Y = jnp.sum(key_YH * q_YH, axis=1)
            head_scores.append(jnp.where(left_Y > i * tokens, score_Y, MASKED))
    peaks = [reduce(jnp.maximum, s, old.peak_Y) for s, old in zip(scores, sums, strict=True)]
    keeps = [jnp.exp2(old.peak_Y - peak) for old, peak in zip(sums, peaks, strict=True)]
    totals = [old.total_Y * keep for old, keep in zip(sums, keeps, strict=True)]
    outs = [old.out_YH * tile.along_head(keep) for old, keep in zip(sums, keeps, strict=True)]
    for i, value_ref in enumerate(context.tiles(stage, VALUE, tokens)):
        is_seen_YH = tile.along_head(left_Y) > i * tokens
        value_YH = jnp.where(is_seen_YH, tile.load(value_ref), 0.0)
        for n, peak_Y in enumerate(peaks):
            # A slot that has seen no token weighs masked scores by 1. Its sums are dropped by its
            # first token or by `_store`: 2 ** (masked peak - real peak) is 0.
            weight_Y = jnp.exp2(scores[n][i] - peak_Y)
            totals[n] = totals[n] + weight_Y
            outs[n] = outs[n] + tile.along_head(weight_Y) * value_YH
    return [_Sums(*parts) for parts in zip(peaks, totals, outs, strict=True)]


def _store(
    tile: _Tile, sums: _Sums, place: tuple[Any, ...], out_ref: Any, peak_ref: Any, total_ref: Any
) -> None:
    """All slots together: an average where there is one share, else what `merge` takes."""
    peak = jnp.max(sums.peak_Y)
    weight_Y = jnp.exp2(sums.peak_Y - peak)
    total = jnp.sum(sums.total_Y * weight_Y)
    out_H = jnp.sum(sums.out_YH * tile.along_head(weight_Y), axis=0)
    if out_ref.shape[1] == 1:
        out_H = out_H / jnp.where(total > 0, total, 1.0)
    tile.store(out_ref.at[place], out_H)
    peak_ref[place] = peak
    total_ref[place] = total


def _load_global(global_ref: Any, layout: Any) -> jax.Array:
    index = signature(plgpu.load).parameters.get("idx")
    is_needed = index is not None and index.default is Parameter.empty  # in JAX 0.10
    whole: tuple[Any, ...] = ((),) if is_needed else ()
    return plgpu.load(global_ref, *whole, layout=layout, optimized=False)


def _divide(x: jax.Array, y: int) -> jax.Array:
    """x // y for x >= 0: one instruction, where // also rounds negative quotients down."""
    return lax.div(x, jnp.int32(y))


def _divide_up(x: jax.Array, y: int) -> jax.Array:
    return _divide(x + (y - 1), y)
