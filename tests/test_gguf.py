"""A Llama in a GGUF file, and its tokenizer, on files written by the gguf package."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from gguf import GGUFWriter
from gguf.constants import GGMLQuantizationType
from gguf.quants import dequantize, quantize
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as numpy_strategies

from flowkv_jax.errors import ModelFormatError, NotFoundError
from flowkv_jax.models.config import Llama3RopeScaling, LlamaConfig, RopeConfig
from flowkv_jax.models.gguf import GGUFModel, dequantize_q4_1
from flowkv_jax.models.gguf_tokenizer import pre_tokenizer
from flowkv_jax.models.source import open_model
from tests.tiny_models import (
    CHAT_TEMPLATE,
    SPECIAL_TOKENS,
    tiny_config,
    tiny_tensors,
    train_bpe,
)

Q8_0, Q4_1, F16 = (GGMLQuantizationType[name] for name in ("Q8_0", "Q4_1", "F16"))
BF16 = GGMLQuantizationType.BF16
NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "model.layers": "blk",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def to_gguf_name(name: str) -> str:
    for hf_part, gguf_part in NAMES.items():
        name = name.replace(hf_part, gguf_part)
    return name


def permute(values: np.ndarray, num_heads: int) -> np.ndarray:
    """What llama.cpp's converter does to the rows of q and k."""
    halves = values.reshape(num_heads, 2, values.shape[0] // num_heads // 2, *values.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(values.shape)


def write_gguf(
    path: Path,
    variant: str = "gqa_tied",
    tensor_type: GGMLQuantizationType = GGMLQuantizationType.F32,
    change: Callable[[GGUFWriter], None] = lambda writer: None,
    metadata: dict[str, Any] | None = None,
    drop: str | None = None,
) -> Path:
    """A tiny variant as a GGUF file. `metadata` changes (or with None drops) `llama.` keys."""
    config = tiny_config(variant)
    writer = GGUFWriter(path, "llama")
    keys: dict[str, Any] = {
        "block_count": config["num_hidden_layers"],
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.key_length": config["head_dim"],
        "attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "rope.freq_base": config.get("rope_theta", 10000.0),
        **(metadata or {}),
    }
    for key, value in keys.items():
        if value is not None:
            writer.add_key_value(f"llama.{key}", value, _value_type(value))
    _write_tokenizer(writer)
    for name, tensor in tiny_tensors(variant).items():
        if name == drop:
            continue
        if ".q_proj." in name:
            tensor = permute(tensor, config["num_attention_heads"])
        elif ".k_proj." in name:
            tensor = permute(tensor, config["num_key_value_heads"])
        if tensor.ndim == 1:
            writer.add_tensor(to_gguf_name(name), tensor)
        else:
            writer.add_tensor(
                to_gguf_name(name), quantize(tensor, tensor_type), raw_dtype=tensor_type
            )
    change(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _value_type(value: Any) -> Any:
    from gguf.constants import GGUFValueType

    types = {int: "UINT32", float: "FLOAT32", str: "STRING", bool: "BOOL", list: "ARRAY"}
    return GGUFValueType[types[type(value)]]


def _write_tokenizer(writer: GGUFWriter) -> None:
    vocab, merges = train_bpe(512 - len(SPECIAL_TOKENS))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list([*SPECIAL_TOKENS, *vocab])
    writer.add_token_types([3] * len(SPECIAL_TOKENS) + [1] * len(vocab))
    writer.add_token_merges([" ".join(pair) for pair in merges])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_eot_token_id(0)
    writer.add_chat_template(CHAT_TEMPLATE)


@pytest.mark.parametrize("variant", ["gqa_tied", "mha_untied", "attention_bias", "mlp_bias"])
def test_configuration_and_weights_come_back(tmp_path: Path, variant: str) -> None:
    with open_model(write_gguf(tmp_path / "a.gguf", variant)) as source:
        expected = LlamaConfig.from_hf({**tiny_config(variant), "eos_token_id": [2, 0]})
        assert source.config == expected
        for name, tensor in tiny_tensors(variant).items():
            read = source.read(name)
            assert read.dtype == np.float32
            np.testing.assert_array_equal(read, tensor, err_msg=name)
            source.release(name)


@pytest.mark.parametrize("tensor_type", [Q8_0, Q4_1], ids=lambda tensor_type: tensor_type.name)
def test_quantised_weights_are_those_the_gguf_package_gives(
    tmp_path: Path, tensor_type: GGMLQuantizationType
) -> None:
    source = open_model(write_gguf(tmp_path / "a.gguf", tensor_type=tensor_type))
    for name, tensor in tiny_tensors("gqa_tied").items():
        if tensor.ndim == 2:
            tensor = dequantize(quantize(tensor, tensor_type), tensor_type)
        np.testing.assert_array_equal(source.read(name), tensor, err_msg=name)


def test_half_precision_weights_keep_their_type(tmp_path: Path) -> None:
    name = "model.layers.1.mlp.down_proj.weight"
    for tensor_type, dtype in ((F16, np.float16), (BF16, ml_dtypes.bfloat16)):
        source = open_model(write_gguf(tmp_path / "a.gguf", tensor_type=tensor_type))
        values = source.read(name)
        assert values.dtype == dtype
        np.testing.assert_array_equal(values, tiny_tensors("gqa_tied")[name].astype(dtype))


@given(
    numpy_strategies.arrays(np.uint8, (3, 40)),
    numpy_strategies.arrays(np.float16, (3, 2, 2), elements=st.floats(-100, 100, width=16)),
)
def test_own_q4_1_equals_that_of_the_gguf_package(
    rows: np.ndarray, scale_minimum: np.ndarray
) -> None:
    rows.reshape(3, 2, 20)[:, :, :4] = scale_minimum.view(np.uint8)
    np.testing.assert_array_equal(dequantize_q4_1(rows), dequantize(rows, Q4_1))


def test_llama3_rope_scaling_is_recognised_by_its_divisors(tmp_path: Path) -> None:
    scaling = Llama3RopeScaling(32.0, 1.0, 4.0, 8192)
    divisors = scaling.divisors(RopeConfig(500000.0).inverse_frequencies(8)).astype(np.float32)

    def add(values: np.ndarray) -> Callable[[GGUFWriter], None]:
        return lambda writer: writer.add_tensor("rope_freqs.weight", values)

    metadata = {"rope.freq_base": 500000.0}
    path = write_gguf(tmp_path / "a.gguf", change=add(divisors), metadata=metadata)
    assert open_model(path).config.rope == RopeConfig(500000.0, scaling)
    path = write_gguf(tmp_path / "a.gguf", change=add(divisors * 1.01), metadata=metadata)
    with pytest.raises(ModelFormatError, match=r"rope_freqs.weight.*does not hold"):
        open_model(path)
    path = write_gguf(tmp_path / "a.gguf", change=add(divisors[1:]), metadata=metadata)
    with pytest.raises(ModelFormatError, match=r"must be F32 of shape \(4,\)"):
        open_model(path)


def test_tokenizer_is_rebuilt_from_the_metadata(tmp_path: Path) -> None:
    tokenizer = open_model(write_gguf(tmp_path / "a.gguf")).tokenizer
    assert tokenizer.vocab_size == 512
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (1, 2)
    assert tokenizer.chat_template == CHAT_TEMPLATE
    text = "What is the capital? <|im_end|>é 123"
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert 2 in ids


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"expert_count": 8}, r"llama.expert_count=8 is not served"),
        ({"rope.scaling.type": "yarn"}, r"llama.rope.scaling.type='yarn' is not served"),
        ({"logit_scale": 2.0}, r"llama.logit_scale=2.0 is not served"),
        ({"embedding_length": None}, r"llama.embedding_length is missing"),
        ({"embedding_length": "64"}, r"llama.embedding_length='64' must be of type int"),
        ({"attention.head_count": 0}, r"llama.attention.head_count=0 must be positive"),
        ({"attention.head_count": [8, 4]}, r"must be of type int"),
        ({"attention.value_length": 16}, r"attention.value_length=16 must equal the head size 8"),
        ({"rope.dimension_count": 4}, r"rope.dimension_count=4 must equal the head size 8"),
        ({"feed_forward_length": 32}, r"'blk.0.ffn_gate.weight' has shape \(160, 64\)"),
        ({"block_count": 3}, r"tensor 'blk.2.attn_norm.weight' is missing"),
    ],
)
def test_metadata_that_is_not_a_plain_llama_is_refused(
    tmp_path: Path, metadata: dict[str, Any], message: str
) -> None:
    path = write_gguf(tmp_path / "a.gguf", metadata=metadata)
    with pytest.raises(ModelFormatError, match=message) as caught:
        open_model(path)
    assert str(path) in str(caught.value)


def test_missing_tensors_are_named(tmp_path: Path) -> None:
    for name in ("model.embed_tokens.weight", "model.layers.1.self_attn.o_proj.weight"):
        path = write_gguf(tmp_path / "a.gguf", drop=name)
        with pytest.raises(ModelFormatError, match=f"'{to_gguf_name(name)}' is missing"):
            open_model(path)


def test_other_architectures_and_split_files_are_refused(tmp_path: Path) -> None:
    writer = GGUFWriter(tmp_path / "a.gguf", "qwen3")
    writer.add_tensor("x", np.zeros(4, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ModelFormatError, match="architecture 'qwen3' is not served; served: llama"):
        open_model(tmp_path / "a.gguf")
    path = write_gguf(tmp_path / "b.gguf", change=lambda w: w.add_uint16("split.count", 2))
    with pytest.raises(ModelFormatError, match="llama-gguf-split --merge"):
        open_model(path)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("tokenizer.ggml.model", "llama", "tokenizer.ggml.model='llama' is not served"),
        ("tokenizer.ggml.pre", "qwen2", "tokenizer.ggml.pre='qwen2' is not served; served: smollm"),
        ("tokenizer.ggml.eos_token_id", 512, r"eos_token_id=512 is not in \[0, 512\)"),
        ("tokenizer.ggml.token_type", [1], "must be a list of 512 types"),
        ("tokenizer.ggml.merges", ["nope nope"], "do not fit the tokens"),
    ],
)
def test_other_tokenizers_are_refused_by_name(
    tmp_path: Path, key: str, value: Any, message: str
) -> None:
    source = open_model(write_gguf(tmp_path / "a.gguf"))
    assert isinstance(source, GGUFModel)
    source._file.metadata[key] = value
    with pytest.raises(ModelFormatError, match=message):
        _ = source.tokenizer


def test_llama3_tokenizers_cut_in_their_own_way_and_begin_with_a_token(tmp_path: Path) -> None:
    source = open_model(write_gguf(tmp_path / "a.gguf"))
    assert isinstance(source, GGUFModel)
    source._file.metadata["tokenizer.ggml.pre"] = "llama-bpe"
    tokenizer = source.tokenizer
    ids = tokenizer.encode("What is the capital of France?")
    assert ids[0] == tokenizer.bos_token_id
    assert tokenizer.decode(ids) == "What is the capital of France?"
    assert tokenizer.encode("What", add_special_tokens=False)[0] != tokenizer.bos_token_id


@pytest.mark.parametrize(
    ("pre", "expected"),
    [
        ("smollm", ["I", "'m", "Ġin", "Ġ", "2", "0", "2", "6", "!", "ĠĠ", "Ġok", "Ċ"]),
        ("gpt-2", ["I", "'m", "Ġin", "Ġ2026", "!", "ĠĠ", "Ġok", "Ċ"]),
        ("llama-bpe", ["I", "'m", "Ġin", "Ġ", "202", "6", "!", "ĠĠ", "Ġok", "Ċ"]),
    ],
)
def test_how_text_is_cut_before_merging(pre: str, expected: list[str]) -> None:
    pieces = pre_tokenizer(pre).pre_tokenize_str("I'm in 2026!   ok\n")
    assert [piece for piece, _ in pieces] == expected


def test_the_default_model() -> None:
    with open_model("smollm2-135m-instruct") as source:
        config = source.config
        assert (config.num_layers, config.num_heads, config.num_kv_heads) == (30, 9, 3)
        assert (config.hidden_size, config.head_dim, config.vocab_size) == (576, 64, 49152)
        assert config.rms_norm_eps == 1e-5
        assert config.rope == RopeConfig(100000.0)
        assert config.tie_word_embeddings
        assert config.eos_token_ids == (2,)
        assert source.tokenizer.vocab_size == config.vocab_size


def test_a_file_without_tokenizer_says_so(tmp_path: Path) -> None:
    source = open_model(write_gguf(tmp_path / "a.gguf"))
    assert isinstance(source, GGUFModel)
    del source._file.metadata["tokenizer.ggml.tokens"]
    with pytest.raises(NotFoundError, match="carries no tokenizer"):
        _ = source.tokenizer


@pytest.fixture(scope="module")
def whole_file(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return write_gguf(tmp_path_factory.mktemp("whole") / "a.gguf").read_bytes()


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_a_damaged_file_is_read_or_refused_and_nothing_else(
    whole_file: bytes, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    path = tmp_path_factory.mktemp("damaged") / "a.gguf"
    content = bytearray(whole_file)
    # Most of the structure lies in the first kilobyte and in the tensor list.
    position = data.draw(st.integers(0, 1000) | st.integers(0, 20_000))
    damage = data.draw(st.binary(min_size=0, max_size=8))
    content[position : position + len(damage)] = damage
    cut_bytes = data.draw(st.just(0) | st.integers(1, len(content)))
    path.write_bytes(content[: len(content) - cut_bytes])
    try:
        with open_model(path) as source:
            for name in source.names():
                source.read(name)
            _ = source.tokenizer
    except (ModelFormatError, NotFoundError) as error:
        assert str(path) in str(error)
