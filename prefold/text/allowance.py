"""What writing one conversation may take: processor time, and letters and items that its template makes.

Each operation of a template says what it will take before it is done, and is not done where that is more than what is
left. So memory is bounded for all operations together, however many there are: a template may keep whatever it makes.
The clock counts the processor time of the thread that renders, so that a template does not fail because the machine
is busy with something else; it is looked at once a few thousand letters.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any

__all__ = ["ITEM", "OBJECT", "TemplateLimit", "allowed", "size_of", "spend", "take"]

# Letters that a template may make in all. It makes a text of each part of a conversation a few times, and no
# conversation that fits a model has a tenth of them.
LARGEST = 1 << 28
# What an item of a list, and an object such as a list or a generator, count as.
ITEM, OBJECT = 8, 64
# Letters between two looks at the clock, where each operation counts as OBJECT more.
PAUSE = 4096
# Letters that compiled code makes or looks at in a second, on a slow machine. It cannot be stopped: what would not end
# in time is not begun.
PACE = 1 << 28
# How deep lists and objects may be nested where they are compared or written. Those of messages are less deep; and C
# code that hashes a tuple goes as deep as it is, whatever the stack holds.
DEEPEST = 400
VIEWS = (type({}.keys()), type({}.values()), type({}.items()))


class TemplateLimit(Exception):
    """A template ran too long, or made something too large. The message says which, and the limit."""


class Allowance:
    """An Allowance is what the templates on a thread may still take.

    seconds  of processor time, from now
    letters  that they may make
    """

    __slots__ = ("_left", "_letters", "_pause", "_seconds", "_until")

    def __init__(self, seconds: float, letters: float):
        self._seconds, self._letters = seconds, letters
        self._until = time.thread_time() + seconds
        self._left = letters
        self._pause: float = 0  # never more than what is left: one comparison shows that either is used up

    def spend(self, letters: float) -> None:
        self._left -= letters
        self._pause -= letters + OBJECT
        if self._pause < 0:
            self.look(letters)

    def take(self, letters: float) -> None:
        self._pause -= letters + OBJECT
        if self._pause < 0:
            self.look(letters)

    def look(self, letters: float = 0) -> None:
        """Raises TemplateLimit where the letters or the time are used up, or would be by looking at so many letters."""
        if self._left < 0:
            raise TemplateLimit(f"it makes texts and lists of more than {self._letters:,} letters and items")
        now = time.thread_time()
        if now > self._until:
            raise TemplateLimit(f"it ran for more than {self._seconds:g} s")
        if now + letters / PACE > self._until:
            raise TemplateLimit(f"it would run for more than {self._seconds:g} s")
        self._pause = min(PAUSE, self._left)


class _Thread(threading.local):
    """Holds what the templates on a thread may take; outside of `allowed` that is without limits."""

    allowance = Allowance(math.inf, math.inf)


_thread = _Thread()


@contextmanager
def allowed(seconds: float) -> Iterator[None]:
    """Makes templates that run inside, on this thread, raise TemplateLimit after so many seconds of processor time, or
    LARGEST letters."""
    before = _thread.allowance
    _thread.allowance = Allowance(seconds, LARGEST)
    try:
        yield
    finally:
        _thread.allowance = before


def spend(letters: float) -> None:
    """Takes so many letters, which are about to be made. Raises TemplateLimit where they or the time are used up."""
    _thread.allowance.spend(letters)


def take(letters: float) -> None:
    """Takes the time of looking at so many letters. Raises TemplateLimit where it is used up, or would be."""
    _thread.allowance.take(letters)


def size_of(value: Any, between: int = 0, indent: int = 0) -> int:
    """Returns at least how many letters `str` makes of a value, or JSON; so it also bounds what a comparison, or a
    hash, looks at. A list in two places counts twice.

    between  letters between two items
    indent   letters of white space for each level of nesting, in front of each item

    Raises TemplateLimit for what is so large that there is no time for it, or nested too deep.
    """
    if isinstance(value, str):
        return len(value)
    inner = _items(value)
    if inner is None:
        return _number(value)
    size, looked, levels = OBJECT // 2, 0, [inner]
    while levels:
        each = OBJECT // 2 + between + indent * len(levels)
        for item in levels[-1]:
            inner = None
            if isinstance(item, str):
                size += each + _escaped(item)
            else:
                size += each + _number(item)
                inner = _items(item)
            if size - looked > PAUSE:
                _thread.allowance.take(size)
                looked = size
            if inner is not None:
                levels.append(inner)
                break
        else:
            levels.pop()
        if len(levels) > DEEPEST:
            raise TemplateLimit(f"it nests lists more than {DEEPEST} deep")
    return size


def _items(value: Any) -> Iterator[Any] | None:
    """Returns what a list or an object holds, None for other values."""
    if isinstance(value, (list, tuple, *VIEWS)):
        return iter(value)
    return chain(value, value.values()) if isinstance(value, dict) else None


def _escaped(text: str) -> int:
    """Returns at least how many letters a text within a list has: each of them may be escaped. A long text may be in
    many places, so its letters are not looked at."""
    if text.isascii():
        return len(text) * (2 if len(text) <= PAUSE and text.isprintable() else 6)
    return len(text) * 12


def _number(value: Any) -> int:
    """Returns at least how many letters a number has, and whatever is no text, list or object."""
    return OBJECT // 2 + (value.bit_length() // 3 if isinstance(value, int) else 0)
