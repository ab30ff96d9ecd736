"""Llama over the block-major pool: one forward pass for prefill and decode alike.

A step is R rows of T query tokens. Decode has T = 1 and a row a sequence; prefill cuts each prompt
chunk into tiles of T tokens, a row a tile. Every layer first writes the step's K and V into the
pool, then attends through the block tables, so a tile sees earlier tiles of its own chunk there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx

from flowkv_jax.models.config import LlamaConfig
from flowkv_jax.models.layers import (
    AttentionProjections,
    Embedding,
    GatedMLP,
    RMSNorm,
    rotary_tables,
    rotate,
)
from pallas_kernels.kv_write import Implementation as KVWriteImplementation
from pallas_kernels.kv_write import kv_write
from pallas_kernels.paged_attention import paged_attention
from pallas_kernels.paged_attention.api import Implementation


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class StepInputs:
    """What one forward pass computes.

    Attributes:
        tokens_RT: int32[R, T].
        q_starts_R: int32[R], position of the row's first token.
        kv_lens_R: int32[R], cached tokens once the row is written: q_start + its number of real
            tokens. Tokens at or past it are padding and are written nowhere; 0 for a padded row.
        block_tables_RM: int32[R, M]; any id of the pool past the row's blocks.
    """

    tokens_RT: jax.Array
    q_starts_R: jax.Array
    kv_lens_R: jax.Array
    block_tables_RM: jax.Array


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class StepContext:
    """The part of a step that all layers share, worked out once."""

    cos_XH: jax.Array
    sin_XH: jax.Array
    slots_X: jax.Array
    q_starts_R: jax.Array
    kv_lens_R: jax.Array
    block_tables_RM: jax.Array


_WRITES_WITH: Mapping[str, KVWriteImplementation] = {
    "reference": "reference",
    "gpu": "gpu",
    "hopper": "gpu",
}
"""Who asks for an attention implementation by name gets the KV write that goes with it."""


class LlamaLayer(nnx.Module):
    """Attention and MLP, each behind its norm, each added to the stream."""

    def __init__(
        self, config: LlamaConfig, dtype: jnp.dtype, axis: str | None, attention: Implementation
    ) -> None:
        self.attention_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype)
        self.attention = AttentionProjections(config, dtype, axis)
        self.mlp_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype)
        self.mlp = GatedMLP(config, dtype, axis)
        self.implementation = attention
        self.dtype = dtype

    def __call__(
        self, x_XD: jax.Array, kv_PL2ZKH: jax.Array, layer: jax.Array, context: StepContext
    ) -> tuple[jax.Array, jax.Array]:
        with jax.named_scope("attention"):
            q_XNH, k_XKH, v_XKH = self.attention.split(self.attention_norm(x_XD))
            q_XNH = rotate(q_XNH, context.cos_XH, context.sin_XH)
            k_XKH = rotate(k_XKH, context.cos_XH, context.sin_XH)
            q_XNH, k_XKH, v_XKH = (x.astype(self.dtype) for x in (q_XNH, k_XKH, v_XKH))
            kv_PL2ZKH = kv_write(
                kv_PL2ZKH,
                layer,
                k_XKH,
                v_XKH,
                context.slots_X,
                implementation=_WRITES_WITH.get(self.implementation, "auto"),
            )
            rows = context.q_starts_R.shape[0]
            attended_RTNH = paged_attention(
                q_XNH.reshape(rows, -1, *q_XNH.shape[1:]),
                kv_PL2ZKH,
                layer,
                context.block_tables_RM,
                context.kv_lens_R,
                context.q_starts_R,
                implementation=self.implementation,
            )
            attended_XNH = attended_RTNH.reshape(q_XNH.shape).astype(x_XD.dtype)
            x_XD = x_XD + self.attention.merge(attended_XNH)
        with jax.named_scope("mlp"):
            return x_XD + self.mlp(self.mlp_norm(x_XD)), kv_PL2ZKH


class LlamaEnds(nnx.Module):
    """What comes before the first layer and after the last: embedding, final norm, output head."""

    def __init__(
        self, config: LlamaConfig, dtype: jnp.dtype, activation_dtype: jnp.dtype, axis: str | None
    ) -> None:
        self.embedding = Embedding(config, dtype, axis)
        self.final_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype)
        if not config.tie_word_embeddings:
            self.head = Embedding(config, dtype, axis)
        self.is_tied = config.tie_word_embeddings
        self.activation_dtype = activation_dtype
        self.inverse_frequencies = tuple(config.rope.inverse_frequencies(config.head_dim).tolist())

    def start(self, step: StepInputs, block_size: int) -> tuple[jax.Array, StepContext]:
        """What the first layer takes: embedded tokens [R*T, D], and what all layers share."""
        x_XD = self.embedding.lookup(step.tokens_RT.reshape(-1)).astype(self.activation_dtype)
        num_queries = step.tokens_RT.shape[1]
        positions_RT = step.q_starts_R[:, None] + jnp.arange(num_queries, dtype=jnp.int32)[None]
        is_real_RT = positions_RT < step.kv_lens_R[:, None]
        block_RT = jnp.take_along_axis(
            step.block_tables_RM,
            jnp.minimum(positions_RT // block_size, step.block_tables_RM.shape[1] - 1),
            axis=1,
        )
        slots_RT = jnp.where(is_real_RT, block_RT * block_size + positions_RT % block_size, -1)
        cos_XH, sin_XH = rotary_tables(
            positions_RT.reshape(-1), jnp.asarray(self.inverse_frequencies, jnp.float32)
        )
        return x_XD, StepContext(
            cos_XH=cos_XH,
            sin_XH=sin_XH,
            slots_X=slots_RT.reshape(-1),
            q_starts_R=step.q_starts_R,
            kv_lens_R=step.kv_lens_R,
            block_tables_RM=step.block_tables_RM,
        )

    def logits(self, hidden_BD: jax.Array) -> jax.Array:
        """float32[B, V] from what the last layer gave, [B, D]."""
        head = self.embedding if self.is_tied else self.head
        return head.logits(self.final_norm(hidden_BD))


class Llama(nnx.Module):
    """The whole model. `engine.programs` compiles it in pieces; `forward` is all of it at once.

    Args:
        config: shapes and mathematics.
        dtype: of weights and cache.
        activation_dtype: of what flows between the layers; None for `dtype`.
        axis: mesh axis of tensor parallelism, or None.
        attention: implementation of paged attention.
    """

    def __init__(
        self,
        config: LlamaConfig,
        dtype: jnp.dtype,
        *,
        activation_dtype: jnp.dtype | None = None,
        axis: str | None = None,
        attention: Implementation = "auto",
    ) -> None:
        self.ends = LlamaEnds(config, dtype, activation_dtype or dtype, axis)
        self.layers = nnx.List(
            [LlamaLayer(config, dtype, axis, attention) for _ in range(config.num_layers)]
        )

    def forward(self, kv_PL2ZKH: jax.Array, step: StepInputs) -> tuple[jax.Array, jax.Array]:
        """Compute one step.

        Args:
            kv_PL2ZKH: the pool; give it up, use the returned one.
            step: R rows of T tokens.

        Returns:
            The pool with the step's K/V written, and hidden states [R*T, D] for `ends.logits`.
        """
        x_XD, context = self.ends.start(step, kv_PL2ZKH.shape[3])
        layers = [nnx.split(layer) for layer in self.layers]
        graph = layers[0][0]
        weights = [state for _, state in layers]
        return run_layers(graph, weights, kv_PL2ZKH, x_XD, jnp.int32(0), context)


def run_layers(
    graph: nnx.GraphDef[LlamaLayer],
    weights: Sequence[nnx.State],
    kv_PL2ZKH: jax.Array,
    x_XD: jax.Array,
    first: jax.Array,
    context: StepContext,
) -> tuple[jax.Array, jax.Array]:
    """Run the layers `first`, `first + 1`, ... of which `weights` holds the states.

    Returns:
        The pool and the hidden states [R*T, D].
    """
    for index, state in enumerate(weights):
        x_XD, kv_PL2ZKH = _run_layer(graph, state, x_XD, kv_PL2ZKH, first + index, context)
    return kv_PL2ZKH, x_XD


@jax.jit(static_argnums=0, inline=False)
def _run_layer(
    graph: nnx.GraphDef[LlamaLayer],
    weights: nnx.State,
    x_XD: jax.Array,
    kv_PL2ZKH: jax.Array,
    layer: jax.Array,
    context: StepContext,
) -> tuple[jax.Array, jax.Array]:
    # A function of its own under jit, so that equal layers are traced once; XLA inlines the calls,
    # and the layers come out unrolled.
    return nnx.merge(graph, weights)(x_XD, kv_PL2ZKH, layer, context)
