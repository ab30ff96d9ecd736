"""What whoever talks to callers knows of a model: everything but the weights. No JAX."""

from __future__ import annotations

from dataclasses import dataclass

from flowkv_jax.config import ModelConfig
from flowkv_jax.errors import ConfigError
from flowkv_jax.load import ModelInfo
from flowkv_jax.models.config import LlamaConfig
from flowkv_jax.models.source import ModelSource
from flowkv_jax.tokenizer import Tokenizer
from pallas_kernels.kv_layout import KVLayout


@dataclass(frozen=True)
class ModelDescription:
    """A model as it is served.

    Attributes:
        max_model_len: prompt plus output, in tokens.
        chat_template: Jinja text; None if there is none.
        generation_defaults: sampling parameters its makers recommend.
    """

    model: str
    served_model_name: str
    architecture: str
    config: LlamaConfig
    max_model_len: int
    tokenizer: Tokenizer
    chat_template: str | None
    generation_defaults: dict[str, float]

    def info(self, layout: KVLayout, num_blocks: int) -> ModelInfo:
        """As clients see it, served from pools of `num_blocks` blocks of `layout`."""
        return ModelInfo(
            model=self.model,
            served_model_name=self.served_model_name,
            architecture=self.architecture,
            dtype=layout.dtype,
            max_model_len=self.max_model_len,
            vocab_size=self.config.vocab_size,
            eos_token_ids=self.config.eos_token_ids,
            num_layers=layout.num_layers,
            num_kv_heads=layout.num_kv_heads,
            head_dim=layout.head_dim,
            block_size=layout.block_size,
            num_blocks=num_blocks,
            has_chat_template=self.chat_template is not None,
        )


def describe(source: ModelSource, config: ModelConfig) -> ModelDescription:
    """An open checkpoint as it is configured to be served.

    Raises:
        ConfigError: `max_model_len` exceeds the model's, or `chat_template` cannot be read.
        NotFoundError, ModelFormatError: see `ModelSource.tokenizer`.
    """
    return ModelDescription(
        model=config.model,
        served_model_name=config.served_model_name or config.model.rstrip("/").rsplit("/", 1)[-1],
        architecture=source.architecture.name,
        config=source.config,
        max_model_len=_max_model_len(config, source.config),
        tokenizer=source.tokenizer,
        chat_template=_chat_template(config, source.tokenizer),
        generation_defaults=dict(source.generation_defaults),
    )


def _max_model_len(config: ModelConfig, model: LlamaConfig) -> int:
    wanted = config.max_model_len
    if wanted is None:
        return model.max_position_embeddings
    if wanted > model.max_position_embeddings:
        raise ConfigError(
            f"max_model_len={wanted} exceeds the model's"
            f" max_position_embeddings={model.max_position_embeddings}",
            parameter="max_model_len",
            value=wanted,
        )
    return wanted


def _chat_template(config: ModelConfig, tokenizer: Tokenizer) -> str | None:
    path = config.chat_template
    if path is None:
        return tokenizer.chat_template
    try:
        with open(path, encoding="utf-8") as file:
            return file.read()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"chat_template={path!r} cannot be read: {error}",
            parameter="chat_template",
            value=path,
        ) from error
