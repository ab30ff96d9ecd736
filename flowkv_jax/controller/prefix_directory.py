"""Which node has which cached prefix: FlowKV's global KV cache sensor.

A block's hash names the whole prefix up to its end (`block_hash`), so a table from hash to nodes is
all that is needed: a prompt's hashes are looked up in order, and a node's match ends at the first
one it lacks.

    hashes     h0   h1   h2   h3
    node a     x    x    x    .      matches 3
    node b     x    .    x    x      matches 1: what follows the gap cannot be used

The nodes of a hash are the bits of one integer. A node that leaves loses its bit in `_live` and
nothing else; bits are used again once a sweep has taken them out of the table.

Memory is bounded: beyond `max_entries` the least recently used hashes go. Of one chain the later
blocks count as used before the earlier ones, so that chains are cut at their ends.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence

_MAX_DEAD_BITS = 64


class PrefixDirectory:
    """Chained block hashes to nodes, by slot."""

    def __init__(self, max_entries: int) -> None:
        if max_entries < 1:
            raise ValueError(f"{max_entries=} must be at least 1")
        self._max_entries = max_entries
        self._holders: OrderedDict[bytes, int] = OrderedDict()
        self._bit_of: dict[int, int] = {}
        self._slot_of: dict[int, int] = {}
        self._live = 0
        self._num_bits = 0
        self._free_bits: list[int] = []
        self._dead_bits: list[int] = []
        self._counts: dict[int, int] = {}

    def __len__(self) -> int:
        """Hashes remembered."""
        return len(self._holders)

    def join(self, slot: int) -> None:
        """A node that has nothing cached. Idempotent."""
        if slot in self._bit_of:
            return
        if self._free_bits:
            index = self._free_bits.pop()
        else:
            index = self._num_bits
            self._num_bits += 1
        bit = 1 << index
        self._bit_of[slot] = bit
        self._slot_of[index] = slot
        self._counts[index] = 0
        self._live |= bit

    def leave(self, slot: int) -> None:
        """Forget all of a node. Idempotent."""
        bit = self._bit_of.pop(slot, 0)
        if not bit:
            return
        index = bit.bit_length() - 1
        del self._slot_of[index], self._counts[index]
        self._live &= ~bit
        self._dead_bits.append(index)
        if len(self._dead_bits) > _MAX_DEAD_BITS:
            self._sweep()

    def clear(self, slot: int) -> None:
        """A node's cache is empty."""
        self.leave(slot)
        self.join(slot)

    def add(self, slot: int, hashes: Sequence[bytes]) -> None:
        """A node has cached these blocks, in the order of their chain."""
        bit, holders = self._bit_of[slot], self._holders
        index = bit.bit_length() - 1
        for digest in reversed(hashes):
            mask = holders.get(digest, 0)
            self._counts[index] += not mask & bit
            holders[digest] = mask | bit
            holders.move_to_end(digest)
        while len(holders) > self._max_entries:
            _, mask = holders.popitem(last=False)
            for index in _bits(mask & self._live):
                self._counts[index] -= 1

    def remove(self, slot: int, hashes: Sequence[bytes]) -> None:
        """A node has these blocks no more."""
        bit, holders = self._bit_of[slot], self._holders
        for digest in hashes:
            mask = holders.get(digest, 0)
            if mask & bit:
                self._counts[bit.bit_length() - 1] -= 1
                mask &= ~bit
                if mask & self._live:
                    holders[digest] = mask
                else:
                    del holders[digest]

    def match(self, hashes: Sequence[bytes]) -> dict[int, int]:
        """Longest cached prefix of a prompt by slot, in blocks; nodes without one are left out."""
        holders, lengths = self._holders, dict[int, int]()
        alive, length = self._live, 0
        for length, digest in enumerate(hashes):
            still = alive & holders.get(digest, 0)
            if length and still != alive:
                self._note(lengths, alive & ~still, length)
            alive = still
            if not alive:
                break
        else:
            length = len(hashes)
            if hashes:
                self._note(lengths, alive, length)
        for digest in reversed(hashes[:length]):
            holders.move_to_end(digest)
        return lengths

    def count(self, slot: int) -> int:
        """Hashes remembered of a node."""
        bit = self._bit_of.get(slot)
        return self._counts[bit.bit_length() - 1] if bit else 0

    def _note(self, lengths: dict[int, int], mask: int, length: int) -> None:
        for index in _bits(mask):
            lengths[self._slot_of[index]] = length

    def _sweep(self) -> None:
        """Take dead bits out of the table, so that they can be used again."""
        for digest, mask in list(self._holders.items()):
            if mask & self._live:
                self._holders[digest] = mask & self._live
            else:
                del self._holders[digest]
        self._free_bits += self._dead_bits
        self._dead_bits.clear()

    def check(self) -> None:
        """Raise `AssertionError` unless the books agree."""
        assert len(self._holders) <= self._max_entries
        assert self._live == sum(self._bit_of.values())
        assert {1 << i: s for i, s in self._slot_of.items()} == {
            b: s for s, b in self._bit_of.items()
        }
        indices = [*self._slot_of, *self._free_bits, *self._dead_bits]
        assert sorted(indices) == list(range(self._num_bits))
        free = sum(1 << i for i in self._free_bits)
        assert not any(mask & free for mask in self._holders.values())
        for index, count in self._counts.items():
            assert count == sum(mask >> index & 1 for mask in self._holders.values())


def _bits(mask: int) -> Iterator[int]:
    """Indices of the bits that are set, ascending."""
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low
