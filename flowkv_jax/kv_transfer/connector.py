"""Both sides of a server's part in hand-offs between servers, for the nodes of one process. No JAX.

Requests with `kv_transfer_params` pass through here on their way to the dispatcher, and their last
outputs on the way back.
"""

from __future__ import annotations

import dataclasses
import logging
import uuid
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from flowkv_jax import __version__
from flowkv_jax.cluster.dispatcher import Dispatcher
from flowkv_jax.cluster.facts import ModelFacts, named_facts
from flowkv_jax.cluster.node_port import StopOrder
from flowkv_jax.cluster.submission import Submission
from flowkv_jax.errors import ConfigError, FlowKVError, GenerationError
from flowkv_jax.handoff.exchange import Exchange
from flowkv_jax.kv_cache.manager import KVCacheManager
from flowkv_jax.kv_transfer import messages
from flowkv_jax.kv_transfer.addresses import default_networks, parse_networks
from flowkv_jax.kv_transfer.borrower import BorrowedNode, Borrower
from flowkv_jax.kv_transfer.config import KVTransferConfig
from flowkv_jax.kv_transfer.holds import Holds
from flowkv_jax.kv_transfer.info import CONNECTOR, KVTransferInfo, pairing_protocol
from flowkv_jax.kv_transfer.lender import HeldPrompt, Lender, LentNode
from flowkv_jax.kv_transfer.params import (
    RemoteDecode,
    RemotePrefill,
    answer_params,
    read_params,
)
from flowkv_jax.outputs import RequestOutput
from flowkv_jax.sequence import SequenceUpdate
from transfer.errors import RequestError
from transfer.listener import is_loopback
from transfer.notifications import Notification, PeerLoss

logger = logging.getLogger(__name__)

_SHOWN_ID_CHARACTERS = 200
_SUFFIX_CHARACTERS = 16


class KVConnector:
    """See the module. Safe from several threads.

    Args:
        config: with a `kv_role`.
        fails_without_kv: a request whose K/V cannot be had fails, instead of being computed here.
        exchange: of this process; listens once `open` was called.
        dispatcher: of this process.
        facts: what the other servers' K/V must be like.
    """

    def __init__(
        self,
        config: KVTransferConfig,
        exchange: Exchange,
        dispatcher: Dispatcher,
        facts: ModelFacts,
        *,
        fails_without_kv: bool,
        tensor_parallel_size: int,
    ) -> None:
        self._config = config
        self._exchange = exchange
        self._dispatcher = dispatcher
        self._facts = facts
        self._fails_without_kv = fails_without_kv
        self._tensor_parallel_size = tensor_parallel_size
        networks = (
            default_networks(is_loopback=is_loopback(config.kv_host))
            if config.kv_peers is None
            else parse_networks(config.kv_peers)
        )
        self._lender = Lender(
            exchange.transfers,
            facts,
            __version__,
            may_be_borrowed=config.computes_for_others,
            hold_s=config.kv_hold_s,
            deliver=dispatcher.deliver,
        )
        self._borrower = Borrower(
            exchange.transfers,
            dispatcher,
            networks=networks,
            facts=facts,
            version=__version__,
            load_timeout_s=config.kv_load_timeout_s,
        )
        self._host, self._port = config.kv_host, config.kv_port
        exchange.server_traffic = self

    @property
    def engine_id(self) -> str:
        """Of this server's life."""
        return self._exchange.transfers.engine_id

    def open(self) -> None:
        """Listen for other servers; all nodes have been added.

        Raises:
            ConfigError: the address cannot be listened at, or would let anyone in.
        """
        try:
            self._host, self._port = self._exchange.transfers.listen(self._host, self._port)
        except RequestError as error:
            raise ConfigError(
                f"kv_host={self._host!r}: {error}; the secret comes from cluster_secret_file or "
                "FLOWKV_CLUSTER_SECRET",
                parameter="kv_host",
                value=self._host,
            ) from None
        except OSError as error:
            raise ConfigError(
                f"kv_port={self._port}: cannot listen on {self._host}: {error.strerror or error}; "
                "0 takes a free port",
                parameter="kv_port",
                value=self._port,
            ) from error

    @property
    def info(self) -> KVTransferInfo:
        """For routers."""
        assert self._config.kv_role is not None
        layout = self._facts.layout
        return KVTransferInfo(
            connector=CONNECTOR,
            role=self._config.kv_role,
            engine_id=self.engine_id,
            host=self._host,
            port=self._port,
            block_size=layout.block_size,
            cache_dtype=layout.dtype,
            tensor_parallel_size=self._tensor_parallel_size,
            pairing_protocol=pairing_protocol(named_facts(self._facts), __version__),
        )

    # Nodes

    def make_holds(self, name: str, kv: KVCacheManager) -> Holds:
        """What a node that is about to be added holds for other servers."""
        return self._lender.make_holds(name, kv)

    def add_node(self, name: str, node: LentNode, holds: Holds) -> None:
        """A node of this process; before `open`."""
        self._lender.add_node(name, node, holds)

    @property
    def num_expired_holds(self) -> dict[str, int]:
        """Prompts that each node held and no server came for in time. Any thread."""
        return self._lender.num_expired_holds

    def deliver(self, node: str, updates: Sequence[SequenceUpdate]) -> Sequence[StopOrder]:
        """Where nodes say what is new."""
        return self._lender.deliver(node, updates)

    def tick(self) -> None:
        """To be called now and then."""
        self._borrower.tick()

    def close(self) -> None:
        """Borrow nothing any more. Idempotent."""
        self._borrower.close()

    # Requests

    def submit(self, submission: Submission) -> Future[None]:
        """`Dispatcher.submit` for a request with a part in a hand-off."""
        match submission.kv_transfer:
            case RemoteDecode():
                return self._submit_to_hold(submission)
            case RemotePrefill() as remote:
                return self._submit_prefilled(submission, remote)
        return self._dispatcher.submit(submission)

    def refused(self, params: Mapping[str, Any] | None) -> None:
        """A request was refused that the other server holds K/V for: tell it."""
        try:
            remote = read_params(params, self._config.kv_role)
        except FlowKVError:
            return
        if not isinstance(remote, RemotePrefill):
            return
        if remote.engine_id == self.engine_id:
            self._lender.free(remote.node, remote.request_id)
            return
        node = self._node_for(remote)
        if isinstance(node, BorrowedNode):
            node.forget(remote.request_id)

    def _submit_to_hold(self, submission: Submission) -> Future[None]:
        spec, sink = submission.specs[0], submission.sink
        name = f"{submission.request_id[:_SHOWN_ID_CHARACTERS]}-{_suffix()}"
        held: list[tuple[str, list[int]]] = []

        def on_output(output: RequestOutput | Exception) -> Callable[[], None] | None:
            if isinstance(output, Exception) or output.finished:
                self._lender.forget_prompt(spec.sequence_id)
            if held and not isinstance(output, Exception) and output.finished:
                node, blocks = held[0]
                remote = RemotePrefill(
                    engine_id=self.engine_id,
                    node=node,
                    host=self._host,
                    port=self._port,
                    request_id=name,
                )
                params = answer_params(remote, blocks, self._tensor_parallel_size)
                output = dataclasses.replace(output, kv_transfer_params=params)
            return sink(output)

        submission.sink = on_output
        prompt = HeldPrompt(
            name, spec.prompt_token_ids, spec.cache_salt, lambda *where: held.append(where)
        )
        self._lender.hold_at_end(spec.sequence_id, prompt)
        accepted = self._dispatcher.submit(submission)

        def forget_if_refused(done: Future[None]) -> None:
            if done.exception() is not None:
                self._lender.forget_prompt(spec.sequence_id)

        accepted.add_done_callback(forget_if_refused)
        return accepted

    def _submit_prefilled(self, submission: Submission, remote: RemotePrefill) -> Future[None]:
        if remote.engine_id == self.engine_id:  # then its prompt is cached here
            self._lender.free(remote.node, remote.request_id)
            return self._dispatcher.submit(submission)
        node = self._node_for(remote)
        if isinstance(node, str):
            logger.warning("request %s: %s", submission.request_id, node)
            if self._fails_without_kv:
                refused: Future[None] = Future()
                refused.set_exception(
                    GenerationError(
                        f"the K/V of the prompt cannot be had: {node} (kv_load_failure_policy=fail)"
                    )
                )
                return refused
            return self._dispatcher.submit(submission)
        # Ids that neither server has given, so that they can stand beside each server's own.
        suffix = _suffix()
        submission.specs = [
            dataclasses.replace(
                spec,
                sequence_id=f"{spec.sequence_id[:_SHOWN_ID_CHARACTERS]}@{index}-{suffix}",
                hold=remote.request_id,
            )
            for index, spec in enumerate(submission.specs)
        ]
        submission.prefill_node = remote.node
        accepted = self._dispatcher.submit(submission)

        def forget_if_refused(done: Future[None]) -> None:
            if done.exception() is not None:
                node.forget(remote.request_id)

        accepted.add_done_callback(forget_if_refused)
        return accepted

    def _node_for(self, remote: RemotePrefill) -> BorrowedNode | str:
        """See `Borrower.node_for`. A node of this process under its name would take the place of
        that in the dispatcher, so whoever names one must not have it borrowed."""
        if self._lender.has_node(remote.node):
            return f"node {remote.node} is this server's own, not of {remote.engine_id!r:.100}"
        return self._borrower.node_for(remote)

    # What other servers say

    def on_notification(self, notification: Notification) -> None:
        """See `ServerTraffic`."""
        node, engine_id = notification.node, notification.engine_id
        try:
            message = messages.decode(notification.payload)
        except messages.ProtocolError as error:
            logger.error("engine %s: %s", engine_id, error)
            return
        match message:
            case messages.News():
                self._borrower.on_news(engine_id, message)
            case messages.Pull():
                self._lender.on_pull(node, engine_id, message)
            case messages.Stop():
                self._lender.on_stop(node, engine_id, message)
            case messages.Retry():
                self._lender.on_retry(node, engine_id, message)
            case messages.Forget():
                self._lender.free(node, message.hold)

    def on_lost(self, loss: PeerLoss) -> None:
        """See `ServerTraffic`."""
        self._borrower.on_lost(loss.engine_id, str(loss.error))
        self._lender.on_lost(loss.engine_id)


def _suffix() -> str:
    return uuid.uuid4().hex[:_SUFFIX_CHARACTERS]
