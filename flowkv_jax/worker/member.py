"""A worker's side of the cluster: joins the front, carries its orders to the node, reports, leaves.

    OUTSIDE -> MEMBER             welcomed
    MEMBER -> OUTSIDE             the connection ended, the front fell silent, or it expelled us:
                                  everything that was held is given up, then join anew
    MEMBER -> DRAINING            asked to leave: nothing new comes, what runs goes on
    DRAINING -> LEFT              nothing runs any more, or the time is up
    OUTSIDE, MEMBER, DRAINING -> LEFT     told to stop at once, or refused for good

    the caller's thread, in `run`     dials, waits for what changes the state
    the connection's reader           orders: they only post to the node
    the heartbeat                     reports, and notices that the front or the node is gone; it
                                      waits for nothing else
    the node's thread                 `deliver`

After having been a member once it looks for the front for ever: a front that restarts knows nobody,
and its workers come to it. What they held belonged to the old front's callers, who are gone.
"""

from __future__ import annotations

import enum
import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future
from typing import Any

from flowkv_jax.cluster.error_wire import error_to_wire
from flowkv_jax.cluster.link import Link
from flowkv_jax.cluster.messages import (
    MAX_FRAME_BYTES,
    PROTOCOL,
    PURPOSE,
    Drain,
    Errand,
    ErrandResult,
    Expelled,
    Join,
    Leaving,
    Peers,
    Ping,
    Redirect,
    Refused,
    Release,
    Report,
    SetRole,
    Start,
    Stop,
    ToWorker,
    Updates,
    Welcome,
    decode_at_worker,
)
from flowkv_jax.cluster.node_port import StopOrder
from flowkv_jax.cluster.secret import wrong_secret
from flowkv_jax.cluster.sequence_wire import WireSpecs, specs_from_wire, updates_to_wire
from flowkv_jax.errors import (
    EngineDeadError,
    ServerError,
    UnprocessableError,
    ValidationError,
)
from flowkv_jax.sequence import SequenceUpdate
from flowkv_jax.worker.application import Application
from flowkv_jax.worker.local_node import LocalNode
from flowkv_jax.worker.member_config import MemberConfig
from transfer.connection import Address, dial
from transfer.errors import AuthenticationFailed, HandshakeMismatch, ProtocolError, TransferError

logger = logging.getLogger(__name__)

_IDLE_POLL_S = 0.05
_FLUSH_S = 5.0


class State(enum.Enum):
    OUTSIDE = enum.auto()
    MEMBER = enum.auto()
    DRAINING = enum.auto()
    LEFT = enum.auto()


LEGAL_MOVES: frozenset[tuple[State, State]] = frozenset(
    {
        (State.OUTSIDE, State.MEMBER),
        (State.OUTSIDE, State.LEFT),
        (State.MEMBER, State.OUTSIDE),
        (State.MEMBER, State.DRAINING),
        (State.MEMBER, State.LEFT),
        (State.DRAINING, State.LEFT),
    }
)


class FrontNotFound(ServerError):
    """Nobody who would let this worker in was found in time."""


class _Event(enum.Enum):
    """What the state changes for."""

    DRAIN = enum.auto()
    STOP = enum.auto()
    LINK_ENDED = enum.auto()
    NODE_DIED = enum.auto()


class Member:
    """One worker.

    Args:
        address: the front's.
        secret: shared with it.
        clock: seconds, monotonic; that of the node's times.
    """

    def __init__(
        self,
        node: LocalNode,
        address: Address,
        secret: bytes,
        application: Application,
        config: MemberConfig | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._node = node
        self._address = address
        self._secret = secret
        self._application = application
        self._config = config or MemberConfig()
        self._clock = clock
        self._instance = os.urandom(16).hex()
        self._name = application.name
        self._epoch = 0
        self._role = application.role
        self._state = State.OUTSIDE
        self._link: Link[ToWorker] | None = None
        self._heard_s = clock()
        self._drain_timeout_s = self._config.drain_timeout_s
        # SimpleQueue.put is the one call that a signal handler may make here at any moment.
        self._inbox: queue.SimpleQueue[tuple[_Event, Any]] = queue.SimpleQueue()

    @property
    def name(self) -> str:
        """As the front has it; before that, as it was asked for."""
        return self._name

    @property
    def epoch(self) -> int:
        """Of the present or last membership; 0 before the first."""
        return self._epoch

    @property
    def state(self) -> State:
        return self._state

    # Any thread, and signal handlers

    def drain(self) -> None:
        """Leave once what runs has ended, or after `drain_timeout_s`. Safe in signal handlers."""
        self._inbox.put((_Event.DRAIN, None))

    def stop(self) -> None:
        """Leave now; everything held ends. Safe in signal handlers."""
        self._inbox.put((_Event.STOP, None))

    # The node's thread

    def deliver(self, node: str, updates: Sequence[SequenceUpdate]) -> Sequence[StopOrder]:
        """Send news of a step to the front; a `node_port.Deliver`. Never blocks.

        Orders to stop come back later, so none here. Outside of a membership the news have nobody
        left to hear them, and are dropped.
        """
        link = self._link
        if link is not None and updates:
            link.send(Updates(updates_to_wire(updates, self._clock())))
        return ()

    # The caller's thread

    def run(self) -> str:
        """Be a member until told to leave, or until that is impossible; returns why it left.

        Raises:
            UnprocessableError: the front refuses this worker for good, and says why; or the
                secrets differ.
            FrontNotFound: nobody let it in within `join_timeout_s`.
            EngineDeadError: the node died.
        """
        try:
            while True:
                joined = self._join()
                if joined is None:
                    return "told to stop"
                reason = self._serve(*joined)
                if reason is not None:
                    return reason
        finally:
            if self._state is not State.LEFT:
                self._move_to(State.LEFT)

    def _join(self) -> tuple[Link[ToWorker], Welcome] | None:
        """Look for the front until it lets us in. None if told to leave meanwhile."""
        timeout_s = self._config.join_timeout_s if self._epoch == 0 else None
        began_s = self._clock()
        pause_s = self._config.first_backoff_s
        last = ""
        while True:
            try:
                return self._attempt()
            except (TransferError, TimeoutError) as error:
                if str(error) != last:
                    last = str(error)
                    logger.warning("the front at %s:%d: %s; still trying", *self._address, error)
            if timeout_s is not None and self._clock() - began_s > timeout_s:
                raise FrontNotFound(
                    f"no front at {self._address[0]}:{self._address[1]} let this worker in within "
                    f"{timeout_s:g} s: {last}"
                )
            if self._was_told_to_leave(pause_s):
                return None
            pause_s = min(2 * pause_s, self._config.max_backoff_s)

    def _attempt(self) -> tuple[Link[ToWorker], Welcome]:
        try:
            connection = dial(
                self._address,
                self._secret,
                PURPOSE,
                timeout_s=self._config.dial_timeout_s,
                max_frame_bytes=MAX_FRAME_BYTES,
            )
        except (AuthenticationFailed, HandshakeMismatch) as error:
            if self._epoch == 0:
                raise UnprocessableError(wrong_secret(error)) from None
            raise
        link = Link(connection, decode_at_worker)
        try:
            told = self._application
            link.send(
                Join(
                    PROTOCOL,
                    told.version,
                    self._instance,
                    self._name,
                    bool(told.name),
                    self._epoch,
                    told.role,  # a role that it was lent ends with the membership
                    told.model,
                    told.node,
                )
            )
            answer = link.receive(self._config.dial_timeout_s)
            if isinstance(answer, Refused) and not answer.can_retry:
                raise UnprocessableError(answer.reason)
            if isinstance(answer, Refused):
                raise ProtocolError(answer.reason)
            if not isinstance(answer, Welcome):
                raise ProtocolError(f"{type(answer).__name__} instead of a welcome")
        except BaseException:
            link.close()
            raise
        return link, answer

    def _was_told_to_leave(self, wait_s: float) -> bool:
        """Wait, unless told to leave."""
        ends_s = self._clock() + wait_s
        while True:
            event, _ = self._next_event(max(0.0, ends_s - self._clock()))
            if event in (None, _Event.DRAIN, _Event.STOP):
                return event is not None

    def _next_event(self, timeout_s: float | None) -> tuple[_Event | None, Any]:
        """(None, None) when the time is up."""
        try:
            return self._inbox.get(timeout=timeout_s)
        except queue.Empty:
            return None, None

    def _serve(self, link: Link[ToWorker], welcome: Welcome) -> str | None:
        """Be a member; the reason for leaving, or None to join anew."""
        self._name, self._epoch, self._role = welcome.name, welcome.epoch, welcome.role
        self._heard_s = self._clock()
        self._move_to(State.MEMBER)
        over = threading.Event()
        heartbeat = threading.Thread(
            target=self._beat, args=(link, welcome.heartbeat_s, over), name="flowkv-heartbeat"
        )
        try:
            self._node.enter(welcome.name, welcome.epoch, welcome.role)
            for peer in welcome.peers:
                self._node.peer_joined(peer)
            self._link = link
            link.start(
                lambda message: self._obey(link, message),
                lambda reason: self._inbox.put((_Event.LINK_ENDED, (link, reason))),
                "flowkv-front",
            )
            heartbeat.start()
            logger.info("member %s (epoch %d), %s", self._name, self._epoch, self._role.value)
            return self._wait(link)
        finally:
            over.set()
            if heartbeat.ident is not None:
                heartbeat.join()
            self._link = None
            link.flush(_FLUSH_S)
            link.close()
            self._node.leave()

    def _wait(self, link: Link[ToWorker]) -> str | None:
        """Until the membership ends."""
        ends_s = 0.0
        while True:
            draining = self._state is State.DRAINING
            event, what = self._next_event(_IDLE_POLL_S if draining else None)
            if event is _Event.LINK_ENDED:
                if what[0] is not link:
                    continue
                logger.warning("member %s is one no more: %s", self._name, what[1])
                if draining:
                    return f"the connection ended while it drained: {what[1]}"
                self._move_to(State.OUTSIDE)
                return None
            if event is _Event.NODE_DIED:
                link.send(Leaving("its node died", True))
                raise EngineDeadError(f"the node of worker {self._name} died")
            if event is _Event.STOP:
                link.send(Leaving("stopped", True))
                return "stopped at once"
            if event is _Event.DRAIN and not draining:
                self._move_to(State.DRAINING)
                ends_s = self._clock() + self._drain_timeout_s
                link.send(Leaving("drains", False))
            if draining and (self._node.is_idle or self._clock() >= ends_s):
                reason = "drained" if self._node.is_idle else "the time to drain was up"
                link.send(Leaving(reason, True))
                return reason

    # The heartbeat's thread

    def _beat(self, link: Link[ToWorker], heartbeat_s: float, over: threading.Event) -> None:
        while True:
            if not self._node.is_alive:
                self._inbox.put((_Event.NODE_DIED, None))
                return
            silent_s = self._clock() - self._heard_s
            if silent_s > self._config.front_timeout_s:
                link.end(f"the front was silent for {silent_s:.1f} s")
                return
            try:
                link.send(Report(self._node.report()))
            except Exception as error:
                # Without reports the lease runs out and everything is lost for one bad number.
                logger.exception("the node could not report")
                link.end(f"the node could not report: {error}")
                return
            if over.wait(heartbeat_s):
                return

    # The reader's thread

    def _obey(self, link: Link[ToWorker], message: ToWorker) -> None:
        self._heard_s = self._clock()
        match message:
            case Ping():
                pass
            case Start():
                self._start(message.sequences)
            case Stop():
                self._node.stop(message.orders)
            case Redirect():
                self._node.redirect(message.key, message.decode_node)
            case Release():
                self._node.release(message.node)
            case Peers():
                for peer in message.left:
                    self._node.peer_left(peer)
                for peer in message.joined:
                    self._node.peer_joined(peer)
            case SetRole():
                self._role = message.role
                self._node.set_role(message.role)
            case Errand():
                self._run(link, message)
            case Drain():
                self._drain_timeout_s = message.timeout_s
                self._inbox.put((_Event.DRAIN, None))
            case Expelled():
                link.end(f"expelled by the front: {message.reason}")
            case _:
                raise ProtocolError(f"{type(message).__name__} to a member")

    def _run(self, link: Link[ToWorker], errand: Errand) -> None:
        def done(future: Future[bool]) -> None:
            error = CancelledError() if future.cancelled() else future.exception()
            wire = None if error is None else error_to_wire(error)
            link.send(ErrandResult(errand.number, error is None and future.result(), wire))

        self._node.run_errand(errand.kind, errand.duration_s).add_done_callback(done)

    def _start(self, wire: WireSpecs) -> None:
        """Refusals go back as updates: a sequence that cannot be served ends, not the link."""
        keys = [(spec.sequence_id, spec.attempt) for spec in wire.specs]

        def refuse(error: Exception) -> None:
            self.deliver(
                self._name,
                [SequenceUpdate(sequence_id=i, attempt=a, error=error) for i, a in keys],
            )

        try:
            specs = specs_from_wire(wire, self._clock())
        except ValidationError as error:
            refuse(error)
            return

        def done(future: Future[None]) -> None:
            error = CancelledError() if future.cancelled() else future.exception()
            if error is not None:
                refuse(error if isinstance(error, Exception) else EngineDeadError(repr(error)))

        self._node.start(specs).add_done_callback(done)

    def _move_to(self, state: State) -> None:
        if (self._state, state) not in LEGAL_MOVES:
            raise RuntimeError(f"illegal move {self._state.name} -> {state.name}")
        self._state = state
