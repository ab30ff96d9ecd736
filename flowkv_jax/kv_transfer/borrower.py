"""The decoding server's side: nodes of other servers as prefill nodes of its dispatcher. No JAX.

DIALLING ──> CONNECTED ──> LOST
    └────────────────────────^       nobody is there, or somebody else

A node is borrowed from the first request that names it until its server is lost. What is said to it
while its server is being dialled waits for that. Whatever goes wrong is told to the dispatcher as
the loss of the node, or as an error of the sequence, and failed over like any other.
"""

from __future__ import annotations

import enum
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Protocol

from flowkv_jax.cluster.facts import ModelFacts
from flowkv_jax.cluster.node_port import NodePort, SequenceKey, StopOrder
from flowkv_jax.cluster.sequence_wire import specs_to_wire, updates_from_wire
from flowkv_jax.errors import RetryableRequestError
from flowkv_jax.kv_transfer import messages
from flowkv_jax.kv_transfer.addresses import Network, is_allowed
from flowkv_jax.kv_transfer.params import RemotePrefill
from flowkv_jax.sequence import SequenceSpec, SequenceUpdate
from transfer.connection import Address
from transfer.errors import TransferError

logger = logging.getLogger(__name__)

_MAX_NODES = 256
_MAX_UNREAD_BYTES = 64 << 20


class Peers(Protocol):
    """The part of `transfer.TransferEngine` that is used."""

    def connect(self, address: Address) -> list[str]: ...

    def peer_of(self, node: str) -> str | None: ...

    def notify(self, node: str, payload: bytes) -> None: ...


class Drives(Protocol):
    """The part of `cluster.Dispatcher` that is used."""

    def add_node(self, port: NodePort) -> None: ...

    def lose_node(self, name: str, reason: str) -> None: ...

    def deliver(self, node: str, updates: Sequence[SequenceUpdate]) -> list[StopOrder]: ...


class BorrowedState(enum.Enum):
    DIALLING = "dialling"
    CONNECTED = "connected"
    LOST = "lost"


_S = BorrowedState
BORROWED_MOVES: dict[BorrowedState, frozenset[BorrowedState]] = {
    _S.DIALLING: frozenset({_S.CONNECTED, _S.LOST}),
    _S.CONNECTED: frozenset({_S.LOST}),
    _S.LOST: frozenset(),
}


class BorrowedNode:
    """A `NodePort` to a node of another server. Safe from several threads.

    Args:
        name: of the node.
        engine_id: of its server.
        say: sends a message to the node; raises `TransferError`.
        pull: makes the message that starts sequences.
        on_started: told of sequences that were handed over.
    """

    def __init__(
        self,
        name: str,
        engine_id: str,
        say: Callable[[str, bytes], None],
        pull: Callable[[Sequence[SequenceSpec]], messages.Pull],
        on_started: Callable[[BorrowedNode, Sequence[SequenceSpec]], object],
    ) -> None:
        self._name = name
        self.engine_id = engine_id
        self._say = say
        self._pull = pull
        self._on_started = on_started
        self._lock = threading.Lock()
        self._state = BorrowedState.DIALLING
        self._unsaid: deque[bytes] = deque()

    @property
    def name(self) -> str:
        return self._name

    @property
    def state(self) -> BorrowedState:
        return self._state

    def start(self, specs: Sequence[SequenceSpec]) -> Future[None]:
        """See `NodePort.start`: what the node refuses comes as updates with an error.

        The future fails with `RetryableRequestError` if it cannot be reached any more.
        """
        done: Future[None] = Future()
        try:
            self._send(messages.encode(self._pull(specs)))
        except TransferError as error:
            done.set_exception(RetryableRequestError(f"{self._name}: {error}"))
        else:
            self._on_started(self, specs)
            done.set_result(None)
        return done

    def stop(self, orders: Sequence[StopOrder]) -> None:
        """See `NodePort.stop`."""
        if orders:
            self._try_to_send(messages.Stop(list(orders)))

    def forget(self, hold: str) -> None:
        """Nobody will come for what it holds under this name."""
        self._try_to_send(messages.Forget(hold))

    def redirect(self, key: SequenceKey, decode_node: str | None) -> None:
        """See `NodePort.redirect`. It computes prompts for nodes of this server, and keeps none."""
        if decode_node is None:
            raise RuntimeError(f"{key.sequence_id} cannot stay at {self._name}, which is lent")
        self._try_to_send(messages.Retry(key, decode_node))

    def release(self, node: str) -> None:
        """See `NodePort.release`. Its server sees for itself who is lost."""

    def connected(self) -> None:
        """Its server is there: say what has waited."""
        with self._lock:
            if self._state is not BorrowedState.DIALLING:
                return
            while self._unsaid:
                self._say(self._name, self._unsaid.popleft())
            self._move_to(BorrowedState.CONNECTED)

    def lost(self) -> bool:
        """Nothing more is said to it. False if that was known."""
        with self._lock:
            if self._state is BorrowedState.LOST:
                return False
            self._unsaid.clear()
            self._move_to(BorrowedState.LOST)
            return True

    def _try_to_send(self, message: messages.Stop | messages.Retry | messages.Forget) -> None:
        try:
            self._send(messages.encode(message))
        except TransferError as error:  # then its loss is told, or it sees ours
            logger.info("%s is not told: %s", self._name, error)

    def _send(self, payload: bytes) -> None:
        with self._lock:
            if self._state is BorrowedState.LOST:
                raise TransferError("its server is lost")
            if self._state is BorrowedState.CONNECTED:
                self._say(self._name, payload)
                return
            if sum(map(len, self._unsaid)) > _MAX_UNREAD_BYTES:
                raise TransferError("too much waits for its server to be reached")
            self._unsaid.append(payload)

    def _move_to(self, state: BorrowedState) -> None:
        if state not in BORROWED_MOVES[self._state]:
            raise RuntimeError(f"{self._name}: illegal move {self._state.name} -> {state.name}")
        self._state = state


class Borrower:
    """All nodes that this server has borrowed. Safe from several threads.

    Args:
        networks: where servers may be.
        facts, version: what this server tells of itself.
        load_timeout_s: how long a node may take to hand a sequence over.
    """

    def __init__(
        self,
        peers: Peers,
        dispatcher: Drives,
        *,
        networks: Sequence[Network],
        facts: ModelFacts,
        version: str,
        load_timeout_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._peers = peers
        self._dispatcher = dispatcher
        self._networks = networks
        self._facts = facts
        self._version = version
        self._load_timeout_s = load_timeout_s
        self._clock = clock
        self._lock = threading.Lock()
        self._nodes: dict[str, BorrowedNode] = {}
        self._due: deque[tuple[float, BorrowedNode, SequenceKey]] = deque()
        self._is_closed = False

    def node_for(self, remote: RemotePrefill) -> BorrowedNode | str:
        """The node that has a prompt; or why it cannot be asked."""
        if not is_allowed(remote.host, self._networks):
            allowed = ", ".join(map(str, self._networks))
            return f"remote_host={remote.host!r:.100} is not in kv_peers ({allowed})"
        with self._lock:
            node = self._nodes.get(remote.node)
            if node is not None and node.engine_id != remote.engine_id:
                return f"node {remote.node} is at another server than {remote.engine_id!r:.100}"
            if node is not None:
                return node
            if self._is_closed or len(self._nodes) >= _MAX_NODES:
                return f"{len(self._nodes)} nodes are borrowed, at most {_MAX_NODES}"
            node = BorrowedNode(
                remote.node, remote.engine_id, self._peers.notify, self._pull, self._started
            )
            self._nodes[remote.node] = node
        self._dispatcher.add_node(node)
        address = (remote.host, remote.port)
        threading.Thread(
            target=self._dial, args=(node, address), name="flowkv-kv-dial", daemon=True
        ).start()
        return node

    def on_news(self, engine_id: str, news: messages.News) -> None:
        """What a borrowed node says."""
        with self._lock:
            node = self._nodes.get(news.src)
        if node is None or node.engine_id != engine_id:
            logger.warning("engine %s has news of node %s, which is not its", engine_id, news.src)
            return
        orders = self._dispatcher.deliver(news.src, updates_from_wire(news.updates, self._clock()))
        node.stop(orders)

    def on_lost(self, engine_id: str, reason: str) -> None:
        """A server is gone."""
        with self._lock:
            nodes = [node for node in self._nodes.values() if node.engine_id == engine_id]
        for node in nodes:
            self._lose(node, reason)

    def tick(self) -> None:
        """Give up what has not been handed over in time; to be called now and then."""
        now_s = self._clock()
        while self._due and self._due[0][0] <= now_s:
            _, node, key = self._due.popleft()
            late = RetryableRequestError(
                f"{node.name} has not handed the prompt over within kv_load_timeout_s="
                f"{self._load_timeout_s:g}"
            )
            node.stop([StopOrder(key, "abort")])
            update = SequenceUpdate(sequence_id=key[0], attempt=key[1], error=late)
            self._dispatcher.deliver(node.name, [update])

    def close(self) -> None:
        """Borrow nothing any more. Idempotent."""
        with self._lock:
            self._is_closed = True
            nodes = list(self._nodes.values())
            self._nodes.clear()
        for node in nodes:
            node.lost()

    def _pull(self, specs: Sequence[SequenceSpec]) -> messages.Pull:
        return messages.Pull(self._version, self._facts, specs_to_wire(specs, self._clock()))

    def _started(self, node: BorrowedNode, specs: Sequence[SequenceSpec]) -> None:
        due_s = self._clock() + self._load_timeout_s
        self._due.extend((due_s, node, SequenceKey(s.sequence_id, s.attempt)) for s in specs)

    def _dial(self, node: BorrowedNode, address: Address) -> None:
        try:
            there = self._peers.connect(address)
            if node.name not in there or self._peers.peer_of(node.name) != node.engine_id:
                raise TransferError(f"another server is there, with nodes {there}")
            node.connected()
        except TransferError as error:
            self._lose(node, f"{address[0]}:{address[1]}: {error}")

    def _lose(self, node: BorrowedNode, reason: str) -> None:
        with self._lock:
            if self._nodes.get(node.name) is node:
                del self._nodes[node.name]
        if node.lost():
            logger.warning("node %s of another server is lost: %s", node.name, reason)
            self._dispatcher.lose_node(node.name, reason)
