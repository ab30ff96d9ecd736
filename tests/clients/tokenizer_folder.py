"""The served model's tokenizer as a folder in Hugging Face's form, for clients that count tokens.

The model comes as one GGUF file; tools want `tokenizer.json` and `tokenizer_config.json`.
"""

from __future__ import annotations

import json
from pathlib import Path

from flowkv_jax.config import DEFAULT_MODEL
from flowkv_jax.models.source import open_model


def write_tokenizer_folder(folder: Path) -> Path:
    """Write the default model's tokenizer into `folder`, which may exist. Returns it."""
    with open_model(DEFAULT_MODEL) as source:
        tokenizer, max_tokens = source.tokenizer, source.config.max_position_embeddings
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(tokenizer.to_json(), encoding="utf-8")
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": tokenizer.bos_token,
        "eos_token": tokenizer.eos_token,
        "pad_token": tokenizer.eos_token,
        "chat_template": tokenizer.chat_template,
        "model_max_length": max_tokens,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
    return folder
