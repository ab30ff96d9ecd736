"""Layers of a Llama as Flax modules: each holds its weights and says what it computes.

Weights lie [in, out], the faster order for XLA on CPU from two rows up, fused where two projections
read the same input. They are stored so that a tensor-parallel shard is a contiguous slice of one
named axis:

    qkv      [D, K, G+2, H]   per KV head: its G query heads, then its key, then its value
    out      [K, G, H, D]
    gate_up  [D, 2, F]
    down     [F, D]

Activations keep the dtype they come in with, which may be wider than the weights'; products take
the weights' dtype and accumulate in float32.

Inside `shard_map` a module sees its shard: K and F shrink, and `axis` names the mesh axis over
which the partial sums of `out` and `down` are added. Without tensor parallelism `axis` is None.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from flowkv_jax.models.config import LlamaConfig
from pallas_kernels import cpu_matmul


class RMSNorm(nnx.Module):
    """Root-mean-square normalisation, computed in float32."""

    def __init__(self, size: int, epsilon: float, dtype: jnp.dtype) -> None:
        self.scale_D = nnx.Param(jnp.ones((size,), dtype))
        self.epsilon = epsilon

    def __call__(self, x_XD: jax.Array) -> jax.Array:
        x32_XD = x_XD.astype(jnp.float32)
        mean_square_X1 = jnp.mean(jnp.square(x32_XD), axis=-1, keepdims=True)
        normal_XD = x32_XD * jax.lax.rsqrt(mean_square_X1 + self.epsilon)
        return (normal_XD * self.scale_D[...][None].astype(jnp.float32)).astype(x_XD.dtype)


class AttentionProjections(nnx.Module):
    """Projections before and after attention; the attention itself belongs to the kernels."""

    def __init__(self, config: LlamaConfig, dtype: jnp.dtype, axis: str | None) -> None:
        kv_heads, head_dim, hidden = config.num_kv_heads, config.head_dim, config.hidden_size
        group = config.num_heads // kv_heads
        self.qkv_DKJH = nnx.Param(jnp.zeros((hidden, kv_heads, group + 2, head_dim), dtype))
        self.out_KGHD = nnx.Param(jnp.zeros((kv_heads, group, head_dim, hidden), dtype))
        if config.attention_bias:
            self.qkv_bias_KJH = nnx.Param(jnp.zeros((kv_heads, group + 2, head_dim), dtype))
            self.out_bias_D = nnx.Param(jnp.zeros((hidden,), dtype))
        self.has_bias = config.attention_bias
        self.axis = axis

    def split(self, x_XD: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Queries [X, N, H], keys and values [X, K, H] of X tokens, before rotary."""
        weight_DKJH = self.qkv_DKJH[...]
        qkv_XKJH = project(x_XD, weight_DKJH.reshape(weight_DKJH.shape[0], -1)).reshape(
            -1, *weight_DKJH.shape[1:]
        )
        if self.has_bias:
            qkv_XKJH = add_bias(qkv_XKJH, self.qkv_bias_KJH[...])
        tokens, _, _, head_dim = qkv_XKJH.shape
        q_XNH = qkv_XKJH[:, :, :-2].reshape(tokens, -1, head_dim)
        return q_XNH, qkv_XKJH[:, :, -2], qkv_XKJH[:, :, -1]

    def merge(self, attended_XNH: jax.Array) -> jax.Array:
        """Back to [X, D]."""
        hidden = self.out_KGHD.shape[-1]
        attended_XY = attended_XNH.reshape(attended_XNH.shape[0], -1)
        out_XD = project(attended_XY, self.out_KGHD[...].reshape(-1, hidden))
        out_XD = sum_over(out_XD, self.axis)
        return add_bias(out_XD, self.out_bias_D[...]) if self.has_bias else out_XD


class GatedMLP(nnx.Module):
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, config: LlamaConfig, dtype: jnp.dtype, axis: str | None) -> None:
        hidden, inner = config.hidden_size, config.intermediate_size
        self.gate_up_D2F = nnx.Param(jnp.zeros((hidden, 2, inner), dtype))
        self.down_FD = nnx.Param(jnp.zeros((inner, hidden), dtype))
        if config.mlp_bias:
            self.gate_up_bias_2F = nnx.Param(jnp.zeros((2, inner), dtype))
            self.down_bias_D = nnx.Param(jnp.zeros((hidden,), dtype))
        self.has_bias = config.mlp_bias
        self.axis = axis

    def __call__(self, x_XD: jax.Array) -> jax.Array:
        weight_D2F = self.gate_up_D2F[...]
        if not self.has_bias and cpu_matmul.serves(x_XD, weight_D2F):
            inner_XF = cpu_matmul.gated(x_XD, weight_D2F)
        else:
            gate_up_X2F = project(x_XD, weight_D2F.reshape(weight_D2F.shape[0], -1)).reshape(
                -1, *weight_D2F.shape[1:]
            )
            if self.has_bias:
                gate_up_X2F = add_bias(gate_up_X2F, self.gate_up_bias_2F[...])
            inner_XF = jax.nn.silu(gate_up_X2F[:, 0]) * gate_up_X2F[:, 1]
        out_XD = sum_over(project(inner_XF, self.down_FD[...]), self.axis)
        return (
            out_XD + self.down_bias_D[...][None].astype(out_XD.dtype) if self.has_bias else out_XD
        )


class Embedding(nnx.Module):
    """Token embeddings, sharded over the vocabulary; also the output head when it is tied."""

    def __init__(self, config: LlamaConfig, dtype: jnp.dtype, axis: str | None) -> None:
        self.weight_VD = nnx.Param(jnp.zeros((config.vocab_size, config.hidden_size), dtype))
        self.axis = axis

    def lookup(self, tokens_X: jax.Array) -> jax.Array:
        """[X] token ids -> [X, D]."""
        if self.axis is None:
            return self.weight_VD[...].at[tokens_X].get(mode="clip")
        shard_size = self.weight_VD.shape[0]
        local_X = tokens_X - jax.lax.axis_index(self.axis) * shard_size
        found_X = (local_X >= 0) & (local_X < shard_size)
        rows_XD = self.weight_VD[...].at[jnp.clip(local_X, 0, shard_size - 1)].get(mode="clip")
        return sum_over(jnp.where(found_X[:, None], rows_XD, jnp.zeros_like(rows_XD)), self.axis)

    def logits(self, x_BD: jax.Array) -> jax.Array:
        """[B, D] -> float32[B, V] over the whole vocabulary."""
        logits_BV = project(x_BD.astype(jnp.float32), self.weight_VD[...], transposed=True)
        if self.axis is None:
            return logits_BV
        return jax.lax.all_gather(logits_BV, self.axis, axis=1, tiled=True)


def project(x_XI: jax.Array, weight: jax.Array, *, transposed: bool = False) -> jax.Array:
    """[X, I] times a matrix [I, O] (or [O, I], transposed) -> [X, O] in the dtype of `x_XI`.

    Both are plain matrices on purpose: given several contracted axes, XLA would copy the weight in
    every step. And where XLA on CPU is left to do it, a single row is padded to two when the weight
    is narrow: it multiplies 16-bit matrices fast, but widens a whole one to multiply it with one
    vector.
    """
    if cpu_matmul.serves(x_XI, weight, transposed=transposed):
        return cpu_matmul.matmul(x_XI, weight, transposed=transposed)
    num_rows = x_XI.shape[0]
    narrow_XI = x_XI.astype(weight.dtype)
    if num_rows == 1 and weight.dtype.itemsize == 2:
        narrow_XI = jnp.pad(narrow_XI, ((0, 1), (0, 0)))
    equation = "XI,OI->XO" if transposed else "XI,IO->XO"
    product = jnp.einsum(equation, narrow_XI, weight, preferred_element_type=jnp.float32)
    return product[:num_rows].astype(x_XI.dtype)


def add_bias(x: jax.Array, bias: jax.Array) -> jax.Array:
    """`x` plus a bias of its trailing axes, in the dtype of `x`."""
    return x + bias[None].astype(x.dtype)


def rotate(x_XNH: jax.Array, cos_XH: jax.Array, sin_XH: jax.Array) -> jax.Array:
    """Rotary embedding in the half-split convention: dimension i turns with i + H/2.

    `cos_XH` and `sin_XH` are float32 with both halves filled, sine negated in the first half.
    """
    half = x_XNH.shape[-1] // 2
    swapped_XNH = jnp.concatenate([x_XNH[..., half:], x_XNH[..., :half]], axis=-1)
    turned = x_XNH.astype(jnp.float32) * cos_XH[:, None] + (
        swapped_XNH.astype(jnp.float32) * sin_XH[:, None]
    )
    return turned.astype(x_XNH.dtype)


def rotary_tables(
    positions_X: jax.Array, inverse_frequencies_J: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """cos and signed sin for `rotate`: float32[X, H] from int32[X] and float32[H/2]."""
    angles_XJ = positions_X[:, None].astype(jnp.float32) * inverse_frequencies_J[None]
    cos_XJ, sin_XJ = jnp.cos(angles_XJ), jnp.sin(angles_XJ)
    return jnp.concatenate([cos_XJ, cos_XJ], -1), jnp.concatenate([-sin_XJ, sin_XJ], -1)


def sum_over(x: jax.Array, axis: str | None) -> jax.Array:
    """Sum over a mesh axis; the value itself without one."""
    return x if axis is None else jax.lax.psum(x, axis)
