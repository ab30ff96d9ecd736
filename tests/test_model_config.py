"""Hyper-parameters from config.json: spellings, defaults, and what is refused by name."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from flowkv_jax.errors import ModelFormatError
from flowkv_jax.models.config import Llama3RopeScaling, LlamaConfig, RopeConfig
from tests.tiny_models import TINY_VARIANTS, tiny_config, tiny_tensors

LLAMA_31_SCALING = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def config_json(**changes: Any) -> dict[str, Any]:
    return {**tiny_config("gqa_tied"), **changes}


@pytest.mark.parametrize("variant", TINY_VARIANTS)
def test_tensor_shapes_are_those_of_the_checkpoint(variant: str) -> None:
    config = LlamaConfig.from_hf(tiny_config(variant))
    assert config.tensor_shapes() == {
        name: tensor.shape for name, tensor in tiny_tensors(variant).items()
    }


def test_missing_keys_take_the_defaults_of_transformers() -> None:
    required = {
        "vocab_size": 10,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
    }
    config = LlamaConfig.from_hf(required)
    assert config.num_kv_heads == 4
    assert config.head_dim == 8
    assert config.rms_norm_eps == 1e-6
    assert config.rope == RopeConfig(10000.0)
    assert config.max_position_embeddings == 2048
    assert not config.tie_word_embeddings
    assert config.bos_token_id is None
    assert config.eos_token_ids == ()
    for key in required:
        with pytest.raises(ModelFormatError, match=f"{key} is missing"):
            LlamaConfig.from_hf({**required, key: None})


def test_old_and_new_rope_spellings_mean_the_same() -> None:
    old = config_json(rope_theta=500000.0, rope_scaling=LLAMA_31_SCALING)
    new = config_json(
        rope_theta=None,
        rope_scaling=None,
        rope_parameters={**LLAMA_31_SCALING, "rope_theta": 500000.0},
    )
    older = config_json(
        rope_theta=500000,
        rope_scaling={**LLAMA_31_SCALING, "rope_type": None, "type": "llama3"},
    )
    expected = RopeConfig(500000.0, Llama3RopeScaling(8.0, 1.0, 4.0, 8192))
    for spelling in (old, new, older):
        assert LlamaConfig.from_hf(spelling).rope == expected


def test_end_of_sequence_ids_come_from_both_files_in_order() -> None:
    config = LlamaConfig.from_hf(
        config_json(eos_token_id=[7, 2]), {"eos_token_id": [2, 9], "bos_token_id": 5}
    )
    assert config.eos_token_ids == (7, 2, 9)
    assert config.bos_token_id == 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": "64"}, r"hidden_size='64' must be a positive integer"),
        ({"hidden_size": True}, r"hidden_size=True"),
        ({"num_hidden_layers": 0}, r"num_hidden_layers=0"),
        ({"rms_norm_eps": -1.0}, r"rms_norm_eps=-1.0"),
        ({"rms_norm_eps": math.nan}, r"rms_norm_eps=nan"),
        ({"tie_word_embeddings": 1}, r"tie_word_embeddings=1 must be true or false"),
        ({"num_key_value_heads": 3}, r"num_attention_heads=8 is not a multiple .*heads=3"),
        ({"head_dim": None, "hidden_size": 63}, r"hidden_size=63 is not a multiple"),
        ({"head_dim": 7}, r"head_dim=7 is odd"),
        ({"hidden_act": "gelu"}, r"hidden_act='gelu' is not served; served: 'silu'"),
        ({"eos_token_id": "</s>"}, r"eos_token_id='</s>'"),
        ({"eos_token_id": [1, -1]}, r"eos_token_id=\[1, -1\]"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, r"rope type 'yarn'"),
        ({"rope_scaling": {"type": "linear", "factor": 4.0}}, r"rope type 'linear'"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, r"low_freq_factor is missing"),
        ({"rope_scaling": {**LLAMA_31_SCALING, "high_freq_factor": 1.0}}, r"high_freq_factor=1.0"),
        ({"rope_scaling": {**LLAMA_31_SCALING, "factor": 0.5}}, r"factor=0.5"),
        ({"rope_parameters": "llama3"}, r"rope_parameters='llama3' must be an object"),
        ({"partial_rotary_factor": 0.5}, r"partial_rotary_factor=0.5"),
        ({"quantization_config": {"quant_method": "gptq"}}, r"quant_method='gptq'"),
    ],
)
def test_what_cannot_be_computed_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelFormatError, match=message):
        LlamaConfig.from_hf(config_json(**changes))


def test_plain_rotary_frequencies() -> None:
    frequencies = RopeConfig(10000.0).inverse_frequencies(8)
    np.testing.assert_allclose(frequencies, [1.0, 0.1, 0.01, 0.001], rtol=1e-12)


def test_llama3_scaling_band_by_band() -> None:
    """Short waves are kept, long ones divided by the factor, and between them it is smooth."""
    scaling = Llama3RopeScaling(8.0, 1.0, 4.0, 8192)
    wavelengths = np.array([10.0, 8192 / 4, 8192 / 2.5, 8192.0, 100000.0])
    divisors = scaling.divisors(2 * np.pi / wavelengths)
    np.testing.assert_allclose(divisors, [1, 1, 1 / (0.5 / 8 + 0.5), 8, 8], rtol=1e-12)
