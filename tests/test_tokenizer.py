"""Tokenizer: equal to transformers' on the goldens, and streams equal to decoding at once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers

from flowkv_jax.errors import ModelFormatError, NotFoundError, ValidationError
from flowkv_jax.models.source import open_model
from flowkv_jax.tokenizer import Tokenizer
from tests.tiny_models import CHAT_TEMPLATE, write_tiny_tokenizer

GOLDENS = json.loads((Path(__file__).parent / "goldens" / "tokenizer.json").read_text("utf-8"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    write_tiny_tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def tiny(folder: Path) -> Tokenizer:
    return Tokenizer.from_folder(folder)


@pytest.fixture(scope="module")
def smollm2() -> Tokenizer:
    with open_model("smollm2-135m-instruct") as source:
        return source.tokenizer


@pytest.fixture(scope="module")
def sentencepiece() -> Tokenizer:
    """In the way of Llama 2: spaces as "▁", unknown characters as byte tokens."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["▁", "a", "b", "é", "▁a", "ab", "▁ab"]
    backend = tokenizers.Tokenizer(
        models.BPE(
            vocab={piece: i for i, piece in enumerate(pieces)},
            merges=[("▁", "a"), ("a", "b"), ("▁a", "b")],
            unk_token="<unk>",
            byte_fallback=True,
            fuse_unk=True,
        )
    )
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    backend.add_special_tokens(["<s>", "</s>"])
    return Tokenizer(backend, bos_token="<s>", eos_token="</s>")


@pytest.mark.parametrize("name", GOLDENS)
def test_ids_and_texts_are_those_of_transformers(name: str, request: pytest.FixtureRequest) -> None:
    tokenizer: Tokenizer = request.getfixturevalue(name)
    for golden in GOLDENS[name]["texts"]:
        assert tokenizer.encode(golden["text"]) == golden["ids"], golden["text"]
        decoded = tokenizer.decode(golden["ids"], skip_special_tokens=False)
        assert decoded == golden["decoded"]
        assert tokenizer.decode(golden["ids"]) == golden["decoded_without_special"]


@pytest.mark.parametrize("name", GOLDENS)
def test_prompts_of_conversations_are_those_of_transformers(
    name: str, request: pytest.FixtureRequest
) -> None:
    tokenizer: Tokenizer = request.getfixturevalue(name)
    for golden in GOLDENS[name]["conversations"]:
        prompt = tokenizer.apply_chat_template(
            golden["messages"], add_generation_prompt=golden["add_generation_prompt"]
        )
        assert prompt == golden["prompt"]


def test_special_tokens(tiny: Tokenizer) -> None:
    assert (tiny.bos_token, tiny.eos_token) == ("<|im_start|>", "<|im_end|>")
    assert (tiny.bos_token_id, tiny.eos_token_id) == (1, 2)
    assert tiny.vocab_size == 512
    assert tiny.chat_template == CHAT_TEMPLATE
    assert tiny.token_text(2) == "<|im_end|>"
    assert tiny.decode([1, 2]) == ""


def stream(tokenizer: Tokenizer, ids: list[int], skip_special_tokens: bool = True) -> list[str]:
    decoder = tokenizer.decode_stream(skip_special_tokens)
    return [decoder.step(token_id) or "" for token_id in ids] + [decoder.flush()]


@given(ids=st.lists(st.integers(0, 520), max_size=30), skip_special_tokens=st.booleans())
def test_a_byte_level_stream_is_the_text_of_the_whole(
    tiny: Tokenizer, ids: list[int], skip_special_tokens: bool
) -> None:
    pieces = stream(tiny, ids, skip_special_tokens)
    assert "".join(pieces) == tiny.decode(ids, skip_special_tokens)


@given(text=st.text(max_size=20))
def test_a_stream_of_valid_text_never_shows_half_a_character(tiny: Tokenizer, text: str) -> None:
    pieces = stream(tiny, tiny.encode(text), skip_special_tokens=False)
    assert "".join(pieces) == text
    assert pieces[-1] == ""
    assert "\ufffd" in text or not any("\ufffd" in piece for piece in pieces)


def test_an_unfinished_character_is_held_until_flush(tiny: Tokenizer) -> None:
    *start, end = tiny.encode("😀")
    decoder = tiny.decode_stream()
    assert [decoder.step(token_id) for token_id in start] == [None] * len(start)
    assert decoder.flush() == "\ufffd"
    decoder = tiny.decode_stream()
    assert [decoder.step(token_id) for token_id in (*start, end)][-1] == "😀"
    assert decoder.flush() == ""


@given(text=st.text(alphabet="ab é東😀 ", max_size=12))
def test_a_sentencepiece_stream_is_the_text_of_the_whole(
    sentencepiece: Tokenizer, text: str
) -> None:
    ids = sentencepiece.encode(text)
    pieces = stream(sentencepiece, ids)
    assert "".join(pieces) == sentencepiece.decode(ids)
    assert not any("\ufffd" in piece for piece in pieces)


def test_a_sentencepiece_stream_of_broken_bytes_goes_on(sentencepiece: Tokenizer) -> None:
    """Bytes that never become a character are given up; the stream must not stall behind them."""
    broken = [3 + 0xFF] * 10
    pieces = stream(sentencepiece, [*broken, *sentencepiece.encode("ab")])
    assert sum(piece != "" for piece in pieces[: len(broken)]) >= 2
    assert "".join(pieces).endswith("ab")


@given(text=st.text(alphabet="ab é東😀 <|im_end|>", max_size=12))
def test_pieces_of_a_text_are_spelt_without_special_tokens(
    tiny: Tokenizer, sentencepiece: Tokenizer, text: str
) -> None:
    for tokenizer in (tiny, sentencepiece):
        ids = tokenizer.literal_encoder()(text)
        assert b"".join(map(tokenizer.token_bytes, ids)) == text.encode()
        assert not any(map(tokenizer.is_special, ids))


def test_bytes_of_pieces(tiny: Tokenizer, sentencepiece: Tokenizer) -> None:
    assert tiny.has_token_bytes
    assert sentencepiece.has_token_bytes
    assert [sentencepiece.token_bytes(id_) for id_ in (3, 13, 258, 259, 265, 9999)] == [
        b"\0", b"\n", b"\xff", b" ", b" ab", b"",
    ]  # fmt: skip
    assert not Tokenizer(tokenizers.Tokenizer(models.WordLevel({"a": 0}, "a"))).has_token_bytes


def test_bad_input_is_a_validation_error(tiny: Tokenizer) -> None:
    with pytest.raises(ValidationError, match="must be a str, got bytes"):
        tiny.encode(b"hi")  # type: ignore[arg-type]
    with pytest.raises(ValidationError, match="cannot be encoded as UTF-8"):
        tiny.encode("\ud83d")
    with pytest.raises(ValidationError, match="non-negative integers"):
        tiny.decode([-1])
    with pytest.raises(ValidationError, match="non-negative integers"):
        tiny.decode(["x"])  # type: ignore[list-item]


def test_a_model_without_template_says_so(sentencepiece: Tokenizer) -> None:
    messages = [{"role": "user", "content": "hi"}]
    with pytest.raises(ValidationError, match="has no chat template"):
        sentencepiece.apply_chat_template(messages)
    own = "{{ bos_token }}{{ messages[0].content }}{{ mood }}"
    prompt = sentencepiece.apply_chat_template(messages, chat_template=own, mood="!")
    assert prompt == "<s>hi!"


def test_a_template_variable_may_have_any_name(sentencepiece: Tokenizer) -> None:
    messages = [{"role": "user", "content": "hi"}]
    variables = {"self": "!", "cls": "?", "source": "."}
    own = "{{ messages[0].content }}{{ cls }}{{ source }}"
    assert sentencepiece.apply_chat_template(messages, chat_template=own, **variables) == "hi?."
    with pytest.raises(ValidationError, match="'messages' is reserved"):
        sentencepiece.apply_chat_template(messages, chat_template=own, **{"messages": []})


def rewrite(folder: Path, name: str, value: Any) -> None:
    (folder / name).write_text(value if isinstance(value, str) else json.dumps(value))


def test_where_a_folder_keeps_its_template(tmp_path: Path) -> None:
    write_tiny_tokenizer(tmp_path)

    def template() -> str | None:
        return Tokenizer.from_folder(tmp_path).chat_template

    named = [{"name": "tool_use", "template": "a"}, {"name": "default", "template": "b"}]
    rewrite(tmp_path, "tokenizer_config.json", {"chat_template": named})
    assert template() == "b"
    rewrite(tmp_path, "chat_template.json", {"chat_template": "c"})
    assert template() == "c"
    rewrite(tmp_path, "chat_template.jinja", "d")
    assert template() == "d"
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(ModelFormatError, match="chat_template.jinja: cannot be read"):
        template()


def test_where_a_folder_keeps_its_special_tokens(tmp_path: Path) -> None:
    write_tiny_tokenizer(tmp_path)
    rewrite(tmp_path, "tokenizer_config.json", {"bos_token": None, "eos_token": {"content": "a"}})
    rewrite(tmp_path, "special_tokens_map.json", {"bos_token": {"content": "b"}, "eos_token": "c"})
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("b", "a")


def test_truncation_and_padding_saved_with_a_tokenizer_are_turned_off(tmp_path: Path) -> None:
    write_tiny_tokenizer(tmp_path)
    backend = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    backend.enable_truncation(4)
    backend.enable_padding(length=64)
    backend.save(str(tmp_path / "tokenizer.json"))
    assert Tokenizer.from_folder(tmp_path).decode(
        Tokenizer.from_folder(tmp_path).encode("the quick brown fox jumps")
    ) == ("the quick brown fox jumps")


def test_json_of_a_tokenizer_reads_back_as_the_same(tmp_path: Path) -> None:
    write_tiny_tokenizer(tmp_path)
    first = Tokenizer.from_folder(tmp_path)
    (tmp_path / "tokenizer.json").write_text(first.to_json(), encoding="utf-8")
    second = Tokenizer.from_folder(tmp_path)
    text = "<|im_start|> the quick\n brown f\u00f6x"
    assert second.encode(text) == first.encode(text)
    assert second.to_json() == first.to_json()


def test_broken_folders_are_refused(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="no tokenizer.json"):
        Tokenizer.from_folder(tmp_path)
    rewrite(tmp_path, "tokenizer.json", "{}")
    with pytest.raises(ModelFormatError, match=r"tokenizer.json: not a tokenizer"):
        Tokenizer.from_folder(tmp_path)
    write_tiny_tokenizer(tmp_path)
    rewrite(tmp_path, "tokenizer_config.json", "[")
    with pytest.raises(ModelFormatError, match=r"tokenizer_config.json: not valid JSON"):
        Tokenizer.from_folder(tmp_path)
    rewrite(tmp_path, "tokenizer_config.json", {"chat_template": 3})
    with pytest.raises(ModelFormatError, match="chat_template=3 must be text"):
        Tokenizer.from_folder(tmp_path)
