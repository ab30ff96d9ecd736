from flowkv_jax.rpc.flowkv.v1 import flowkv_pb2 as _flowkv_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Role(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ROLE_UNSPECIFIED: _ClassVar[Role]
    ROLE_PREFILL: _ClassVar[Role]
    ROLE_DECODE: _ClassVar[Role]
    ROLE_HYBRID: _ClassVar[Role]

class NodeState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    NODE_STATE_UNSPECIFIED: _ClassVar[NodeState]
    NODE_STATE_ACTIVE: _ClassVar[NodeState]
    NODE_STATE_SWITCHING: _ClassVar[NodeState]
    NODE_STATE_LEAVING: _ClassVar[NodeState]
    NODE_STATE_DRAINED: _ClassVar[NodeState]

class Regime(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    REGIME_UNSPECIFIED: _ClassVar[Regime]
    REGIME_NORMAL: _ClassVar[Regime]
    REGIME_IMBALANCED: _ClassVar[Regime]
    REGIME_EXTREME: _ClassVar[Regime]

class DecisionKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    DECISION_KIND_UNSPECIFIED: _ClassVar[DecisionKind]
    DECISION_KIND_ROUTE: _ClassVar[DecisionKind]
    DECISION_KIND_ROLE: _ClassVar[DecisionKind]
    DECISION_KIND_SCALE: _ClassVar[DecisionKind]
    DECISION_KIND_REGIME: _ClassVar[DecisionKind]
    DECISION_KIND_NODE: _ClassVar[DecisionKind]
ROLE_UNSPECIFIED: Role
ROLE_PREFILL: Role
ROLE_DECODE: Role
ROLE_HYBRID: Role
NODE_STATE_UNSPECIFIED: NodeState
NODE_STATE_ACTIVE: NodeState
NODE_STATE_SWITCHING: NodeState
NODE_STATE_LEAVING: NodeState
NODE_STATE_DRAINED: NodeState
REGIME_UNSPECIFIED: Regime
REGIME_NORMAL: Regime
REGIME_IMBALANCED: Regime
REGIME_EXTREME: Regime
DECISION_KIND_UNSPECIFIED: DecisionKind
DECISION_KIND_ROUTE: DecisionKind
DECISION_KIND_ROLE: DecisionKind
DECISION_KIND_SCALE: DecisionKind
DECISION_KIND_REGIME: DecisionKind
DECISION_KIND_NODE: DecisionKind

class NodeLoad(_message.Message):
    __slots__ = ("num_requests_running", "num_requests_waiting", "num_requests_swapped", "num_waiting_tokens", "kv_cache_usage", "num_blocks", "num_free_blocks", "fragmentation", "prefix_cache_queries", "prefix_cache_hits", "num_preemptions", "token_budget_used", "num_requests_sending", "num_requests_receiving")
    NUM_REQUESTS_RUNNING_FIELD_NUMBER: _ClassVar[int]
    NUM_REQUESTS_WAITING_FIELD_NUMBER: _ClassVar[int]
    NUM_REQUESTS_SWAPPED_FIELD_NUMBER: _ClassVar[int]
    NUM_WAITING_TOKENS_FIELD_NUMBER: _ClassVar[int]
    KV_CACHE_USAGE_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_FREE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    FRAGMENTATION_FIELD_NUMBER: _ClassVar[int]
    PREFIX_CACHE_QUERIES_FIELD_NUMBER: _ClassVar[int]
    PREFIX_CACHE_HITS_FIELD_NUMBER: _ClassVar[int]
    NUM_PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_BUDGET_USED_FIELD_NUMBER: _ClassVar[int]
    NUM_REQUESTS_SENDING_FIELD_NUMBER: _ClassVar[int]
    NUM_REQUESTS_RECEIVING_FIELD_NUMBER: _ClassVar[int]
    num_requests_running: int
    num_requests_waiting: int
    num_requests_swapped: int
    num_waiting_tokens: int
    kv_cache_usage: float
    num_blocks: int
    num_free_blocks: int
    fragmentation: float
    prefix_cache_queries: int
    prefix_cache_hits: int
    num_preemptions: int
    token_budget_used: float
    num_requests_sending: int
    num_requests_receiving: int
    def __init__(self, num_requests_running: _Optional[int] = ..., num_requests_waiting: _Optional[int] = ..., num_requests_swapped: _Optional[int] = ..., num_waiting_tokens: _Optional[int] = ..., kv_cache_usage: _Optional[float] = ..., num_blocks: _Optional[int] = ..., num_free_blocks: _Optional[int] = ..., fragmentation: _Optional[float] = ..., prefix_cache_queries: _Optional[int] = ..., prefix_cache_hits: _Optional[int] = ..., num_preemptions: _Optional[int] = ..., token_budget_used: _Optional[float] = ..., num_requests_sending: _Optional[int] = ..., num_requests_receiving: _Optional[int] = ...) -> None: ...

class Metric(_message.Message):
    __slots__ = ("name", "value")
    NAME_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    name: str
    value: float
    def __init__(self, name: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...

class LinkLoad(_message.Message):
    __slots__ = ("dst", "medium", "utilisation", "threshold", "bytes_per_s")
    DST_FIELD_NUMBER: _ClassVar[int]
    MEDIUM_FIELD_NUMBER: _ClassVar[int]
    UTILISATION_FIELD_NUMBER: _ClassVar[int]
    THRESHOLD_FIELD_NUMBER: _ClassVar[int]
    BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    dst: str
    medium: str
    utilisation: float
    threshold: float
    bytes_per_s: float
    def __init__(self, dst: _Optional[str] = ..., medium: _Optional[str] = ..., utilisation: _Optional[float] = ..., threshold: _Optional[float] = ..., bytes_per_s: _Optional[float] = ...) -> None: ...

class Node(_message.Message):
    __slots__ = ("name", "host", "epoch", "role", "home_role", "state", "next_role", "state_since_s", "role_since_s", "takes_prefill", "takes_decode", "prefill_load", "decode_load", "metrics", "load", "reported_s", "queue_s", "booked_prefills", "booked_prefill_tokens", "booked_sends", "booked_decodes", "booked_blocks", "prefill_tokens_per_s", "decode_step_s", "cached_prefix_blocks", "pool_map", "link_loads")
    NAME_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    HOME_ROLE_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    NEXT_ROLE_FIELD_NUMBER: _ClassVar[int]
    STATE_SINCE_S_FIELD_NUMBER: _ClassVar[int]
    ROLE_SINCE_S_FIELD_NUMBER: _ClassVar[int]
    TAKES_PREFILL_FIELD_NUMBER: _ClassVar[int]
    TAKES_DECODE_FIELD_NUMBER: _ClassVar[int]
    PREFILL_LOAD_FIELD_NUMBER: _ClassVar[int]
    DECODE_LOAD_FIELD_NUMBER: _ClassVar[int]
    METRICS_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    REPORTED_S_FIELD_NUMBER: _ClassVar[int]
    QUEUE_S_FIELD_NUMBER: _ClassVar[int]
    BOOKED_PREFILLS_FIELD_NUMBER: _ClassVar[int]
    BOOKED_PREFILL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BOOKED_SENDS_FIELD_NUMBER: _ClassVar[int]
    BOOKED_DECODES_FIELD_NUMBER: _ClassVar[int]
    BOOKED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_TOKENS_PER_S_FIELD_NUMBER: _ClassVar[int]
    DECODE_STEP_S_FIELD_NUMBER: _ClassVar[int]
    CACHED_PREFIX_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    POOL_MAP_FIELD_NUMBER: _ClassVar[int]
    LINK_LOADS_FIELD_NUMBER: _ClassVar[int]
    name: str
    host: str
    epoch: int
    role: Role
    home_role: Role
    state: NodeState
    next_role: Role
    state_since_s: float
    role_since_s: float
    takes_prefill: bool
    takes_decode: bool
    prefill_load: float
    decode_load: float
    metrics: _containers.RepeatedCompositeFieldContainer[Metric]
    load: NodeLoad
    reported_s: float
    queue_s: float
    booked_prefills: int
    booked_prefill_tokens: int
    booked_sends: int
    booked_decodes: int
    booked_blocks: int
    prefill_tokens_per_s: float
    decode_step_s: float
    cached_prefix_blocks: int
    pool_map: bytes
    link_loads: _containers.RepeatedCompositeFieldContainer[LinkLoad]
    def __init__(self, name: _Optional[str] = ..., host: _Optional[str] = ..., epoch: _Optional[int] = ..., role: _Optional[_Union[Role, str]] = ..., home_role: _Optional[_Union[Role, str]] = ..., state: _Optional[_Union[NodeState, str]] = ..., next_role: _Optional[_Union[Role, str]] = ..., state_since_s: _Optional[float] = ..., role_since_s: _Optional[float] = ..., takes_prefill: _Optional[bool] = ..., takes_decode: _Optional[bool] = ..., prefill_load: _Optional[float] = ..., decode_load: _Optional[float] = ..., metrics: _Optional[_Iterable[_Union[Metric, _Mapping]]] = ..., load: _Optional[_Union[NodeLoad, _Mapping]] = ..., reported_s: _Optional[float] = ..., queue_s: _Optional[float] = ..., booked_prefills: _Optional[int] = ..., booked_prefill_tokens: _Optional[int] = ..., booked_sends: _Optional[int] = ..., booked_decodes: _Optional[int] = ..., booked_blocks: _Optional[int] = ..., prefill_tokens_per_s: _Optional[float] = ..., decode_step_s: _Optional[float] = ..., cached_prefix_blocks: _Optional[int] = ..., pool_map: _Optional[bytes] = ..., link_loads: _Optional[_Iterable[_Union[LinkLoad, _Mapping]]] = ...) -> None: ...

class GetClusterRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetClusterResponse(_message.Message):
    __slots__ = ("now_s", "regime", "prefill_load", "decode_load", "prefill_demand_nodes", "nodes", "role_load_low", "role_load_high")
    NOW_S_FIELD_NUMBER: _ClassVar[int]
    REGIME_FIELD_NUMBER: _ClassVar[int]
    PREFILL_LOAD_FIELD_NUMBER: _ClassVar[int]
    DECODE_LOAD_FIELD_NUMBER: _ClassVar[int]
    PREFILL_DEMAND_NODES_FIELD_NUMBER: _ClassVar[int]
    NODES_FIELD_NUMBER: _ClassVar[int]
    ROLE_LOAD_LOW_FIELD_NUMBER: _ClassVar[int]
    ROLE_LOAD_HIGH_FIELD_NUMBER: _ClassVar[int]
    now_s: float
    regime: Regime
    prefill_load: float
    decode_load: float
    prefill_demand_nodes: float
    nodes: _containers.RepeatedCompositeFieldContainer[Node]
    role_load_low: float
    role_load_high: float
    def __init__(self, now_s: _Optional[float] = ..., regime: _Optional[_Union[Regime, str]] = ..., prefill_load: _Optional[float] = ..., decode_load: _Optional[float] = ..., prefill_demand_nodes: _Optional[float] = ..., nodes: _Optional[_Iterable[_Union[Node, _Mapping]]] = ..., role_load_low: _Optional[float] = ..., role_load_high: _Optional[float] = ...) -> None: ...

class WatchClusterRequest(_message.Message):
    __slots__ = ("interval_s",)
    INTERVAL_S_FIELD_NUMBER: _ClassVar[int]
    interval_s: float
    def __init__(self, interval_s: _Optional[float] = ...) -> None: ...

class GetDecisionsRequest(_message.Message):
    __slots__ = ("limit", "after_number")
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    AFTER_NUMBER_FIELD_NUMBER: _ClassVar[int]
    limit: int
    after_number: int
    def __init__(self, limit: _Optional[int] = ..., after_number: _Optional[int] = ...) -> None: ...

class Candidate(_message.Message):
    __slots__ = ("name", "purpose", "cost_s", "terms")
    class TermsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    NAME_FIELD_NUMBER: _ClassVar[int]
    PURPOSE_FIELD_NUMBER: _ClassVar[int]
    COST_S_FIELD_NUMBER: _ClassVar[int]
    TERMS_FIELD_NUMBER: _ClassVar[int]
    name: str
    purpose: str
    cost_s: float
    terms: _containers.ScalarMap[str, float]
    def __init__(self, name: _Optional[str] = ..., purpose: _Optional[str] = ..., cost_s: _Optional[float] = ..., terms: _Optional[_Mapping[str, float]] = ...) -> None: ...

class Decision(_message.Message):
    __slots__ = ("number", "time_s", "kind", "subject", "chosen", "reason", "candidates", "terms")
    class TermsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    TIME_S_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    SUBJECT_FIELD_NUMBER: _ClassVar[int]
    CHOSEN_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    CANDIDATES_FIELD_NUMBER: _ClassVar[int]
    TERMS_FIELD_NUMBER: _ClassVar[int]
    number: int
    time_s: float
    kind: DecisionKind
    subject: str
    chosen: str
    reason: str
    candidates: _containers.RepeatedCompositeFieldContainer[Candidate]
    terms: _containers.ScalarMap[str, float]
    def __init__(self, number: _Optional[int] = ..., time_s: _Optional[float] = ..., kind: _Optional[_Union[DecisionKind, str]] = ..., subject: _Optional[str] = ..., chosen: _Optional[str] = ..., reason: _Optional[str] = ..., candidates: _Optional[_Iterable[_Union[Candidate, _Mapping]]] = ..., terms: _Optional[_Mapping[str, float]] = ...) -> None: ...

class GetDecisionsResponse(_message.Message):
    __slots__ = ("decisions", "oldest_number")
    DECISIONS_FIELD_NUMBER: _ClassVar[int]
    OLDEST_NUMBER_FIELD_NUMBER: _ClassVar[int]
    decisions: _containers.RepeatedCompositeFieldContainer[Decision]
    oldest_number: int
    def __init__(self, decisions: _Optional[_Iterable[_Union[Decision, _Mapping]]] = ..., oldest_number: _Optional[int] = ...) -> None: ...

class GetRequestsRequest(_message.Message):
    __slots__ = ("limit", "after_number")
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    AFTER_NUMBER_FIELD_NUMBER: _ClassVar[int]
    limit: int
    after_number: int
    def __init__(self, limit: _Optional[int] = ..., after_number: _Optional[int] = ...) -> None: ...

class Handoff(_message.Message):
    __slots__ = ("src", "dst", "path", "backend", "runs", "calls", "data_bytes", "num_blocks", "num_reused_blocks", "deferred_s", "transfer_s", "total_s")
    SRC_FIELD_NUMBER: _ClassVar[int]
    DST_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    BACKEND_FIELD_NUMBER: _ClassVar[int]
    RUNS_FIELD_NUMBER: _ClassVar[int]
    CALLS_FIELD_NUMBER: _ClassVar[int]
    DATA_BYTES_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_REUSED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    DEFERRED_S_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_S_FIELD_NUMBER: _ClassVar[int]
    TOTAL_S_FIELD_NUMBER: _ClassVar[int]
    src: str
    dst: str
    path: str
    backend: str
    runs: int
    calls: int
    data_bytes: int
    num_blocks: int
    num_reused_blocks: int
    deferred_s: float
    transfer_s: float
    total_s: float
    def __init__(self, src: _Optional[str] = ..., dst: _Optional[str] = ..., path: _Optional[str] = ..., backend: _Optional[str] = ..., runs: _Optional[int] = ..., calls: _Optional[int] = ..., data_bytes: _Optional[int] = ..., num_blocks: _Optional[int] = ..., num_reused_blocks: _Optional[int] = ..., deferred_s: _Optional[float] = ..., transfer_s: _Optional[float] = ..., total_s: _Optional[float] = ...) -> None: ...

class LostPlace(_message.Message):
    __slots__ = ("prefill_node", "decode_node", "node", "time_s", "reason")
    PREFILL_NODE_FIELD_NUMBER: _ClassVar[int]
    DECODE_NODE_FIELD_NUMBER: _ClassVar[int]
    NODE_FIELD_NUMBER: _ClassVar[int]
    TIME_S_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    prefill_node: str
    decode_node: str
    node: str
    time_s: float
    reason: str
    def __init__(self, prefill_node: _Optional[str] = ..., decode_node: _Optional[str] = ..., node: _Optional[str] = ..., time_s: _Optional[float] = ..., reason: _Optional[str] = ...) -> None: ...

class FinishedRequest(_message.Message):
    __slots__ = ("number", "request_id", "sequence_id", "num_prompt_tokens", "num_output_tokens", "num_cached_tokens", "num_preemptions", "num_placements", "prefill_node", "decode_node", "arrival_s", "ended_s", "queue_s", "prefill_s", "decode_s", "handoff", "finish_reason", "handed_off_s", "lost_places")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_ID_FIELD_NUMBER: _ClassVar[int]
    NUM_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    NUM_PLACEMENTS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_NODE_FIELD_NUMBER: _ClassVar[int]
    DECODE_NODE_FIELD_NUMBER: _ClassVar[int]
    ARRIVAL_S_FIELD_NUMBER: _ClassVar[int]
    ENDED_S_FIELD_NUMBER: _ClassVar[int]
    QUEUE_S_FIELD_NUMBER: _ClassVar[int]
    PREFILL_S_FIELD_NUMBER: _ClassVar[int]
    DECODE_S_FIELD_NUMBER: _ClassVar[int]
    HANDOFF_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    HANDED_OFF_S_FIELD_NUMBER: _ClassVar[int]
    LOST_PLACES_FIELD_NUMBER: _ClassVar[int]
    number: int
    request_id: str
    sequence_id: str
    num_prompt_tokens: int
    num_output_tokens: int
    num_cached_tokens: int
    num_preemptions: int
    num_placements: int
    prefill_node: str
    decode_node: str
    arrival_s: float
    ended_s: float
    queue_s: float
    prefill_s: float
    decode_s: float
    handoff: Handoff
    finish_reason: _flowkv_pb2.FinishReason
    handed_off_s: float
    lost_places: _containers.RepeatedCompositeFieldContainer[LostPlace]
    def __init__(self, number: _Optional[int] = ..., request_id: _Optional[str] = ..., sequence_id: _Optional[str] = ..., num_prompt_tokens: _Optional[int] = ..., num_output_tokens: _Optional[int] = ..., num_cached_tokens: _Optional[int] = ..., num_preemptions: _Optional[int] = ..., num_placements: _Optional[int] = ..., prefill_node: _Optional[str] = ..., decode_node: _Optional[str] = ..., arrival_s: _Optional[float] = ..., ended_s: _Optional[float] = ..., queue_s: _Optional[float] = ..., prefill_s: _Optional[float] = ..., decode_s: _Optional[float] = ..., handoff: _Optional[_Union[Handoff, _Mapping]] = ..., finish_reason: _Optional[_Union[_flowkv_pb2.FinishReason, str]] = ..., handed_off_s: _Optional[float] = ..., lost_places: _Optional[_Iterable[_Union[LostPlace, _Mapping]]] = ...) -> None: ...

class GetRequestsResponse(_message.Message):
    __slots__ = ("requests", "oldest_number")
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    OLDEST_NUMBER_FIELD_NUMBER: _ClassVar[int]
    requests: _containers.RepeatedCompositeFieldContainer[FinishedRequest]
    oldest_number: int
    def __init__(self, requests: _Optional[_Iterable[_Union[FinishedRequest, _Mapping]]] = ..., oldest_number: _Optional[int] = ...) -> None: ...

class SetRoleRequest(_message.Message):
    __slots__ = ("node", "role")
    NODE_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    node: str
    role: Role
    def __init__(self, node: _Optional[str] = ..., role: _Optional[_Union[Role, str]] = ...) -> None: ...

class SetRoleResponse(_message.Message):
    __slots__ = ("node",)
    NODE_FIELD_NUMBER: _ClassVar[int]
    node: Node
    def __init__(self, node: _Optional[_Union[Node, _Mapping]] = ...) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ("node",)
    NODE_FIELD_NUMBER: _ClassVar[int]
    node: str
    def __init__(self, node: _Optional[str] = ...) -> None: ...

class DrainResponse(_message.Message):
    __slots__ = ("node",)
    NODE_FIELD_NUMBER: _ClassVar[int]
    node: Node
    def __init__(self, node: _Optional[_Union[Node, _Mapping]] = ...) -> None: ...
