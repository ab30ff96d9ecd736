"""Computed prompts that a node holds for servers that are to decode them. No JAX.

HELD ──> PULLED ──> FREED        the sequences that came for it have ended here
  └───────────────────^          nobody will come, or came in time, or others need the room

A hold keeps cached blocks from eviction and nothing else: without it the prompt is computed again,
as far as it is not cached. So a hold may end at any time, and has one owner that ends it: this.

Holds keep at most half of the pool, the newest ones, or a single longer prompt; and where nothing
else could run for want of room, the node asks them to make some. Runs on the node's thread.
"""

from __future__ import annotations

import enum
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from flowkv_jax.cluster.node_port import SequenceKey
from flowkv_jax.kv_cache.manager import KVCacheManager

logger = logging.getLogger(__name__)

_SHARE_OF_POOL = 0.5


class HoldState(enum.Enum):
    HELD = "held"
    PULLED = "pulled"
    FREED = "freed"


_S = HoldState
HOLD_MOVES: dict[HoldState, frozenset[HoldState]] = {
    _S.HELD: frozenset({_S.PULLED, _S.FREED}),
    _S.PULLED: frozenset({_S.FREED}),
    _S.FREED: frozenset(),
}


@dataclass(eq=False, slots=True)
class _Hold:
    """One prompt.

    Attributes:
        expires_s: when it is given up, unless somebody has come for it.
        pullers: sequences that have come and not ended.
    """

    name: str
    num_blocks: int
    expires_s: float
    state: HoldState = HoldState.HELD
    pullers: set[SequenceKey] = field(default_factory=set)

    def move_to(self, state: HoldState) -> None:
        """Raises RuntimeError for a move that is not in `HOLD_MOVES`, a bug of ours."""
        if state not in HOLD_MOVES[self.state]:
            raise RuntimeError(f"hold {self.name}: illegal move {self.state.name} -> {state.name}")
        self.state = state


class Holds:
    """All holds of one node.

    Args:
        kv: the node's.
        hold_s: how long each waits to be pulled.
        on_ended: told of every sequence that has ended at the node.

    Attributes:
        num_expired: holds that nobody came for in time.
    """

    def __init__(
        self, kv: KVCacheManager, hold_s: float, on_ended: Callable[[SequenceKey], object]
    ) -> None:
        self._kv = kv
        self._hold_s = hold_s
        self._on_ended = on_ended
        self._max_blocks = int(kv.num_blocks * _SHARE_OF_POOL)
        # Oldest first, so in the order in which they expire.
        self._by_name: dict[str, _Hold] = {}
        self._by_puller: dict[SequenceKey, _Hold] = {}
        self.num_expired = 0

    def __len__(self) -> int:
        return len(self._by_name)

    @property
    def num_blocks(self) -> int:
        """Blocks that are held, counted once for each hold."""
        return sum(hold.num_blocks for hold in self._by_name.values())

    def hold(
        self, name: str, token_ids: Sequence[int], cache_salt: str | None, now_s: float
    ) -> list[int]:
        """Hold what is cached of a prompt; the ids of its blocks.

        One of the same name is freed first, and older ones as far as there is too little room.
        """
        self.free(name)
        blocks = self._kv.keep(name, token_ids, cache_salt)
        self._by_name[name] = _Hold(name, len(blocks), now_s + self._hold_s)
        while self.num_blocks > self._max_blocks and self.make_room(spare=name):
            pass
        return blocks

    def pull(self, name: str, puller: SequenceKey) -> bool:
        """A sequence has come for it, and will be here until `ended`; False if it is not held."""
        hold = self._by_name.get(name)
        if hold is None:
            return False
        if hold.state is HoldState.HELD:
            hold.move_to(HoldState.PULLED)
        hold.pullers.add(puller)
        self._by_puller[puller] = hold
        return True

    def ended(self, puller: SequenceKey) -> None:
        """A sequence has ended here; those that pulled nothing are passed over."""
        hold = self._by_puller.pop(puller, None)
        if hold is not None:
            hold.pullers.discard(puller)
            if not hold.pullers:
                self._free(hold)
        self._on_ended(puller)

    def free(self, name: str) -> None:
        """Nobody will come for it; unknown ones are passed over."""
        hold = self._by_name.get(name)
        if hold is not None:
            self._free(hold)

    def make_room(self, spare: str | None = None) -> bool:
        """Free the oldest but `spare`; False if there is none."""
        for hold in self._by_name.values():
            if hold.name != spare:
                logger.warning("the K/V held for %s are given up: others need the room", hold.name)
                self._free(hold)
                return True
        return False

    def tick(self, now_s: float) -> None:
        """Free what nobody has come for in time."""
        while (hold := self._first_held) is not None and hold.expires_s <= now_s:
            logger.warning(
                "nobody came for the K/V held for %s within kv_hold_s=%g", hold.name, self._hold_s
            )
            self.num_expired += 1
            self._free(hold)

    @property
    def next_due_s(self) -> float | None:
        """When `tick` has something to do; None if nothing is held."""
        hold = self._first_held
        return None if hold is None else hold.expires_s

    @property
    def _first_held(self) -> _Hold | None:
        held = (hold for hold in self._by_name.values() if hold.state is HoldState.HELD)
        return next(held, None)

    def _free(self, hold: _Hold) -> None:
        hold.move_to(HoldState.FREED)
        del self._by_name[hold.name]
        for puller in hold.pullers:
            del self._by_puller[puller]
        self._kv.let_go(hold.name)
