"""Windows of which only last rows are read, as what is served in the slots of a KV store."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

import numpy as np

from ..stream import Window
from ..types import Readout, Request
from .requests import can_probe, no_readout

Probes = Iterator[list[tuple[tuple[Window, int], Request]] | None]


class ProbeWindows:
    """Parts windows into those of which last rows are read, of prompts of at most `slots` tokens, and all others.

    has_ended  whether there are no more of either
    """

    def __init__(self, windows: Iterable[Window | None], readout: Readout, slots: int):
        self.has_ended = False
        self._windows, self._readout, self._slots = iter(windows), readout, slots
        self._next: Window | None = None  # was taken, and is of the other kind
        self._was_parted = False  # whether some of the window that was taken last went to the slots
        self._put_off: dict[Window, list[int]] = {}  # with the places of the requests that the slots had no room for

    def probes(self) -> Probes:
        """Yields the requests of each window, tagged (window, place in it), and None for None, until others come."""
        while not (self.has_ended or self._put_off):
            window = self._take()
            if window is None:
                if not self.has_ended:
                    yield None
                continue
            fits = self._fits(window)
            if fits.all():
                yield _tagged(window)
                continue
            self._was_parted = bool(fits.any())
            self._next = window.take(np.flatnonzero(~fits)) if self._was_parted else window
            if self._was_parted:
                yield _tagged(window.take(np.flatnonzero(fits)))
            return

    def put_off(self, window: Window, number: int) -> None:
        """Takes back a request of a window for which the slots have no room after all: it is one of the others."""
        self._put_off.setdefault(window, []).append(number)

    def others(self) -> Iterator[Window]:
        """Yields the others, one after the other, until there is none."""
        while (window := self._take()) is not None:
            if self._fits(window).any():
                self._next = window
                break
            yield window
        put_off, self._put_off = self._put_off, {}
        for window, numbers in put_off.items():
            yield window.take(np.array(sorted(numbers)))

    def _take(self) -> Window | None:
        window, self._next = self._next, None
        if window is None:
            try:
                window = next(self._windows)
            except StopIteration:
                self.has_ended = True
            if window is not None and self._was_parted:
                # What it has in common with the one before may be the path of a prompt that went to the slots.
                window = replace(window, common=0)
            self._was_parted = False
        return window

    def _fits(self, window: Window) -> np.ndarray:
        """Returns which requests of a window are read at last rows and have room in the slots, bool [B]."""
        is_probe = can_probe(self._readout, np.diff(window.target_offsets))
        return (np.diff(window.offsets) <= self._slots) & is_probe


def _tagged(window: Window) -> list[tuple[tuple[Window, int], Request]]:
    return [((window, number), window.request(number)) for number in range(window.num_requests)]


def last_rows(windows: Iterable[Window | None], readout: Readout) -> Probes:
    """Yields what ProbeWindows yields, of windows of which all are read at last rows.

    Raises InputError for a read-out of other rows: where rows leave, there are none of these.
    """
    for window in windows:
        if window is None:
            yield None
            continue
        if not can_probe(readout, np.diff(window.target_offsets)):
            raise no_readout(readout)
        yield _tagged(window)
