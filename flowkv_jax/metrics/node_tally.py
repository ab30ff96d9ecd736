"""What one node did for requests, as the dispatcher heard of it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, fields

from flowkv_jax.cluster.dispatch_events import SequenceRecord
from flowkv_jax.metrics import buckets
from flowkv_jax.metrics.distribution import Distribution, counting
from flowkv_jax.outputs import FinishReason
from flowkv_jax.sampling_params import SamplingParams
from flowkv_jax.sequence import HandoffReport

_OWN_ENDS = ("stop", "length")


_latency = counting(buckets.REQUEST_LATENCY_S)
_tokens = counting(buckets.REQUEST_TOKENS)


@dataclass(slots=True)
class NodeTally:
    """Counts of one node. Distributions are of sequences that ended by themselves ("stop",
    "length"), unless said otherwise.

    Attributes:
        num_prompt_tokens: of sequences whose first token came from here.
        num_cached_tokens, num_external_tokens: of these, found in its prefix cache, and computed by
            another server for sequences that are decoded here.
        num_output_tokens: that came from here.
        num_blocks_expected, num_blocks_received: of sequences handed off to here; the latter had
            to be sent.
        num_prefills, num_decodes: placements.
        ends: sequences by how they ended.
        first_token_s: from arrival to first token, of all that got one.
        inter_token_s: from token to token, of all.
        whole_s: from arrival to end; `queue_s` to its first step, `prefill_s` from there to the
            first token, `decode_s` from there to the last, `inference_s` both.
        per_output_token_s: `decode_s` for each token after the first.
        transfer_s, overhead_s, transfer_bytes, num_descriptors: of each hand-off to here that moved
            blocks: moving them, the time before that in which nothing else was done for it (K/V
            were complete and room was asked for), bytes and calls.
    """

    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_external_tokens: int = 0
    num_output_tokens: int = 0
    num_blocks_expected: int = 0
    num_blocks_received: int = 0
    num_prefills: int = 0
    num_decodes: int = 0
    ends: Counter[FinishReason] = field(default_factory=Counter)
    first_token_s: Distribution = field(default_factory=counting(buckets.TIME_TO_FIRST_TOKEN_S))
    inter_token_s: Distribution = field(default_factory=counting(buckets.INTER_TOKEN_S))
    per_output_token_s: Distribution = field(default_factory=counting(buckets.INTER_TOKEN_S))
    whole_s: Distribution = field(default_factory=_latency)
    queue_s: Distribution = field(default_factory=_latency)
    inference_s: Distribution = field(default_factory=_latency)
    prefill_s: Distribution = field(default_factory=_latency)
    decode_s: Distribution = field(default_factory=_latency)
    prompt_tokens: Distribution = field(default_factory=_tokens)
    computed_tokens: Distribution = field(default_factory=_tokens)
    output_tokens: Distribution = field(default_factory=_tokens)
    max_tokens: Distribution = field(default_factory=_tokens)
    num_answers: Distribution = field(default_factory=counting(buckets.NUM_ANSWERS))
    num_preemptions: Distribution = field(default_factory=counting(buckets.NUM_PREEMPTIONS))
    transfer_s: Distribution = field(default_factory=counting(buckets.TRANSFER_S))
    overhead_s: Distribution = field(default_factory=counting(buckets.TRANSFER_OVERHEAD_S))
    transfer_bytes: Distribution = field(default_factory=counting(buckets.TRANSFER_BYTES))
    num_descriptors: Distribution = field(default_factory=counting(buckets.NUM_DESCRIPTORS))

    def ended(self, record: SequenceRecord, params: SamplingParams, *, is_first: bool) -> None:
        """A sequence has ended here.

        Args:
            is_first: of the answers to its request.
        """
        self.ends[record.finish_reason] += 1
        if record.finish_reason not in _OWN_ENDS:
            return
        self._count_times(record)
        self.prompt_tokens.add(record.num_prompt_tokens)
        self.computed_tokens.add(max(record.num_prompt_tokens - record.num_cached_tokens, 0))
        self.output_tokens.add(record.num_output_tokens)
        self.num_preemptions.add(record.num_preemptions)
        if params.max_tokens is not None:
            self.max_tokens.add(params.max_tokens)
        if is_first:
            self.num_answers.add(params.n)

    def _count_times(self, record: SequenceRecord) -> None:
        self.whole_s.add(record.ended_s - record.arrival_s)
        if record.queue_s is None or record.prefill_s is None or record.decode_s is None:
            return  # it ended without a token
        self.queue_s.add(record.queue_s)
        self.prefill_s.add(record.prefill_s)
        self.decode_s.add(record.decode_s)
        self.inference_s.add(record.prefill_s + record.decode_s)
        num_others = record.num_output_tokens - 1
        self.per_output_token_s.add(record.decode_s / num_others if num_others > 0 else 0.0)

    def received(self, report: HandoffReport) -> None:
        """A sequence has come to here."""
        self.num_blocks_expected += report.num_blocks
        self.num_blocks_received += report.num_blocks - report.num_reused_blocks
        if report.calls:
            self.transfer_s.add(report.transfer_s)
            self.overhead_s.add(max(report.total_s - report.transfer_s, 0.0))
            self.transfer_bytes.add(report.data_bytes)
            self.num_descriptors.add(report.calls)

    def copy(self) -> NodeTally:
        other = NodeTally()
        for name in _FIELDS:
            value = getattr(self, name)
            setattr(other, name, value if isinstance(value, int) else value.copy())
        return other


_FIELDS = tuple(one.name for one in fields(NodeTally))
