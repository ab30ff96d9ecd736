"""What the cached blocks hold, so that equal prompt beginnings are computed once.

Cached blocks form trees, one edge a block:

    root(salt) ── [t0..t15] ── [t16..t31] ── [t32..t47]
                           └── [u16..u31]

A block is *held* while requests use it (`ref_count` of them) and stays cached, evictable, when
the last one leaves. Three rules keep that sound:

- A hit is proved, not believed: besides the hash, the block's tokens, its salt and the identity of
  its parent are compared. A hash collision is a miss, never another prompt's K/V.
- A request that holds a block holds the block's parents. So a block nobody holds has only
  descendants nobody holds, and every such block can be evicted, leaves first.
- A parent outlives its children, so the identity check needs no history.

Eviction is least recently used among leaves, in chains: blocks that were let go together were
mostly allocated together, so taking a chain from its tail returns contiguous space.

The cache knows blocks by id; whose they are and where free ones go is the manager's business.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush

from flowkv_jax.kv_cache.prefix_events import PrefixEventLog


@dataclass(eq=False, slots=True)
class CachedBlock:
    """A full block in the cache. Compared by identity.

    Attributes:
        block: its id in the pool.
        parent: the block before it; None for the first of a prompt.
        ref_count: requests that hold it.
        num_children: cached blocks that follow it.
        released_at: tick of the release that left it unheld, equal for blocks let go together.
    """

    block: int
    block_hash: bytes
    token_ids: tuple[int, ...]
    cache_salt: str | None
    parent: CachedBlock | None
    ref_count: int = 1
    num_children: int = 0
    released_at: int = 0

    def holds(
        self, parent: CachedBlock | None, token_ids: tuple[int, ...], cache_salt: str | None
    ) -> bool:
        """Whether it is the block of `token_ids` after `parent`, for `cache_salt`."""
        return (
            self.parent is parent and self.token_ids == token_ids and self.cache_salt == cache_salt
        )


class PrefixCache:
    """Hash -> block, reference counts and the order of eviction.

    Args:
        events: is told what comes and goes.
    """

    def __init__(self, block_size: int, events: PrefixEventLog | None = None) -> None:
        self.block_size = block_size
        self._events = events
        self._by_hash: dict[bytes, CachedBlock] = {}
        self._num_unheld = 0
        self._tick = 0
        # (released_at, push number, leaf). An entry is stale once its block was acquired again,
        # evicted, or grew a child; stale entries are skipped when they surface.
        self._leaves: list[tuple[int, int, CachedBlock]] = []
        self._num_pushes = 0

    def __len__(self) -> int:
        return len(self._by_hash)

    @property
    def num_unheld(self) -> int:
        """Cached blocks nobody holds: all of them can be evicted."""
        return self._num_unheld

    def get(self, block_hash: bytes) -> CachedBlock | None:
        return self._by_hash.get(block_hash)

    def match(
        self, hashes: Sequence[bytes], token_ids: Sequence[int], cache_salt: str | None
    ) -> list[CachedBlock]:
        """Longest cached beginning of the full blocks named by `hashes`. Takes no reference."""
        size = self.block_size
        found: list[CachedBlock] = []
        parent: CachedBlock | None = None
        for index, block_hash in enumerate(hashes):
            entry = self._by_hash.get(block_hash)
            if entry is None:
                break
            tokens = tuple(token_ids[index * size : (index + 1) * size])
            if not entry.holds(parent, tokens, cache_salt):
                break
            found.append(entry)
            parent = entry
        return found

    def acquire(self, entries: Iterable[CachedBlock]) -> None:
        """Hold each entry once more. Callers acquire whole beginnings, never a middle."""
        for entry in entries:
            if entry.ref_count == 0:
                self._num_unheld -= 1
            entry.ref_count += 1

    def release(self, entries: Sequence[CachedBlock]) -> None:
        """Undo one `acquire` (or the `register`) of each entry, in order.

        Callers release whole beginnings, or first the tail of one and later the rest.
        """
        self._tick += 1
        for entry in entries:
            if entry.ref_count < 1:
                raise RuntimeError(f"release of cached block {entry.block}, which nobody holds")
            entry.ref_count -= 1
            if entry.ref_count == 0:
                self._num_unheld += 1
                entry.released_at = self._tick
        # Inner blocks of the chain have a child, its last one may not.
        if entries and entries[-1].ref_count == 0 and entries[-1].num_children == 0:
            self._push_leaf(entries[-1])

    def register(
        self,
        block: int,
        block_hash: bytes,
        token_ids: tuple[int, ...],
        parent: CachedBlock | None,
        cache_salt: str | None,
    ) -> CachedBlock:
        """Cache a full block, held once by the caller (who holds `parent` too).

        Raises:
            RuntimeError: `block_hash` is cached already; ask `get` first.
        """
        if block_hash in self._by_hash:
            raise RuntimeError(f"block {block}: its hash is cached already")
        entry = CachedBlock(block, block_hash, token_ids, cache_salt, parent)
        self._by_hash[block_hash] = entry
        if self._events is not None:
            self._events.add(block_hash)
        if parent is not None:
            parent.num_children += 1
        return entry

    def adopt(self, entry: CachedBlock, block: int) -> int:
        """Let `block`, which holds the same K/V, stand for an unheld entry, and hold it once.

        Returns the block that stood for it before; it is the caller's to free.
        """
        if entry.ref_count:
            raise RuntimeError(f"adopt of cached block {entry.block}, which is held")
        displaced, entry.block = entry.block, block
        self.acquire((entry,))
        return displaced

    def evict(self, num_blocks: int, *, piece_blocks: int) -> list[int]:
        """Forget at least `num_blocks` blocks nobody holds, or all there are; their ids.

        The least recently used chain gives up to `piece_blocks` blocks from its tail, then the
        next one does. With `piece_blocks` the size of what is to be placed, a chain long enough
        makes room for it in one piece, and a shorter one goes whole; fewer than `piece_blocks`
        more than asked for are forgotten.
        """
        evicted: list[int] = []
        while len(evicted) < num_blocks and self._leaves:
            released_at, _, leaf = heappop(self._leaves)
            if released_at == leaf.released_at and self._is_evictable(leaf):
                evicted.extend(self._evict_chain(leaf, piece_blocks))
        return evicted

    def _evict_chain(self, leaf: CachedBlock, limit: int) -> list[int]:
        evicted: list[int] = []
        tick = leaf.released_at
        entry: CachedBlock | None = leaf
        while entry is not None and entry.ref_count == 0 and entry.num_children == 0:
            if len(evicted) == limit or entry.released_at != tick:
                self._push_leaf(entry)
                break
            del self._by_hash[entry.block_hash]
            self._num_unheld -= 1
            if self._events is not None:
                self._events.remove(entry.block_hash)
            evicted.append(entry.block)
            entry = entry.parent
            if entry is not None:
                entry.num_children -= 1
        return evicted

    def _is_evictable(self, entry: CachedBlock) -> bool:
        return (
            entry.ref_count == 0
            and entry.num_children == 0
            and self._by_hash.get(entry.block_hash) is entry
        )

    def _push_leaf(self, entry: CachedBlock) -> None:
        if len(self._leaves) > 64 + 2 * len(self._by_hash):
            current = {
                id(leaf): (released_at, number, leaf)
                for released_at, number, leaf in self._leaves
                if released_at == leaf.released_at and self._is_evictable(leaf)
            }
            self._leaves = list(current.values())
            heapify(self._leaves)
        self._num_pushes += 1
        heappush(self._leaves, (entry.released_at, self._num_pushes, entry))

    def reset(self) -> list[int] | None:
        """Forget everything; ids of the blocks. None, changing nothing, while any is held."""
        if self._num_unheld != len(self._by_hash):
            return None
        blocks = [entry.block for entry in self._by_hash.values()]
        if self._events is not None:
            for block_hash in self._by_hash:
                self._events.remove(block_hash)
        self._by_hash.clear()
        self._leaves.clear()
        self._num_unheld = 0
        return blocks

    def hashes(self) -> Iterable[bytes]:
        """Names of all cached blocks, parents first."""
        return self._by_hash

    def entries(self) -> Iterable[CachedBlock]:
        return self._by_hash.values()

    def check(self) -> None:
        """Prove the bookkeeping. Raises RuntimeError with what is wrong."""
        children: dict[int, int] = {}
        for entry in self._by_hash.values():
            parent = entry.parent
            if parent is not None:
                children[id(parent)] = children.get(id(parent), 0) + 1
                _require(
                    self._by_hash.get(parent.block_hash) is parent,
                    f"block {entry.block} outlived its parent",
                )
                _require(
                    entry.ref_count == 0 or parent.ref_count > 0,
                    f"block {entry.block} is held and its parent is not",
                )
        queued = {id(leaf) for tick, _, leaf in self._leaves if tick == leaf.released_at}
        for entry in self._by_hash.values():
            _require(
                entry.num_children == children.get(id(entry), 0),
                f"block {entry.block} miscounts its children",
            )
            _require(
                not self._is_evictable(entry) or id(entry) in queued,
                f"unheld leaf {entry.block} can never be evicted",
            )
        unheld = sum(entry.ref_count == 0 for entry in self._by_hash.values())
        _require(unheld == self._num_unheld, f"num_unheld={self._num_unheld}, counted {unheld}")
        blocks = {entry.block for entry in self._by_hash.values()}
        _require(len(blocks) == len(self._by_hash), "a block is cached twice")


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise RuntimeError(f"prefix cache: {message}")
