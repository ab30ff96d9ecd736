"""Finding stop strings in text that arrives in pieces, without showing any part of one too early.

    released | held | new piece
             ^--- searched ---^

At most `max(len(stop)) - 1` characters are held: the longest beginning of a stop string that could
be at the end. The match that is complete first wins, and of those the longest; so the result does
not depend on where the pieces are cut.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopStringFinder:
    """Filter between the detokenizer and the caller.

    Args:
        stop_strings: none of them empty.
        include_in_output: release the stop string too, instead of cutting before it.
    """

    def __init__(self, stop_strings: Sequence[str], *, include_in_output: bool = False) -> None:
        self._stop_strings = tuple(stop_strings)
        self._include_in_output = include_in_output
        self._max_held = max((len(stop) for stop in stop_strings), default=1) - 1
        self._held = ""

    def feed(self, piece: str, *, search: bool = True) -> tuple[str, str | None]:
        """Take in a piece; returns the text that can be released and the stop string, if found.

        After a match everything behind it is dropped. A match needs at least one character of
        `piece`, so text fed with `search=False` (before min_tokens) cannot match later by itself.
        """
        if not self._stop_strings:
            return piece, None
        text = self._held + piece
        if search and piece:
            found = self._first_match(text)
            if found is not None:
                start, stop = found
                self._held = ""
                return text[: start + len(stop) if self._include_in_output else start], stop
        released = max(len(text) - self._max_held, 0)
        self._held = text[released:]
        return text[:released], None

    def flush(self) -> str:
        """Release what is held: no more text comes."""
        held, self._held = self._held, ""
        return held

    def _first_match(self, text: str) -> tuple[int, str] | None:
        best: tuple[int, int, str] | None = None
        for stop in self._stop_strings:
            start = text.find(stop, max(len(self._held) - len(stop) + 1, 0))
            if start >= 0 and (best is None or (start + len(stop), start) < best[:2]):
                best = (start + len(stop), start, stop)
        return None if best is None else (best[1], best[2])
