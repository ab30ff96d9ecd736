"""Between two processes of one `jax.distributed` world: a `ppermute` over their two devices.

NCCL on GPUs, gloo on CPU. One call is one compiled program, which both processes run; the source
puts a copy of the blocks in, the destination takes it out. Lengths are rounded up to few
(`bucket`), so few programs are compiled, and up to a quarter more bytes may cross than asked for.

A program that one side runs and the other does not would hang, and would swallow the next one. So
the two halves first agree, and from then on go in step:

    source                               destination
                     ───── HERE ─────>
                                         takes its turn
                     <──── READY ─────
    takes its turn
                     ───── GO ───────>   (or BUSY: gives its turn up, and tries again later)
    vote, batch of calls, vote, batch of calls, ..., vote

A vote is a program, too: each side shows the other its leg and batch, and whether it goes on. A
side that was cancelled, or that failed, says so at the next vote, and both stop there. The last
vote tells the destination that the source held its blocks to the end.

A process takes part in one leg at a time, whoever the other is: its "turn". So all processes run
these programs in one order, also where three or more send to each other in a circle. A source that
does not get its turn within `_TURN_S` says so, and nobody waits for others with a turn in hand.

What can still hang is a peer that is stopped, but alive; then so do we. One that dies ends our
program with an error, and the leg with `PeerLost`: with gloo at once, or after 30 s where the two
had never worked together before; with NCCL that is untried. But JAX ends every process of a world
soon after it has missed one of them (within `heartbeat_timeout_seconds` of
`jax.distributed.initialize`, 100 by default), unless `jax_enable_recoverability` was set before;
and even then when the one missing is process 0. A cluster that must outlive its nodes should not
be one world.
"""

from __future__ import annotations

import random
import threading
import time

import msgspec

from transfer.backends.base import Link, LinkBackend, Peer, Plan, SendHalf
from transfer.backends.collective_arrays import Giver, Opening, Taker
from transfer.backends.collective_pair import OutOfStep, Pair, Vote, World
from transfer.config import TransferConfig
from transfer.errors import BackendError, PeerLost, ProtocolError, TransferError
from transfer.pool_access import PoolAccess

_HERE, _READY, _GO, _BUSY = b"here", b"ready", b"go", b"busy"
_TURN_S = 0.005
_LONGEST_PAUSE_S = 0.02
_GRACE_S = 0.25
_LOSS_S = 2.0
_BATCH_BYTES = 32 << 20
_BATCH_CALLS = 64


class _Hello(msgspec.Struct, frozen=True, array_like=True):
    """Which process of which world."""

    world: str
    index: int
    count: int


class CollectiveBackend(LinkBackend):
    """See the module's text. One a process.

    Args:
        config: the engine's.
        world: names the world: its coordinator's address. The same in all its processes.

    Raises:
        BackendError: `jax.distributed` is not initialized.
    """

    name = "collective"

    def __init__(self, config: TransferConfig, *, world: str) -> None:
        self._world = World()
        self._here = _Hello(world, self._world.index, self._world.count)
        self._lock = threading.Lock()
        self._turn = threading.Lock()
        self._pairs: dict[int, Pair] = {}
        self._out_of_step: set[str] = set()

    def hello(self) -> bytes | None:
        return msgspec.msgpack.encode(self._here)

    def why_not(self, peer: Peer) -> str:
        if self.name not in peer.hellos:
            return "the peer's engine has no such backend"
        there, here = _read_hello(peer), self._here
        if (there.world, there.count) != (here.world, here.count) or there.index == here.index:
            return (
                f"process {there.index} of {there.count} of world {there.world!r} there, "
                f"{here.index} of {here.count} of {here.world!r} here"
            )
        if peer.engine_id in self._out_of_step:
            return "the two processes are out of step since a leg that failed"
        return ""

    def offer(self, source: PoolAccess, plan: Plan, peer: Peer) -> SendHalf:
        return _CollectiveSend(self, Giver(source, plan), plan, peer)

    def receive(
        self, link: Link, destination: PoolAccess, plan: Plan, opening: bytes, peer: Peer
    ) -> int:
        if why := self.why_not(peer):
            raise BackendError(why)
        taker = Taker(destination, plan, _read_opening(opening))
        if link.get() != _HERE:
            raise ProtocolError("the source did not say that it is here")
        while True:
            while not self._turn.acquire(timeout=_TURN_S):
                link.check()
            try:
                link.put(_READY)
                if _answer(link) == _GO:
                    self._go_in_step(link, plan, peer, taker)
                    return len(plan.calls)
            finally:
                self._turn.release()
            time.sleep(random.uniform(0, _LONGEST_PAUSE_S))

    def send(self, link: Link, giver: Giver, plan: Plan, peer: Peer) -> None:
        """The source's half, for `_CollectiveSend`."""
        link.put(_HERE)
        while True:
            if link.get() != _READY:
                raise ProtocolError("the destination did not say that it is ready")
            if not self._turn.acquire(timeout=random.uniform(0, _TURN_S)):
                link.put(_BUSY)
                continue
            try:
                link.put(_GO)
                self._go_in_step(link, plan, peer, giver)
                return
            finally:
                self._turn.release()

    def peer_lost(self, engine_id: str) -> None:
        with self._lock:
            self._out_of_step.discard(engine_id)

    def _go_in_step(self, link: Link, plan: Plan, peer: Peer, side: Giver | Taker) -> None:
        index = _read_hello(peer).index
        with self._lock:
            if index not in self._pairs:
                self._pairs[index] = Pair(self._world, index)
            pair = self._pairs[index]
        try:
            _go_in_step(link, pair, plan, side)
        except OutOfStep:
            with self._lock:
                self._out_of_step.add(peer.engine_id)
            # If the other process is gone, the channel knows it soon, and tells it better.
            ends_s = time.monotonic() + _LOSS_S
            while time.monotonic() < ends_s:
                link.check()
                time.sleep(_TURN_S)
            raise


class _CollectiveSend(SendHalf):
    def __init__(self, backend: CollectiveBackend, giver: Giver, plan: Plan, peer: Peer) -> None:
        self.opening = msgspec.msgpack.encode(giver.opening)
        self._backend = backend
        self._giver = giver
        self._plan = plan
        self._peer = peer

    def run(self, link: Link) -> None:
        self._backend.send(link, self._giver, self._plan, self._peer)

    def close(self) -> None:
        """Nothing was held."""


def _go_in_step(link: Link, pair: Pair, plan: Plan, side: Giver | Taker) -> None:
    """Everything after GO. What fails here must not keep this side from the other's programs."""
    failure: Exception | None = None
    batch = start = 0
    while True:
        if failure is None:
            try:
                link.check()
            except TransferError as error:
                failure = error
        mine = Vote(plan.leg, batch, failure is None)
        theirs = pair.vote(mine)
        if (theirs.leg, theirs.batch) != (mine.leg, mine.batch):
            raise OutOfStep(f"{theirs} from the other process, {mine} here")
        if failure is not None:
            raise failure
        if not theirs.goes_on:
            raise BackendError("the other side does not go on")
        if start == len(plan.calls):
            return
        stop = _end_of_batch(plan, start)
        for call in range(start, stop):
            array = None
            if isinstance(side, Giver) and failure is None:
                try:
                    array = side.array(call)
                except Exception as error:
                    failure = error
            if array is None:
                array = pair.nothing(side.shape(call), side.dtype)
            arrived = pair.move(array, from_here=isinstance(side, Giver))
            if isinstance(side, Taker) and failure is None:
                try:
                    side.take(call, arrived)
                except Exception as error:
                    failure = error
        batch, start = batch + 1, stop


def _end_of_batch(plan: Plan, start: int) -> int:
    """At most `_BATCH_CALLS` calls and `_BATCH_BYTES`, but one at least; alike on both sides."""
    stop, size = start, 0
    while stop < min(len(plan.calls), start + _BATCH_CALLS):
        size += int(plan.calls[stop, 2])
        if size > _BATCH_BYTES and stop > start:
            break
        stop += 1
    return stop


def _answer(link: Link) -> bytes:
    """GO or BUSY. A GO that was sent before this leg was stopped must not be missed."""
    ends_s = 0.0
    while True:
        try:
            return link.get()
        except PeerLost:
            raise
        except TransferError:
            ends_s = ends_s or time.monotonic() + _GRACE_S
            if time.monotonic() >= ends_s:
                raise
        time.sleep(_TURN_S)


def _read_hello(peer: Peer) -> _Hello:
    try:
        return msgspec.msgpack.decode(peer.hellos[CollectiveBackend.name], type=_Hello)
    except msgspec.DecodeError as error:
        raise ProtocolError(f"which process of a world the peer is: {error}") from None


def _read_opening(opening: bytes) -> Opening:
    try:
        return msgspec.msgpack.decode(opening, type=Opening)
    except msgspec.DecodeError as error:
        raise ProtocolError(f"an opening that cannot be read: {error}") from None
