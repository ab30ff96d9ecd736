"""Tells apart models that would fill a cache differently. No JAX.

Reading all of a large model would take longer than loading it. So a file counts by its size and by
pieces spread evenly over it, first and last included: fine-tunes of one model differ everywhere,
and have the same header.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from pathlib import Path
from typing import Any

from flowkv_jax.cluster.facts import ModelFacts
from flowkv_jax.errors import NotFoundError
from pallas_kernels.kv_layout import KVLayout

_PIECES = 33
_PIECE_BYTES = 64 << 10
_DIGEST_CHARACTERS = 16
_WEIGHT_FILES = ("*.safetensors", "*.gguf")


def model_facts(architecture: str, config: Any, weights_path: Path, layout: KVLayout) -> ModelFacts:
    """What a worker that serves a model in blocks of `layout` joins with."""
    return ModelFacts(
        architecture=architecture,
        config_digest=config_digest(config),
        weights_digest=weights_digest(weights_path),
        layout=layout,
    )


def config_digest(config: Any) -> str:
    """Of a configuration that is a dataclass: equal exactly if all of its fields are."""
    text = json.dumps(dataclasses.asdict(config), sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:_DIGEST_CHARACTERS]


def weights_digest(path: Path) -> str:
    """Of a weight file, or of all weight files in a folder; where they lie does not count.

    Raises:
        NotFoundError: there is none.
    """
    files = [path] if path.is_file() else _weight_files(path)
    if not files:
        raise NotFoundError(f"{path}: no weight files ({', '.join(_WEIGHT_FILES)})")
    digest = hashlib.sha256()
    for file in files:
        _add_file(digest, file)
    return digest.hexdigest()[:_DIGEST_CHARACTERS]


def _weight_files(folder: Path) -> list[Path]:
    return sorted(file for pattern in _WEIGHT_FILES for file in folder.glob(pattern))


def _add_file(digest: Any, file: Path) -> None:
    size = file.stat().st_size
    digest.update(size.to_bytes(8, "big"))
    last = max(0, size - _PIECE_BYTES)
    with file.open("rb") as stream:
        for start in sorted({last * piece // (_PIECES - 1) for piece in range(_PIECES)}):
            stream.seek(start)
            digest.update(stream.read(_PIECE_BYTES))
