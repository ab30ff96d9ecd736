"""The prefilling server's side: its nodes work for other servers' sequences. No JAX.

A router's request computes a prompt; whatever node ends it holds the prompt's cached blocks
(`holds`). The server that is to decode it pulls: its sequence is started on that node, beside the
dispatcher of this server, which knows nothing of it. What the node says of it goes to the other
server. There the sequence is owned, from there it is stopped, and if that server is lost it ends.

    the node's thread       deliver: what is new, sorted by whose it is; holds what is to be held
    a reader's thread       on_pull, on_stop, on_retry, free, on_lost
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from flowkv_jax.cluster.facts import ModelFacts, named_facts
from flowkv_jax.cluster.node_port import Deliver, SequenceKey, StopOrder
from flowkv_jax.cluster.sequence_wire import specs_from_wire, updates_to_wire
from flowkv_jax.errors import FlowKVError, RetryableRequestError, ValidationError
from flowkv_jax.handoff.surroundings import Transfers
from flowkv_jax.kv_cache.manager import KVCacheManager
from flowkv_jax.kv_transfer import messages
from flowkv_jax.kv_transfer.holds import Holds
from flowkv_jax.sequence import SequenceSpec, SequenceUpdate
from transfer.errors import TransferError

logger = logging.getLogger(__name__)


class LentNode(Protocol):
    """A node of this process; see `engine.node.Node`."""

    def start(self, specs: Sequence[SequenceSpec]) -> Future[None]: ...

    def stop(self, orders: Sequence[StopOrder]) -> None: ...

    def redirect(self, key: SequenceKey, decode_node: str | None) -> None: ...

    def post(self, function: Callable[[], object]) -> None: ...


class Peers(Transfers, Protocol):
    """The part of `transfer.TransferEngine` that is used."""

    def peer_of(self, node: str) -> str | None: ...


@dataclass(frozen=True, slots=True)
class _Borrower:
    """Whose a sequence is: an engine, and its node that is to decode it."""

    engine_id: str
    node: str


@dataclass(eq=False, slots=True)
class HeldPrompt:
    """A prompt that is computed here for another server.

    Attributes:
        name: of its hold.
        on_held: told of the node and the blocks that are held, on the node's thread.
    """

    name: str
    token_ids: list[int]
    cache_salt: str | None
    on_held: Callable[[str, list[int]], object]


class Lender:
    """See the module. Safe from several threads.

    Args:
        facts, version: what whoever pulls must equal.
        may_be_borrowed: this server computes prompts for others.
        hold_s: see `Holds`.
        deliver: where news go that are this server's own.
    """

    def __init__(
        self,
        transfers: Peers,
        facts: ModelFacts,
        version: str,
        *,
        may_be_borrowed: bool,
        hold_s: float,
        deliver: Deliver,
    ) -> None:
        self._transfers = transfers
        self._facts = named_facts(facts)
        self._version = version
        self._may_be_borrowed = may_be_borrowed
        self._hold_s = hold_s
        self._deliver = deliver
        self._nodes: dict[str, tuple[LentNode, Holds]] = {}
        self._lock = threading.Lock()
        self._borrowers: dict[SequenceKey, _Borrower] = {}
        self._prompts: dict[str, HeldPrompt] = {}

    def make_holds(self, name: str, kv: KVCacheManager) -> Holds:
        """For a node that is about to be added."""
        return Holds(kv, self._hold_s, partial(self._ended, name))

    def add_node(self, name: str, node: LentNode, holds: Holds) -> None:
        """A node may be borrowed; before anybody can connect."""
        self._nodes[name] = (node, holds)

    def has_node(self, name: str) -> bool:
        """It is one of this process's."""
        return name in self._nodes

    @property
    def num_expired_holds(self) -> dict[str, int]:
        """Of each node, since it began; see `Holds.num_expired`."""
        return {name: holds.num_expired for name, (_, holds) in self._nodes.items()}

    # This server's requests

    def hold_at_end(self, sequence_id: str, prompt: HeldPrompt) -> None:
        """When this sequence ends, the node that ends it holds its prompt."""
        with self._lock:
            self._prompts[sequence_id] = prompt

    def forget_prompt(self, sequence_id: str) -> None:
        """Its request is over; unknown ones are passed over."""
        with self._lock:
            self._prompts.pop(sequence_id, None)

    def free(self, node: str, hold: str) -> None:
        """Nobody will come for a hold."""
        if node in self._nodes:
            lent, holds = self._nodes[node]
            lent.post(lambda: holds.free(hold))

    # What nodes say

    def deliver(self, node: str, updates: Sequence[SequenceUpdate]) -> Sequence[StopOrder]:
        """See `Deliver`."""
        if self._prompts:
            self._hold_prompts(node, updates)
        if not self._borrowers:
            return self._deliver(node, updates)
        own: list[SequenceUpdate] = []
        lent: dict[_Borrower, list[SequenceUpdate]] = {}
        with self._lock:
            for update in updates:
                borrower = self._borrowers.get(SequenceKey(update.sequence_id, update.attempt))
                (own if borrower is None else lent.setdefault(borrower, [])).append(update)
        orders = list(self._deliver(node, own)) if own else []
        for borrower, news in lent.items():
            if not self._tell(node, borrower, news):
                orders += [
                    StopOrder(SequenceKey(update.sequence_id, update.attempt), "abort")
                    for update in news
                    if update.finish_reason is None and update.error is None
                ]
        return orders

    def _hold_prompts(self, node: str, updates: Sequence[SequenceUpdate]) -> None:
        for update in updates:
            if update.finish_reason is None:
                continue
            with self._lock:
                prompt = self._prompts.pop(update.sequence_id, None)
            if prompt is not None:
                _, holds = self._nodes[node]
                now_s = time.monotonic()
                blocks = holds.hold(prompt.name, prompt.token_ids, prompt.cache_salt, now_s)
                prompt.on_held(node, blocks)

    def _tell(self, node: str, borrower: _Borrower, updates: Sequence[SequenceUpdate]) -> bool:
        """False if it cannot be reached."""
        news = messages.News(node, updates_to_wire(updates, time.monotonic()))
        try:
            self._transfers.notify(borrower.node, messages.encode(news))
        except TransferError as error:
            logger.warning("%s cannot be told of its sequences: %s", borrower.node, error)
            return False
        return True

    # What other servers say

    def on_pull(self, node: str, engine_id: str, pull: messages.Pull) -> None:
        """Start sequences of the engine on a node; what stands against it is told as news."""
        lent, holds = self._nodes[node]
        try:
            specs = specs_from_wire(pull.specs, time.monotonic())
        except ValidationError as error:  # then its own timeout tells it
            logger.error("engine %s pulls what cannot be read: %s", engine_id, error)
            return
        keys = [SequenceKey(spec.sequence_id, spec.attempt) for spec in specs]
        borrowers = [_Borrower(engine_id, spec.decode_node or "") for spec in specs]
        for borrower in borrowers:
            if self._transfers.peer_of(borrower.node) != engine_id:
                logger.error("engine %s pulls for node %r of another", engine_id, borrower.node)
                return
        refusal = self._refusal(pull)
        if refusal:
            logger.warning("a pull of engine %s is refused: %s", engine_id, refusal)
            for hold in {spec.hold for spec in specs if spec.hold is not None}:
                self.free(node, hold)
            self._refuse(node, keys, borrowers, RetryableRequestError(f"{node}: {refusal}"))
            return
        with self._lock:
            self._borrowers.update(zip(keys, borrowers, strict=True))
        for spec, key in zip(specs, keys, strict=True):
            if spec.hold is not None:
                lent.post(partial(holds.pull, spec.hold, key))
        done = lent.start(specs)
        done.add_done_callback(lambda done: self._started(node, keys, borrowers, done.exception()))

    def _refusal(self, pull: messages.Pull) -> str:
        """Why this server's K/V are of no use to the other one; empty if they are."""
        if not self._may_be_borrowed:
            return "it computes no prompts for other servers; that takes kv_role=kv_producer"
        here = self._facts | {"version": self._version}
        there = named_facts(pull.facts) | {"version": pull.version}
        differ = [name for name in here if here[name] != there[name]]
        return "; ".join(f"{name} {here[name]} here, {there[name]} there" for name in differ)

    def _started(
        self,
        node: str,
        keys: Sequence[SequenceKey],
        borrowers: Sequence[_Borrower],
        error: BaseException | None,
    ) -> None:
        if error is None:
            return
        lent, holds = self._nodes[node]
        for key in keys:
            lent.post(partial(holds.ended, key))
        self._refuse(node, keys, borrowers, error)

    def _refuse(
        self,
        node: str,
        keys: Sequence[SequenceKey],
        borrowers: Sequence[_Borrower],
        error: BaseException,
    ) -> None:
        self._forget(keys)
        told = error if isinstance(error, FlowKVError) else RetryableRequestError(repr(error))
        for key, borrower in zip(keys, borrowers, strict=True):
            update = SequenceUpdate(sequence_id=key[0], attempt=key[1], error=told)
            self._tell(node, borrower, [update])

    def on_stop(self, node: str, engine_id: str, stop: messages.Stop) -> None:
        """End sequences that the engine has pulled."""
        lent, _ = self._nodes[node]
        with self._lock:
            orders = [
                StopOrder(SequenceKey(*order.key), order.finish_reason, order.stop_reason)
                for order in stop.orders
                if self._is_of(SequenceKey(*order.key), engine_id)
            ]
        lent.stop(orders)

    def on_retry(self, node: str, engine_id: str, retry: messages.Retry) -> None:
        """Hand a sequence that the engine has pulled off once more."""
        lent, _ = self._nodes[node]
        key = SequenceKey(*retry.key)
        with self._lock:
            is_theirs = self._is_of(key, engine_id)
        if is_theirs and self._transfers.peer_of(retry.decode_node) == engine_id:
            lent.redirect(key, retry.decode_node)

    def on_lost(self, engine_id: str) -> None:
        """An engine is gone: its sequences end."""
        with self._lock:
            keys = [key for key in self._borrowers if self._is_of(key, engine_id)]
        if keys:
            for lent, _ in self._nodes.values():
                lent.stop([StopOrder(key, "abort") for key in keys])

    def _ended(self, node: str, key: SequenceKey) -> None:
        """A sequence has ended on a node; on its thread, before or after its last news."""
        if key in self._borrowers:
            lent, _ = self._nodes[node]
            lent.post(lambda: self._forget([key]))

    def _forget(self, keys: Sequence[SequenceKey]) -> None:
        with self._lock:
            for key in keys:
                self._borrowers.pop(key, None)

    def _is_of(self, key: SequenceKey, engine_id: str) -> bool:
        borrower = self._borrowers.get(key)
        return borrower is not None and borrower.engine_id == engine_id
