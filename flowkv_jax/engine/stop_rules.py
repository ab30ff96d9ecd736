"""When a token ends its request. Stop strings are not here: they need text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from flowkv_jax.outputs import FinishReason
from flowkv_jax.request import Request


@dataclass(frozen=True, slots=True)
class StopRule:
    """One request's rules, worked out once.

    Attributes:
        token_limit: prompt plus output never exceeds this.
        min_output_tokens: shorter outputs end for length only.
        eos_token_id: the model's primary end-of-sequence token; None if it is ignored.
        stop_token_ids: the request's own, and the model's further end tokens unless ignored.
    """

    token_limit: int
    min_output_tokens: int
    eos_token_id: int | None
    stop_token_ids: frozenset[int]

    @classmethod
    def of(cls, request: Request, eos_token_ids: Sequence[int]) -> StopRule:
        """Rules of `request` for a model whose end tokens are `eos_token_ids`, primary first."""
        params = request.sampling_params
        token_limit = request.max_total_tokens
        if params.max_tokens is not None:
            token_limit = min(token_limit, request.num_prompt_tokens + params.max_tokens)
        eos_token_id: int | None = None
        stop_token_ids = frozenset(params.stop_token_ids or ())
        if eos_token_ids and not params.ignore_eos:
            eos_token_id = eos_token_ids[0]
            stop_token_ids |= frozenset(eos_token_ids[1:])
        return cls(token_limit, params.min_tokens, eos_token_id, stop_token_ids)

    def judge(self, request: Request) -> tuple[FinishReason, int | None] | None:
        """Finish and stop reason if the request's newest token ends it.

        The stop reason is None for the primary end token, and the token for any other.
        """
        token = request.token_ids[-1]
        is_end = token == self.eos_token_id or token in self.stop_token_ids
        if is_end and request.num_output_tokens >= self.min_output_tokens:
            return "stop", None if token == self.eos_token_id else token
        if len(request.token_ids) >= self.token_limit:
            return "length", None
        return None
