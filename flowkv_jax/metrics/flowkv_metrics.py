"""Our own metrics: hand-offs, loads and roles, the state of each cache, failures, the front.

`engine` is a node's name, as in `vllm_metrics`. What is about the cluster as a whole has no such
label and goes on when nodes leave.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client.core import Metric

from flowkv_jax.cluster.trouble import Trouble
from flowkv_jax.controller.decision_log import DecisionKind
from flowkv_jax.controller.role import Role
from flowkv_jax.controller.snapshot import NodeState, NodeView, Regime
from flowkv_jax.load import NodeLoad
from flowkv_jax.metrics import buckets
from flowkv_jax.metrics.distribution import Distribution, Histogram
from flowkv_jax.metrics.families import Labels, counter, gauge, histogram, state_set
from flowkv_jax.metrics.node_tally import NodeTally
from flowkv_jax.metrics.reading import Reading, ServedModel
from flowkv_jax.metrics.request_tallies import TransferTally

_REGIMES = [regime.value for regime in Regime]
_ROLES = [role.value for role in Role]
_STATES = [state.value for state in NodeState]


class FlowKVMetrics:
    """One scrape's families; see `VllmMetrics`."""

    def __init__(self, reading: Reading, model: ServedModel) -> None:
        self._reading = reading
        self._front: Labels = {"model_name": model.name}
        self._nodes = reading.snapshot.nodes

    def collect(self) -> Iterator[Metric]:
        yield from self._handoffs()
        yield from self._caches()
        yield from self._queues()
        yield from self._roles()
        yield from self._loads()
        yield from self._failures()

    def _handoffs(self) -> Iterator[Metric]:
        requests = self._reading.requests
        values: list[tuple[str, str, buckets.Bounds, str]] = [
            ("calls", "Calls of a transfer of K/V.", buckets.NUM_CALLS, "calls"),
            ("runs", "Runs of blocks of a transfer of K/V.", buckets.NUM_CALLS, "runs"),
            ("bytes", "Bytes of a transfer of K/V.", buckets.TRANSFER_BYTES, "num_bytes"),
            ("seconds", "Seconds of a transfer of K/V.", buckets.HANDOFF_S, "seconds"),
        ]
        for name, meaning, bounds, field in values:
            yield histogram(
                f"flowkv_kv_transfer_{name}",
                meaning,
                bounds,
                [
                    ({**self._front, "path": path, "backend": backend}, _of(tally, field))
                    for (path, backend), tally in requests.transfers.items()
                ],
            )
        phases = requests.phases
        yield histogram(
            "flowkv_handoff_seconds",
            "Hand-offs by phase: waiting for room, moving K/V, from the reservation to the end.",
            buckets.HANDOFF_S,
            [
                ({**self._front, "phase": "deferred"}, phases.deferred.histogram()),
                ({**self._front, "phase": "transfer"}, phases.transfer.histogram()),
                ({**self._front, "phase": "total"}, phases.total.histogram()),
            ],
        )
        there = {node.name for node in self._nodes}
        links = [
            ({**self._front, "source": source, "destination": destination}, link)
            for (source, destination), link in requests.links.items()
            if source in there and destination in there
        ]
        yield counter(
            "flowkv_link_handoffs",
            "Hand-offs from one node to another.",
            [(labels, link.num_handoffs) for labels, link in links],
        )
        yield counter(
            "flowkv_link_bytes",
            "Bytes of K/V handed off from one node to another.",
            [(labels, link.num_bytes) for labels, link in links],
        )

    def _caches(self) -> Iterator[Metric]:
        yield self._load_gauge("kv_blocks", "Blocks of the KV cache.", lambda load: load.num_blocks)
        yield self._load_gauge(
            "kv_free_blocks",
            "Blocks that can be handed out now, cached ones that nobody holds included.",
            lambda load: load.num_free_blocks,
        )
        yield self._load_gauge(
            "kv_fragmentation",
            "1 - largest free segment / free blocks; 0 when nothing is free.",
            lambda load: load.fragmentation,
        )
        yield self._node_gauge(
            "kv_cached_prefix_blocks",
            "Blocks that the prefix directory knows at a node.",
            lambda node: node.cached_prefix_blocks,
        )

    def _queues(self) -> Iterator[Metric]:
        reading = self._reading
        for name, meaning, value in (
            ("pending_sequences", "Sequences that no node serves.", reading.num_pending),
            (
                "waiting_requests",
                "Requests without a first token, wherever they are.",
                reading.num_waiting_requests,
            ),
            (
                "waiting_prompt_tokens",
                "Tokens of the prompts of requests without a first token.",
                reading.num_waiting_tokens,
            ),
        ):
            yield gauge(f"flowkv_{name}", meaning, [(self._front, value)])
        loads: list[tuple[str, str, Callable[[NodeLoad], float]]] = [
            ("queued_tokens", "Prompt tokens queued at a node.", lambda x: x.num_waiting_tokens),
            (
                "num_requests_swapped",
                "Requests whose blocks are in the host's memory.",
                lambda x: x.num_requests_swapped,
            ),
            (
                "num_requests_sending",
                "Prompts computed here whose K/V have not left yet.",
                lambda x: x.num_requests_sending,
            ),
            (
                "num_requests_receiving",
                "Requests that hold blocks for K/V to come.",
                lambda x: x.num_requests_receiving,
            ),
            (
                "token_budget_used",
                "Share of the step's token budget that the last step used, 0 to 1.",
                lambda x: x.token_budget_used,
            ),
        ]
        for name, meaning, of_load in loads:
            yield self._load_gauge(name, meaning, of_load)
        yield self._node_gauge(
            "queue_seconds",
            "Predicted time until the prompts at a node are computed.",
            lambda node: node.queue_s,
        )
        placed: list[tuple[str, Callable[[NodeTally], int]]] = [
            ("prefill", lambda tally: tally.num_prefills),
            ("decode", lambda tally: tally.num_decodes),
        ]
        tallies = reading.requests.nodes
        yield counter(
            "flowkv_placements",
            "Sequences given to a node, by what for.",
            [
                ({**self._labels(node), "role": role}, count(tallies.get(node.name) or NodeTally()))
                for node in self._nodes
                for role, count in placed
            ],
        )

    def _roles(self) -> Iterator[Metric]:
        labels = [(self._labels(node), node) for node in self._nodes]
        yield state_set(
            "flowkv_node_role",
            "The role of a node: 1 for the one it has.",
            "role",
            _ROLES,
            [(one, node.role.value) for one, node in labels],
        )
        yield state_set(
            "flowkv_node_state",
            "Whether a node takes work: 1 for the state it is in.",
            "state",
            _STATES,
            [(one, node.state.value) for one, node in labels],
        )
        yield self._node_gauge(
            "node_epoch", "Rises when a node of this name joins again.", lambda node: node.epoch
        )
        yield counter(
            "flowkv_role_switches",
            "Changes of roles that were carried out, by role taken.",
            [
                ({**self._front, "role": role.value}, self._reading.role_switches.get(role, 0))
                for role in Role
            ],
        )
        yield counter(
            "flowkv_decisions",
            "The controller's decisions, by kind.",
            [
                ({**self._front, "kind": kind.value}, self._reading.num_decisions.get(kind, 0))
                for kind in DecisionKind
            ],
        )

    def _loads(self) -> Iterator[Metric]:
        snapshot = self._reading.snapshot
        yield gauge(
            "flowkv_load_score",
            "Load C of a node by the weights of each role, 0 to 1.",
            [
                ({**self._labels(node), "role": role}, load)
                for node in self._nodes
                for role, load in (("prefill", node.prefill_load), ("decode", node.decode_load))
            ],
        )
        yield gauge(
            "flowkv_role_load",
            "Load of a role as a whole; above 1 nobody does its work.",
            [
                ({**self._front, "role": "prefill"}, snapshot.prefill_load),
                ({**self._front, "role": "decode"}, snapshot.decode_load),
            ],
        )
        yield gauge(
            "flowkv_role_load_threshold",
            "Loads at or under which a role is idle, at or above which it is overloaded.",
            [
                ({**self._front, "level": "low"}, snapshot.role_load_low),
                ({**self._front, "level": "high"}, snapshot.role_load_high),
            ],
        )
        yield state_set(
            "flowkv_regime",
            "The scheduler's regime: 1 for the one it is in.",
            "regime",
            _REGIMES,
            [(self._front, snapshot.regime.value)],
        )
        yield gauge(
            "flowkv_prefill_demand_nodes",
            "Nodes that the prompts of late keep busy.",
            [(self._front, snapshot.prefill_demand_nodes)],
        )

    def _failures(self) -> Iterator[Metric]:
        requests = self._reading.requests
        yield counter(
            "flowkv_failovers",
            "Sequences placed anew after they had lost their place.",
            [(self._front, requests.num_failovers)],
        )
        for name, meaning, counts in (
            ("lost_places", "Sequences that lost their place, by reason.", requests.lost_places),
            (
                "redirects",
                "Sequences to be decoded elsewhere than planned, by reason.",
                requests.redirects,
            ),
        ):
            yield counter(
                f"flowkv_{name}",
                meaning,
                [({**self._front, "reason": reason.value}, counts[reason]) for reason in Trouble],
            )

    def _labels(self, node: NodeView) -> Labels:
        return {**self._front, "engine": node.name}

    def _node_gauge(self, name: str, meaning: str, value: Callable[[NodeView], float]) -> Metric:
        samples = [(self._labels(node), value(node)) for node in self._nodes]
        return gauge(f"flowkv_{name}", meaning, samples)

    def _load_gauge(self, name: str, meaning: str, value: Callable[[NodeLoad], float]) -> Metric:
        samples = [
            (self._labels(node), value(node.load)) for node in self._nodes if node.load is not None
        ]
        return gauge(f"flowkv_{name}", meaning, samples)


def _of(tally: TransferTally, field: str) -> Histogram:
    distribution: Distribution = getattr(tally, field)
    return distribution.histogram()
