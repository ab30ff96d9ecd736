"""What became of requests, counted where every one of them passes: in the dispatcher.

Whoever asks (HTTP, gRPC, `Engine.generate`), each sequence is counted once, as vLLM does: `n`
answers are `n` requests. A count belongs to the node that did the work: first tokens to the one
that computed the prompt, later ones to the one that decoded, an end to the one that held the
sequence; what no node had to do with belongs to None.

The dispatcher's lock guards it. `arrived` runs for every token of every stream.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container
from dataclasses import dataclass, field

from flowkv_jax.cluster.dispatch_events import SequenceRecord
from flowkv_jax.cluster.trouble import Trouble
from flowkv_jax.errors import MaxQueuedTokensError, QueueOverflowError
from flowkv_jax.metrics import buckets
from flowkv_jax.metrics.distribution import Distribution, counting
from flowkv_jax.metrics.node_tally import NodeTally
from flowkv_jax.sampling_params import SamplingParams
from flowkv_jax.sequence import HandoffReport

MAX_NODES = 256
"""Names whose counts are kept; of those that have left, the ones that came first go."""


@dataclass(slots=True)
class TransferTally:
    """K/V that moved by one kind of path and one backend; values are of one transfer each."""

    calls: Distribution = field(default_factory=counting(buckets.NUM_CALLS))
    runs: Distribution = field(default_factory=counting(buckets.NUM_CALLS))
    num_bytes: Distribution = field(default_factory=counting(buckets.TRANSFER_BYTES))
    seconds: Distribution = field(default_factory=counting(buckets.HANDOFF_S))

    def copy(self) -> TransferTally:
        values = (self.calls, self.runs, self.num_bytes, self.seconds)
        return TransferTally(*(value.copy() for value in values))


@dataclass(slots=True)
class PhaseTally:
    """Seconds of hand-offs by phase; see `HandoffReport`."""

    deferred: Distribution = field(default_factory=counting(buckets.HANDOFF_S))
    transfer: Distribution = field(default_factory=counting(buckets.HANDOFF_S))
    total: Distribution = field(default_factory=counting(buckets.HANDOFF_S))

    def copy(self) -> PhaseTally:
        return PhaseTally(self.deferred.copy(), self.transfer.copy(), self.total.copy())


@dataclass(slots=True)
class LinkTally:
    """Hand-offs from one node to another."""

    num_handoffs: int = 0
    num_bytes: int = 0


class RequestTallies:
    """See the module. Counts only ever rise.

    Attributes:
        nodes: by name; None for what no node had to do with.
        transfers: by kind of path and backend.
        links: by source and destination.
        refusals: by vLLM's names of the bound that was reached.
        lost_places, redirects: by reason; what was to move, or to be served, elsewhere.
        num_failovers: placements after a lost one.
        failed_transfers: hand-offs that failed, by destination.
        lost_acknowledgements: by source.
    """

    def __init__(self) -> None:
        self.nodes: dict[str | None, NodeTally] = {None: NodeTally()}
        self.phases = PhaseTally()
        self.transfers: dict[tuple[str, str], TransferTally] = {}
        self.links: dict[tuple[str, str], LinkTally] = {}
        self.refusals = Counter({"max_num_queued_reqs": 0, "max_num_queued_tokens": 0})
        self.lost_places: Counter[Trouble] = Counter()
        self.redirects: Counter[Trouble] = Counter()
        self.num_failovers = 0
        self.failed_transfers: Counter[str] = Counter()
        self.lost_acknowledgements: Counter[str] = Counter()

    def arrived(self, node: str, gap_s: float, num_tokens: int) -> None:
        """Tokens after the first came from a node, `gap_s` after the last that was known."""
        tally = self.nodes.get(node)
        if tally is None:
            tally = self._new(node)
        tally.num_output_tokens += num_tokens
        if num_tokens == 1:
            tally.inter_token_s.add(gap_s)
        else:
            tally.inter_token_s.add(gap_s / num_tokens, num_tokens)

    def first_token(
        self,
        node: str,
        waited_s: float,
        num_tokens: int,
        num_prompt: int,
        num_cached: int,
        *,
        is_external: bool = False,
    ) -> None:
        """The first tokens of a sequence came from a node.

        Args:
            waited_s: since it arrived.
            num_tokens: that came; more than one where news were held up.
            num_prompt, num_cached: tokens of its prompt, and those found in the node's cache.
            is_external: another server computed the prompt.
        """
        tally = self._of(node)
        tally.num_output_tokens += num_tokens
        tally.num_prompt_tokens += num_prompt
        if is_external:
            tally.num_external_tokens += num_prompt
        else:
            tally.num_cached_tokens += min(num_cached, num_prompt)
        tally.first_token_s.add(waited_s)

    def placed(self, prefill_node: str, decode_node: str, *, is_failover: bool) -> None:
        """A sequence was given nodes; `is_failover`: it had lost others before."""
        self._of(prefill_node).num_prefills += 1
        self._of(decode_node).num_decodes += 1
        self.num_failovers += is_failover

    def handed_off(self, report: HandoffReport) -> None:
        """A sequence has come to its decode node."""
        self._of(report.dst).received(report)
        link = self.links.setdefault((report.src, report.dst), LinkTally())
        link.num_handoffs += 1
        link.num_bytes += report.data_bytes
        self.phases.deferred.add(report.deferred_s)
        self.phases.transfer.add(report.transfer_s)
        self.phases.total.add(report.total_s)
        if report.calls:
            transfer = self.transfers.setdefault((report.path, report.backend), TransferTally())
            transfer.calls.add(report.calls)
            transfer.runs.add(report.runs)
            transfer.num_bytes.add(report.data_bytes)
            transfer.seconds.add(report.transfer_s)

    def handoff_failed(self, node: str) -> None:
        """K/V could not be moved to a node."""
        self.failed_transfers[node] += 1

    def acknowledgement_lost(self, node: str) -> None:
        """A node does not know that what it handed off has arrived."""
        self.lost_acknowledgements[node] += 1

    def ended(
        self, node: str | None, record: SequenceRecord, params: SamplingParams, *, is_first: bool
    ) -> None:
        """A sequence has ended at a node; see `NodeTally.ended`."""
        self._of(node).ended(record, params, is_first=is_first)

    def refused(self, error: Exception) -> None:
        """A request was not taken in. Only full queues are counted."""
        if isinstance(error, MaxQueuedTokensError):
            self.refusals["max_num_queued_tokens"] += 1
        elif isinstance(error, QueueOverflowError):
            self.refusals["max_num_queued_reqs"] += 1

    def copy(self) -> RequestTallies:
        """For a reader who shares no lock."""
        other = RequestTallies()
        other.nodes = {node: tally.copy() for node, tally in self.nodes.items()}
        other.phases = self.phases.copy()
        other.transfers = {key: tally.copy() for key, tally in self.transfers.items()}
        other.links = {
            key: LinkTally(link.num_handoffs, link.num_bytes) for key, link in self.links.items()
        }
        other.refusals, other.num_failovers = self.refusals.copy(), self.num_failovers
        other.lost_places, other.redirects = self.lost_places.copy(), self.redirects.copy()
        other.failed_transfers = self.failed_transfers.copy()
        other.lost_acknowledgements = self.lost_acknowledgements.copy()
        return other

    def joined(self, node: str, live: Container[str]) -> None:
        """A node is there, perhaps again. Of others that are not in `live` those that came first
        are forgotten if there are too many."""
        self._of(node)
        for name in [name for name in self.nodes if name is not None and name not in live]:
            if len(self.nodes) <= MAX_NODES:
                return
            if name != node:
                self._forget(name)

    def _of(self, node: str | None) -> NodeTally:
        return self.nodes.get(node) or self._new(node)

    def _new(self, node: str | None) -> NodeTally:
        tally = self.nodes[node] = NodeTally()
        return tally

    def _forget(self, node: str) -> None:
        del self.nodes[node]
        self.failed_transfers.pop(node, None)
        self.lost_acknowledgements.pop(node, None)
        for link in [link for link in self.links if node in link]:
            del self.links[link]
