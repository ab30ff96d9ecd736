"""Gives sequences places at nodes, and takes them away. Its owner's lock guards it.

Each placement has one booking at the router, which ends exactly once: when the sequence ends, loses
its place, or gets another booking because it decodes elsewhere than was planned. It also has an
attempt number of its own, drawn from one counter and never used again, so that news of an earlier
placement is known as such even when a caller uses a request id a second time.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial

from flowkv_jax.block_hash import extend_hashes
from flowkv_jax.cluster.dispatch_events import DispatchEventKind
from flowkv_jax.cluster.dispatch_log import DispatchLog
from flowkv_jax.cluster.node_port import NodePort, SequenceKey, StopOrder
from flowkv_jax.cluster.pending_sequences import PendingSequences
from flowkv_jax.cluster.sequence_state import SequenceState
from flowkv_jax.cluster.tracked_request import TrackedRequest
from flowkv_jax.cluster.tracked_sequence import TrackedSequence
from flowkv_jax.cluster.trouble import Trouble
from flowkv_jax.cluster.turns import Turns
from flowkv_jax.controller.routing import NoNodeAvailable, Placement, RouteQuery, Routing
from flowkv_jax.errors import EngineDeadError
from flowkv_jax.sequence import HandoffReport, SequenceSpec

Started = Callable[[str, Sequence[SequenceKey], Exception | None], None]
"""(node, sequences it was given, why it refused them if it did)."""

_Starts = dict[tuple[TrackedRequest, str], list[SequenceSpec]]
"""By request and node: a node takes in what belongs together, or nothing of it."""

_NOWHERE: frozenset[str] = frozenset()


class Placer:
    """Who is where. Calls to nodes are made through `turns`, when the change is complete.

    Args:
        hash_block_size: tokens in a block of the prefix directory; None if nobody looks there.
        started: told of every answer to `NodePort.start`.
    """

    def __init__(
        self,
        routing: Routing,
        turns: Turns,
        log: DispatchLog,
        *,
        hash_block_size: int | None,
        started: Started,
    ) -> None:
        self._routing = routing
        self._turns = turns
        self._log = log
        self._hash_block_size = hash_block_size
        self._started = started
        self._attempts = itertools.count()
        self.ports: dict[str, NodePort] = {}
        self.waiting = PendingSequences()

    # Nodes

    def release(self, name: str) -> None:
        """Have what nodes hold for a lost one released, after all that they were asked so far."""
        for port in self.ports.values():
            self._turns.call(port.release, name)

    def stop(self, order: StopOrder, nodes: Iterable[str]) -> None:
        """Tell those of `nodes` that are there to end a sequence."""
        for node in nodes:
            port = self.ports.get(node)
            if port is not None:
                self._turns.call(port.stop, (order,))

    # Placing

    def place(
        self,
        sequences: Iterable[TrackedSequence],
        now_s: float,
        exclude: frozenset[str] = _NOWHERE,
    ) -> list[TrackedSequence]:
        """Give PENDING sequences places. Those for which there is none wait; they are returned."""
        waiting = []
        starts: _Starts = {}
        for sequence in sequences:
            placement = self._find(sequence, now_s, exclude)
            if placement is None:
                self.waiting.add(sequence)
                waiting.append(sequence)
                self._log.tell(DispatchEventKind.WAITS, sequence, None, now_s)
            else:
                self._put(sequence, placement, starts, now_s)
        self._start(starts)
        return waiting

    def place_waiting(self, now_s: float, max_refusals: int | None = None) -> None:
        """Try again for those that wait, in order, until so many found no place."""
        num_refusals = 0
        starts: _Starts = {}
        for sequence in self.waiting if self.ports else ():
            placement = self._find(sequence, now_s, _NOWHERE)
            if placement is None:
                num_refusals += 1
                if num_refusals == max_refusals:
                    break
            else:
                self.waiting.discard(sequence)
                self._put(sequence, placement, starts, now_s)
        self._start(starts)

    def _put(
        self, sequence: TrackedSequence, placement: Placement, starts: _Starts, now_s: float
    ) -> None:
        sequence.attempt = next(self._attempts)
        wanted = sequence.request.submission.prefill_node
        if wanted in self.ports and not sequence.num_placements:
            placement = replace(placement, prefill_node=wanted)
        sequence.num_placements += 1
        sequence.booking = placement.booking
        sequence.prefill_node = placement.prefill_node
        sequence.decode_node = placement.decode_node
        sequence.move_to(SequenceState.PREFILLING)
        stays = placement.decode_node == placement.prefill_node
        spec = replace(
            sequence.spec,
            attempt=sequence.attempt,
            output_token_ids=tuple(sequence.token_ids),
            decode_node=None if stays else placement.decode_node,
        )
        starts.setdefault((sequence.request, placement.prefill_node), []).append(spec)
        self._log.tell(DispatchEventKind.PLACED, sequence, placement.prefill_node, now_s)

    def _start(self, starts: _Starts) -> None:
        for (_, node), specs in starts.items():
            self._turns.call(self._start_at, self.ports[node], specs)

    def _start_at(self, port: NodePort, specs: Sequence[SequenceSpec]) -> None:
        keys = [SequenceKey(spec.sequence_id, spec.attempt) for spec in specs]
        try:
            answer = port.start(specs)
        except Exception as error:
            self._started(port.name, keys, error)
        else:
            answer.add_done_callback(partial(self._answered, port.name, keys))

    def _answered(self, node: str, keys: Sequence[SequenceKey], answer: Future[None]) -> None:
        error = None if not answer.cancelled() else EngineDeadError(f"{node} gave up a start")
        raised = error or answer.exception()
        if raised is not None and not isinstance(raised, Exception):
            raised = EngineDeadError(f"{node} could not start a sequence: {raised!r}")
        self._started(node, keys, raised)

    # What becomes of a place

    def prefilled(self, sequence: TrackedSequence, now_s: float) -> None:
        """The prefill node has told the first token."""
        if sequence.booking is not None:
            self._routing.prefilled(sequence.booking, now_s)
        stays = sequence.decode_node == sequence.prefill_node
        sequence.move_to(SequenceState.DECODING if stays else SequenceState.MOVING)

    def arrived(self, sequence: TrackedSequence, report: HandoffReport, now_s: float) -> None:
        """The decode node has it. That may be heard before the first token."""
        if sequence.booking is not None:
            if sequence.state is SequenceState.PREFILLING:
                self._routing.prefilled(sequence.booking, now_s)
            self._routing.moved(sequence.booking, report, now_s)
        sequence.handoff, sequence.handed_off_s = report, now_s
        sequence.move_to(SequenceState.DECODING)
        self._log.tell(
            DispatchEventKind.HANDED_OFF, sequence, sequence.decode_node, now_s, report=report
        )

    def redirect(
        self,
        sequence: TrackedSequence,
        now_s: float,
        reason: str,
        trouble: Trouble,
        *,
        may_move: bool,
    ) -> None:
        """Find another decode node for what the prefill node holds; without one, or if it may not
        move any more, it is decoded where it is."""
        source = sequence.prefill_node
        if source is None:
            raise RuntimeError(f"{sequence.sequence_id} has no place to be redirected from")
        others = frozenset(self.ports) - {source}
        exclude = frozenset(sequence.failed_decode_nodes) if may_move else others
        placement = self._find(sequence, now_s, exclude, prefill_node=source)
        if placement is None and may_move:
            placement = self._find(sequence, now_s, others, prefill_node=source)
        target: str | None = None
        if placement is not None:  # else the old booking has to do
            self.end_booking(sequence, now_s)
            sequence.booking = placement.booking
            target = None if placement.decode_node == source else placement.decode_node
        sequence.decode_node = source if target is None else target
        if target is None and sequence.state is SequenceState.MOVING:
            sequence.move_to(SequenceState.DECODING)
        self._turns.call(self.ports[source].redirect, sequence.key, target)
        kind, target = DispatchEventKind.REDIRECTED, sequence.decode_node
        self._log.tell(kind, sequence, target, now_s, reason=reason, trouble=trouble)

    def ask_again(self, sequence: TrackedSequence, reason: str, now_s: float) -> None:
        """Have the node that holds a sequence hand it off to where it is to go, once more."""
        source, target = sequence.prefill_node, sequence.decode_node
        if source is None:
            raise RuntimeError(f"{sequence.sequence_id} has no place to be handed off from")
        self._turns.call(self.ports[source].redirect, sequence.key, target)
        kind, trouble = DispatchEventKind.REDIRECTED, Trouble.HANDOFF_FAILED
        self._log.tell(kind, sequence, target, now_s, reason=reason, trouble=trouble)

    def migrate(self, sequence: TrackedSequence, now_s: float) -> bool:
        """Hand a sequence on from where it is decoded; False if there is no other place."""
        source = sequence.decode_node
        # Tokens of the node before that are still on their way would find it forgotten.
        if source is None or sequence.state is not SequenceState.DECODING or sequence.early:
            return False
        placement = self._find(sequence, now_s, frozenset({source}), prefill_node=source)
        if placement is None:
            return False
        self.end_booking(sequence, now_s)
        sequence.booking = placement.booking
        sequence.prefill_node, sequence.decode_node = source, placement.decode_node
        sequence.failed_decode_nodes.clear()
        sequence.num_handoff_errors = 0
        sequence.move_to(SequenceState.MOVING)
        target = placement.decode_node
        self._turns.call(self.ports[source].redirect, sequence.key, target)
        kind, reason = DispatchEventKind.REDIRECTED, f"{source} is emptied"
        trouble = Trouble.NODE_EMPTIED
        self._log.tell(kind, sequence, target, now_s, reason=reason, trouble=trouble)
        return True

    def take_away(
        self,
        sequence: TrackedSequence,
        now_s: float,
        *,
        failed: str | None,
        reason: str,
        trouble: Trouble,
    ) -> None:
        """A sequence loses its place, because of node `failed` where there is one, which holds
        nothing any more. Other nodes that have to do with the placement are told to give it up."""
        nodes = dict.fromkeys((sequence.prefill_node, sequence.decode_node))
        self.stop(
            StopOrder(sequence.key, "abort"), [n for n in nodes if n is not None and n != failed]
        )
        kind = DispatchEventKind.LOST_PLACE
        self._log.tell(kind, sequence, failed, now_s, reason=reason, trouble=trouble)
        self.end_booking(sequence, now_s)
        sequence.lose_place(failed, now_s, reason)
        sequence.early.clear()
        sequence.failed_decode_nodes.clear()
        sequence.num_handoff_errors = 0
        sequence.move_to(SequenceState.PENDING)

    def end(self, sequence: TrackedSequence, now_s: float) -> None:
        """A sequence has ended: nothing is booked for it, and it waits for nothing."""
        if sequence.state is SequenceState.PENDING:
            self.waiting.discard(sequence)
        self.end_booking(sequence, now_s)
        sequence.early.clear()
        sequence.move_to(SequenceState.ENDED)

    def end_booking(self, sequence: TrackedSequence, now_s: float) -> None:
        booking, sequence.booking = sequence.booking, None
        if booking is not None:
            self._routing.ended(booking, now_s)

    # Asking the router

    def _find(
        self,
        sequence: TrackedSequence,
        now_s: float,
        exclude: frozenset[str],
        prefill_node: str | None = None,
    ) -> Placement | None:
        """A booked placement at nodes that are there; None if there is none now."""
        spec = sequence.spec
        num_tokens = len(spec.prompt_token_ids) + len(sequence.token_ids)
        query = RouteQuery(
            sequence_id=spec.sequence_id,
            num_tokens=num_tokens,
            block_hashes=self._hashes(sequence),
            max_new_tokens=max(spec.max_total_tokens - num_tokens, 1),
            exclude=exclude,
            prefill_node=prefill_node,
        )
        while True:
            try:
                placement = self._routing.place(query, now_s)
            except NoNodeAvailable:
                return None
            unknown = {placement.prefill_node, placement.decode_node} - self.ports.keys()
            if not unknown:
                return placement
            # The router has not heard yet that they are lost.
            self._routing.ended(placement.booking, now_s)
            if unknown <= query.exclude:
                raise RuntimeError(f"the router chose {sorted(unknown)}, which were excluded")
            query = replace(query, exclude=query.exclude | unknown)

    def _hashes(self, sequence: TrackedSequence) -> tuple[bytes, ...]:
        if self._hash_block_size is None or not sequence.token_ids:
            return sequence.request.prompt_hashes
        hashes = list(sequence.request.prompt_hashes)
        token_ids = [*sequence.spec.prompt_token_ids, *sequence.token_ids]
        extend_hashes(hashes, token_ids, self._hash_block_size, sequence.spec.cache_salt)
        return tuple(hashes)
