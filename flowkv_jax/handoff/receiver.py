"""The decode node's side of hand-offs; see the package. Runs on the node's thread. No JAX."""

from __future__ import annotations

import logging
from collections.abc import Collection
from dataclasses import dataclass, field

from flowkv_jax.cluster.node_port import SequenceKey
from flowkv_jax.cluster.sequence_wire import specs_from_wire
from flowkv_jax.engine.admission import Deferred, Standing
from flowkv_jax.engine.served import Served
from flowkv_jax.errors import FlowKVError, GenerationError, ValidationError
from flowkv_jax.handoff import messages
from flowkv_jax.handoff.lifecycle import ReceiverState, moved
from flowkv_jax.handoff.surroundings import Host, Transfers
from flowkv_jax.sequence import HandoffReport, SequenceSpec, SequenceUpdate
from transfer.arrival import Arrival
from transfer.errors import TransferError
from transfer.lifecycle import TransferState

_logger = logging.getLogger(__name__)
_SWEEP_S = 0.05
"""How often blocks are looked after whose transfer is never heard of."""


@dataclass(eq=False, slots=True)
class _Incoming:
    """One hand-off to here.

    Attributes:
        blocks: to be filled; pinned from the grant on.
        arrival: the transfer, if it is complete.
        asked_s, granted_s, filled_s: when it was asked for, when there was room, and when its K/V
            were complete at the source.
    """

    handoff: str
    src: str
    served: Served
    asked_s: float
    state: ReceiverState = ReceiverState.DEFERRED
    granted_s: float = 0.0
    num_reused_blocks: int = 0
    blocks: list[int] = field(default_factory=list)
    filled: messages.Filled | None = None
    arrival: Arrival | None = None
    filled_s: float = 0.0


class Receiver:
    """All hand-offs that come to one node."""

    def __init__(self, host: Host, transfers: Transfers) -> None:
        self._host = host
        self._transfers = transfers
        self._by_handoff: dict[str, _Incoming] = {}
        self._by_key: dict[SequenceKey, _Incoming] = {}
        self._deferred: list[_Incoming] = []
        # How things stood when the first of them was refused room.
        self._refused_at: Standing | None = None
        # Pinned blocks of hand-offs that were given up while a transfer was still writing.
        self._lingering: dict[str, list[int]] = {}

    def __len__(self) -> int:
        return len(self._by_handoff) + len(self._lingering)

    # What the other side says

    def on_reserve(self, message: messages.Reserve, heard_s: float) -> None:
        if message.handoff in self._by_handoff:
            return
        try:
            served = self._host.make(_spec_of(message, heard_s))
            self._host.replace_older(served)
        except FlowKVError as error:
            self._reply(message.src, messages.Refused(message.handoff, str(error)))
            return
        incoming = _Incoming(message.handoff, message.src, served, heard_s)
        self._by_handoff[message.handoff] = incoming
        if self._deferred:
            self._deferred.append(incoming)
            self._reply(message.src, messages.Deferred(message.handoff, "others wait before it"))
            return
        reason = self._reserve(incoming)
        if reason:
            self._deferred.append(incoming)
            self._reply(message.src, messages.Deferred(message.handoff, reason))

    def on_filled(self, message: messages.Filled, heard_s: float) -> None:
        incoming = self._by_handoff.get(message.handoff)
        if incoming is None or incoming.state is not ReceiverState.RESERVED:
            return
        num_blocks, num_tokens = len(incoming.blocks), len(message.output) / 4
        if message.num_blocks != num_blocks or num_tokens != 1:
            reason = f"FILLED names {message.num_blocks} blocks and {num_tokens:g} tokens; "
            self.give_up(message.handoff, reason + f"{num_blocks} blocks and one token are due")
            return
        incoming.state = moved(incoming.state, ReceiverState.FILLING)
        incoming.filled = message
        incoming.filled_s = heard_s
        if num_blocks == 0:
            self._take(incoming)
            self._reply(incoming.src, messages.Taken(message.handoff))
        elif incoming.arrival is not None:
            self._take(incoming)

    def on_withdraw(self, message: messages.Withdraw) -> None:
        incoming = self._by_handoff.get(message.handoff)
        if incoming is not None:
            self._release(incoming)

    # What happens here

    def on_arrival(self, arrival: Arrival) -> None:
        """A transfer with a hand-off's id as its tag is final."""
        lingering = self._lingering.pop(arrival.tag, None)
        if lingering is not None:
            self._host.kv.unpin(lingering)
        incoming = self._by_handoff.get(arrival.tag)
        if incoming is None or arrival.state is not TransferState.COMPLETED:
            return  # the source knows, and says what follows
        incoming.arrival = arrival
        if incoming.state is ReceiverState.FILLING:  # else it has overtaken FILLED
            self._take(incoming)

    def retry(self) -> None:
        """Grant what was deferred, in order, as far as there is room now."""
        scheduler = self._host.scheduler
        while self._deferred and scheduler.standing != self._refused_at:
            incoming = self._deferred[0]
            if self._reserve(incoming):
                self._refused_at = scheduler.standing
                return
            self._deferred.remove(incoming)

    @property
    def next_due_s(self) -> float | None:
        """When `sweep` may find something; None if there is nothing to be found."""
        return self._host.now_s() + _SWEEP_S if self._lingering else None

    def give_up(self, handoff: str, reason: str) -> None:
        """Something of a hand-off failed here that should not have."""
        incoming = self._by_handoff.get(handoff)
        if incoming is None:
            return
        may_have_left = incoming.state is ReceiverState.FILLING
        self._release(incoming)
        self._reply(incoming.src, messages.Released(handoff, reason))
        if may_have_left:  # the source, which then has nothing to say of it any more
            self._host.say([incoming.served.failed(GenerationError(reason))])

    def ended(self, served: Served) -> None:
        """The sequence has ended here: aborted, past its deadline, or the node starts over."""
        incoming = self._by_key.get(served.key)
        if incoming is not None:
            self._drop(incoming)
            reason = f"the sequence ended on {self._host.name}"
            self._reply(incoming.src, messages.Released(incoming.handoff, reason))

    def stop(self, key: SequenceKey) -> None:
        """The front gives a sequence up that may still be waiting for room."""
        for incoming in list(self._deferred):
            if incoming.served.key == key:
                self.give_up(incoming.handoff, "the sequence was given up")

    def lost(self, nodes: Collection[str]) -> None:
        """These nodes are gone: nothing will come from them any more."""
        for incoming in list(self._by_handoff.values()):
            if incoming.src in nodes:
                self._release(incoming)

    def sweep(self) -> None:
        """Unpin blocks that no transfer writes any more."""
        for handoff, blocks in list(self._lingering.items()):
            if not self._transfers.pinned(self._host.name, blocks):
                del self._lingering[handoff]
                self._host.kv.unpin(blocks)

    # Inside

    def _reserve(self, incoming: _Incoming) -> str:
        """Reserve room and say so; else say why there is none. A refusal ends the hand-off."""
        host, served = self._host, incoming.served
        try:
            host.replace_older(served)
            answer = host.scheduler.reserve(served.request, host.now_s())
        except FlowKVError as error:
            incoming.state = moved(incoming.state, ReceiverState.RELEASED)
            del self._by_handoff[incoming.handoff]
            self._reply(incoming.src, messages.Refused(incoming.handoff, str(error)))
            return ""
        if isinstance(answer, Deferred):
            return answer.reason
        host.remember(served)
        self._by_key[served.key] = incoming
        incoming.state = moved(incoming.state, ReceiverState.RESERVED)
        incoming.granted_s = host.now_s()
        incoming.num_reused_blocks = answer.num_reused_tokens // host.kv.block_size
        num_blocks = host.kv.blocks_for(served.request.num_tokens)
        ids = host.kv.block_ids(served.request.request_id)
        incoming.blocks = ids[incoming.num_reused_blocks : num_blocks]
        host.kv.pin(incoming.blocks)
        self._reply(
            incoming.src,
            messages.Granted(
                incoming.handoff,
                incoming.num_reused_blocks,
                messages.pack_ids(incoming.blocks),
                messages.pack_generations(host.kv.generations(incoming.blocks)),
            ),
        )
        return ""

    def _take(self, incoming: _Incoming) -> None:
        """All K/V are here: the sequence goes on from here."""
        host, served = self._host, incoming.served
        assert incoming.filled is not None
        tokens = messages.unpack_ids(incoming.filled.output)
        start = served.request.num_output_tokens
        host.scheduler.receive(served.request, tokens, host.now_s())
        incoming.state = moved(incoming.state, ReceiverState.TAKEN)
        del self._by_handoff[incoming.handoff], self._by_key[served.key]
        host.kv.unpin(incoming.blocks)
        for token in tokens:
            served.state.append(token)
        request = served.request
        if request.sampling_params.logprobs is not None:
            # The source told them, with log-probabilities that are not known here.
            start, tokens = start + len(tokens), []
        update = SequenceUpdate(
            sequence_id=served.spec.sequence_id,
            attempt=served.spec.attempt,
            start=start,
            token_ids=tuple(tokens),
            finish_reason=request.finish_reason,
            stop_reason=request.stop_reason,
            num_preemptions=request.num_preemptions,
            handoff=self._report(incoming),
        )
        if request.is_finished:
            host.forget(served)
        host.say([update])

    def _report(self, incoming: _Incoming) -> HandoffReport:
        filled, arrival = incoming.filled, incoming.arrival
        assert filled is not None
        now_s = self._host.now_s()
        return HandoffReport(
            src=incoming.src,
            dst=self._host.name,
            path="none" if arrival is None else arrival.path_type,
            backend="none" if arrival is None else arrival.backend,
            runs=filled.num_runs,
            calls=filled.num_calls,
            data_bytes=filled.data_bytes,
            num_blocks=len(incoming.blocks) + incoming.num_reused_blocks,
            num_reused_blocks=incoming.num_reused_blocks,
            deferred_s=incoming.granted_s - incoming.asked_s,
            transfer_s=now_s - incoming.filled_s,
            total_s=now_s - max(incoming.asked_s, incoming.filled_s - filled.waited_s),
        )

    def _release(self, incoming: _Incoming) -> None:
        """Give up a hand-off and what it holds."""
        served = incoming.served
        was_reserved = incoming.state is not ReceiverState.DEFERRED
        self._drop(incoming)
        if was_reserved:
            self._host.scheduler.finish(served.request, "abort", None, self._host.now_s())
            self._host.forget(served)

    def _drop(self, incoming: _Incoming) -> None:
        """Forget a hand-off. Its pinned blocks come free once no transfer can write to them: one
        that was not taken in yet will find them with another generation."""
        incoming.state = moved(incoming.state, ReceiverState.RELEASED)
        self._by_handoff.pop(incoming.handoff, None)
        self._by_key.pop(incoming.served.key, None)
        if incoming in self._deferred:
            self._deferred.remove(incoming)
            self._refused_at = None
        if incoming.blocks:
            self._lingering[incoming.handoff] = incoming.blocks

    def _reply(self, node: str, message: messages.Message) -> None:
        try:
            self._transfers.notify(node, messages.encode(message))
        except TransferError as error:
            _logger.warning("cannot answer %s: %s", node, error)


def _spec_of(message: messages.Reserve, now_s: float) -> SequenceSpec:
    """
    Raises:
        ValidationError: not one sequence, or one that cannot be read.
    """
    specs = specs_from_wire(message.sequence, now_s)
    if len(specs) != 1:
        raise ValidationError(f"RESERVE names {len(specs)} sequences; it takes one")
    return specs[0]
