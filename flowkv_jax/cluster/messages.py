"""What a worker and the front process say to each other. Pure, no JAX, no I/O.

    worker                                   front
    ------                                   -----
    Join          ------------------------>  checks it
                  <------------------------  Welcome, or Refused and the connection ends
    Report        ------------------------>  every `heartbeat_s`: also the sign of life
                  <------------------------  Ping, for each Report
                  <------------------------  Start, Stop, Redirect, Release, SetRole, Peers
    Updates       ------------------------>  news of a step
                  <------------------------  Errand, of an administrator
    ErrandResult  ------------------------>  what came of it
                  <------------------------  Drain: finish what runs, then leave
    Leaving       ------------------------>  nothing new, please; then once more when it goes
                  <------------------------  Expelled: the lease ran out, join anew

A connection is one membership: name and epoch are agreed upon once, and no later message repeats
them. What still comes over the connection of a membership that has ended is stale and dropped.

A message is msgpack of an array that begins with its kind. Lengths are bounded by the frame's
limit, and each field by its type; what does not fit its type ends the connection and nothing else.
`Join` grows at its end only, so that two versions can tell each other that they differ.
"""

from __future__ import annotations

import enum
import numbers
from typing import Annotated, Any, TypeAlias

import msgspec

from flowkv_jax.cluster.error_wire import WireError
from flowkv_jax.cluster.facts import Count, HostPort, ModelFacts, Name, NodeFacts, NodeName
from flowkv_jax.cluster.node_port import SequenceKey, StopOrder
from flowkv_jax.cluster.sequence_wire import Text, WireSpecs, WireUpdate
from flowkv_jax.controller.role import Role
from flowkv_jax.controller.snapshot import NodeReport
from transfer.errors import ProtocolError

PROTOCOL = 1
PURPOSE = "flowkv-worker"
PROBE = "flowkv-probe"
"""Of a connection that ends once both sides have proved the secret."""
"""What a worker dials for; see `transfer.wire.Hello`."""
MAX_FRAME_BYTES = 64 << 20
MAX_PROFILE_S = 300.0
"""After which a profile ends by itself, whatever was asked for."""


class Message(msgspec.Struct, frozen=True, array_like=True, tag=str.lower):
    """Base of all of them."""


class Join(Message, frozen=True):
    """A worker wants in.

    Attributes:
        protocol: `PROTOCOL`.
        version: of flowkv; must be equal.
        instance: drawn once a process, so that one that joins anew is known from its namesakes.
        name: wanted, or that it had; empty for the front to choose.
        is_name_fixed: it can have no other one.
        epoch: of its last membership, 0 for none.
        role: wanted, or that it had.
    """

    protocol: int
    version: Name
    instance: Name
    name: NodeName
    is_name_fixed: bool
    epoch: Count
    role: Role
    model: ModelFacts
    node: NodeFacts


class Peer(msgspec.Struct, frozen=True, array_like=True):
    """Another member, as far as hand-offs need it."""

    name: NodeName
    epoch: Count
    transfer_address: HostPort | None


class Welcome(Message, frozen=True):
    """The worker is a member.

    Attributes:
        name, epoch, role: of this membership.
        lease_s: silence after which the worker counts as lost.
        heartbeat_s: how often to report.
        peers: members that were there before.
    """

    name: NodeName
    epoch: Count
    role: Role
    lease_s: Annotated[float, msgspec.Meta(gt=0)]
    heartbeat_s: Annotated[float, msgspec.Meta(gt=0)]
    peers: list[Peer]


class Refused(Message, frozen=True):
    """The worker is no member. `can_retry`: the reason may go away by itself."""

    reason: Text
    can_retry: bool


class Expelled(Message, frozen=True):
    """The membership has ended: abort everything, and join anew."""

    reason: Text


class Start(Message, frozen=True):
    """`NodePort.start`; a refusal comes back as updates with an error."""

    sequences: WireSpecs


class Stop(Message, frozen=True):
    """`NodePort.stop`."""

    orders: list[StopOrder]


class Redirect(Message, frozen=True):
    """`NodePort.redirect`."""

    key: SequenceKey
    decode_node: NodeName | None


class Release(Message, frozen=True):
    """`NodePort.release`."""

    node: NodeName


class Peers(Message, frozen=True):
    """Members that came and went; one that came anew is in both, and left first."""

    joined: list[Peer]
    left: list[Peer]


class SetRole(Message, frozen=True):
    """Another role from now on; what runs, stays."""

    role: Role


class ErrandKind(enum.Enum):
    """What an administrator may have a node do, beside its work."""

    RESET_PREFIX_CACHE = "reset_prefix_cache"
    START_PROFILE = "start_profile"
    STOP_PROFILE = "stop_profile"


class Errand(Message, frozen=True):
    """Do it, and tell what came of it.

    Attributes:
        number: of this membership's errands.
        duration_s: of a profile, at most.
    """

    number: Count
    kind: ErrandKind
    duration_s: Annotated[float, msgspec.Meta(ge=0, le=MAX_PROFILE_S)]


class Drain(Message, frozen=True):
    """Leave once everything has ended, or after `timeout_s`."""

    timeout_s: Annotated[float, msgspec.Meta(ge=0)]


class Ping(Message, frozen=True):
    """The front is there."""


class Updates(Message, frozen=True):
    """News of a step."""

    updates: list[WireUpdate]


class Report(Message, frozen=True):
    """How the node is, and what is new in its cache."""

    report: NodeReport


class Leaving(Message, frozen=True):
    """`has_ended`: nothing runs any more, and the connection ends. Else: place nothing new."""

    reason: Text
    has_ended: bool


class ErrandResult(Message, frozen=True):
    """The end of an errand: its result, or why it failed."""

    number: Count
    result: bool
    error: WireError | None


ToFront: TypeAlias = Join | Updates | Report | Leaving | ErrandResult
ToWorker: TypeAlias = (
    Welcome
    | Refused
    | Expelled
    | Start
    | Stop
    | Redirect
    | Release
    | Peers
    | SetRole
    | Errand
    | Drain
    | Ping
)


def _plain(value: Any) -> Any:
    """Numbers of other libraries, which callers may put into sampling parameters."""
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, numbers.Real):
        return float(value)
    raise TypeError(f"{type(value).__name__} cannot be sent")


_encoder = msgspec.msgpack.Encoder(enc_hook=_plain)
_to_front = msgspec.msgpack.Decoder(ToFront)
_to_worker = msgspec.msgpack.Decoder(ToWorker)


def encode(message: Message) -> bytes:
    """The body of a frame."""
    return _encoder.encode(message)


def decode_at_front(body: bytes) -> ToFront:
    """Raises `ProtocolError` where `body` is no message of a worker."""
    message: ToFront = _decode(_to_front, body)
    return message


def decode_at_worker(body: bytes) -> ToWorker:
    """Raises `ProtocolError` where `body` is no message of the front."""
    message: ToWorker = _decode(_to_worker, body)
    return message


def _decode(decoder: msgspec.msgpack.Decoder[Any], body: bytes) -> Any:
    try:
        return decoder.decode(body)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ProtocolError(f"a message that cannot be read: {error}") from None
