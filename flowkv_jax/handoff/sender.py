"""The prefill node's side of hand-offs; see the package. Runs on the node's thread. No JAX."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from flowkv_jax.cluster.node_port import SequenceKey
from flowkv_jax.cluster.sequence_wire import specs_to_wire
from flowkv_jax.config import HandoffConfig
from flowkv_jax.engine.served import Served
from flowkv_jax.handoff import messages
from flowkv_jax.handoff.lifecycle import SenderState, moved
from flowkv_jax.handoff.messages import ProtocolError
from flowkv_jax.handoff.surroundings import Host, Transfers
from flowkv_jax.sequence import SequenceUpdate
from pallas_kernels.kv_layout import KVLayout
from transfer.alignment import align
from transfer.errors import TransferError
from transfer.handle import TransferHandle
from transfer.pool_access import block_ids
from transfer.strategies import Strategy, num_calls
from transfer.types import BlockRun, TransferRequest, Verification

_logger = logging.getLogger(__name__)
_ENDED = (SenderState.DONE, SenderState.KEPT, SenderState.WITHDRAWN)


@dataclass(eq=False, slots=True)
class _Outgoing:
    """One hand-off from here.

    Attributes:
        node: where it is to go; None to stay, as soon as its K/V are complete.
        handoff: its id; a new one each time another node is asked.
        asked_s, filled_s: when the node was asked (for room, or to take what it has), and when the
            K/V were complete here.
        may_wait: for room; what has been decoded here goes on being decoded instead.
        trouble: why it is stuck, or what it was deferred for.
    """

    served: Served
    node: str | None
    may_wait: bool
    handoff: str = ""
    state: SenderState = SenderState.ASKED
    asked_s: float = 0.0
    filled_s: float | None = None
    trouble: str = ""
    grant: messages.Granted | None = None
    transfer: TransferHandle | None = None

    @property
    def waits(self) -> bool:
        """For the other side, with the K/V complete."""
        is_asking = self.state in (SenderState.ASKED, SenderState.DEFERRED)
        is_taking = self.state is SenderState.MOVING and self.transfer is None
        return self.filled_s is not None and (is_asking or is_taking)


class Sender:
    """All hand-offs that leave one node."""

    def __init__(
        self, host: Host, transfers: Transfers, layout: KVLayout, config: HandoffConfig
    ) -> None:
        self._host = host
        self._transfers = transfers
        self._layout = layout
        self._config = config
        self._strategy = Strategy(config.handoff_strategy)
        self._by_key: dict[SequenceKey, _Outgoing] = {}
        self._by_handoff: dict[str, _Outgoing] = {}

    def __len__(self) -> int:
        return len(self._by_key)

    # What happens at the node

    def announce(self, served: Served) -> None:
        """The last chunk of a sequence that hands off has been dispatched, or, of one that has
        decoded here, the last token been read. Nothing happens if it is known."""
        node = served.spec.decode_node
        if node is None or served.key in self._by_key:
            return
        is_first_token_due = served.request.num_in_flight > 0
        out = self._by_key[served.key] = _Outgoing(served, node, is_first_token_due)
        self._ask(out, node)

    def filled(self, served: Served) -> None:
        """Its newest token has been read: its K/V are complete."""
        out = self._by_key.get(served.key)
        if out is None:
            return
        out.filled_s = self._host.now_s()
        if out.node is None:
            self._keep(out)
        elif out.state is SenderState.STUCK:
            self._tell(out)
        elif out.state is SenderState.GRANTED:
            self._move(out)

    def redirect(self, key: SequenceKey, node: str | None) -> bool:
        """Whatever its hand-off has come to, a sequence is to go to `node`, or to stay if None.

        Returns False if there is no hand-off of it: it has not been announced, or has left.
        """
        out = self._by_key.get(key)
        if out is None:
            return False
        if out.state is not SenderState.STUCK:
            self._withdraw(out)
            out.state = moved(out.state, SenderState.STUCK)
        out.node = node
        if node is not None:
            out.state = moved(out.state, SenderState.ASKED)
            self._ask(out, node)
        elif out.filled_s is not None:
            self._keep(out)
        return True

    def ended(self, served: Served) -> None:
        """The sequence has ended here, whatever it was doing."""
        out = self._by_key.pop(served.key, None)
        if out is None:
            return
        if out.state is not SenderState.STUCK:
            self._withdraw(out)
        out.state = moved(out.state, SenderState.WITHDRAWN)

    def lost(self, nodes: Collection[str]) -> None:
        """These nodes are gone."""
        for out in list(self._by_key.values()):
            if out.node is not None and out.node in nodes:
                self._stick(out, f"node {out.node} is gone")

    def tick(self, now_s: float) -> None:
        """Give up what waits too long."""
        for out in list(self._by_key.values()):
            if out.waits and self._waits_until_s(out) <= now_s:
                why = out.trouble or "no answer"
                self._stick(out, f"{out.node}: {why} for {self._config.handoff_wait_s:g} s")

    @property
    def next_due_s(self) -> float | None:
        """When `tick` has something to do; None if nothing waits."""
        waits = (self._waits_until_s(out) for out in self._by_key.values() if out.waits)
        return min(waits, default=None)

    def give_up(self, handoff: str, why: str) -> None:
        """Something of a hand-off failed here that should not have."""
        out = self._by_handoff.get(handoff)
        if out is not None:
            self._stick(out, why)

    def give_up_key(self, key: SequenceKey, why: str) -> None:
        """Likewise, by its sequence."""
        out = self._by_key.get(key)
        if out is not None:
            self._stick(out, why)

    # What the other side says

    def on_granted(self, message: messages.Granted) -> None:
        out = self._by_handoff.get(message.handoff)
        if out is None or out.state not in (SenderState.ASKED, SenderState.DEFERRED):
            return
        out.grant = message
        out.state = moved(out.state, SenderState.GRANTED)
        if out.filled_s is not None:
            self._move(out)

    def on_deferred(self, message: messages.Deferred) -> None:
        out = self._by_handoff.get(message.handoff)
        if out is None or out.state is not SenderState.ASKED:
            return
        if not out.may_wait:
            self._stick(out, f"{out.node}: {message.reason}")
            return
        out.trouble = message.reason
        out.state = moved(out.state, SenderState.DEFERRED)

    def on_gone(self, message: messages.Refused | messages.Released) -> None:
        out = self._by_handoff.get(message.handoff)
        if out is not None:
            self._stick(out, f"{out.node}: {message.reason}")

    def on_taken(self, message: messages.Taken) -> None:
        out = self._by_handoff.get(message.handoff)
        if out is not None and out.state is SenderState.MOVING and out.transfer is None:
            self._done(out)

    # Inside

    def _waits_until_s(self, out: _Outgoing) -> float:
        return max(out.asked_s, out.filled_s or 0.0) + self._config.handoff_wait_s

    def _keep(self, out: _Outgoing) -> None:
        """Decode it here."""
        out.state = moved(out.state, SenderState.KEPT)
        del self._by_key[out.served.key]
        self._host.scheduler.keep(out.served.request, self._host.now_s())

    def _ask(self, out: _Outgoing, node: str) -> None:
        out.handoff = uuid.uuid4().hex[:16]
        out.asked_s = self._host.now_s()
        out.trouble, out.grant, out.transfer = "", None, None
        self._by_handoff[out.handoff] = out
        spec, request = out.served.spec, out.served.request
        # The newest token, sampled and not computed, goes with FILLED.
        computed = request.token_ids[len(spec.prompt_token_ids) : request.num_computed_tokens]
        coming = replace(
            spec,
            output_token_ids=tuple(computed),
            deadline_s=request.deadline_s,  # the scheduler's own, where the caller gave none
            decode_node=None,
            hold=None,
        )
        sequence = specs_to_wire([coming], out.asked_s)
        self._send(out, messages.Reserve(out.handoff, self._host.name, sequence))

    def _move(self, out: _Outgoing) -> None:
        """The blocks are complete here and reserved there: move them."""
        assert out.grant is not None and out.node is not None
        kv, request = self._host.kv, out.served.request
        try:
            destination = messages.unpack_ids(out.grant.blocks)
            generations = messages.unpack_generations(out.grant.generations)
        except ProtocolError as error:
            self._stick(out, str(error))
            return
        num_blocks = kv.blocks_for(request.num_computed_tokens)
        source = kv.block_ids(request.request_id)[out.grant.num_reused_blocks : num_blocks]
        if len(source) != len(destination):
            self._stick(
                out, f"{out.node} reserved {len(destination)} blocks for {len(source)} to send"
            )
            return
        runs = tuple(align(source, destination))
        out.state = moved(out.state, SenderState.MOVING)
        out.asked_s, out.trouble = self._host.now_s(), ""
        self._send(
            out,
            messages.Filled(
                handoff=out.handoff,
                output=messages.pack_ids(request.token_ids[request.num_computed_tokens :]),
                num_blocks=len(source),
                num_runs=len(runs),
                num_calls=num_calls(
                    self._strategy, len(source), len(runs), self._layout.num_layers
                ),
                data_bytes=len(source) * self._layout.bytes_per_block,
                waited_s=self._host.now_s() - (out.filled_s or 0.0),
            ),
        )
        if not source or out.state is not SenderState.MOVING:
            return
        move = self._transfer_request(out, runs, destination, generations)
        kv.pin(source)  # so that no generation of theirs need be checked
        try:
            handle = self._transfers.submit(
                move, backend=self._config.handoff_backend, strategy=self._strategy
            )
        except Exception as error:
            kv.unpin(source)
            self._stick(out, f"{type(error).__name__}: {error}")
            if not isinstance(error, TransferError):
                raise
            return
        out.transfer = handle
        handle.add_done_callback(
            lambda final: self._host.post(lambda: self._on_final(out, source, final))
        )

    def _transfer_request(
        self,
        out: _Outgoing,
        runs: tuple[BlockRun, ...],
        destination: Sequence[int],
        generations: Sequence[int],
    ) -> TransferRequest:
        """Args: destination, generations: of its blocks, in token order; runs have their own."""
        assert out.node is not None
        generation_of = dict(zip(destination, generations, strict=True))
        wants_checksum = self._config.verify_handoffs
        return TransferRequest(
            src=self._host.name,
            dst=out.node,
            data_bytes=len(destination) * self._layout.bytes_per_block,
            runs=runs,
            block_bytes=self._layout.bytes_per_block,
            deadline_s=self._config.handoff_timeout_s,
            verification=Verification.CHECKSUM if wants_checksum else Verification.NONE,
            dst_generations=tuple(
                generation_of[block] for block in block_ids(runs, of_source=False)
            ),
            tag=out.handoff,
        )

    def _on_final(self, out: _Outgoing, source: list[int], handle: TransferHandle) -> None:
        """A transfer reads no block any more."""
        self._host.kv.unpin(source)
        if out.transfer is not handle or out.state is not SenderState.MOVING:
            return
        if handle.error is None:
            self._done(out)
        else:
            self._stick(out, f"{type(handle.error).__name__}: {handle.error}")

    def _done(self, out: _Outgoing) -> None:
        """Acknowledged: the sequence runs there, and what it has here is free."""
        out.state = moved(out.state, SenderState.DONE)
        self._by_handoff.pop(out.handoff, None)
        del self._by_key[out.served.key]
        self._host.scheduler.finish(out.served.request, None, None, self._host.now_s())
        self._host.forget(out.served)

    def _stick(self, out: _Outgoing, why: str) -> None:
        # What was said of another one may have ended it.
        if out.state is SenderState.STUCK or out.state in _ENDED:
            return
        self._withdraw(out)
        out.trouble = why
        out.state = moved(out.state, SenderState.STUCK)
        _logger.warning("hand-off of %s to %s: %s", out.served.key.sequence_id, out.node, why)
        if out.filled_s is not None:
            self._tell(out)

    def _tell(self, out: _Outgoing) -> None:
        spec = out.served.spec
        self._host.say(
            [
                SequenceUpdate(
                    sequence_id=spec.sequence_id,
                    attempt=spec.attempt,
                    start=out.served.request.num_output_tokens,
                    handoff_error=out.trouble,
                    decode_node=out.node,
                )
            ]
        )

    def _withdraw(self, out: _Outgoing) -> None:
        """Nothing of this hand-off matters any more; the other side is told, if it is there."""
        self._by_handoff.pop(out.handoff, None)
        if out.node is None:
            return
        if out.transfer is not None:
            out.transfer.cancel()
        try:
            withdraw = messages.encode(messages.Withdraw(handoff=out.handoff))
            self._transfers.notify(out.node, withdraw)
        except TransferError:
            return  # it is gone, and so is what it had reserved

    def _send(self, out: _Outgoing, message: messages.Message) -> None:
        assert out.node is not None
        try:
            self._transfers.notify(out.node, messages.encode(message))
        except TransferError as error:
            self._stick(out, f"{type(error).__name__}: {error}")
