"""Both sides of a node's hand-offs, and the way of what is said to them to the node's thread."""

from __future__ import annotations

import logging
from collections.abc import Collection

from flowkv_jax.cluster.node_port import SequenceKey
from flowkv_jax.config import HandoffConfig
from flowkv_jax.engine.served import Served
from flowkv_jax.handoff import messages
from flowkv_jax.handoff.messages import ProtocolError
from flowkv_jax.handoff.receiver import Receiver
from flowkv_jax.handoff.sender import Sender
from flowkv_jax.handoff.surroundings import Host, Transfers
from flowkv_jax.kv_transfer.holds import Holds
from pallas_kernels.kv_layout import KVLayout
from transfer.arrival import Arrival

_logger = logging.getLogger(__name__)


class HandoffAgent:
    """A node's hand-offs. `on_*` are for any thread, everything else
    for the node's own.

    Args:
        layout: of the node's pool.
        holds: what the node holds for other servers; None where it holds nothing.
    """

    def __init__(
        self,
        host: Host,
        transfers: Transfers,
        layout: KVLayout,
        config: HandoffConfig,
        holds: Holds | None = None,
    ) -> None:
        self._host = host
        self._holds = holds
        self._sender = Sender(host, transfers, layout, config)
        self._receiver = Receiver(host, transfers)

    def __len__(self) -> int:
        """Hand-offs under way, in both directions."""
        return len(self._sender) + len(self._receiver)

    def on_notification(self, payload: bytes) -> None:
        """Another node says something."""
        try:
            message = messages.decode(payload)
        except ProtocolError as error:
            _logger.error("%s: %s", self._host.name, error)
            return
        heard_s = self._host.now_s()  # the node's thread may be busy for a while
        self._host.post(lambda: self._on_message(message, heard_s))

    def on_arrival(self, arrival: Arrival) -> None:
        """A transfer into the node's pool is final."""
        self._host.post(lambda: self._on_arrival(arrival))

    def on_lost(self, nodes: Collection[str]) -> None:
        """Nothing comes from these nodes any more."""
        self._host.post(lambda: self.lost(nodes))

    def announce(self, served: Served) -> None:
        """See `Sender.announce`."""
        try:
            self._sender.announce(served)
        except Exception as error:
            self._sender.give_up_key(served.key, self._log(error))

    def filled(self, served: Served) -> None:
        """See `Sender.filled`."""
        try:
            self._sender.filled(served)
        except Exception as error:
            self._sender.give_up_key(served.key, self._log(error))

    def redirect(self, key: SequenceKey, node: str | None) -> bool:
        """See `Sender.redirect`."""
        return self._sender.redirect(key, node)

    def stop(self, key: SequenceKey) -> None:
        """The front gives up a sequence that the node does not serve (yet)."""
        self._receiver.stop(key)

    def ended(self, served: Served) -> None:
        """A sequence has ended on the node, for whatever reason."""
        self._sender.ended(served)
        self._receiver.ended(served)
        if self._holds is not None:
            self._holds.ended(served.key)

    def lost(self, nodes: Collection[str]) -> None:
        """Other nodes are gone."""
        self._sender.lost(nodes)
        self._receiver.lost(nodes)

    def tick(self, now_s: float) -> None:
        """What is due; to be called between two steps, and before the node sleeps."""
        self._receiver.sweep()
        self._receiver.retry()
        self._sender.tick(now_s)
        if self._holds is not None:
            self._holds.tick(now_s)

    def make_room(self) -> bool:
        """Give up something that is held for others, as nothing can run; False if nothing is."""
        return self._holds is not None and self._holds.make_room()

    @property
    def next_due_s(self) -> float | None:
        """When to call `tick` although nothing has happened at the node; None for never."""
        holds_s = None if self._holds is None else self._holds.next_due_s
        due = (self._sender.next_due_s, self._receiver.next_due_s, holds_s)
        return min((when for when in due if when is not None), default=None)

    # One hand-off that fails in a way it should not is given up, on both sides; the node and its
    # other sequences go on.

    def _on_message(self, message: messages.Message, heard_s: float) -> None:
        try:
            self._pass_on(message, heard_s)
        except Exception as error:
            why = self._log(error)
            self._sender.give_up(message.handoff, why)
            self._receiver.give_up(message.handoff, why)

    def _on_arrival(self, arrival: Arrival) -> None:
        try:
            self._receiver.on_arrival(arrival)
        except Exception as error:
            self._receiver.give_up(arrival.tag, self._log(error))

    def _log(self, error: Exception) -> str:
        why = f"{type(error).__name__}: {error}"
        _logger.error("%s: a hand-off failed: %s", self._host.name, why, exc_info=error)
        return why

    def _pass_on(self, message: messages.Message, heard_s: float) -> None:
        match message:
            case messages.Reserve():
                self._receiver.on_reserve(message, heard_s)
            case messages.Filled():
                self._receiver.on_filled(message, heard_s)
            case messages.Withdraw():
                self._receiver.on_withdraw(message)
            case messages.Granted():
                self._sender.on_granted(message)
            case messages.Deferred():
                self._sender.on_deferred(message)
            case messages.Refused() | messages.Released():
                self._sender.on_gone(message)
            case messages.Taken():
                self._sender.on_taken(message)
