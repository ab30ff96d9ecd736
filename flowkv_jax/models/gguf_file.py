"""Reader of the GGUF container through a memory map: metadata, and tensors as they lie in the file.

A file is, little-endian and without padding until the tensor data,

    "GGUF", version (u32), number of tensors (u64), number of metadata pairs (u64)
    metadata     key (string), type (u32), value; an array is type (u32), count (u64), values
    tensor list  name (string), number of dimensions (u32), dimensions (u64 each, fastest first),
                 type (u32), offset (u64, from the start of the data)
    data         begins at the next multiple of `general.alignment` (32 if not given)

where a string is its length (u64) and UTF-8 bytes. Every length is checked against the bytes that
are left before it is used. The `gguf` package reads the same container, but takes seconds for the
hundred thousand strings of a vocabulary; it serves here as the table of tensor types.
"""

from __future__ import annotations

import math
import mmap
import os
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from flowkv_jax.errors import ModelFormatError, NotFoundError

MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_DEFAULT_ALIGNMENT = 32
_MAX_DIMENSIONS = 4
_MAX_ARRAY_DEPTH = 4

_STRING, _ARRAY, _BOOL = 8, 9, 7
_SCALARS = {
    0: struct.Struct("<B"),
    1: struct.Struct("<b"),
    2: struct.Struct("<H"),
    3: struct.Struct("<h"),
    4: struct.Struct("<I"),
    5: struct.Struct("<i"),
    6: struct.Struct("<f"),
    _BOOL: struct.Struct("<?"),
    10: struct.Struct("<Q"),
    11: struct.Struct("<q"),
    12: struct.Struct("<d"),
}
_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")


@dataclass(frozen=True)
class GGUFTensor:
    """A tensor as stored: bytes [begin, end) of the file, `shape` with the slowest axis first."""

    name: str
    shape: tuple[int, ...]
    type: GGMLQuantizationType
    begin: int
    end: int


class GGUFFile:
    """One open file: `metadata` by key and `tensors` by name.

    Raises (on opening):
        NotFoundError: there is no such file.
        ModelFormatError: it is truncated, inconsistent or not GGUF, or a tensor's type is unknown.
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        try:
            with self.path.open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                if size < len(MAGIC):
                    raise ModelFormatError(f"{self.path}: {size} bytes are too few for a GGUF file")
                self._map: mmap.mmap | None = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except FileNotFoundError as error:
            raise NotFoundError(f"{self.path}: no such file") from error
        except OSError as error:
            raise ModelFormatError(f"{self.path}: cannot be read: {error.strerror}") from error
        cursor = _Cursor(self._map, self.path)
        num_tensors, num_pairs = _read_start(cursor)
        self.metadata: dict[str, Any] = _read_metadata(cursor, num_pairs)
        self.tensors: dict[str, GGUFTensor] = self._read_tensor_list(cursor, num_tensors, size)

    def rows(self, name: str) -> np.ndarray:
        """The tensor's bytes as a read-only view: uint8, [rows, bytes of a row].

        A row is one run of the fastest axis, the unit that quantisation blocks tile.
        """
        tensor = self.tensors[name]
        flat: np.ndarray = np.frombuffer(
            self._open_map(), np.uint8, tensor.end - tensor.begin, tensor.begin
        )
        return flat.reshape(math.prod(tensor.shape[:-1]), -1)

    def release(self, name: str) -> None:
        """Drop the tensor's pages from resident memory; a later read brings them back."""
        tensor = self.tensors[name]
        start = tensor.begin - tensor.begin % mmap.PAGESIZE
        self._open_map().madvise(mmap.MADV_DONTNEED, start, tensor.end - start)

    def close(self) -> None:
        """Let go of the file; views stay valid. Idempotent."""
        self._map = None

    def _open_map(self) -> mmap.mmap:
        if self._map is None:
            raise ValueError(f"{self.path}: read after close")
        return self._map

    def _read_tensor_list(
        self, cursor: _Cursor, num_tensors: int, size: int
    ) -> dict[str, GGUFTensor]:
        raw = [_read_tensor_entry(cursor) for _ in range(num_tensors)]
        alignment = self.metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
        if type(alignment) is not int or alignment <= 0 or alignment % 8:
            raise cursor.error(f"general.alignment={alignment!r} must be a multiple of 8")
        data_start = -(-cursor.position // alignment) * alignment
        tensors: dict[str, GGUFTensor] = {}
        for name, shape, type_number, offset in raw:
            if name in tensors:
                raise cursor.error(f"tensor {name!r} appears twice")
            if offset % alignment:
                raise cursor.error(
                    f"tensor {name!r}: offset {offset} is not a multiple of alignment {alignment}"
                )
            tensor_type, num_bytes = _stored_size(cursor, name, shape, type_number)
            begin = data_start + offset
            if begin + num_bytes > size:
                raise cursor.error(
                    f"tensor {name!r}: ends at byte {begin + num_bytes}, but the file has"
                    f" {size} bytes; it is truncated"
                )
            tensors[name] = GGUFTensor(name, shape, tensor_type, begin, begin + num_bytes)
        _refuse_overlap(cursor, tensors)
        return tensors


def _read_start(cursor: _Cursor) -> tuple[int, int]:
    """Check magic and version; returns (number of tensors, number of metadata pairs)."""
    magic = cursor.take(len(MAGIC))
    if magic != MAGIC:
        raise cursor.error(f"begins with {magic!r}, not {MAGIC!r}; it is not a GGUF file")
    version = cursor.scalar(_U32)
    if version not in _VERSIONS:
        raise cursor.error(f"GGUF version {version} is not served; served: 2, 3 (little-endian)")
    # Shortest possible entries: a key of no characters with a one-byte value; a tensor of 0 axes.
    num_tensors = cursor.count("tensors", min_bytes_each=24)
    num_pairs = cursor.count("metadata pairs", min_bytes_each=13)
    return num_tensors, num_pairs


def _read_metadata(cursor: _Cursor, num_pairs: int) -> dict[str, Any]:
    metadata: dict[str, Any] = {}
    for _ in range(num_pairs):
        key = cursor.string("a metadata key")
        if key in metadata:
            raise cursor.error(f"metadata key {key!r:.200} appears twice")
        metadata[key] = cursor.value(key, cursor.scalar(_U32))
    return metadata


def _read_tensor_entry(cursor: _Cursor) -> tuple[str, tuple[int, ...], int, int]:
    """(name, shape with the slowest axis first, number of its type, offset)."""
    name = cursor.string("a tensor name")
    num_dimensions = cursor.scalar(_U32)
    if not 1 <= num_dimensions <= _MAX_DIMENSIONS:
        raise cursor.error(
            f"tensor {name!r:.200}: {num_dimensions} dimensions are not in [1, {_MAX_DIMENSIONS}]"
        )
    dimensions = [cursor.scalar(_U64) for _ in range(num_dimensions)]
    if 0 in dimensions:
        raise cursor.error(f"tensor {name!r:.200}: dimensions {dimensions} hold a zero")
    return name, tuple(reversed(dimensions)), cursor.scalar(_U32), cursor.scalar(_U64)


def _stored_size(
    cursor: _Cursor, name: str, shape: tuple[int, ...], type_number: int
) -> tuple[GGMLQuantizationType, int]:
    try:
        tensor_type = GGMLQuantizationType(type_number)
    except ValueError:
        raise cursor.error(
            f"tensor {name!r}: tensor type {type_number} is unknown to the installed gguf package"
        ) from None
    block_values, block_bytes = GGML_QUANT_SIZES[tensor_type]
    if shape[-1] % block_values:
        raise cursor.error(
            f"tensor {name!r}: rows of {shape[-1]} values do not divide into"
            f" {tensor_type.name} blocks of {block_values}"
        )
    return tensor_type, math.prod(shape) // block_values * block_bytes


def _refuse_overlap(cursor: _Cursor, tensors: dict[str, GGUFTensor]) -> None:
    ordered = sorted(tensors.values(), key=lambda tensor: tensor.begin)
    for before, after in zip(ordered, ordered[1:], strict=False):
        if after.begin < before.end:
            raise cursor.error(
                f"tensor {after.name!r}: begins at byte {after.begin}, inside {before.name!r},"
                f" which ends at {before.end}"
            )


class _Cursor:
    """Reads values one after the other and never past the end."""

    def __init__(self, data: mmap.mmap, path: Path) -> None:
        self._data = data
        self._size = len(data)
        self._path = path
        self.position = 0

    def error(self, message: str) -> ModelFormatError:
        return ModelFormatError(f"{self._path}: {message}")

    def take(self, num_bytes: int) -> bytes:
        start = self._advance(num_bytes)
        return self._data[start : self.position]

    def scalar(self, layout: struct.Struct) -> Any:
        start = self._advance(layout.size)
        return layout.unpack_from(self._data, start)[0]

    def count(self, what: str, min_bytes_each: int) -> int:
        """A u64 number of things that must all fit in what is left of the file."""
        count: int = self.scalar(_U64)
        if count * min_bytes_each > self._size - self.position:
            raise self.error(
                f"{count} {what} cannot fit in the {self._size - self.position} bytes that are left"
            )
        return count

    def string(self, what: str) -> str:
        length: int = self.scalar(_U64)
        encoded = self.take(length)
        try:
            return encoded.decode("utf-8")
        except UnicodeDecodeError as error:
            raise self.error(f"{what} is not UTF-8: {encoded!r:.100}") from error

    def value(self, key: str, type_number: int, depth: int = 0) -> Any:
        if type_number == _STRING:
            return self.string(f"the value of {key!r:.200}")
        if type_number == _ARRAY:
            return self._array(key, depth + 1)
        layout = _SCALARS.get(type_number)
        if layout is None:
            raise self.error(f"metadata key {key!r:.200}: value type {type_number} is unknown")
        return self.scalar(layout)

    def _array(self, key: str, depth: int) -> list[Any]:
        if depth > _MAX_ARRAY_DEPTH:
            raise self.error(f"metadata key {key!r:.200}: arrays nest over {_MAX_ARRAY_DEPTH} deep")
        item_type = self.scalar(_U32)
        layout = _SCALARS.get(item_type)
        if layout is not None:
            count = self.count(f"values of {key!r:.200}", layout.size)
            start = self._advance(count * layout.size)
            items = struct.unpack_from(f"<{count}{layout.format[1:]}", self._data, start)
            return list(items)
        count = self.count(f"values of {key!r:.200}", _U64.size)
        if item_type == _STRING:
            return self._strings(key, count)
        return [self.value(key, item_type, depth) for _ in range(count)]

    def _strings(self, key: str, count: int) -> list[str]:
        """`count` strings. A loop of its own: vocabularies have a hundred thousand of them."""
        strings = []
        length_at: Callable[[Any, int], tuple[int]] = _U64.unpack_from
        data, size, position = self._data, self._size, self.position
        try:
            for _ in range(count):
                end = position + 8 + length_at(data, position)[0]
                if end > size:
                    raise struct.error
                strings.append(data[position + 8 : end].decode("utf-8"))
                position = end
        except struct.error as error:
            raise self._truncated(position) from error
        except UnicodeDecodeError as error:
            raise self.error(f"item {len(strings)} of {key!r:.200} is not UTF-8") from error
        self.position = position
        return strings

    def _advance(self, num_bytes: int) -> int:
        start = self.position
        if num_bytes > self._size - start:
            raise self._truncated(start)
        self.position = start + num_bytes
        return start

    def _truncated(self, position: int) -> ModelFormatError:
        return self.error(
            f"the value at byte {position} runs past the end of the file, which has"
            f" {self._size} bytes; it is truncated"
        )
