"""The device side of a node: weights, pool, compiled steps.

`dispatch` turns a scheduled step into a few calls of compiled programs and returns at once;
`InFlightStep.collect` waits for the sampled tokens. Between the two the host is free to schedule
the next step. Programs, by what their shapes depend on:

    forward  (R, T)            K/V of the step into the pool, hidden states out
    sample   (R, T), flags     one row of hidden states a sequence -> logits -> token
    score    64, K             logprobs of prompt tokens, 64 positions at a time

Every program that writes the pool gives it up and gets it back (donation), so there is one pool and
the device orders all access to it: a block that the host hands on while a step is in flight is
written by its new owner only after that step.

The token a decode feeds may have been sampled by the step just before and never have been on the
host: sampled tokens also stay on the device, by slot (`Batch.source_slots_R`, `target_slots_R`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, PartitionSpec

from flowkv_jax.engine.batch import Batch, BatchBuilder
from flowkv_jax.engine.sampler import SamplerOutput, prompt_logprobs, sample
from flowkv_jax.engine.sampling_batch import (
    SamplingBatcher,
    SamplingFlags,
    SamplingInputs,
    logprobs_bucket,
)
from flowkv_jax.engine.sampling_state import SamplingState
from flowkv_jax.engine.step import ScheduledSequence, ScheduledStep
from flowkv_jax.kv_cache.pool import KVPool, pool_spec
from flowkv_jax.models.llama import Llama, StepInputs
from flowkv_jax.models.weights import TENSOR_AXIS, leaf_name, partition_spec
from flowkv_jax.sampling_params import SamplingParams

_SCORE_POSITIONS = 64


@dataclass(frozen=True)
class PromptScores:
    """Log-probabilities of prompt tokens [start, start + count): the first rows of `samples`."""

    sequence: ScheduledSequence
    start: int
    count: int
    samples: SamplerOutput


@dataclass(frozen=True)
class StepResult:
    """What a step yielded.

    Attributes:
        tokens: one a member of `ScheduledStep.sampling`, in its order.
        rows: for each of them, where its logprobs are: (samples on the host, row); the samples have
            logprobs only if some request of the batch asked for them.
        prompt_scores: in order of position within a request.
    """

    tokens: tuple[int, ...] = ()
    rows: tuple[tuple[SamplerOutput, int], ...] = ()
    prompt_scores: tuple[PromptScores, ...] = ()


@dataclass
class InFlightStep:
    """A step the device is working on."""

    step: ScheduledStep
    _samples: list[tuple[SamplerOutput, tuple[tuple[int, int], ...]]] = field(default_factory=list)
    _scores: list[PromptScores] = field(default_factory=list)

    def collect(self) -> StepResult:
        """Wait for the step and bring its results to the host."""
        count = len(self.step.sampling)
        tokens = [0] * count
        rows: list[Any] = [None] * count
        for output, sampling in self._samples:
            host = jax.tree.map(np.asarray, output)
            token_list = host.token_ids.tolist()
            for row, index in sampling:
                tokens[index] = token_list[row]
                rows[index] = (host, row)
        scores = tuple(
            PromptScores(s.sequence, s.start, s.count, jax.tree.map(np.asarray, s.samples))
            for s in self._scores
        )
        return StepResult(tuple(tokens), tuple(rows), scores)


class ModelRunner:
    """Runs scheduled steps of one model on its device or tensor-parallel mesh.

    Args:
        model: abstract (`nnx.eval_shape`); its graph is compiled into the programs.
        weights: the state of `model` on the devices.
        pool: this runner becomes its only user.
        batches: builds the padded arrays.
        vocab_size: V.
        mesh: with axis `TENSOR_AXIS`; None for one device.
    """

    def __init__(
        self,
        model: Llama,
        weights: nnx.State,
        pool: KVPool,
        batches: BatchBuilder,
        *,
        vocab_size: int,
        mesh: Mesh | None = None,
    ) -> None:
        self.pool = pool
        self._batches = batches
        self._vocab_size = vocab_size
        self._sampling = SamplingBatcher(vocab_size)
        # Stands in rows whose logits nobody wants.
        self._greedy = SamplingState(
            SamplingParams(temperature=0.0), token_ids=(), num_prompt_tokens=0, seed=0
        )
        self._graph = nnx.split(model)[0]
        # A flat list: flattening nnx's own state in Python at every call would cost more than a
        # small step.
        self._leaves, self._leaves_tree = jax.tree.flatten(weights)
        self._mesh = mesh
        self._leaf_specs = [
            partition_spec(leaf_name(path)) for path, _ in nnx.to_flat_state(weights)
        ]
        self._previous_tokens_S = self._zero_tokens()
        self._slot_of: dict[str, int] = {}
        self._forward = self._compile_forward()
        self._sample = self._compile_with_logits(_sample_rows, static=("flags",))
        self._score = self._compile_with_logits(_score_positions, static=("num_logprobs",))

    # Steps

    def dispatch(self, step: ScheduledStep, states: Mapping[str, SamplingState]) -> InFlightStep:
        """Start a step.

        Args:
            states: sampling state of every request in `step.sampling`, by request id.
        """
        self.pool.swap_out(step.swap_out)
        self.pool.swap_in(step.swap_in)
        in_flight = InFlightStep(step)
        previous_S = self._previous_tokens_S
        for batch in self._batches.prefill(step.prefills):
            self._run(batch, step, states, previous_S, in_flight)
        if step.decodes:
            first = len(step.sampling) - len(step.decodes)
            batch = self._batches.decode(step.decodes, first, self._slot_of)
            self._run(batch, step, states, previous_S, in_flight)
        self._slot_of = {
            sequence.request.request_id: slot for slot, sequence in enumerate(step.sampling)
        }
        return in_flight

    def reset(self) -> None:
        """Start over with an empty pool after a step failed."""
        self.pool.reset()
        self._previous_tokens_S = self._zero_tokens()
        self._slot_of = {}

    def warmup(self, progress: Callable[[int, int], None] | None = None) -> int:
        """Compile every shape a step may use, for greedy and for plain sampling.

        Returns:
            The number of shapes.
        """
        shapes = self._batches.shapes()
        for done, shape in enumerate(shapes):
            if progress is not None:
                progress(done, len(shapes))
            batch = self._batches.padding(shape)
            hidden_RTD = self._call_forward(batch, self._previous_tokens_S)
            inputs, flags = self._sampling.build([], [], shape[0])
            self._call_sample(hidden_RTD, batch, inputs, flags)
        jax.block_until_ready(self._previous_tokens_S)
        if progress is not None:
            progress(len(shapes), len(shapes))
        return len(shapes)

    def lower_forward(self, shape: tuple[int, int]) -> jax.stages.Lowered:
        """The forward program of one shape, for inspection."""
        arguments = self._forward_arguments(self._batches.padding(shape), self._previous_tokens_S)
        return self._forward.lower(self._leaves, self.pool.kv_PL2ZKH, *arguments)

    def _run(
        self,
        batch: Batch,
        step: ScheduledStep,
        states: Mapping[str, SamplingState],
        previous_S: jax.Array,
        in_flight: InFlightStep,
    ) -> None:
        hidden_RTD = self._call_forward(batch, previous_S)
        if batch.shape[1] > 1:
            in_flight._scores.extend(self._score_prompts(batch, hidden_RTD))
        if not batch.sampling:
            return
        num_rows = batch.sampling[-1][0] + 1
        rows_states = [self._greedy] * num_rows
        positions = [0] * num_rows
        for row, index in batch.sampling:
            sequence = step.sampling[index]
            rows_states[row] = states[sequence.request.request_id]
            positions[row] = sequence.start + sequence.num_tokens
        inputs, flags = self._sampling.build(rows_states, positions, batch.shape[0])
        output = self._call_sample(hidden_RTD, batch, inputs, flags)
        in_flight._samples.append((output, batch.sampling))

    def _call_forward(self, batch: Batch, previous_S: jax.Array) -> jax.Array:
        arguments = self._forward_arguments(batch, previous_S)
        kv_PL2ZKH, self.pool.kv_PL2ZKH = self.pool.kv_PL2ZKH, None  # type: ignore[assignment]
        self.pool.kv_PL2ZKH, hidden_RTD = self._forward(self._leaves, kv_PL2ZKH, *arguments)
        return hidden_RTD

    def _forward_arguments(self, batch: Batch, previous_S: jax.Array) -> tuple[Any, ...]:
        step = StepInputs(
            batch.tokens_RT,  # type: ignore[arg-type]
            batch.q_starts_R,  # type: ignore[arg-type]
            batch.kv_lens_R,  # type: ignore[arg-type]
            batch.block_tables_RM,  # type: ignore[arg-type]
        )
        return step, previous_S, batch.source_slots_R

    def _call_sample(
        self, hidden_RTD: jax.Array, batch: Batch, inputs: SamplingInputs, flags: SamplingFlags
    ) -> SamplerOutput:
        output, self._previous_tokens_S = self._sample(
            self._leaves,
            hidden_RTD,
            batch.offsets_R,
            self._previous_tokens_S,
            batch.target_slots_R,
            inputs,
            flags=flags,
        )
        return output

    def _score_prompts(self, batch: Batch, hidden_RTD: jax.Array) -> list[PromptScores]:
        """Logprobs of the prompt tokens that follow the positions of this batch."""
        scores = []
        for row, sequence, start, size in batch.tiles:
            request = sequence.request
            wanted = request.sampling_params.num_prompt_logprobs(self._vocab_size)
            if wanted is None:
                continue
            targets = request.prompt_token_ids[start + 1 : start + 1 + size]
            for first in range(0, len(targets), _SCORE_POSITIONS):
                chunk = targets[first : first + _SCORE_POSITIONS]
                targets_T = np.zeros(_SCORE_POSITIONS, np.int32)
                targets_T[: len(chunk)] = chunk
                output = self._score(
                    self._leaves,
                    hidden_RTD,
                    np.int32(row),
                    np.int32(first),
                    targets_T,
                    num_logprobs=logprobs_bucket(wanted, self._vocab_size),
                )
                scores.append(PromptScores(sequence, start + 1 + first, len(chunk), output))
        return scores

    # Programs

    def _zero_tokens(self) -> jax.Array:
        return jnp.zeros(self._batches.num_slots, jnp.int32)

    def _model(self, leaves: Sequence[jax.Array]) -> Llama:
        model: Llama = nnx.merge(self._graph, jax.tree.unflatten(self._leaves_tree, leaves))
        return model

    def _compile_forward(self) -> Any:
        def forward(
            leaves: list[jax.Array],
            kv_PL2ZKH: jax.Array,
            step: StepInputs,
            previous_S: jax.Array,
            source_slots_R: jax.Array,
        ) -> tuple[jax.Array, jax.Array]:
            device_tokens_R1 = previous_S[source_slots_R][:, None]
            tokens_RT = jnp.where(step.tokens_RT < 0, device_tokens_R1, step.tokens_RT)
            step = StepInputs(tokens_RT, step.q_starts_R, step.kv_lens_R, step.block_tables_RM)
            kv_PL2ZKH, hidden_XD = self._model(leaves).forward(kv_PL2ZKH, step)
            return kv_PL2ZKH, hidden_XD.reshape(*tokens_RT.shape, -1)

        if self._mesh is not None:
            everywhere, pool = PartitionSpec(), pool_spec(TENSOR_AXIS)
            forward = jax.shard_map(
                forward,
                mesh=self._mesh,
                in_specs=(self._leaf_specs, pool, everywhere, everywhere, everywhere),
                out_specs=(pool, everywhere),
                check_vma=False,
            )
        return jax.jit(forward, donate_argnums=1)

    def _compile_with_logits(self, function: Callable[..., Any], *, static: tuple[str, ...]) -> Any:
        """Compile `function(logits_of, *arguments, **static)`: what follows the output head."""

        @partial(jax.jit, static_argnames=static)
        def program(leaves: list[jax.Array], *arguments: Any, **flags: Any) -> Any:
            def run(leaves: list[jax.Array], *arguments: Any) -> Any:
                return function(self._model(leaves).logits, *arguments, **flags)

            if self._mesh is None:
                return run(leaves, *arguments)
            everywhere = PartitionSpec()
            return jax.shard_map(
                run,
                mesh=self._mesh,
                in_specs=(self._leaf_specs, *[everywhere] * len(arguments)),
                out_specs=everywhere,
                check_vma=False,
            )(leaves, *arguments)

        return program


def _sample_rows(
    logits_of: Callable[[jax.Array], jax.Array],
    hidden_RTD: jax.Array,
    offsets_R: jax.Array,
    tokens_S: jax.Array,
    target_slots_R: jax.Array,
    inputs: SamplingInputs,
    *,
    flags: SamplingFlags,
) -> tuple[SamplerOutput, jax.Array]:
    """Sample each row after its token `offsets_R`; also put the tokens into their slots."""
    rows_R = jnp.arange(hidden_RTD.shape[0], dtype=jnp.int32)
    output = sample(logits_of(hidden_RTD[rows_R, offsets_R]), inputs, flags=flags)
    return output, tokens_S.at[target_slots_R].set(output.token_ids, mode="drop")


def _score_positions(
    logits_of: Callable[[jax.Array], jax.Array],
    hidden_RTD: jax.Array,
    row: jax.Array,
    first: jax.Array,
    targets_T: jax.Array,
    *,
    num_logprobs: int,
) -> SamplerOutput:
    """Logprobs of `targets_T` after tokens first, first+1, ... of a row.

    `first` is a multiple of the number of targets, and so is T unless it is smaller, so the slice
    never reaches past the (padded) row.
    """
    size = targets_T.shape[0]
    hidden_TD = jax.lax.dynamic_index_in_dim(hidden_RTD, row, keepdims=False)
    missing = max(0, size - hidden_TD.shape[0])
    hidden_TD = jnp.pad(hidden_TD, ((0, missing), (0, 0)))
    window_TD = jax.lax.dynamic_slice_in_dim(hidden_TD, first, size)
    return prompt_logprobs(logits_of(window_TD), targets_T, num_logprobs)
