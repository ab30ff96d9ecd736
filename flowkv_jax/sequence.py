"""One sequence, as nodes and whoever drives them speak of it. Plain values, no JAX.

A request with `n` answers is `n` sequences. Whoever drives them (the dispatcher) hands a node a
`SequenceSpec` and hears `SequenceUpdate`s. A sequence may be served by several nodes in its life:
one prefills, another decodes; or a node dies and another goes on from the tokens that are known.
Each time it is placed anew its `attempt` rises, and whatever still comes of an earlier attempt is
stale and dropped, on both sides.

Output tokens are counted from 0: `SequenceUpdate.start` says where its tokens belong, so that
updates of two nodes that cross on their way are put in order, and none is counted twice.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from flowkv_jax.engine.output_processor import LogprobsRow
from flowkv_jax.outputs import FinishReason
from flowkv_jax.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceSpec:
    """All that a node needs to serve a sequence.

    Attributes:
        sequence_id: unique among live sequences.
        attempt: rises each time the sequence is placed anew; with `sequence_id` never used again.
        prompt_token_ids: the prompt.
        output_token_ids: what was generated before; its K/V are computed again.
        sampling_params: as the caller gave them, completed by the model's defaults.
        seed: resolved; random numbers are keyed by (seed, position).
        max_total_tokens: prompt plus output may not grow past this.
        arrival_s, deadline_s: on this process's monotonic clock; no deadline if None.
        priority: lower runs first.
        cache_salt: cached blocks are shared only between sequences of the same salt.
        bad_word_ids: see `sampling_state.tokenize_bad_words`.
        decode_node: where to hand the sequence off to once its prompt is computed; None to keep it.
        hold: name under which a node of another server holds blocks of the prompt for it; see
            `flowkv_jax.kv_transfer`.
    """

    sequence_id: str
    prompt_token_ids: list[int]
    sampling_params: SamplingParams
    seed: int
    max_total_tokens: int
    arrival_s: float
    attempt: int = 0
    output_token_ids: tuple[int, ...] = ()
    deadline_s: float | None = None
    priority: int = 0
    cache_salt: str | None = None
    bad_word_ids: tuple[tuple[int, ...], ...] = ()
    decode_node: str | None = None
    hold: str | None = None

    @property
    def num_tokens(self) -> int:
        """Known tokens: prompt and output."""
        return len(self.prompt_token_ids) + len(self.output_token_ids)


@dataclass(frozen=True, slots=True)
class HandoffReport:
    """How a sequence came from its prefill node to its decode node.

    Attributes:
        src, dst: the nodes.
        path: kind of path (`transfer.PathType`), or "none" where no block had to move.
        backend: what moved the bytes.
        runs, calls, data_bytes: moved.
        num_blocks: blocks the sequence has at the destination; `num_reused_blocks` of them were
            there before and were not sent.
        deferred_s: how long the destination had no room.
        transfer_s: from the first byte asked for to the last one verified.
        total_s: from the reservation to the acknowledgement.
    """

    src: str
    dst: str
    path: str
    backend: str
    runs: int
    calls: int
    data_bytes: int
    num_blocks: int
    num_reused_blocks: int
    deferred_s: float
    transfer_s: float
    total_s: float


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """Log-probabilities of prompt tokens from position `start` on."""

    start: int
    token_ids: tuple[int, ...]
    rows: tuple[LogprobsRow, ...]


class SequenceUpdate(msgspec.Struct, frozen=True, kw_only=True):
    """What is new of a sequence at one node. One a token, so of the kind that is made fastest.

    Attributes:
        sequence_id, attempt: which.
        start: output tokens before `token_ids`.
        token_ids: new output tokens.
        logprobs: one row a token, if asked for.
        prompt_logprobs: of a chunk of the prompt, if asked for.
        finish_reason, stop_reason: set when the sequence has ended by itself.
        num_cached_tokens: prompt tokens this node found in its prefix cache.
        num_preemptions: here, so far.
        scheduled_s: when it first ran here, on this process's clock.
        handoff: the sequence has just come to this node, and is decoded here from now on.
        handoff_error: it could not leave this node, which still holds it and waits to be told
            what to do (`NodePort.redirect`).
        decode_node: with `handoff_error`: where it could not go.
        error: it has ended here with this error.
    """

    sequence_id: str
    attempt: int
    start: int = 0
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[LogprobsRow, ...] | None = None
    prompt_logprobs: PromptLogprobs | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    scheduled_s: float | None = None
    handoff: HandoffReport | None = None
    handoff_error: str | None = None
    decode_node: str | None = None
    error: Exception | None = None
