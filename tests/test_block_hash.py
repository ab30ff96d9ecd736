"""Chained block hashes: stable, and different whenever the prefix, salt or block size is."""

import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowkv_jax.block_hash import extend_hashes, hash_block, hash_blocks, root_hash

TOKENS = list(range(100, 148))


def test_only_full_blocks_have_names():
    assert [len(hash_blocks(TOKENS[:n], 16)) for n in (0, 15, 16, 47, 48)] == [0, 0, 1, 2, 3]


def test_a_name_stands_for_the_whole_prefix():
    changed = [1, *TOKENS[1:]]
    assert not set(hash_blocks(TOKENS, 16)) & set(hash_blocks(changed, 16))
    later = [*TOKENS[:20], 1, *TOKENS[21:]]
    ours, theirs = hash_blocks(TOKENS, 16), hash_blocks(later, 16)
    assert ours[0] == theirs[0]
    assert ours[1] != theirs[1]
    assert ours[2] != theirs[2]


def test_equal_blocks_at_different_places_differ():
    assert len(set(hash_blocks([5] * 64, 16))) == 4


def test_salts_and_block_sizes_never_meet():
    salts = [None, "", "a", "b", "\x01a"]
    roots = {root_hash(size, salt) for size in (1, 16, 256) for salt in salts}
    assert len(roots) == 3 * len(salts)


def test_chain_is_sha256_of_parent_and_little_endian_tokens():
    import hashlib

    parent = root_hash(2)
    expected = hashlib.sha256(parent + bytes([1, 0, 0, 0, 0, 2, 0, 0])).digest()
    assert hash_block(parent, [1, 512]) == expected


def test_does_not_depend_on_the_process():
    code = (
        "from flowkv_jax.block_hash import hash_blocks;"
        "print(hash_blocks(list(range(32)), 16, 'salt')[-1].hex())"
    )
    names = {
        subprocess.run(
            [sys.executable, "-c", code],
            check=True,
            capture_output=True,
            text=True,
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(sys.path)},
        ).stdout.strip()
        for seed in ("1", "2")
    }
    assert names == {hash_blocks(list(range(32)), 16, "salt")[-1].hex()}


@settings(max_examples=50, deadline=None, derandomize=True)
@given(
    st.lists(st.integers(0, 2**32 - 1), max_size=40),
    st.integers(0, 40),
    st.integers(1, 7),
    st.none() | st.text(max_size=3),
)
def test_extending_equals_hashing_at_once(tokens, cut, block_size, salt):
    hashes = hash_blocks(tokens[:cut], block_size, salt)
    extend_hashes(hashes, tokens, block_size, salt)
    assert hashes == hash_blocks(tokens, block_size, salt)


@pytest.mark.parametrize("token", [-1, 2**32])
def test_tokens_out_of_range_are_refused(token):
    with pytest.raises(ValueError, match=r"\[0, 2\*\*32\)"):
        hash_block(root_hash(1), [token])
