"""A tokenizer as the archive of files that a router builds its own from: a zip in memory.

The same tokenizer gives the same bytes, on every server and after every start, so a router may keep
what it has by the archive's SHA-256.
"""

from __future__ import annotations

import hashlib
import io
import json
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass

from smg_grpc_proto.generated import common_pb2 as common

from flowkv_jax.rpc.engine_protocol import TokenizerLike

_CHUNK_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class TokenizerArchive:
    """See the module.

    Attributes:
        sha256: of `data`, in hexadecimal.
    """

    data: bytes
    sha256: str

    def chunks(self) -> Iterator[common.GetTokenizerChunk]:
        """The data in order; the last chunk has the digest."""
        for start in range(0, len(self.data), _CHUNK_BYTES):
            piece = self.data[start : start + _CHUNK_BYTES]
            is_last = start + len(piece) == len(self.data)
            yield common.GetTokenizerChunk(data=piece, sha256=self.sha256 if is_last else "")


def tokenizer_archive(
    tokenizer: TokenizerLike, *, chat_template: str | None, max_model_len: int
) -> TokenizerArchive:
    """`tokenizer.json` and `tokenizer_config.json`. Takes some 100 ms: not for an event loop's
    thread.

    Args:
        chat_template: the one that is served.
    """
    config = {
        "bos_token": tokenizer.bos_token,
        "eos_token": tokenizer.eos_token,
        "chat_template": chat_template,
        "model_max_length": max_model_len,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    files = {
        "tokenizer.json": tokenizer.to_json(),
        "tokenizer_config.json": json.dumps(
            {name: value for name, value in config.items() if value is not None}, indent=2
        ),
    }
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, text in files.items():
            # Of a ZipInfo of its own, the time of day is no part.
            entry = zipfile.ZipInfo(name)
            archive.writestr(entry, text, compress_type=zipfile.ZIP_DEFLATED)
    data = buffer.getvalue()
    return TokenizerArchive(data, hashlib.sha256(data).hexdigest())
