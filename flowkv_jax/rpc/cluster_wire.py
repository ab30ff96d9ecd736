"""What a cluster shows <-> messages of cluster.proto. Both ways give back what went in."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, TypeVar

from flowkv_jax.cluster.dispatch_events import LostPlace, SequenceRecord
from flowkv_jax.controller.decision_log import Candidate, Decision, DecisionKind
from flowkv_jax.controller.role import Role
from flowkv_jax.controller.snapshot import ClusterSnapshot, NodeState, NodeView, Regime
from flowkv_jax.errors import ServerError, ValidationError
from flowkv_jax.load import LinkLoad, NodeLoad
from flowkv_jax.rpc.flowkv.v1 import cluster_pb2 as pb
from flowkv_jax.rpc.wire import finish_reason_from_wire, finish_reason_to_wire
from flowkv_jax.sequence import HandoffReport

_Enum = TypeVar("_Enum", bound=enum.Enum)

# Names of the values in the proto are those of the members here, behind a prefix.
_PREFIXES: Mapping[type[enum.Enum], str] = {
    Role: "ROLE_",
    NodeState: "NODE_STATE_",
    Regime: "REGIME_",
    DecisionKind: "DECISION_KIND_",
}


def snapshot_to_wire(snapshot: ClusterSnapshot) -> pb.GetClusterResponse:
    return pb.GetClusterResponse(
        now_s=snapshot.now_s,
        regime=_number(snapshot.regime),
        prefill_load=snapshot.prefill_load,
        decode_load=snapshot.decode_load,
        prefill_demand_nodes=snapshot.prefill_demand_nodes,
        nodes=[node_to_wire(node) for node in snapshot.nodes],
        role_load_low=snapshot.role_load_low,
        role_load_high=snapshot.role_load_high,
    )


def snapshot_from_wire(message: pb.GetClusterResponse) -> ClusterSnapshot:
    """
    Raises:
        ServerError: the server is newer and says what is not known here.
    """
    return ClusterSnapshot(
        now_s=message.now_s,
        regime=_member(Regime, message.regime),
        prefill_load=message.prefill_load,
        decode_load=message.decode_load,
        prefill_demand_nodes=message.prefill_demand_nodes,
        nodes=tuple(map(_node_from_wire, message.nodes)),
        role_load_low=message.role_load_low,
        role_load_high=message.role_load_high,
    )


def node_to_wire(node: NodeView) -> pb.Node:
    values = {name: getattr(node, name) for name in node.__slots__}
    return pb.Node(
        **values
        | {
            "role": _number(node.role),
            "home_role": _number(node.home_role),
            "state": _number(node.state),
            "next_role": None if node.next_role is None else _number(node.next_role),
            "metrics": [pb.Metric(name=name, value=v) for name, v in node.metrics.items()],
            "load": None if node.load is None else pb.NodeLoad(**asdict(node.load)),
            "link_loads": [pb.LinkLoad(**asdict(link)) for link in node.link_loads],
        }
    )


def _node_from_wire(message: pb.Node) -> NodeView:
    values = _values(message)
    values |= {
        "role": _member(Role, message.role),
        "home_role": _member(Role, message.home_role),
        "state": _member(NodeState, message.state),
        "next_role": _member(Role, message.next_role) if message.next_role else None,
        "metrics": {m.name: m.value if m.HasField("value") else None for m in message.metrics},
        "load": NodeLoad(**_values(message.load)) if message.HasField("load") else None,
        "link_loads": tuple(LinkLoad(**_values(link)) for link in message.link_loads),
    }
    return NodeView(**values)


def decision_to_wire(decision: Decision) -> pb.Decision:
    return pb.Decision(
        number=decision.number,
        time_s=decision.time_s,
        kind=_number(decision.kind),
        subject=_text(decision.subject),
        chosen=_text(decision.chosen),
        reason=_text(decision.reason),
        candidates=[pb.Candidate(**candidate.to_dict()) for candidate in decision.candidates],
        terms=dict(decision.terms),
    )


def decision_from_wire(message: pb.Decision) -> Decision:
    """
    Raises:
        ServerError: as `snapshot_from_wire`.
    """
    return Decision(
        number=message.number,
        time_s=message.time_s,
        kind=_member(DecisionKind, message.kind),
        subject=message.subject,
        chosen=message.chosen,
        reason=message.reason,
        candidates=tuple(
            Candidate(one.name, one.purpose, one.cost_s, dict(one.terms))
            for one in message.candidates
        ),
        terms=dict(message.terms),
    )


def record_to_wire(record: SequenceRecord) -> pb.FinishedRequest:
    values = {name: getattr(record, name) for name in record.__slots__}
    return pb.FinishedRequest(
        **values
        | {
            "request_id": _text(record.request_id),
            "sequence_id": _text(record.sequence_id),
            "handoff": None if record.handoff is None else pb.Handoff(**asdict(record.handoff)),
            "finish_reason": finish_reason_to_wire(record.finish_reason),
            "lost_places": [_lost_place_to_wire(lost) for lost in record.lost_places],
        }
    )


def record_from_wire(message: pb.FinishedRequest) -> SequenceRecord:
    """
    Raises:
        ServerError: as `snapshot_from_wire`.
    """
    reason = finish_reason_from_wire(message.finish_reason)
    if reason is None:
        raise ServerError(f"request {message.request_id!r} has ended, and the server says not how")
    has_handoff = message.HasField("handoff")
    values = _values(message)
    values |= {
        "handoff": HandoffReport(**_values(message.handoff)) if has_handoff else None,
        "finish_reason": reason,
        "lost_places": tuple(LostPlace(**_values(lost)) for lost in message.lost_places),
    }
    return SequenceRecord(**values)


def _lost_place_to_wire(lost: LostPlace) -> pb.LostPlace:
    return pb.LostPlace(**asdict(lost) | {"reason": _text(lost.reason)})


def role_to_wire(role: Role) -> Any:
    return _number(role)


def role_from_wire(number: int) -> Role:
    """
    Raises:
        ValidationError: it is none.
    """
    try:
        return _member(Role, number)
    except ServerError:
        names = ", ".join(f"ROLE_{role.name}" for role in Role)
        raise ValidationError(
            f"role={number} is none of {names}", parameter="role", value=number
        ) from None


def _number(member: enum.Enum) -> Any:
    """Of an enum's member in the proto, which has a type of its own."""
    return getattr(pb, _PREFIXES[type(member)] + member.name)


def _member(kind: type[_Enum], number: int) -> _Enum:
    for member in kind:
        if _number(member) == number:
            return member
    raise ServerError(f"the server speaks of {kind.__name__} {number}, which is not known here")


def _values(message: Any) -> dict[str, Any]:
    """Fields by name; None for one that knows that it was not set."""
    return {
        field.name: None
        if field.has_presence and not message.HasField(field.name)
        else getattr(message, field.name)
        for field in message.DESCRIPTOR.fields
    }


def _text(value: str) -> str:
    """Callers name requests as they like; on the wire text is UTF-8."""
    return value.encode("utf-8", errors="replace").decode("utf-8")
