"""Reads a batch's numbers so that a line for which steps fail is answered with an error, and no other line."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import numpy as np

from ..errors import InputError, OutOfMemoryError, RankError
from ..stream import Window
from ..types import Result

__all__ = ["narrowed"]

# After so many runs that failed without a result between them, no line is at fault. To find one takes as many as its
# window can be halved.
MOST_IN_VAIN = 40
Answers = Iterator[tuple[bytes, Result | InputError]]


def narrowed(
    read: Callable[[Iterable[Window]], Answers], windows: Iterable[Window], stopping: Callable[[], bool]
) -> Answers:
    """Yields (tag, result) of every request of the windows. Where a step fails, what was being read is read again in
    halves, until the request is found that steps fail for: it is (tag, InputError).

    read  reads consecutive windows of a stream, and raises what a step raises

    Raises what no request is at fault for, and what the windows raise.
    """
    whole, halves, in_vain = _Handed(windows), list[Window](), 0
    while not stopping():
        handed = _Handed([halves.pop()]) if halves else whole
        try:
            for tag, result in read(handed):
                in_vain = 0
                handed.open.pop(tag, None)
                yield tag, result
            if handed is whole:
                return
        except (RankError, OutOfMemoryError):
            raise
        except Exception as error:
            in_vain += 1
            if handed.has_failed or in_vain > MOST_IN_VAIN:
                raise
            for window in reversed(handed.left()):
                if window.num_requests > 1:
                    middle = window.num_requests // 2
                    halves += [window.take(np.arange(middle, window.num_requests)), window.take(np.arange(middle))]
                elif handed is whole:
                    halves.append(window)  # it may be another's fault
                else:
                    remedy = "send it again"
                    message = f"the step failed: {error}"
                    yield window.tags[0], InputError(message, remedy=remedy, code="internal_error")


class _Handed:
    """Windows that are being read.

    open        {tag: (its window, its place there)} of the requests that have no result yet
    has_failed  whether no window came for an error
    """

    def __init__(self, windows: Iterable[Window]):
        self._windows = iter(windows)
        self.open: dict[bytes, tuple[Window, int]] = {}
        self.has_failed = False

    def __iter__(self) -> Iterator[Window]:
        while True:
            try:
                window = next(self._windows, None)
            except Exception:
                self.has_failed = True
                raise
            if window is None:
                return
            self.open.update((tag, (window, place)) for place, tag in enumerate(window.tags))
            yield window

    def left(self) -> list[Window]:
        """Returns the requests without a result, as windows, and forgets them."""
        places: dict[int, tuple[Window, list[int]]] = {}
        for window, place in self.open.values():
            places.setdefault(id(window), (window, []))[1].append(place)
        self.open.clear()
        return [window.take(np.array(numbers)) for window, numbers in places.values()]
