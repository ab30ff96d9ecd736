"""A sequence that lives on a node."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from flowkv_jax.cluster.node_port import SequenceKey
from flowkv_jax.engine.grammar_cache import GrammarCache
from flowkv_jax.engine.sampling_state import SamplingState
from flowkv_jax.errors import UnprocessableError
from flowkv_jax.request import Request
from flowkv_jax.sequence import SequenceSpec, SequenceUpdate


@dataclass(eq=False, slots=True)
class Served:
    """What a node keeps of a sequence: what was asked, where it stands, how it is sampled."""

    spec: SequenceSpec
    request: Request
    state: SamplingState

    @classmethod
    def of(
        cls,
        spec: SequenceSpec,
        eos_token_ids: Sequence[int],
        grammars: GrammarCache | None = None,
    ) -> Served:
        """A sequence that has not begun here.

        Args:
            grammars: for outputs that must have a form.

        Raises:
            UnprocessableError: the output must have a form, and there is no `grammars`.
            ValidationError: its parameters leave nothing to sample.
        """
        form = spec.sampling_params.structured_outputs
        if form is not None and grammars is None:
            raise UnprocessableError("this node does not serve structured_outputs")
        state = SamplingState(
            spec.sampling_params,
            token_ids=[*spec.prompt_token_ids, *spec.output_token_ids],
            num_prompt_tokens=len(spec.prompt_token_ids),
            seed=spec.seed,
            eos_token_ids=eos_token_ids,
            bad_word_ids=spec.bad_word_ids,
            matcher=None if form is None or grammars is None else grammars.matcher(form),
        )
        request = Request(
            request_id=spec.sequence_id,
            prompt_token_ids=spec.prompt_token_ids,
            sampling_params=spec.sampling_params,
            arrival_s=spec.arrival_s,
            max_total_tokens=spec.max_total_tokens,
            seed=spec.seed,
            deadline_s=spec.deadline_s,
            priority=spec.priority,
            cache_salt=spec.cache_salt,
            known_output_token_ids=spec.output_token_ids,
            hands_off=spec.decode_node is not None,
        )
        return cls(spec, request, state)

    @property
    def key(self) -> SequenceKey:
        return SequenceKey(self.spec.sequence_id, self.spec.attempt)

    def failed(self, error: Exception) -> SequenceUpdate:
        """The update that says that it has ended with `error`."""
        return SequenceUpdate(
            sequence_id=self.spec.sequence_id,
            attempt=self.spec.attempt,
            start=self.request.num_output_tokens,
            error=error,
        )
