"""Every implementation of paged attention against dense attention in float64."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.block_tables import check_block_tables
from pallas_kernels.kv_layout import KEY, LAYER_MAJOR_AXES, POOL_AXES, VALUE
from pallas_kernels.paged_attention import IMPLEMENTATIONS, cpu, gpu, paged_attention, xla

LAYERS, LAYER = 3, 1
TOLERANCES = {"float32": 2e-6, "bfloat16": 1e-2, "float16": 2e-3}


@dataclass(frozen=True)
class Case:
    """Row r has lens[r] cached tokens, the last `queries` of them asking (or all, if fewer)."""

    lens: tuple[int, ...]
    queries: int
    block_size: int = 16
    kv_heads: int = 2
    group: int = 3
    head_dim: int = 64
    shared: bool = False


DECODE = {
    "decode": Case(lens=(1, 16, 17, 130, 257), queries=1),
    "decode_empty_row": Case(lens=(0, 33), queries=1),
    "decode_one_row": Case(lens=(129,), queries=1, kv_heads=3),
    "decode_shared_blocks": Case(lens=(64, 64), queries=1, shared=True),
    "decode_mha": Case(lens=(40, 5), queries=1, group=1, kv_heads=4, head_dim=80),
    "decode_mqa": Case(lens=(100,), queries=1, group=16, kv_heads=1, head_dim=128),
    "decode_many_heads": Case(lens=(31, 33), queries=1, group=1, kv_heads=16, block_size=32),
    "decode_odd_blocks": Case(lens=(71, 24, 25), queries=1, group=8, block_size=24, head_dim=96),
}
PREFILL = {
    "prefill": Case(lens=(16, 40, 200), queries=16),
    "prefill_padded": Case(lens=(3, 0, 130), queries=16),
    "prefill_small_blocks": Case(lens=(70, 9), queries=8, block_size=8, head_dim=96),
    "prefill_large_blocks": Case(lens=(300, 64), queries=64, block_size=64),
    "prefill_mqa": Case(lens=(90, 33), queries=33, group=16, kv_heads=1, head_dim=80),
    "prefill_mha": Case(lens=(129, 128), queries=128, group=1, kv_heads=3, head_dim=128),
    "prefill_shared_prefix": Case(lens=(48, 48), queries=16, shared=True),
}
CASES = DECODE | PREFILL


@dataclass(frozen=True)
class Problem:
    """Arguments of one call, and what it must give where that means something."""

    q_RTNH: np.ndarray
    kv_PL2ZKH: np.ndarray
    tables_RM: np.ndarray
    lens_R: np.ndarray
    starts_R: np.ndarray
    expected_RTNH: np.ndarray
    is_real_RT: np.ndarray

    def check(self, out_RTNH: jax.Array, tolerance: float) -> None:
        out = np.asarray(out_RTNH).astype(np.float64)
        assert np.isfinite(out).all()
        difference = np.abs(out - self.expected_RTNH)[self.is_real_RT]
        assert difference.max() <= tolerance * np.abs(self.expected_RTNH[self.is_real_RT]).max()


def make(case: Case, dtype: str) -> Problem:
    """Blocks in random places; what no row sees is NaN, entries that none uses are absurd."""
    rng = np.random.default_rng(sum(case.lens))
    rows, z = len(case.lens), case.block_size
    used = [-(-length // z) for length in case.lens]
    num_blocks = sum(used) + 3
    shape = (num_blocks, LAYERS, 2, z, case.kv_heads, case.head_dim)
    kv = np.asarray(jnp.asarray(rng.standard_normal(shape), dtype))
    ids = rng.permutation(num_blocks)
    absurd = [-1, -(2**31), 2**31 - 1, num_blocks]
    tables = rng.choice(absurd, (rows, max(used) + 2)).astype(np.int32)
    seen = np.zeros((num_blocks, z), bool)
    first = 0
    for row, length in enumerate(case.lens):
        tables[row, : used[row]] = ids[first : first + used[row]]
        first += 0 if case.shared else used[row]
        for position in range(length):
            seen[tables[row, position // z], position % z] = True
    poisoned = kv.copy()
    poisoned[np.broadcast_to(~seen[:, None, None, :], shape[:4])] = np.nan
    poisoned[:, [layer for layer in range(LAYERS) if layer != LAYER]] = np.nan
    lens = np.array(case.lens, np.int32)
    starts = np.maximum(lens - case.queries, 0).astype(np.int32)
    q_shape = (rows, case.queries, case.kv_heads * case.group, case.head_dim)
    q = np.asarray(jnp.asarray(rng.standard_normal(q_shape), dtype))
    check_block_tables(tables, lens, num_blocks=num_blocks, block_size=z)
    expected = dense(q.astype(np.float64), kv.astype(np.float64), tables, lens, starts)
    is_real = (starts[:, None] + np.arange(case.queries)) < lens[:, None]
    return Problem(q, poisoned, tables, lens, starts, expected, is_real)


def dense(q_RTNH, kv_PL2ZKH, tables_RM, lens, starts):
    """Row by row, query by query, head by head, in float64."""
    out = np.zeros(q_RTNH.shape)
    rows, queries, heads, head_dim = q_RTNH.shape
    group = heads // kv_PL2ZKH.shape[4]
    for r in range(rows):
        used = tables_RM[r, : -(-lens[r] // kv_PL2ZKH.shape[3])]
        k_SKH, v_SKH = (
            kv_PL2ZKH[used, LAYER, half].reshape(-1, *kv_PL2ZKH.shape[4:]) for half in (KEY, VALUE)
        )
        for t in range(queries):
            visible = min(lens[r], starts[r] + t + 1)
            if starts[r] + t >= lens[r]:
                continue
            for n in range(heads):
                scores = k_SKH[:visible, n // group] @ q_RTNH[r, t, n] / np.sqrt(head_dim)
                weights = np.exp(scores - scores.max())
                out[r, t, n] = weights @ v_SKH[:visible, n // group] / weights.sum()
    return out


compiled = jax.jit(paged_attention, static_argnames="implementation")


def arguments(problem: Problem) -> tuple[jax.Array, ...]:
    tables = (problem.tables_RM, problem.lens_R, problem.starts_R)
    return (
        jnp.asarray(problem.q_RTNH),
        jnp.asarray(problem.kv_PL2ZKH),
        jnp.int32(LAYER),
        *map(jnp.asarray, tables),
    )


def runs() -> list[tuple[str, str, str]]:
    """(implementation, case, dtype) of the suite.

    `hopper` is `gpu` but for decode, and its interpreter is slow; it has more tests of its own.
    float16 takes the way of bfloat16, but for being widened.
    """
    every = itertools.product(IMPLEMENTATIONS, CASES, TOLERANCES)
    return [
        (name, case, dtype)
        for name, case, dtype in every
        if (name != "hopper" or (case in DECODE and dtype == "float32"))
        and (dtype != "float16" or case in ("decode", "decode_odd_blocks", "prefill"))
    ]


@pytest.mark.parametrize(("implementation", "name", "dtype"), runs())
def test_matches_dense_attention(implementation: str, name: str, dtype: str):
    problem = make(CASES[name], dtype)
    problem.check(compiled(*arguments(problem), implementation=implementation), TOLERANCES[dtype])


@pytest.mark.parametrize("implementation", list(IMPLEMENTATIONS))
@pytest.mark.parametrize("name", ["decode", "prefill"])
def test_reads_16_bit_floats_held_as_bits(implementation: str, name: str):
    problem = make(CASES[name], "bfloat16")
    q, kv, *rest = arguments(problem)
    bits = jax.lax.bitcast_convert_type(kv, jnp.uint16)
    problem.check(compiled(q, bits, *rest, implementation=implementation), TOLERANCES["bfloat16"])


@pytest.mark.parametrize("num_splits", [1, 2, 3, 7, 64])
@pytest.mark.parametrize("name", list(DECODE))
def test_shares_of_the_context_merge_to_the_whole(num_splits: int, name: str):
    problem = make(CASES[name], "float32")
    scale = problem.q_RTNH.shape[-1] ** -0.5
    problem.check(
        gpu.paged_attention(*arguments(problem), scale, num_splits=num_splits),
        TOLERANCES["float32"],
    )


@pytest.mark.parametrize("implementation", [cpu, gpu, xla])
@pytest.mark.parametrize("name", ["decode", "prefill"])
def test_serves_the_layer_major_order_it_is_measured_against(implementation, name: str):
    problem = make(CASES[name], "float32")
    q, kv, *rest = arguments(problem)
    order = [POOL_AXES.index(axis) for axis in LAYER_MAJOR_AXES]
    out = implementation.paged_attention(
        q, jnp.transpose(kv, order), *rest, q.shape[-1] ** -0.5, axes=LAYER_MAJOR_AXES
    )
    problem.check(out, TOLERANCES["float32"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": (2, 1, 5, 8)}, "num_heads=5 is not a multiple of num_kv_heads=2"),
        ({"q": (2, 1, 4, 16)}, "head_dim=16"),
        ({"q": (2, 4, 8)}, r"\[R, T, N, H\]"),
        ({"tables": (3, 4)}, r"block tables must be \[2, M\]"),
        ({"lens": (3,)}, r"kv_lens must be \[2\]"),
        ({"implementation": "cuda"}, "'cuda' is not one of"),
        ({"pool": (5, 1, 3, 4, 2, 8)}, "the pool must be"),
        ({"implementation": "gpu"}, "head_dim=8 is no multiple of 16 up to 256"),
        (
            {
                "q": (2, 1, 130, 16),
                "pool": (5, 1, 2, 4, 2, 16),
                "implementation": "gpu",
            },
            "65 query heads a KV head are more than 64",
        ),
    ],
)
def test_refuses_what_does_not_fit(change: dict, message: str):
    shapes = {
        "q": (2, 1, 4, 8),
        "pool": (5, 1, 2, 4, 2, 8),
        "tables": (2, 4),
        "lens": (2,),
    } | change
    with pytest.raises(ValueError, match=message):
        paged_attention(
            jnp.zeros(shapes["q"], jnp.float32),
            jnp.zeros(shapes["pool"], jnp.float32),
            0,
            jnp.zeros(shapes["tables"], jnp.int32),
            jnp.zeros(shapes["lens"], jnp.int32),
            jnp.zeros((2,), jnp.int32),
            implementation=shapes.get("implementation", "auto"),
        )


@pytest.mark.parametrize(
    ("dtypes", "message"),
    [
        (("bfloat16", "float32", "int32"), "queries are bfloat16, the pool is float32"),
        (("int8", "int8", "int32"), "queries are int8, which is none of float32, bfloat16"),
        (("float32", "float32", "uint32"), "block tables must be int32, got uint32"),
    ],
)
def test_refuses_other_dtypes(dtypes: tuple[str, str, str], message: str):
    q, pool, tables = dtypes
    with pytest.raises(ValueError, match=message):
        paged_attention(
            jnp.zeros((1, 1, 2, 8), q),
            jnp.zeros((2, 1, 2, 4, 2, 8), pool),
            0,
            jnp.zeros((1, 1), tables),
            jnp.zeros(1, jnp.int32),
            jnp.zeros(1, jnp.int32),
        )


@pytest.mark.parametrize(
    ("tables", "lens", "message"),
    [
        ([[0, 5]], [17], r"row 0 uses block 5 at entry 1, outside the pool's \[0, 5\)"),
        ([[0, 1], [-1, 0]], [0, 1], r"row 1 uses block -1 at entry 0"),
        ([[0, 1]], [33], r"row 0 has kv_len=33, outside \[0, 32\]"),
        ([[0, 1]], [-1], r"row 0 has kv_len=-1"),
    ],
)
def test_tables_with_wrong_entries_in_use_are_found(tables, lens, message: str):
    with pytest.raises(ValueError, match=message):
        check_block_tables(
            np.array(tables, np.int32), np.array(lens, np.int32), num_blocks=5, block_size=16
        )


def test_entries_not_in_use_may_be_anything():
    tables = np.array([[4, -9], [99, 99]], np.int32)
    check_block_tables(tables, np.array([16, 0], np.int32), num_blocks=5, block_size=16)
