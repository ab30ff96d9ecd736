"""KV-cache manager: tables, prefix cache, growth, swap; and a state machine with K/V contents."""

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from flowkv_jax.block_hash import hash_blocks
from flowkv_jax.kv_cache.manager import KVCacheManager
from flowkv_jax.kv_cache.prefix_events import PrefixEvents
from flowkv_jax.request import Request
from flowkv_jax.sampling_params import SamplingParams
from transfer import BlockRun

SIZE = 4


def make_request(name: str, tokens: list[int], **fields) -> Request:
    params = fields.pop("params", None) or SamplingParams()
    return Request(name, tokens, params, arrival_s=0.0, max_total_tokens=1000, seed=0, **fields)


def run_prompt(kv: KVCacheManager, request: Request) -> int | None:
    """Admit and compute all known tokens."""
    cached = kv.admit(request)
    if cached is not None:
        request.num_computed_tokens = request.num_tokens
        kv.commit(request)
        kv.check()
    return cached


def table(kv: KVCacheManager, request: Request) -> list[int]:
    return kv.block_table(request.request_id).tolist()


def test_prompt_is_contiguous_and_growth_is_appended():
    kv = KVCacheManager(20, SIZE)
    request = make_request("a", list(range(10)))
    assert kv.admit(request) == 0
    assert table(kv, request) == [0, 1, 2]
    assert kv.allocate(request, 12)
    assert table(kv, request) == [0, 1, 2]
    assert kv.allocate(request, 13)
    assert table(kv, request) == [0, 1, 2, 3]
    assert kv.allocate(request, 5)
    assert table(kv, request) == [0, 1, 2, 3]
    kv.check()


def test_block_table_is_a_read_only_int32_view_that_growth_leaves_alone():
    kv = KVCacheManager(100, SIZE)
    request = make_request("a", [1] * 8)
    kv.admit(request)
    before = kv.block_table("a")
    assert before.dtype == np.int32
    assert kv.block_table("a") is before
    with pytest.raises(ValueError, match="read-only"):
        before[0] = 9
    assert kv.allocate(request, 90 * SIZE)
    assert before.tolist() == [0, 1]
    assert table(kv, request) == list(range(90))
    with pytest.raises(KeyError):
        kv.block_table("nobody")


def test_allocate_serves_a_request_that_was_not_admitted():
    kv = KVCacheManager(8, SIZE)
    request = make_request("a", [1])
    assert kv.allocate(request, 20)
    assert table(kv, request) == [0, 1, 2, 3, 4]
    assert not kv.allocate(make_request("b", [1]), 20)
    assert not kv.holds_blocks("b")
    with pytest.raises(RuntimeError, match="a holds blocks already"):
        kv.admit(request)
    kv.check()


def test_allocate_near_exhaustion_changes_nothing():
    kv = KVCacheManager(4, SIZE, enable_prefix_caching=False)
    first, second = make_request("a", [1] * 8), make_request("b", [2] * 5)
    assert kv.admit(first) == 0
    assert kv.admit(second) == 0
    assert not kv.allocate(first, 9)
    assert table(kv, first) == [0, 1]
    assert kv.num_free_blocks == 0
    assert kv.usage == 1
    kv.free("b")
    assert kv.allocate(first, 9)
    kv.free("a")
    kv.free("a")
    assert kv.num_free_blocks == 4
    kv.check()


def test_admit_leaves_the_reserve_free():
    kv = KVCacheManager(6, SIZE)
    request = make_request("a", [1] * 16)
    assert kv.admit(request, reserve_blocks=3) is None
    assert not kv.holds_blocks("a")
    assert kv.admit(request, reserve_blocks=2) == 0


def test_hits_that_nobody_holds_do_not_count_as_free():
    kv = KVCacheManager(4, SIZE)
    run_prompt(kv, make_request("a", list(range(12))))
    kv.free("a")
    request = make_request("b", [*range(8), 60])
    assert kv.admit(request, reserve_blocks=2) is None
    assert kv.admit(request, reserve_blocks=1) == 8
    assert kv.num_free_blocks == 1
    kv.check()


def test_equal_beginnings_share_blocks():
    kv = KVCacheManager(20, SIZE)
    first = make_request("a", list(range(10)))
    assert run_prompt(kv, first) == 0
    second = make_request("b", [*range(8), 50, 51, 52])
    assert kv.match_prefix(second) == 8
    assert run_prompt(kv, second) == 8
    assert table(kv, second)[:2] == table(kv, first)[:2]
    assert (kv.prefix_cache_queries, kv.prefix_cache_hits) == (21, 8)
    kv.free("a")
    kv.check()
    assert kv.match_prefix(make_request("c", list(range(8)) + [1])) == 8
    kv.free("b")
    kv.check()
    assert kv.num_free_blocks == 20
    assert kv.num_cached_blocks == 2


def test_never_the_whole_prompt():
    kv = KVCacheManager(20, SIZE)
    run_prompt(kv, make_request("a", list(range(8))))
    assert kv.match_prefix(make_request("b", list(range(8)))) == 4
    assert kv.match_prefix(make_request("c", list(range(9)))) == 8
    assert kv.match_prefix(make_request("d", [0])) == 0


def test_salt_prompt_logprobs_and_the_switch_keep_requests_apart():
    kv = KVCacheManager(20, SIZE)
    run_prompt(kv, make_request("a", list(range(9))))
    assert kv.match_prefix(make_request("b", list(range(9)), cache_salt="x")) == 0
    wants_logprobs = make_request("c", list(range(9)), params=SamplingParams(prompt_logprobs=0))
    assert kv.match_prefix(wants_logprobs) == 0
    assert run_prompt(kv, wants_logprobs) == 0
    assert kv.prefix_cache_queries == 9
    off = KVCacheManager(20, SIZE, enable_prefix_caching=False)
    run_prompt(off, make_request("a", list(range(9))))
    assert run_prompt(off, make_request("b", list(range(9)))) == 0
    assert off.num_cached_blocks == off.prefix_cache_queries == 0


def test_only_known_and_computed_blocks_are_registered():
    kv = KVCacheManager(20, SIZE)
    request = make_request("a", list(range(10)))
    kv.admit(request)
    request.num_computed_tokens = 7
    kv.commit(request)
    assert kv.num_cached_blocks == 1
    # The device is ahead of the host: positions 10 to 12 are computed, their tokens not read.
    assert kv.allocate(request, 13)
    request.num_computed_tokens = 13
    kv.commit(request)
    assert kv.num_cached_blocks == 2
    request.token_ids += [10, 11]
    kv.commit(request)
    assert kv.num_cached_blocks == 3
    kv.check()


def test_the_same_block_computed_twice_is_cached_once_and_taken_over_later():
    kv = KVCacheManager(20, SIZE)
    first, second = make_request("a", list(range(9))), make_request("b", list(range(9)))
    kv.admit(first)
    kv.admit(second)
    for request in (first, second):
        request.num_computed_tokens = 9
        kv.commit(request)
    kv.check()
    assert kv.num_cached_blocks == 2
    assert set(table(kv, first)).isdisjoint(table(kv, second))
    kv.free("a")
    kv.commit(second)
    kv.check()
    third = make_request("c", list(range(9)))
    assert kv.admit(third) == 8
    assert table(kv, third)[:2] == table(kv, second)[:2]
    kv.check()


def test_a_request_registers_a_beginning_without_gaps():
    kv = KVCacheManager(20, SIZE)
    first, second = make_request("a", list(range(9))), make_request("b", [*range(4), 9, 9, 9, 9])
    for request in (first, second):
        kv.admit(request)
    for request in (first, second):
        request.num_computed_tokens = request.num_tokens
        kv.commit(request)
        kv.check()
    # b's second block follows a block that a holds and b does not: evictable before its child.
    assert kv.num_cached_blocks == 2
    kv.free("a")
    kv.commit(second)
    kv.check()
    assert kv.num_cached_blocks == 3


def test_admission_does_not_evict_its_own_hits():
    kv = KVCacheManager(4, SIZE)
    run_prompt(kv, make_request("a", list(range(12))))
    kv.free("a")
    other = make_request("b", [90] * 4)
    run_prompt(kv, other)
    # Free: 3 cached blocks. Two of them are hits, one must go.
    request = make_request("c", [*range(8), 60])
    assert run_prompt(kv, request) == 8
    assert table(kv, request)[:2] == [0, 1]
    assert kv.num_free_blocks == 0
    # Hits that nobody holds are no room.
    kv.free("c")
    assert kv.admit(make_request("d", [*range(8), 60, 61, 62, 63, 64])) is None
    assert kv.num_free_blocks == 3
    kv.check()


def test_eviction_makes_contiguous_room():
    kv = KVCacheManager(30, SIZE)
    for index in range(3):
        run_prompt(kv, make_request(str(index), [index] * 40))
        kv.free(str(index))
    assert kv.allocator.num_free == 0
    request = make_request("new", [9] * 48)
    assert kv.admit(request) == 0
    ids = table(kv, request)
    assert ids == list(range(ids[0], ids[0] + 12))
    kv.check()


def test_decode_growth_evicts_one_block():
    kv = KVCacheManager(6, SIZE)
    run_prompt(kv, make_request("old", [7] * 16))
    kv.free("old")
    request = make_request("a", [1] * 8)
    run_prompt(kv, request)
    assert kv.num_cached_blocks == 6
    assert kv.allocate(request, 9)
    assert kv.num_cached_blocks == 5
    kv.check()


def test_swap_out_and_in():
    kv = KVCacheManager(8, SIZE, num_swap_blocks=3)
    request = make_request("a", list(range(10)))
    run_prompt(kv, request)
    assert kv.swap_out(request) == (BlockRun(0, 0, 3),)
    assert not kv.holds_blocks("a")
    assert kv.num_free_blocks == 8
    kv.check()
    other = make_request("b", [5] * 9)
    run_prompt(kv, other)
    assert kv.swap_out(other) is None
    assert kv.holds_blocks("b")
    request.token_ids.append(10)
    assert kv.swap_in(request, reserve_blocks=3) is None
    runs = kv.swap_in(request, reserve_blocks=2)
    assert runs is not None
    assert sum(run.num_blocks for run in runs) == 3
    assert [run.src_start for run in runs][0] == 0
    assert kv.swap_allocator.num_used == 0
    kv.check()


def test_swapping_a_sharer_leaves_the_others_blocks_alone():
    kv = KVCacheManager(8, SIZE, num_swap_blocks=8)
    first, second = make_request("a", list(range(9))), make_request("b", list(range(9)))
    run_prompt(kv, first)
    run_prompt(kv, second)
    shared = table(kv, first)[:2]
    assert kv.swap_out(second) is not None
    kv.check()
    assert table(kv, first)[:2] == shared
    kv.free("a")
    assert kv.swap_in(second) is not None
    kv.check()


def test_free_gives_up_swap_space():
    kv = KVCacheManager(8, SIZE, num_swap_blocks=8)
    request = make_request("a", list(range(9)))
    run_prompt(kv, request)
    kv.swap_out(request)
    kv.free("a")
    assert kv.swap_allocator.num_free == 8
    kv.check()


def test_without_swap_space_nothing_is_swapped():
    kv = KVCacheManager(8, SIZE)
    request = make_request("a", list(range(9)))
    run_prompt(kv, request)
    assert kv.swap_out(request) is None
    assert kv.holds_blocks("a")


def test_pinned_blocks_are_no_room_until_unpinned():
    kv = KVCacheManager(4, SIZE)
    request = make_request("a", [1] * 16)
    run_prompt(kv, request)
    kv.pin([0])
    kv.free("a")
    new = make_request("b", [2] * 16)
    assert kv.admit(new) is None
    kv.check()
    kv.unpin([0])
    assert kv.admit(new) == 0


def test_a_pinned_shared_block_may_be_shared_again_but_is_not_rewritten():
    kv = KVCacheManager(6, SIZE)
    first = make_request("a", list(range(13)))
    run_prompt(kv, first)
    sent = kv.block_ids("a")
    before = kv.generations(sent)
    kv.pin(sent)
    kv.free("a")
    kv.check()
    # Room is what nobody holds: neither the cached blocks under the transfer, nor the last one.
    assert (kv.num_free_blocks, kv.num_pinned_blocks) == (2, 4)
    assert kv.admit(make_request("large", [90] * 9)) is None
    second = make_request("b", [*range(12), 70])
    assert kv.admit(second) == 12
    assert kv.block_ids("b")[:3] == sent[:3]
    kv.free("b")
    kv.check()
    # The last block, which was private, is nobody's any more; the others are as they were.
    assert kv.generations(sent)[:3] == before[:3]
    assert kv.generations(sent)[3] > before[3]
    assert kv.num_free_blocks == 2
    kv.unpin(sent)
    kv.check()
    assert kv.num_free_blocks == 6
    assert kv.match_prefix(second) == 12
    assert run_prompt(kv, make_request("large", [90] * 24)) == 0
    assert all(new > old for new, old in zip(kv.generations(sent), before, strict=True))


def test_blocks_after_the_last_pinned_one_can_be_evicted():
    kv = KVCacheManager(4, SIZE)
    run_prompt(kv, make_request("a", list(range(16))))
    kv.pin([1])
    kv.free("a")
    assert kv.num_free_blocks == 2
    request = make_request("b", [90] * 8)
    assert run_prompt(kv, request) == 0
    assert kv.block_ids("b") == [2, 3]
    kv.unpin([1])
    kv.check()
    assert kv.num_free_blocks == 2


def test_a_block_registered_while_pinned_is_not_evicted():
    kv = KVCacheManager(2, SIZE)
    request = make_request("a", list(range(8)))
    kv.admit(request)
    kv.pin([0, 1])
    request.num_computed_tokens = 8
    kv.commit(request)
    kv.free("a")
    kv.check()
    assert kv.num_free_blocks == 0
    assert not kv.reset_prefix_cache()
    kv.unpin([0, 1])
    assert kv.num_free_blocks == 2


def test_pins_outlive_forgetting():
    kv = KVCacheManager(4, SIZE)
    run_prompt(kv, make_request("a", list(range(9))))
    kv.pin([0, 2])
    kv.free("a")
    kv.forget_all()
    kv.check()
    assert (kv.num_free_blocks, kv.num_cached_blocks) == (2, 0)
    kv.unpin([0, 2])
    kv.check()
    assert kv.num_free_blocks == 4


def test_reserve_keeps_off_blocks_and_takes_a_piece_if_there_is_one():
    kv = KVCacheManager(8, SIZE)
    request = make_request("a", [1] * 8)
    assert kv.reserve(request, 9, avoid=frozenset({1})) == 0
    assert kv.block_ids("a") == [2, 3, 4]
    kv.check()
    other = make_request("b", [2] * 12)
    assert kv.reserve(other, 13, avoid=frozenset({0, 6})) is None
    assert not kv.holds_blocks("b")
    assert kv.reserve(other, 12, avoid=frozenset({0, 6})) == 0
    assert sorted(kv.block_ids("b")) == [1, 5, 7]
    kv.check()
    kv.free("b")
    assert kv.reserve(other, 9, avoid=frozenset({0, 6})) == 0
    kv.free("a")
    kv.free("b")
    assert kv.allocator.largest_segment == 8


def test_reserve_shares_every_full_block_and_forgets_a_refused_request():
    kv = KVCacheManager(4, SIZE)
    run_prompt(kv, make_request("a", list(range(8))))
    assert kv.reserve(make_request("b", list(range(8))), 9, reserve_blocks=2) is None
    request = make_request("b", [*range(4), *range(20, 28)])
    assert kv.reserve(request, 13, reserve_blocks=1) is None
    assert kv.reserve(make_request("b", list(range(8))), 9) == 8
    assert (kv.prefix_cache_queries, kv.prefix_cache_hits) == (16, 8)
    kv.check()


def test_prefix_events_are_what_a_directory_needs():
    kv = KVCacheManager(4, SIZE, record_prefix_events=True)
    tokens = list(range(8))
    names = hash_blocks(tokens, SIZE)
    assert kv.take_prefix_events() == PrefixEvents()
    run_prompt(kv, make_request("a", tokens))
    assert kv.take_prefix_events() == PrefixEvents(added=tuple(names))
    kv.free("a")
    assert kv.take_prefix_events() == PrefixEvents()
    run_prompt(kv, make_request("b", [90] * 11))
    events = kv.take_prefix_events()
    assert events.removed == (names[1], names[0])
    assert events.added == tuple(hash_blocks([90] * 8, SIZE))
    kv.forget_all()
    assert kv.take_prefix_events() == PrefixEvents(removed=events.added)


def test_too_many_prefix_events_start_over():
    kv = KVCacheManager(4, SIZE, record_prefix_events=True)
    run_prompt(kv, make_request("a", list(range(16))))
    kv.take_prefix_events()
    kv.free("a")
    run_prompt(kv, make_request("b", [90] * 16))
    # Four went and four came; there are four blocks.
    assert kv.take_prefix_events() == PrefixEvents(is_complete=False)
    assert kv.take_prefix_events() == PrefixEvents(added=tuple(hash_blocks([90] * 16, SIZE)))
    assert kv.take_prefix_events() == PrefixEvents()


def test_prefix_events_are_off_unless_asked_for():
    with pytest.raises(RuntimeError, match="not recorded"):
        KVCacheManager(4, SIZE).take_prefix_events()


def test_reset_prefix_cache():
    kv = KVCacheManager(8, SIZE)
    run_prompt(kv, make_request("a", list(range(9))))
    assert not kv.reset_prefix_cache()
    kv.free("a")
    assert kv.reset_prefix_cache()
    assert kv.num_cached_blocks == 0
    assert kv.allocator.largest_segment == 8
    kv.check()


def test_forget_all():
    kv = KVCacheManager(8, SIZE, num_swap_blocks=4)
    run_prompt(kv, make_request("a", list(range(9))))
    request = make_request("b", list(range(5)))
    run_prompt(kv, request)
    kv.swap_out(request)
    kv.forget_all()
    assert (kv.allocator.num_free, kv.swap_allocator.num_free) == (8, 4)
    kv.check()


def test_bad_sizes():
    with pytest.raises(ValueError, match="num_blocks=0"):
        KVCacheManager(0, 16)


class ManagerMachine(RuleBasedStateMachine):
    """Two-token alphabet, so that prefixes meet; every slot remembers which prefix wrote it."""

    def __init__(self):
        super().__init__()
        self.kv = KVCacheManager(12, 2, num_swap_blocks=6, record_prefix_events=True)
        # A transfer's blocks, their generations, and what they held.
        self.pins: list[tuple[list[int], list[int], list[tuple]]] = []
        self.directory: set[bytes] = set()
        self.pool: dict[int, tuple] = {}
        self.host: dict[int, list] = {}
        self.resident: dict[str, Request] = {}
        self.swapped: dict[str, Request] = {}
        self.num_made = 0

    def slot(self, request: Request, position: int) -> int:
        size = self.kv.block_size
        return int(self.kv.block_table(request.request_id)[position // size]) * size + (
            position % size
        )

    def compute_rest(self, request: Request) -> None:
        for position in range(request.num_computed_tokens, request.num_tokens):
            content = (request.cache_salt, *request.token_ids[: position + 1])
            self.pool[self.slot(request, position)] = content
        request.num_computed_tokens = request.num_tokens
        self.kv.commit(request)

    @rule(
        tokens=st.lists(st.integers(0, 1), min_size=1, max_size=12),
        salt=st.sampled_from([None, None, None, "s"]),
        reserve=st.integers(0, 2),
    )
    def admit(self, tokens, salt, reserve):
        self.num_made += 1
        request = make_request(f"r{self.num_made}", tokens, cache_salt=salt)
        free = self.kv.num_free_blocks
        expected = self.kv.match_prefix(request)
        cached = self.kv.admit(request, reserve_blocks=reserve)
        if cached is None:
            assert self.kv.num_free_blocks == free
            assert self.kv.blocks_for(len(tokens)) + reserve > free
            return
        assert cached == expected < len(tokens)
        assert self.kv.num_free_blocks >= reserve
        self.resident[request.request_id] = request
        request.num_computed_tokens = cached

    @precondition(lambda self: self.resident)
    @rule(data=st.data())
    def compute(self, data):
        self.compute_rest(self.resident[data.draw(st.sampled_from(sorted(self.resident)))])

    @precondition(lambda self: self.resident)
    @rule(data=st.data(), token=st.integers(0, 1))
    def decode(self, data, token):
        request = self.resident[data.draw(st.sampled_from(sorted(self.resident)))]
        before = table(self.kv, request)
        if self.kv.allocate(request, request.num_tokens + 1):
            assert table(self.kv, request)[: len(before)] == before
            request.token_ids.append(token)
            self.compute_rest(request)
        else:
            assert self.kv.num_free_blocks == 0
            assert table(self.kv, request) == before

    @precondition(lambda self: self.resident or self.swapped)
    @rule(data=st.data())
    def end(self, data):
        name = data.draw(st.sampled_from(sorted(self.resident | self.swapped)))
        self.resident.pop(name, None)
        self.swapped.pop(name, None)
        self.kv.free(name)

    @precondition(lambda self: self.resident)
    @rule(data=st.data())
    def swap_out(self, data):
        name = data.draw(st.sampled_from(sorted(self.resident)))
        runs = self.kv.swap_out(self.resident[name])
        if runs is None:
            return
        for src, dst, num_blocks in runs:
            for offset in range(num_blocks * 2):
                self.host[dst * 2 + offset] = self.pool.get(src * 2 + offset)
        self.swapped[name] = self.resident.pop(name)

    @precondition(lambda self: self.swapped)
    @rule(data=st.data())
    def swap_in(self, data):
        name = data.draw(st.sampled_from(sorted(self.swapped)))
        runs = self.kv.swap_in(self.swapped[name])
        if runs is None:
            return
        for src, dst, num_blocks in runs:
            for offset in range(num_blocks * 2):
                self.pool[dst * 2 + offset] = self.host[src * 2 + offset]
        self.resident[name] = self.swapped.pop(name)

    @precondition(lambda self: self.resident)
    @rule(data=st.data())
    def pin(self, data):
        request = self.resident[data.draw(st.sampled_from(sorted(self.resident)))]
        # What a transfer reads has been computed, and is not written any more.
        blocks = self.kv.block_ids(request.request_id)[: request.num_computed_tokens // 2]
        self.kv.pin(blocks)
        self.pins.append((blocks, self.kv.generations(blocks), self.contents(blocks)))

    def contents(self, blocks: list[int]) -> list[tuple]:
        return [self.pool[block * 2 + offset] for block in blocks for offset in range(2)]

    @precondition(lambda self: self.pins)
    @rule(data=st.data())
    def unpin(self, data):
        index = data.draw(st.integers(0, len(self.pins) - 1))
        self.kv.unpin(self.pins.pop(index)[0])

    @rule()
    def tell_the_directory(self):
        events = self.kv.take_prefix_events()
        if not events.is_complete:
            self.directory.clear()
            events = self.kv.take_prefix_events()
        assert self.directory.isdisjoint(events.added)
        assert self.directory.issuperset(events.removed)
        self.directory -= set(events.removed)
        self.directory |= set(events.added)
        assert len(self.directory) == self.kv.num_cached_blocks

    @rule()
    def reset(self):
        self.kv.reset_prefix_cache()

    @invariant()
    def sound(self):
        self.kv.check()
        for blocks, generations, contents in self.pins:
            # One more once its owner has freed it; not another while it is pinned.
            now = self.kv.generations(blocks)
            assert all(new - old in (0, 1) for new, old in zip(now, generations, strict=True))
            assert self.contents(blocks) == contents
        for request in self.resident.values():
            for position in range(request.num_computed_tokens):
                content = (request.cache_salt, *request.token_ids[: position + 1])
                assert self.pool[self.slot(request, position)] == content

    def teardown(self):
        for name in [*self.resident, *self.swapped]:
            self.kv.free(name)
            self.kv.check()
        for blocks, _, _ in self.pins:
            self.kv.unpin(blocks)
        self.tell_the_directory()
        self.kv.check()
        assert self.kv.num_free_blocks == 12
        assert self.kv.reset_prefix_cache()
        assert self.kv.allocator.num_free == 12
        assert self.kv.swap_allocator.num_free == 6


TestManagerMachine = ManagerMachine.TestCase
TestManagerMachine.settings = settings(
    max_examples=80, stateful_step_count=40, deadline=None, derandomize=True
)
