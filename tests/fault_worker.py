"""`flowkv worker` that meets faults where a test orders them; its folder is in the environment.

python -m tests.fault_worker worker --name=NAME ...

Points, as `fault_rules.Rule` names them (KIND is the class of a hand-off's message, in lower case):

    send:KIND  sent:KIND    before and after it goes out        DROP: it does not
    heard:KIND              it has come, nothing was done yet
    submitted               P: the transfer has begun
    moved                   P: the transfer is final, its blocks are held still
    receiving  received     D: before and after the bytes come  FAIL; CORRUPT: one byte changes
    arrived                 D: the transfer is final, the sequence does not run here yet
    say:arrived             D: before it tells of the sequence that has come here
    say:token               before new tokens are told          DROP: they are not told
    lose:KIND               a message of the transfer engine is sent       DROP: it is not
    step                    the node begins a step
    joining    joined       it looks for the front; it has become a member
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from flowkv_jax.cli import main
from flowkv_jax.cluster.node_port import StopOrder
from flowkv_jax.engine.node import Node
from flowkv_jax.handoff import messages
from flowkv_jax.handoff.agent import HandoffAgent
from flowkv_jax.handoff.exchange import Exchange
from flowkv_jax.handoff.sender import Sender
from flowkv_jax.sequence import SequenceUpdate
from flowkv_jax.worker.engine_node import EngineNode
from flowkv_jax.worker.member import Member
from flowkv_jax.worker.peer_links import PeerLinks
from tests.fault_rules import FOLDER_VARIABLE, Action, Faults
from transfer.backends.base import LinkBackend, Plan
from transfer.backends.shared_memory import SharedMemoryBackend
from transfer.backends.tcp import TcpBackend
from transfer.errors import BackendError
from transfer.pool_access import PoolAccess


def meet_in_handoffs(faults: Faults) -> None:
    """What the nodes say to each other, and when."""
    notify, submit = PeerLinks.notify, PeerLinks.submit
    hear, arrive, final = HandoffAgent._on_message, HandoffAgent._on_arrival, Sender._on_final

    def notify_or_not(self: PeerLinks, node: str, payload: bytes) -> None:
        kind = type(messages.decode(payload)).__name__.lower()
        if faults.reached(f"send:{kind}") is not Action.DROP:
            notify(self, node, payload)
        faults.reached(f"sent:{kind}")

    def hear_and_meet(self: HandoffAgent, message: messages.Message, heard_s: float) -> None:
        faults.reached(f"heard:{type(message).__name__.lower()}")
        hear(self, message, heard_s)

    def submit_and_meet(self: PeerLinks, *args: Any, **options: Any) -> Any:
        handle = submit(self, *args, **options)
        faults.reached("submitted")
        return handle

    def arrive_and_meet(self: HandoffAgent, arrival: Any) -> None:
        faults.reached("arrived")
        arrive(self, arrival)

    def final_and_meet(self: Sender, *args: Any) -> None:
        faults.reached("moved")
        final(self, *args)

    PeerLinks.notify = notify_or_not
    PeerLinks.submit = submit_and_meet
    HandoffAgent._on_message = hear_and_meet
    HandoffAgent._on_arrival = arrive_and_meet
    Sender._on_final = final_and_meet


def meet_in_transfers(faults: Faults) -> None:
    """The bytes on their way, and what the transfer engines say to each other."""

    def watch(backend: type[LinkBackend]) -> None:
        receive = backend.receive

        def receive_and_meet(
            self: Any, link: Any, destination: PoolAccess, plan: Plan, *args: Any
        ) -> int:
            if faults.reached("receiving") is Action.FAIL:
                raise BackendError("a fault that was ordered")
            calls = receive(self, link, destination, plan, *args)
            if faults.reached("received") is Action.CORRUPT:
                with destination.open() as memory:
                    assert memory.flat is not None
                    memory.flat[plan.runs[0].dst_start * plan.layout.bytes_per_block] ^= 0x55
            return calls

        backend.receive = receive_and_meet

    watch(SharedMemoryBackend)
    watch(TcpBackend)
    make = Exchange.__init__

    def make_lossy(self: Exchange, *args: Any, **options: Any) -> None:
        make(self, *args, **options)

        def is_lost(message: Any) -> bool:
            return faults.reached(f"lose:{type(message).__name__.lower()}") is Action.DROP

        self.transfers.lose(is_lost)

    Exchange.__init__ = make_lossy


def meet_in_news(faults: Faults) -> None:
    """What the front is told, and the node's steps."""
    deliver, step = Member.deliver, Node._step
    join, enter = Member._join, EngineNode.enter

    def deliver_or_not(
        self: Member, node: str, updates: Sequence[SequenceUpdate]
    ) -> Sequence[StopOrder]:
        if any(update.handoff is not None for update in updates):
            faults.reached("say:arrived")
        has_tokens = any(update.token_ids for update in updates)
        if has_tokens and faults.reached("say:token") is Action.DROP:
            return ()
        return deliver(self, node, updates)

    def meet_and_step(self: Node, in_flight: Any) -> Any:
        faults.reached("step")
        return step(self, in_flight)

    def meet_and_join(self: Member) -> Any:
        faults.reached("joining")
        return join(self)

    def enter_and_meet(self: EngineNode, *args: Any) -> None:
        enter(self, *args)
        faults.reached("joined")

    Member.deliver = deliver_or_not
    Member._join = meet_and_join
    EngineNode.enter = enter_and_meet
    Node._step = meet_and_step


def tell_of_the_node(faults: Faults) -> None:
    """Answer questions: what the node holds. Its books are checked on the way."""
    make = EngineNode.__init__

    def make_and_tell(self: EngineNode, *args: Any, **options: Any) -> None:
        make(self, *args, **options)
        node, handoffs, exchange = self._node, self._handoffs, self._exchange

        def look() -> dict[str, Any]:
            node.kv.check()
            return {
                "num_blocks": node.kv.allocator.num_blocks,
                "num_free_blocks": node.kv.num_free_blocks,
                "num_pinned_blocks": node.kv.num_pinned_blocks,
                "num_handoffs": len(handoffs),
                "num_sequences": len(node._served.all()),
                "has_work": node.scheduler.has_work,
                "peers": sorted(n for names in exchange.transfers.peers.values() for n in names),
            }

        faults.answer_questions(lambda: node.call(look).result(60) | {"pid": os.getpid()})

    EngineNode.__init__ = make_and_tell


if __name__ == "__main__":
    name = next(a.partition("=")[2] for a in sys.argv if a.startswith("--name="))
    met = Faults(Path(os.environ[FOLDER_VARIABLE]), name)
    for meet in (meet_in_handoffs, meet_in_transfers, meet_in_news, tell_of_the_node):
        meet(met)
    sys.exit(main(sys.argv[1:]))
