"""From nodes' updates to callers' outputs: each token once, in order, wherever it comes from.

    update.start == known tokens    taken in
                  < known           what is known already is dropped
                  > known           held back until the tokens before it have come

News of an earlier placement, of a sequence that has ended, or of a node that has nothing to do with
it (no placement names a lost node) is dropped, and the node ordered to free what it holds. Runs
once a step of every node, on the way between its device's result and its next step. Its owner's
lock guards it.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from flowkv_jax.cluster.dispatch_events import DispatchEventKind
from flowkv_jax.cluster.dispatch_log import DispatchLog
from flowkv_jax.cluster.failover import Failover
from flowkv_jax.cluster.node_port import SequenceKey, StopOrder
from flowkv_jax.cluster.placer import Placer
from flowkv_jax.cluster.request_table import RequestTable
from flowkv_jax.cluster.sequence_state import SequenceState
from flowkv_jax.cluster.tracked_request import TrackedRequest
from flowkv_jax.cluster.tracked_sequence import TrackedSequence
from flowkv_jax.errors import GenerationError
from flowkv_jax.outputs import FinishReason
from flowkv_jax.sequence import PromptLogprobs, SequenceUpdate

logger = logging.getLogger(__name__)


class News:
    """Takes in what nodes report."""

    def __init__(
        self, table: RequestTable, placer: Placer, failover: Failover, log: DispatchLog
    ) -> None:
        self._table = table
        self._placer = placer
        self._failover = failover
        self._log = log

    def take_in(
        self, node: str, updates: Sequence[SequenceUpdate], now_s: float
    ) -> list[StopOrder]:
        """Everything new at one node; returns what has to end there."""
        find = self._table.sequences.get
        orders: list[StopOrder] = []
        touched: dict[TrackedRequest, None] = {}
        for update in updates:
            sequence = find(update.sequence_id)
            if (
                sequence is None
                or sequence.attempt != update.attempt
                or (node != sequence.prefill_node and node != sequence.decode_node)
            ):
                if update.finish_reason is None and update.error is None:
                    stale = SequenceKey(update.sequence_id, update.attempt)
                    orders.append(StopOrder(stale, "abort"))
                continue
            request = sequence.request
            touched[request] = None
            try:
                self._take_in(sequence, node, update, now_s, orders)
            except Exception as error:  # malformed news, or text that fails: of this request alone
                logger.exception("request %s failed", request.request_id)
                if not request.is_over:
                    failure = GenerationError(f"news of node {node} could not be used: {error!r}")
                    self._table.fail(request, failure, now_s)
        for request in touched:
            self._table.hand_out(request, now_s)
        return orders

    def _take_in(
        self,
        sequence: TrackedSequence,
        node: str,
        update: SequenceUpdate,
        now_s: float,
        orders: list[StopOrder],
    ) -> None:
        if not sequence.is_confirmed:
            self._table.confirm(sequence)
        if sequence.scheduled_s is None and update.scheduled_s is not None:
            sequence.first_ran(update.scheduled_s)
        if update.num_preemptions:
            sequence.count_preemptions(node, update.num_preemptions)
        if update.prompt_logprobs is not None and sequence.index == 0:
            _score_prompt(sequence, update.prompt_logprobs)
        if update.handoff is not None and node == sequence.decode_node != sequence.holder:
            self._placer.arrived(sequence, update.handoff, now_s)
        token_ids = update.token_ids
        if token_ids or update.finish_reason is not None:
            if (
                token_ids
                and sequence.state is SequenceState.PREFILLING
                and node == sequence.prefill_node
            ):
                self._placer.prefilled(sequence, now_s)
            if update.start > len(sequence.token_ids):
                self._hold_back(sequence, node, update, now_s)
            else:
                self._append(sequence, node, update, node, now_s, orders)
                if sequence.early:
                    self._fill_in(sequence, node, now_s, orders)
        if update.handoff_error is not None or update.error is not None:
            self._take_trouble(sequence, node, update, now_s, orders)

    # Tokens

    def _hold_back(
        self, sequence: TrackedSequence, node: str, update: SequenceUpdate, now_s: float
    ) -> None:
        sequence.hold_back(update, node)
        if sequence.has_unfillable_gap:
            self._failover.tokens_missing(sequence, now_s)

    def _fill_in(
        self, sequence: TrackedSequence, node: str, now_s: float, orders: list[StopOrder]
    ) -> None:
        """Take in what had been held back and follows now."""
        while sequence.early and sequence.early[0][0].start <= len(sequence.token_ids):
            update, origin = sequence.early.pop(0)
            self._append(sequence, origin, update, node, now_s, orders)

    def _append(
        self,
        sequence: TrackedSequence,
        origin: str,
        update: SequenceUpdate,
        node: str,
        now_s: float,
        orders: list[StopOrder],
    ) -> None:
        """Make text of the tokens that are new; end the sequence if they end it.

        Args:
            origin: who sent this update.
            node: whose news are being taken in now, and who gets `orders`.
        """
        num_known = len(sequence.token_ids) - update.start
        token_ids, logprobs = update.token_ids, update.logprobs
        if num_known:
            token_ids = token_ids[num_known:]
            logprobs = None if logprobs is None else logprobs[num_known:]
        finish_reason = update.finish_reason
        request = sequence.request
        if token_ids:
            if sequence.last_token_s is None:
                self._first_token(sequence, update, origin, len(token_ids), now_s)
            else:
                gap_s = now_s - sequence.last_token_s
                self._log.tallies.arrived(origin, gap_s, len(token_ids))
            sequence.token_ids.extend(token_ids)
            sequence.last_token_s = request.last_token_s = now_s
        elif finish_reason is None:
            return
        stop_string = request.submission.output.append(
            sequence.index,
            token_ids,
            logprobs=logprobs,
            finish_reason=finish_reason,
            stop_reason=update.stop_reason,
        )
        if stop_string is not None:
            over = None if finish_reason is None else origin
            self._end(sequence, "stop", stop_string, over, node, now_s, orders)
        elif finish_reason is not None:
            self._end(sequence, finish_reason, None, origin, node, now_s, orders)

    def _end(
        self,
        sequence: TrackedSequence,
        finish_reason: FinishReason,
        stop_string: str | None,
        over: str | None,
        node: str,
        now_s: float,
        orders: list[StopOrder],
    ) -> None:
        """End a sequence everywhere but at `over`, where it has ended by itself."""
        holders = () if over == sequence.holder else sequence.possible_holders
        if node in holders and node != over:
            orders.append(StopOrder(sequence.key, finish_reason, stop_string))
        others = [holder for holder in holders if holder not in (over, node)]
        self._table.end(sequence, finish_reason, now_s, stop_at=others, stop_string=stop_string)

    def _first_token(
        self,
        sequence: TrackedSequence,
        update: SequenceUpdate,
        origin: str,
        num_tokens: int,
        now_s: float,
    ) -> None:
        sequence.first_token_s = now_s
        sequence.num_cached_tokens = update.num_cached_tokens
        spec = sequence.spec
        # Another server's node is none of ours: what it did counts where its K/V go.
        is_external = origin == sequence.request.submission.prefill_node
        node = sequence.decode_node if is_external and sequence.decode_node else origin
        self._log.tallies.first_token(
            node,
            now_s - spec.arrival_s,
            num_tokens=num_tokens,
            num_prompt=len(spec.prompt_token_ids),
            num_cached=update.num_cached_tokens,
            is_external=is_external,
        )
        if sequence.request.first_token_s is None:
            self._table.first_token(sequence.request, now_s)
        self._log.tell(DispatchEventKind.FIRST_TOKEN, sequence, origin, now_s)

    # Trouble

    def _take_trouble(
        self,
        sequence: TrackedSequence,
        node: str,
        update: SequenceUpdate,
        now_s: float,
        orders: list[StopOrder],
    ) -> None:
        holder = sequence.holder
        if holder is None or sequence.attempt != update.attempt:  # this update has ended it
            if update.error is None:
                orders.append(StopOrder(SequenceKey(update.sequence_id, update.attempt), "abort"))
        elif update.error is not None:
            self._failover.failed(sequence, node, update.error, now_s)
        elif node != holder:  # it has left after all: only the acknowledgement was lost
            self._log.tallies.acknowledgement_lost(node)
            orders.append(StopOrder(sequence.key, "abort"))
        elif update.decode_node in (None, sequence.decode_node):
            self._failover.handoff_failed(sequence, update.handoff_error or "", now_s)
        # Otherwise it has been redirected meanwhile.


def _score_prompt(sequence: TrackedSequence, scores: PromptLogprobs) -> None:
    output = sequence.request.submission.output
    # A chunk is computed again after a preemption, or by another node.
    num_known = output.num_prompt_scored + 1 - scores.start
    if num_known < 0:
        raise RuntimeError(
            f"log-probabilities of the prompt from token {scores.start} on came before those of"
            f" token {output.num_prompt_scored + 1}"
        )
    output.append_prompt_logprobs(scores.token_ids[num_known:], scores.rows[num_known:])
