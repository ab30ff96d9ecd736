"""Events of a stream, as bytes.

What is the same in all chunks of an answer is encoded once. A chunk of plain text is then three
pieces of bytes joined around the text: no structure is built, and nothing else encoded, for each
token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from flowkv_jax.http.openai.responses import Usage

encode = msgspec.json.encode
_END = b"}\n\n"


@dataclass(frozen=True, slots=True)
class Envelope:
    """What every answer, and every chunk of a stream, begins with."""

    response_id: str
    created: int
    model: str
    system_fingerprint: str

    def members(self) -> dict[str, Any]:
        """By the names that OpenAI gives them."""
        return {
            "id": self.response_id,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.system_fingerprint,
        }


class ChunkWriter:
    """Chunks of one stream.

    Args:
        kind: value of `object`.
        has_usage: the stream tells usage, so chunks that do not say null.

    Attributes:
        nothing: the members of a choice that says nothing, for `choice`.
    """

    def __init__(
        self,
        envelope: Envelope,
        kind: Literal["text_completion", "chat.completion.chunk"],
        *,
        has_usage: bool,
    ) -> None:
        head = encode({"id": envelope.response_id, "object": kind, **envelope.members()})
        self._head = b"data: " + head[:-1] + b',"choices":['
        self._tail = b'],"usage":null}\n\n' if has_usage else b"]}\n\n"
        is_chat = kind == "chat.completion.chunk"
        self._text_key = b',"delta":{"content":' if is_chat else b',"text":'
        self._text_end = b"}" if is_chat else b""
        self.nothing = delta_members({}) if is_chat else self.content("")
        self._plain_end = self._text_end + b',"logprobs":null,"finish_reason":null}' + self._tail
        self._plain_heads: dict[int, bytes] = {}

    def text(self, index: int, text: str) -> bytes:
        """A chunk with text alone."""
        head = self._plain_heads.get(index)
        if head is None:
            head = self._head + b'{"index":%d' % index + self._text_key
            self._plain_heads[index] = head
        return b"".join((head, encode(text), self._plain_end))

    def content(self, text: str) -> bytes:
        """The members of a choice that hold text, for `choice`."""
        return b"".join((self._text_key, encode(text), self._text_end))

    def choice(
        self,
        index: int,
        content: bytes,
        *,
        logprobs: Any = None,
        finish_reason: str | None = None,
        stop_reason: int | str | None = None,
        extra: dict[str, Any] | None = None,
        usage: Usage | None = None,
        top: dict[str, Any] | None = None,
    ) -> bytes:
        """A chunk with everything that a choice may have.

        Args:
            content: its own members, as `content` or `delta_members` make them.
            extra: more members of the choice.
            top: more members of the chunk.
        """
        pieces = [
            self._head,
            b'{"index":%d' % index,
            content,
            b',"logprobs":',
            encode(logprobs),
            b',"finish_reason":',
            encode(finish_reason),
        ]
        if finish_reason is not None:
            pieces += (b',"stop_reason":', encode(stop_reason))
        if extra:
            pieces += (b",", encode(extra)[1:-1])
        pieces += (b"}", self._tail if usage is None else _usage_tail(usage))
        if top:
            pieces[-1] = pieces[-1].removesuffix(_END) + b"," + encode(top)[1:] + _END[1:]
        return b"".join(pieces)

    def usage(self, usage: Usage) -> bytes:
        """The chunk without choices at the end."""
        return self._head + _usage_tail(usage)


def delta_members(value: Any) -> bytes:
    """The members of a chat's choice, for `ChunkWriter.choice`."""
    return b',"delta":' + encode(value)


def _usage_tail(usage: Usage) -> bytes:
    return b'],"usage":' + encode(usage) + _END
