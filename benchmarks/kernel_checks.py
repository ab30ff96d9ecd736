"""Whether kernels are right, on fresh random data, against NumPy.

What a kernel must not look at is poison: blocks that no row uses, stale ends of blocks and other
layers are NaN, and so is the memory that results go to. Table entries and ids that are not in use
name no block. Attention is compared with dense attention in float64; what only moves values must
move them bit by bit and leave all else alone.

The blocks of a check are the last ones of its pool, its layer is the last one. With enough spare
blocks before them (`Check.spare_blocks`) their offsets no longer fit 32 bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.device_timing import poison_free_memory
from benchmarks.kernel_cases import LAYOUTS, Model
from pallas_kernels import block_copy, kv_write
from pallas_kernels.kv_layout import KEY, POOL_AXES, VALUE
from pallas_kernels.paged_attention import gpu, hopper, reference, xla

_LAYERS, _LAYER = 3, 2
_NO_BLOCKS = (-1, -(2**31), 2**31 - 1)
_HALF_BOUNDS = {"bfloat16": 1e-2, "float16": 2e-3}
_COPY_BLOCKS = 24


@dataclass(frozen=True)
class Sizes:
    """How much is checked.

    Attributes:
        decode, prefill: cached tokens of each row.
        queries: of each row of a prefill.
        splits: shares of a decode's context; None lets the kernel choose.
        dtypes: of the kernels; all else is checked in the first.
    """

    decode: tuple[int, ...]
    prefill: tuple[int, ...]
    queries: int
    splits: tuple[int | None, ...]
    dtypes: tuple[str, ...]


FULL = Sizes(
    decode=(0, 1, 15, 16, 17, 64, 65, 257, 1000, 4099),
    prefill=(3, 0, 130, 131, 700, 2051),
    queries=130,
    splits=(None, 1, 5),
    dtypes=("bfloat16", "float32", "float16"),
)
BRIEF = replace(FULL, splits=(None, 1), dtypes=FULL.dtypes[:1])
SMALLEST = Sizes(
    decode=(0, 17, 40), prefill=(3, 0, 37), queries=18, splits=(3,), dtypes=("bfloat16",)
)


@dataclass(frozen=True)
class Check:
    """One comparison of one implementation.

    Attributes:
        kernel: "decode", "prefill", "kv_write" or a function of `block_copy`.
        implementation: "reference", "xla", "gpu" (Pallas through Triton) or "hopper".
        model: whose heads and head dim the pool has.
        layout: a name from `LAYOUTS`.
        sizes: lengths of rows.
        dtype: of the pool.
        num_splits: shares of the context, for decode; None lets the kernel choose.
        spare_blocks: of the pool, before those that the check is about.
    """

    kernel: str
    implementation: str
    model: Model
    layout: str
    sizes: Sizes
    dtype: str
    num_splits: int | None = None
    spare_blocks: int = 0

    @property
    def title(self) -> str:
        """Names the check among all."""
        splits = f" splits={self.num_splits}" if self.num_splits else ""
        huge = " huge pool" if self.spare_blocks else ""
        return (
            f"{self.model.name} {self.layout} {self.kernel} {self.implementation}"
            f"{splits} {self.dtype}{huge}"
        )

    @property
    def axes(self) -> str:
        return LAYOUTS[self.layout]

    @property
    def bound(self) -> float:
        """The largest error that is right."""
        if self.kernel not in ("decode", "prefill"):
            return 0.0
        # XLA multiplies float32 in tf32 on GPUs unless told otherwise.
        exact = 2e-3 if self.implementation in ("xla", "reference") else 1e-5
        return _HALF_BOUNDS.get(self.dtype, exact)

    def error(self, rng: np.random.Generator) -> float:
        """Run the kernel on data drawn from `rng`.

        Returns:
            For attention the largest |out - expected| / |expected| of a query token over all its
            heads, infinite if anything is not finite; else the share of elements that differ.
        """
        if self.kernel in ("decode", "prefill"):
            return _attention_error(self, rng)
        if self.kernel == "kv_write":
            return _write_error(self, rng)
        if self.kernel in ("slice_run", "gather_blocks"):
            return _take_error(self, rng)
        return _put_error(self, rng)


def checks(model: Model, sizes: Sizes) -> Iterator[Check]:
    """Every kernel in both layouts, and what is not a kernel in the first dtype."""
    for layout in LAYOUTS:
        check = partial(Check, model=model, layout=layout, sizes=sizes)
        names = ("xla", "gpu") if layout != "block-major" else ("reference", "xla", "gpu", "hopper")
        for name in names:
            is_kernel = name in ("gpu", "hopper")
            for dtype in sizes.dtypes if is_kernel else sizes.dtypes[:1]:
                for num_splits in sizes.splits if is_kernel else (None,):
                    yield check("decode", name, dtype=dtype, num_splits=num_splits)
                if name != "hopper":
                    yield check("prefill", name, dtype=dtype)
        for name in ("reference", "xla", "gpu"):
            yield check("kv_write", name, dtype=sizes.dtypes[0])
        for kernel in ("slice_run", "put_run", "gather_blocks", "scatter_blocks"):
            for name in ("xla", "gpu"):
                yield check(kernel, name, dtype=sizes.dtypes[0])


def huge_pool_checks(model: Model, sizes: Sizes, elements: int) -> Iterator[Check]:
    """The kernels again, in the last blocks of pools of more than `elements` elements."""
    block_elements = model.layout.bytes_per_block // model.layout.dtype_bytes
    spare_blocks = elements * model.layout.num_layers // (block_elements * _LAYERS)
    seen = set()
    for check in checks(model, sizes):
        key = (check.kernel, check.implementation, check.layout)
        if check.implementation in ("gpu", "hopper") and key not in seen:
            seen.add(key)
            yield replace(check, spare_blocks=spare_blocks)


def _attend(check: Check, *arguments: Any) -> jax.Array:
    scale = check.model.layout.head_dim**-0.5
    modules: dict[str, Any] = {"gpu": gpu, "hopper": hopper, "reference": reference, "xla": xla}
    options: dict[str, Any] = {}
    if check.implementation in ("gpu", "xla"):
        options["axes"] = check.axes
    if check.num_splits is not None:
        options["num_splits"] = check.num_splits
    attend = modules[check.implementation].paged_attention
    out: jax.Array = attend(*arguments, scale, **options)
    return out


def _attention_error(check: Check, rng: np.random.Generator) -> float:
    layout, sizes = check.model.layout, check.sizes
    is_decode = check.kernel == "decode"
    queries = 1 if is_decode else sizes.queries
    lens_R = np.array(sizes.decode if is_decode else sizes.prefill, np.int32)
    starts_R = np.maximum(lens_R - queries, 0).astype(np.int32)
    used_R = -(-lens_R // layout.block_size)
    num_blocks = int(used_R.sum()) + 3
    end = check.spare_blocks + num_blocks
    ids = rng.permutation(num_blocks)
    tables_RM = rng.choice([*_NO_BLOCKS, end], (len(lens_R), used_R.max() + 2)).astype(np.int32)
    is_seen_PZ = np.zeros((num_blocks, layout.block_size), bool)
    for row, used in enumerate(used_R):
        own, ids = ids[:used], ids[used:]
        tables_RM[row, :used] = check.spare_blocks + own
        is_seen_PZ[own] = (
            np.arange(used * layout.block_size).reshape(used, layout.block_size) < lens_R[row]
        )
    kv_shape = (num_blocks, *layout.pool_shape(1)[2:])
    kv_P2ZKH = jnp.asarray(_random(rng, kv_shape, check.dtype))
    pool = _embed(_poison_unseen(kv_P2ZKH, jnp.asarray(is_seen_PZ)), check.spare_blocks, check.axes)
    q_shape = (len(lens_R), queries, check.model.num_heads, layout.head_dim)
    q_RTNH = jnp.asarray(_random(rng, q_shape, check.dtype))
    out_RTNH = _into_poison(
        partial(_attend, check),
        (q_shape, check.dtype),
        (q_RTNH, pool, jnp.int32(_LAYER), *map(jnp.asarray, (tables_RM, lens_R, starts_R))),
    )
    expected = _dense(
        _float64(q_RTNH), _float64(kv_P2ZKH), tables_RM - check.spare_blocks, lens_R, starts_R
    )
    return _worst_token(_float64(out_RTNH), expected, lens_R - starts_R)


@jax.jit
def _poison_unseen(kv_P2ZKH: jax.Array, is_seen_PZ: jax.Array) -> jax.Array:
    """[P, L, 2, Z, K, H]: the one layer that is read, and NaN everywhere else."""
    kv_P2ZKH = jnp.where(is_seen_PZ[:, None, :, None, None], kv_P2ZKH, jnp.nan)
    num_blocks, *inner = kv_P2ZKH.shape
    pool = jnp.full((num_blocks, _LAYERS, *inner), jnp.nan, kv_P2ZKH.dtype)
    return pool.at[:, _LAYER].set(kv_P2ZKH)


@partial(jax.jit, static_argnums=(1, 2))
def _embed(blocks_PL2ZKH: jax.Array, spare_blocks: int, axes: str) -> jax.Array:
    """A pool in the order of `axes`: spare blocks of NaN, then these."""
    blocks = jnp.transpose(blocks_PL2ZKH, [POOL_AXES.index(axis) for axis in axes])
    if not spare_blocks:
        return blocks
    shape, starts = list(blocks.shape), [0] * blocks.ndim
    starts[axes.index("P")] = spare_blocks
    shape[axes.index("P")] += spare_blocks
    return jax.lax.dynamic_update_slice(jnp.full(shape, jnp.nan, blocks.dtype), blocks, starts)


def _into_poison(
    function: Callable[..., jax.Array],
    result: tuple[tuple[int, ...], str],
    arguments: tuple[jax.Array, ...],
) -> jax.Array:
    """The function's result, of the shape and dtype given, in memory that held NaN before."""

    def call(poison: jax.Array, *arguments: jax.Array) -> jax.Array:
        del poison  # donated: the result has its place
        return function(*arguments)

    poison_free_memory()
    poison = jnp.full(result[0], jnp.nan, result[1])
    out: jax.Array = jax.jit(call, donate_argnums=0, keep_unused=True)(poison, *arguments)
    return out


def _dense(
    q_RTNH: np.ndarray,
    kv_P2ZKH: np.ndarray,
    tables_RM: np.ndarray,
    lens_R: np.ndarray,
    starts_R: np.ndarray,
) -> np.ndarray:
    """Attention row by row and head by head."""
    out_RTNH = np.zeros(q_RTNH.shape)
    num_heads, head_dim = q_RTNH.shape[2:]
    block_size, num_kv_heads = kv_P2ZKH.shape[2:4]
    for row, (length, start) in enumerate(zip(lens_R, starts_R, strict=True)):
        used = tables_RM[row, : -(-length // block_size)]
        k_SKH, v_SKH = (
            kv_P2ZKH[used, half].reshape(-1, num_kv_heads, head_dim)[:length]
            for half in (KEY, VALUE)
        )
        real = length - start
        is_seen_TS = np.arange(length) <= start + np.arange(real)[:, None]
        for head in range(num_heads if length else 0):
            kv_head = head // (num_heads // num_kv_heads)
            scores_TS = q_RTNH[row, :real, head] @ k_SKH[:, kv_head].T / np.sqrt(head_dim)
            scores_TS = np.where(is_seen_TS, scores_TS, -np.inf)
            weights_TS = np.exp(scores_TS - scores_TS.max(axis=1, keepdims=True))
            weights_TS /= weights_TS.sum(axis=1, keepdims=True)
            out_RTNH[row, :real, head] = weights_TS @ v_SKH[:, kv_head]
    return out_RTNH


def _worst_token(out: np.ndarray, expected: np.ndarray, real_R: np.ndarray) -> float:
    if not np.isfinite(out).all():
        return float("inf")
    is_real_RT = np.arange(out.shape[1]) < real_R[:, None]
    difference, size = (np.linalg.norm(x, axis=(2, 3)) for x in (out - expected, expected))
    return float((difference[is_real_RT] / size[is_real_RT]).max())


def _write_error(check: Check, rng: np.random.Generator) -> float:
    """A slot outside the pool writes nowhere."""
    blocks = _random_blocks(check, _COPY_BLOCKS, rng)
    block_size = check.model.layout.block_size
    first_slot, num_slots = check.spare_blocks * block_size, _COPY_BLOCKS * block_size
    inside = rng.permutation(num_slots)[:50]
    slots_T = rng.permutation([*(first_slot + inside), *_NO_BLOCKS, first_slot + num_slots])
    k_TKH, v_TKH = (_random(rng, (len(slots_T), *blocks.shape[4:]), check.dtype) for _ in range(2))
    expected = blocks.copy()
    for token, slot in enumerate(slots_T - first_slot):
        if 0 <= slot < num_slots:
            block, offset = divmod(int(slot), block_size)
            expected[block, _LAYER, KEY, offset] = k_TKH[token]
            expected[block, _LAYER, VALUE, offset] = v_TKH[token]
    options: Any = {"implementation": check.implementation, "axes": check.axes}
    write = jax.jit(lambda *x: kv_write.kv_write(*x, **options), donate_argnums=0)
    pool = _embed(jnp.asarray(blocks), check.spare_blocks, check.axes)
    new = map(jnp.asarray, (k_TKH, v_TKH, slots_T.astype(np.int32)))
    return _share_wrong(check, write(pool, jnp.int32(_LAYER), *new), expected)


def _take_error(check: Check, rng: np.random.Generator) -> float:
    """`slice_run` and `gather_blocks`; an id of no block gives zeros."""
    place, ids = _places(check, rng)
    blocks = _random_blocks(check, _COPY_BLOCKS, rng)
    blocks[np.setdiff1d(np.arange(_COPY_BLOCKS), ids)] = np.nan
    expected = blocks[ids]
    expected[ids < 0] = 0
    options: Any = {"implementation": check.implementation, "axes": check.axes}
    if check.kernel == "slice_run":
        options["num_blocks"] = len(ids)
    shape = [expected.shape[POOL_AXES.index(axis)] for axis in check.axes]
    out = _into_poison(
        lambda *x: getattr(block_copy, check.kernel)(*x, **options),
        (tuple(shape), check.dtype),
        (_embed(jnp.asarray(blocks), check.spare_blocks, check.axes), place),
    )
    return _share_wrong(replace(check, spare_blocks=0), out, expected)


def _put_error(check: Check, rng: np.random.Generator) -> float:
    """`put_run` and `scatter_blocks`; an id of no block writes nowhere."""
    place, ids = _places(check, rng)
    blocks = _random_blocks(check, _COPY_BLOCKS, rng)
    new = _random_blocks(check, len(ids), rng)
    expected = blocks.copy()
    expected[ids[ids >= 0]] = new[ids >= 0]
    options: Any = {"implementation": check.implementation, "axes": check.axes}
    put = jax.jit(lambda *x: getattr(block_copy, check.kernel)(*x, **options), donate_argnums=0)
    pool = _embed(jnp.asarray(blocks), check.spare_blocks, check.axes)
    return _share_wrong(check, put(pool, _embed(jnp.asarray(new), 0, check.axes), place), expected)


def _places(check: Check, rng: np.random.Generator) -> tuple[jax.Array, np.ndarray]:
    """What the function takes as its start or ids; and which blocks of the check's own these are,
    -1 for none."""
    if check.kernel in ("slice_run", "put_run"):
        start = int(rng.integers(_COPY_BLOCKS - 6))
        return jnp.int32(check.spare_blocks + start), start + np.arange(7)
    own = rng.permutation(_COPY_BLOCKS)[:9]
    end = check.spare_blocks + _COPY_BLOCKS
    ids = rng.permutation([*(check.spare_blocks + own), *_NO_BLOCKS, end])
    is_own = (ids >= check.spare_blocks) & (ids < end)
    return jnp.asarray(ids.astype(np.int32)), np.where(is_own, ids - check.spare_blocks, -1)


def _random_blocks(check: Check, count: int, rng: np.random.Generator) -> np.ndarray:
    _, _, *inner = check.model.layout.pool_shape(count)
    return _random(rng, (count, _LAYERS, *inner), check.dtype)


def _random(rng: np.random.Generator, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    return rng.standard_normal(shape, np.float32).astype(jnp.dtype(dtype))


def _share_wrong(check: Check, out: jax.Array, expected: np.ndarray) -> float:
    """Of elements of the check's own blocks, compared as bits; all, if a spare block changed."""
    own, is_spare_kept = _separate(out, check.spare_blocks, check.axes)
    got = np.asarray(own)
    if got.dtype != expected.dtype or got.shape != expected.shape or not is_spare_kept:
        return 1.0
    bits = f"uint{8 * expected.dtype.itemsize}"
    got, expected = (np.ascontiguousarray(x).view(bits) for x in (got, expected))
    return float((got != expected).mean())


@partial(jax.jit, static_argnums=(1, 2))
def _separate(pool: jax.Array, spare_blocks: int, axes: str) -> tuple[jax.Array, jax.Array]:
    """A check's own blocks, block-major, and whether the spare ones are still NaN."""
    axis = axes.index("P")
    own = jax.lax.slice_in_dim(pool, spare_blocks, None, axis=axis)
    spare = jax.lax.slice_in_dim(pool, 0, spare_blocks, axis=axis)
    own = jnp.transpose(own, [axes.index(axis) for axis in POOL_AXES])
    return own, jnp.isnan(spare).all()


def _float64(x: jax.Array) -> np.ndarray:
    return np.asarray(x).astype(np.float64)
