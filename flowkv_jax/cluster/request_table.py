"""Callers' requests from acceptance to their last output. Its owner's lock guards it.

A request is refused through the future that `Dispatcher.submit` returned, or else is accepted by
it once, and from then on ends with its last output or an error in its sink, once.
"""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import Future

from flowkv_jax.cluster.dispatch_log import DispatchLog
from flowkv_jax.cluster.node_port import StopOrder
from flowkv_jax.cluster.placer import Placer
from flowkv_jax.cluster.sequence_state import SequenceState
from flowkv_jax.cluster.submission import Submission
from flowkv_jax.cluster.tracked_request import TrackedRequest
from flowkv_jax.cluster.tracked_sequence import TrackedSequence
from flowkv_jax.cluster.turns import Turns
from flowkv_jax.cluster.waiting_room import WaitingRoom
from flowkv_jax.errors import DuplicateRequestError
from flowkv_jax.outputs import FinishReason


class RequestTable:
    """Live requests and their live sequences, by id.

    Attributes:
        closed_with: what new requests are refused with; None while they are not.
        has_new_room: a sequence has ended since somebody last asked.
    """

    def __init__(
        self, turns: Turns, log: DispatchLog, placer: Placer, waiting_room: WaitingRoom
    ) -> None:
        self._turns = turns
        self._log = log
        self._placer = placer
        self._waiting_room = waiting_room
        self.requests: dict[str, TrackedRequest] = {}
        self.sequences: dict[str, TrackedSequence] = {}
        self.closed_with: Exception | None = None
        self.has_new_room = False

    def request_of(self, submission: Submission) -> TrackedRequest | None:
        """The live request that was made from this very submission."""
        request = self.requests.get(submission.request_id)
        return request if request is not None and request.submission is submission else None

    # Coming in

    def add(
        self, submission: Submission, accepted: Future[None], prompt_hashes: tuple[bytes, ...]
    ) -> TrackedRequest | None:
        """A new request, its sequences PENDING; None if it was refused."""
        request = TrackedRequest(submission, accepted, prompt_hashes)
        refusal = self.closed_with
        try:
            if refusal is None:
                self._require_acceptable(request)
        except Exception as error:
            refusal = error
        if refusal is not None:
            self._log.tallies.refused(refusal)
            if submission.trace is not None:
                self._turns.call(submission.trace.refused, refusal)
            request.is_over = request.is_accepted = True
            self._turns.call(accepted.set_exception, refusal)
            return None
        specs = submission.specs
        request.sequences = [TrackedSequence(request, i, spec) for i, spec in enumerate(specs)]
        request.num_live = request.num_unconfirmed = len(specs)
        self.requests[request.request_id] = request
        self.sequences.update((s.sequence_id, s) for s in request.sequences)
        self._waiting_room.enter(request.num_prompt_tokens)
        return request

    def _require_acceptable(self, request: TrackedRequest) -> None:
        ids = [spec.sequence_id for spec in request.submission.specs]
        if request.request_id in self.requests or any(i in self.sequences for i in ids):
            raise DuplicateRequestError(f"request_id={request.request_id!r} is in use")
        self._waiting_room.require_room(request.num_prompt_tokens)

    def confirm(self, sequence: TrackedSequence) -> None:
        """A node has taken a sequence in, or it waits for one."""
        if not sequence.is_confirmed:
            request = sequence.request
            sequence.is_confirmed = True
            request.num_unconfirmed -= 1
            if not request.num_unconfirmed:
                self._accept(request)

    def _accept(self, request: TrackedRequest) -> None:
        if not request.is_accepted:
            request.is_accepted = True
            self._turns.call(request.accepted.set_result, None)

    def first_token(self, request: TrackedRequest, now_s: float) -> None:
        """The first token of any of its answers has come."""
        request.first_token_s = now_s
        self._leave_waiting_room(request, now_s)

    # Going out

    def hand_out(self, request: TrackedRequest, now_s: float) -> None:
        """Give the caller what is new; after the last answer's end that is the last of it."""
        if request.is_over or (request.tells_end_only and request.num_live):
            return
        output = request.submission.output.take_output(
            metrics=request.metrics(), num_cached_tokens=request.sequences[0].num_cached_tokens
        )
        if output is not None:
            self._accept(request)
            self._turns.call(request.submission.sink, output)
        if not request.num_live:
            self._forget(request, now_s)

    def abort(self, request: TrackedRequest, now_s: float) -> None:
        """End a request with finish_reason "abort"."""
        for sequence in request.sequences:
            if sequence.state is not SequenceState.ENDED:
                self.end(sequence, "abort", now_s, stop_at=sequence.possible_holders)
            request.submission.output.append(sequence.index, [], finish_reason="abort")
        self.hand_out(request, now_s)

    def fail(self, request: TrackedRequest, error: Exception, now_s: float) -> None:
        """End a request with an error."""
        trace = request.submission.trace
        if trace is not None:
            trace.failed(error)
        for sequence in request.sequences:
            if sequence.state is not SequenceState.ENDED:
                self.end(sequence, "error", now_s, stop_at=sequence.possible_holders)
        if request.is_accepted:
            self._turns.call(request.submission.sink, error)
        else:
            request.is_accepted = True
            self._turns.call(request.accepted.set_exception, error)
        self._forget(request, now_s)

    def end(
        self,
        sequence: TrackedSequence,
        finish_reason: FinishReason,
        now_s: float,
        *,
        stop_at: Iterable[str],
        stop_string: str | None = None,
    ) -> None:
        """The one way out of a sequence: nodes in `stop_at` are told, the booking ends, nobody
        finds it any more."""
        self._placer.stop(StopOrder(sequence.key, finish_reason, stop_string), stop_at)
        self._log.ended(sequence, finish_reason, now_s)
        self._placer.end(sequence, now_s)
        del self.sequences[sequence.sequence_id]
        sequence.request.num_live -= 1
        self.has_new_room = True

    def _forget(self, request: TrackedRequest, now_s: float) -> None:
        request.is_over = True
        del self.requests[request.request_id]
        self._leave_waiting_room(request, now_s)

    def _leave_waiting_room(self, request: TrackedRequest, now_s: float) -> None:
        if request.is_waiting:
            request.is_waiting = False
            self._waiting_room.leave(request.num_prompt_tokens, now_s)
