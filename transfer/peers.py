"""The engines this one is connected to, and the nodes they hold. Imports no JAX.

`notifications` says what an acquaintance of two engines is. It ends here in two steps: `remove`
finds that it is over, and from then on the engine takes no new channel; `forget`, called once the
program has been told, makes room for a new one.

Both sides must agree on which acquaintance a channel belongs to, though they may not see the loss
of another channel at the same time. So an engine counts its partings from each other one, and says
the number when it introduces itself. A channel belongs to the acquaintance that the higher of the
two numbers names. Who has heard less ends its side of the older one first.

A name has one holder. Where two connected engines announce the same one, the engine that started
later holds it: it is the restarted process. The other one is out of date, for all of its nodes:
it is cut off, and refused while the newer one is connected.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from transfer.backends.base import Peer
from transfer.channel import Channel
from transfer.errors import EngineClosed, HandshakeMismatch, PeerLost, UnknownNode
from transfer.messages import Introduction, Message, NodeInfo

MAX_PARTINGS = 4096
"""Engines whose partings are remembered; the longest unheard of are forgotten first."""


class Peers:
    """Channels by engine, nodes by name.

    Two engines that connect to each other at the same time have two channels. Both stay open, each
    side sends by the newest it has, and when one is lost the other serves. Notifications, which
    must stay in order, go by the channel that took the first one.

    Args:
        engine_id, host_id: of this engine.

    Attributes:
        is_lost: for tests: whether a message is not sent, though its sender thinks so.
    """

    def __init__(self, engine_id: str, host_id: str) -> None:
        self._engine_id = engine_id
        self._host_id = host_id
        self._lock = threading.Condition()
        self._channels: dict[str, list[Channel]] = {}
        self._known: list[Channel] = []
        self._nodes: dict[str, tuple[str, NodeInfo]] = {}
        self._speaking: dict[str, Channel] = {}
        self._parting: set[str] = set()
        self._partings: dict[str, int] = {}
        self._is_closed = False
        self.is_lost: Callable[[Message], bool] = lambda message: False

    @property
    def partings(self) -> dict[str, int]:
        """How often each engine has been parted from; for the introduction."""
        with self._lock:
            return dict(self._partings)

    def add(
        self,
        channel: Channel,
        here: Introduction,
        start: Callable[[], None],
        timeout_s: float,
    ) -> None:
        """Take an introduced channel in; waits for older acquaintances to end where it must.

        Args:
            here: what was said to the peer.
            start: starts its reader, before anyone else finds the channel and may end it.
            timeout_s: how long to wait.

        Raises:
            HandshakeMismatch: the peer is out of date.
            PeerLost: it was lost meanwhile, or an older acquaintance did not end in time.
            EngineClosed: this engine closes.
        """
        engine_id = channel.peer.engine_id
        said = here.partings.get(engine_id, 0), channel.peer.partings.get(self._engine_id, 0)
        channel.acquaintance = max(said)
        with self._lock:
            self._refuse_out_of_date(channel.peer)
            older = self._older(channel)
        for old in older:
            _replace(old, channel)
        ids = {engine_id, *(old.peer.engine_id for old in older)}
        with self._lock:
            self._lock.wait_for(
                lambda: self._is_closed or not (ids & self._parting or self._older(channel)),
                timeout_s,
            )
            if self._is_closed:
                raise EngineClosed("the engine is closed")
            if ids & self._parting or self._older(channel):
                raise PeerLost(f"the last connection to engine {engine_id} has not ended yet")
            if self._partings.get(engine_id, 0) > channel.acquaintance:
                raise PeerLost(f"engine {engine_id} was lost while it connected")
            self._refuse_out_of_date(channel.peer)
            start()
            if channel.acquaintance:
                self._partings[engine_id] = channel.acquaintance
            self._channels.setdefault(engine_id, []).append(channel)
            self._known = [c for c in self._known if not c.has_ended]
            self._known.append(channel)
            for node in channel.peer.nodes:
                self._nodes[node.name] = (engine_id, node)

    def add_nodes(self, channel: Channel, nodes: list[NodeInfo]) -> None:
        """Nodes that a connected engine announces later."""
        with self._lock:
            names = {node.name for node in nodes}
            channel.peer.nodes[:] = [n for n in channel.peer.nodes if n.name not in names] + nodes
            try:
                self._refuse_out_of_date(channel.peer)
            except HandshakeMismatch as error:
                channel.may_return = False
                channel.shut(error)
                return
            older = self._holders_before(channel.peer)
            for node in nodes:
                self._nodes[node.name] = (channel.peer.engine_id, node)
        for old in older:
            _replace(old, channel)

    def remove_nodes(self, channel: Channel, names: list[str]) -> None:
        """Pools that were unregistered there."""
        gone = set(names)
        with self._lock:
            channel.peer.nodes[:] = [n for n in channel.peer.nodes if n.name not in gone]
            for name in gone:
                if name in self._nodes and self._nodes[name][0] == channel.peer.engine_id:
                    del self._nodes[name]

    def remove(self, channel: Channel) -> list[Channel]:
        """Forget a lost channel; returns those left to the same engine. With the last one the
        acquaintance is over: `forget` must follow."""
        engine_id = channel.peer.engine_id
        with self._lock:
            left = [c for c in self._channels.get(engine_id, ()) if c is not channel]
            if left:
                self._channels[engine_id] = left
            else:
                self._channels.pop(engine_id, None)
                self._partings[engine_id] = self._partings.pop(engine_id, 0) + 1
                if len(self._partings) > MAX_PARTINGS:
                    del self._partings[next(iter(self._partings))]
            if not left or channel.has_notified:
                self._parting.add(engine_id)
            return left

    def forget(self, engine_id: str) -> None:
        """The end of the acquaintance has been told; the engine may connect again."""
        with self._lock:
            self._parting.discard(engine_id)
            self._speaking.pop(engine_id, None)
            self._lock.notify_all()

    def close(self) -> None:
        """Take no channel any more."""
        with self._lock:
            self._is_closed = True
            self._lock.notify_all()

    def holder(self, node: str) -> tuple[str, NodeInfo]:
        """(engine id, pool) of a remote node.

        Raises:
            UnknownNode: no peer ever announced it. PeerLost: the one that did is gone.
        """
        with self._lock:
            return self._holder(node)

    def holder_of(self, node: str) -> str | None:
        """Engine id of a connected peer that holds the node; None where there is none."""
        with self._lock:
            engine_id = self._nodes[node][0] if node in self._nodes else None
            return engine_id if engine_id in self._channels else None

    def channel(self, engine_id: str) -> Channel | None:
        """The newest channel to an engine; None where it is not connected."""
        with self._lock:
            channels = self._channels.get(engine_id)
            return channels[-1] if channels else None

    def all(self) -> list[Channel]:
        with self._lock:
            return [channel for channels in self._channels.values() for channel in channels]

    def not_ended(self) -> list[Channel]:
        """All channels, with those that are lost but whose reader has not ended yet."""
        with self._lock:
            return [channel for channel in self._known if not channel.has_ended]

    def send(self, engine_id: str, message: Message) -> bool:
        """Send to an engine; False where it is not connected. Never blocks."""
        channel = self.channel(engine_id)
        if channel is None or not channel.is_open:
            return False
        if not self.is_lost(message):
            channel.try_send(message)
        return True

    def notify(self, node: str, message: Message) -> None:
        """Send, in order with other notifications, to the engine that holds `node`. Never blocks.

        Raises:
            UnknownNode, PeerLost: see `holder`; or the peer has stopped reading.
        """
        with self._lock:
            engine_id, _ = self._holder(node)
            channel = self._speaking.get(engine_id)
            if channel is None:
                channel = self._speaking[engine_id] = self._channels[engine_id][-1]
                channel.has_notified = True
            is_lost = engine_id in self._parting or not channel.is_open
        if is_lost:
            raise PeerLost(f"the connection to the engine that holds {node!r} is lost")
        channel.send(message)

    def view(self, engine_id: str) -> Peer:
        """The engine as backends see it. Raises `PeerLost`."""
        channel = self.channel(engine_id)
        if channel is None:
            raise PeerLost(f"engine {engine_id} is not connected any more")
        there = channel.peer
        return Peer(
            there.engine_id, there.host_id == self._host_id, there.backends, channel.address
        )

    # Below, the lock is held.

    def _holder(self, node: str) -> tuple[str, NodeInfo]:
        if node not in self._nodes:
            raise UnknownNode(
                f"no pool {node!r} here or at a connected peer; peers hold {sorted(self._nodes)}"
            )
        engine_id, info = self._nodes[node]
        if engine_id not in self._channels:
            raise PeerLost(f"the engine that holds {node!r} is not connected any more")
        return engine_id, info

    def _rivals(self, peer: Introduction) -> list[tuple[str, Channel]]:
        """(node, channel) of other connected engines that hold a node of the peer's."""
        found = []
        for node in peer.nodes:
            engine_id = self._nodes[node.name][0] if node.name in self._nodes else None
            if engine_id is not None and engine_id != peer.engine_id:
                found += [(node.name, channel) for channel in self._channels.get(engine_id, ())]
        return found

    def _refuse_out_of_date(self, peer: Introduction) -> None:
        for node, rival in self._rivals(peer):
            if rival.peer.started_ns > peer.started_ns:
                raise HandshakeMismatch(
                    f"engine {peer.engine_id} is out of date: its node {node!r} is at engine "
                    f"{rival.peer.engine_id} now, which started later"
                )

    def _holders_before(self, peer: Introduction) -> list[Channel]:
        return [
            rival for _, rival in self._rivals(peer) if rival.peer.started_ns <= peer.started_ns
        ]

    def _older(self, channel: Channel) -> list[Channel]:
        """Channels that must end before this one is taken: of an older acquaintance with the peer,
        and of engines that held its nodes before it."""
        same = self._channels.get(channel.peer.engine_id, ())
        before = [c for c in same if c.acquaintance < channel.acquaintance]
        return before + self._holders_before(channel.peer)


def _replace(old: Channel, new: Channel) -> None:
    """Cut a channel off that `new` makes out of date."""
    if old.peer.engine_id == new.peer.engine_id:
        old.shut(PeerLost("the peer had lost this connection, and made a new one"))
    else:
        old.may_return = False
        names = {node.name for node in old.peer.nodes} & {node.name for node in new.peer.nodes}
        engine_id = new.peer.engine_id
        old.shut(PeerLost(f"{sorted(names)} are at engine {engine_id} now, which started later"))
