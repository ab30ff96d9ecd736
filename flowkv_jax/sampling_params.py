"""How one request wants its tokens chosen, and when it wants them to stop.

Field names, defaults and ranges are vLLM's. A `SamplingParams` keeps exactly what the caller gave;
everything derived from it (greedy or not, clamped temperature, ids without duplicates) is a
property. Three checks happen at three places:

    construction         what can be judged from the values alone
    `from_mapping`       spelling: unknown keys, aliases, features that are not served
    `validate_for`       what needs the model: ids inside the vocabulary, number of logprobs
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from flowkv_jax.checks import bad_value, check_ids, check_int, check_real, check_strings
from flowkv_jax.sampling_spellings import ALIASES, CONSTRAINT_ALIASES, field_meant
from flowkv_jax.structured_outputs import StructuredOutputs

MAX_N = 64
MAX_STOP_STRINGS = 32
MAX_STOP_TOKEN_IDS = 128
MAX_BAD_WORDS = 64
MAX_LOGIT_BIAS_ENTRIES = 1024
LOGIT_BIAS_LIMIT = 100.0
GREEDY_TEMPERATURE = 1e-5
"""Below this a request is greedy."""
MIN_TEMPERATURE = 0.01
"""A temperature between `GREEDY_TEMPERATURE` and this is served as this: logits divided by less
overflow float32."""

_INT64 = (-(2**63), 2**63 - 1)

# What a model's generation_config.json may set for requests that leave it open.
GENERATION_CONFIG_FIELDS: tuple[str, ...] = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "max_tokens",
)


class RequestOutputKind(enum.Enum):
    """What `text` and `token_ids` of an output hold; `delta_*` are filled in every kind."""

    CUMULATIVE = "cumulative"
    """Everything so far, in every output."""
    DELTA = "delta"
    """What is new since the previous output."""
    FINAL_ONLY = "final_only"
    """One output, at the end."""


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Parameters of one request. Immutable; keyword arguments only.

    Attributes:
        n: answers to one prompt, 1 to 64. Needs a temperature above 0 when more than 1.
        temperature: 0 to 2; below 1e-5 the most likely token is taken, and top_k, top_p and min_p
            have no effect. Values from 1e-5 to 0.01 are served as 0.01.
        top_k: keep the k most likely tokens; 0 or -1 keeps all.
        top_p: keep the fewest tokens whose probabilities reach this sum, in (0, 1].
        min_p: keep tokens at least this likely relative to the most likely one, in [0, 1].
        presence_penalty: subtracted from the logit of every token generated before, -2 to 2.
        frequency_penalty: the same times the number of occurrences, -2 to 2.
        repetition_penalty: divides positive and multiplies negative logits of every token of
            prompt and output; above 0.
        logit_bias: token id -> value added to its logit, clamped to +-100.
        allowed_token_ids: if given, nothing else can be sampled.
        bad_words: strings that are not generated (as token sequences).
        min_tokens: no stop token is sampled, and no stop string searched, before this many.
        max_tokens: most tokens generated; None fills the context.
        stop: strings that end the answer.
        stop_token_ids: tokens that end the answer.
        include_stop_str_in_output: keep the stop string at the end of the text.
        ignore_eos: the model's own end-of-sequence token does not end the answer.
        seed: makes the request repeatable; None or -1 lets the engine choose.
        logprobs: alternatives reported for every sampled token; -1 for the whole vocabulary.
        prompt_logprobs: the same for prompt tokens.
        echo: the text begins with the prompt.
        detokenize: make text; False returns token ids only.
        skip_special_tokens: leave special tokens out of the text.
        spaces_between_special_tokens: accepted for compatibility; the tokenizers served here put
            no spaces there (in vLLM, too, it concerns only the old Python tokenizers).
        output_kind: see `RequestOutputKind`.
        truncate_prompt_tokens: keep only the last so many prompt tokens; -1 for what fits the
            model; None refuses a prompt that is too long.
        structured_outputs: the form that the text of the answer must have. It goes before all of
            the above: `min_tokens` does not lengthen an answer that is complete, and a bias or a
            list of ids that leaves nothing of the form fails the request.

    Raises:
        ValidationError: a value has a wrong type or is out of range.
    """

    n: int = 1
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] | Mapping[str, float] | None = None
    allowed_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str] | None = None
    min_tokens: int = 0
    max_tokens: int | None = 16
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    seed: int | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    echo: bool = False
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    truncate_prompt_tokens: int | None = None
    structured_outputs: StructuredOutputs | None = None

    def __new__(cls, **given: Any) -> SamplingParams:
        # The generated __init__ cannot tell a default from the same value given by the caller;
        # `with_defaults` must (an explicit temperature of 1.0 beats the model's 0.6).
        self = super().__new__(cls)
        return self._as_given(frozenset(given))

    def __post_init__(self) -> None:
        self._check_numbers()
        self._check_tokens_and_text()
        for name in _BOOL_FIELDS:
            if not isinstance(getattr(self, name), bool):
                raise bad_value(name, getattr(self, name), "must be true or false")
        if not isinstance(self.output_kind, RequestOutputKind):
            raise bad_value("output_kind", self.output_kind, "must be a RequestOutputKind")
        if not isinstance(self.structured_outputs, StructuredOutputs | None):
            raise bad_value(
                "structured_outputs", self.structured_outputs, "must be a StructuredOutputs"
            )
        self._check_combinations()

    def _check_numbers(self) -> None:
        check_int("n", self.n, 1, MAX_N)
        check_real("temperature", self.temperature, 0.0, 2.0)
        check_int("top_k", self.top_k, -1)
        check_real("top_p", self.top_p, 0.0, 1.0, low_open=True)
        check_real("min_p", self.min_p, 0.0, 1.0)
        check_real("presence_penalty", self.presence_penalty, -2.0, 2.0)
        check_real("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        check_real("repetition_penalty", self.repetition_penalty, 0.0, low_open=True)
        check_int("min_tokens", self.min_tokens, 0)
        if self.max_tokens is not None:
            check_int("max_tokens", self.max_tokens, 1)
        if self.seed is not None:
            check_int("seed", self.seed, *_INT64)
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                check_int(name, getattr(self, name), -1)
        if self.truncate_prompt_tokens is not None:
            check_int("truncate_prompt_tokens", self.truncate_prompt_tokens, -1)
            if self.truncate_prompt_tokens == 0:
                raise bad_value("truncate_prompt_tokens", 0, "must be -1 or at least 1")

    def _check_tokens_and_text(self) -> None:
        if self.stop is not None:
            stop = [self.stop] if isinstance(self.stop, str) else self.stop
            check_strings("stop", stop, MAX_STOP_STRINGS)
        if self.bad_words is not None:
            check_strings("bad_words", self.bad_words, MAX_BAD_WORDS)
        if self.stop_token_ids is not None:
            check_ids("stop_token_ids", self.stop_token_ids, MAX_STOP_TOKEN_IDS)
        if self.allowed_token_ids is not None:
            check_ids("allowed_token_ids", self.allowed_token_ids)
            if not self.allowed_token_ids:
                raise bad_value("allowed_token_ids", [], "must name a token, or be left out")
        if self.logit_bias is not None:
            _check_bias(self.logit_bias)

    def _check_combinations(self) -> None:
        if self.is_greedy and self.n > 1:
            raise bad_value(
                "n", self.n, f"needs a temperature above 0 (it is {self.temperature}): "
                "greedy answers are all the same"
            )  # fmt: skip
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise bad_value(
                "min_tokens", self.min_tokens, f"must be at most max_tokens={self.max_tokens}"
            )
        if self.structured_outputs is not None and self.ignore_eos:
            raise bad_value(
                "ignore_eos", True, "contradicts structured_outputs: the form says where it ends"
            )
        if not self.detokenize:
            if self.stop_strings:
                raise bad_value(
                    "stop", self.stop, "needs detokenize=True: it is searched in the text"
                )
            if self.echo:
                raise bad_value(
                    "echo", True, "needs detokenize=True: it puts the prompt's text in front"
                )

    @property
    def is_greedy(self) -> bool:
        """The most likely token is taken; nothing is drawn."""
        return self.temperature < GREEDY_TEMPERATURE

    @property
    def effective_temperature(self) -> float:
        """0.0 when greedy, else at least `MIN_TEMPERATURE`."""
        return 0.0 if self.is_greedy else max(float(self.temperature), MIN_TEMPERATURE)

    @property
    def effective_top_k(self) -> int:
        """0 when it keeps everything."""
        return 0 if self.is_greedy else max(int(self.top_k), 0)

    @property
    def effective_top_p(self) -> float:
        """1.0 when it keeps everything."""
        return 1.0 if self.is_greedy else float(self.top_p)

    @property
    def effective_min_p(self) -> float:
        """0.0 when it keeps everything."""
        return 0.0 if self.is_greedy else float(self.min_p)

    @property
    def effective_seed(self) -> int | None:
        """None when the engine is to choose."""
        return None if self.seed is None or self.seed == -1 else int(self.seed)

    @property
    def has_penalties(self) -> bool:
        """The next token's logits depend on which tokens came before."""
        return (
            self.presence_penalty != 0
            or self.frequency_penalty != 0
            or self.repetition_penalty != 1
        )

    @cached_property
    def stop_strings(self) -> tuple[str, ...]:
        """`stop`, always as a tuple."""
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @cached_property
    def stop_ids(self) -> frozenset[int]:
        """`stop_token_ids` without duplicates."""
        return frozenset(int(token) for token in self.stop_token_ids or ())

    @cached_property
    def allowed_ids(self) -> tuple[int, ...] | None:
        """`allowed_token_ids`, ascending and without duplicates."""
        if self.allowed_token_ids is None:
            return None
        return tuple(sorted({int(token) for token in self.allowed_token_ids}))

    @cached_property
    def bias(self) -> Mapping[int, float]:
        """`logit_bias` with int keys and values clamped to +-`LOGIT_BIAS_LIMIT`."""
        return {
            int(token): min(max(float(value), -LOGIT_BIAS_LIMIT), LOGIT_BIAS_LIMIT)
            for token, value in (self.logit_bias or {}).items()
        }

    @property
    def given_fields(self) -> frozenset[str]:
        """Names of the fields the caller set, whatever the value."""
        given: frozenset[str] = self.__dict__["_given"]
        return given

    def num_logprobs(self, vocab_size: int) -> int | None:
        """Alternatives wanted at each sampled token; None for no logprobs at all."""
        return _count_of(self.logprobs, vocab_size)

    def num_prompt_logprobs(self, vocab_size: int) -> int | None:
        """Alternatives wanted at each prompt token; None for no prompt logprobs at all."""
        return _count_of(self.prompt_logprobs, vocab_size)

    def validate_for(self, *, vocab_size: int, max_logprobs: int) -> None:
        """Check what only the model and the server can tell.

        Args:
            vocab_size: ids are in [0, vocab_size).
            max_logprobs: most alternatives at a position; -1 for no bound.

        Raises:
            ValidationError: naming the parameter, the value and the bound.
        """
        named_ids = (
            ("stop_token_ids", self.stop_ids),
            ("allowed_token_ids", self.allowed_ids or ()),
            ("logit_bias", self.bias),
        )
        for name, ids in named_ids:
            for token in ids:
                if token >= vocab_size:
                    raise bad_value(name, token, f"is no token: the vocabulary has {vocab_size}")
        for name in ("logprobs", "prompt_logprobs"):
            count = _count_of(getattr(self, name), vocab_size)
            bound = vocab_size if max_logprobs == -1 else min(max_logprobs, vocab_size)
            if count is not None and count > bound:
                raise bad_value(
                    name, getattr(self, name), f"asks for more than the {bound} served here"
                )

    def replace(self, **changes: Any) -> SamplingParams:
        """A copy with some fields changed, which count as given."""
        values = {name: getattr(self, name) for name in _DEFAULTS}
        return SamplingParams(**{**values, **changes})._as_given(self.given_fields | set(changes))

    def _as_given(self, names: frozenset[str]) -> SamplingParams:
        """Last step of making an object from another one; nobody else has seen it yet."""
        self.__dict__["_given"] = names
        return self

    def with_defaults(self, generation_config: Mapping[str, Any]) -> SamplingParams:
        """Fill fields the caller left open from a model's `generation_config.json`.

        Only `GENERATION_CONFIG_FIELDS` are taken (`max_new_tokens` as `max_tokens`); the rest of
        such a file is about other things. The result still counts them as not given.

        Raises:
            ValidationError: the model's value is out of range.
        """
        values: dict[str, Any] = {}
        for key, value in generation_config.items():
            name = ALIASES.get(key, key)
            if name in GENERATION_CONFIG_FIELDS and value is not None:
                values[name] = value
        values.update((name, getattr(self, name)) for name in self.given_fields)
        return SamplingParams(**values)._as_given(self.given_fields)

    def to_mapping(self) -> dict[str, Any]:
        """What differs from the defaults or was given: `from_mapping` of it is an equal object."""
        values: dict[str, Any] = {}
        for name, default in _DEFAULTS.items():
            value = getattr(self, name)
            if name in self.given_fields or value != default:
                values[name] = _to_plain(value)
        return values

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any]) -> SamplingParams:
        """Build from a plain dict: our names, or SGLang's `ALIASES`.

        None leaves a field at its default, except `max_tokens`, where None means "fill the
        context".

        Raises:
            UnprocessableError: a feature that is not served, by name.
            ValidationError: unknown key, two spellings of one field that differ, bad value.
        """
        values: dict[str, Any] = {}
        spelt: dict[str, str] = {}
        for key, value in mapping.items():
            name = field_meant(key, value, _DEFAULTS)
            if name is None or (value is None and name != "max_tokens"):
                continue
            if name == "structured_outputs":
                value = _structured_outputs(key, value)
            if name in values and values[name] != value:
                raise bad_value(key, value, f"contradicts {spelt[name]}={values[name]!r:.100}")
            values[name], spelt[name] = value, key
        kind = values.get("output_kind")
        if isinstance(kind, str):
            values["output_kind"] = _output_kind(kind)
        return cls(**values)


_DEFAULTS: Mapping[str, Any] = {
    field.name: field.default for field in dataclasses.fields(SamplingParams)
}
_BOOL_FIELDS = tuple(name for name, default in _DEFAULTS.items() if isinstance(default, bool))


def _to_plain(value: Any) -> Any:
    if isinstance(value, StructuredOutputs):
        return value.to_mapping()
    return value.value if isinstance(value, enum.Enum) else value


def _structured_outputs(key: str, value: Any) -> StructuredOutputs:
    if key in CONSTRAINT_ALIASES:
        return StructuredOutputs(**{CONSTRAINT_ALIASES[key]: value})
    return value if isinstance(value, StructuredOutputs) else StructuredOutputs.from_mapping(value)


def _output_kind(spelling: str) -> RequestOutputKind:
    try:
        return RequestOutputKind(spelling.lower())
    except ValueError:
        kinds = ", ".join(kind.value for kind in RequestOutputKind)
        raise bad_value("output_kind", spelling, f"must be one of {kinds}") from None


def _count_of(logprobs: int | None, vocab_size: int) -> int | None:
    return vocab_size if logprobs == -1 else logprobs


def _check_bias(bias: Any) -> None:
    if not isinstance(bias, Mapping):
        raise bad_value("logit_bias", bias, "must map token ids to numbers")
    if len(bias) > MAX_LOGIT_BIAS_ENTRIES:
        raise bad_value(
            "logit_bias", bias, f"has {len(bias)} entries; at most {MAX_LOGIT_BIAS_ENTRIES}"
        )
    tokens: set[int] = set()
    for key, value in bias.items():
        # JSON objects have string keys.
        digits = isinstance(key, str) and key.isascii() and key.isdigit() and len(key) < 20
        token = int(key) if digits else key
        check_int("logit_bias", token, 0)
        if int(token) in tokens:
            raise bad_value("logit_bias", key, "names the same token twice")
        tokens.add(int(token))
        check_real("logit_bias", value)
