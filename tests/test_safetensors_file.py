"""Safetensors files and Hugging Face folders: what is read, and what is refused instead."""

from __future__ import annotations

import json
import mmap
import re
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowkv_jax.errors import ModelFormatError, NotFoundError
from flowkv_jax.models.safetensors_file import Checkpoint, SafetensorsFile
from flowkv_jax.models.source import open_model
from tests.tiny_models import TINY_VARIANTS, tiny_tensors, write_safetensors, write_tiny_model

DTYPES = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16, "float16": np.float16}


def write_raw(path: Path, header: Any, data: bytes = b"", length: int | None = None) -> Path:
    encoded = header if isinstance(header, bytes) else json.dumps(header).encode()
    size = len(encoded) if length is None else length
    path.write_bytes(size.to_bytes(8, "little") + encoded + data)
    return path


def entry(begin: int, end: int, dtype: str = "F32", shape: list[int] | None = None) -> Any:
    shape = [(end - begin) // 4] if shape is None else shape
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shards", [1, 3])
def test_a_folder_gives_back_the_tensors_it_was_written_from(
    tmp_path: Path, dtype: str, shards: int
) -> None:
    folder = write_tiny_model(tmp_path, "attention_bias", dtype=dtype, shards=shards)
    with open_model(folder) as source:
        expected = tiny_tensors("attention_bias")
        assert set(source.names()) == set(expected)
        for name in source.names():
            tensor = source.read(name)
            assert tensor.dtype == DTYPES[dtype]
            assert tensor.shape == source.shape(name)
            np.testing.assert_array_equal(tensor, expected[name].astype(DTYPES[dtype]))
            source.release(name)


@pytest.mark.parametrize("variant", TINY_VARIANTS)
def test_every_tiny_variant_opens(tmp_path: Path, variant: str) -> None:
    with open_model(str(write_tiny_model(tmp_path, variant))) as source:
        assert source.architecture.name == "LlamaForCausalLM"
        assert source.config.eos_token_ids == (2,)
        assert source.tokenizer.vocab_size == source.config.vocab_size


def test_tensors_are_views_that_outlive_release_and_close(tmp_path: Path) -> None:
    values = np.arange(3 * mmap.PAGESIZE, dtype=np.float32).reshape(3, -1)
    write_safetensors(tmp_path / "a.safetensors", {"x": values, "y": values + 1})
    file = SafetensorsFile(tmp_path / "a.safetensors")
    view = file.read("x")
    assert not view.flags.owndata
    assert not view.flags.writeable
    file.release("x")
    file.close()
    file.close()
    np.testing.assert_array_equal(view, values)
    with pytest.raises(ValueError, match="read after close"):
        file.read("y")


def test_released_pages_leave_resident_memory(tmp_path: Path) -> None:
    size = 8 << 20
    write_safetensors(tmp_path / "a.safetensors", {"x": np.ones(size // 4, np.float32)})
    file = SafetensorsFile(tmp_path / "a.safetensors")
    total = float(file.read("x").sum())
    resident = _resident_bytes(tmp_path / "a.safetensors")
    file.release("x")
    assert total == size // 4
    assert resident >= size
    assert _resident_bytes(tmp_path / "a.safetensors") <= mmap.PAGESIZE * 16


def _resident_bytes(path: Path) -> int:
    """Bytes of this process's mapping of `path` that are in memory, as the kernel counts them."""
    maps = Path("/proc/self/smaps").read_text()
    mapping = maps[maps.index(str(path)) :]
    found = re.search(r"^Rss:\s+(\d+) kB", mapping, re.MULTILINE)
    assert found
    return int(found[1]) * 1024


HEADERS: dict[str, tuple[Any, bytes, str]] = {
    "not an object": ([1], b"", "header is not a JSON object"),
    "not JSON": (b"{nonsense", b"", "header is not valid JSON"),
    "not UTF-8": (b'{"\xff": 1}', b"", "header is not valid JSON"),
    "deep": (b"[" * 100_000, b"", "header is not valid JSON"),
    "key twice": (
        b'{"x": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}, "x": 1}',
        b"1234",
        "key 'x' appears twice",
    ),
    "no offsets": ({"x": {"dtype": "F32", "shape": [1]}}, b"", "tensor 'x': malformed entry"),
    "negative": ({"x": entry(-4, 0, shape=[1])}, b"", "tensor 'x': malformed entry"),
    "a bool": ({"x": entry(0, 4, shape=[True])}, b"1234", "tensor 'x': malformed entry"),
    "unknown dtype": ({"x": entry(0, 4, "F3")}, b"1234", "tensor 'x': unknown dtype 'F3'"),
    "wrong length": (
        {"x": entry(0, 8, shape=[3])},
        b"12345678",
        r"tensor 'x': data_offsets \[0, 8\) hold 8 bytes, but shape \[3\] of F32 takes 12",
    ),
    "huge shape": ({"x": entry(0, 4, shape=[2**62, 2**62])}, b"1234", "takes"),
    "overlap": (
        {"x": entry(0, 8), "y": entry(4, 12)},
        bytes(12),
        "tensor 'y': begins at data offset 4, inside another tensor that ends at 8",
    ),
    "gap": (
        {"x": entry(0, 4), "y": entry(8, 12)},
        bytes(12),
        "tensor 'y': begins at data offset 8, but the bytes from 4 belong to no tensor",
    ),
    "truncated": ({"x": entry(0, 400)}, bytes(396), "it is truncated"),
    "too long": ({"x": entry(0, 4)}, bytes(8), "it is too long"),
}


@pytest.mark.parametrize("case", HEADERS)
def test_broken_headers_are_refused(tmp_path: Path, case: str) -> None:
    header, data, message = HEADERS[case]
    path = write_raw(tmp_path / "a.safetensors", header, data)
    with pytest.raises(ModelFormatError, match=message) as caught:
        SafetensorsFile(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"1234567", (2**63).to_bytes(8, "little") + b"{}"])
def test_files_too_short_for_their_header_are_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a.safetensors").write_bytes(content)
    with pytest.raises(ModelFormatError, match="too few|header length"):
        SafetensorsFile(tmp_path / "a.safetensors")


def test_unserved_dtypes_are_refused_when_they_are_read(tmp_path: Path) -> None:
    path = write_raw(tmp_path / "a.safetensors", {"x": entry(0, 8, "F64", [1])}, bytes(8))
    with pytest.raises(ModelFormatError, match="tensor 'x': dtype F64 is not served; served: F32"):
        SafetensorsFile(path).read("x")


def test_missing_file_and_missing_tensor(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="no such file"):
        SafetensorsFile(tmp_path / "a.safetensors")
    write_safetensors(tmp_path / "a.safetensors", {"x": np.zeros(1, np.float32)})
    with pytest.raises(ModelFormatError, match="there is no tensor 'y'"):
        SafetensorsFile(tmp_path / "a.safetensors").read("y")


@settings(max_examples=100, deadline=None)
@given(
    cut_bytes=st.just(0) | st.integers(1, 250),
    position=st.integers(0, 250),
    damage=st.binary(max_size=2),
)
def test_a_damaged_file_is_read_or_refused_and_nothing_else(
    tmp_path_factory: pytest.TempPathFactory, cut_bytes: int, position: int, damage: bytes
) -> None:
    path = tmp_path_factory.mktemp("damaged") / "a.safetensors"
    write_safetensors(path, {"x": np.ones((3, 5), np.float32), "y": np.zeros(7, np.float16)})
    content = bytearray(path.read_bytes())
    content[position : position + len(damage)] = damage
    path.write_bytes(content[: max(0, len(content) - cut_bytes)])
    try:
        file = SafetensorsFile(path)
        for name in file.entries:
            file.read(name)
    except ModelFormatError as error:
        assert str(path) in str(error)


def test_index_must_agree_with_the_files(tmp_path: Path) -> None:
    write_tiny_model(tmp_path, "gqa_tied", shards=2)
    index_path = tmp_path / "model.safetensors.index.json"
    index = json.loads(index_path.read_text())
    name = next(iter(index["weight_map"]))

    def refused(weight_map: Any, message: str, error: type[Exception] = ModelFormatError) -> None:
        index_path.write_text(json.dumps({"weight_map": weight_map}))
        with pytest.raises(error, match=message):
            Checkpoint(tmp_path)

    other = "model-00002-of-00002.safetensors"
    refused({name: other}, "which lacks it")
    refused({name: "../secrets.safetensors"}, "is not a plain file name")
    refused({name: 3}, "is not a plain file name")
    refused({name: "model-9.safetensors"}, "no such file", NotFoundError)
    refused({}, "must be an object")
    index_path.write_text("{")
    with pytest.raises(ModelFormatError, match="not valid JSON"):
        Checkpoint(tmp_path)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "consolidated.00.pth"])
def test_pickle_checkpoints_are_never_loaded(tmp_path: Path, name: str) -> None:
    write_tiny_model(tmp_path, "gqa_tied")
    (tmp_path / "model.safetensors").rename(tmp_path / name)
    with pytest.raises(ModelFormatError, match=f"{name}.*pickle files, which run code"):
        open_model(tmp_path)
    with pytest.raises(ModelFormatError, match="convert the model to safetensors"):
        open_model(tmp_path / name)


def test_folders_that_lack_something_say_what(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match=r"no such file or folder.*smollm2-135m-instruct"):
        open_model(tmp_path / "nowhere")
    with pytest.raises(NotFoundError, match="no config.json"):
        open_model(tmp_path)
    write_tiny_model(tmp_path, "mha_untied")
    with pytest.raises(ModelFormatError, match="give the folder"):
        open_model(tmp_path / "model.safetensors")
    (tmp_path / "tokenizer.json").unlink()
    with open_model(tmp_path) as source, pytest.raises(NotFoundError, match="no tokenizer.json"):
        _ = source.tokenizer
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(NotFoundError, match="neither model.safetensors nor"):
        open_model(tmp_path)


def test_weights_must_fit_the_configuration(tmp_path: Path) -> None:
    tensors = tiny_tensors("mha_untied")
    write_tiny_model(tmp_path, "mha_untied")
    head = tensors.pop("lm_head.weight")
    write_safetensors(tmp_path / "model.safetensors", tensors)
    with pytest.raises(ModelFormatError, match=r"tensor 'lm_head.weight' is missing"):
        open_model(tmp_path)
    write_safetensors(tmp_path / "model.safetensors", {**tensors, "lm_head.weight": head[1:]})
    with pytest.raises(ModelFormatError, match=r"has shape \(511, 64\).*asks for \(512, 64\)"):
        open_model(tmp_path)


def test_generation_defaults(tmp_path: Path) -> None:
    write_tiny_model(tmp_path, "gqa_tied")
    path = tmp_path / "generation_config.json"
    path.write_text('{"temperature": 0.6, "top_p": 0.9, "top_k": null, "do_sample": true}')
    with open_model(tmp_path) as source:
        assert source.generation_defaults == {"temperature": 0.6, "top_p": 0.9}
    path.write_text('{"temperature": "hot"}')
    with pytest.raises(ModelFormatError, match="temperature='hot' must be a number"):
        open_model(tmp_path)
    path.write_text("[]")
    with pytest.raises(ModelFormatError, match=r"generation_config.json: expected an object"):
        open_model(tmp_path)


def test_another_architecture_is_refused_before_its_weights_are_touched(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps({"architectures": ["MistralForCausalLM"], "auto_map": {"AutoModel": "evil.py"}})
    )
    with pytest.raises(ModelFormatError, match="'MistralForCausalLM' is not served"):
        open_model(tmp_path)
