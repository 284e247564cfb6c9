"""Handles of submitted requests, which receive their pieces of text and answers; and groups of requests for numbers."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from itertools import pairwise
from typing import Any

import numpy as np

from ..spec.requests import Owner, Readout, Request, Result
from ..trie import common_prefix_lengths, lexsort_sequences
from .requests import joint_readout
from .schedule.generate_step import NO_OWNER


class Handle:
    """A Handle stands for requests that were submitted together: it receives their events, and can cancel them.

    tokens    how many tokens their prompts have
    owner     the tenant and the class that they run for
    samples   how many texts are generated for a prompt
    begun_at  time.perf_counter() at the start of the first step that served them; None while they wait
    first_at  time.perf_counter() after the step that gave the first token, or the answer if it has no tokens
    keys      the generator's keys of the requests
    post      calls a function elsewhere, such as in an event loop, and `put` is called by it; None: the engine's
              thread calls `put`
    waits     whether the thread that submits the requests waits for the answer, which the engine's own thread cannot
    """

    post: Callable[..., object] | None = None
    waits = False

    def __init__(self, tokens: int = 0, owner: Owner = NO_OWNER, samples: int = 1):
        self.tokens, self.owner, self.samples = tokens, owner, samples
        self.begun_at: float | None = None
        self.first_at: float | None = None
        self.keys: list[int] = []
        self.is_cancelled = False

    def put(self, events: Sequence[Any], at: float = 0.0) -> None:
        """Takes the events of one step: pieces of text, and after the last of them the answer. Neither waits nor
        raises.

        at  time.perf_counter() after the step
        """
        raise NotImplementedError


def send(events_by_handle: Mapping[Handle, Sequence[Any]]) -> None:
    """Hands every handle its events; the handles of one `post` get them in a single call of it."""
    by_post: dict[Callable[..., object], list[tuple[Handle, Sequence[Any]]]] = {}
    now = time.perf_counter()
    for handle, events in events_by_handle.items():
        if handle.post is not None:
            by_post.setdefault(handle.post, []).append((handle, events))
        else:
            handle.put(events, now)
    for post, mail in by_post.items():
        with suppress(RuntimeError):  # the event loop is closed, so nothing reads the events any more
            post(_hand_out, mail, now)


def _hand_out(mail: Sequence[tuple[Handle, Sequence[Any]]], at: float) -> None:
    for handle, events in mail:
        handle.put(events, at)


# So many steps' worth of a group's requests are open at once: requests that come later wait for no more than these.
STEPS_OPEN = 2


class ReadGroup:
    """A ReadGroup is a list of requests for numbers that were submitted together, and enter the generator bit by bit.
    After it is made, only the engine's thread uses it.

    handle    receives the results
    requests  the requests
    readout   what is read of each
    results   the result of each request; None while it is open
    again     for each request, whether it is a further read of the prompt before it
    shares    whether requests share rows
    """

    def __init__(self, handle: Handle, requests: Sequence[Request], readout: Readout, *, rows: int, shares: bool):
        """Sorts the requests so that neighbours share the most rows; with many tokens that takes long. rows: the most
        rows of a step"""
        self.handle, self.requests, self.shares = handle, requests, shares
        self.readout = joint_readout(
            readout, (0 if request.targets is None else len(request.targets) for request in requests)
        )
        self.again = [False, *(_are_twins(*pair) for pair in pairwise(requests))]
        self.results: list[Result | None] = [None] * len(requests)
        self._room = STEPS_OPEN * rows
        sizes = np.array([len(request.tokens) for request in requests], np.int64)
        order, new = np.arange(len(sizes)), sizes
        if shares and sizes.sum() > self._room:
            tokens = np.concatenate([request.tokens for request in requests])
            offsets = np.concatenate(([0], np.cumsum(sizes)))
            order = lexsort_sequences(tokens, offsets)
            new = sizes[order] - common_prefix_lengths(tokens, offsets, order)
        self._waiting = list(zip(order.tolist(), new.tolist(), strict=True))[::-1]
        self._open: dict[int, int] = {}  # rows by request

    def next(self) -> int | None:
        """Returns the number of the request that is entered next; None while there is no room for it."""
        if not self._waiting or (self._open and self._room <= 0):
            return None
        number, rows = self._waiting.pop()
        self._open[number] = rows
        self._room -= rows
        return number

    def book(self, number: int, result: Result) -> bool:
        """Takes the result of a request; returns whether it was the last."""
        self.results[number] = result
        self._room += self._open.pop(number)
        return not (self._open or self._waiting)


def _are_twins(before: Request, request: Request) -> bool:
    """Returns whether a request is a further read of the prompt before it (see `Window.twins`)."""
    return before.namespace == request.namespace and np.array_equal(before.tokens, request.tokens)
