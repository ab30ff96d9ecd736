"""The engines this one is connected to, and the nodes they hold. Imports no JAX."""

from __future__ import annotations

import threading
from collections.abc import Callable

from transfer.backends.base import Peer
from transfer.channel import Channel
from transfer.errors import PeerLost, UnknownNode
from transfer.messages import Message, NodeInfo


class Peers:
    """Channels by engine, nodes by name.

    Two engines that connect to each other at the same time have two channels. Both stay open, each
    side sends by the newest it has, and when one is lost the other serves.

    Args:
        host_id: of this engine.

    Attributes:
        is_lost: for tests: whether a message is not sent, though its sender thinks so.
    """

    def __init__(self, host_id: str) -> None:
        self._host_id = host_id
        self._lock = threading.Lock()
        self._channels: dict[str, list[Channel]] = {}
        self._known: list[Channel] = []
        self._nodes: dict[str, tuple[str, NodeInfo]] = {}
        self.is_lost: Callable[[Message], bool] = lambda message: False

    def add(self, channel: Channel) -> None:
        with self._lock:
            self._channels.setdefault(channel.peer.engine_id, []).append(channel)
            self._known = [c for c in self._known if not c.has_ended]
            self._known.append(channel)
        self.add_nodes(channel, channel.peer.nodes)

    def add_nodes(self, channel: Channel, nodes: list[NodeInfo]) -> None:
        """A restarted process announces its nodes anew: the newest holder of a name counts."""
        with self._lock:
            for node in nodes:
                self._nodes[node.name] = (channel.peer.engine_id, node)

    def remove(self, channel: Channel) -> bool:
        """Forget a lost channel; False where there is another one to the same engine."""
        engine_id = channel.peer.engine_id
        with self._lock:
            left = [c for c in self._channels.get(engine_id, ()) if c is not channel]
            if left:
                self._channels[engine_id] = left
            else:
                self._channels.pop(engine_id, None)
            return not left

    def holder(self, node: str) -> tuple[str, NodeInfo]:
        """(engine id, pool) of a remote node.

        Raises:
            UnknownNode: no peer ever announced it. PeerLost: the one that did is gone.
        """
        with self._lock:
            if node not in self._nodes:
                raise UnknownNode(
                    f"no pool {node!r} here or at a connected peer; peers hold "
                    f"{sorted(self._nodes)}"
                )
            engine_id, info = self._nodes[node]
            if engine_id not in self._channels:
                raise PeerLost(f"the engine that holds {node!r} is not connected any more")
            return engine_id, info

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

    def view(self, engine_id: str) -> Peer:
        """The engine as backends see it. Raises `PeerLost`."""
        channel = self.channel(engine_id)
        if channel is None:
            raise PeerLost(f"engine {engine_id} is not connected any more")
        there = channel.peer
        return Peer(
            there.engine_id, there.host_id == self._host_id, there.backends, channel.address
        )
