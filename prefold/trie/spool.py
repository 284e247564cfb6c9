"""The spool: accepts a job's requests in any order and returns them sorted, in bounded memory.

Requests stay in memory up to a limit. Beyond the limit, sorted runs are written to disk and merged when read (external
merge sort). The spool reads only files that this process wrote.
"""

from __future__ import annotations

import heapq
import os
import threading
from collections.abc import Iterable, Iterator
from functools import partial
from itertools import groupby
from operator import attrgetter, itemgetter
from types import TracebackType
from typing import NamedTuple

from ..errors import InputError
from ..spec.requests import NO_NAMESPACE, Medium, Namespace, Request
from .order import FileOrder, MemoryOrder, Order, SpooledRequest, encode, read_requests, request_bytes
from .repeats import join_repeats, pack_each
from .tempfiles import TempFile
from .window import Windows, cut_into_windows

_REQUEST_OVERHEAD = 256  # bytes of memory that a request needs besides its contents
_MIN_BUFFER, _MAX_BUFFER = 1 << 14, 1 << 20  # bytes of a run's read buffer


class Spool:
    """The requests of one job.

    First all requests are added, from any thread. Then one thread reads windows, as often as it likes, or any thread
    reads ranges of the sorted order (`order`). Reading needs memory for one window plus about `memory_bytes`. Use the
    spool as a context manager. Its files have no names and disappear with the spool.

    Args:
        memory_bytes: Bytes of requests that stay in memory before they are written to disk; at least 1.
        directory: Folder for temporary files; None for the system's default.
        fan_in: Runs merged at once; each is an open file.
    """

    def __init__(
        self, *, memory_bytes: int = 64 << 20, directory: str | os.PathLike[str] | None = None, fan_in: int = 64
    ) -> None:
        if memory_bytes < 1:
            raise InputError(f"memory_bytes is {memory_bytes}", field="memory_bytes", remedy="give 1 or more")
        self.num_requests = 0
        self.num_tokens = 0
        self._memory_bytes = memory_bytes
        self._directory, self._fan_in = directory, fan_in
        self._requests: list[SpooledRequest] = []
        self._request_bytes = 0
        self._media: dict[int, Medium] = {}  # images of all requests; this reference keeps the ids of their rows in use
        self._namespaces: set[Namespace] = set()
        self._file: TempFile | None = None  # contains all runs
        self._runs: list[_Run] = []  # each is sorted and contains a consecutive range of arrivals
        self._merged: list[_Run] | None = None  # the same requests in at most `fan_in` runs
        self._orders: dict[bool, Order] = {}  # key: `joins`
        self._last = (NO_NAMESPACE, b"")  # namespace and tokens of the last request added
        self._state = "adding"
        self._lock = threading.Lock()

    def __enter__(self) -> Spool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Drop all requests and their files. Closing twice is harmless."""
        with self._lock:
            self._state = "closed"
            self._requests, self._runs, self._merged, self._orders, self._media = [], [], None, {}, {}
            self._file = None

    def add(self, request: Request, tag: bytes = b"") -> bool:
        """Add a request and a tag, which the request's window returns.

        Return True for a new prompt, False for a twin: another read of the prompt just added (see `Window.twins`).
        Raise InputError like `order.encode`, and RuntimeError once windows have been read.
        """
        new = encode(request, tag)
        size = len(new.key) + len(new.targets or b"") + len(tag) + len(new.options) + _REQUEST_OVERHEAD
        with self._lock:
            if self._state != "adding":
                raise RuntimeError(f"a request was added to a spool that is {self._state}")
            self._requests.append(new._replace(number=self.num_requests, media=()))
            self._namespaces.add(new.namespace)
            self._media.update((int(medium.ids[0]), medium) for medium in request.media)
            before, self._last = self._last, new[:2]
            is_new = request.sampling is not None or self._last != before
            self.num_requests += 1
            self.num_tokens += new.num_tokens
            self._request_bytes += size
            if self._request_bytes > self._memory_bytes:
                self._spill()
        return is_new

    def finish_adding(self) -> None:
        """Declare that no more requests come; reading the first window implies it.

        Raise RuntimeError if the spool is closed.
        """
        with self._lock:
            if self._state == "closed":
                raise RuntimeError("the spool is closed")
            if self._state == "adding":
                self._state = "complete"
                if self._runs and self._requests:
                    self._spill()
                else:
                    self._sort()

    def windows(self, *, max_tokens: int, share: bool = True, joins: bool = False) -> Windows:
        """Return the job as windows of at most `max_tokens` tokens; a longer request gets its own window.

        Namespaces come one after the other, and no window mixes two. Raise InputError if max_tokens is below 1.

        Args:
            share: Return requests in lexicographic order over the whole job, equal ones in order of arrival. Each
                window ends at a place across which few tokens are shared. If False, requests come in order of arrival.
            joins: Pack all tags (see `repeats`), and join equal requests if `share` is True.
        """
        if max_tokens < 1:
            raise InputError(f"max_tokens is {max_tokens}", field="max_tokens", remedy="give 1 or more")
        self.finish_adding()
        if share:
            requests = self._sorted_requests(joins)
        else:
            requests = pack_each(self._arrived_requests()) if joins else self._arrived_requests()
        windows = cut_into_windows(requests, max_tokens=max_tokens, is_sorted=share)
        return Windows(windows, max_tokens, partial(self.order, joins=joins))

    def order(self, *, joins: bool = False) -> Order:
        """Return the sorted requests, for reading ranges. The first call merges the runs on disk.

        With `joins`, equal requests are joined and all tags are packed.
        """
        self.finish_adding()
        with self._lock:
            if joins not in self._orders:
                requests = self._sorted_requests(joins)
                memory = [*requests] if joins and not self._runs else self._requests
                self._orders[joins] = FileOrder(requests, self._directory) if self._runs else MemoryOrder(memory)
            return self._orders[joins]

    def unique_tokens(self) -> int:
        """Return the number of rows of the job's stream. Reads the job once."""
        return sum(w.unique_tokens for w in self.windows(max_tokens=1 << 20))

    def _sort(self) -> None:
        # The sort is stable, so equal requests stay in order of arrival.
        names = ("namespace", "key") if len(self._namespaces) > 1 else ("key",)
        self._requests.sort(key=attrgetter(*names))

    def _spill(self) -> None:
        self._sort()
        if self._file is None:
            self._file = TempFile(self._directory)
        self._runs.append(_Run.of(self._requests, self._file))
        self._requests, self._request_bytes = [], 0

    def _sorted_requests(self, joins: bool = False) -> Iterator[SpooledRequest]:
        if self._runs and (order := self._orders.get(joins)) is not None:
            return order.read(0, len(order))
        return join_repeats(self._arranged()) if joins else self._arranged()

    def _arranged(self) -> Iterator[SpooledRequest]:
        if not self._runs:
            yield from self._requests
            return
        if self._merged is None:
            self._merged = self._merge_runs(self._runs)
        yield from self._merge(self._merged)

    def _merge_runs(self, runs: list[_Run]) -> list[_Run]:
        """Return at most `fan_in` runs with the requests of all `runs`."""
        while len(runs) > self._fan_in:
            file = TempFile(self._directory)
            runs = [_Run.of(self._merge(runs[i : i + self._fan_in]), file) for i in range(0, len(runs), self._fan_in)]
        return runs

    def _merge(self, runs: list[_Run]) -> Iterator[SpooledRequest]:
        buffer = min(max(self._memory_bytes // len(runs), _MIN_BUFFER), _MAX_BUFFER)
        yield from heapq.merge(*(run.requests(buffer) for run in runs))

    def _arrived_requests(self) -> Iterator[SpooledRequest]:
        if not self._runs:
            yield from sorted(self._requests, key=attrgetter("namespace", "number"))
            return
        # Runs contain consecutive ranges of arrivals. All runs are read once, side by side, by namespace.
        parts = (_parts(number, run) for number, run in enumerate(self._runs))
        for _, _, part in heapq.merge(*parts, key=itemgetter(0, 1)):
            yield from sorted(part, key=attrgetter("number"))


class _Run(NamedTuple):
    """A sorted run of requests: the bytes from `start` up to, not including, `stop` of a file."""

    file: TempFile
    start: int
    stop: int

    @classmethod
    def of(cls, requests: Iterable[SpooledRequest], file: TempFile) -> _Run:
        """Write requests to a file and return their run."""
        return cls(file, *file.append(map(request_bytes, requests)))

    def requests(self, buffering: int) -> Iterator[SpooledRequest]:
        """Yield the requests of the run, reading `buffering` bytes at a time."""
        with self.file.reader(self.start, self.stop, buffering) as file:
            yield from read_requests(file)


def _parts(number: int, run: _Run) -> Iterator[tuple[Namespace, int, Iterator[SpooledRequest]]]:
    """Yield (namespace, number, requests) for each namespace of a run. Read each part before the next."""
    for namespace, part in groupby(run.requests(_MIN_BUFFER), key=attrgetter("namespace")):
        yield namespace, number, part
