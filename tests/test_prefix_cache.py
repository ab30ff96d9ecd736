"""Prefix cache: proved hits, reference counts, eviction by chains, reset."""

import pytest

from flowkv_jax.block_hash import hash_blocks
from flowkv_jax.kv_cache.prefix_cache import CachedBlock, PrefixCache

SIZE = 2


class Chain:
    """Tokens, their hashes, and the entries that a request registered for them."""

    def __init__(self, cache: PrefixCache, tokens: list[int], first_block: int, salt=None):
        self.cache, self.tokens, self.salt = cache, tokens, salt
        self.hashes = hash_blocks(tokens, SIZE, salt)
        self.entries: list[CachedBlock] = cache.match(self.hashes, tokens, salt)
        cache.acquire(self.entries)
        for index in range(len(self.entries), len(self.hashes)):
            parent = self.entries[-1] if self.entries else None
            part = tuple(tokens[index * SIZE : (index + 1) * SIZE])
            block = first_block + index
            self.entries.append(cache.register(block, self.hashes[index], part, parent, salt))
        cache.check()

    def matched(self) -> list[int]:
        return [entry.block for entry in self.cache.match(self.hashes, self.tokens, self.salt)]

    def release(self) -> None:
        self.cache.release(self.entries)
        self.cache.check()


def test_matches_the_longest_beginning():
    cache = PrefixCache(SIZE)
    chain = Chain(cache, [1, 2, 3, 4, 5, 6], first_block=10)
    assert chain.matched() == [10, 11, 12]
    longer = [1, 2, 3, 4, 9, 9]
    assert len(cache.match(hash_blocks(longer, SIZE), longer, None)) == 2
    other = [9, 2, 3, 4]
    assert cache.match(hash_blocks(other, SIZE), other, None) == []


def test_salts_do_not_share():
    cache = PrefixCache(SIZE)
    Chain(cache, [1, 2], first_block=0, salt="a")
    for salt in (None, "", "b"):
        assert cache.match(hash_blocks([1, 2], SIZE, salt), [1, 2], salt) == []


def test_a_collision_is_a_miss():
    cache = PrefixCache(SIZE)
    same_hash = b"collision"
    entry = cache.register(0, same_hash, (1, 2), None, None)
    assert cache.match([same_hash], [1, 2], None) == [entry]
    assert cache.match([same_hash], [1, 3], None) == []
    assert cache.match([same_hash], [1, 2], "salt") == []
    # Equal tokens behind another parent, under one hash.
    other = cache.register(1, b"other", (7, 7), None, None)
    child = cache.register(2, b"child", (5, 6), entry, None)
    assert cache.match([same_hash, b"child"], [1, 2, 5, 6], None) == [entry, child]
    assert cache.match([b"other", b"child"], [7, 7, 5, 6], None) == [other]


def test_hash_is_registered_once():
    cache = PrefixCache(SIZE)
    cache.register(0, b"h", (1, 2), None, None)
    with pytest.raises(RuntimeError, match="block 1: its hash is cached already"):
        cache.register(1, b"h", (1, 2), None, None)


def test_held_blocks_are_not_evicted():
    cache = PrefixCache(SIZE)
    first = Chain(cache, [1, 2, 3, 4], first_block=0)
    second = Chain(cache, [1, 2, 5, 6], first_block=10)
    assert first.entries[0] is second.entries[0]
    first.release()
    assert cache.num_unheld == 1
    assert cache.evict(5, piece_blocks=5) == [1]
    assert first.matched() == [0]
    second.release()
    assert cache.num_unheld == 2
    assert cache.evict(5, piece_blocks=5) == [11, 0]
    assert len(cache) == 0
    cache.check()


def test_evicts_the_least_recently_released_chain_from_its_tail():
    cache = PrefixCache(SIZE)
    old = Chain(cache, [1, 1, 2, 2, 3, 3], first_block=0)
    new = Chain(cache, [9, 9, 8, 8], first_block=10)
    new.release()
    old.release()
    cache.acquire(new.entries)
    new.release()
    assert cache.evict(1, piece_blocks=1) == [2]
    assert cache.evict(1, piece_blocks=1) == [1]
    assert old.matched() == [0]
    assert cache.evict(2, piece_blocks=2) == [0, 11, 10]
    cache.check()


def test_a_long_chain_makes_room_in_one_piece():
    cache = PrefixCache(SIZE)
    tokens = [token for token in range(20) for _ in range(SIZE)]
    Chain(cache, tokens, first_block=100).release()
    # 3 blocks are missing for a prompt of 8: all 8 come from the tail, so it can lie in one piece.
    assert cache.evict(3, piece_blocks=8) == list(range(119, 111, -1))
    cache.check()


def test_short_chains_go_whole():
    cache = PrefixCache(SIZE)
    for index in range(4):
        tokens = [index, index, 7, 7, 8, 8]
        Chain(cache, tokens, first_block=3 * index).release()
    assert sorted(cache.evict(4, piece_blocks=4)) == list(range(6))
    cache.check()


def test_inner_blocks_become_leaves_when_their_children_go():
    cache = PrefixCache(SIZE)
    trunk = Chain(cache, [1, 1], first_block=0)
    left = Chain(cache, [1, 1, 2, 2], first_block=10)
    right = Chain(cache, [1, 1, 3, 3], first_block=20)
    for chain in (left, right, trunk):
        chain.release()
    assert cache.evict(1, piece_blocks=1) == [11]
    assert cache.evict(1, piece_blocks=1) == [21]
    assert cache.evict(1, piece_blocks=1) == [0]
    assert cache.evict(1, piece_blocks=1) == []


def test_a_chain_is_taken_up_to_where_it_branches():
    cache = PrefixCache(SIZE)
    left = Chain(cache, [1, 1, 2, 2], first_block=10)
    right = Chain(cache, [1, 1, 3, 3], first_block=20)
    left.release()
    right.release()
    assert cache.evict(1, piece_blocks=9) == [11]
    cache.check()
    assert right.matched() == [10, 21]
    assert cache.evict(1, piece_blocks=9) == [21, 10]


def test_adopt_swaps_the_block_of_an_unheld_entry():
    cache = PrefixCache(SIZE)
    chain = Chain(cache, [1, 2], first_block=0)
    entry = chain.entries[0]
    with pytest.raises(RuntimeError, match="which is held"):
        cache.adopt(entry, 5)
    chain.release()
    assert cache.adopt(entry, 5) == 0
    assert chain.matched() == [5]
    assert cache.num_unheld == 0
    assert cache.evict(1, piece_blocks=1) == []
    chain.release()
    assert cache.evict(1, piece_blocks=1) == [5]


def test_release_of_what_nobody_holds():
    cache = PrefixCache(SIZE)
    chain = Chain(cache, [1, 2], first_block=3)
    chain.release()
    with pytest.raises(RuntimeError, match="release of cached block 3"):
        chain.release()


def test_reset_needs_everything_unheld():
    cache = PrefixCache(SIZE)
    chain = Chain(cache, [1, 2, 3, 4], first_block=0)
    assert cache.reset() is None
    assert chain.matched() == [0, 1]
    chain.release()
    assert sorted(cache.reset() or ()) == [0, 1]
    assert chain.matched() == []
    assert cache.reset() == []
    cache.check()


def test_eviction_order_does_not_grow_without_bound():
    cache = PrefixCache(SIZE)
    chain = Chain(cache, [1, 2, 3, 4], first_block=0)
    chain.release()
    for _ in range(1_000):
        cache.acquire(chain.entries)
        chain.cache.release(chain.entries)
    cache.check()
    assert len(cache._leaves) < 100
    assert cache.evict(9, piece_blocks=9) == [1, 0]
