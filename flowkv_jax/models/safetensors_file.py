"""Reader of safetensors files through a memory map: tensors are views, nothing is copied.

A file is

    [0, 8)           N, the header's length, unsigned little-endian
    [8, 8 + N)       JSON: name -> {"dtype", "shape", "data_offsets": [begin, end)}
    [8 + N, size)    the data; offsets count from 8 + N

The header is checked before any tensor is served: the intervals must tile the data without overlap
or gap (the format allows neither), and each must be as long as its shape and dtype say.

A view keeps the map alive, so `close` may come before the last view is dropped. Pages that a view
has touched stay resident until `release`, which gives them back to the page cache.
"""

from __future__ import annotations

import json
import math
import mmap
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from flowkv_jax.errors import ModelFormatError, NotFoundError

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"

_LENGTH_BYTES = 8
# The format's own bound; keeps a broken length from allocating without end.
_MAX_HEADER_BYTES = 100_000_000

_SERVED_DTYPES: dict[str, np.dtype[Any]] = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
# Types a file may hold beside the weights we read (old position buffers, for one).
_ITEM_BYTES = {name: dtype.itemsize for name, dtype in _SERVED_DTYPES.items()} | {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 1),
    **dict.fromkeys(("U16", "I16"), 2),
    **dict.fromkeys(("U32", "I32"), 4),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 8),
}


@dataclass(frozen=True)
class TensorEntry:
    """Where a tensor lies: bytes [begin, end) of the file."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


class SafetensorsFile:
    """One open file.

    Raises (on opening):
        NotFoundError: there is no such file.
        ModelFormatError: it is truncated or inconsistent; names file, tensor, value and bound.
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        try:
            with self.path.open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                if size < _LENGTH_BYTES:
                    raise self._error(f"{size} bytes are too few for a safetensors file")
                self._map: mmap.mmap | None = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except FileNotFoundError as error:
            raise NotFoundError(f"{self.path}: no such file") from error
        self.entries: dict[str, TensorEntry] = self._read_header(size)

    def read(self, name: str) -> np.ndarray:
        """The tensor as a read-only view over the file.

        Raises:
            ModelFormatError: the file has no such tensor, or its dtype is not served.
        """
        entry = self._entry(name)
        dtype = _SERVED_DTYPES.get(entry.dtype)
        if dtype is None:
            raise self._error(
                f"tensor {name!r}: dtype {entry.dtype} is not served;"
                f" served: {', '.join(_SERVED_DTYPES)}"
            )
        count = math.prod(entry.shape)
        flat: np.ndarray = np.frombuffer(self._open_map(), dtype, count, entry.begin)
        return flat.reshape(entry.shape)

    def release(self, name: str) -> None:
        """Drop the tensor's pages from resident memory; a later read brings them back."""
        entry = self._entry(name)
        start = entry.begin - entry.begin % mmap.PAGESIZE
        if entry.end > start:
            self._open_map().madvise(mmap.MADV_DONTNEED, start, entry.end - start)

    def close(self) -> None:
        """Let go of the file. Idempotent."""
        self._map = None

    def _open_map(self) -> mmap.mmap:
        if self._map is None:
            raise ValueError(f"{self.path}: read after close")
        return self._map

    def _entry(self, name: str) -> TensorEntry:
        try:
            return self.entries[name]
        except KeyError:
            raise self._error(f"there is no tensor {name!r}") from None

    def _read_header(self, size: int) -> dict[str, TensorEntry]:
        data = self._open_map()
        header_bytes = int.from_bytes(data[:_LENGTH_BYTES], "little")
        bound = min(_MAX_HEADER_BYTES, size - _LENGTH_BYTES)
        if header_bytes > bound:
            raise self._error(
                f"header length {header_bytes} exceeds {bound} bytes; the file is truncated or"
                " not a safetensors file"
            )
        start = _LENGTH_BYTES + header_bytes
        try:
            header = json.loads(
                data[_LENGTH_BYTES:start].decode("utf-8"), object_pairs_hook=_without_duplicates
            )
        except (ValueError, RecursionError) as error:
            raise self._error(f"header is not valid JSON: {error}") from error
        if not isinstance(header, dict):
            raise self._error("header is not a JSON object")
        header.pop("__metadata__", None)
        entries = {name: self._check_entry(name, value, start) for name, value in header.items()}
        self._check_tiling(entries, start, size)
        return entries

    def _check_entry(self, name: str, value: Any, data_start: int) -> TensorEntry:
        match value:
            case {
                "dtype": str(dtype),
                "shape": list(shape),
                "data_offsets": [int(begin), int(end)],
            } if all(type(n) is int and n >= 0 for n in (*shape, begin, end)):
                pass
            case _:
                raise self._error(f"tensor {name!r}: malformed entry {value!r:.200}")
        if dtype not in _ITEM_BYTES:
            raise self._error(
                f"tensor {name!r}: unknown dtype {dtype!r:.40}; served: {', '.join(_SERVED_DTYPES)}"
            )
        expected = math.prod(shape) * _ITEM_BYTES[dtype]
        if end - begin != expected:
            raise self._error(
                f"tensor {name!r}: data_offsets [{begin}, {end}) hold {end - begin} bytes,"
                f" but shape {shape} of {dtype} takes {expected}"
            )
        return TensorEntry(dtype, tuple(shape), data_start + begin, data_start + end)

    def _check_tiling(self, entries: dict[str, TensorEntry], start: int, size: int) -> None:
        """The data must be covered exactly, each byte by one tensor."""
        position = start
        for name, entry in sorted(entries.items(), key=lambda item: (item[1].begin, item[1].end)):
            if entry.begin < position:
                raise self._error(
                    f"tensor {name!r}: begins at data offset {entry.begin - start}, inside another"
                    f" tensor that ends at {position - start}"
                )
            if entry.begin > position:
                raise self._error(
                    f"tensor {name!r}: begins at data offset {entry.begin - start}, but the bytes"
                    f" from {position - start} belong to no tensor"
                )
            position = entry.end
        if position != size:
            state = "truncated" if position > size else "too long"
            raise self._error(
                f"the tensors end at byte {position}, but the file has {size} bytes: it is {state}"
            )

    def _error(self, message: str) -> ModelFormatError:
        return ModelFormatError(f"{self.path}: {message}")


class Checkpoint:
    """The safetensors files of a folder as one: a single file, or shards under an index.

    Raises (on opening):
        NotFoundError: the folder holds no safetensors file.
        ModelFormatError: a file is broken, the index disagrees with the files, or the only weights
            are pickle files (which run code when they are read).
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        index_path = folder / INDEX_NAME
        if (folder / SINGLE_NAME).exists():
            single = SafetensorsFile(folder / SINGLE_NAME)
            self._file_of: dict[str, SafetensorsFile] = dict.fromkeys(single.entries, single)
        elif index_path.exists():
            self._file_of = _open_shards(index_path)
        else:
            raise _no_weights(folder)

    def names(self) -> Iterable[str]:
        return self._file_of.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._file(name).entries[name].shape

    def read(self, name: str) -> np.ndarray:
        """See `SafetensorsFile.read`."""
        return self._file(name).read(name)

    def release(self, name: str) -> None:
        """See `SafetensorsFile.release`."""
        self._file(name).release(name)

    def close(self) -> None:
        for file in set(self._file_of.values()):
            file.close()

    def _file(self, name: str) -> SafetensorsFile:
        try:
            return self._file_of[name]
        except KeyError:
            raise ModelFormatError(f"{self.folder}: there is no tensor {name!r}") from None


def _open_shards(index_path: Path) -> dict[str, SafetensorsFile]:
    try:
        index = json.loads(
            index_path.read_text(encoding="utf-8"), object_pairs_hook=_without_duplicates
        )
    except (ValueError, RecursionError) as error:
        raise ModelFormatError(f"{index_path}: not valid JSON: {error}") from error
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelFormatError(f"{index_path}: weight_map={weight_map!r:.100} must be an object")
    files: dict[str, SafetensorsFile] = {}
    for name, file_name in weight_map.items():
        # A shard lies beside its index: a path in its place would read files elsewhere.
        if not isinstance(file_name, str) or Path(file_name).name != file_name:
            raise ModelFormatError(
                f"{index_path}: tensor {name!r}: {file_name!r:.200} is not a plain file name"
            )
        if file_name not in files:
            files[file_name] = SafetensorsFile(index_path.parent / file_name)
        if name not in files[file_name].entries:
            raise ModelFormatError(
                f"{index_path}: tensor {name!r} is said to be in {file_name}, which lacks it"
            )
    return {name: files[file_name] for name, file_name in weight_map.items()}


PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


def pickle_refusal(path: Path) -> ModelFormatError:
    """The error for weights in a format that runs code when it is read."""
    return ModelFormatError(
        f"{path}: {path.suffix} checkpoints are pickle files, which run code when they are read,"
        " and are never loaded; convert the model to safetensors"
    )


def _no_weights(folder: Path) -> ModelFormatError | NotFoundError:
    for path in sorted(folder.iterdir()):
        if path.suffix in PICKLE_SUFFIXES:
            return pickle_refusal(path)
    return NotFoundError(f"{folder}: neither {SINGLE_NAME} nor {INDEX_NAME} is in this folder")


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ValueError(f"key {twice!r:.200} appears twice")
    return values
