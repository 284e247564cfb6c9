"""Cut a job's requests into windows: consecutive pieces that run one after the other."""

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
    """Requests of a job that run together: B requests with N tokens in total, all of one namespace."""

    tokens: np.ndarray  # int32 [N]: the token ids of all requests, ragged
    offsets: np.ndarray  # int64 [B + 1]
    targets: np.ndarray  # int32 [T]: the targets of scores, ragged; a request may have no targets
    target_offsets: np.ndarray  # int64 [B + 1]
    tags: list[bytes]  # [B]: the tag added with each request
    is_sorted: bool  # True: the requests of all windows are in lexicographic order
    # How many leading tokens the first request shares with the last request of the previous window. 0 in the first
    # window, and in every window of an unsorted job.
    common: int
    options: list[bytes] = field(default_factory=list)  # [B]: the options of each request (see `encode_options`)
    namespace: Namespace = NO_NAMESPACE
    numbers: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))  # int64 [B]: order of arrival
    media: tuple[Medium, ...] = ()  # the images of the requests, unless the spool holds them

    def request(self, number: int) -> Request:
        """Return the request at place `number` of the window; its tokens and targets are views."""
        tokens = self.tokens[self.offsets[number] : self.offsets[number + 1]]
        targets = self.targets[self.target_offsets[number] : self.target_offsets[number + 1]]
        sampling, priority = decode_options(self.options[number] if self.options else b"")
        rows = set(tokens[tokens >= MEDIA_BASE].tolist()) if self.media else ()
        media = tuple(medium for medium in self.media if int(medium.ids[0]) in rows)
        return Request(tokens, targets if len(targets) else None, sampling, self.namespace, priority, media)

    def take(self, numbers: np.ndarray) -> Window:
        """Return a window of the requests at these places, in ascending order."""
        tokens, offsets = _selected(self.tokens, self.offsets, numbers)
        targets, target_offsets = _selected(self.targets, self.target_offsets, numbers)
        options = [self.options[i] for i in numbers] if self.options else []
        tags = [self.tags[i] for i in numbers]
        places = self.numbers[numbers] if len(self.numbers) else self.numbers
        further = (options, self.namespace, places, self.media)
        return Window(tokens, offsets, targets, target_offsets, tags, self.is_sorted, 0, *further)

    def without_twins(self) -> Window:
        """Return the window without its `twins`, or the window itself if it has none."""
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
        """How many leading tokens each request shares with the previous request, int64 [B]; 0 for the first."""
        return common_prefix_lengths(self.tokens, self.offsets, np.arange(len(self.offsets) - 1))

    @cached_property
    def twins(self) -> np.ndarray:
        """Marks of the twins, bool [B].

        A twin is another read of one prompt, for example for several one-token labels. It has the tokens of the request
        that arrived just before it. A prompt to be continued is never a twin: it gets its own answer.
        """
        if not len(self.numbers) or any(decode_options(options)[0] is not None for options in set(self.options)):
            return np.zeros(self.num_requests, bool)
        lengths = np.diff(self.offsets)
        same = (self.shared[1:] == lengths[1:]) & (lengths[1:] == lengths[:-1])
        return np.concatenate(([False], same & (np.diff(self.numbers) == 1)))

    @cached_property
    def unique_tokens(self) -> int:
        """The rows that this window adds to the job's stream; all its tokens if the job is not sorted."""
        return self.num_tokens - int(self.shared.sum()) - self.common if self.is_sorted else self.num_tokens


class Windows(Iterator[Window]):
    """The windows of a spool.

    Args:
        max_tokens: The most tokens of a window.
        order: Returns the requests in sorted order, for reading ranges. Sorted windows are pieces of this order.
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
    """Yield windows of at most `max_tokens` tokens, each with requests of one namespace.

    A longer request gets its own window. Sorted requests are cut in the last quarter of a window, at the place across
    which the fewest leading tokens are shared. Other requests are cut as late as possible.
    """
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
    """Return the place c at which to cut into requests[:c] and requests[c:].

    c is the latest place in the last quarter across which the fewest tokens are shared.
    """
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
