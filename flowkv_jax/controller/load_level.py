"""A role's load as low, middle or high, with hysteresis.

               <= low              >= high
    LOW  ---- above middle ----> MIDDLE ---- at least high ----> HIGH
    LOW  <--- at most low ------ MIDDLE <--- below middle ------ HIGH      middle = (low + high) / 2

Each condition must hold without a break for `hold_s` before the level changes; from LOW to HIGH and
back it may change at once. So noise around one threshold changes nothing: to change a level back,
load has to cross another one and stay there.
"""

from __future__ import annotations

import enum


class Level(enum.Enum):
    LOW = "low"
    MIDDLE = "middle"
    HIGH = "high"


class LoadLevel:
    """The level of one load.

    Attributes:
        level: LOW at first.
        since_s: when it became that; None before the first update.
    """

    def __init__(self, low: float, high: float, hold_s: float) -> None:
        self._low, self._high, self._hold_s = low, high, hold_s
        self._held_since: dict[str, float] = {}
        self.level = Level.LOW
        self.since_s: float | None = None

    @property
    def middle(self) -> float:
        """The load at which HIGH and LOW end."""
        return (self._low + self._high) / 2

    def update(self, load: float, now_s: float) -> Level:
        """Take in the load of now."""
        if self.since_s is None:
            self.since_s = now_s
        holds = {
            "low": load <= self._low,
            "below": load < self.middle,
            "above": load > self.middle,
            "high": load >= self._high,
        }
        for name, is_true in holds.items():
            if is_true:
                self._held_since.setdefault(name, now_s)
            else:
                self._held_since.pop(name, None)
        level = self.level
        if self._has_held("high", now_s):
            level = Level.HIGH
        elif self._has_held("low", now_s):
            level = Level.LOW
        elif (level is Level.HIGH and self._has_held("below", now_s)) or (
            level is Level.LOW and self._has_held("above", now_s)
        ):
            level = Level.MIDDLE
        if level is not self.level:
            self.level, self.since_s = level, now_s
        return level

    def held_s(self, level: Level, now_s: float) -> float:
        """For how long it has been at `level`; 0 if it is not."""
        if self.level is not level or self.since_s is None:
            return 0.0
        return now_s - self.since_s

    def _has_held(self, name: str, now_s: float) -> bool:
        since_s = self._held_since.get(name)
        return since_s is not None and now_s - since_s >= self._hold_s
