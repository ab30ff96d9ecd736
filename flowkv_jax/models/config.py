"""Hyper-parameters of a Llama, read from the JSON files of a Hugging Face folder. No JAX.

Both spellings of the rotary embedding are read: `rope_theta` with `rope_scaling` (transformers 4)
and `rope_parameters` (transformers 5). What this runtime cannot compute exactly is refused by name.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from flowkv_jax.errors import ModelFormatError

# What transformers assumes where config.json says nothing.
_DEFAULT_ROPE_THETA = 10000.0
_DEFAULT_RMS_NORM_EPS = 1e-6
_DEFAULT_MAX_POSITIONS = 2048

_ROPE_TYPES = ("default", "llama3")


@dataclass(frozen=True)
class Llama3RopeScaling:
    """The frequency scaling of Llama 3.1 (rope type "llama3").

    Wavelengths longer than `original_max_position_embeddings / low_freq_factor` are stretched by
    `factor`, those shorter than `.../ high_freq_factor` are kept, and between the two the frequency
    is interpolated.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int

    def divisors(self, inverse_frequencies: np.ndarray) -> np.ndarray:
        """What each rotary frequency is divided by: float64 of the same shape, in [1, factor]."""
        context = self.original_max_position_embeddings
        wavelengths = 2 * math.pi / np.asarray(inverse_frequencies, np.float64)
        smooth = (context / wavelengths - self.low_freq_factor) / (
            self.high_freq_factor - self.low_freq_factor
        )
        smooth = np.clip(smooth, 0.0, 1.0)
        return np.asarray(1.0 / ((1 - smooth) / self.factor + smooth))


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding: base, and the scaling of its frequencies (None for plain)."""

    theta: float
    scaling: Llama3RopeScaling | None = None

    def inverse_frequencies(self, head_dim: int) -> np.ndarray:
        """Radians per position of each rotary pair: float64, [head_dim / 2]."""
        frequencies = self.theta ** -(np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
        if self.scaling is not None:
            frequencies = frequencies / self.scaling.divisors(frequencies)
        return frequencies


@dataclass(frozen=True)
class LlamaConfig:
    """Everything that fixes the shape and the mathematics of a Llama.

    Attributes:
        head_dim: width of a head; need not be `hidden_size / num_heads`.
        attention_bias: the q, k, v and o projections have a bias.
        mlp_bias: the gate, up and down projections have a bias.
        bos_token_id: None if the model names none.
        eos_token_ids: every id that ends a sequence, in the order the files name them.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeConfig
    tie_word_embeddings: bool
    attention_bias: bool
    mlp_bias: bool
    max_position_embeddings: int
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ModelFormatError(
                f"num_attention_heads={self.num_heads} is not a multiple of"
                f" num_key_value_heads={self.num_kv_heads}"
            )
        if self.head_dim % 2:
            raise ModelFormatError(
                f"head_dim={self.head_dim} is odd; rotary embedding turns pairs of dimensions"
            )

    @classmethod
    def from_hf(
        cls,
        config_json: Mapping[str, Any],
        generation_config_json: Mapping[str, Any] | None = None,
    ) -> LlamaConfig:
        """Read the contents of `config.json` and, if there is one, `generation_config.json`.

        Raises:
            ModelFormatError: a key is missing, has a wrong type or value, or asks for something
                that is not served; the message names the key and the value.
        """
        read = _Reader(config_json)
        _refuse_unserved(config_json)
        hidden_size = read.positive_int("hidden_size")
        num_heads = read.positive_int("num_attention_heads")
        if config_json.get("head_dim") is None and hidden_size % num_heads:
            raise ModelFormatError(
                f"hidden_size={hidden_size} is not a multiple of num_attention_heads={num_heads},"
                " and head_dim is not given"
            )
        generation = _Reader(generation_config_json or {})
        return cls(
            vocab_size=read.positive_int("vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=read.positive_int("intermediate_size"),
            num_layers=read.positive_int("num_hidden_layers"),
            num_heads=num_heads,
            num_kv_heads=read.positive_int("num_key_value_heads", num_heads),
            head_dim=read.positive_int("head_dim", hidden_size // num_heads),
            rms_norm_eps=read.positive_float("rms_norm_eps", _DEFAULT_RMS_NORM_EPS),
            rope=_read_rope(config_json),
            tie_word_embeddings=read.boolean("tie_word_embeddings"),
            attention_bias=read.boolean("attention_bias"),
            mlp_bias=read.boolean("mlp_bias"),
            max_position_embeddings=read.positive_int(
                "max_position_embeddings", _DEFAULT_MAX_POSITIONS
            ),
            bos_token_id=next(
                iter(read.token_ids("bos_token_id") + generation.token_ids("bos_token_id")), None
            ),
            eos_token_ids=tuple(
                dict.fromkeys(read.token_ids("eos_token_id") + generation.token_ids("eos_token_id"))
            ),
        )

    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        """Every weight the model has, in Hugging Face names and orientation ([out, in])."""
        hidden, inner = self.hidden_size, self.intermediate_size
        query_width = self.num_heads * self.head_dim
        kv_width = self.num_kv_heads * self.head_dim
        projections = (
            ("self_attn.q_proj", query_width, hidden, self.attention_bias),
            ("self_attn.k_proj", kv_width, hidden, self.attention_bias),
            ("self_attn.v_proj", kv_width, hidden, self.attention_bias),
            ("self_attn.o_proj", hidden, query_width, self.attention_bias),
            ("mlp.gate_proj", inner, hidden, self.mlp_bias),
            ("mlp.up_proj", inner, hidden, self.mlp_bias),
            ("mlp.down_proj", hidden, inner, self.mlp_bias),
        )
        shapes: dict[str, tuple[int, ...]] = {
            "model.embed_tokens.weight": (self.vocab_size, hidden)
        }
        for layer in range(self.num_layers):
            prefix = f"model.layers.{layer}"
            shapes[f"{prefix}.input_layernorm.weight"] = (hidden,)
            for part, outputs, inputs, has_bias in projections:
                shapes[f"{prefix}.{part}.weight"] = (outputs, inputs)
                if has_bias:
                    shapes[f"{prefix}.{part}.bias"] = (outputs,)
            shapes[f"{prefix}.post_attention_layernorm.weight"] = (hidden,)
        shapes["model.norm.weight"] = (hidden,)
        if not self.tie_word_embeddings:
            shapes["lm_head.weight"] = (self.vocab_size, hidden)
        return shapes


class _Reader:
    """Typed look-up in a JSON object: a missing key or a null takes the default."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = values

    def positive_int(self, key: str, default: int | None = None) -> int:
        value = self._value(key, default)
        if type(value) is not int or value <= 0:
            raise ModelFormatError(f"{key}={value!r} must be a positive integer")
        return value

    def positive_float(self, key: str, default: float | None = None) -> float:
        value = self._value(key, default)
        if type(value) not in (int, float) or not 0 < value < math.inf:
            raise ModelFormatError(f"{key}={value!r} must be a positive number")
        return float(value)

    def boolean(self, key: str) -> bool:
        value = self._value(key, False)
        if type(value) is not bool:
            raise ModelFormatError(f"{key}={value!r} must be true or false")
        return value

    def token_ids(self, key: str) -> tuple[int, ...]:
        """The ids under `key`, which holds one, a list or nothing."""
        value = self._values.get(key)
        ids = () if value is None else tuple(value) if isinstance(value, list) else (value,)
        if not all(type(token_id) is int and token_id >= 0 for token_id in ids):
            raise ModelFormatError(f"{key}={value!r} must be a token id or a list of token ids")
        return ids

    def _value(self, key: str, default: Any) -> Any:
        value = self._values.get(key)
        if value is None:
            value = default
        if value is None:
            raise ModelFormatError(f"{key} is missing")
        return value


def _refuse_unserved(config_json: Mapping[str, Any]) -> None:
    activation = config_json.get("hidden_act") or "silu"
    if activation != "silu":
        raise ModelFormatError(f"hidden_act={activation!r} is not served; served: 'silu'")
    quantization = config_json.get("quantization_config")
    if quantization:
        method = quantization.get("quant_method") if isinstance(quantization, dict) else None
        raise ModelFormatError(
            f"quantization_config with quant_method={method!r} is not served; take the"
            " checkpoint in float32, bfloat16 or float16, or a GGUF file"
        )


def _read_rope(config_json: Mapping[str, Any]) -> RopeConfig:
    new_spelling = config_json.get("rope_parameters") or {}
    old_spelling = config_json.get("rope_scaling") or {}
    for key, value in (("rope_parameters", new_spelling), ("rope_scaling", old_spelling)):
        if not isinstance(value, dict):
            raise ModelFormatError(f"{key}={value!r} must be an object")
    parameters = {**old_spelling, **new_spelling}
    # transformers writes the base inside rope_parameters, older releases beside rope_scaling.
    if parameters.get("rope_theta") is None:
        parameters["rope_theta"] = config_json.get("rope_theta")
    read = _Reader(parameters)
    theta = read.positive_float("rope_theta", _DEFAULT_ROPE_THETA)
    rope_type = parameters.get("rope_type") or parameters.get("type") or "default"
    if rope_type not in _ROPE_TYPES:
        raise ModelFormatError(
            f"rope type {rope_type!r} is not served; served: {', '.join(_ROPE_TYPES)}"
        )
    partial = parameters.get("partial_rotary_factor", config_json.get("partial_rotary_factor"))
    if partial not in (None, 1, 1.0):
        raise ModelFormatError(f"partial_rotary_factor={partial!r} is not served; served: 1.0")
    if rope_type == "default":
        return RopeConfig(theta)
    scaling = Llama3RopeScaling(
        factor=read.positive_float("factor"),
        low_freq_factor=read.positive_float("low_freq_factor"),
        high_freq_factor=read.positive_float("high_freq_factor"),
        original_max_position_embeddings=read.positive_int("original_max_position_embeddings"),
    )
    if scaling.high_freq_factor <= scaling.low_freq_factor:
        raise ModelFormatError(
            f"high_freq_factor={scaling.high_freq_factor} must be greater than"
            f" low_freq_factor={scaling.low_freq_factor}"
        )
    if scaling.factor < 1:
        raise ModelFormatError(f"rope scaling factor={scaling.factor} must be at least 1")
    return RopeConfig(theta, scaling)
