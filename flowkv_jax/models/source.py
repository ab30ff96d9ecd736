"""One view over every kind of checkpoint: weights by Hugging Face name, whatever the file is.

    with open_model("smollm2-135m-instruct") as source:
        for name in source.names():
            upload(name, source.read(name))
            source.release(name)

Every weight the configuration asks for is known to be there, in its right shape, once a source is
open. Reading is safe from several threads. No JAX.
"""

from __future__ import annotations

import abc
import json
import math
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from flowkv_jax.errors import ModelFormatError, NotFoundError
from flowkv_jax.models import hub, registry
from flowkv_jax.models.config import LlamaConfig
from flowkv_jax.models.safetensors_file import PICKLE_SUFFIXES, Checkpoint, pickle_refusal
from flowkv_jax.tokenizer import Tokenizer

# The sampling parameters a generation_config.json may set, named as in SamplingParams.
_GENERATION_KEYS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


class ModelSource(abc.ABC):
    """An open checkpoint.

    Attributes:
        path: the file or folder.
        architecture: the served architecture it is of.
        config: its hyper-parameters.
        generation_defaults: sampling parameters the model's makers recommend (may be empty).
    """

    path: Path
    architecture: registry.Architecture
    config: LlamaConfig
    generation_defaults: Mapping[str, float]

    @property
    @abc.abstractmethod
    def tokenizer(self) -> Tokenizer:
        """Read on first use.

        Raises:
            NotFoundError: the checkpoint carries none.
            ModelFormatError: it is broken or of a kind that is not served.
        """

    def names(self) -> tuple[str, ...]:
        """The weights of the model, embeddings first and then layer by layer."""
        return tuple(self._shapes)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a weight, [out, in] for a projection."""
        return self._shapes[name]

    @cached_property
    def _shapes(self) -> dict[str, tuple[int, ...]]:
        return self.config.tensor_shapes()

    @abc.abstractmethod
    def read(self, name: str) -> np.ndarray:
        """A weight as float32, bfloat16 or float16, of `shape(name)`; do not write to it.

        A view of the file where the file stores the values plainly, else a new array.
        """

    @abc.abstractmethod
    def release(self, name: str) -> None:
        """Say that a weight has been used: what it held of resident memory may go."""

    @abc.abstractmethod
    def close(self) -> None:
        """Let go of the files; arrays already read stay valid. Idempotent."""

    def __enter__(self) -> ModelSource:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def open_model(model: str | Path) -> ModelSource:
    """Open a checkpoint for reading.

    Args:
        model: a name in `hub.KNOWN_MODELS` (fetched if it is not there yet), a GGUF file, or a
            Hugging Face folder (config.json, safetensors, tokenizer.json).

    Raises:
        NotFoundError: there is nothing of that name.
        ModelFormatError: it is broken, or not of a kind that is served.
    """
    path = hub.resolve(str(model)) if str(model) in hub.KNOWN_MODELS else Path(model).expanduser()
    if not path.exists():
        raise NotFoundError(
            f"model {str(model)!r}: no such file or folder, and no known model; give a GGUF file,"
            f" a Hugging Face folder, or one of: {', '.join(hub.KNOWN_MODELS)}"
        )
    if path.is_dir():
        return HuggingFaceFolder(path)
    if path.suffix in PICKLE_SUFFIXES:
        raise pickle_refusal(path)
    if path.suffix != ".gguf":
        raise ModelFormatError(
            f"{path}: neither a .gguf file nor a folder; for safetensors give the folder that"
            " holds config.json beside them"
        )
    # Imports the gguf package, which a Hugging Face folder does not need.
    from flowkv_jax.models.gguf import GGUFModel

    return GGUFModel(path)


class HuggingFaceFolder(ModelSource):
    """config.json with safetensors, single or sharded. Weights are views of the files."""

    def __init__(self, path: Path) -> None:
        self.path = path
        config_json = _read_json(path / "config.json")
        if config_json is None:
            raise NotFoundError(f"{path}: no config.json; is this a Hugging Face model folder?")
        generation_json = _read_json(path / "generation_config.json")
        try:
            self.architecture = registry.from_hf_names(config_json.get("architectures"))
            self.config = self.architecture.read_config(config_json, generation_json)
            self.generation_defaults = _generation_defaults(generation_json or {})
        except ModelFormatError as error:
            raise ModelFormatError(f"{path}: {error}") from error
        self._checkpoint = Checkpoint(path)
        self._check_weights()

    @cached_property
    def tokenizer(self) -> Tokenizer:
        return Tokenizer.from_folder(self.path)

    def read(self, name: str) -> np.ndarray:
        return self._checkpoint.read(name)

    def release(self, name: str) -> None:
        self._checkpoint.release(name)

    def close(self) -> None:
        self._checkpoint.close()

    def _check_weights(self) -> None:
        present = set(self._checkpoint.names())
        for name, shape in self.config.tensor_shapes().items():
            if name not in present:
                raise ModelFormatError(f"{self.path}: tensor {name!r} is missing")
            if self._checkpoint.shape(name) != shape:
                raise ModelFormatError(
                    f"{self.path}: tensor {name!r} has shape {self._checkpoint.shape(name)},"
                    f" but config.json asks for {shape}"
                )
            # Fails now, not half-way through a load, if the type is not served.
            self._checkpoint.read(name)


def _read_json(path: Path) -> dict[str, Any] | None:
    """The object in the file, or None if there is no such file."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        raise ModelFormatError(f"{path}: not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelFormatError(f"{path}: expected an object, got {value!r:.100}")
    return value


def _generation_defaults(generation_json: Mapping[str, Any]) -> dict[str, float]:
    defaults = {}
    for key in _GENERATION_KEYS:
        value = generation_json.get(key)
        if value is None:
            continue
        if type(value) not in (int, float) or not math.isfinite(value):
            raise ModelFormatError(f"generation_config.json: {key}={value!r} must be a number")
        defaults[key] = value
    return defaults
