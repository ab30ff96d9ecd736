"""Opening connections to peers, straight or through a third engine. Imports no JAX."""

from __future__ import annotations

from collections.abc import Sequence

from transfer.config import TransferConfig
from transfer.connection import Address, Connection, dial, open_through
from transfer.errors import PeerLost, TransferError
from transfer.peers import Peers
from transfer.relay import purpose_for


class Dialler:
    """An engine's way out.

    Attributes:
        engine_id: of the engine.
    """

    def __init__(self, engine_id: str, secret: bytes, config: TransferConfig, peers: Peers) -> None:
        self.engine_id = engine_id
        self._secret = secret
        self._config = config
        self._peers = peers

    def dial(self, address: Address, purpose: str) -> Connection:
        """Open a connection to a listener. Raises what `connection.dial` does."""
        return dial(
            address,
            self._secret,
            purpose,
            timeout_s=self._config.handshake_timeout_s,
            max_frame_bytes=self._config.max_frame_bytes,
        )

    def relay_of(self, hops: Sequence[str], peer: str) -> str | None:
        """The connected engine, other than `peer`, that holds a node in the middle of the path.

        Nodes that no connected engine has registered (interfaces, this process's other devices)
        are passed on the way and need nothing done.
        """
        for hop in hops[1:-1]:
            holder = self._peers.holder_of(hop)
            if holder is not None and holder != peer:
                return holder
        return None

    def dial_through(self, relay: str, peer: str, purpose: str) -> Connection:
        """Open a connection to `peer` that `relay` passes on.

        Raises:
            PeerLost: either cannot be reached; the relay must be connected to the peer.
        """
        channel = self._peers.channel(relay)
        if channel is None or channel.listens is None:
            raise PeerLost(f"engine {relay} does not listen, so nothing can go through it")
        outer = self.dial(channel.listens, purpose_for(peer))
        try:
            return open_through(
                outer,
                self._secret,
                purpose,
                timeout_s=self._config.handshake_timeout_s,
                max_frame_bytes=self._config.max_frame_bytes,
            )
        except TransferError as error:
            raise PeerLost(f"engine {relay} could not pass us on to {peer}: {error}") from None
