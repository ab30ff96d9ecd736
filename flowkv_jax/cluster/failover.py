"""What becomes of sequences when nodes are lost, refuse, or cannot hand off.

    the holder of the K/V is lost     placed anew, from prompt and the tokens that are known
    the decode node is lost before    the prefill node is told of another one, or to decode itself;
      it has the K/V, or refuses      twice at most, then it is to decode itself; or the request
                                      fails, where that is wanted
    the prefill node is lost after    nothing, unless its first token has not been heard yet:
      it has handed off               nobody else will tell it, so the sequence is placed anew
    the prefill node is another       asked once more if it only could not hand off; else placed
      server's, and does not hand       anew, on a node of this server; or the request fails, where
      off, for whatever reason          that is wanted

Its owner's lock guards it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from flowkv_jax.cluster.dispatch_log import DispatchLog
from flowkv_jax.cluster.node_port import SequenceKey
from flowkv_jax.cluster.placer import Placer
from flowkv_jax.cluster.request_table import RequestTable
from flowkv_jax.cluster.sequence_state import SequenceState
from flowkv_jax.cluster.tracked_sequence import TrackedSequence
from flowkv_jax.cluster.trouble import Trouble
from flowkv_jax.errors import (
    DeadlineExceeded,
    EngineDeadError,
    GenerationError,
    RetryableRequestError,
    ServerError,
)

_MAX_HANDOFF_ERRORS = 2
_RETRYABLE = (RetryableRequestError, EngineDeadError)


class Failover:
    """Moves sequences out of trouble.

    Args:
        fails_on_handoff_error: a hand-off that fails ends the request.
        max_placements: how often a sequence is placed before its request fails.
    """

    def __init__(
        self,
        table: RequestTable,
        placer: Placer,
        log: DispatchLog,
        *,
        fails_on_handoff_error: bool,
        max_placements: int,
    ) -> None:
        self._table = table
        self._placer = placer
        self._log = log
        self._fails_on_handoff_error = fails_on_handoff_error
        self._max_placements = max_placements

    def place(
        self,
        sequences: Iterable[TrackedSequence],
        now_s: float,
        exclude: frozenset[str] = frozenset(),
    ) -> None:
        """Give PENDING sequences places, or have them wait."""
        for sequence in self._placer.place(sequences, now_s, exclude):
            self._table.confirm(sequence)

    def lose_node(self, name: str, reason: str, now_s: float) -> None:
        """A node is gone; unknown ones are passed over."""
        if self._placer.ports.pop(name, None) is None:
            return
        lost, unmoved = [], []
        for sequence in self._table.sequences.values():
            if sequence.holder == name:
                lost.append(sequence)
            elif sequence.decode_node == name:
                unmoved.append(sequence)
            elif sequence.prefill_node == name:
                sequence.prefill_node = sequence.decode_node
                if sequence.has_unfillable_gap:
                    lost.append(sequence)
        for sequence in unmoved:
            self._goal_lost(sequence, name, reason, now_s)
        for sequence in lost:
            if sequence.state is SequenceState.ENDED:  # with another one of its request
                continue
            if self._fails_on_handoff_error and sequence.lender == name:
                self._fail_unmoved(sequence, sequence.decode_node, reason, now_s)
                continue
            trouble = Trouble.NODE_LOST
            self._placer.take_away(sequence, now_s, failed=name, reason=reason, trouble=trouble)
        self._placer.release(name)
        error = GenerationError(
            f"node {name} was lost ({reason}); the request has been placed"
            f" {self._max_placements} times"
        )
        self._place_anew(lost, error, now_s)

    def answered(
        self, node: str, keys: Sequence[SequenceKey], error: Exception | None, now_s: float
    ) -> None:
        """A node has taken in what it was to start, or refused it all."""
        for key in keys:
            sequence = self._table.sequences.get(key.sequence_id)
            if sequence is None or sequence.attempt != key.attempt or sequence.holder != node:
                continue
            if error is None:
                self._table.confirm(sequence)
            else:
                self._failed_at_holder(sequence, node, error, now_s)

    def failed(self, sequence: TrackedSequence, node: str, error: Exception, now_s: float) -> None:
        """A node of a sequence's placement says that it has ended there with an error."""
        if node == sequence.holder:
            self._failed_at_holder(sequence, node, error, now_s)
        elif sequence.state is SequenceState.DECODING:  # `node` has handed it off
            if sequence.early:
                self._failed_at_holder(sequence, node, EngineDeadError(str(error)), now_s)
        elif isinstance(error, ServerError):
            self.handoff_failed(sequence, repr(error), now_s)
        else:
            self._table.fail(sequence.request, error, now_s)

    def handoff_failed(self, sequence: TrackedSequence, reason: str, now_s: float) -> None:
        """The prefill node has the K/V and cannot get rid of them."""
        failed = sequence.decode_node
        if failed is None or failed == sequence.prefill_node:  # told to stay already
            return
        self._log.tallies.handoff_failed(failed)
        if sequence.lender is not None:
            self._handoff_failed_at_lender(sequence, reason, now_s)
            return
        if self._fails_on_handoff_error:
            self._fail_unmoved(sequence, failed, reason, now_s)
            return
        sequence.failed_decode_nodes.add(failed)
        sequence.num_handoff_errors += 1
        may_move = sequence.num_handoff_errors < _MAX_HANDOFF_ERRORS
        why, trouble = f"{failed}: {reason}", Trouble.HANDOFF_FAILED
        self._placer.redirect(sequence, now_s, why, trouble, may_move=may_move)

    def _goal_lost(self, sequence: TrackedSequence, name: str, reason: str, now_s: float) -> None:
        """The decode node is gone, and the prefill node has the K/V or is about to."""
        if sequence.state is SequenceState.ENDED:  # with another one of its request
            return
        if sequence.lender is not None:
            self._give_back(sequence, f"{name}: {reason}", Trouble.NODE_LOST, now_s)
            return
        # Whether the prefill node or we are the first to hear of the loss must not matter.
        if self._fails_on_handoff_error and sequence.state is SequenceState.MOVING:
            self._fail_unmoved(sequence, name, reason, now_s)
            return
        sequence.failed_decode_nodes.add(name)
        why, trouble = f"{name}: {reason}", Trouble.NODE_LOST
        self._placer.redirect(sequence, now_s, why, trouble, may_move=True)

    def _handoff_failed_at_lender(
        self, sequence: TrackedSequence, reason: str, now_s: float
    ) -> None:
        """Once more: it may only have been for want of room."""
        sequence.num_handoff_errors += 1
        is_last = sequence.num_handoff_errors == _MAX_HANDOFF_ERRORS
        if is_last or self._fails_on_handoff_error:
            self._give_back(sequence, reason, Trouble.HANDOFF_FAILED, now_s)
        else:
            self._placer.ask_again(sequence, reason, now_s)

    def _give_back(
        self, sequence: TrackedSequence, reason: str, trouble: Trouble, now_s: float
    ) -> None:
        """A node of another server does not hand a sequence over."""
        if self._fails_on_handoff_error:
            self._fail_unmoved(sequence, sequence.decode_node, reason, now_s)
            return
        self._placer.take_away(sequence, now_s, failed=None, reason=reason, trouble=trouble)
        self._place_anew([sequence], GenerationError(reason), now_s)

    def _fail_unmoved(
        self, sequence: TrackedSequence, failed: str | None, reason: str, now_s: float
    ) -> None:
        error = GenerationError(
            f"the KV cache could not be moved from {sequence.prefill_node} to {failed}:"
            f" {reason} (kv_load_failure_policy=fail)"
        )
        self._table.fail(sequence.request, error, now_s)

    def tokens_missing(self, sequence: TrackedSequence, now_s: float) -> None:
        """There is a gap in the tokens that no node will fill."""
        error = GenerationError(f"output tokens from {len(sequence.token_ids)} on never came")
        trouble = Trouble.TOKENS_MISSING
        self._placer.take_away(sequence, now_s, failed=None, reason=str(error), trouble=trouble)
        self._place_anew([sequence], error, now_s)

    def _failed_at_holder(
        self, sequence: TrackedSequence, node: str, error: Exception, now_s: float
    ) -> None:
        if sequence.lender is not None and not isinstance(error, DeadlineExceeded):
            # What another server cannot do, this one may be able to.
            self._give_back(sequence, str(error), Trouble.NODE_REFUSED, now_s)
            return
        if not isinstance(error, _RETRYABLE):
            self._table.fail(sequence.request, error, now_s)
            return
        # A node that refuses would refuse again. One that had taken it in may be the best still.
        has_refused = sequence.state is SequenceState.PREFILLING
        avoid = {node} if has_refused or isinstance(error, EngineDeadError) else ()
        trouble = Trouble.NODE_REFUSED if has_refused else Trouble.NODE_FAILED
        self._placer.take_away(sequence, now_s, failed=node, reason=str(error), trouble=trouble)
        self._place_anew([sequence], error, now_s, exclude=frozenset(avoid))

    def _place_anew(
        self,
        sequences: Sequence[TrackedSequence],
        error: Exception,
        now_s: float,
        exclude: frozenset[str] = frozenset(),
    ) -> None:
        """Those that lost their places go elsewhere, unless that has happened too often."""
        for sequence in sequences:
            is_too_often = sequence.num_placements >= self._max_placements
            if is_too_often and sequence.state is SequenceState.PENDING:
                self._table.fail(sequence.request, error, now_s)
        still = [s for s in sequences if s.state is SequenceState.PENDING]
        self.place(still, now_s, exclude)
