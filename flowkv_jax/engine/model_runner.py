"""The device side of a node: weights, pool, compiled steps.

`dispatch` turns a scheduled step into a few calls of compiled programs and `sample` into one more;
both return at once. `InFlightStep.collect` waits for the sampled tokens. Between `sample` and
`collect` the host is free to schedule the next step. Between `dispatch` and `sample` it may read
the step before: the device computes logits while the host finds out which tokens may follow.

Every program that writes the pool gives it up and gets it back (donation), so there is one pool and
the device orders all access to it: a block that the host hands on while a step is in flight is
written by its new owner only after that step.

The token a decode feeds may have been sampled by the step just before and never have been on the
host: sampled tokens also stay on the device, by slot (`Batch.source_slots_R`, `target_slots_R`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from flowkv_jax.engine.batch import Batch, BatchBuilder
from flowkv_jax.engine.grammar import mask_words
from flowkv_jax.engine.programs import SCORE_POSITIONS, Programs
from flowkv_jax.engine.sampler import SamplerOutput
from flowkv_jax.engine.sampling_batch import (
    SamplingBatcher,
    SamplingFlags,
    SamplingInputs,
    logprobs_bucket,
)
from flowkv_jax.engine.sampling_state import SamplingState
from flowkv_jax.engine.step import ScheduledSequence, ScheduledStep
from flowkv_jax.kv_cache.pool import KVPool
from flowkv_jax.models.llama import StepInputs
from flowkv_jax.request import Request
from flowkv_jax.sampling_params import SamplingParams
from pallas_kernels.block_tables import check_block_tables


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
    """A step the device is working on; `dispatched_s` is when, for whoever measures."""

    step: ScheduledStep
    dispatched_s: float = 0.0
    _unsampled: list[tuple[Batch, jax.Array]] = field(default_factory=list)
    _samples: list[tuple[SamplerOutput, tuple[tuple[int, int], ...]]] = field(default_factory=list)
    _scores: list[PromptScores] = field(default_factory=list)
    _unread: list[jax.Array] = field(default_factory=list)

    def collect(self) -> StepResult:
        """Wait for the step and bring its results to the host.

        Also for one that samples nothing. Else all chunks of a long prompt would be given to the
        device at once, and whoever comes or ends meanwhile would wait for the last.
        """
        jax.block_until_ready(self._unread)
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
        programs: the model, compiled.
        pool: this runner becomes its only user.
        batches: builds the padded arrays.
        vocab_size: V.
        debug: check the block tables of every batch before it runs.
    """

    def __init__(
        self,
        programs: Programs,
        pool: KVPool,
        batches: BatchBuilder,
        *,
        vocab_size: int,
        debug: bool = False,
    ) -> None:
        self.programs = programs
        self.pool = pool
        self._batches = batches
        self._vocab_size = vocab_size
        self._debug = debug
        self._sampling = SamplingBatcher(vocab_size)
        # Stands in rows whose logits nobody wants.
        self._greedy = SamplingState(
            SamplingParams(temperature=0.0), token_ids=(), num_prompt_tokens=0, seed=0
        )
        self._previous_tokens_S = self._zero_tokens()
        self._slot_of: dict[str, int] = {}

    # Steps

    def dispatch(self, step: ScheduledStep) -> InFlightStep:
        """Start a step; once the one before it, if any, has had its `sample`."""
        self.pool.swap_out(step.swap_out)
        self.pool.swap_in(step.swap_in)
        in_flight = InFlightStep(step)
        for batch in self._batches.prefill(step.prefills):
            self._forward(batch, in_flight)
        if step.decodes:
            first = len(step.sampling) - len(step.decodes)
            batch = self._batches.decode(step.decodes, first, self._slot_of)
            self._forward(batch, in_flight)
        self._slot_of = {
            sequence.request.request_id: slot for slot, sequence in enumerate(step.sampling)
        }
        return in_flight

    def sample(
        self, in_flight: InFlightStep, state_of: Callable[[Request], SamplingState | None]
    ) -> None:
        """Choose the tokens of a step that was dispatched.

        Args:
            state_of: how a request is sampled; None for one that has ended since, whose token
                means nothing.
        """
        for batch, hidden_XD in in_flight._unsampled:
            num_rows = batch.sampling[-1][0] + 1
            states = [self._greedy] * num_rows
            positions = [0] * num_rows
            for row, index in batch.sampling:
                sequence = in_flight.step.sampling[index]
                state = state_of(sequence.request)
                if state is not None:
                    states[row] = state
                    positions[row] = sequence.start + sequence.num_tokens
            inputs, flags = self._sampling.build(states, positions, batch.shape[0])
            output = self._call_sample(hidden_XD, batch, inputs, flags)
            in_flight._samples.append((output, batch.sampling))
        in_flight._unsampled.clear()

    def reset(self) -> None:
        """Start over with an empty pool after a step failed."""
        self.pool.reset()
        self._previous_tokens_S = self._zero_tokens()
        self._slot_of = {}

    def warmup(
        self, default: SamplingParams, progress: Callable[[int, int], None] | None = None
    ) -> int:
        """Compile every shape a step may use, for greedy sampling, the default of requests, and
        filters (top_p and its like); the first two also for answers that keep to a form. Penalties,
        biases and logprobs compile where they are first asked for.

        Returns:
            The number of shapes.
        """
        shapes = self._batches.shapes()
        previous_S = self._previous_tokens_S
        sampled: set[int] = set()
        for done, shape in enumerate(shapes):
            if progress is not None:
                progress(done, len(shapes))
            batch = self._batches.padding(shape)
            hidden_XD = self._call_forward(batch, previous_S)
            kinds = self._warm_kinds(shape[0], default)
            # What is sampled depends on the rows alone; other shapes need one to pick them.
            for inputs, flags in kinds if shape[0] not in sampled else kinds[:1]:
                self._call_sample(hidden_XD, batch, inputs, flags)
            sampled.add(shape[0])
        jax.block_until_ready(self._previous_tokens_S)
        self._previous_tokens_S = previous_S  # a step in flight may feed on them
        if progress is not None:
            progress(len(shapes), len(shapes))
        return len(shapes)

    def _warm_kinds(
        self, rows: int, default: SamplingParams
    ) -> list[tuple[SamplingInputs, SamplingFlags]]:
        def of(params: SamplingParams) -> tuple[SamplingInputs, SamplingFlags]:
            state = SamplingState(params, token_ids=(), num_prompt_tokens=0, seed=0)
            return self._sampling.build([state], [0], rows)

        everything = np.full((rows, mask_words(self._vocab_size)), 0xFFFFFFFF, np.uint32)
        usual = [of(SamplingParams(temperature=0.0)), of(default)]
        formed = [(replace(inputs, may_follow=everything), flags) for inputs, flags in usual]
        return [*usual, of(SamplingParams(top_p=0.9)), *formed]

    def lower_layers(self, shape: tuple[int, int]) -> jax.stages.Lowered:
        """The program that touches the pool, for one shape, for inspection."""
        return self.programs.lower_layers(
            self.pool.kv_PL2ZKH,
            *_forward_inputs(self._batches.padding(shape), self._previous_tokens_S),
        )

    def _forward(self, batch: Batch, in_flight: InFlightStep) -> None:
        if self._debug:
            check_block_tables(
                batch.block_tables_RM,
                batch.kv_lens_R,
                num_blocks=self.pool.num_blocks,
                block_size=self.pool.layout.block_size,
            )
        hidden_XD = self._call_forward(batch, self._previous_tokens_S)
        if batch.shape[1] > 1:
            in_flight._scores.extend(self._score_prompts(batch, hidden_XD))
        if batch.sampling:
            in_flight._unsampled.append((batch, hidden_XD))
        else:
            in_flight._unread.append(hidden_XD)

    def _call_forward(self, batch: Batch, previous_S: jax.Array) -> jax.Array:
        inputs = _forward_inputs(batch, previous_S)
        return self.pool.update(lambda kv_PL2ZKH: self.programs.forward(kv_PL2ZKH, *inputs))

    def _call_sample(
        self, hidden_XD: jax.Array, batch: Batch, inputs: SamplingInputs, flags: SamplingFlags
    ) -> SamplerOutput:
        output, self._previous_tokens_S = self.programs.sample(
            hidden_XD,
            batch.offsets_R,
            self._previous_tokens_S,
            batch.target_slots_R,
            inputs,
            flags,
        )
        return output

    def _score_prompts(self, batch: Batch, hidden_XD: jax.Array) -> list[PromptScores]:
        """Logprobs of the prompt tokens that follow the positions of this batch."""
        scores = []
        tile = batch.shape[1]
        for row, sequence, start, size in batch.tiles:
            request = sequence.request
            wanted = request.sampling_params.num_prompt_logprobs(self._vocab_size)
            if wanted is None:
                continue
            targets = request.prompt_token_ids[start + 1 : start + 1 + size]
            for first in range(0, len(targets), SCORE_POSITIONS):
                chunk = targets[first : first + SCORE_POSITIONS]
                targets_T = np.zeros(SCORE_POSITIONS, np.int32)
                targets_T[: len(chunk)] = chunk
                output = self.programs.score(
                    hidden_XD,
                    row * tile + first,
                    targets_T,
                    tile,
                    logprobs_bucket(wanted, self._vocab_size),
                )
                scores.append(PromptScores(sequence, start + 1 + first, len(chunk), output))
        return scores

    def _zero_tokens(self) -> jax.Array:
        return jnp.zeros(self._batches.num_slots, jnp.int32)


def _forward_inputs(
    batch: Batch, previous_S: jax.Array
) -> tuple[StepInputs, jax.Array, npt.NDArray[np.int32]]:
    step = StepInputs(
        batch.tokens_RT,  # type: ignore[arg-type]
        batch.q_starts_R,  # type: ignore[arg-type]
        batch.kv_lens_R,  # type: ignore[arg-type]
        batch.block_tables_RM,  # type: ignore[arg-type]
    )
    return step, previous_S, batch.source_slots_R
