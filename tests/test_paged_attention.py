"""Every implementation of paged attention against dense attention in float64."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.kv_layout import KEY, VALUE
from pallas_kernels.paged_attention import IMPLEMENTATIONS, paged_attention


@dataclass(frozen=True)
class Case:
    """Row r has q_starts[r] cached tokens before its queries; lens[r] with them."""

    lens: tuple[int, ...]
    queries: int
    block_size: int = 16
    kv_heads: int = 2
    group: int = 3
    head_dim: int = 64
    shared: bool = False


CASES = {
    "decode": Case(lens=(1, 16, 17, 130, 257), queries=1),
    "decode_empty_row": Case(lens=(0, 33), queries=1),
    "decode_one_row": Case(lens=(129,), queries=1, kv_heads=3),
    "decode_shared_blocks": Case(lens=(64, 64), queries=1, shared=True),
    "decode_mha": Case(lens=(40, 5), queries=1, group=1, kv_heads=4, head_dim=80),
    "decode_mqa": Case(lens=(100,), queries=1, group=16, kv_heads=1, head_dim=128),
    "prefill": Case(lens=(16, 40, 200), queries=16),
    "prefill_padded": Case(lens=(3, 0, 130), queries=16),
    "prefill_small_blocks": Case(lens=(70, 9), queries=8, block_size=8, head_dim=96),
    "prefill_large_blocks": Case(lens=(300, 64), queries=64, block_size=64),
}


compiled = jax.jit(paged_attention, static_argnames="implementation")


def dense(q_RTNH, k_RSKH, v_RSKH, lens, starts):
    """Row by row, query by query, in float64."""
    out = np.zeros(q_RTNH.shape)
    rows, queries, heads, head_dim = q_RTNH.shape
    group = heads // k_RSKH.shape[2]
    for r in range(rows):
        for t in range(queries):
            visible = min(lens[r], starts[r] + t + 1)
            if starts[r] + t >= lens[r]:
                continue
            for n in range(heads):
                k, v = k_RSKH[r, :visible, n // group], v_RSKH[r, :visible, n // group]
                scores = k.astype(np.float64) @ q_RTNH[r, t, n] / np.sqrt(head_dim)
                weights = np.exp(scores - scores.max())
                out[r, t, n] = weights @ v / weights.sum()
    return out


@pytest.mark.parametrize("implementation", list(IMPLEMENTATIONS))
@pytest.mark.parametrize("name", list(CASES))
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 2e-6), ("bfloat16", 1e-2)])
def test_matches_dense_attention(implementation: str, name: str, dtype: str, tolerance: float):
    case = CASES[name]
    rng = np.random.default_rng(list(CASES).index(name))
    layers, layer = 3, 1
    widths = [-(-length // case.block_size) for length in case.lens]
    num_blocks = sum(widths) + 3
    shape = (num_blocks, layers, 2, case.block_size, case.kv_heads, case.head_dim)
    kv = np.asarray(jnp.asarray(rng.standard_normal(shape), dtype))
    ids = rng.permutation(num_blocks)
    width = max(widths) + 2
    tables = rng.integers(0, num_blocks, (len(case.lens), width)).astype(np.int32)
    done = 0
    for row, count in enumerate(widths):
        first = 0 if case.shared else done
        tables[row, :count] = ids[first : first + count]
        done += count
    queries_shape = (len(case.lens), case.queries, case.kv_heads * case.group, case.head_dim)
    q = np.asarray(jnp.asarray(rng.standard_normal(queries_shape), dtype))
    starts = np.maximum(np.array(case.lens) - case.queries, 0).astype(np.int32)

    gathered = kv[tables, layer].astype(np.float64)
    flat = (len(case.lens), -1, case.kv_heads, case.head_dim)
    expected = dense(
        q.astype(np.float64),
        gathered[:, :, KEY].reshape(flat),
        gathered[:, :, VALUE].reshape(flat),
        case.lens,
        starts,
    )
    out = compiled(
        jnp.asarray(q),
        jnp.asarray(kv),
        jnp.int32(layer),
        jnp.asarray(tables),
        jnp.asarray(case.lens, jnp.int32),
        jnp.asarray(starts),
        implementation=implementation,
    )
    out = np.asarray(out).astype(np.float64)
    assert np.isfinite(out).all()
    is_real = (starts[:, None] + np.arange(case.queries)) < np.array(case.lens)[:, None]
    error = np.abs(out - expected)[is_real].max() / np.abs(expected[is_real]).max()
    assert error <= tolerance


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


def test_refuses_other_dtypes():
    with pytest.raises(ValueError, match="queries are bfloat16, the pool is float32"):
        paged_attention(
            jnp.zeros((1, 1, 2, 8), jnp.bfloat16),
            jnp.zeros((2, 1, 2, 4, 2, 8), jnp.float32),
            0,
            jnp.zeros((1, 1), jnp.int32),
            jnp.zeros(1, jnp.int32),
            jnp.zeros(1, jnp.int32),
        )
