"""From what a step yielded to what is said of each sequence."""

from __future__ import annotations

from flowkv_jax.engine.model_runner import PromptScores
from flowkv_jax.engine.output_processor import LogprobsRow
from flowkv_jax.engine.sampler import SamplerOutput
from flowkv_jax.engine.served import Served
from flowkv_jax.errors import DeadlineExceeded
from flowkv_jax.sequence import PromptLogprobs, SequenceUpdate


def token_update(
    served: Served, token_id: int, samples: SamplerOutput, row: int, vocab_size: int
) -> SequenceUpdate:
    """The newest token, already appended to the request, and the end if it was the last.

    Args:
        samples, row: where its logprobs are, if the request asked for them.
    """
    request = served.request
    wanted = request.sampling_params.logprobs
    logprobs = None
    if wanted is not None:
        logprobs = (_logprobs_row(samples, row, vocab_size if wanted == -1 else wanted),)
    return SequenceUpdate(
        sequence_id=request.request_id,
        attempt=served.spec.attempt,
        start=request.num_output_tokens - 1,
        token_ids=(token_id,),
        logprobs=logprobs,
        finish_reason=request.finish_reason,
        stop_reason=request.stop_reason,
        num_cached_tokens=request.num_cached_tokens,
        num_preemptions=request.num_preemptions,
        scheduled_s=request.scheduled_s,
    )


def prompt_update(served: Served, scores: PromptScores, vocab_size: int) -> SequenceUpdate:
    """Logprobs of a chunk of the prompt."""
    request = served.request
    wanted = request.sampling_params.num_prompt_logprobs(vocab_size) or 0
    token_ids = request.prompt_token_ids[scores.start : scores.start + scores.count]
    rows = tuple(_logprobs_row(scores.samples, row, wanted) for row in range(scores.count))
    return SequenceUpdate(
        sequence_id=request.request_id,
        attempt=served.spec.attempt,
        start=request.num_output_tokens,
        prompt_logprobs=PromptLogprobs(scores.start, tuple(token_ids), rows),
    )


def late_update(served: Served, now_s: float) -> SequenceUpdate:
    """It has run past its deadline."""
    request = served.request
    error = DeadlineExceeded(
        f"request {request.request_id} ran past its deadline after "
        f"{now_s - request.arrival_s:.3f} s and {request.num_output_tokens} output tokens"
    )
    return served.failed(error)


def _logprobs_row(samples: SamplerOutput, row: int, wanted: int) -> LogprobsRow:
    if samples.logprob is None or samples.rank is None:
        raise RuntimeError("logprobs were asked for and not computed")
    top_ids: list[int] = []
    top_logprobs: list[float] = []
    if wanted and samples.top_ids is not None and samples.top_logprobs is not None:
        top_ids = samples.top_ids[row, :wanted].tolist()
        top_logprobs = samples.top_logprobs[row, :wanted].tolist()
    return LogprobsRow(float(samples.logprob[row]), int(samples.rank[row]), top_ids, top_logprobs)
