"""What the controller hears of nodes, and what it shows of them. Plain values."""

from __future__ import annotations

import enum
from dataclasses import asdict, dataclass
from typing import Any

from flowkv_jax.checks import check_int, check_real
from flowkv_jax.controller.role import Role
from flowkv_jax.load import LinkLoad, NodeLoad
from flowkv_jax.metrics.distribution import Histogram

NUM_POOL_CELLS = 128
"""Slices of a pool that a node tells of at most."""

MAX_COUNT = 1 << 40
"""Counts from outside are at most this, so that their sums stay exact."""


class NodeState(enum.Enum):
    """Whether a node may be given work. `node_lifecycle` has the legal moves.

    ACTIVE takes work of its role. SWITCHING takes only what both its roles do, until what it has of
    the work it gives up is done (or, if nobody else is left, any). LEAVING never takes work again;
    DRAINED has none left and may be stopped.
    """

    ACTIVE = "active"
    SWITCHING = "switching"
    LEAVING = "leaving"
    DRAINED = "drained"


class Regime(enum.Enum):
    """The three regimes of FlowKV's scheduler; see `policy`."""

    NORMAL = "normal"
    IMBALANCED = "imbalanced"
    EXTREME = "extreme"


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeInfo:
    """What a node says of itself when it joins.

    Attributes:
        name: unique among live nodes; a node that comes back may keep it.
        role: what it was started for.
        host: nodes of one host reach each other faster.
        num_blocks, block_size: of its pool; `block_size` in tokens.
        block_bytes: of one block; 0 if not known, then learned from hand-offs.
        max_num_seqs, max_num_batched_tokens: of its scheduler.
        relative_speed: of its device, against the others'; 1 if not known.
    """

    name: str
    role: Role
    num_blocks: int
    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    host: str = ""
    block_bytes: int = 0
    relative_speed: float = 1.0

    def __post_init__(self) -> None:
        """Raises `ValidationError`: a number is out of range."""
        for field in ("num_blocks", "block_size", "max_num_seqs", "max_num_batched_tokens"):
            check_int(field, getattr(self, field), 1, MAX_COUNT)
        check_int("block_bytes", self.block_bytes, 0, MAX_COUNT)
        check_real("relative_speed", self.relative_speed, 1e-6, 1e6)


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeReport:
    """What a node tells regularly, about every 100 ms.

    Attributes:
        load: its queues and cache.
        device_utilisation, memory_bandwidth_utilisation: in [0, 1]; None if not measured.
        prefill_tokens_per_s: while it computed prompts since the last report; None if it did not.
        decode_step_s: mean time of a step that decoded since the last report; None if none did.
        added_blocks: hashes of blocks that are cached now and were not at the last report, in the
            order of their chains.
        removed_blocks: hashes of those that were and are not.
        prefixes_cleared: forget what was said of cached blocks before; comes before `added_blocks`.
        pool_map: its pool in slices, see `SegmentAllocator.used_map`; empty if not told.
        link_loads: of the ways to other nodes; empty where no links are configured.
        step_tokens: of all steps since the node began, by `metrics.buckets.STEP_TOKENS`.
    """

    load: NodeLoad
    device_utilisation: float | None = None
    memory_bandwidth_utilisation: float | None = None
    prefill_tokens_per_s: float | None = None
    decode_step_s: float | None = None
    added_blocks: tuple[bytes, ...] = ()
    removed_blocks: tuple[bytes, ...] = ()
    prefixes_cleared: bool = False
    pool_map: bytes = b""
    link_loads: tuple[LinkLoad, ...] = ()
    step_tokens: Histogram = Histogram()


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeView:
    """A node as the policy sees it, and whoever watches.

    Attributes:
        name, host, epoch: which; the epoch rises when a name joins again.
        role: what it does now; `home_role` what it was started for, or given by an administrator.
        state: whether it takes work; `next_role` is where a SWITCHING node goes.
        state_since_s, role_since_s: when these began.
        takes_prefill, takes_decode: it is given such work.
        prefill_load, decode_load: the score C by the weights of each role, over the load window;
            for decode with what is booked and not reported yet.
        metrics: the eight metrics by name, averaged over the window; empty before a report.
        load: as last reported; None before a report. `reported_s` is when.
        queue_s: predicted time until prompts that are booked or queued here are computed.
        booked_prefills, booked_prefill_tokens: prompts under way here, and what of them is to be
            computed.
        booked_sends: prompts computed here that have not come to their decode node.
        booked_decodes: sequences that are decoded here, or will be.
        booked_blocks: blocks they all need.
        prefill_tokens_per_s: estimated.
        decode_step_s: as last measured.
        cached_prefix_blocks: blocks the prefix directory knows here.
        pool_map: as last reported: its pool in slices of the id range, each the share in use, 0 to
            255; empty if not told.
        link_loads: as last reported; empty where no links are configured.
    """

    name: str
    host: str
    epoch: int
    role: Role
    home_role: Role
    state: NodeState
    next_role: Role | None
    state_since_s: float
    role_since_s: float
    takes_prefill: bool
    takes_decode: bool
    prefill_load: float
    decode_load: float
    metrics: dict[str, float | None]
    load: NodeLoad | None
    reported_s: float | None
    queue_s: float
    booked_prefills: int
    booked_prefill_tokens: int
    booked_sends: int
    booked_decodes: int
    booked_blocks: int
    prefill_tokens_per_s: float
    decode_step_s: float | None
    cached_prefix_blocks: int
    pool_map: bytes
    link_loads: tuple[LinkLoad, ...]

    @property
    def booked_work(self) -> int:
        """Sequences that are booked here."""
        return self.booked_prefills + self.booked_sends + self.booked_decodes

    def to_dict(self) -> dict[str, Any]:
        values: dict[str, Any] = {name: getattr(self, name) for name in self.__slots__}
        for name in ("role", "home_role", "state"):
            values[name] = values[name].value
        values["next_role"] = self.next_role.value if self.next_role else None
        values["load"] = self.load.to_dict() if self.load else None
        values["pool_map"] = self.pool_map.hex()
        values["link_loads"] = [asdict(link) for link in self.link_loads]
        return values


@dataclass(frozen=True, slots=True)
class ClusterSnapshot:
    """All nodes at one moment, by name.

    Attributes:
        now_s: the moment, on the caller's clock.
        regime: as the policy last found it.
        prefill_load, decode_load: of each role as a whole, as the policy last found them; above 1
            means that work of the role has nobody to do it.
        prefill_demand_nodes: predicted seconds of prefill that arrive in a second, over the demand
            window: how many nodes they keep busy.
        nodes: every node that has not left.
        role_load_low, role_load_high: at or under the first a role is idle, at or above the second
            it is overloaded.
    """

    now_s: float
    regime: Regime
    prefill_load: float
    decode_load: float
    prefill_demand_nodes: float
    nodes: tuple[NodeView, ...]
    role_load_low: float
    role_load_high: float

    def to_dict(self) -> dict[str, Any]:
        return {
            "now_s": self.now_s,
            "regime": self.regime.value,
            "prefill_load": self.prefill_load,
            "decode_load": self.decode_load,
            "prefill_demand_nodes": self.prefill_demand_nodes,
            "nodes": [node.to_dict() for node in self.nodes],
            "role_load_low": self.role_load_low,
            "role_load_high": self.role_load_high,
        }
