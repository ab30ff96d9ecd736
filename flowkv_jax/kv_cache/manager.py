"""Which blocks each request holds: block tables, prefix cache and swap space of one node.

A request's table, in token order (Z = block_size):

    table:   [ cached, shared with others | private                        ]
             0                            n                                num_blocks
    tokens:  [0, n*Z) never written again | [n*Z, num_blocks*Z), this request alone writes

The first n blocks are registered in the prefix cache; n grows as the request fills blocks whose
tokens the host knows (`commit`). A request registers a beginning of its table without a gap: if
another request holds an equal block it waits, and registers its own once that one is let go.

Who owns a block: a request (private), the prefix cache (held by requests, or unheld and
evictable), or the allocator. `check()` proves that every block has exactly one of the three.

A transfer pins the blocks that it reads or writes. Whatever becomes of their request meanwhile, a
pinned block is not handed out: a private one that is freed is deferred by the allocator, and a
cached one, with all before it, stays held in the request's place until it is unpinned. Others may
share it then, for they only read it.

Nothing here touches the device. Blocks given back may be handed out at once although steps
already dispatched still use them: the device runs steps in the order they were scheduled, so a
new owner's first write comes later. For the same reason a block may be registered as soon as the
step that computes it is scheduled; if that step fails, call `forget_all`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from flowkv_jax.block_hash import extend_hashes
from flowkv_jax.kv_cache.prefix_cache import CachedBlock, PrefixCache
from flowkv_jax.kv_cache.prefix_events import PrefixEventLog, PrefixEvents
from flowkv_jax.kv_cache.request_blocks import BlockTable, RequestBlocks
from flowkv_jax.kv_cache.segment_allocator import SegmentAllocator
from flowkv_jax.request import Request
from transfer.alignment import align
from transfer.types import BlockRun


class KVCacheManager:
    """Owns the block ids of the pool and of the swap space. Not thread-safe: one owner.

    Args:
        num_blocks: blocks in the device pool.
        block_size: tokens in a block.
        enable_prefix_caching: keep full blocks for prompts that begin alike.
        num_swap_blocks: blocks in the host pool; 0 turns swapping off.
        record_prefix_events: keep what `take_prefix_events` tells.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        enable_prefix_caching: bool = True,
        num_swap_blocks: int = 0,
        record_prefix_events: bool = False,
    ) -> None:
        if num_blocks < 1 or block_size < 1:
            raise ValueError(f"{num_blocks=} and {block_size=} must be at least 1")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.allocator = SegmentAllocator(num_blocks)
        self.swap_allocator = SegmentAllocator(num_swap_blocks)
        self.prefix_cache_queries = 0
        self.prefix_cache_hits = 0
        # More events than blocks are longer than a list of all that is cached.
        self._events = PrefixEventLog(num_blocks) if record_prefix_events else None
        self._cache = PrefixCache(block_size, self._events)
        # Beginnings that ended requests held, of which a transfer reads the last block.
        self._lingering: list[list[CachedBlock]] = []
        # Held for whoever will come for them, until `let_go`.
        self._kept: dict[str, list[CachedBlock]] = {}
        self._sequences: dict[str, RequestBlocks] = {}
        self._swapped: dict[str, list[int]] = {}
        # Digests of each request's full blocks so far, so that one that waits is hashed once.
        self._hashes: dict[str, list[bytes]] = {}

    # Room

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)

    @property
    def num_free_blocks(self) -> int:
        """Blocks that can be handed out, including cached ones that nobody holds."""
        return self.allocator.num_free + self._cache.num_unheld

    @property
    def usage(self) -> float:
        """Share of blocks that live requests hold, in [0, 1]."""
        return 1 - self.num_free_blocks / self.num_blocks

    @property
    def fragmentation(self) -> float:
        return self.allocator.fragmentation

    @property
    def num_cached_blocks(self) -> int:
        """Blocks in the prefix cache, held or not."""
        return len(self._cache)

    # A request's way

    def match_prefix(self, request: Request) -> int:
        """Tokens of `request` that the prefix cache holds now. Reserves nothing.

        Never all of them: the last known token must be computed, for its logits. 0 for requests
        with prompt_logprobs, which need every prompt position's logits.
        """
        return len(self._match(request, self._cache_limit(request))) * self.block_size

    def admit(self, request: Request, *, reserve_blocks: int = 0) -> int | None:
        """Give a request that holds nothing blocks for all its known tokens, cached ones first.

        The others are contiguous if there is such a segment. Returns the number of cached tokens
        (the request's K/V are computed up to there), or None, changing nothing, unless
        `reserve_blocks` blocks stay free beside it.
        """
        num_cached_tokens = self._place(
            request, request.num_tokens, self._cache_limit(request), reserve_blocks
        )
        if num_cached_tokens is not None and self._reads_cache(request):
            self._count_look_up(request, num_cached_tokens)
        return num_cached_tokens

    def reserve(
        self,
        request: Request,
        num_tokens: int,
        *,
        reserve_blocks: int = 0,
        avoid: frozenset[int] = frozenset(),
    ) -> int | None:
        """Give a request that holds nothing blocks for positions [0, num_tokens), into which
        another node's K/V of its known tokens will come.

        Full blocks of known tokens that are cached here are shared, and must not be written; the
        others are contiguous if there is such a segment, and are not registered before `commit`.
        Returns the number of tokens in shared blocks, or None, changing nothing, unless
        `reserve_blocks` blocks stay free beside it. Blocks of `avoid` are not taken, and do not
        count as free.
        """
        limit = request.num_tokens // self.block_size if self.enable_prefix_caching else 0
        limit = min(limit, len(self._cache))
        num_reused_tokens = self._place(request, num_tokens, limit, reserve_blocks, avoid)
        if num_reused_tokens is None:
            self._hashes.pop(request.request_id, None)
        elif self.enable_prefix_caching:
            self._count_look_up(request, num_reused_tokens)
        return num_reused_tokens

    def _place(
        self,
        request: Request,
        num_tokens: int,
        cache_limit: int,
        reserve_blocks: int,
        avoid: frozenset[int] = frozenset(),
    ) -> int | None:
        """Blocks for `num_tokens` tokens, at most `cache_limit` of them cached ones."""
        self._require_no_blocks(request)
        reserve_blocks += len(avoid)
        total_blocks = self.blocks_for(num_tokens)
        # What the cache could save at most, before paying for a look-up.
        if total_blocks - cache_limit + reserve_blocks > self.num_free_blocks:
            return None
        hits = self._match(request, cache_limit)
        unheld_hits = sum(entry.ref_count == 0 for entry in hits)
        missing = total_blocks - len(hits)
        if missing + unheld_hits + reserve_blocks > self.num_free_blocks:
            return None
        # Hold the hits first: making room must not evict them.
        self._cache.acquire(hits)
        new_blocks = self._take_apart(missing, avoid)
        if new_blocks is None:
            self._cache.release(hits)
            return None
        sequence = self._sequences[request.request_id] = RequestBlocks()
        sequence.registered = hits
        sequence.append([entry.block for entry in hits] + new_blocks, self.block_size)
        return len(hits) * self.block_size

    def _count_look_up(self, request: Request, num_cached_tokens: int) -> None:
        self.prefix_cache_queries += request.num_tokens
        self.prefix_cache_hits += num_cached_tokens

    def allocate(self, request: Request, num_tokens: int) -> bool:
        """Make sure `request` has blocks for positions [0, num_tokens).

        A request without blocks gets one contiguous piece if there is one; otherwise its table
        grows in place if it can. False, changing nothing, if there are too few blocks.
        """
        sequence = self._sequences.get(request.request_id)
        if sequence is None:
            self._require_no_blocks(request)
            new_blocks = self._take(self.blocks_for(num_tokens), self.allocator.allocate)
            if new_blocks is None:
                return False
            sequence = self._sequences[request.request_id] = RequestBlocks()
        elif num_tokens <= sequence.capacity_tokens:
            return True
        else:
            missing = self.blocks_for(num_tokens) - sequence.view.size
            last_block = int(sequence.view[-1]) if sequence.view.size else -1
            new_blocks = self._take(missing, lambda n: self.allocator.grow(last_block, n))
            if new_blocks is None:
                return False
        sequence.append(new_blocks, self.block_size)
        return True

    def commit(self, request: Request) -> None:
        """Register the full blocks whose tokens the host knows and whose K/V are computed."""
        if not self.enable_prefix_caching:
            return
        sequence = self._sequences[request.request_id]
        size = self.block_size
        num_full = min(request.num_tokens, request.num_computed_tokens) // size
        num_registered = len(sequence.registered)
        if num_full <= num_registered:
            return
        hashes = self._hashes_of(request)
        parent = sequence.registered[-1] if num_registered else None
        for index in range(num_registered, num_full):
            block = int(sequence.view[index])
            tokens = tuple(request.token_ids[index * size : (index + 1) * size])
            entry = self._cache.get(hashes[index])
            if entry is None:
                entry = self._cache.register(
                    block, hashes[index], tokens, parent, request.cache_salt
                )
            elif entry.ref_count == 0 and entry.holds(parent, tokens, request.cache_salt):
                self.allocator.free([self._cache.adopt(entry, block)])
            else:
                return
            sequence.registered.append(entry)
            parent = entry

    def free(self, request_id: str) -> None:
        """Give up whatever the request has, in the pool or in the swap space. Idempotent.

        Registered blocks stay cached until their room is needed.
        """
        self._hashes.pop(request_id, None)
        self._drop_sequence(request_id)
        swapped = self._swapped.pop(request_id, None)
        if swapped is not None:
            self.swap_allocator.free(swapped)

    def block_table(self, request_id: str) -> BlockTable:
        """Read-only int32[M] block ids in token order. Growth makes a new view: ask each step.

        Raises:
            KeyError: the request holds no blocks in the pool.
        """
        return self._sequences[request_id].view

    def block_ids(self, request_id: str) -> list[int]:
        """`block_table` as a list of Python ints."""
        ids: list[int] = self._sequences[request_id].view.tolist()
        return ids

    def holds_blocks(self, request_id: str) -> bool:
        """Whether the request has blocks in the pool."""
        return request_id in self._sequences

    # Transfers

    def pin(self, block_ids: Sequence[int]) -> None:
        """Hold blocks of a live request for a transfer: none is handed out before its `unpin`.

        Raises:
            RuntimeError: an id is out of range, or nobody holds its block. Nothing changes.
        """
        self.allocator.pin(block_ids)

    def unpin(self, block_ids: Sequence[int]) -> None:
        """Undo one `pin`, whatever has become of the request.

        Raises:
            RuntimeError: a block has fewer pins than are undone. Nothing changes.
        """
        self.allocator.unpin(block_ids)
        lingering, self._lingering = self._lingering, []
        for entries in lingering:
            self._let_go(entries)

    def generations(self, block_ids: Sequence[int]) -> list[int]:
        """Generation of each block, by which a reader later sees whether it is still the same."""
        return self.allocator.generations(block_ids)

    @property
    def num_pinned_blocks(self) -> int:
        """Blocks that transfers hold, whoever else does."""
        return self.allocator.num_pinned

    # Prompts that somebody will come for

    def keep(self, name: str, token_ids: Sequence[int], cache_salt: str | None) -> list[int]:
        """Hold the cached beginning of a prompt until `let_go(name)`; the ids of its blocks.

        A beginning of the same name is let go first.
        """
        self.let_go(name)
        hashes: list[bytes] = []
        extend_hashes(hashes, token_ids, self.block_size, cache_salt)
        entries = self._cache.match(hashes, token_ids, cache_salt)
        self._cache.acquire(entries)
        self._kept[name] = entries
        return [entry.block for entry in entries]

    def let_go(self, name: str) -> None:
        """Undo a `keep`; names that nothing is kept for are passed over."""
        entries = self._kept.pop(name, None)
        if entries is not None:
            self._let_go(entries)

    # Swapping

    def swap_out(self, request: Request) -> tuple[BlockRun, ...] | None:
        """Move a request's computed blocks to the swap space: the device-to-host copies to do.

        Shared blocks are copied too, so that what is swapped depends on nothing in the pool. None,
        changing nothing, if the swap space lacks room. The pool's blocks are given up at once:
        the copies must run before any step scheduled later.
        """
        num_used = self.blocks_for(request.num_computed_tokens)
        host_blocks = self.swap_allocator.allocate(num_used)
        if host_blocks is None:
            return None
        request_id = request.request_id
        runs = align(self._sequences[request_id].view[:num_used], host_blocks)
        self._drop_sequence(request_id)
        self._swapped[request_id] = host_blocks
        return tuple(runs)

    def swap_in(self, request: Request, *, reserve_blocks: int = 0) -> tuple[BlockRun, ...] | None:
        """Bring a swapped request back: the host-to-device copies to do.

        It gets blocks for all its known tokens. None, changing nothing, unless `reserve_blocks`
        blocks stay free beside it. The swap space is given up at once: the copies must be done
        before those of any later `swap_out`.
        """
        request_id = request.request_id
        host_blocks = self._swapped[request_id]
        total_blocks = max(self.blocks_for(request.num_tokens), len(host_blocks))
        if total_blocks + reserve_blocks > self.num_free_blocks:
            return None
        new_blocks = self._take(total_blocks, self.allocator.allocate)
        if new_blocks is None:
            return None
        runs = align(host_blocks, new_blocks[: len(host_blocks)])
        del self._swapped[request_id]
        self.swap_allocator.free(host_blocks)
        sequence = self._sequences[request_id] = RequestBlocks()
        sequence.append(new_blocks, self.block_size)
        return tuple(runs)

    # The cache as a whole

    def reset_prefix_cache(self) -> bool:
        """Forget all cached blocks; False, changing nothing, while requests or transfers hold
        some."""
        blocks = self._cache.reset()
        if blocks is None:
            return False
        self.allocator.free(blocks)
        return True

    def forget_all(self) -> None:
        """Give up every request's blocks and the cache: the pool's contents cannot be trusted.

        Pinned blocks still come free only when they are unpinned.
        """
        for request_id in [*self._sequences, *self._swapped]:
            self.free(request_id)
        for entries in [*self._lingering, *self._kept.values()]:
            self._cache.release(entries)
        self._lingering.clear()
        self._kept.clear()
        self._hashes.clear()
        self.reset_prefix_cache()

    def take_prefix_events(self) -> PrefixEvents:
        """Hashes of blocks that were cached and forgotten since last asked; see `prefix_events`.

        Raises:
            RuntimeError: they are not recorded.
        """
        if self._events is None:
            raise RuntimeError("prefix events are not recorded; make it with record_prefix_events")
        return self._events.take(self._cache.hashes())

    def restart_prefix_events(self) -> None:
        """Have `take_prefix_events` begin with everything cached, for a new listener."""
        if self._events is not None:
            self._events.restart()

    def check(self) -> None:
        """Prove that every block has exactly one owner and every reference is counted.

        Raises RuntimeError with what is wrong.
        """
        self.allocator.check()
        self.swap_allocator.check()
        self._cache.check()
        owned = [entry.block for entry in self._cache.entries()]
        references: dict[int, int] = {}
        for request_id, sequence in self._sequences.items():
            _require(request_id not in self._swapped, f"{request_id} is in the pool and swapped")
            owned.extend(sequence.private_blocks())
            shared = [entry.block for entry in sequence.registered]
            _require(
                sequence.view[: len(shared)].tolist() == shared,
                f"{request_id}: table and registered blocks differ",
            )
            for block in shared:
                references[block] = references.get(block, 0) + 1
        for entries in self._lingering:
            _require(self.allocator.is_pinned(entries[-1].block), "a beginning lingers unread")
        for entries in [*self._lingering, *self._kept.values()]:
            for entry in entries:
                references[entry.block] = references.get(entry.block, 0) + 1
        for entry in self._cache.entries():
            _require(
                entry.ref_count == references.pop(entry.block, 0),
                f"cached block {entry.block} has ref_count={entry.ref_count}",
            )
            _require(
                entry.ref_count > 0 or not self.allocator.is_pinned(entry.block),
                f"cached block {entry.block} is pinned and may be evicted",
            )
        _require(not references, f"held blocks are not cached: {references}")
        _require(len(owned) == len(set(owned)), "a block has two owners")
        _require(all(map(self.allocator.is_used, owned)), "an owned block is free")
        num_owned = self.allocator.num_used - self.allocator.num_deferred
        _require(len(owned) == num_owned, f"{num_owned} blocks in use, {len(owned)} owned")
        swapped = sum(map(len, self._swapped.values()))
        _require(swapped == self.swap_allocator.num_used, "swap space and swapped requests differ")

    # Inside

    def _take(self, num_blocks: int, take: Callable[[int], list[int] | None]) -> list[int] | None:
        """`take(num_blocks)` after evicting what it lacks; None if that cannot be enough."""
        lacking = num_blocks - self.allocator.num_free
        if lacking > 0:
            if lacking > self._cache.num_unheld:
                return None
            self.allocator.free(self._cache.evict(lacking, piece_blocks=num_blocks))
        return take(num_blocks)

    def _take_apart(self, num_blocks: int, avoid: frozenset[int]) -> list[int] | None:
        """Blocks in as few pieces as can be, none of them in `avoid`."""
        aside: list[int] = []
        while True:
            block_ids = self._take(num_blocks, self.allocator.allocate)
            if block_ids is None or avoid.isdisjoint(block_ids):
                break
            aside.extend(avoid.intersection(block_ids))
            self.allocator.free([block for block in block_ids if block not in avoid])
        self.allocator.free(aside)
        return block_ids

    def _drop_sequence(self, request_id: str) -> None:
        sequence = self._sequences.pop(request_id, None)
        if sequence is not None:
            self.allocator.free(sequence.private_blocks())
            self._let_go(sequence.registered)

    def _let_go(self, entries: list[CachedBlock]) -> None:
        """Release a beginning, but for what of it transfers read and what precedes that."""
        num_kept = len(entries) if self.allocator.num_pinned else 0
        while num_kept and not self.allocator.is_pinned(entries[num_kept - 1].block):
            num_kept -= 1
        if num_kept:
            self._lingering.append(entries[:num_kept])
        self._cache.release(entries[num_kept:])

    def _match(self, request: Request, limit: int) -> list[CachedBlock]:
        if limit == 0:
            return []
        hashes = self._hashes_of(request)
        return self._cache.match(hashes[:limit], request.token_ids, request.cache_salt)

    def _cache_limit(self, request: Request) -> int:
        """Blocks of `request` that may come from the cache."""
        if not self._reads_cache(request):
            return 0
        return min((request.num_tokens - 1) // self.block_size, len(self._cache))

    def _reads_cache(self, request: Request) -> bool:
        return self.enable_prefix_caching and request.sampling_params.prompt_logprobs is None

    def _hashes_of(self, request: Request) -> list[bytes]:
        hashes = self._hashes.setdefault(request.request_id, [])
        extend_hashes(hashes, request.token_ids, self.block_size, request.cache_salt)
        return hashes

    def _require_no_blocks(self, request: Request) -> None:
        if request.request_id in self._sequences or request.request_id in self._swapped:
            raise RuntimeError(f"{request.request_id} holds blocks already")


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise RuntimeError(f"KV-cache manager: {message}")
