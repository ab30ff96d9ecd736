"""A cluster of one prefill and one decode node, as it once stood, and a view that tells of it."""

from __future__ import annotations

from dataclasses import replace

from flowkv_jax.cluster.dispatch_events import LostPlace, SequenceRecord
from flowkv_jax.controller.decision_log import Candidate, Decision, DecisionKind
from flowkv_jax.controller.load_score import METRICS
from flowkv_jax.controller.role import Role
from flowkv_jax.controller.snapshot import ClusterSnapshot, NodeState, NodeView, Regime
from flowkv_jax.errors import NotFoundError, UnprocessableError
from flowkv_jax.load import LinkLoad
from flowkv_jax.sequence import HandoffReport
from tests.fake_engine import LOAD

NOW_S = 1000.0

PREFILL = NodeView(
    name="prefill-0",
    host="one",
    epoch=1,
    role=Role.PREFILL,
    home_role=Role.PREFILL,
    state=NodeState.ACTIVE,
    next_role=None,
    state_since_s=900.0,
    role_since_s=900.0,
    takes_prefill=True,
    takes_decode=False,
    prefill_load=0.44,
    decode_load=0.25,
    metrics={name: None if name == "memory_bandwidth" else 0.5 for name in METRICS},
    load=replace(LOAD, num_requests_sending=7, kv_cache_usage=0.72),
    reported_s=999.9,
    queue_s=1.25,
    booked_prefills=3,
    booked_prefill_tokens=900,
    booked_sends=1,
    booked_decodes=0,
    booked_blocks=70,
    prefill_tokens_per_s=2000.0,
    decode_step_s=None,
    cached_prefix_blocks=32,
    pool_map=bytes([0, 128, 255]),
    link_loads=(
        LinkLoad("decode-0", "nvlink", 0.25, 0.8, 25e9),
        LinkLoad("prefill-1", "pcie", None, 0.7, 12e9),
    ),
)
DECODE = replace(
    PREFILL,
    name="decode-0",
    role=Role.DECODE,
    home_role=Role.DECODE,
    state=NodeState.SWITCHING,
    next_role=Role.HYBRID,
    decode_step_s=0.026,
    load=replace(LOAD, num_requests_receiving=5),
)
NEW = replace(PREFILL, name="prefill-1", metrics={}, load=None, reported_s=None)
SNAPSHOT = ClusterSnapshot(
    NOW_S, Regime.IMBALANCED, 0.77, 0.13, 1.5, (DECODE, PREFILL, NEW), 0.25, 0.6
)

HANDOFF = HandoffReport(
    src="prefill-0",
    dst="decode-0",
    path="Direct",
    backend="shared_memory",
    runs=2,
    calls=1,
    data_bytes=14 << 20,
    num_blocks=19,
    num_reused_blocks=6,
    deferred_s=0.001,
    transfer_s=0.0025,
    total_s=0.004,
)
RECORD = SequenceRecord(
    number=1,
    request_id="req-1",
    sequence_id="req-1",
    num_prompt_tokens=300,
    num_output_tokens=24,
    num_cached_tokens=96,
    num_preemptions=0,
    num_placements=1,
    prefill_node="prefill-0",
    decode_node="decode-0",
    arrival_s=990.0,
    ended_s=995.0,
    queue_s=0.5,
    prefill_s=1.0,
    decode_s=3.5,
    handoff=HANDOFF,
    finish_reason="length",
    handed_off_s=991.51,
)
LOST_PLACE = LostPlace("prefill-0", "decode-1", "decode-1", 992.0, "its process ended")
MOVED = replace(
    RECORD, request_id="req-moved", sequence_id="req-moved", num_placements=2,
    handed_off_s=993.0, lost_places=(LOST_PLACE, replace(LOST_PLACE, node=None)),
)  # fmt: skip
NEVER_RAN = replace(
    RECORD, prefill_node=None, decode_node=None, queue_s=None, prefill_s=None, decode_s=None,
    handoff=None, handed_off_s=None, num_placements=0, finish_reason="abort",
)  # fmt: skip

ROUTE = Decision(
    number=1,
    time_s=990.0,
    kind=DecisionKind.ROUTE,
    subject="req-1",
    chosen="prefill-0 -> decode-0",
    reason="earliest token; least transfer and load",
    candidates=(
        Candidate("prefill-0", "prefill", 0.296, {"queue_s": 0.1, "prefill_s": 0.15}),
        Candidate("prefill-1", "prefill", 0.5, {"queue_s": 0.3}),
        Candidate("decode-0", "decode", 0.087, {"transfer_s": 0.008}),
    ),
)
SWITCH = replace(
    ROUTE,
    kind=DecisionKind.ROLE,
    subject="decode-0",
    chosen="hybrid",
    reason="prefill is overloaded and decode is idle",
    candidates=(),
    terms={"busy_load": 0.77},
)


class RecordedView:
    """A `ClusterView`. Remembers its orders; knows the nodes of `snapshot_now` only."""

    def __init__(self) -> None:
        self.snapshot_now = SNAPSHOT
        self.all_decisions = [replace(ROUTE, number=n) for n in range(3, 8)]
        self.all_records = [replace(RECORD, number=n, request_id=f"req-{n}") for n in range(4, 9)]
        self.orders: list[tuple[str, object]] = []

    def snapshot(self) -> ClusterSnapshot:
        return self.snapshot_now

    def decisions(self, limit: int, after: int | None = None) -> list[Decision]:
        if after is None:
            return self.all_decisions[-limit:]
        return [one for one in self.all_decisions if one.number > after][:limit]

    def records(self, limit: int, after: int | None = None) -> list[SequenceRecord]:
        if after is None:
            return self.all_records[-limit:]
        return [one for one in self.all_records if one.number > after][:limit]

    def set_role(self, name: str, role: Role) -> None:
        if self._node(name).state is NodeState.LEAVING:
            raise UnprocessableError(f"node {name!r} is leaving")
        self.orders.append((name, role))

    def drain(self, name: str) -> None:
        self._node(name)
        self.orders.append((name, "drain"))

    def _node(self, name: str) -> NodeView:
        for node in self.snapshot_now.nodes:
            if node.name == name:
                return node
        raise NotFoundError(f"no node {name!r}")
