"""The front's side of the cluster: lets workers in, hears them, and notices when one is lost.

    listener's threads   opened connections, each given a reader
    a reader a link      Join, then Updates, Reports, Leaving
    the timekeeper       leases, every quarter of one

A worker is lost at once when its connection ends, and when it has said nothing for `lease_s`: a
process that is stopped, or a host that is gone, ends no connection. Such a connection stays open
until its worker says something after all. It is told that it was expelled, so it gives up what it
holds and joins anew.

The listener hears `joined`, `draining` and `lost` of all members in one order, under this object's
lock, and `deliver` and `report` from the members' readers without it: of one member, none before
its `joined`. One that was under way when the member was lost may come right after `lost`; its
sequences have other attempts by then, so the dispatcher drops it.

Whoever listens may call the ports, which never wait, but must not call back into this object.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec

from flowkv_jax.cluster.error_wire import MAX_TEXT
from flowkv_jax.cluster.link import Link
from flowkv_jax.cluster.messages import (
    MAX_FRAME_BYTES,
    PROBE,
    PURPOSE,
    ErrandResult,
    Expelled,
    Join,
    Leaving,
    Peers,
    Ping,
    Refused,
    Report,
    ToFront,
    Updates,
    Welcome,
    decode_at_front,
)
from flowkv_jax.cluster.node_port import StopOrder
from flowkv_jax.cluster.remote_node import RemoteNode
from flowkv_jax.cluster.roster import JoinRefused, Member, Roster
from flowkv_jax.cluster.sequence_wire import updates_from_wire
from flowkv_jax.config_section import Section
from flowkv_jax.controller.snapshot import NodeReport
from flowkv_jax.errors import ConfigError
from flowkv_jax.sequence import SequenceUpdate
from transfer.config import TransferConfig
from transfer.connection import Address, Connection
from transfer.errors import ProtocolError
from transfer.events import EventLog
from transfer.listener import Listener, is_loopback

logger = logging.getLogger(__name__)

MAX_LINKS = 4096
"""Connections held at once, members or not."""

LIMBO_S = 600.0
"""How long a connection is kept for a worker to hear, when it wakes up, that it was expelled."""

_EVERYWHERE = ("", "0.0.0.0", "::")


class MembershipConfig(Section, frozen=True, kw_only=True):
    """How workers are watched.

    Attributes:
        lease_s: silence after which a worker is lost; its requests go on elsewhere.
        heartbeat_s: how often workers report; at most a third of the lease.
    """

    lease_s: float = 3.0
    heartbeat_s: float = 0.1

    def __post_init__(self) -> None:
        self.require_positive("lease_s", "heartbeat_s")
        if self.heartbeat_s > self.lease_s / 3:
            raise ConfigError(
                f"heartbeat_s={self.heartbeat_s} must be at most a third of lease_s={self.lease_s}",
                parameter="heartbeat_s",
                value=self.heartbeat_s,
            )


class MembershipListener(Protocol):
    """Who drives the nodes. No method may block."""

    def joined(self, port: RemoteNode, member: Member) -> None:
        """A node may be given work; `port.epoch` rises each time a name joins."""

    def draining(self, name: str) -> None:
        """It finishes what it has, and must be given nothing new."""

    def lost(self, name: str, reason: str) -> None:
        """It is gone, and all that it held."""

    def report(self, name: str, epoch: int, report: NodeReport) -> None:
        """How it is."""

    def deliver(self, name: str, updates: Sequence[SequenceUpdate]) -> Sequence[StopOrder]:
        """See `node_port.Deliver`."""


@dataclass(eq=False, slots=True)
class _Guest:
    """A connection: of a member, of one that was, or of who has not joined yet.

    Attributes:
        since_s: when it came, or ceased to be a member's.
        node: the member, to be driven.
        was_refused: and told so.
    """

    link: Link[ToFront]
    host: str
    port: int
    since_s: float
    member: Member | None = None
    node: RemoteNode | None = None
    was_refused: bool = False

    def __str__(self) -> str:
        who = f"worker {self.member.name}" if self.member else "a worker"
        return f"{who} at {self.host}:{self.port}"


class Membership:
    """Listens for workers from the moment it is made.

    Args:
        address: port 0 for any free one; see `address` for what it became.
        secret: shared with the workers; may be empty on loopback only.
        version: of flowkv.
        wanted: see `Roster`.
        clock: seconds, monotonic; also that of the sequences' times.
        tick_s: how often leases are looked at; None for never, where the caller calls `tick`.

    Raises:
        ConfigError: another address than loopback without a secret.
        OSError: the address cannot be listened on.
    """

    def __init__(
        self,
        address: Address,
        secret: bytes,
        listener: MembershipListener,
        *,
        version: str,
        config: MembershipConfig | None = None,
        wanted: Mapping[str, object] | None = None,
        clock: Callable[[], float] = time.monotonic,
        tick_s: float | None = 0.25,
    ) -> None:
        if not secret and not is_loopback(address[0]):
            raise ConfigError(
                f"listening for workers on {address[0]!r} without a secret would let anyone join: "
                "give one, or listen on 127.0.0.1",
                parameter="secret",
            )
        self._config = config or MembershipConfig()
        self._listener = listener
        self._clock = clock
        self._roster = Roster(version, self._config.lease_s, wanted)
        self._lock = threading.RLock()
        self._guests: set[_Guest] = set()
        self._guest_of: dict[Member, _Guest] = {}
        self._closing = threading.Event()
        self._ticked_s = clock()
        self._door = Listener(
            address,
            secret,
            TransferConfig(max_frame_bytes=MAX_FRAME_BYTES),
            self._open,
            _LoggedEvents(64, clock),
        )
        self.address: Address = self._door.address
        self._timekeeper: threading.Thread | None = None
        if tick_s is not None:
            self._timekeeper = threading.Thread(
                target=self._keep_time, args=(tick_s,), name="flowkv-leases"
            )
            self._timekeeper.start()

    @property
    def members(self) -> list[Member]:
        """All that are not gone; for those who show them."""
        with self._lock:
            return self._roster.members

    @property
    def num_connections(self) -> int:
        """Of members, of those that were, and of those that are about to be."""
        return len(self._guests)

    def tick(self) -> None:
        """Look at the leases once; to be done several times in a lease.

        After a longer pause it was this process that stood still, and what its workers have said
        meanwhile is still unread: every lease begins anew.
        """
        lease_s = self._config.lease_s
        with self._lock:
            now_s = self._clock()
            paused_s, self._ticked_s = now_s - self._ticked_s, now_s
            if paused_s > lease_s / 2:
                logger.warning("this process stood still for %.1f s: leases begin anew", paused_s)
                self._roster.renew_all(now_s)
            for member in self._roster.expired(now_s):
                silent_s = now_s - member.heard_s
                self._lose(member, f"silent for {silent_s:.1f} s; its lease is {lease_s:g} s")
            for guest in self._guests:
                waited_s = now_s - guest.since_s
                if guest.member is None and waited_s > lease_s:
                    guest.link.end(f"it did not join within {lease_s:g} s")
                elif guest.member not in self._roster and waited_s > LIMBO_S:
                    guest.link.end("nothing was heard of it any more")

    def close(self) -> None:
        """Close the door and every connection; workers notice, and look for a new front. Every
        member is lost. Idempotent."""
        self._closing.set()
        self._door.close()
        if self._timekeeper is not None:
            self._timekeeper.join()
        with self._lock:
            guests = list(self._guests)
        for guest in guests:
            guest.link.close()

    def check(self) -> None:
        """Raise `RuntimeError` where the books contradict each other."""
        with self._lock:
            self._roster.check()
            if set(self._guest_of) != set(self._roster.members):
                raise RuntimeError("members and their connections differ")

    # A connection's life. `_open` is called by the door, the rest by the connection's reader.

    def _open(self, connection: Connection) -> None:
        try:
            host, port = connection.sock.getpeername()[:2]
        except OSError:  # gone already
            connection.close()
            return
        link = Link(connection, decode_at_front)
        guest = _Guest(link, host, port, self._clock())
        with self._lock:
            is_welcome = (
                connection.purpose == PURPOSE
                and len(self._guests) < MAX_LINKS
                and not self._closing.is_set()
            )
            if is_welcome:
                self._guests.add(guest)
                link.start(
                    lambda message: self._handle(guest, message),
                    lambda reason: self._end(guest, reason),
                    f"flowkv-link-{port}",
                )
        if connection.purpose == PROBE:  # a worker wanted to know whether it has our secret
            link.close()
        elif not is_welcome:
            logger.warning("%s is no worker, or one too many; closed", guest)
            link.close()

    def _handle(self, guest: _Guest, message: ToFront) -> None:
        if guest.member is None:
            if not isinstance(message, Join):
                raise ProtocolError(f"{type(message).__name__} before Join")
            self._join(guest, message)
            return
        member = guest.member
        if not self._roster.heard(member, self._clock()):
            # It was told so before; now that it speaks, it can hear it.
            guest.link.end("it spoke for a membership that has ended")
        elif isinstance(message, Updates):
            orders = self._listener.deliver(
                member.name, updates_from_wire(message.updates, self._clock())
            )
            RemoteNode(member.name, member.epoch, guest.link).stop(orders)
        elif isinstance(message, Report):
            guest.link.send(Ping())
            self._listener.report(member.name, member.epoch, message.report)
        elif isinstance(message, Leaving):
            self._leave(guest, member, message)
        elif isinstance(message, ErrandResult):
            if guest.node is not None:
                guest.node.errand_ended(message)
        else:
            raise ProtocolError("Join, once more")

    def _join(self, guest: _Guest, join: Join) -> None:
        try:
            with self._lock:
                self._admit(guest, join)
        except JoinRefused as error:
            logger.warning("%s may not join: %s", guest, error)
            guest.was_refused = True
            guest.link.send(Refused(str(error)[:MAX_TEXT], error.can_retry))
            guest.link.flush(1.0)
            guest.link.end("refused")

    def _admit(self, guest: _Guest, join: Join) -> None:
        """Under the lock."""
        if self._closing.is_set():
            raise JoinRefused("the front is closing", can_retry=True)
        rival = self._roster.rival(join)
        if rival is not None:
            self._lose(rival, "it joined anew")
        others = self._roster.members
        join = _reachable(join, guest.host)
        member = guest.member = self._roster.admit(join, self._clock())
        self._guest_of[member] = guest
        guest.link.send(
            Welcome(
                member.name,
                member.epoch,
                member.role,
                self._config.lease_s,
                self._config.heartbeat_s,
                [other.peer for other in others],
            )
        )
        self._tell(others, Peers([member.peer], []))
        logger.info("%s joined as %s (epoch %d)", guest, member.role.value, member.epoch)
        guest.node = RemoteNode(member.name, member.epoch, guest.link, self._clock)
        self._listener.joined(guest.node, member)

    def _leave(self, guest: _Guest, member: Member, message: Leaving) -> None:
        with self._lock:
            if message.has_ended:
                guest.link.end(f"it left: {message.reason}")
            elif self._roster.drain(member):
                logger.info("%s is leaving: %s", guest, message.reason)
                self._listener.draining(member.name)

    def _end(self, guest: _Guest, reason: str) -> None:
        with self._lock:
            self._guests.discard(guest)
            if guest.member is not None and guest.member in self._roster:
                self._lose(guest.member, reason)
            elif guest.member is None and not guest.was_refused and not self._closing.is_set():
                logger.warning("%s did not become a member: %s", guest, reason)

    def _lose(self, member: Member, reason: str) -> None:
        """Under the lock. Its connection may live on, until it says something or ends."""
        self._roster.remove(member)
        guest = self._guest_of.pop(member)
        guest.since_s = self._clock()
        if guest.node is not None:
            guest.node.end_errands()
        guest.link.send(Expelled(reason[:MAX_TEXT]))
        logger.warning("worker %s (epoch %d) is gone: %s", member.name, member.epoch, reason)
        self._tell(self._roster.members, Peers([], [member.peer]))
        self._listener.lost(member.name, reason)

    def _tell(self, members: Sequence[Member], news: Peers) -> None:
        for member in members:
            self._guest_of[member].link.send(news)

    def _keep_time(self, tick_s: float) -> None:
        while not self._closing.wait(tick_s):
            try:
                self.tick()
            except Exception:
                logger.exception("a worker's loss could not be handled")


def _reachable(join: Join, host: str) -> Join:
    """A transfer engine that listens on all addresses is reached at the one its worker has come
    from."""
    address = join.node.transfer_address
    if address is None or address[0] not in _EVERYWHERE:
        return join
    node = msgspec.structs.replace(join.node, transfer_address=(host, address[1]))
    return msgspec.structs.replace(join, node=node)


class _LoggedEvents(EventLog):
    """Who was turned away at the door is worth a line in the log."""

    def add(self, subject: str, what: str, detail: object = "") -> None:
        super().add(subject, what, detail)
        logger.warning("a connection was %s: %s", what, detail)
