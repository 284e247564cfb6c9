"""When the tower runs, which requests wait for it, and what of its results is kept. No torch.

Each image is encoded once, however many wait for it.
"""

from __future__ import annotations

import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..engine.meter import Meter
from ..errors import InputError
from ..prefix import MEDIA_BASE
from ..schedule.generate_step import SequenceState
from ..schedule.parts import EnginePart
from ..types import Medium
from ..worker.protocol import Worker
from .steps import DropImages, EncodeImage, ImageFacts, first_id
from .table import MediaTable

# The tower goes on where steps take long for another reason: it has this part of their time at least.
LEAST = 0.25
# So many steps after the tower's work it shows no more in how long one takes: the second step is still slower.
CALM = 16
# The time alone is as it was for so many steps; those behind them have longer contexts.
FRESH = 32
# How much a new step counts beside those before it, and of how many sizes of steps their seconds are known.
NEW = 0.3
MOST_SIZES = 64


class TowerPace:
    """A TowerPace says how long the tower may run after each step, so that sequences that generate keep half of their
    rate.

    Where an image is read beside it, or the tower has run before it, a step takes longer: it has less of the processor,
    and finds less in its caches. So what counts is how long a step of as many rows takes alone: a step and the tower's
    work behind it may take twice that. While the tower goes on, contexts grow, and with them the time alone: later it
    is taken from how many times as long steps took at first. So it is for a number of rows that was not seen alone.
    """

    def __init__(self) -> None:
        self._alone: OrderedDict[int, float] = OrderedDict()  # seconds by rows, those noted last at the end
        self._since = CALM  # steps since an image was on its way
        self._disturbed = 0  # steps with an image on its way, since a step alone
        self._slower = 1.0  # how many times as long a step takes where one is

    def seconds_after(self, rows: int, seconds: float, *, disturbed: bool) -> float:
        """Takes note of a step, and returns for how many seconds the tower may run after it. disturbed: whether an
        image was on its way."""
        self._since = 0 if disturbed else self._since + 1
        self._disturbed += disturbed
        alone = self._alone.get(rows)
        if self._since >= CALM:
            self._disturbed = 0
            alone = seconds if alone is None else alone + NEW * (seconds - alone)
            self._alone[rows] = alone
            self._alone.move_to_end(rows)
            if len(self._alone) > MOST_SIZES:
                self._alone.popitem(last=False)
        elif alone is None:
            alone = seconds / self._slower
        elif self._disturbed <= FRESH:
            self._slower += NEW * (max(1.0, seconds / alone) - self._slower)
        else:
            alone = max(alone, seconds / self._slower)
        return max(LEAST * seconds, 2 * min(alone, seconds) - seconds)


# How long the tower runs at a time where nobody else could.
IDLE_SECONDS = 0.25
# In place of the tiles of an image that cannot be read.
NO_TILES = np.empty((0, 0, 0, 0), np.float32)


@dataclass(frozen=True, slots=True)
class _Rows:
    """A _Rows records an image whose rows are held. salt: of its requests; last: its last row's id; size: bytes."""

    salt: str
    last: int
    size: int


@dataclass(slots=True)
class _Run:
    """A _Run is an image that the tower has begun.

    until  floating-point operations until each piece of work on it is done, float64 [pieces of all layers], ascending
    done   pieces that are done
    tiles  on their way from the image's file, until the tower has them
    """

    medium: Medium
    until: np.ndarray
    done: int = 0
    tiles: Future[np.ndarray] | None = None

    @property
    def operations(self) -> float:
        """Returns the operations of the pieces that are done."""
        return float(self.until[self.done - 1]) if self.done else 0.0

    def within(self, operations: float) -> int:
        """Returns how many pieces are done when so many operations more are."""
        return int(np.searchsorted(self.until, self.operations + operations, side="right"))


class ImageDesk(EnginePart):
    """An ImageDesk is the part of an engine whose model sees images. It sees to it that the worker has the rows of
    images when steps need them.

    Rows are kept after their use, up to `memory` bytes, for other requests with the same image. When room is needed,
    the tenant that has most of it loses what it used least recently: a flood of images is at the cost of its sender.
    Rows that requests wait for stay. Several images may be on their way through the tower; one that no request wants
    any more is given up when another begins. All calls come from the engine's thread.

    media  knows the images by the ids of their rows
    meter  counts runs of the tower
    """

    def __init__(self, worker: Worker, media: MediaTable, memory: int, meter: Meter):
        self.media = media
        media.keep_for(self)
        self._worker, self._memory, self._meter = worker, memory, meter
        facts = worker.facts.of(ImageFacts)
        assert facts is not None
        self._tower, self._row_bytes = facts.tower, facts.row_bytes
        self._tenant_of: Callable[[Hashable], Hashable] = lambda namespace: None
        self._held: OrderedDict[int, _Rows] = OrderedDict()  # by first id, the least recently used one first
        self._wanted: list[Medium] = []
        self._in_use: list[Medium] = []  # by a step that is being started
        self._runs: dict[int, _Run] = {}  # by first id
        self._rate: float | None = None  # operations a second; None: not measured yet
        self._credit = 0.0  # seconds that the tower was given between steps of others, and has not run
        self._pool = ThreadPoolExecutor(2, thread_name_prefix="prefold-image")
        self._bounds: tuple[np.ndarray, np.ndarray] = (np.empty(0, np.int64), np.empty(0, np.int64))
        self._pace = TowerPace()
        self._was_busy = False  # whether an image was on its way before the last step
        self._keys: set[Hashable] = set()  # requests that have rows of images
        self._waiting: dict[int, list[Hashable]] = {}  # requests that an image holds up, by its first id

    @property
    def bytes_held(self) -> int:
        """Returns the bytes of the rows that are kept."""
        return sum(rows.size for rows in self._held.values())

    def firsts(self) -> list[int]:
        """Returns the first ids of the images that the worker has something of."""
        return [*self._held, *self._runs]

    def holds_rows(self, ids: np.ndarray) -> np.ndarray:
        """Returns which rows of images, by their ids, the worker has: bool [n]."""
        firsts, lasts = self._bounds
        if not len(firsts):
            return np.zeros(len(ids), bool)
        place = np.searchsorted(firsts, ids, side="right") - 1
        return (place >= 0) & (ids <= lasts[place])

    def set_tenants(self, tenant_of: Callable[[Hashable], Hashable]) -> None:
        self._tenant_of = tenant_of

    def want(self, media: Sequence[Medium]) -> None:
        """Notes the images whose rows are needed next, in place of those noted before. Their rows stay meanwhile."""
        self._wanted = list(media)

    def want_next(self, prompts: Iterable[Sequence[Medium]]) -> bool:
        """Notes of several prompts' images, each in its order, those whose rows are needed next. Returns whether one of
        them has to be encoded.

        They go no further than the first that is not there: what is held behind it no step can use yet, and where
        memory is short it must not keep the one before from being made.
        """
        media: dict[int, Medium] = {}
        waits = False
        for prompt in prompts:
            for medium in prompt:
                media[first_id(medium)] = medium
                if first_id(medium) not in self._held:
                    waits = True
                    break
        self.want(list(media.values()))
        return waits

    def advance(self, seconds: float, *, idle: bool = True) -> tuple[Medium, str] | None:
        """Runs the tower for about so many seconds, for the first image that is wanted and not there. Returns the image
        that it failed for, and why; None: it did not fail.

        idle: whether the engine has nothing else to do meanwhile. Then files are waited for, and at least one piece of
        work is done. Otherwise a piece that takes longer waits until several calls have given it the time.
        """
        medium = next((medium for medium in self._wanted if not self._has(medium)), None)
        if medium is None or not self._may_begin(medium):
            return None
        error = self._encode(medium, seconds, idle)
        if error is None:
            return None
        self._drop(medium)
        return medium, error

    @contextmanager
    def using(self, tokens: np.ndarray) -> Iterator[None]:
        """Returns a context in which the worker has the rows of all images among these ids; they are made before it
        begins. Where the tower fails for an image, its rows are no numbers, and they are dropped behind it."""
        ids = tokens[tokens >= MEDIA_BASE]
        if not len(ids):
            yield
            return
        failed = []
        self._in_use = self.media.find(ids)
        try:
            for medium in self._in_use:
                while not self._has(medium):
                    if self._encode(medium, None) is not None:
                        failed.append(medium)
            yield
        finally:
            self._in_use = []
            for medium in failed:
                self._drop(medium)

    def clear(self) -> None:
        """Drops all rows that no request waits for."""
        self._make_room(self._memory + 1)

    # --------------------------------------------------------------------------------------------- the requests

    def submit(self, request: Any) -> Mapping[str, Any]:
        if request.request.tokens.max() >= MEDIA_BASE:
            self._keys.add(request.key)
        return {}

    def forget(self, key: Hashable) -> None:
        self._keys.discard(key)

    def before_plan(self, scheduler: Any, requests: Mapping[Any, Any]) -> Mapping[Hashable, Exception]:
        """Notes which images have rows that running sequences need next. Those whose image nobody holds any more cannot
        go on."""
        self.is_waiting = False
        if not (self._keys or self._waiting):
            return {}
        self.media.watch(scheduler.tree)
        waiting: dict[int, list[Hashable]] = {}
        asked: list[list[Medium]] = []
        lost: dict[Hashable, Exception] = {}
        for sequence in scheduler.running:
            if sequence.ready or sequence.key not in self._keys or sequence.key in lost:
                continue
            try:
                media = self.media.find(_image_rows(sequence))
            except LookupError:
                lost[sequence.key] = _failure("nobody holds it any more")
                continue
            asked.append(media)
            for medium in media:
                waiting.setdefault(first_id(medium), []).append(sequence.key)
        self._waiting = waiting
        self.is_waiting = self.want_next(asked)
        return lost

    def after_plan(self, rows: int | None, seconds: float) -> Mapping[Hashable, Exception]:
        """Runs the tower where an image is waited for: for about as long as its pace says after a step. Requests cannot
        go on that need an image which it failed for."""
        allowed = IDLE_SECONDS if rows is None else self.seconds_after(rows, seconds)
        failed = self.advance(allowed, idle=rows is None) if self.is_waiting else None
        if failed is None:
            return {}
        medium, why = failed
        return {key: _failure(why) for key in self._waiting.get(first_id(medium), ())}

    def seconds_after(self, rows: int, seconds: float) -> float:
        """Takes note of a step of so many rows, and returns for how many seconds the tower may run after it."""
        disturbed, self._was_busy = self._was_busy, self.is_busy
        return self._pace.seconds_after(rows, seconds, disturbed=disturbed or self._was_busy)

    # ----------------------------------------------------------------------------------------------- the tower

    @property
    def is_busy(self) -> bool:
        """Returns whether an image that somebody wants is being read, or is on its way through the tower."""
        return bool(self._runs) and not self._runs.keys().isdisjoint(self._all_wanted())

    def _encode(self, medium: Medium, seconds: float | None, idle: bool = True) -> str | None:
        """Does as much of the tower's work on an image as about so many seconds allow (None: all). Returns why the
        tower fails for it, None: it does not."""
        started = time.perf_counter()
        run = self._runs.get(first_id(medium)) or self._begin(medium)
        tiles = unread = None
        if not run.done:
            loaded = self._loaded(run, seconds if idle else 0.0)
            if loaded is None:
                return None
            tiles, unread = loaded
        stop = self._stop(run, seconds if unread is None else None, idle)
        if stop == run.done:
            return None
        if not run.done:
            self._make_room(self._bytes(medium))
        computing = time.perf_counter()
        result = self._worker.start(EncodeImage(medium.ids, tiles, stop)).result()
        ended = time.perf_counter()
        self._credit = 0.0 if idle else self._credit - (ended - started)
        before, run.done, run.tiles = run.operations, stop, None
        self._note_rate(run.operations - before, ended - computing)
        self._meter.add(seconds={"tower": ended - started})
        error: str | None = unread or result.error
        if result.is_done:
            del self._runs[first_id(medium)]
            self._held[first_id(medium)] = _Rows(medium.salt, int(medium.ids[-1]), self._bytes(medium))
            self._note()
            self._meter.add(tower_runs=int(result.error is None))
        return error

    def _stop(self, run: _Run, seconds: float | None, idle: bool) -> int:
        """Returns how many pieces of an image are to be done when this call ends.

        seconds  idle
        None              all: somebody waits for nothing else
        so many  True     what they allow, and at least one more: nobody else has anything to do
        so many  False    what they allow with those of earlier calls that were too few for a piece; `run.done` where
                          they still are: a piece waits until others have had as much time as it takes
        """
        last = len(run.until)
        if seconds is None:
            return last
        if idle:
            return min(last, max(run.done + 1, run.within(seconds * (self._rate or 0.0))))
        self._credit += seconds
        return run.done + 1 if self._rate is None else min(last, run.within(max(0.0, self._credit) * self._rate))

    def _loaded(self, run: _Run, seconds: float | None) -> tuple[np.ndarray, str | None] | None:
        """Returns the tiles of an image, and why it cannot be read (None: it can; else the worker gets NO_TILES, so
        that its rows are no numbers). None where they are not there within so many seconds: reading and resizing a
        large file takes longer than a step, and goes on beside those that follow."""
        if run.tiles is None:
            run.tiles = self._pool.submit(run.medium.load)
        if not wait([run.tiles], seconds).done:
            return None
        try:
            return run.tiles.result(), None
        except Exception as error:
            return NO_TILES, str(error) or type(error).__name__

    def _begin(self, medium: Medium) -> _Run:
        """Returns the run of an image that the tower has not begun. Those that nobody wants any more are given up."""
        wanted = self._all_wanted()
        gone = tuple(first for first in self._runs if first not in wanted)
        if gone:
            for first in gone:
                del self._runs[first]
            self._worker.start(DropImages(gone)).result()
        tiles = len(medium.ids) // self._tower.rows
        run = _Run(medium, np.cumsum(np.tile(self._tower.pieces(tiles), self._tower.layers)))
        self._runs[first_id(medium)] = run
        return run

    def _note_rate(self, operations: float, seconds: float) -> None:
        self._rate = operations / seconds

    def _may_begin(self, medium: Medium) -> bool:
        """Returns whether there is memory for the rows of an image, now or once those are used that wait to be."""
        if first_id(medium) in self._runs:
            return True
        wanted = self._all_wanted()
        waiting = sum(rows.size for first, rows in self._held.items() if first in wanted)
        return not waiting or waiting + self._bytes(medium) <= self._memory

    # ------------------------------------------------------------------------------------------------ the store

    def _has(self, medium: Medium) -> bool:
        first = first_id(medium)
        if first not in self._held:
            return False
        self._held.move_to_end(first)
        return True

    def _make_room(self, size: int) -> None:
        """Drops rows that nobody waits for until there is room for so many bytes more, as far as that goes."""
        wanted = self._all_wanted()
        # By tenant, and not by salt: clients choose salts, and who takes a new one each time has little under each.
        tenants = {first: self._tenant_of((None, rows.salt)) for first, rows in self._held.items()}
        by_tenant: Counter[Hashable] = Counter()
        for first, rows in self._held.items():
            by_tenant[tenants[first]] += rows.size
        gone: list[int] = []
        while by_tenant.total() + size > self._memory:
            free = [first for first in self._held if first not in wanted]
            if not free:
                break
            most = max(by_tenant[tenants[first]] for first in free)
            victim = next(first for first in free if by_tenant[tenants[first]] == most)
            by_tenant[tenants[victim]] -= self._held.pop(victim).size
            gone.append(victim)
        if gone:
            self._worker.start(DropImages(tuple(gone))).result()
            self._note()

    def _drop(self, medium: Medium) -> None:
        if self._held.pop(first_id(medium), None) is not None:
            self._worker.start(DropImages((first_id(medium),))).result()
            self._note()

    def _note(self) -> None:
        firsts = sorted(self._held)
        self._bounds = np.array(firsts, np.int64), np.array([self._held[first].last for first in firsts], np.int64)

    def _all_wanted(self) -> set[int]:
        return {first_id(medium) for medium in (*self._wanted, *self._in_use)}

    def _bytes(self, medium: Medium) -> int:
        return len(medium.ids) * self._row_bytes


def _failure(why: str) -> InputError:
    return InputError(f"an image cannot be encoded: {why}", field="image", code="image_failed")


def _image_rows(sequence: SequenceState) -> np.ndarray:
    """Returns the ids of the rows of images that have to be computed for a sequence's prompt: where none of its rows
    is missing, of the last one, which runs again."""
    path = sequence.leaf.path()
    pending = [np.asarray(node.tokens[node.computed :]) for node in path if node.pending]
    ids = np.concatenate(pending) if pending else np.asarray(path[-1].tokens[-1:])
    return ids[ids >= MEDIA_BASE]
