"""Frames and messages between two engines, and how each side proves itself. Imports no JAX, no I/O.

A frame, big-endian:

    magic "FKV1" | kind u8 | 3 zero bytes | length u32 | sequence u64 | tag 32 bytes | body

`tag` is HMAC-SHA256 over header and body, keyed for this connection and this direction; with
`sequence` a frame cannot be changed, dropped, repeated, reordered or sent back unnoticed. `length`
is checked before anything is allocated. Bodies are msgpack of the structures below: nothing that
is read is ever executed.

Opening a connection, `|` being concatenation, S the shared secret (empty where none is set):

    dialler  -> HELLO    version, purpose, nonce_d (32 random bytes)
    listener -> HELLO    version, purpose, nonce_l
    dialler  -> PROOF    HMAC(S, "dialler"  | nonce_d | nonce_l | purpose)
    listener -> PROOF    HMAC(S, "listener" | nonce_d | nonce_l | purpose)

then each direction is keyed with HMAC(S, direction | nonces). The dialler proves itself first, so
a stranger gets nothing to guess secrets on. Proofs are compared in constant time. Frames of the
opening carry no tag and at most `MAX_OPENING_BYTES`.

What this protects: who may connect, and that control frames (and headers of data frames) are
genuine. What it does not: nothing is encrypted, and the KV bytes of a TCP transfer are not
authenticated; on an untrusted network use a tunnel.
"""

from __future__ import annotations

import enum
import hashlib
import hmac
import struct
from typing import TypeVar

import msgspec

from transfer.errors import AuthenticationFailed, FrameTooLarge, HandshakeMismatch, ProtocolError

PROTOCOL_VERSION = 2
NONCE_BYTES = 32
TAG_BYTES = 32
MAX_OPENING_BYTES = 512

_MAGIC = b"FKV1"
_HEADER = struct.Struct(">4sB3xIQ")
HEADER_BYTES = _HEADER.size + TAG_BYTES


class Kind(enum.IntEnum):
    """What a frame's body is."""

    HELLO = 1
    PROOF = 2
    MESSAGE = 3
    DATA = 4


_KINDS = {int(kind): kind for kind in Kind}


class Hello(msgspec.Struct, frozen=True, array_like=True):
    """Opens a connection. `purpose` is "control", or the backend that a data stream is for."""

    version: int
    purpose: str
    nonce: bytes


class Seal:
    """Makes and checks the frames of one direction of one connection."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._sequence = 0

    def frame(self, kind: Kind, body: bytes) -> bytes:
        """Header, tag and body."""
        return self.header(kind, len(body), body) + body

    def header(self, kind: Kind, length: int, tagged: bytes = b"") -> bytes:
        """Header and tag of a frame whose body has `length` bytes; the tag covers `tagged` only."""
        header = _HEADER.pack(_MAGIC, kind, length, self._sequence)
        self._sequence += 1
        return header + hmac.digest(self._key, header + tagged, hashlib.sha256)

    def check(self, head: bytes, tagged: bytes = b"") -> None:
        """Raise `ProtocolError` unless `head` is the next header of the connection."""
        header, tag = head[: _HEADER.size], head[_HEADER.size :]
        if not hmac.compare_digest(tag, hmac.digest(self._key, header + tagged, hashlib.sha256)):
            raise ProtocolError("a frame's tag is wrong: it was changed on the way, or forged")
        sequence = _HEADER.unpack(header)[3]
        if sequence != self._sequence:
            raise ProtocolError(f"frame {sequence} came where {self._sequence} was due")
        self._sequence += 1


def parse_header(head: bytes, max_bytes: int) -> tuple[Kind, int]:
    """(kind, body length) of a header.

    Raises:
        ProtocolError: not a frame. FrameTooLarge: longer than `max_bytes`.
    """
    magic, kind, length, _ = _HEADER.unpack(head[: _HEADER.size])
    if magic != _MAGIC:
        raise ProtocolError(f"expected a frame, got bytes that start with {magic!r}")
    known = _KINDS.get(kind)
    if known is None:
        raise ProtocolError(f"unknown kind of frame {kind}")
    if length > max_bytes:
        raise FrameTooLarge(f"a frame of {length} bytes exceeds the limit of {max_bytes}")
    return known, length


def opening_frame(kind: Kind, body: bytes) -> bytes:
    """A frame of the opening: no key yet, a tag of zeros."""
    return _HEADER.pack(_MAGIC, kind, len(body), 0) + bytes(TAG_BYTES) + body


def proof(secret: bytes, role: str, dialler: Hello, listener: Hello) -> bytes:
    """What `role` ("dialler" or "listener") sends to show that it knows the secret."""
    said = role.encode() + dialler.nonce + listener.nonce + dialler.purpose.encode()
    return hmac.digest(secret, said, hashlib.sha256)


def check_proof(given: bytes, secret: bytes, role: str, dialler: Hello, listener: Hello) -> None:
    """Raise `AuthenticationFailed` unless `given` is `role`'s proof. Constant time."""
    if not hmac.compare_digest(given, proof(secret, role, dialler, listener)):
        raise AuthenticationFailed(
            f"the {role} does not know the shared secret; give both engines the same `secret`"
        )


def seals(secret: bytes, dialler: Hello, listener: Hello) -> tuple[Seal, Seal]:
    """(dialler -> listener, listener -> dialler) of an opened connection."""
    return (
        Seal(proof(secret, "from dialler", dialler, listener)),
        Seal(proof(secret, "from listener", dialler, listener)),
    )


def read_hello(body: bytes) -> Hello:
    """A checked HELLO.

    Raises:
        ProtocolError: malformed. HandshakeMismatch: another protocol version.
    """
    hello = decode(body, _hello_decoder)
    if hello.version != PROTOCOL_VERSION:
        raise HandshakeMismatch(f"protocol version {hello.version} there, {PROTOCOL_VERSION} here")
    if len(hello.nonce) != NONCE_BYTES:
        raise ProtocolError(f"a nonce of {len(hello.nonce)} bytes; {NONCE_BYTES} expected")
    return hello


_T = TypeVar("_T")


def decode(body: bytes | memoryview, decoder: msgspec.msgpack.Decoder[_T]) -> _T:
    """The value in `body`; `ProtocolError` where it is not one of the decoder's type."""
    try:
        return decoder.decode(body)
    except msgspec.DecodeError as error:
        raise ProtocolError(f"a message that cannot be read: {error}") from None


_hello_decoder = msgspec.msgpack.Decoder(Hello)
