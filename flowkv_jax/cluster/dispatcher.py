"""Owns callers' requests while nodes serve them, so that a node may be lost and no request is.

    submit ──> `request_table` ──> `placer`: a place for each sequence, or it waits for one
    deliver(node, updates) ──> `news`: tokens in order ──> text ──> sink(output)
                     └──────> orders for what has to end at that node
    lose_node ──> `failover`: its sequences go on elsewhere from prompt and known tokens

A sequence's state, place and booking change together (see `sequence_state`). The caller gets each
of its tokens once and in order, and then one end: a last output or an error.

Sinks, ports, futures and the listener are called in the thread that caused it, under the one lock,
between changes (see `turns`); they may call back, and must not block.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from typing import Any, Literal, TypeVar

from flowkv_jax.block_hash import hash_blocks
from flowkv_jax.cluster.dispatch_events import DispatchEvent, SequenceRecord
from flowkv_jax.cluster.dispatch_log import DispatchLog
from flowkv_jax.cluster.failover import Failover
from flowkv_jax.cluster.news import News
from flowkv_jax.cluster.node_port import NodePort, SequenceKey, StopOrder
from flowkv_jax.cluster.placer import Placer
from flowkv_jax.cluster.request_table import RequestTable
from flowkv_jax.cluster.sequence_state import SequenceState
from flowkv_jax.cluster.submission import Submission
from flowkv_jax.cluster.turns import Turns
from flowkv_jax.cluster.waiting_room import WaitingRoom
from flowkv_jax.controller.routing import Routing
from flowkv_jax.errors import DeadlineExceeded
from flowkv_jax.metrics.request_tallies import RequestTallies
from flowkv_jax.metrics.spans import Tracing
from flowkv_jax.sequence import SequenceUpdate

_Result = TypeVar("_Result")
KVLoadFailurePolicy = Literal["recompute", "fail"]


class Dispatcher:
    """Drives requests over nodes. Safe from several threads.

    Args:
        kv_load_failure_policy: what a failed hand-off does to a request: "recompute" tries another
            decode node, and at last decodes where the prompt was computed; "fail" ends it.
        max_waiting_requests: bound on requests that have no first token yet.
        max_waiting_tokens: bound on their prompt tokens; None for no bound.
        hash_block_size: tokens in a block whose hashes the router is given; None for no hashes.
        max_placements: how often a sequence is placed before its request fails.
        num_records: sequences that `finished_records` remembers.
        on_event: told of every step of a sequence's life.
        clock: seconds, monotonic; the one that specs were stamped by.
    """

    def __init__(
        self,
        routing: Routing,
        *,
        kv_load_failure_policy: KVLoadFailurePolicy = "recompute",
        max_waiting_requests: int,
        max_waiting_tokens: int | None = None,
        hash_block_size: int | None = None,
        max_placements: int = 8,
        num_records: int = 4096,
        on_event: Callable[[DispatchEvent], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._hash_block_size = hash_block_size
        self._clock = clock
        self._tracing: Tracing | None = None
        self._turns = Turns()
        self._log = DispatchLog(self._turns, on_event, num_records)
        self._waiting_room = WaitingRoom(max_waiting_requests, max_waiting_tokens)
        self._placer = Placer(
            routing, self._turns, self._log, hash_block_size=hash_block_size, started=self._started
        )
        self._table = RequestTable(self._turns, self._log, self._placer, self._waiting_room)
        self._failover = Failover(
            self._table,
            self._placer,
            self._log,
            fails_on_handoff_error=kv_load_failure_policy == "fail",
            max_placements=max_placements,
        )
        self._news = News(self._table, self._placer, self._failover, self._log)

    def trace_with(self, tracing: Tracing) -> None:
        """Have requests traced from now on, if somebody wants to know."""
        self._tracing = tracing

    # For callers

    def submit(self, submission: Submission) -> Future[None]:
        """Take a request over. Resolves when each sequence is at a node, or waits for one.

        The future fails, and nothing goes to the sink, with:
            DuplicateRequestError: the id is in use.
            QueueOverflowError, MaxQueuedTokensError: too many wait; `retry_after_s` says when.
            What a node refuses it for, if another node would as well.
            What `close` was given.
        """
        accepted: Future[None] = Future()
        accepted.set_running_or_notify_cancel()  # whoever gives a request up withdraws it
        if self._tracing is not None:
            submission.trace = self._tracing.begin(
                submission.request_id, submission.specs[0], self._clock()
            )
        hashes: Sequence[bytes] = ()
        if self._hash_block_size is not None:  # before the lock: a long prompt takes a while
            spec = submission.specs[0]
            hashes = hash_blocks(spec.prompt_token_ids, self._hash_block_size, spec.cache_salt)
        self._turns.take(self._submit, submission, accepted, tuple(hashes))
        return accepted

    def abort(self, request_ids: Iterable[str]) -> int:
        """End requests with finish_reason "abort"; returns how many were alive."""
        return self._turns.take(self._abort, list(request_ids))

    def withdraw(self, submissions: Iterable[Submission]) -> int:
        """`abort` for a caller that goes away. By identity: a request that was refused because its
        id is in use must not take its namesake with it. Never waits for a lock, so that a garbage
        collection may end up here."""
        live = [s for s in submissions if self._table.request_of(s) is not None]
        if live:
            self._turns.post(self._withdraw, live)
        return len(live)

    def fail_all(self, error: Exception) -> None:
        """End every request with an error."""
        self._turns.take(self._fail_all, error)

    def close(self, error: Exception) -> None:
        """End every request with finish_reason "abort", and refuse later ones with `error`."""
        self._turns.take(self._close, error)

    # For nodes and whoever watches them

    def add_node(self, port: NodePort) -> None:
        """A node has joined. One of the same name that is still there is lost by that."""
        self._turns.take(self._add_node, port)

    def lose_node(self, name: str, reason: str) -> None:
        """A node is dead, hung, or left at once: its sequences go on elsewhere."""
        self._turns.take(self._lose_node, name, reason)

    def migrate(self, name: str) -> int:
        """Hand on what is decoded at a node, so that it comes empty soon; the answers go on.

        Returns how many sequences are to move. Those for which there is no other place, and those
        that have not got their first token yet, stay. Those that cannot be moved are decoded where
        they are, or fail if that is what `kv_load_failure_policy` says.
        """
        return self._turns.take(self._migrate, name)

    def deliver(self, node: str, updates: Sequence[SequenceUpdate]) -> list[StopOrder]:
        """Take in what is new at a node; returns what has to end there. See `Deliver`."""
        return self._turns.take(self._deliver, node, updates)

    def tick(self) -> None:
        """To be called now and then: expires those that wait for a place, or finds them one."""
        self._turns.take(self._tick)

    # Figures

    def exclusively(self, function: Callable[..., _Result], *args: Any) -> _Result:
        """Call a function while no request changes: for whoever else uses the controller."""
        return self._turns.take(function, *args)

    @property
    def num_live(self) -> int:
        """Requests that have not ended."""
        return len(self._table.requests)

    @property
    def num_waiting(self) -> int:
        """Requests that have no first token yet."""
        return self._waiting_room.num_requests

    @property
    def num_waiting_tokens(self) -> int:
        """Tokens of their prompts."""
        return self._waiting_room.num_tokens

    @property
    def tallies(self) -> RequestTallies:
        """What is counted; to be read through `exclusively`."""
        return self._log.tallies

    @property
    def num_pending(self) -> int:
        """Sequences that no node serves."""
        return len(self._placer.waiting)

    @property
    def nodes(self) -> tuple[str, ...]:
        """Names of the nodes that are there."""
        return tuple(self._placer.ports)

    def records_since(self, number: int | None, limit: int) -> list[SequenceRecord]:
        """Sequences that have ended, oldest first: the first `limit` of those that are remembered
        behind `number`, for a reader who follows; without a number the newest.

        Raises:
            ValueError: `limit` is negative.
        """
        if limit < 0:
            raise ValueError(f"{limit=} must not be negative")
        return self._turns.take(self._log.records_since, number, limit)

    def finished_records(self) -> list[SequenceRecord]:
        """The latest sequences that have ended, oldest first."""
        return list(self._log.records)

    def check(self) -> None:
        """Prove that all tables agree; for tests, and for debugging.

        Raises:
            RuntimeError: naming what does not.
        """
        self._turns.take(self._check)

    # Changes, one at a time

    def _submit(
        self, submission: Submission, accepted: Future[None], hashes: tuple[bytes, ...]
    ) -> None:
        request = self._table.add(submission, accepted, hashes)
        if request is not None:
            self._failover.place(request.sequences, self._clock())

    def _abort(self, request_ids: Sequence[str]) -> int:
        now_s = self._clock()
        find = self._table.requests.get
        live = [r for r in map(find, dict.fromkeys(request_ids)) if r is not None]
        for request in live:
            self._table.abort(request, now_s)
        self._use_new_room(now_s)
        return len(live)

    def _withdraw(self, submissions: Sequence[Submission]) -> None:
        now_s = self._clock()
        for submission in submissions:
            request = self._table.request_of(submission)
            if request is not None:
                self._table.abort(request, now_s)
        self._use_new_room(now_s)

    def _fail_all(self, error: Exception) -> None:
        for request in list(self._table.requests.values()):
            self._table.fail(request, error, self._clock())

    def _close(self, error: Exception) -> None:
        self._table.closed_with = error
        for request in list(self._table.requests.values()):
            self._table.abort(request, self._clock())

    def _add_node(self, port: NodePort) -> None:
        now_s = self._clock()
        self._failover.lose_node(port.name, "another node has taken its name", now_s)
        self._placer.ports[port.name] = port
        self._log.tallies.joined(port.name, self._placer.ports)
        self._placer.place_waiting(now_s)

    def _lose_node(self, name: str, reason: str) -> None:
        now_s = self._clock()
        self._failover.lose_node(name, reason, now_s)
        self._use_new_room(now_s)

    def _migrate(self, name: str) -> int:
        now_s = self._clock()
        here = [s for s in self._table.sequences.values() if s.holder == name]
        return sum(self._placer.migrate(sequence, now_s) for sequence in here)

    def _deliver(self, node: str, updates: Sequence[SequenceUpdate]) -> list[StopOrder]:
        now_s = self._clock()
        orders = self._news.take_in(node, updates, now_s)
        self._use_new_room(now_s)
        return orders

    def _started(self, node: str, keys: Sequence[SequenceKey], error: Exception | None) -> None:
        self._turns.take(self._take_answer, node, keys, error)

    def _take_answer(self, node: str, keys: Sequence[SequenceKey], error: Exception | None) -> None:
        now_s = self._clock()
        self._failover.answered(node, keys, error, now_s)
        self._use_new_room(now_s)

    def _tick(self) -> None:
        now_s = self._clock()
        for sequence in self._placer.waiting.expired(now_s):
            if sequence.state is SequenceState.PENDING:
                error = DeadlineExceeded(
                    f"request {sequence.request.request_id} ran past its deadline after"
                    f" {now_s - sequence.spec.arrival_s:.3f} s and {len(sequence.token_ids)} output"
                    " tokens, while no node could take it"
                )
                self._table.fail(sequence.request, error, now_s)
        self._placer.place_waiting(now_s)

    def _use_new_room(self, now_s: float) -> None:
        """If a sequence has ended, whoever waits may find a place."""
        if self._table.has_new_room and self.num_pending:
            self._placer.place_waiting(now_s, max_refusals=1)
        self._table.has_new_room = False

    def _check(self) -> None:
        pending = set()
        for sequence in self._table.sequences.values():
            sequence.check(self._placer.ports)
            if sequence.state is SequenceState.PENDING:
                pending.add(sequence)
        _require(pending == set(self._placer.waiting), "who is PENDING waits for a place")
        live = {s.request for s in self._table.sequences.values()}
        _require(live == set(self._table.requests.values()), "live requests have live sequences")
        waiting = [request for request in live if request.is_waiting]
        tokens = sum(request.num_prompt_tokens for request in waiting)
        room = self._waiting_room
        _require(
            (len(waiting), tokens) == (room.num_requests, room.num_tokens),
            "the waiting room counts",
        )
        for request in live:
            num_live = sum(s.state is not SequenceState.ENDED for s in request.sequences)
            _require(num_live == request.num_live, f"{request.request_id} counts its sequences")
            _require(
                request.is_waiting == (request.first_token_s is None),
                f"{request.request_id} waits for its first token",
            )


def _require(condition: bool, what: str) -> None:
    if not condition:
        raise RuntimeError(f"the dispatcher is inconsistent: not true that {what}")
