"""Cuts a job's requests into windows, consecutive pieces that are run one after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from ..spec.requests import NO_NAMESPACE, Medium, Namespace, Request
from .order import Order, SpooledRequest, decode_options, join
from .radix import shared_by
from .ragged import common_prefix_lengths, ragged_ranges
from .trie import MEDIA_BASE

_LATEST_SHARE = 4  # a window may end anywhere in its last 1/4


@dataclass(frozen=True, eq=False)
class Window:
    """A Window is a part of a job's requests that is run together: B requests of N tokens in all.

    tokens          int32 [N]      the token ids of all requests, ragged
    offsets         int64 [B + 1]
    targets         int32 [T]      the targets of scores, ragged; a request without targets has none here
    target_offsets  int64 [B + 1]
    tags            [B]            the bytes that were added with each request
    is_sorted                      whether the requests of all windows lie in lexicographic order
    common                         how many leading tokens the first request shares with the last request of the
                                   window before; 0 in the first window, and in all windows when not sorted
    options         [B]            the options of each request (see `encode_options`)
    namespace                      of all requests
    numbers         int64 [B]      each request's place in the order of arrival
    media                          the images of the requests, unless the spool holds them
    """

    tokens: np.ndarray
    offsets: np.ndarray
    targets: np.ndarray
    target_offsets: np.ndarray
    tags: list[bytes]
    is_sorted: bool
    common: int
    options: list[bytes] = field(default_factory=list)
    namespace: Namespace = NO_NAMESPACE
    numbers: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    media: tuple[Medium, ...] = ()

    def request(self, number: int) -> Request:
        """Returns the request at place `number` of the window; its tokens and targets are views."""
        tokens = self.tokens[self.offsets[number] : self.offsets[number + 1]]
        targets = self.targets[self.target_offsets[number] : self.target_offsets[number + 1]]
        sampling, priority = decode_options(self.options[number] if self.options else b"")
        rows = set(tokens[tokens >= MEDIA_BASE].tolist()) if self.media else ()
        media = tuple(medium for medium in self.media if int(medium.ids[0]) in rows)
        return Request(tokens, targets if len(targets) else None, sampling, self.namespace, priority, media)

    def take(self, numbers: np.ndarray) -> Window:
        """Returns a window of the requests at these places, given in ascending order."""
        tokens, offsets = _selected(self.tokens, self.offsets, numbers)
        targets, target_offsets = _selected(self.targets, self.target_offsets, numbers)
        options = [self.options[i] for i in numbers] if self.options else []
        tags = [self.tags[i] for i in numbers]
        places = self.numbers[numbers] if len(self.numbers) else self.numbers
        further = (options, self.namespace, places, self.media)
        return Window(tokens, offsets, targets, target_offsets, tags, self.is_sorted, 0, *further)

    def without_twins(self) -> Window:
        """Returns the window without its `twins`; the window itself where it has none."""
        twins = self.twins
        return replace(self.take(np.flatnonzero(~twins)), common=self.common) if twins.any() else self

    @property
    def num_requests(self) -> int:
        return len(self.tags)

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @cached_property
    def shared(self) -> np.ndarray:
        """Returns how many leading tokens each request shares with the request before it, int64 [B]; 0 for the
        first."""
        return common_prefix_lengths(self.tokens, self.offsets, np.arange(len(self.offsets) - 1))

    @cached_property
    def twins(self) -> np.ndarray:
        """Returns which requests are twins, bool [B]: further reads of one prompt, as for labels of one token. A twin
        has the tokens of the request that arrived just before it. A prompt that is continued is never a twin: it has an
        answer of its own."""
        if not len(self.numbers) or any(decode_options(options)[0] is not None for options in set(self.options)):
            return np.zeros(self.num_requests, bool)
        lengths = np.diff(self.offsets)
        same = (self.shared[1:] == lengths[1:]) & (lengths[1:] == lengths[:-1])
        return np.concatenate(([False], same & (np.diff(self.numbers) == 1)))

    @cached_property
    def unique_tokens(self) -> int:
        """Returns the rows that this window adds to the job's stream; all of its tokens when the job is not sorted."""
        return self.num_tokens - int(self.shared.sum()) - self.common if self.is_sorted else self.num_tokens


class Windows(Iterator[Window]):
    """A Windows yields the windows of a spool.

    max_tokens  the most tokens of a window
    order       returns the spool's requests in sorted order, for readers of ranges; sorted windows are pieces of it
    """

    def __init__(self, windows: Iterator[Window], max_tokens: int, order: Callable[[], Order]):
        self.max_tokens, self.order = max_tokens, order
        self._windows = windows

    def __next__(self) -> Window:
        return next(self._windows)


def _selected(values: np.ndarray, offsets: np.ndarray, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    lengths = np.diff(offsets)[numbers]
    return values[ragged_ranges(offsets[numbers], lengths)], np.concatenate(([0], lengths.cumsum()))


def cut_into_windows(requests: Iterable[SpooledRequest], *, max_tokens: int, is_sorted: bool) -> Iterator[Window]:
    """Yields windows of at most `max_tokens` tokens, or of one longer request, each of one namespace. Sorted
    requests are cut in the last quarter of a window, at the place across which the fewest leading tokens are shared.
    Other requests are cut as late as possible."""
    pending: list[SpooledRequest] = []
    tokens = 0
    last: bytes | None = None
    for request in requests:
        if pending and request.namespace != pending[0].namespace:
            yield _make_window(pending, last if is_sorted else None, is_sorted)
            pending, tokens, last = [], 0, None
        while pending and tokens + request.num_tokens > max_tokens:
            cut = _best_cut([*pending, request], max_tokens) if is_sorted else len(pending)
            yield _make_window(pending[:cut], last if is_sorted else None, is_sorted)
            last = pending[cut - 1].key
            pending = pending[cut:]
            tokens = sum(r.num_tokens for r in pending)
        pending.append(request)
        tokens += request.num_tokens
    if pending:
        yield _make_window(pending, last if is_sorted else None, is_sorted)


def _best_cut(requests: Sequence[SpooledRequest], max_tokens: int) -> int:
    """Returns the place c at which to cut into requests[:c] and requests[c:]: the latest place in the last quarter
    across which the fewest tokens are shared."""
    latest = len(requests) - 1
    tokens = np.cumsum([r.num_tokens for r in requests[:-1]])
    earliest = int(np.searchsorted(tokens, max_tokens - max_tokens // _LATEST_SHARE)) + 1
    first = min(earliest, latest) - 1
    tokens, offsets = join(requests[first:])
    shared = common_prefix_lengths(tokens, offsets, np.arange(len(offsets) - 1))[1:]
    return latest - int(np.argmin(shared[::-1]))


def _make_window(requests: Sequence[SpooledRequest], last: bytes | None, is_sorted: bool) -> Window:
    tokens, offsets = join(requests)
    targets = [r.targets or b"" for r in requests]
    target_offsets = np.cumsum([0, *(len(t) // 4 for t in targets)], dtype=np.int64)
    return Window(
        tokens=tokens,
        offsets=offsets,
        targets=np.frombuffer(b"".join(targets), np.int32).copy(),
        target_offsets=target_offsets,
        tags=[r.tag for r in requests],
        is_sorted=is_sorted,
        common=0 if last is None else shared_by(last, requests[0].key),
        options=[r.options for r in requests],
        namespace=requests[0].namespace,
        numbers=np.array([r.number for r in requests], np.int64),
        media=tuple({int(medium.ids[0]): medium for r in requests for medium in r.media}.values()),
    )
