"""The GGUF container: every way it can be broken is refused before it does harm."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest
from gguf.constants import GGMLQuantizationType

from flowkv_jax.errors import ModelFormatError, NotFoundError
from flowkv_jax.models.gguf_file import GGUFFile


def container(
    tensors: bytes = b"", num_tensors: int = 0, pairs: bytes = b"", num_pairs: int = 0
) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", 3, num_tensors, num_pairs) + pairs + tensors + bytes(64)


def text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


def tensor_entry(name: bytes, dimensions: list[int], type_number: int, offset: int) -> bytes:
    return (
        text(name)
        + struct.pack("<I", len(dimensions))
        + struct.pack(f"<{len(dimensions)}Q", *dimensions)
        + struct.pack("<IQ", type_number, offset)
    )


CONTAINERS = {
    "empty": (b"", "too few"),
    "magic": (b"GGML" + bytes(100), "it is not a GGUF file"),
    "version": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "GGUF version 50331648 is not served"),
    "cut": (b"GGUF\x03\0", "it is truncated"),
    "tensor count": (container(num_tensors=2**60), "tensors cannot fit in the 72 bytes"),
    "pair count": (container(num_pairs=2**60), "metadata pairs cannot fit"),
    "key length": (container(pairs=struct.pack("<Q", 2**62), num_pairs=1), "it is truncated"),
    "key bytes": (container(pairs=text(b"\xff") + bytes(9), num_pairs=1), "key is not UTF-8"),
    "key twice": (
        container(pairs=(text(b"k") + struct.pack("<IB", 0, 1)) * 2, num_pairs=2),
        "metadata key 'k' appears twice",
    ),
    "value type": (
        container(pairs=text(b"k") + struct.pack("<I", 99), num_pairs=1),
        "metadata key 'k': value type 99 is unknown",
    ),
    "array count": (
        container(pairs=text(b"k") + struct.pack("<IIQ", 9, 4, 2**61), num_pairs=1),
        "values of 'k' cannot fit",
    ),
    "string array": (
        container(pairs=text(b"k") + struct.pack("<IIQQ", 9, 8, 1, 2**61), num_pairs=1),
        "it is truncated",
    ),
    "nested arrays": (
        container(
            pairs=text(b"k") + struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * 9, num_pairs=1
        ),
        "arrays nest over 4 deep",
    ),
    "tensor type": (
        container(tensor_entry(b"x", [32], 250, 0), 1),
        "tensor 'x': tensor type 250 is unknown",
    ),
    "partial block": (
        container(tensor_entry(b"x", [33], int(GGMLQuantizationType.Q8_0), 0), 1),
        "rows of 33 values do not divide into Q8_0 blocks of 32",
    ),
    "dimensions": (container(tensor_entry(b"x", [], 0, 0), 1), "0 dimensions are not in"),
    "zero": (container(tensor_entry(b"x", [0, 2], 0, 0), 1), "hold a zero"),
    "offset": (container(tensor_entry(b"x", [1], 0, 4), 1), "not a multiple of alignment 32"),
    "past the end": (container(tensor_entry(b"x", [99], 0, 0), 1), "it is truncated"),
    "tensor twice": (container(tensor_entry(b"x", [1], 0, 0) * 2, 2), "tensor 'x' appears twice"),
    "overlap": (
        container(tensor_entry(b"x", [2], 0, 0) + tensor_entry(b"y", [1], 0, 0), 2),
        "begins at byte .* inside",
    ),
}


@pytest.mark.parametrize("case", CONTAINERS)
def test_broken_containers_are_refused(tmp_path: Path, case: str) -> None:
    content, message = CONTAINERS[case]
    (tmp_path / "a.gguf").write_bytes(content)
    with pytest.raises(ModelFormatError, match=message) as caught:
        GGUFFile(tmp_path / "a.gguf")
    assert str(tmp_path / "a.gguf") in str(caught.value)


def test_a_missing_file_is_not_found(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="no such file"):
        GGUFFile(tmp_path / "a.gguf")
