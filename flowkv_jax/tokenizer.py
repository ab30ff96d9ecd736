"""Text to token ids and back, over the `tokenizers` library. No JAX, no transformers.

Streams of tokens are turned into text piece by piece with an `IncrementalDecoder`: the pieces
joined are what `decode` gives for the whole, and a piece never ends inside a UTF-8 character.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import tokenizers
from tokenizers import decoders

from flowkv_jax.errors import ModelFormatError, NotFoundError, ValidationError

if TYPE_CHECKING:
    from flowkv_jax.chat_template import ChatTemplate

_LONG_TEXT_CHARACTERS = 4096
_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class IncrementalDecoder(Protocol):
    """Turns one stream of tokens into text."""

    def step(self, token_id: int) -> str | None:
        """The text that became certain with this token; None if none did."""

    def flush(self) -> str:
        """What is still held back (an unfinished character, as U+FFFD); call it at the end."""


class Tokenizer:
    """A tokenizer with the special tokens and the chat template of its model.

    Args:
        backend: the tokenizer of the `tokenizers` library.
        bos_token, eos_token: as text; None if the model has none.
        chat_template: Jinja text; None if the model has none.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        bos_token: str | None = None,
        eos_token: str | None = None,
        chat_template: str | None = None,
    ) -> None:
        self._backend = backend
        self.bos_token = bos_token
        self.eos_token = eos_token
        self.chat_template = chat_template
        self.vocab_size: int = backend.get_vocab_size(with_added_tokens=True)
        self._special_ids = frozenset(
            token_id
            for token_id, token in backend.get_added_tokens_decoder().items()
            if token.special
        )
        self._is_byte_level = isinstance(backend.decoder, decoders.ByteLevel)
        self._is_sentence_piece = not self._is_byte_level and _decodes_pieces(backend)
        # Filled as tokens are met; entries never change, so threads may race to write one.
        self._token_bytes: dict[int, bytes] = {}
        self._compiled_templates: dict[str, ChatTemplate] = {}

    @classmethod
    def from_folder(cls, folder: Path | str) -> Tokenizer:
        """Read `tokenizer.json` and what lies beside it in a Hugging Face folder.

        Raises:
            NotFoundError: there is no tokenizer.json.
            ModelFormatError: a file is broken.
        """
        folder = Path(folder)
        path = folder / "tokenizer.json"
        if not path.exists():
            raise NotFoundError(
                f"{folder}: no tokenizer.json; other tokenizer files (tokenizer.model, vocab.txt)"
                " are not read, convert them with transformers' save_pretrained"
            )
        try:
            backend = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception for any broken file
            raise ModelFormatError(f"{path}: not a tokenizer: {error}") from error
        # A prompt is never cut or padded behind the engine's back.
        backend.no_truncation()
        backend.no_padding()
        special = _read_object(folder / "special_tokens_map.json")
        config = _read_object(folder / "tokenizer_config.json")
        names = {**special, **{key: value for key, value in config.items() if value is not None}}
        return cls(
            backend,
            bos_token=_token_content(names.get("bos_token")),
            eos_token=_token_content(names.get("eos_token")),
            chat_template=_folder_chat_template(folder, config),
        )

    def to_json(self) -> str:
        """The text of a `tokenizer.json` that this tokenizer could be read from."""
        text: str = self._backend.to_str()
        return text

    @property
    def bos_token_id(self) -> int | None:
        return None if self.bos_token is None else self._backend.token_to_id(self.bos_token)

    @property
    def eos_token_id(self) -> int | None:
        return None if self.eos_token is None else self._backend.token_to_id(self.eos_token)

    @cached_property
    def max_token_characters(self) -> int:
        """No token stands for more characters than this."""
        # A byte-level token has a letter a byte, so this is never too small.
        return max(map(len, self._backend.get_vocab(with_added_tokens=True)))

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`.

        Args:
            add_special_tokens: add what the model wants around a plain prompt (usually the
                beginning-of-sequence token). Pass False for the output of `apply_chat_template`,
                which spells its own.

        Raises:
            ValidationError: `text` is no string, or holds half of a surrogate pair.
        """
        if not isinstance(text, str):
            raise ValidationError(
                f"text must be a str, got {type(text).__name__}", parameter="text", value=text
            )
        try:
            if len(text) < _LONG_TEXT_CHARACTERS:
                encoding = self._backend.encode(text, add_special_tokens=add_special_tokens)
            else:
                # The same, but it lets other threads run meanwhile.
                [encoding] = self._backend.encode_batch(
                    [text], add_special_tokens=add_special_tokens
                )
        except (UnicodeEncodeError, TypeError) as error:
            raise ValidationError(
                f"text cannot be encoded as UTF-8: {error}", parameter="text"
            ) from error
        ids: list[int] = encoding.ids
        return ids

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of token ids. Bytes that form no UTF-8 character become U+FFFD.

        Raises:
            ValidationError: an id is negative or no integer.
        """
        try:
            text: str = self._backend.decode(
                list(token_ids), skip_special_tokens=skip_special_tokens
            )
        except (OverflowError, TypeError) as error:
            raise ValidationError(
                f"token ids must be non-negative integers: {error}", parameter="token_ids"
            ) from error
        return text

    def decode_stream(self, skip_special_tokens: bool = True) -> IncrementalDecoder:
        """A decoder for one stream of tokens."""
        if self._is_byte_level:
            return _ByteStreamDecoder(self, skip_special_tokens)
        return _WindowDecoder(self, skip_special_tokens)

    def token_text(self, token_id: int) -> str:
        """The text of one token by itself, special tokens included."""
        return self.decode([token_id], skip_special_tokens=False)

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        /,
        *,
        add_generation_prompt: bool = True,
        chat_template: str | None = None,
        **variables: Any,
    ) -> str:
        """The prompt text of a conversation; encode it with `add_special_tokens=False`.

        Args:
            messages: list of {"role", "content"}.
            chat_template: Jinja text to use in place of the model's own.
            variables: more names for the template.

        Raises:
            ValidationError: there is no template, or as `ChatTemplate` and its `render` say.
        """
        source = chat_template if chat_template is not None else self.chat_template
        if source is None:
            raise ValidationError(
                "this model has no chat template; give one as chat_template",
                parameter="chat_template",
            )
        return self._compiled_template(source).render(
            messages,
            add_generation_prompt=add_generation_prompt,
            bos_token=self.bos_token,
            eos_token=self.eos_token,
            variables=variables,
        )

    @property
    def has_token_bytes(self) -> bool:
        """`token_bytes` is right for every token."""
        return self._is_byte_level or self._is_sentence_piece

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes a token stands for inside a text; none for an unknown id. Only if
        `has_token_bytes`."""
        found = self._token_bytes.get(token_id)
        if found is None:
            token = self._backend.id_to_token(token_id) or ""
            found = _bytes_of(token) if self._is_byte_level else _bytes_of_piece(token)
            self._token_bytes[token_id] = found
        return found

    def literal_encoder(self) -> Callable[[str], list[int]]:
        """An encoder of text amid other text, to which special tokens are text as any other.

        Only if `has_token_bytes`. Takes 0.1 s to make for 50,000 tokens.

        SentencePiece would put a space in front, as for the beginning of a text; so there its
        longest pieces are taken, from left to right.
        """
        if self._is_sentence_piece:
            return self._longest_pieces
        backend = tokenizers.Tokenizer.from_str(self._backend.to_str())
        backend.encode_special_tokens = True

        def encode(text: str) -> list[int]:
            ids: list[int] = backend.encode(text, add_special_tokens=False).ids
            return ids

        return encode

    def _longest_pieces(self, text: str) -> list[int]:
        data = text.encode()
        ids: list[int] = []
        start = 0
        while start < len(data):
            stop = min(len(data), start + self._longest_piece)
            while stop > start and data[start:stop] not in self._id_of_bytes:
                stop -= 1
            if stop == start:
                break  # a vocabulary without this byte
            ids.append(self._id_of_bytes[data[start:stop]])
            start = stop
        return ids

    @cached_property
    def _id_of_bytes(self) -> dict[bytes, int]:
        ids = (token_id for token_id in range(self.vocab_size) if not self.is_special(token_id))
        return {self.token_bytes(token_id): token_id for token_id in ids}

    @cached_property
    def _longest_piece(self) -> int:
        return max(map(len, self._id_of_bytes))

    def is_special(self, token_id: int) -> bool:
        return token_id in self._special_ids

    def _compiled_template(self, source: str) -> ChatTemplate:
        # Jinja is needed for chats only.
        from flowkv_jax.chat_template import ChatTemplate

        if source != self.chat_template:
            return ChatTemplate(source)
        if source not in self._compiled_templates:
            self._compiled_templates[source] = ChatTemplate(source)
        return self._compiled_templates[source]


class _ByteStreamDecoder:
    """For byte-level tokenizers: each token is some bytes, and UTF-8 says where characters end."""

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def step(self, token_id: int) -> str | None:
        if self._skip_special_tokens and self._tokenizer.is_special(token_id):
            return None
        return self._utf8.decode(self._tokenizer.token_bytes(token_id)) or None

    def flush(self) -> str:
        return self._utf8.decode(b"", final=True)


class _WindowDecoder:
    """For any tokenizer: decode a short window of tokens, emit what the last ones added.

    ids[:known] have been emitted already and are decoded again as context, because a token's text
    may depend on its neighbours (a leading space that is dropped, for one).

    A character has at most four bytes, hence at most four byte tokens: when the text has ended in
    U+FFFD for longer, those bytes form no character, and they are emitted as they are.
    """

    _MAX_HELD_STEPS = 3

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._ids: list[int] = []
        self._known = 0
        self._held_steps = 0

    def step(self, token_id: int) -> str | None:
        self._ids.append(token_id)
        before, after = self._texts()
        if after.endswith("\ufffd") and self._held_steps < self._MAX_HELD_STEPS:
            self._held_steps += 1
            return None
        self._held_steps = 0
        if len(after) <= len(before):
            return None
        self._ids = self._ids[self._known :]
        self._known = len(self._ids)
        return after[len(before) :]

    def flush(self) -> str:
        before, after = self._texts()
        self._known = len(self._ids)
        return after[len(before) :]

    def _texts(self) -> tuple[str, str]:
        def decode(ids: list[int]) -> str:
            return self._tokenizer.decode(ids, self._skip_special_tokens)

        return decode(self._ids[: self._known]), decode(self._ids)


def _byte_of_character() -> dict[str, int]:
    """GPT-2's byte alphabet, backwards.

    Printable Latin-1 characters stand for themselves; the others are moved up from U+0100 in order.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    moved = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {
        chr(0x100 + i): byte for i, byte in enumerate(moved)
    }


_BYTE_OF_CHARACTER = _byte_of_character()


def _bytes_of(token: str) -> bytes:
    """A byte-level token's bytes; a token with other characters (an added one) is plain text."""
    try:
        return bytes([_BYTE_OF_CHARACTER[character] for character in token])
    except KeyError:
        return token.encode("utf-8")


def _decodes_pieces(backend: tokenizers.Tokenizer) -> bool:
    """Its tokens are SentencePiece's, which writes spaces as U+2581."""
    return backend.decoder is not None and "\u2581" in backend.decoder.__getstate__().decode()


def _bytes_of_piece(token: str) -> bytes:
    """A piece's bytes: <0x0A> is a byte, U+2581 a space."""
    byte = _BYTE_PIECE.fullmatch(token)
    return bytes([int(byte[1], 16)]) if byte else token.replace("\u2581", " ").encode()


def _read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file; empty if there is no such file."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise ModelFormatError(f"{path}: not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelFormatError(f"{path}: expected an object, got {value!r:.100}")
    return value


def _token_content(token: Any) -> str | None:
    """A special token as text: given as a string, or as an object with its content."""
    content = token.get("content") if isinstance(token, dict) else token
    return content if isinstance(content, str) else None


def _folder_chat_template(folder: Path, config: Mapping[str, Any]) -> str | None:
    """The template: its own file first, then tokenizer_config.json, as transformers looks."""
    path = folder / "chat_template.jinja"
    if path.exists():
        try:
            return path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ModelFormatError(f"{path}: cannot be read: {error}") from error
    template = _read_object(folder / "chat_template.json").get("chat_template")
    if template is None:
        template = config.get("chat_template")
    if isinstance(template, list):
        named = {
            entry.get("name"): entry.get("template")
            for entry in template
            if isinstance(entry, dict)
        }
        template = named.get("default")
    if template is not None and not isinstance(template, str):
        raise ModelFormatError(f"{folder}: chat_template={template!r:.100} must be text")
    return template
