"""What the two halves of an engine share."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Protocol

from transfer.arrival import Arrival
from transfer.backends.base import LinkBackend, LocalMover
from transfer.config import TransferConfig
from transfer.errors import StaleGeneration, UnknownNode
from transfer.events import EventLog
from transfer.peers import Peers
from transfer.pins import Pins
from transfer.pool_access import PoolAccess
from transfer.transfer_metrics import TransferMetrics
from transfer.types import PathDecision, TransferRequest


class Selector(Protocol):
    """What the engine asks of a path selector; `PathSelector` is one."""

    def select(self, request: TransferRequest) -> PathDecision: ...

    def observe(self, hops: Sequence[str], data_bytes: int, seconds: float) -> None: ...


@dataclass(frozen=True, slots=True)
class RegisteredPool:
    """A pool and who uses its blocks."""

    access: PoolAccess
    pins: Pins


@dataclass(slots=True)
class Runtime:
    """Parts of one engine. `lock` guards `pools` and `backends`.

    Attributes:
        on_arrival: called once for each transfer into a pool here that is final, outside of all
            locks.
    """

    config: TransferConfig
    clock: Callable[[], float]
    selector: Selector | None
    peers: Peers
    metrics: TransferMetrics
    events: EventLog
    local: LocalMover
    senders: ThreadPoolExecutor
    receivers: ThreadPoolExecutor
    engine_id: str
    on_arrival: Callable[[Arrival], object]
    lock: threading.Lock = field(default_factory=threading.Lock)
    pools: dict[str, RegisteredPool] = field(default_factory=dict)
    backends: dict[str, LinkBackend] = field(default_factory=dict)

    def pool(self, node: str) -> RegisteredPool:
        """Raises `UnknownNode` where the node is not registered here."""
        with self.lock:
            found = self.pools.get(node)
            if found is None:
                raise UnknownNode(
                    f"node {node!r} is not registered here; registered: {sorted(self.pools)}"
                )
            return found


def check_generations(
    node: str, access: PoolAccess, block_ids: Sequence[int], expected: Sequence[int]
) -> None:
    """Raise `StaleGeneration` unless every block still has the generation that was asked for."""
    if not expected:
        return
    if access.generations is None:
        raise StaleGeneration(
            f"{node} keeps no generations, so none can be checked; register its pool with them"
        )
    current = access.generations(block_ids)
    for block, now, then in zip(block_ids, current, expected, strict=True):
        if now != then:
            raise StaleGeneration(
                f"block {block} of {node} has generation {now}, the request was made at {then}: "
                "it was freed meanwhile"
            )
