"""What a hand-off asks of its node and of the transfer engine. Protocols; no JAX."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from flowkv_jax.engine.scheduler import Scheduler
from flowkv_jax.engine.served import Served
from flowkv_jax.kv_cache.manager import KVCacheManager
from flowkv_jax.sequence import SequenceSpec, SequenceUpdate
from transfer.handle import TransferHandle
from transfer.strategies import Strategy
from transfer.types import TransferRequest


class Host(Protocol):
    """The node. Everything but `post` is for the node's own thread."""

    @property
    def name(self) -> str: ...

    @property
    def scheduler(self) -> Scheduler: ...

    @property
    def kv(self) -> KVCacheManager: ...

    def now_s(self) -> float: ...

    def post(self, function: Callable[[], object]) -> None:
        """Run a function on the node's thread; nothing happens if the node is dead. Any thread."""
        ...

    def say(self, updates: Sequence[SequenceUpdate]) -> None: ...

    def make(self, spec: SequenceSpec) -> Served: ...

    def replace_older(self, served: Served) -> None:
        """End an earlier attempt at the same sequence; raises `DuplicateRequestError` for a later
        one."""
        ...

    def remember(self, served: Served) -> None: ...

    def forget(self, served: Served) -> None: ...


class Transfers(Protocol):
    """The part of `transfer.TransferEngine` that is used."""

    def notify(self, node: str, payload: bytes) -> None: ...

    def submit(
        self,
        request: TransferRequest,
        *,
        backend: str | None = None,
        strategy: Strategy = Strategy.ALIGNED_RUNS,
    ) -> TransferHandle: ...

    def pinned(self, node: str, block_ids: list[int]) -> list[int]: ...
