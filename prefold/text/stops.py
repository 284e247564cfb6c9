"""Finds stop texts in a text that comes in parts, wherever the borders between the parts lie."""

from __future__ import annotations

from collections.abc import Sequence


class StopFinder:
    """Looks for stop texts in a text that comes in parts, and passes on what can no longer be part of one.

    Of several stops the one that ends first is found, and of those that end at the same place the longest. That does
    not depend on how the text is parted.

    found   the stop text that was found, None while there is none
    cut     where it begins: letters of the whole text before it
    """

    def __init__(self, stops: Sequence[str]):
        self.stops = tuple(stops)
        self.found: str | None = None
        self.cut: int | None = None
        self._held = ""  # the end of the text, which may be the beginning of a stop
        self._passed = 0  # letters of the text before `_held`
        self._free = 0  # a stop that ends within the first so many letters does not count

    def add(self, text: str, coming: str = "", *, search: bool = True) -> str:
        """Takes more text, and returns what is certain to stand before any stop: up to the stop when one is found.

        coming   text that is likely to follow. It is searched too, and returned where it stands before a stop
        search   False: a stop that is complete within this text does not count
        """
        if not self.stops:
            return text
        self._held += text
        if not search:
            self._free = self._passed + len(self._held) + len(coming)
        elif self._find(self._held + coming):
            self._held += coming
            return self._pass(self.cut - self._passed)
        return self._pass(len(self._held) - self._beginning(self._held))

    def finish(self) -> str:
        """Ends the text, and returns what was held back."""
        return self._pass(len(self._held))

    def _pass(self, count: int) -> str:
        text, self._held = self._held[:count], self._held[count:]
        self._passed += count
        return text

    def _find(self, text: str) -> bool:
        best: tuple[int, int] | None = None
        for stop in self.stops:
            start = text.find(stop, max(0, self._free - self._passed - len(stop) + 1))
            if start >= 0 and (best is None or (start + len(stop), start) < best):
                best, self.found = (start + len(stop), start), stop
        if best is None:
            return False
        self.cut = self._passed + best[1]
        return True

    def _beginning(self, text: str) -> int:
        """Returns the length of the longest end of `text` that is the beginning of a stop."""
        best = 0
        for stop in self.stops:
            start = max(0, len(text) - len(stop) + 1)
            while (start := text.find(stop[0], start)) >= 0 and len(text) - start > best:
                if stop.startswith(text[start:]):
                    best = len(text) - start
                start += 1
        return best
