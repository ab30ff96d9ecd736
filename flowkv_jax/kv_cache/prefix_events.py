"""What has changed in a prefix cache, for whoever keeps a directory of several.

Told are differences: a block that came and went between two asks is not mentioned. If more pile up
than a list of everything would be long, the log gives up and starts over:

    take() -> added, removed       take() -> added, removed       ...
       overflow
    take() -> is_complete=False    take() -> added: all that is cached, removed: none

so whoever listens does one thing for each answer: if it is not complete, forget all of this cache;
then take out `removed` and put in `added`.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from typing import NamedTuple


class PrefixEvents(NamedTuple):
    """Block hashes that came and went since last asked; no hash is in both.

    `is_complete` is false if events were lost: the next answer begins with everything cached.
    A block is never listed before its parent in `added`.
    """

    added: tuple[bytes, ...] = ()
    removed: tuple[bytes, ...] = ()
    is_complete: bool = True


class _State(enum.Enum):
    RECORDING = enum.auto()
    OVERFLOWED = enum.auto()
    RESTARTING = enum.auto()


class PrefixEventLog:
    """Gathers the changes of one cache.

    Args:
        max_events: more than these are not kept.
    """

    def __init__(self, max_events: int) -> None:
        self._max_events = max_events
        self._state = _State.RECORDING
        # Dictionaries for their order.
        self._added: dict[bytes, None] = {}
        self._removed: dict[bytes, None] = {}

    def add(self, block_hash: bytes) -> None:
        self._record(block_hash, self._added, self._removed)

    def remove(self, block_hash: bytes) -> None:
        self._record(block_hash, self._removed, self._added)

    def restart(self) -> None:
        """Start over, for a listener who knows nothing: as after an overflow."""
        self._state = _State.OVERFLOWED
        self._added.clear()
        self._removed.clear()

    def _record(
        self, block_hash: bytes, events: dict[bytes, None], opposite: dict[bytes, None]
    ) -> None:
        if self._state is not _State.RECORDING:
            return
        if block_hash in opposite:
            del opposite[block_hash]
            return
        events[block_hash] = None
        if len(self._added) + len(self._removed) > self._max_events:
            self.restart()

    def take(self, cached: Iterable[bytes]) -> PrefixEvents:
        """What was recorded since the last `take`.

        Args:
            cached: everything in the cache now, parents first; only read after an overflow.
        """
        if self._state is _State.OVERFLOWED:
            self._state = _State.RESTARTING
            return PrefixEvents(is_complete=False)
        if self._state is _State.RESTARTING:
            self._state = _State.RECORDING
            return PrefixEvents(added=tuple(cached))
        events = PrefixEvents(tuple(self._added), tuple(self._removed))
        self._added.clear()
        self._removed.clear()
        return events
