"""Regular expressions of strangers, matched in time that grows with their length, never exponentially.

Adapters name modules by regular expressions (`rank_pattern` of PEFT). Python's own matcher may run for years on an
expression that was written to make it. This one follows all ways through an expression at once.
"""

from __future__ import annotations

import re
from collections.abc import Callable

MOST_CHARACTERS, MOST_GROUPS = 512, 32
# One character, an escaped one, or a set of them: each is matched against one character of a text by `re`.
_ATOM = re.compile(r"\\[^0-9bBAZ]|\[\^?\]?(?:\\.|[^\]\\])*\]|[^\\\[\]*+?{}()|^$]")

# The ends of a match in a text, of the places where it may start.
Match = Callable[[str, frozenset[int]], frozenset[int]]


class Pattern:
    """A Pattern matches names as PEFT does: the whole name, or its end from a dot on.

    Characters, escapes, sets, groups, `|`, `*`, `+`, `?`, `^` and `$` are known. A group that is repeated holds no
    repetition itself. Raises ValueError, in words, for any other expression.
    """

    def __init__(self, pattern: str):
        if len(pattern) > MOST_CHARACTERS:
            raise ValueError(f"it has {len(pattern):,} characters, more than {MOST_CHARACTERS}")
        self._text, self._at, self._groups = pattern, 0, 0
        self._match, _ = self._alternatives()
        if self._at < len(self._text):
            raise self._unknown()

    def matches(self, name: str) -> bool:
        """Return whether the pattern is the whole name, or its end from a dot on."""
        after_dots = (i + 1 for i, letter in enumerate(name) if letter == ".")
        return len(name) in self._match(name, frozenset((0, *after_dots)))

    def _alternatives(self) -> tuple[Match, bool]:
        """Return what matches the text up to a closing bracket, and whether it repeats anything."""
        ways = [self._sequence()]
        while self._next("|"):
            ways.append(self._sequence())
        matches = [match for match, _ in ways]
        return lambda name, at: frozenset().union(*(match(name, at) for match in matches)), any(r for _, r in ways)

    def _sequence(self) -> tuple[Match, bool]:
        matches, repeats = [], False
        while self._at < len(self._text) and self._text[self._at] not in "|)":
            match, repeated = self._repeated()
            matches.append(match)
            repeats |= repeated

        def follow(name: str, at: frozenset[int]) -> frozenset[int]:
            for match in matches:
                at = match(name, at)
            return at

        return follow, repeats

    def _repeated(self) -> tuple[Match, bool]:
        match, repeats = self._one()
        if self._next("?"):
            return lambda name, at: at | match(name, at), repeats
        sign = self._next("*") or self._next("+")
        if not sign:
            return match, repeats
        if repeats:
            raise ValueError("a group that is repeated holds a repetition")

        def repeat(name: str, at: frozenset[int]) -> frozenset[int]:
            ends = new = at if sign == "*" else match(name, at)
            while new:
                new = match(name, new) - ends
                ends |= new
            return ends

        return repeat, True

    def _one(self) -> tuple[Match, bool]:
        if self._next("^"):
            return lambda name, at: at & {0}, False
        if self._next("$"):
            return lambda name, at: at & {len(name)}, False
        if self._next("("):
            self._next("?:")
            self._groups += 1
            if self._groups > MOST_GROUPS:
                raise ValueError(f"it has more than {MOST_GROUPS} groups")
            group = self._alternatives()
            if not self._next(")"):
                raise ValueError("a bracket is not closed")
            return group
        found = _ATOM.match(self._text, self._at)
        if found is None:
            raise self._unknown()
        self._at = found.end()
        try:
            fits = re.compile(found[0]).fullmatch
        except re.error as error:
            raise ValueError(str(error)) from None
        return lambda name, at: frozenset(i + 1 for i in at if i < len(name) and fits(name[i])), False

    def _next(self, sign: str) -> str:
        """Return the sign if it comes next, and go on behind it; otherwise nothing."""
        if not self._text.startswith(sign, self._at):
            return ""
        self._at += len(sign)
        return sign

    def _unknown(self) -> ValueError:
        return ValueError(f"{self._text[self._at : self._at + 8]!r} is not known here")
