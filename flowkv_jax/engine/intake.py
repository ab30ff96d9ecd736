"""From a caller's prompt and parameters to a `Submission`: everything that needs no queue.

Runs in the caller's thread, so that a bad request never reaches a node, a long prompt is tokenised
and a grammar compiled beside the device's work.
"""

from __future__ import annotations

import itertools
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flowkv_jax.cluster.submission import OutputSink, Submission, child_id
from flowkv_jax.engine.admission import check_options
from flowkv_jax.engine.grammar_cache import GrammarCache
from flowkv_jax.engine.output_processor import RequestOutputState
from flowkv_jax.engine.prompts import PromptType, TokenizedPrompt, check_rendered, tokenize
from flowkv_jax.engine.sampling_state import child_seed, tokenize_bad_words
from flowkv_jax.errors import UnprocessableError, ValidationError
from flowkv_jax.kv_transfer.config import KVRole
from flowkv_jax.kv_transfer.params import read_params
from flowkv_jax.load import ModelInfo
from flowkv_jax.sampling_params import RequestOutputKind, SamplingParams
from flowkv_jax.sequence import SequenceSpec
from flowkv_jax.tokenizer import Tokenizer

ParamsType = SamplingParams | Mapping[str, Any]
Messages = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class CallOptions:
    """What a caller says of one request beside prompt and parameters; see `Engine.generate`."""

    request_id: str | None = None
    priority: int = 0
    cache_salt: str | None = None
    timeout: float | None = None
    kv_transfer_params: Mapping[str, Any] | None = None


class Intake:
    """Checks and tokenises requests for one model. Safe from several threads.

    Args:
        max_request_tokens: prompt plus output that the pool can hold.
        max_logprobs: most alternatives a request may ask for; -1 for no bound.
        seed: base of the seeds of requests that bring none.
        chat_template: Jinja text; None if there is none.
        generation_defaults: the model's recommended sampling parameters.
        kv_role: this server's part in hand-offs between servers; None for none.
        grammars: for answers that must have a form; None if these are not served.
    """

    def __init__(
        self,
        model_info: ModelInfo,
        tokenizer: Tokenizer,
        *,
        max_request_tokens: int,
        max_logprobs: int,
        seed: int,
        chat_template: str | None,
        generation_defaults: Mapping[str, float],
        kv_role: KVRole | None = None,
        grammars: GrammarCache | None = None,
    ) -> None:
        self._model_info = model_info
        self._tokenizer = tokenizer
        self._grammars = grammars
        self._max_request_tokens = max_request_tokens
        self._max_logprobs = max_logprobs
        self._seed = seed
        self._chat_template = chat_template
        self._generation_defaults = generation_defaults
        self._kv_role: KVRole | None = kv_role
        self._request_numbers = itertools.count()

    @property
    def chat_template(self) -> str | None:
        """Jinja text; None if there is none."""
        return self._chat_template

    def prepare(
        self,
        prompt: PromptType,
        sampling_params: ParamsType | None,
        options: CallOptions,
        sink: OutputSink,
        *,
        kind: RequestOutputKind | None = None,
    ) -> Submission:
        """A request that is ready to be submitted.

        Args:
            kind: overrides the parameters' `output_kind`.

        Raises:
            ValidationError, UnprocessableError: see `Engine.generate`.
        """
        params = self.params(sampling_params)
        if kind is not None:
            params = params.replace(output_kind=kind)
        check_options(options.request_id, options.priority, options.cache_salt, options.timeout)
        kv_transfer = read_params(options.kv_transfer_params, self._kv_role)
        info = self._model_info
        tokenized = tokenize(
            prompt,
            self._tokenizer,
            params,
            vocab_size=info.vocab_size,
            max_prompt_tokens=self._max_prompt_tokens,
        )
        if params.structured_outputs is not None:
            if self._grammars is None:
                raise UnprocessableError("structured_outputs is not served here")
            self._grammars.check(params.structured_outputs)
        request_id = options.request_id or uuid.uuid4().hex[:16]
        return Submission(
            request_id=request_id,
            specs=self._specs(request_id, tokenized, params, options),
            output=RequestOutputState(
                request_id,
                params,
                prompt=tokenized.text,
                prompt_token_ids=tokenized.token_ids,
                detokenizer=self._tokenizer,
            ),
            sink=sink,
            kv_transfer=kv_transfer,
        )

    @property
    def _max_prompt_tokens(self) -> int:
        """One token of output has room behind them."""
        return min(self._model_info.max_model_len, self._max_request_tokens) - 1

    def _specs(
        self,
        request_id: str,
        prompt: TokenizedPrompt,
        params: SamplingParams,
        options: CallOptions,
    ) -> list[SequenceSpec]:
        """The `n` sequences of a request. Without a seed of its own a request gets the engine's
        next one, so a run of an engine is repeatable as a whole."""
        now_s = time.monotonic()
        number = next(self._request_numbers)
        seed = params.effective_seed
        if seed is None:
            seed = child_seed(self._seed, number + 1)
        limit = self._max_request_tokens
        if params.max_tokens is not None:
            wanted = len(prompt.token_ids) + params.max_tokens
            limit = min(wanted, self._model_info.max_model_len)
        bad_word_ids = tokenize_bad_words(
            params.bad_words or (),
            lambda text: self._tokenizer.encode(text, add_special_tokens=False),
        )
        return [
            SequenceSpec(
                sequence_id=child_id(request_id, index),
                prompt_token_ids=prompt.token_ids,
                sampling_params=params,
                arrival_s=now_s,
                max_total_tokens=limit,
                seed=child_seed(seed, index),
                deadline_s=None if options.timeout is None else now_s + float(options.timeout),
                priority=options.priority,
                cache_salt=options.cache_salt,
                bad_word_ids=bad_word_ids,
            )
            for index in range(params.n)
        ]

    def params(self, given: ParamsType | None) -> SamplingParams:
        """The caller's parameters, with the model's recommendations where the caller said nothing.

        Raises:
            ValidationError, UnprocessableError: see `SamplingParams`.
        """
        if given is None:
            params = SamplingParams()
        elif isinstance(given, SamplingParams):
            params = given
        elif isinstance(given, Mapping):
            params = SamplingParams.from_mapping(given)
        else:
            raise ValidationError(
                f"sampling_params must be SamplingParams or a dict, got {given!r:.100}",
                parameter="sampling_params",
                value=given,
            )
        params = params.with_defaults(self._generation_defaults)
        params.validate_for(
            vocab_size=self._model_info.vocab_size,
            max_logprobs=self._max_logprobs,
        )
        return params

    def chat_params(self, given: ParamsType | None) -> SamplingParams:
        """`params`, but an answer may fill the context unless the caller bounds it."""
        params = self.params(given)
        return params if "max_tokens" in params.given_fields else params.replace(max_tokens=None)

    def chat_prompt(
        self, messages: Messages, template_variables: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        """A conversation in the model's template, as a prompt of token ids.

        Args:
            template_variables: more names for the template (`tools`, for one).

        Raises:
            UnprocessableError: there is no template.
            ValidationError: malformed messages or template, or far too long.
        """
        if self._chat_template is None:
            raise UnprocessableError(
                f"model {self._model_info.served_model_name!r} has no chat template; use generate,"
                " or give one with chat_template"
            )
        text = self._tokenizer.apply_chat_template(
            messages, chat_template=self._chat_template, **(template_variables or {})
        )
        check_rendered(text, self._tokenizer, self._max_prompt_tokens)
        # The template writes the special tokens itself.
        return {"prompt_token_ids": self._tokenizer.encode(text, add_special_tokens=False)}
