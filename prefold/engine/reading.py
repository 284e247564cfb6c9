"""Numbers that are read for one reply: its requests come into the slots some at a time, so that others come between."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from ..prefix import common_prefix_lengths, lexsort_sequences
from ..types import Readout, Request, Result
from .replies import Reply
from .requests import together

# As many requests of a reading are open as fill so many steps: what comes later waits for no more than these.
STEPS_OPEN = 2


class Reading:
    """A Reading is what is read for one reply. All but its making is done by the engine's thread.

    reply     that the results are for
    requests  of which numbers are read
    readout   what is read of each
    results   of the requests, as far as they are there
    again     of each request, whether it is a further read of the prompt before it
    """

    def __init__(self, reply: Reply, requests: Sequence[Request], readout: Readout, *, rows: int, shares: bool):
        """May take long, where there are many tokens: they are sorted, so that neighbours share the most.

        rows    the most rows of a step
        shares  whether requests share rows
        """
        self.reply, self.requests = reply, requests
        self.readout = together(readout, (0 if one.targets is None else len(one.targets) for one in requests))
        self.again = [False, *(_are_twins(*pair) for pair in pairwise(requests))]
        self.results: list[Result | None] = [None] * len(requests)
        self._room = STEPS_OPEN * rows
        sizes = np.array([len(request.tokens) for request in requests], np.int64)
        order, new = np.arange(len(sizes)), sizes
        if shares and sizes.sum() > self._room:
            tokens, offsets = np.concatenate([one.tokens for one in requests]), np.concatenate(([0], np.cumsum(sizes)))
            order = lexsort_sequences(tokens, offsets)
            new = sizes[order] - common_prefix_lengths(tokens, offsets, order)
        self._waiting = list(zip(order.tolist(), new.tolist(), strict=True))[::-1]
        self._open: dict[int, int] = {}  # rows by request

    def next(self) -> int | None:
        """Returns the number of the request that is added next; None while there is no room for it."""
        if not self._waiting or (self._open and self._room <= 0):
            return None
        number, rows = self._waiting.pop()
        self._open[number] = rows
        self._room -= rows
        return number

    def book(self, number: int, result: Result) -> bool:
        """Takes the result of one of the requests; returns whether it was the last."""
        self.results[number] = result
        self._room += self._open.pop(number)
        return not (self._open or self._waiting)


def _are_twins(before: Request, request: Request) -> bool:
    """Returns whether a request is a further read of the prompt before it (see `Window.twins`)."""
    same = before.adapter == request.adapter and before.salt == request.salt
    return same and np.array_equal(before.tokens, request.tokens)
