"""Names of cached blocks: a chain of SHA-256 digests over full blocks of tokens.

    root      = sha256(domain, block_size, salt)
    digest[0] = sha256(root,      tokens[0 : Z])
    digest[i] = sha256(digest[i-1], tokens[i*Z : (i+1)*Z])

So a digest stands for the whole prefix up to and including its block, for one salt and one block
size. Tokens are packed as little-endian 32-bit numbers and nothing depends on the process
(Python's `hash()` is seeded), so nodes on different machines agree on every name.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from hashlib import sha256

_DOMAIN = b"flowkv.block-hash.v1"


def root_hash(block_size: int, cache_salt: str | None = None) -> bytes:
    """Parent digest of a request's first block.

    No salt and the empty salt are different, and no salt can imitate another's bytes.
    """
    head = _DOMAIN + struct.pack("<I?", block_size, cache_salt is not None)
    return sha256(head + (cache_salt or "").encode()).digest()


def hash_block(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """Digest (32 bytes) of one full block that follows `parent`.

    Raises:
        ValueError: a token id does not fit 32 unsigned bits.
    """
    try:
        packed = struct.pack(f"<{len(token_ids)}I", *token_ids)
    except struct.error as error:
        raise ValueError(f"token ids must be in [0, 2**32): {error}") from error
    return sha256(parent + packed).digest()


def extend_hashes(
    hashes: list[bytes], token_ids: Sequence[int], block_size: int, cache_salt: str | None
) -> None:
    """Append to `hashes` the digests of the full blocks of `token_ids` it does not cover yet."""
    parent = hashes[-1] if hashes else root_hash(block_size, cache_salt)
    for start in range(len(hashes) * block_size, len(token_ids) - block_size + 1, block_size):
        parent = hash_block(parent, token_ids[start : start + block_size])
        hashes.append(parent)


def hash_blocks(
    token_ids: Sequence[int], block_size: int, cache_salt: str | None = None
) -> list[bytes]:
    """Digests of all full blocks of `token_ids`, in order."""
    hashes: list[bytes] = []
    extend_hashes(hashes, token_ids, block_size, cache_salt)
    return hashes
