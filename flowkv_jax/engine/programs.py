"""The compiled pieces of a step, and the weights that go into them.

    start    (R, T)             tokens -> embeddings, and what all layers share
    layers   (R, T)             a few layers: K/V into the pool, attention, MLP
    pick     (R, T), T > 1      the one hidden state a row that a token follows
    sample   R, flags           hidden states -> logits -> token
    score    T, K               logprobs of prompt tokens, `SCORE_POSITIONS` at a time

The layers of a model are alike, so one program for a few of them is called several times with
different weights. On CPU that cuts the memory and the compile time of a program by as much as it
adds calls; the calls are queued ahead of the device and cost it nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, PartitionSpec

from flowkv_jax.engine.sampler import SamplerOutput, prompt_logprobs, sample
from flowkv_jax.engine.sampling_batch import SamplingFlags, SamplingInputs
from flowkv_jax.kv_cache.pool import pool_spec
from flowkv_jax.models.llama import Llama, LlamaEnds, StepInputs, run_layers
from flowkv_jax.models.weights import TENSOR_AXIS, leaf_name, partition_spec

SCORE_POSITIONS = 64
_MAX_CPU_LAYERS = 8
_EVERYWHERE = PartitionSpec()

# Without YNNPACK XLA multiplies float32 matrices of up to 16 rows 1.2 times faster, and wider ones
# no slower; 16-bit ones it multiplies fast only with it.
_FLOAT32_CPU_OPTIONS = {"xla_cpu_experimental_ynn_fusion_type": ""}


class Programs:
    """Compiles a model's pieces for one device or a tensor-parallel mesh.

    Args:
        model: abstract (`nnx.eval_shape`).
        weights: the state of `model` on the devices.
        block_size: Z.
        mesh: with axis `TENSOR_AXIS`; None for one device.
    """

    def __init__(
        self, model: Llama, weights: nnx.State, block_size: int, mesh: Mesh | None = None
    ) -> None:
        self._mesh = mesh
        self._block_size = block_size
        self._ends_graph = nnx.split(model.ends)[0]
        self._layer_graph = nnx.split(model.layers[0])[0]
        # Flat lists: flattening nnx's own states in Python at every call would cost more than a
        # small step.
        self._ends, self._ends_tree = jax.tree.flatten(weights["ends"])
        layers = [weights["layers"][index] for index in range(len(model.layers))]
        self._layer_tree = jax.tree.structure(layers[0])
        size = _layers_per_program(len(layers))
        self._groups = [
            (np.int32(first), [jax.tree.leaves(layer) for layer in layers[first : first + size]])
            for first in range(0, len(layers), size)
        ]
        options = _cpu_options(self._ends[0].dtype)
        ends_specs, layer_specs = _specs(weights["ends"]), _specs(layers[0])
        pool = pool_spec(TENSOR_AXIS)
        self._start = jax.jit(
            self._on_mesh(self._start_step, (ends_specs, *[_EVERYWHERE] * 3), _EVERYWHERE)
        )
        self._layers = jax.jit(
            self._on_mesh(
                self._run_group,
                ([layer_specs] * size, pool, *[_EVERYWHERE] * 3),
                (pool, _EVERYWHERE),
            ),
            donate_argnums=(1, 2),
            compiler_options=options,
        )
        self._pick = jax.jit(_picked_rows)
        self._sample = self._behind_head(_sample_rows, ends_specs, static="flags")
        self._score = self._behind_head(_score_positions, ends_specs, static="shape")

    @property
    def weights(self) -> list[jax.Array]:
        """Every weight, for measuring."""
        return self._ends + [w for _, group in self._groups for layer in group for w in layer]

    def forward(
        self,
        kv_PL2ZKH: jax.Array,
        step: StepInputs,
        previous_S: jax.Array,
        source_slots_R: np.ndarray,
    ) -> tuple[jax.Array, jax.Array]:
        """Start a step: the pool with its K/V, and hidden states [R*T, D]. Donates the pool.

        Args:
            previous_S: the tokens of the previous step, by slot; taken where `step.tokens_RT` is
                negative.
            source_slots_R: which of them each row takes.
        """
        x_XD, context = self._start(self._ends, step, previous_S, source_slots_R)
        for first, group in self._groups:
            kv_PL2ZKH, x_XD = self._layers(group, kv_PL2ZKH, x_XD, first, context)
        return kv_PL2ZKH, x_XD

    def lower_layers(
        self,
        kv_PL2ZKH: jax.Array,
        step: StepInputs,
        previous_S: jax.Array,
        source_slots_R: np.ndarray,
    ) -> jax.stages.Lowered:
        """The program that touches the pool, for inspection."""
        x_XD, context = self._start(self._ends, step, previous_S, source_slots_R)
        first, group = self._groups[0]
        return self._layers.lower(group, kv_PL2ZKH, x_XD, first, context)

    def sample(
        self,
        hidden_XD: jax.Array,
        offsets_R: np.ndarray,
        tokens_S: jax.Array,
        target_slots_R: np.ndarray,
        inputs: SamplingInputs,
        flags: SamplingFlags,
    ) -> tuple[SamplerOutput, jax.Array]:
        """A token for each row, after its query `offsets_R`; also put into `tokens_S`, by slot."""
        # A program of its own, so that the many kinds of sampling are compiled for R alone.
        is_one_each = hidden_XD.shape[0] == offsets_R.shape[0]
        hidden_RD = hidden_XD if is_one_each else self._pick(hidden_XD, offsets_R)
        arguments = (hidden_RD, tokens_S, target_slots_R, inputs)
        output: tuple[SamplerOutput, jax.Array] = self._sample(self._ends, *arguments, flags=flags)
        return output

    def score(
        self,
        hidden_XD: jax.Array,
        first: int,
        targets_T: np.ndarray,
        tile: int,
        num_logprobs: int,
    ) -> SamplerOutput:
        """Logprobs of `targets_T` after queries first, first + 1, ... of a batch with T = `tile`.

        Rows past what the tile holds mean nothing.
        """
        shape = (tile, num_logprobs)
        output: SamplerOutput = self._score(
            self._ends, hidden_XD, np.int32(first), targets_T, shape=shape
        )
        return output

    def _start_step(
        self,
        leaves: list[jax.Array],
        step: StepInputs,
        previous_S: jax.Array,
        source_slots_R: jax.Array,
    ) -> Any:
        device_tokens_R1 = previous_S[source_slots_R][:, None]
        tokens_RT = jnp.where(step.tokens_RT < 0, device_tokens_R1, step.tokens_RT)
        step = StepInputs(tokens_RT, step.q_starts_R, step.kv_lens_R, step.block_tables_RM)
        return self._merge_ends(leaves).start(step, self._block_size)

    def _run_group(
        self,
        group: list[list[jax.Array]],
        kv_PL2ZKH: jax.Array,
        x_XD: jax.Array,
        first: jax.Array,
        context: Any,
    ) -> tuple[jax.Array, jax.Array]:
        states = [jax.tree.unflatten(self._layer_tree, leaves) for leaves in group]
        return run_layers(self._layer_graph, states, kv_PL2ZKH, x_XD, first, context)

    def _merge_ends(self, leaves: list[jax.Array]) -> LlamaEnds:
        ends: LlamaEnds = nnx.merge(self._ends_graph, jax.tree.unflatten(self._ends_tree, leaves))
        return ends

    def _on_mesh(self, function: Callable[..., Any], in_specs: Any, out_specs: Any) -> Any:
        if self._mesh is None:
            return function
        return jax.shard_map(
            function, mesh=self._mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False
        )

    def _behind_head(
        self, function: Callable[..., Any], ends_specs: list[PartitionSpec], *, static: str
    ) -> Any:
        """Compile `function(logits_of, *arguments, **{static: ...})`, which wants logits."""

        def program(leaves: list[jax.Array], *arguments: Any, **flags: Any) -> Any:
            def run(leaves: list[jax.Array], *arguments: Any) -> Any:
                return function(self._merge_ends(leaves).logits, *arguments, **flags)

            in_specs = (ends_specs, *[_EVERYWHERE] * len(arguments))
            return self._on_mesh(run, in_specs, _EVERYWHERE)(leaves, *arguments)

        return jax.jit(program, static_argnames=static)


def _layers_per_program(num_layers: int) -> int:
    """All on a GPU; on CPU the largest divisor that is not above `_MAX_CPU_LAYERS`."""
    if jax.default_backend() != "cpu":
        return num_layers
    return max(n for n in range(1, _MAX_CPU_LAYERS + 1) if num_layers % n == 0)


def _specs(state: nnx.State) -> list[PartitionSpec]:
    return [partition_spec(leaf_name(path)) for path, _ in nnx.to_flat_state(state)]


def _cpu_options(dtype: jnp.dtype) -> dict[str, str]:
    """Compiler options for products of that dtype; none where this XLA does not know them."""
    if jax.default_backend() != "cpu" or dtype != jnp.float32:
        return {}
    try:
        jax.jit(lambda x: x, compiler_options=_FLOAT32_CPU_OPTIONS)(jnp.float32(0))
    except Exception:  # whatever this version of JAX raises for an option it does not know
        return {}
    return _FLOAT32_CPU_OPTIONS


def _picked_rows(hidden_XD: jax.Array, offsets_R: jax.Array) -> jax.Array:
    rows = offsets_R.shape[0]
    tile = hidden_XD.shape[0] // rows
    return hidden_XD[jnp.arange(rows, dtype=jnp.int32) * tile + offsets_R]


def _sample_rows(
    logits_of: Callable[[jax.Array], jax.Array],
    hidden_RD: jax.Array,
    tokens_S: jax.Array,
    target_slots_R: jax.Array,
    inputs: SamplingInputs,
    *,
    flags: SamplingFlags,
) -> tuple[SamplerOutput, jax.Array]:
    output = sample(logits_of(hidden_RD), inputs, flags=flags)
    return output, tokens_S.at[target_slots_R].set(output.token_ids, mode="drop")


def _score_positions(
    logits_of: Callable[[jax.Array], jax.Array],
    hidden_XD: jax.Array,
    first: jax.Array,
    targets_T: jax.Array,
    *,
    shape: tuple[int, int],
) -> SamplerOutput:
    tile, num_logprobs = shape
    size = min(targets_T.shape[0], tile)
    window_TD = jax.lax.dynamic_slice_in_dim(hidden_XD, first, size)
    return prompt_logprobs(logits_of(window_TD), targets_T[:size], num_logprobs)
