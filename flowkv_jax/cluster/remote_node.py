"""A node in another process, as the dispatcher drives it. No JAX."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future

from flowkv_jax.cluster.errands import Errands
from flowkv_jax.cluster.link import Link
from flowkv_jax.cluster.messages import (
    MAX_FRAME_BYTES,
    Drain,
    Errand,
    ErrandKind,
    ErrandResult,
    Redirect,
    Release,
    SetRole,
    Start,
    Stop,
    ToFront,
    encode,
)
from flowkv_jax.cluster.node_port import SequenceKey, StopOrder
from flowkv_jax.cluster.sequence_wire import specs_to_wire
from flowkv_jax.controller.role import Role
from flowkv_jax.errors import RetryableRequestError, UnprocessableError
from flowkv_jax.sequence import SequenceSpec


class RemoteNode:
    """A `NodePort` over a link, good for one membership.

    After its end everything is passed over: that the node is lost is told once, to the
    `MembershipListener`, and whoever drives it places its sequences anew.

    Args:
        clock: that of the specs' times.
    """

    def __init__(
        self,
        name: str,
        epoch: int,
        link: Link[ToFront],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._name = name
        self._link = link
        self._clock = clock
        self._errands = Errands()
        self.epoch = epoch

    @property
    def name(self) -> str:
        return self._name

    def start(self, specs: Sequence[SequenceSpec]) -> Future[None]:
        """See `NodePort.start`. What the node itself refuses comes as updates with an error.

        The future fails with `RetryableRequestError` if the node cannot be reached any more, and
        with `UnprocessableError` if the sequences are too long for a message.
        """
        future: Future[None] = Future()
        message = Start(specs_to_wire(specs, self._clock()))
        try:
            size = len(encode(message)) if _may_be_long(specs) else 0
            if size > MAX_FRAME_BYTES:
                raise UnprocessableError(
                    f"sequences of {size} bytes cannot be sent to node {self._name}: "
                    f"at most {MAX_FRAME_BYTES}"
                )
            if not self._link.send(message):
                raise RetryableRequestError(f"node {self._name} is not connected")
        except (UnprocessableError, RetryableRequestError) as error:
            future.set_exception(error)
        else:
            future.set_result(None)
        return future

    def stop(self, orders: Sequence[StopOrder]) -> None:
        """See `NodePort.stop`."""
        if orders:
            self._link.send(Stop(list(orders)))

    def redirect(self, key: SequenceKey, decode_node: str | None) -> None:
        """See `NodePort.redirect`."""
        self._link.send(Redirect(key, decode_node))

    def release(self, node: str) -> None:
        """See `NodePort.release`."""
        self._link.send(Release(node))

    def set_role(self, role: Role) -> None:
        """Another role from now on; what runs, stays."""
        self._link.send(SetRole(role))

    def run_errand(self, kind: ErrandKind, duration_s: float = 0.0) -> Future[bool]:
        """Have the node do something for an administrator.

        The future fails with what the node refuses it for, and with `RetryableRequestError` if it
        is lost before it has answered.
        """
        number, future = self._errands.open()
        if not self._link.send(Errand(number, kind, duration_s)):
            self.end_errands()
        return future

    def errand_ended(self, message: ErrandResult) -> None:
        """The node's answer to `run_errand`."""
        self._errands.end(message.number, message.result, message.error)

    def end_errands(self) -> None:
        """The node is lost: nobody will answer any more."""
        self._errands.fail_all(RetryableRequestError(f"node {self._name} is not connected"))

    def drain(self, timeout_s: float) -> None:
        """Have the worker finish what runs, up to `timeout_s`, and leave."""
        self._link.send(Drain(timeout_s))


def _may_be_long(specs: Sequence[SequenceSpec]) -> bool:
    """A token takes at most 5 bytes; everything else the front door keeps small."""
    return sum(spec.num_tokens for spec in specs) * 5 > MAX_FRAME_BYTES // 4
