"""The destination's side of transfers: it checks offers, runs receiving halves, and answers.

For each transfer the receiver keeps one `Incoming` and for each of its legs the last answer, so
that every question can be asked again. The `Incoming` owns the pins on the destination's blocks,
from the first offer until the transfer is final, over all attempts: between two attempts nobody
else may write there, and once it is final no leg of it is taken any more.

When the connection is lost, legs stop, and a transfer that is not complete by then has failed;
the source, should it come back, learns that from the answer to its query.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass, field, replace

from transfer import messages
from transfer.arrival import Arrival
from transfer.backends.base import LinkBackend, Plan
from transfer.callbacks import call_back
from transfer.channel import Channel, layout_differences
from transfer.checksum import check_same, plan_checksum
from transfer.errors import (
    BackendError,
    Cancelled,
    HandshakeMismatch,
    PeerLost,
    ProtocolError,
    StaleGeneration,
    TransferError,
    from_wire,
    to_wire,
)
from transfer.leg_link import LegLink
from transfer.lifecycle import LegState, TransferState, moved
from transfer.pool_access import block_ids, check_bounds
from transfer.runtime import RegisteredPool, Runtime, check_generations
from transfer.strategies import Strategy

_STRATEGIES = {strategy.value: strategy for strategy in Strategy}

Key = tuple[str, str]
"""(engine id of the source, name of the transfer)"""


@dataclass(slots=True)
class _Leg:
    offer: messages.Offer
    plan: Plan
    link: LegLink
    state: LegState = LegState.MOVING
    answer: messages.Message | None = None


@dataclass(slots=True)
class _Incoming:
    """A transfer on its way in, by `channel`. `ending`: why the source, or we, gave it up."""

    key: Key
    node: str
    channel: Channel
    tag: str = ""
    state: TransferState = TransferState.MOVING
    attempt: int = 0
    legs: dict[int, _Leg] = field(default_factory=dict)
    ending: TransferError | None = None
    end_asked: bool = False
    pinned: dict[str, RegisteredPool] = field(default_factory=dict)

    @property
    def owner(self) -> str:
        return "/".join(self.key)

    @property
    def is_still(self) -> bool:
        return all(leg.state.is_final for leg in self.legs.values())


class Receiver:
    """All transfers from other engines towards this engine's pools."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._lock = threading.Condition()
        self._incoming: OrderedDict[Key, _Incoming] = OrderedDict()
        self._by_leg: dict[tuple[str, int], _Incoming] = {}

    @property
    def num_active(self) -> int:
        with self._lock:
            return sum(not i.state.is_final for i in self._incoming.values())

    def on_offer(self, channel: Channel, offer: messages.Offer) -> None:
        """Take a leg, or refuse it. Small ones are received here and now.

        That a leg has been taken is not said unless the source asks (`Query`): a message more
        would take longer than the copy of a small leg.
        """
        engine_id = channel.peer.engine_id
        with self._lock:
            known = self._by_leg.get((engine_id, offer.leg))
            if known is not None:
                self._answer_again(engine_id, known.legs[offer.leg])
                return
            incoming = self._incoming.get((engine_id, offer.transfer))
            if incoming is None:
                incoming = _Incoming((engine_id, offer.transfer), offer.dst, channel, offer.tag)
                self._remember(incoming)
            try:
                leg, pool, backend = self._admit(engine_id, channel, incoming, offer)
            except TransferError as error:
                channel.try_send(messages.Failed(offer.leg, *to_wire(error)))
                return
        inline_bytes = self._runtime.config.inline_bytes
        small = leg.plan.data_bytes <= backend.inline_receive_bytes(offer.opening, inline_bytes)
        waits = offer.confirm or (offer.verify and offer.digest is None)
        if small and not waits:
            self._receive(incoming, leg, pool, backend)
            return
        try:
            self._runtime.receivers.submit(self._receive, incoming, leg, pool, backend)
        except RuntimeError:
            self._leg_over(incoming, leg, Cancelled("the destination's engine closes"), 0)

    def on_message(self, channel: Channel, message: messages.Message) -> None:
        """Anything else that a source says about a leg."""
        engine_id = channel.peer.engine_id
        if isinstance(message, messages.End):
            self._end(channel, message)
            return
        if not isinstance(
            message,
            messages.Note | messages.Digest | messages.Confirm | messages.Abort | messages.Query,
        ):
            return
        with self._lock:
            incoming = self._by_leg.get((engine_id, message.leg))
            leg = incoming.legs.get(message.leg) if incoming is not None else None
        if leg is None:
            if isinstance(message, messages.Abort | messages.Query):
                lost = PeerLost(f"leg {message.leg} is not known here (any more)")
                channel.try_send(messages.Failed(message.leg, *to_wire(lost)))
        elif isinstance(message, messages.Note):
            leg.link.deliver(message.body)
        elif isinstance(message, messages.Digest):
            leg.link.deliver_digest(message.digest)
        elif isinstance(message, messages.Confirm):
            leg.link.confirm()
        else:
            if isinstance(message, messages.Abort):
                self._stop(leg, from_wire(message.code, message.text))
            with self._lock:
                self._answer_again(engine_id, leg)

    def channel_lost(self, channel: Channel, error: TransferError) -> None:
        """Everything that came over it and is not complete fails, for notes may have been lost."""
        with self._lock:
            lost = [i for i in self._incoming.values() if i.channel is channel]
        for incoming in lost:
            self._give_up(incoming, error)

    def close(self, error: TransferError) -> None:
        """Stop everything; does not wait."""
        with self._lock:
            all_incoming = list(self._incoming.values())
        for incoming in all_incoming:
            self._give_up(incoming, error)

    def wait_still(self, timeout_s: float) -> bool:
        """Whether every receiving half has ended within the time."""
        with self._lock:
            return self._lock.wait_for(
                lambda: all(i.is_still for i in self._incoming.values()), timeout_s
            )

    def _admit(
        self, engine_id: str, channel: Channel, incoming: _Incoming, offer: messages.Offer
    ) -> tuple[_Leg, RegisteredPool, LinkBackend]:
        """Check an offer and pin its blocks. Lock held."""
        if incoming.state is not TransferState.MOVING or incoming.ending is not None:
            raise Cancelled(f"transfer {offer.transfer} is {incoming.state.value} here")
        pool = self._runtime.pool(offer.dst)
        backend = self._runtime.backends.get(offer.backend)
        if backend is None:
            raise BackendError(f"the destination's engine has no backend {offer.backend!r}")
        source = next((n for n in channel.peer.nodes if n.name == offer.src), None)
        if source is None:
            raise HandshakeMismatch(f"{offer.src!r} was not announced by its engine")
        if differences := layout_differences(source.layout, pool.access.layout):
            raise HandshakeMismatch(f"{offer.src} and {offer.dst} differ: {differences}")
        if offer.strategy not in _STRATEGIES:
            raise ProtocolError(f"unknown strategy {offer.strategy!r}")
        runs = messages.unpack_runs(offer.runs)
        intervals = [(run.dst_start, run.num_blocks) for run in runs]
        check_bounds(offer.dst, pool.access.num_blocks, intervals)
        pool.pins.write(incoming.owner, intervals)
        # After the pins, so that whoever frees blocks (a new generation) and then finds no pins
        # knows that no transfer will be let in any more.
        if offer.dst_generations:
            expected = messages.unpack_ids(offer.dst_generations)
            ids = block_ids(runs, of_source=False)
            try:
                check_generations(offer.dst, pool.access, ids, expected)
            except StaleGeneration:
                if not incoming.legs:
                    pool.pins.unpin_write(incoming.owner)
                raise
        incoming.channel = channel
        incoming.pinned[offer.dst] = pool
        plan = Plan(
            offer.transfer,
            offer.leg,
            offer.src,
            offer.dst,
            offer.hops,
            runs,
            pool.access.layout,
            _STRATEGIES[offer.strategy],
        )
        clock = self._runtime.clock
        ends = None if offer.deadline_s is None else clock() + offer.deadline_s
        link = LegLink(lambda body: channel.send(messages.Note(offer.leg, True, body)), clock, ends)
        if offer.digest is not None:
            link.deliver_digest(offer.digest)
        leg = _Leg(offer, plan, link)
        incoming.attempt = max(incoming.attempt, offer.attempt)
        incoming.legs[offer.leg] = leg
        self._by_leg[engine_id, offer.leg] = incoming
        return leg, pool, backend

    def _receive(
        self, incoming: _Incoming, leg: _Leg, pool: RegisteredPool, backend: LinkBackend
    ) -> None:
        """The receiving half of a leg, to its answer."""
        engine_id, offer = incoming.key[0], leg.offer
        calls = 0
        failure: BaseException | None = None
        try:
            peer = self._runtime.peers.view(engine_id)
            leg.link.check()
            calls = backend.receive(leg.link, pool.access, leg.plan, offer.opening, peer)
            pool.access.flush()
            if offer.verify:
                here = plan_checksum(pool.access, leg.plan, of_source=False)
                check_same(leg.plan, leg.link.digest(), here)
            if offer.confirm:
                self._runtime.peers.send(engine_id, messages.Moved(offer.leg))
                leg.link.wait_confirmed()
            if offer.dst_generations:
                ids = block_ids(leg.plan.runs, of_source=False)
                expected = messages.unpack_ids(offer.dst_generations)
                check_generations(offer.dst, pool.access, ids, expected)
        except Exception as error:
            failure = error
        self._leg_over(incoming, leg, failure, calls)

    def _leg_over(
        self, incoming: _Incoming, leg: _Leg, failure: BaseException | None, calls: int
    ) -> None:
        engine_id = incoming.key[0]
        with self._lock:
            if failure is None:
                leg.state = moved(leg.state, LegState.DONE)
                leg.answer = messages.Done(leg.offer.leg, calls)
            else:
                leg.state = moved(leg.state, LegState.STOPPED)
                leg.answer = messages.Failed(leg.offer.leg, *to_wire(failure))
            arrival = self._settle(incoming)
            self._lock.notify_all()
            # Before anyone hears of the arrival, so that the source is told first.
            self._runtime.peers.send(engine_id, leg.answer)
        if arrival is not None:
            call_back(self._runtime.on_arrival, arrival)

    def _settle(self, incoming: _Incoming) -> Arrival | None:
        """Make the transfer final if it can be. Lock held."""
        if incoming.state.is_final or not incoming.is_still:
            return None
        last = [leg for leg in incoming.legs.values() if leg.offer.attempt == incoming.attempt]
        done = sum(leg.state is LegState.DONE for leg in last)
        if last and done == last[0].offer.num_legs:
            incoming.state = moved(incoming.state, TransferState.COMPLETED)
        elif incoming.ending is not None:
            if incoming.state is TransferState.MOVING:
                incoming.state = moved(incoming.state, TransferState.SETTLING)
            cancelled = isinstance(incoming.ending, Cancelled)
            end = TransferState.CANCELLED if cancelled else TransferState.FAILED
            incoming.state = moved(incoming.state, end)
        else:
            return None
        for pool in incoming.pinned.values():
            pool.pins.unpin_write(incoming.owner)
        incoming.pinned.clear()
        if incoming.end_asked:
            self._send_ended(incoming)
        name = incoming.key[1]
        self._runtime.events.add(name, incoming.state.value, f"into {incoming.node}")
        error = incoming.ending if incoming.state is not TransferState.COMPLETED else None
        arrival = Arrival(name, incoming.node, incoming.state, error, incoming.tag)
        if incoming.state is not TransferState.COMPLETED:
            return arrival
        backends = dict.fromkeys(leg.offer.backend for leg in last)
        path_type = last[0].offer.path_type
        return replace(arrival, path_type=path_type, backend="+".join(backends))

    def _give_up(self, incoming: _Incoming, error: TransferError) -> None:
        with self._lock:
            if incoming.state.is_final:
                return
            incoming.ending = incoming.ending or error
            legs = list(incoming.legs.values())
        for leg in legs:
            self._stop(leg, error)
        with self._lock:
            arrival = self._settle(incoming)
        if arrival is not None:
            call_back(self._runtime.on_arrival, arrival)

    def _end(self, channel: Channel, message: messages.End) -> None:
        with self._lock:
            key = (channel.peer.engine_id, message.transfer)
            incoming = self._incoming.get(key)
            if incoming is None:
                incoming = _Incoming(key, "", channel)
                self._remember(incoming)
            incoming.end_asked = True
            if incoming.state.is_final:
                self._send_ended(incoming)
                return
        self._give_up(incoming, from_wire(message.code, message.text))

    def _stop(self, leg: _Leg, error: TransferError) -> None:
        with self._lock:
            if leg.state is not LegState.MOVING:
                return
            leg.state = moved(leg.state, LegState.STOPPING)
        leg.link.stop(error)

    def _answer_again(self, engine_id: str, leg: _Leg) -> None:
        answer = leg.answer if leg.answer is not None else messages.Accept(leg.offer.leg)
        self._runtime.peers.send(engine_id, answer)

    def _send_ended(self, incoming: _Incoming) -> None:
        engine_id, transfer = incoming.key
        self._runtime.peers.send(engine_id, messages.Ended(transfer, incoming.state.value))

    def _remember(self, incoming: _Incoming) -> None:
        """Keep it, and forget the oldest final one above the limit. Lock held."""
        self._incoming[incoming.key] = incoming
        if len(self._incoming) <= self._runtime.config.max_finished:
            return
        for key, old in self._incoming.items():
            if old.state.is_final:
                del self._incoming[key]
                for leg in old.legs:
                    self._by_leg.pop((key[0], leg), None)
                return
