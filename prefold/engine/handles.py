"""Handles of submitted requests, which receive pieces of text and answers; and groups of requests for values."""

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
    """Receives the events of requests that were submitted together, and identifies them to cancel them.

    Attributes:
        tokens: How many tokens their prompts have.
        owner: The tenant and the class (interactive or batch) of the requests.
        samples: How many texts are generated for a prompt.
        begun_at: time.perf_counter() at the start of the first step that served them; None while they wait.
        first_at: time.perf_counter() after the step with the first token, or with the answer of a read-out.
        keys: The generator's keys of the requests.
        post: Calls a function elsewhere, for example in an event loop. If set, `put` is called through `post`, else the
            engine's thread calls `put`.
        waits: The thread that submits the requests waits for the answer. The engine's own thread must not do that.
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
        """Receive the events of one step: pieces of text, and last the answer. Must not wait or raise.

        `at` is time.perf_counter() after the step.
        """
        raise NotImplementedError


def send(events_by_handle: Mapping[Handle, Sequence[Any]]) -> None:
    """Give every handle its events. Handles with the same `post` share one call of it."""
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


# Limit on the open rows of a group, in steps: requests that arrive later wait for no more rows than these.
STEPS_OPEN = 2


class ReadGroup:
    """Requests for values that were submitted together and enter the generator a few at a time.

    Only the engine's thread uses a group after its creation.

    Attributes:
        handle: Receives the results.
        requests: The requests.
        readout: The read-out of all requests.
        results: The result of each request; None while it is open.
        again: True for each request that is a twin of the request before it.
        shares: Requests share rows.
    """

    def __init__(self, handle: Handle, requests: Sequence[Request], readout: Readout, *, rows: int, shares: bool):
        """Sort the requests so that neighbours share the most rows, which is slow for many tokens.

        `rows` is the limit on the rows of a step.
        """
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
        self._open: dict[int, int] = {}  # request number -> its rows

    def next(self) -> int | None:
        """Return the number of the next request to enter; None if there is none or no free capacity."""
        if not self._waiting or (self._open and self._room <= 0):
            return None
        number, rows = self._waiting.pop()
        self._open[number] = rows
        self._room -= rows
        return number

    def book(self, number: int, result: Result) -> bool:
        """Store the result of a request; return True if it was the last."""
        self.results[number] = result
        self._room += self._open.pop(number)
        return not (self._open or self._waiting)


def _are_twins(before: Request, request: Request) -> bool:
    """Return True if a request is another read of the prompt before it (see `Window.twins`)."""
    return before.namespace == request.namespace and np.array_equal(before.tokens, request.tokens)
