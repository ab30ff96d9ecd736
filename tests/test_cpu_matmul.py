"""Products of a few rows on CPU against NumPy in float64."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import cpu_matmul

multiply = jax.jit(cpu_matmul.matmul, static_argnames="transposed")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("rows", [1, 2, 3, 6, 7, 8, 16, 32])
@pytest.mark.parametrize(("depth", "columns"), [(48, 64), (16, 16), (80, 208), (160, 1040)])
def test_matches_numpy(dtype: str, transposed: bool, rows: int, depth: int, columns: int):
    rng = np.random.default_rng(rows)
    x = rng.standard_normal((rows, depth)).astype(np.float32)
    shape = (columns, depth) if transposed else (depth, columns)
    weight = jnp.asarray(rng.standard_normal(shape), dtype)
    wide = np.asarray(weight).astype(np.float64)
    expected = x.astype(np.float64) @ (wide.T if transposed else wide)
    out = np.asarray(multiply(x, weight, transposed=transposed))
    assert out.shape == expected.shape
    assert np.abs(out - expected).max() <= 2e-6 * np.abs(expected).max()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("rows", [1, 3, 8, 16, 32])
@pytest.mark.parametrize(("depth", "inner"), [(48, 64), (80, 208)])
def test_gated_layer(dtype: str, rows: int, depth: int, inner: int):
    rng = np.random.default_rng(rows)
    x = rng.standard_normal((rows, depth)).astype(np.float32)
    weight = jnp.asarray(rng.standard_normal((depth, 2, inner)), dtype)
    wide = np.asarray(weight).astype(np.float64)
    gate, up = (x.astype(np.float64) @ wide[:, half] for half in (0, 1))
    expected = gate / (1 + np.exp(-gate)) * up
    out = np.asarray(jax.jit(cpu_matmul.gated)(x, weight))
    assert np.abs(out - expected).max() <= 2e-6 * np.abs(expected).max()


@pytest.mark.parametrize(
    ("x", "weight", "dtype"),
    [
        ((64, 32), (32, 32), "float32"),  # too many rows
        ((9, 32), (32, 32), "float32"),  # not whole tiles
        ((1, 32), (32, 20), "float32"),  # not whole vectors
        ((1, 32), (32, 32), "float16"),
    ],
)
def test_leaves_the_rest_to_xla(x: tuple, weight: tuple, dtype: str):
    assert not cpu_matmul.serves(jnp.zeros(x, jnp.float32), jnp.zeros(weight, dtype))


def test_many_calls_at_once_and_in_a_row():
    """Jobs are freed while late tasks of theirs still wait for a thread."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((1, 32)).astype(np.float32)
    weights = [rng.standard_normal((32, 512)).astype(np.float32) for _ in range(8)]

    @jax.jit
    def many(x: jax.Array, weights: list[jax.Array]) -> list[jax.Array]:
        return [cpu_matmul.matmul(x, weight) for weight in weights * 4]

    expected = [x @ weight for weight in weights * 4]
    for _ in range(200):
        for out, right in zip(many(x, weights), expected, strict=True):
            np.testing.assert_allclose(out, right, rtol=1e-4, atol=1e-5)
