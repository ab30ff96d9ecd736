"""The public operation: checks at trace time, then the chosen implementation."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp

from pallas_kernels.kv_layout import POOL_AXES
from pallas_kernels.paged_attention import gpu, reference, xla

Implementation = Literal["auto", "reference", "xla", "cpu", "gpu", "hopper"]
DTYPES = ("float32", "bfloat16", "float16")
AttentionFunction = Callable[
    [jax.Array, jax.Array, jax.Array, jax.Array, jax.Array, jax.Array, float], jax.Array
]


@dataclass(frozen=True)
class AttentionSizes:
    """What decides which implementations can serve a model.

    Attributes:
        dtype: of queries and cache.
        head_dim: H.
        group: G, query heads a KV head.
        block_size: Z.
    """

    dtype: str
    head_dim: int
    group: int
    block_size: int


def _lazily(module: str) -> AttentionFunction:
    """An implementation that is imported when it is first used: each takes a while."""

    def attend(*arguments: Any) -> jax.Array:
        return importlib.import_module(module).paged_attention(*arguments)

    return attend


def _hopper(q_RTNH: jax.Array, *arguments: Any) -> jax.Array:
    """Decode by the kernel for Hopper; prefill has none of its own and is `gpu`'s."""
    if q_RTNH.shape[1] > 1:
        return gpu.paged_attention(q_RTNH, *arguments)
    return _lazily("pallas_kernels.paged_attention.hopper")(q_RTNH, *arguments)


IMPLEMENTATIONS: dict[str, AttentionFunction] = {
    "reference": reference.paged_attention,
    "xla": xla.paged_attention,
    "cpu": _lazily("pallas_kernels.paged_attention.cpu"),
    "gpu": gpu.paged_attention,
    "hopper": _hopper,
}


def paged_attention(
    q_RTNH: jax.Array,
    kv_PL2ZKH: jax.Array,
    layer: jax.Array | int,
    block_tables_RM: jax.Array,
    kv_lens_R: jax.Array,
    q_starts_R: jax.Array,
    *,
    scale: float | None = None,
    implementation: Implementation = "auto",
) -> jax.Array:
    """Causal attention of T query tokens a row against the row's cached tokens.

    Row r's query t stands at position q_starts_R[r] + t and sees cached positions
    [0, min(kv_lens_R[r], q_starts_R[r] + t + 1)). K and V of the queries themselves are in the pool
    already (`kv_write` comes first). Decode is T = 1. Rows with kv_len 0 and queries past kv_len
    are padding: their output is finite and means nothing.

    Args:
        q_RTNH: float[R, T, N, H], rotary already applied.
        kv_PL2ZKH: float[P, L, 2, Z, K, H], the whole pool, never a slice of one layer; or uint16,
            the bits of the queries' 16-bit type (`kv_layout.storage_dtype`).
        layer: which layer to read; a Python int or a traced int32 scalar.
        block_tables_RM: int32[R, M]; entries at or past ceil(kv_len / Z) are not looked at. The
            others are ids in [0, P), unchecked (`block_tables.check_block_tables` is for that).
        kv_lens_R: int32[R], cached tokens a row may see.
        q_starts_R: int32[R], position of the row's first query.
        scale: of the scores; None means H ** -0.5.
        implementation: "auto", or a name from `IMPLEMENTATIONS`, which gives exactly that one:
            "reference" (the meaning), "xla" (without a kernel, anywhere), "cpu" (kernels in place,
            on CPU), "gpu" (Pallas through Triton), "hopper" (decode through Mosaic GPU, prefill as
            "gpu"). Without a GPU the last two are interpreted, slowly.

    Returns:
        float[R, T, N, H] in the dtype of `q_RTNH`; accumulated in float32.

    Raises:
        ValueError: unknown implementation, one that cannot serve these sizes or this platform, or
            shapes or dtypes that do not fit, with the values.
    """
    _check(q_RTNH, kv_PL2ZKH, block_tables_RM, kv_lens_R, q_starts_R)
    num_heads, head_dim = q_RTNH.shape[2:]
    sizes = AttentionSizes(
        q_RTNH.dtype.name, head_dim, num_heads // kv_PL2ZKH.shape[4], kv_PL2ZKH.shape[3]
    )
    name = choose(sizes) if implementation == "auto" else implementation
    why_not = unsupported(name, sizes)
    if why_not:
        raise ValueError(why_not)
    return IMPLEMENTATIONS[name](
        q_RTNH,
        kv_PL2ZKH,
        jnp.asarray(layer, jnp.int32),
        block_tables_RM,
        kv_lens_R,
        q_starts_R,
        head_dim**-0.5 if scale is None else scale,
    )


def choose(sizes: AttentionSizes) -> Implementation:
    """What "auto" stands for: the fastest implementation that serves these sizes here."""
    kernels: tuple[Implementation, ...] = ("gpu", "cpu")
    for name in kernels:
        if name == jax.default_backend() and not unsupported(name, sizes):
            return name
    return "xla"


def unsupported(implementation: str, sizes: AttentionSizes) -> str:
    """Why an implementation (a name, not "auto") cannot serve these sizes here; empty if it can."""
    if implementation not in IMPLEMENTATIONS:
        known = ", ".join(["auto", *IMPLEMENTATIONS])
        return f"{implementation=} is not one of: {known}"
    check = {
        "gpu": _unsupported_by_gpu,
        "hopper": _unsupported_by_hopper,
        "cpu": _unsupported_by_cpu,
    }
    reason = check[implementation](sizes) if implementation in check else ""
    return f"{implementation=} cannot serve this: {reason}" if reason else ""


def _unsupported_by_gpu(sizes: AttentionSizes) -> str:
    return gpu.unsupported(sizes.dtype, sizes.head_dim, sizes.group)


def _unsupported_by_hopper(sizes: AttentionSizes) -> str:
    from pallas_kernels.paged_attention import hopper

    q = jax.ShapeDtypeStruct((1, 1, sizes.group, sizes.head_dim), sizes.dtype)
    kv = jax.ShapeDtypeStruct((1, 1, 2, sizes.block_size, 1, sizes.head_dim), sizes.dtype)
    reason = _unsupported_by_gpu(sizes) or hopper.unsupported(q, kv)
    if not reason and jax.default_backend() == "gpu":
        return hopper.unsupported_device(jax.devices()[0])
    return reason


def _unsupported_by_cpu(sizes: AttentionSizes) -> str:
    if jax.default_backend() != "cpu":
        return f"it runs on CPU only, not on {jax.default_backend()}"
    if importlib.util.find_spec("numba") is None:
        return "numba is not installed"
    # Numba takes a third of a second to import, which other implementations need not pay.
    from pallas_kernels.paged_attention import cpu

    return cpu.unsupported(sizes.head_dim)


def _check(
    q_RTNH: jax.Array,
    kv_PL2ZKH: jax.Array,
    block_tables_RM: jax.Array,
    kv_lens_R: jax.Array,
    q_starts_R: jax.Array,
) -> None:
    if q_RTNH.ndim != 4:
        raise ValueError(f"queries must be [R, T, N, H], got shape {q_RTNH.shape}")
    if q_RTNH.dtype.name not in DTYPES:
        raise ValueError(f"queries are {q_RTNH.dtype}, which is none of {', '.join(DTYPES)}")
    if kv_PL2ZKH.ndim != 6 or kv_PL2ZKH.shape[2] != 2:
        raise ValueError(f"the pool must be [{', '.join(POOL_AXES)}], got shape {kv_PL2ZKH.shape}")
    num_rows, _, num_heads, head_dim = q_RTNH.shape
    num_kv_heads, pool_head_dim = kv_PL2ZKH.shape[4:]
    if head_dim != pool_head_dim:
        raise ValueError(f"queries have {head_dim=}, the pool has {pool_head_dim}")
    if num_heads % num_kv_heads:
        raise ValueError(f"{num_heads=} is not a multiple of {num_kv_heads=}")
    holds_bits = kv_PL2ZKH.dtype == jnp.uint16 and q_RTNH.dtype.itemsize == 2
    if q_RTNH.dtype != kv_PL2ZKH.dtype and not holds_bits:
        raise ValueError(f"queries are {q_RTNH.dtype}, the pool is {kv_PL2ZKH.dtype}")
    if block_tables_RM.ndim != 2 or block_tables_RM.shape[0] != num_rows:
        raise ValueError(f"block tables must be [{num_rows}, M], got shape {block_tables_RM.shape}")
    for name, array in (("kv_lens", kv_lens_R), ("q_starts", q_starts_R)):
        if array.shape != (num_rows,):
            raise ValueError(f"{name} must be [{num_rows}], got shape {array.shape}")
    integers = {"block tables": block_tables_RM, "kv_lens": kv_lens_R, "q_starts": q_starts_R}
    for name, array in integers.items():
        if array.dtype != jnp.int32:
            raise ValueError(f"{name} must be int32, got {array.dtype}")
    for name, array in (
        ("block_tables", block_tables_RM),
        ("kv_lens", kv_lens_R),
        ("q_starts", q_starts_R),
    ):
        if array.dtype != jnp.int32:
            raise ValueError(f"{name} must be int32, got {array.dtype}")
