"""Tiny random Llama folders in the Hugging Face layout, the same bytes on every machine.

    folder = write_tiny_model(tmp_path / "model", "gqa_tied")

Each variant turns on options that the others leave off; together they cover what `LlamaConfig` can
say. All share a vocabulary of 512 and a byte-level BPE tokenizer with a chat template, so an engine
can serve them. `tests/goldens/make_goldens.py` runs transformers over the very same folders.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

VOCAB_SIZE = 512
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
BOS_TOKEN_ID = 1
EOS_TOKEN_ID = 2
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

_BASE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
    "max_position_embeddings": 1024,
    "bos_token_id": BOS_TOKEN_ID,
    "eos_token_id": EOS_TOKEN_ID,
}
# The scaling of Llama 3.1 with its context cut down, so that a short prompt crosses every band.
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}

TINY_VARIANTS: dict[str, dict[str, Any]] = {
    "gqa_tied": {"tie_word_embeddings": True},
    "mha_untied": {"num_key_value_heads": 8, "rope_theta": 100000.0},
    "llama3_rope": {
        "rope_theta": 500000.0,
        "rope_scaling": _LLAMA3_ROPE,
        "tie_word_embeddings": True,
        "head_dim": 16,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
    },
    "attention_bias": {"attention_bias": True, "num_hidden_layers": 3},
    "mlp_bias": {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 8},
    # Heads wider than hidden_size / num_attention_heads, and the spelling of transformers 5.
    "wide_head_dim": {
        "head_dim": 32,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "rope_parameters": {**_LLAMA3_ROPE, "rope_theta": 20000.0},
    },
}

_DTYPES: dict[str, tuple[str, Any]] = {
    "float32": ("F32", np.float32),
    "bfloat16": ("BF16", ml_dtypes.bfloat16),
    "float16": ("F16", np.float16),
}


def write_tiny_model(
    folder: Path | str, variant: str, dtype: str = "float32", shards: int = 1
) -> Path:
    """Write the variant's folder: weights, configuration, tokenizer. Returns `folder` as a Path.

    Args:
        folder: made if it is not there.
        variant: a key of `TINY_VARIANTS`.
        dtype: float32, bfloat16 or float16; the float32 values, rounded.
        shards: number of safetensors files; above 1 an index file is written too.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    config = tiny_config(variant, dtype)
    tensors = {
        name: values.astype(_DTYPES[dtype][1]) for name, values in tiny_tensors(variant).items()
    }
    if shards == 1:
        write_safetensors(folder / "model.safetensors", tensors)
    else:
        _write_shards(folder, tensors, shards)
    _write_json(folder / "config.json", config)
    _write_json(
        folder / "generation_config.json",
        {"bos_token_id": BOS_TOKEN_ID, "eos_token_id": EOS_TOKEN_ID},
    )
    write_tiny_tokenizer(folder)
    return folder


def tiny_config(variant: str, dtype: str = "float32") -> dict[str, Any]:
    """The variant's `config.json`."""
    config = {**_BASE, **TINY_VARIANTS[variant], "torch_dtype": dtype}
    if "rope_parameters" in config:
        del config["rope_theta"], config["rope_scaling"]
    return config


def tiny_tensors(variant: str) -> dict[str, np.ndarray]:
    """The variant's weights, float32, under Hugging Face names.

    Scaled so that activations stay near 1 and greedy choices have clear margins. Drawn from
    `RandomState`, whose stream numpy has promised never to change (a `Generator`'s may).
    """
    config = tiny_config(variant)
    random = np.random.RandomState(1000 + list(TINY_VARIANTS).index(variant))
    tensors = {}
    for name, shape in _shapes(config).items():
        noise = random.standard_normal(shape)
        if name.endswith("norm.weight"):
            values = 1 + 0.2 * noise
        elif name.endswith(".bias"):
            values = 0.3 * noise
        elif name == "model.embed_tokens.weight" and config["tie_word_embeddings"]:
            # Larger ones make a tied model repeat its last token for ever.
            values = 0.25 * noise
        elif name == "model.embed_tokens.weight":
            values = noise
        else:
            values = 1.5 * noise / np.sqrt(shape[1])
        tensors[name] = values.astype(np.float32)
    return tensors


def _shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    query_width = config["num_attention_heads"] * config["head_dim"]
    kv_width = config["num_key_value_heads"] * config["head_dim"]
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCAB_SIZE, hidden)}
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        for part, outputs, inputs, biased in (
            ("self_attn.q_proj", query_width, hidden, config["attention_bias"]),
            ("self_attn.k_proj", kv_width, hidden, config["attention_bias"]),
            ("self_attn.v_proj", kv_width, hidden, config["attention_bias"]),
            ("self_attn.o_proj", hidden, query_width, config["attention_bias"]),
            ("mlp.gate_proj", inner, hidden, config["mlp_bias"]),
            ("mlp.up_proj", inner, hidden, config["mlp_bias"]),
            ("mlp.down_proj", hidden, inner, config["mlp_bias"]),
        ):
            shapes[f"{prefix}.{part}.weight"] = (outputs, inputs)
            if biased:
                shapes[f"{prefix}.{part}.bias"] = (outputs,)
        shapes[f"{prefix}.input_layernorm.weight"] = (hidden,)
        shapes[f"{prefix}.post_attention_layernorm.weight"] = (hidden,)
    shapes["model.norm.weight"] = (hidden,)
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (VOCAB_SIZE, hidden)
    return shapes


def write_safetensors(path: Path, tensors: Mapping[str, np.ndarray]) -> None:
    """Write one safetensors file: header length (8 bytes), JSON header, tensor bytes end to end."""
    tags = {np.dtype(dtype): tag for tag, dtype in _DTYPES.values()}
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, tensor in tensors.items():
        header[name] = {
            "dtype": tags[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, offset + tensor.nbytes],
        }
        offset += tensor.nbytes
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)
    with path.open("wb") as file:
        file.write(len(encoded).to_bytes(8, "little"))
        file.write(encoded)
        for tensor in tensors.values():
            file.write(np.ascontiguousarray(tensor).tobytes())


def _write_shards(folder: Path, tensors: Mapping[str, np.ndarray], shards: int) -> None:
    names = list(tensors)
    weight_map = {}
    for shard in range(shards):
        file_name = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        # Dealt out like cards: a layer's tensors lie in several files.
        chosen = {name: tensors[name] for name in names[shard::shards]}
        write_safetensors(folder / file_name, chosen)
        weight_map.update(dict.fromkeys(chosen, file_name))
    total = sum(tensor.nbytes for tensor in tensors.values())
    _write_json(
        folder / "model.safetensors.index.json",
        {"metadata": {"total_size": total}, "weight_map": weight_map},
    )


def write_tiny_tokenizer(folder: Path) -> None:
    """Write the tokenizer files: byte-level BPE, 512 entries, a chat template."""
    vocab, merges = train_bpe(VOCAB_SIZE - len(SPECIAL_TOKENS))
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    added = [
        {"id": token_id, "content": token, **flags, "special": True}
        for token_id, token in enumerate(SPECIAL_TOKENS)
    ]
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": {**byte_level, "use_regex": True},
        "post_processor": None,
        "decoder": {**byte_level, "use_regex": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {token: token_id for token_id, token in enumerate((*SPECIAL_TOKENS, *vocab))},
            "merges": [list(pair) for pair in merges],
        },
    }
    _write_json(folder / "tokenizer.json", tokenizer)
    _write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": SPECIAL_TOKENS[BOS_TOKEN_ID],
            "eos_token": SPECIAL_TOKENS[EOS_TOKEN_ID],
            "pad_token": SPECIAL_TOKENS[EOS_TOKEN_ID],
            "clean_up_tokenization_spaces": False,
            "model_max_length": _BASE["max_position_embeddings"],
            "chat_template": CHAT_TEMPLATE,
        },
    )


_CORPUS = """
The quick brown fox jumps over the lazy dog while the other animals of the farm look on and wonder
what all this running is about. A language model reads the words that came before and guesses the
word that comes next; then it reads that word too and guesses again. When the answer is ready, the
system sends it to the user who asked for it. Some questions are short, others are long and need
thought. What is the capital of France? Where does the river begin, and who lives in the house on
the hill? You are a helpful assistant. Hello world, how are you today? There were thirty three
thousand reasons to continue, but nothing could be done without patience, time and understanding.
"""


def train_bpe(size: int) -> tuple[list[str], list[tuple[str, str]]]:
    """Byte-level BPE entries and merges of `_CORPUS`; ties go to the pair that sorts first."""
    vocab = sorted(_byte_alphabet())
    merges: list[tuple[str, str]] = []
    words = [["Ġ", *word] for word in _CORPUS.split()]
    while len(vocab) < size:
        pairs = Counter(pair for word in words for pair in zip(word, word[1:], strict=False))
        first, second = min(pairs, key=lambda pair: (-pairs[pair], pair))
        merges.append((first, second))
        if first + second not in vocab:
            vocab.append(first + second)
        words = [_merge(word, first, second) for word in words]
    return vocab, merges


def _byte_alphabet() -> list[str]:
    """The 256 characters that stand for bytes in GPT-2's byte-level BPE.

    Printable Latin-1 characters stand for themselves; the others are moved up from U+0100 in order.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    moved = (byte for byte in range(256) if byte not in printable)
    return [chr(byte) for byte in printable] + [chr(0x100 + i) for i, _ in enumerate(moved)]


def _merge(word: list[str], first: str, second: str) -> list[str]:
    merged: list[str] = []
    for piece in word:
        if merged and merged[-1] == first and piece == second:
            merged[-1] = first + second
        else:
            merged.append(piece)
    return merged


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
