"""The Hopper kernel in the interpreter that simulates its copies and barriers, and its lowering."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks
from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams

from pallas_kernels.paged_attention import hopper, reference

LAYERS, LAYER = 2, 1
NOT_A_BLOCK = 2**30
"""Padding of tables: the interpreter refuses to read a block that is not in the pool."""
SCALE = 0.125

compiled_reference = jax.jit(lambda *x: reference.paged_attention(*x, SCALE))


@dataclass(frozen=True)
class Case:
    lens: tuple[int, ...]
    dtype: str = "float32"
    block_size: int = 16
    kv_heads: int = 2
    group: int = 3
    head_dim: int = 64
    num_splits: int | None = None
    shared: bool = False


CASES = {
    "lengths": Case(lens=(1, 16, 17, 130, 257)),
    "lengths_bfloat16": Case(lens=(1, 16, 17, 130, 257), dtype="bfloat16"),
    "empty_and_around_a_chunk": Case(lens=(0, 63, 64, 65), kv_heads=1),
    "splits": Case(lens=(1, 129, 257, 0), dtype="bfloat16", kv_heads=1, group=4, num_splits=3),
    "splits_chosen": Case(lens=(600,), kv_heads=1, group=1),
    "shared_blocks": Case(lens=(64, 64), kv_heads=1, group=8, head_dim=128, shared=True),
    "mha_narrow_blocks": Case(
        lens=(40, 5), dtype="float16", block_size=8, kv_heads=4, group=1, head_dim=80
    ),
    "mqa_in_parts": Case(
        lens=(100,), dtype="bfloat16", block_size=64, kv_heads=1, group=16, head_dim=128
    ),
    "odd_blocks": Case(lens=(50, 24), block_size=24, kv_heads=3, group=2, head_dim=96),
}


@dataclass(frozen=True)
class Problem:
    """Arguments, the pool full of NaN where no row may look, and the answer."""

    arguments: tuple[jax.Array, ...]
    expected: np.ndarray


def make_problem(case: Case) -> Problem:
    rng = np.random.default_rng(7)
    lens = np.array(case.lens, np.int32)
    starts = jnp.asarray(np.maximum(lens - 1, 0))
    widths = -(-lens // case.block_size)
    num_blocks = int(widths.sum()) + 3
    shape = (num_blocks, LAYERS, 2, case.block_size, case.kv_heads, case.head_dim)
    kv = rng.standard_normal(shape)
    ids = rng.permutation(num_blocks)
    tables = np.full((len(lens), widths.max() + 2), NOT_A_BLOCK, np.int32)
    is_seen = np.zeros((num_blocks, case.block_size), bool)
    taken = 0
    for row, (length, width) in enumerate(zip(lens, widths, strict=True)):
        own = ids[:width] if case.shared else ids[taken : taken + width]
        taken += width
        tables[row, :width] = own
        tokens = np.arange(width * case.block_size).reshape(width, case.block_size)
        is_seen[own] |= tokens < length
    poisoned = np.full(shape, np.nan)
    poisoned[:, LAYER] = np.where(is_seen[:, None, :, None, None], kv[:, LAYER], np.nan)
    q_shape = (len(lens), 1, case.kv_heads * case.group, case.head_dim)
    q = jnp.asarray(rng.standard_normal(q_shape), case.dtype)
    expected = compiled_reference(
        q.astype(jnp.float32),
        jnp.asarray(kv, case.dtype).astype(jnp.float32),
        jnp.int32(LAYER),
        jnp.asarray(np.where(tables == NOT_A_BLOCK, 0, tables)),
        jnp.asarray(lens),
        starts,
    )
    pool = jnp.asarray(poisoned, case.dtype)
    arguments = (q, pool, jnp.int32(LAYER), jnp.asarray(tables), jnp.asarray(lens), starts)
    return Problem(arguments, np.asarray(expected))


def run(arguments: tuple[jax.Array, ...], num_splits: int | None = None) -> np.ndarray:
    out = jax.jit(lambda *x: hopper.paged_attention(*x, SCALE, num_splits=num_splits))(*arguments)
    assert out.dtype == arguments[0].dtype
    return np.asarray(out.astype(jnp.float32))


@pytest.fixture(autouse=True)
def interpreter() -> Iterator[None]:
    """A kernel that fails leaves the interpreter's simulated memory behind."""
    yield
    gpu_callbacks.reset_gpu_interpret_mode_state()


@pytest.mark.parametrize("name", list(CASES))
def test_matches_the_reference(name: str):
    """Unused layers, blocks and positions hold NaN, and table padding is no block at all. Rows of
    no tokens are zero."""
    case = CASES[name]
    problem = make_problem(case)
    out = run(problem.arguments, case.num_splits)
    assert np.isfinite(out).all()
    error = np.abs(out - problem.expected).max() / np.abs(problem.expected).max()
    assert error <= {"float32": 2e-6, "float16": 1e-3, "bfloat16": 1e-2}[case.dtype]


def test_a_pool_of_bits_is_served():
    problem = make_problem(Case(lens=(20,), dtype="bfloat16", kv_heads=1, group=1))
    q, pool, *rest = problem.arguments
    out = run((q, jax.lax.bitcast_convert_type(pool, jnp.uint16), *rest))
    np.testing.assert_allclose(out, problem.expected, atol=1e-2)


def test_stages_are_not_read_before_they_are_full(monkeypatch: pytest.MonkeyPatch):
    """Nine chunks through three stages, under the interpreter's race detector."""
    monkeypatch.setattr(hopper, "_interpreter", lambda: InterpretGPUParams(detect_races=True))
    case = Case(lens=(9 * 64,), kv_heads=1, group=1, num_splits=1)
    assert hopper.make_plan(1, 64, 16, 4).stages == 3
    problem = make_problem(case)
    np.testing.assert_allclose(run(problem.arguments, 1), problem.expected, atol=2e-6)
    assert not gpu_callbacks.get_races().races_found


def shapes(dtype: str = "bfloat16", **changes: int) -> tuple[jax.ShapeDtypeStruct, ...]:
    size = {"R": 2, "T": 1, "N": 8, "P": 9, "L": 3, "Z": 16, "K": 2, "H": 128, "M": 5} | changes
    ints = ("", "RM", "R", "R")
    return (
        jax.ShapeDtypeStruct([size[axis] for axis in "RTNH"], dtype),
        jax.ShapeDtypeStruct([{"2": 2, **size}[axis] for axis in "PL2ZKH"], dtype),
        *(jax.ShapeDtypeStruct([size[axis] for axis in axes], jnp.int32) for axes in ints),
    )


def lower(arguments: tuple[jax.ShapeDtypeStruct, ...]) -> str:
    """The program for CUDA, in text; needs no GPU."""
    is_known = jax.export.DisabledSafetyCheck.custom_call("mosaic_gpu_v2")
    function = jax.jit(lambda *x: hopper.paged_attention(*x, SCALE, interpret=False))
    exported = jax.export.export(function, platforms=["cuda"], disabled_checks=[is_known])
    return exported(*arguments).mlir_module()


@pytest.mark.parametrize("block_size", [16, 32, 64])
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128])
def test_lowers_for_cuda(block_size: int, head_dim: int):
    assert "flowkv_hopper_decode_attention" in lower(shapes(Z=block_size, H=head_dim))


@pytest.mark.parametrize(
    ("dtype", "changes"),
    [
        ("float16", {"N": 2}),
        ("float32", {"N": 14}),
        ("bfloat16", {"N": 32}),
        ("bfloat16", {"K": 1, "N": 5}),
        ("bfloat16", {"Z": 8, "H": 80}),
        ("bfloat16", {"Z": 256, "H": 64}),
        ("float32", {"Z": 24, "H": 256}),
    ],
)
def test_other_shapes_lower_for_cuda(dtype: str, changes: dict[str, int]):
    lower(shapes(dtype, **changes))


def equations(jaxpr: Any) -> Iterator[Any]:
    """Of a jaxpr and of those inside."""
    for equation in jaxpr.eqns:
        yield equation
        for inner in jax.tree.leaves(
            list(equation.params.values()), is_leaf=lambda x: hasattr(x, "eqns")
        ):
            if hasattr(inner, "eqns"):
                yield from equations(inner)


def test_a_pool_of_2_to_the_40_elements_is_addressed_by_small_coordinates():
    arguments = shapes(P=2**20, L=32, K=8, N=32)
    assert arguments[1].size == 2**40
    lower(arguments)
    traced = jax.make_jaxpr(lambda *x: hopper.paged_attention(*x, SCALE))(*arguments)
    kernel = [e for e in equations(traced.jaxpr) if e.primitive.name == "copy_gmem_to_smem"]
    assert kernel
    for copy in kernel:
        assert copy.invars[0].aval.shape == (2**20 * 32, 2, 16, 8, 128)
    products = [
        e
        for e in equations(traced.jaxpr)
        if e.primitive.name == "mul" and e.outvars[0].aval.dtype == jnp.int32
    ]
    factors = {int(v.val) for e in products for v in e.invars if hasattr(v, "val")}
    assert len(products) > 0 and max(factors) <= 64


@pytest.mark.parametrize(
    ("dtype", "changes", "message"),
    [
        ("bfloat16", {"T": 2}, "1 query a row, not 2; prefill goes to 'gpu'"),
        ("int8", {}, "dtype int8 is none of float32, bfloat16, float16"),
        ("bfloat16", {"H": 72}, "head_dim=72 is no multiple of 16 up to 256"),
        ("bfloat16", {"H": 512}, "head_dim=512 is no multiple of 16 up to 256"),
        ("bfloat16", {"Z": 20}, "block_size=20 is no multiple of 8 up to 256"),
        ("float32", {"Z": 256}, "are 524288 bytes; shared memory holds 223232"),
        ("bfloat16", {"R": 65536}, "65536 rows are more than 65535"),
        ("bfloat16", {"P": 2**26, "L": 32}, "num_layers=32 is not below"),
    ],
)
def test_refuses_by_name(dtype: str, changes: dict[str, int], message: str):
    with pytest.raises(ValueError, match=f"implementation='hopper' cannot serve this: .*{message}"):
        jax.eval_shape(lambda *x: hopper.paged_attention(*x, SCALE), *shapes(dtype, **changes))


def test_refuses_older_gpus():
    assert hopper.unsupported_device(SimpleNamespace(compute_capability="9.0")) == ""
    assert "8.9 is neither" in hopper.unsupported_device(SimpleNamespace(compute_capability="8.9"))


@settings(deadline=None)
@given(
    group=st.integers(1, 64),
    head_dim=st.integers(1, 16).map(lambda n: 16 * n),
    block_size=st.integers(1, 32).map(lambda n: 8 * n),
    dtype=st.sampled_from(["bfloat16", "float32"]),
)
def test_whatever_is_served_has_a_plan_that_fits(
    group: int, head_dim: int, block_size: int, dtype: str
):
    q, pool, *_ = shapes(dtype, N=2 * group, H=head_dim, Z=block_size)
    if hopper.unsupported(q, pool):
        return
    plan = hopper.make_plan(group, head_dim, block_size, q.dtype.itemsize)
    assert group % plan.heads == 0
    assert block_size % plan.tile_tokens == 0
    assert head_dim % (plan.lanes * plan.vector) == 0
    assert plan.vector * 4 <= 16
    block_bytes = 2 * block_size * head_dim * q.dtype.itemsize
    assert block_bytes % 128 == 0
    assert plan.stages >= 2
    assert plan.stages * plan.chunk_blocks * block_bytes <= 218 * 1024
