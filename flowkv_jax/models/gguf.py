"""A Llama in a GGUF file, seen as if it were a Hugging Face folder.

Tensors are dequantised one at a time, when they are read. llama.cpp stores the rows of the q and k
projections so that the two dimensions of a rotary pair are neighbours (2i, 2i + 1); here, as in
transformers, they are half a head apart (i, i + head_dim/2), and `read` puts them back.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from flowkv_jax.errors import ModelFormatError, NotFoundError
from flowkv_jax.models import registry
from flowkv_jax.models.config import Llama3RopeScaling, LlamaConfig, RopeConfig
from flowkv_jax.models.gguf_file import GGUFFile
from flowkv_jax.models.gguf_tokenizer import build_tokenizer
from flowkv_jax.models.source import ModelSource
from flowkv_jax.tokenizer import Tokenizer

_TOP_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
}
_LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
# Keys that would change the mathematics, with the values that mean "as in a plain Llama".
_PLAIN_VALUES: dict[str, tuple[Any, ...]] = {
    "expert_count": (0,),
    "attention.sliding_window": (0,),
    "attention.causal": (True,),
    "attention.scale": (0.0,),
    "rope.scaling.type": ("none",),
    "logit_scale": (0.0, 1.0),
    "residual_scale": (0.0, 1.0),
    "embedding_scale": (0.0, 1.0),
}
# Every Llama with scaled frequencies that was published used these; the file keeps only the result.
_LLAMA3_LOW_FREQ_FACTOR = 1.0
_LLAMA3_HIGH_FREQ_FACTOR = 4.0
_LLAMA3_ORIGINAL_CONTEXT = 8192

_PLAIN_DTYPES: dict[GGMLQuantizationType, Any] = {
    GGMLQuantizationType.F32: np.float32,
    GGMLQuantizationType.F16: np.float16,
    GGMLQuantizationType.BF16: ml_dtypes.bfloat16,
}


class GGUFModel(ModelSource):
    """A GGUF file of the Llama architecture.

    Raises (on opening):
        NotFoundError: there is no such file.
        ModelFormatError: it is broken, of another architecture, split over several files, or asks
            for something that is not served.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = GGUFFile(path)
        self.generation_defaults = {}
        try:
            self.architecture = registry.from_gguf_name(
                _value(self._file.metadata, "general.architecture", str)
            )
            if self._file.metadata.get("split.count", 1) > 1:
                raise ModelFormatError(
                    "is one part of a split model; join the parts with llama-gguf-split --merge"
                )
            self.config = _read_config(self._file)
            self._check_tensors()
        except ModelFormatError as error:
            raise ModelFormatError(f"{path}: {error}") from error

    @cached_property
    def tokenizer(self) -> Tokenizer:
        try:
            return build_tokenizer(self._file.metadata)
        except NotFoundError as error:
            raise NotFoundError(f"{self.path}: {error}") from error
        except ModelFormatError as error:
            raise ModelFormatError(f"{self.path}: {error}") from error

    def read(self, name: str) -> np.ndarray:
        shape = self.shape(name)
        stored = self._file.tensors[_gguf_name(name)]
        rows = self._file.rows(stored.name)
        values: np.ndarray
        if stored.type in _PLAIN_DTYPES:
            values = rows.view(_PLAIN_DTYPES[stored.type])
        elif stored.type is GGMLQuantizationType.Q4_1:
            values = dequantize_q4_1(rows)
        else:
            values = dequantize(rows, stored.type)
        if ".q_proj." in name:
            values = _unpermute(values.reshape(shape), self.config.num_heads)
        elif ".k_proj." in name:
            values = _unpermute(values.reshape(shape), self.config.num_kv_heads)
        return values.reshape(shape)

    def release(self, name: str) -> None:
        self._file.release(_gguf_name(name))

    def close(self) -> None:
        self._file.close()

    def _check_tensors(self) -> None:
        for name, shape in self.config.tensor_shapes().items():
            stored = self._file.tensors.get(_gguf_name(name))
            if stored is None:
                raise ModelFormatError(f"tensor {_gguf_name(name)!r} is missing")
            if stored.shape != shape:
                raise ModelFormatError(
                    f"tensor {stored.name!r} has shape {stored.shape},"
                    f" but the metadata asks for {shape}"
                )
        for tensor_type in {tensor.type for tensor in self._file.tensors.values()}:
            _require_served(tensor_type)


def dequantize_q4_1(rows: np.ndarray) -> np.ndarray:
    """Q4_1 blocks to float32: what `gguf.quants.dequantize` gives, in half the time.

    A block is 20 bytes for 32 values: scale and minimum (float16 each), then 16 bytes whose low
    halves are values 0-15 and whose high halves are values 16-31; value = scale * quant + minimum.

    Args:
        rows: uint8, [rows, 20 * blocks in a row].

    Returns:
        float32, [rows, 32 * blocks in a row].
    """
    blocks = rows.reshape(-1, 20)
    scale_minimum = np.ascontiguousarray(blocks[:, :4]).view(np.float16).astype(np.float32)
    quants = blocks[:, 4:]
    values = np.empty((blocks.shape[0], 2, 16), np.float32)
    np.copyto(values[:, 0], quants & 0x0F)
    np.copyto(values[:, 1], quants >> 4)
    values *= scale_minimum[:, :1, None]
    values += scale_minimum[:, 1:, None]
    return values.reshape(rows.shape[0], -1)


def _require_served(tensor_type: GGMLQuantizationType) -> None:
    """Try one block of zeros: an unserved type fails now, not half-way through a load."""
    if tensor_type in _PLAIN_DTYPES:
        return
    _, block_bytes = GGML_QUANT_SIZES[tensor_type]
    try:
        dequantize(np.zeros((1, block_bytes), np.uint8), tensor_type)
    except NotImplementedError:
        raise ModelFormatError(
            f"tensor type {tensor_type.name} is not served by the installed gguf package"
        ) from None


def _gguf_name(name: str) -> str:
    """`model.layers.3.mlp.up_proj.weight` -> `blk.3.ffn_up.weight`."""
    stem, _, kind = name.rpartition(".")
    if stem in _TOP_NAMES:
        return f"{_TOP_NAMES[stem]}.{kind}"
    _, _, layer, part = stem.split(".", 3)
    return f"blk.{layer}.{_LAYER_NAMES[part]}.{kind}"


def _unpermute(values: np.ndarray, num_heads: int) -> np.ndarray:
    """Rows of each head from rotary pairs side by side to pairs half a head apart."""
    pairs = values.reshape(num_heads, values.shape[0] // num_heads // 2, 2, *values.shape[1:])
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(values.shape)


def _value(metadata: Mapping[str, Any], key: str, kind: type, default: Any = None) -> Any:
    """A metadata value of exactly this type.

    Raises:
        ModelFormatError: it is missing and there is no default, or has another type.
    """
    value = metadata.get(key, default)
    if value is None:
        raise ModelFormatError(f"metadata key {key} is missing")
    if type(value) is not kind:
        raise ModelFormatError(f"{key}={value!r:.100} must be of type {kind.__name__}")
    return value


def _read_config(file: GGUFFile) -> LlamaConfig:
    """Say the metadata in the words of config.json and let that be read and checked."""
    metadata, tensors = file.metadata, file.tensors
    _refuse_unserved(metadata)
    hidden_size = _value(metadata, "llama.embedding_length", int)
    num_heads = _value(metadata, "llama.attention.head_count", int)
    if num_heads <= 0:
        raise ModelFormatError(f"llama.attention.head_count={num_heads} must be positive")
    head_dim = _value(metadata, "llama.attention.key_length", int, hidden_size // num_heads)
    for key in ("llama.attention.value_length", "llama.rope.dimension_count"):
        if metadata.get(key, head_dim) != head_dim:
            raise ModelFormatError(f"{key}={metadata[key]!r} must equal the head size {head_dim}")
    embeddings = tensors.get("token_embd.weight")
    if embeddings is None:
        raise ModelFormatError("tensor 'token_embd.weight' is missing")
    theta = _shortest(_value(metadata, "llama.rope.freq_base", float, 10000.0))
    config_json = {
        "vocab_size": embeddings.shape[0],
        "hidden_size": hidden_size,
        "intermediate_size": _value(metadata, "llama.feed_forward_length", int),
        "num_hidden_layers": _value(metadata, "llama.block_count", int),
        "num_attention_heads": num_heads,
        "num_key_value_heads": _value(metadata, "llama.attention.head_count_kv", int, num_heads),
        "head_dim": head_dim,
        "rms_norm_eps": _shortest(
            _value(metadata, "llama.attention.layer_norm_rms_epsilon", float)
        ),
        "rope_parameters": _rope_parameters(file, theta, head_dim),
        "tie_word_embeddings": "output.weight" not in tensors,
        "attention_bias": "blk.0.attn_q.bias" in tensors,
        "mlp_bias": "blk.0.ffn_gate.bias" in tensors,
        "max_position_embeddings": _value(metadata, "llama.context_length", int),
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": [
            metadata[key]
            for key in (f"tokenizer.ggml.{role}_token_id" for role in ("eos", "eot", "eom"))
            if key in metadata
        ],
    }
    return LlamaConfig.from_hf(config_json)


def _refuse_unserved(metadata: Mapping[str, Any]) -> None:
    for key, plain_values in _PLAIN_VALUES.items():
        value = metadata.get(f"llama.{key}")
        if value is not None and value not in plain_values:
            raise ModelFormatError(f"llama.{key}={value!r:.100} is not served")


def _rope_parameters(file: GGUFFile, theta: float, head_dim: int) -> dict[str, Any]:
    """Rotary parameters; the scaling of Llama 3.1 is recognised by the divisors it leaves behind.

    Raises:
        ModelFormatError: the file divides its frequencies in some other way.
    """
    if "rope_freqs.weight" not in file.tensors:
        return {"rope_theta": theta}
    tensor = file.tensors["rope_freqs.weight"]
    if tensor.type is not GGMLQuantizationType.F32 or tensor.shape != (head_dim // 2,):
        raise ModelFormatError(
            f"tensor 'rope_freqs.weight' is {tensor.type.name} of shape {tensor.shape},"
            f" but must be F32 of shape {(head_dim // 2,)}"
        )
    divisors = file.rows(tensor.name).view(np.float32).reshape(-1)
    factor = float(divisors.max())
    scaling = Llama3RopeScaling(
        factor, _LLAMA3_LOW_FREQ_FACTOR, _LLAMA3_HIGH_FREQ_FACTOR, _LLAMA3_ORIGINAL_CONTEXT
    )
    expected = scaling.divisors(RopeConfig(theta).inverse_frequencies(head_dim))
    if not np.allclose(divisors, expected, rtol=1e-4):
        raise ModelFormatError(
            "tensor 'rope_freqs.weight' does not hold the frequency scaling of Llama 3.1"
            f" (rope type llama3, original context {_LLAMA3_ORIGINAL_CONTEXT}); no other is served"
        )
    return {
        "rope_type": "llama3",
        "rope_theta": theta,
        "factor": factor,
        "low_freq_factor": scaling.low_freq_factor,
        "high_freq_factor": scaling.high_freq_factor,
        "original_max_position_embeddings": scaling.original_max_position_embeddings,
    }


def _shortest(value: float) -> float:
    """The shortest decimal that rounds to the same float32: 1e-5, not 9.99999974e-06."""
    return float(str(np.float32(value)))
