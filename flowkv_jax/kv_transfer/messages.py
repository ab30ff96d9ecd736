"""What two servers say to each other, as notifications of the transfer engine. Pure, no JAX.

    D                                          P
    Pull sequences with their prompts   ->     starts them; what it cannot do it tells as news
                                        <-     News of the sequences: first token, errors
    Stop sequences                      ->
    Retry the hand-off of a sequence    ->
    Forget hold                         ->     nobody will come for it

Each begins with a byte that no hand-off message begins with, as both go to the same node. Lengths
are bounded by the notification's limit, each field by its type.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from flowkv_jax.cluster.facts import ModelFacts, Name, NodeName
from flowkv_jax.cluster.node_port import SequenceKey, StopOrder
from flowkv_jax.cluster.sequence_wire import SequenceId, WireSpecs, WireUpdate
from flowkv_jax.errors import FlowKVError

MARK = b"\xc1"
"""Never the first byte of a msgpack object."""


class ProtocolError(FlowKVError):
    """A message that cannot be read."""


class Message(msgspec.Struct, frozen=True, array_like=True, tag=str.lower):
    """Base of all of them."""


class Pull(Message, frozen=True):
    """Compute these sequences, or what of them is not held, and hand them off.

    Attributes:
        version, facts: of the program and the model; must be equal.
        specs: each with its decode node, and the hold of its prompt.
    """

    version: Name
    facts: ModelFacts
    specs: WireSpecs


class Stop(Message, frozen=True):
    """End sequences that were pulled."""

    orders: list[StopOrder]


class Retry(Message, frozen=True):
    """Hand a sequence that was pulled off to this node, though that has failed."""

    key: SequenceKey
    decode_node: NodeName


class Forget(Message, frozen=True):
    """Nobody will come for what is held under this name."""

    hold: SequenceId


class News(Message, frozen=True):
    """What is new of pulled sequences at node `src`."""

    src: NodeName
    updates: list[WireUpdate]


AnyMessage = Pull | Stop | Retry | Forget | News

_decoder = msgspec.msgpack.Decoder(Annotated[AnyMessage, msgspec.Meta()])


def encode(message: AnyMessage) -> bytes:
    return MARK + msgspec.msgpack.encode(message)


def is_message(payload: bytes) -> bool:
    """Whether it is one of these, and not of a hand-off."""
    return payload[:1] == MARK


def decode(payload: bytes) -> AnyMessage:
    """Raises `ProtocolError` for anything else than a message."""
    try:
        return _decoder.decode(memoryview(payload)[1:])
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ProtocolError(f"not a message between servers: {error}") from None
