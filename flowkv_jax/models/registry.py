"""The architectures that are served, by the names checkpoints give them. No JAX.

A name that is not here is refused. Nothing in a checkpoint is ever executed: `auto_map` and other
pointers to code inside a model folder are not read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flowkv_jax.errors import ModelFormatError
from flowkv_jax.models.config import LlamaConfig


@dataclass(frozen=True)
class Architecture:
    """One served architecture.

    Attributes:
        name: as in "architectures" of config.json.
        gguf_name: as in `general.architecture` of a GGUF file.
        read_config: makes the configuration of config.json and generation_config.json.
    """

    name: str
    gguf_name: str
    read_config: Callable[[Mapping[str, Any], Mapping[str, Any] | None], LlamaConfig]


ARCHITECTURES: tuple[Architecture, ...] = (
    Architecture("LlamaForCausalLM", gguf_name="llama", read_config=LlamaConfig.from_hf),
)


def from_hf_names(names: Sequence[str] | None) -> Architecture:
    """The architecture of a Hugging Face folder, given its list of "architectures".

    Raises:
        ModelFormatError: none is named, or none of the named is served.
    """
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names) or not names:
        raise ModelFormatError(f"architectures={names!r} must name the model's architecture")
    for architecture in ARCHITECTURES:
        if architecture.name in names:
            return architecture
    raise _unserved(", ".join(names), [architecture.name for architecture in ARCHITECTURES])


def from_gguf_name(name: str) -> Architecture:
    """The architecture of a GGUF file, given its `general.architecture`.

    Raises:
        ModelFormatError: it is not served.
    """
    for architecture in ARCHITECTURES:
        if architecture.gguf_name == name:
            return architecture
    raise _unserved(name, [architecture.gguf_name for architecture in ARCHITECTURES])


def _unserved(name: str, served: Sequence[str]) -> ModelFormatError:
    return ModelFormatError(
        f"architecture {name!r:.200} is not served; served: {', '.join(served)}"
    )
