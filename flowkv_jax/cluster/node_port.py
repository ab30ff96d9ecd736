"""How the dispatcher reaches one node, in this process or in another. Plain protocol, no JAX."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import NamedTuple, Protocol

from flowkv_jax.outputs import FinishReason
from flowkv_jax.sequence import SequenceSpec, SequenceUpdate


class SequenceKey(NamedTuple):
    """A sequence as it was placed at one time; see `flowkv_jax.sequence`."""

    sequence_id: str
    attempt: int


class StopOrder(NamedTuple):
    """A sequence has to end: a stop string was found in its text, or its caller gave it up."""

    key: SequenceKey
    finish_reason: FinishReason
    stop_reason: int | str | None = None


Deliver = Callable[[str, Sequence[SequenceUpdate]], Sequence[StopOrder]]
"""(node, news of a step) -> sequences of that node that have to end. Called on the node's own
thread, or on that of its connection; must not block."""


class NodePort(Protocol):
    """One node, as the dispatcher drives it. Methods return at once and may be called from any
    thread; what comes of them arrives through `Deliver`."""

    @property
    def name(self) -> str: ...

    def start(self, specs: Sequence[SequenceSpec]) -> Future[None]:
        """Serve sequences, all or none.

        The future fails with what the node refuses them for. A node in another process may take
        them in at once, and tell of a refusal by updates with an `error`.
        """
        ...

    def stop(self, orders: Sequence[StopOrder]) -> None:
        """End sequences and free what they hold; unknown ones are passed over."""
        ...

    def redirect(self, key: SequenceKey, decode_node: str | None) -> None:
        """From now on the sequence is to go to this decode node, or to stay if None.

        Answers a `handoff_error`; also comes unasked when a decode node is lost, whatever the
        hand-off to that one had come to, and for a sequence that decodes here and is to decode
        elsewhere. If nothing is held of the sequence any more (it had left
        already), an update with a `RetryableRequestError` says so.
        """
        ...

    def release(self, node: str) -> None:
        """A node is gone: give up what is held on its behalf (half-done hand-offs)."""
        ...
