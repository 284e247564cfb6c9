"""Decide when the tower runs, which requests wait for it, and which of its results are stored. No torch.

Each image is encoded once, even if many requests wait for it.
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

from ...engine.meter import Meter
from ...engine.schedule.generate_step import SequenceState
from ...engine.schedule.parts import EnginePart
from ...engine.worker import Worker
from ...errors import InputError
from ...spec.requests import Medium, Namespace
from ...trie import MEDIA_BASE
from .steps import DropImages, EncodeImage, ImageFacts, first_id
from .table import MediaTable

# The tower gets at least this share of a step's time, so that it advances even if steps are slow for another reason.
LEAST = 0.25
# The tower's work slows the steps after it. After this many steps there is no effect left.
CALM = 16
# For this many steps, a step's time without the tower counts as unchanged. Later steps have longer contexts.
FRESH = 32
NEW = 0.3  # weight of the newest step in an average
MOST_SIZES = 64  # number of step sizes with a stored time


class TowerPace:
    """How long the tower may run after each step, so that generating sequences keep half of their rate.

    A step is slower while an image is read or after the tower has run, because it gets less of the processor and the
    caches are cold. The reference is therefore the time that a step of the same number of rows needs alone. A step and
    the tower's work after it may together take twice that time.

    While the tower is busy, contexts grow, and the time alone is estimated: a disturbed step's time divided by the
    slowdown of the first disturbed steps. A number of rows that was never measured alone is estimated in the same way.
    """

    def __init__(self) -> None:
        self._alone: OrderedDict[int, float] = OrderedDict()  # seconds by number of rows, latest measurement last
        self._since = CALM  # steps since an image was last in progress
        self._disturbed = 0  # steps with an image in progress since the last step alone
        self._slower = 1.0  # time of a disturbed step divided by the time of a step alone

    def seconds_after(self, rows: int, seconds: float, *, disturbed: bool) -> float:
        """Record the time of a step, and return for how many seconds the tower may run after it.

        Args:
            disturbed: an image was in progress during the step
        """
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


IDLE_SECONDS = 0.25  # duration of one run of the tower while no step can run
NO_TILES = np.empty((0, 0, 0, 0), np.float32)  # the tiles of an image that cannot be read


@dataclass(frozen=True, slots=True)
class _EncodedImage:
    """An image that is encoded: the worker has its rows."""

    salt: str  # the salt of the requests with this image
    last_id: int  # the id of the image's last row
    size: int  # bytes


@dataclass(slots=True)
class _Run:
    """An image in progress."""

    medium: Medium
    # float64 [pieces of all layers], ascending: floating-point operations up to the end of each piece
    until: np.ndarray
    num_done: int = 0  # completed pieces
    tiles: Future[np.ndarray] | None = None  # the image's tiles, until the tower has them

    @property
    def operations(self) -> float:
        """Return the floating-point operations of the completed pieces."""
        return float(self.until[self.num_done - 1]) if self.num_done else 0.0

    def within(self, operations: float) -> int:
        """Return the number of pieces that are complete after so many more operations."""
        return int(np.searchsorted(self.until, self.operations + operations, side="right"))


class ImageScheduler(EnginePart):
    """The engine part for a model with images: the worker encodes images before steps need their rows.

    Rows stay stored after use, up to `memory` bytes, for other requests with the same image. If memory is full, the
    tenant with the most bytes loses its least recently used image, so that a flood of images costs only its sender.
    Rows that requests wait for are never dropped. Several images may be in progress; one that no request needs any more
    is dropped when another starts. All calls come from the engine's thread.

    Args:
        media: finds images by the ids of their rows
        memory: maximum bytes of stored rows
        meter: counts runs of the tower
    """

    def __init__(self, worker: Worker, media: MediaTable, memory: int, meter: Meter):
        self.media = media
        media.add_store(self)
        self._worker, self._memory, self._meter = worker, memory, meter
        facts = worker.facts.of(ImageFacts)
        assert facts is not None
        self._tower, self._row_bytes = facts.tower, facts.row_bytes
        self._tenant_of: Callable[[Hashable], Hashable] = lambda namespace: None
        self._encoded: OrderedDict[int, _EncodedImage] = OrderedDict()  # {first id: image}, least recently used first
        self._needed: list[Medium] = []
        self._in_use: list[Medium] = []  # needed by a step that is being started
        self._runs: dict[int, _Run] = {}  # {first id of the image: its run of the tower}
        self._rate: float | None = None  # operations per second; None: not measured yet
        self._credit = 0.0  # seconds that the tower may run between steps and has not used
        self.pool = ThreadPoolExecutor(2, thread_name_prefix="prefold-image")
        self._bounds: tuple[np.ndarray, np.ndarray] = (np.empty(0, np.int64), np.empty(0, np.int64))
        self._pace = TowerPace()
        self._was_busy = False  # an image was in progress before the last step
        self._keys: set[Hashable] = set()  # requests with images
        self._waiting: dict[int, list[Hashable]] = {}  # requests that wait for an image, by its first id

    def firsts(self) -> list[int]:
        """Return the first ids of the images that are encoded or in progress."""
        return [*self._encoded, *self._runs]

    def holds_rows(self, ids: np.ndarray) -> np.ndarray:
        """Return for each id of an image's row whether the worker has the row, bool [n]."""
        firsts, lasts = self._bounds
        if not len(firsts):
            return np.zeros(len(ids), bool)
        place = np.searchsorted(firsts, ids, side="right") - 1
        return (place >= 0) & (ids <= lasts[place])

    def set_tenants(self, tenant_of: Callable[[Hashable], Hashable]) -> None:
        self._tenant_of = tenant_of

    def need(self, media: Sequence[Medium]) -> None:
        """Set the images that are needed next. They are not dropped."""
        self._needed = list(media)

    def need_next(self, prompts: Iterable[Sequence[Medium]]) -> bool:
        """Set the images that prompts need next, and return whether one of them has to be encoded.

        A prompt needs its images up to the first that is not encoded. No step can use later ones yet, and if memory is
        short they must not prevent that image from being encoded.

        Args:
            prompts: the images of each prompt, in order
        """
        media: dict[int, Medium] = {}
        waits = False
        for prompt in prompts:
            for medium in prompt:
                media[first_id(medium)] = medium
                if first_id(medium) not in self._encoded:
                    waits = True
                    break
        self.need(list(media.values()))
        return waits

    def advance(self, seconds: float, *, idle: bool = True) -> tuple[Medium, str] | None:
        """Run the tower for about this time on the first needed image that is not encoded.

        Return (the image, the reason) if the tower failed for it, else None.

        Args:
            idle: whether the engine has nothing else to do. If so, wait for files, and compute at least one piece. If
                not, a piece that needs more time than `seconds` waits until several calls together provide this time.
        """
        medium = next((medium for medium in self._needed if not self._has(medium)), None)
        if medium is None or not self._may_begin(medium):
            return None
        error = self._encode(medium, seconds, idle)
        if error is None:
            return None
        self._drop(medium)
        return medium, error

    @contextmanager
    def using(self, tokens: np.ndarray) -> Iterator[None]:
        """Provide a context in which the worker has the rows of all images among these ids, encoding them first.

        If the tower fails for an image, its rows are NaN, and they are dropped after the context.
        """
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
        """Drop all rows that no request waits for."""
        self._make_room(self._memory + 1)

    # --------------------------------------------------------------------------------------------- the requests

    def submit(self, request: Any) -> Mapping[str, Any]:
        if request.request.tokens.max() >= MEDIA_BASE:
            self._keys.add(request.key)
        return {}

    def forget(self, key: Hashable) -> None:
        self._keys.discard(key)

    def before_plan(self, scheduler: Any, requests: Mapping[Any, Any]) -> Mapping[Hashable, Exception]:
        """Set the images that running sequences need next. Return an error for each request without its image."""
        self.is_waiting = False
        if not (self._keys or self._waiting):
            return {}
        self.media.add_tree(scheduler.tree)
        waiting: dict[int, list[Hashable]] = {}
        media_by_prompt: list[list[Medium]] = []
        failures: dict[Hashable, Exception] = {}
        for sequence in scheduler.running:
            if sequence.ready or sequence.key not in self._keys or sequence.key in failures:
                continue
            try:
                media = self.media.find(_image_rows(sequence))
            except LookupError:
                failures[sequence.key] = _failure("its request has ended")
                continue
            media_by_prompt.append(media)
            for medium in media:
                waiting.setdefault(first_id(medium), []).append(sequence.key)
        self._waiting = waiting
        self.is_waiting = self.need_next(media_by_prompt)
        return failures

    def after_plan(self, rows: int | None, seconds: float) -> Mapping[Hashable, Exception]:
        """Run the tower if requests wait for an image, for as long as its pace allows after a step.

        If the tower fails for an image, return an error for each request that waits for it.
        """
        allowed = IDLE_SECONDS if rows is None else self.seconds_after(rows, seconds)
        failed = self.advance(allowed, idle=rows is None) if self.is_waiting else None
        if failed is None:
            return {}
        medium, reason = failed
        return {key: _failure(reason) for key in self._waiting.get(first_id(medium), ())}

    def seconds_after(self, rows: int, seconds: float) -> float:
        """Record a step with this number of rows, and return for how many seconds the tower may run after it."""
        disturbed, self._was_busy = self._was_busy, self.is_busy
        return self._pace.seconds_after(rows, seconds, disturbed=disturbed or self._was_busy)

    # ----------------------------------------------------------------------------------------------- the tower

    @property
    def is_busy(self) -> bool:
        """Return whether a needed image is being read or encoded."""
        return bool(self._runs) and not self._runs.keys().isdisjoint(self._all_needed())

    def _encode(self, medium: Medium, seconds: float | None, idle: bool = True) -> str | None:
        """Work on an image for about this time (None: until it is encoded). Return the reason if the tower failed."""
        started = time.perf_counter()
        run = self._runs.get(first_id(medium)) or self._begin(medium)
        tiles = unread = None
        if not run.num_done:
            loaded = self._loaded(run, seconds if idle else 0.0)
            if loaded is None:
                return None
            tiles, unread = loaded
        stop = self._stop(run, seconds if unread is None else None, idle)
        if stop == run.num_done:
            return None
        if not run.num_done:
            self._make_room(self._bytes(medium))
        computing = time.perf_counter()
        result = self._worker.start(EncodeImage(medium.ids, tiles, stop)).result()
        ended_at = time.perf_counter()
        self._credit = 0.0 if idle else self._credit - (ended_at - started)
        before, run.num_done, run.tiles = run.operations, stop, None
        self._note_rate(run.operations - before, ended_at - computing)
        self._meter.add(seconds={"tower": ended_at - started})
        error: str | None = unread or result.error
        if result.is_done:
            del self._runs[first_id(medium)]
            self._encoded[first_id(medium)] = _EncodedImage(medium.salt, int(medium.ids[-1]), self._bytes(medium))
            self._note()
            self._meter.add(tower_runs=int(result.error is None))
        return error

    def _stop(self, run: _Run, seconds: float | None, idle: bool) -> int:
        """Return the number of pieces of an image that shall be complete after this call.

        Args:
            seconds: time for the work; None: all pieces
            idle: compute at least one more piece. Else unused time of earlier calls counts too, and a piece that does
                not fit waits: the result is then `run.num_done`
        """
        last = len(run.until)
        if seconds is None:
            return last
        if idle:
            return min(last, max(run.num_done + 1, run.within(seconds * (self._rate or 0.0))))
        self._credit += seconds
        return run.num_done + 1 if self._rate is None else min(last, run.within(max(0.0, self._credit) * self._rate))

    def _loaded(self, run: _Run, seconds: float | None) -> tuple[np.ndarray, str | None] | None:
        """Return (the tiles of an image, None), or (NO_TILES, the reason) if it cannot be read. Its rows are NaN then.

        Return None if reading takes longer than this time: reading and resizing a large file takes longer than a step,
        and continues beside the next steps.
        """
        if run.tiles is None:
            run.tiles = self.pool.submit(run.medium.load)
        if not wait([run.tiles], seconds).done:
            return None
        try:
            return run.tiles.result(), None
        except Exception as error:
            return NO_TILES, str(error) or type(error).__name__

    def _begin(self, medium: Medium) -> _Run:
        """Start an image and return its run. Runs of images that no request needs any more are dropped."""
        needed = self._all_needed()
        unneeded = tuple(first for first in self._runs if first not in needed)
        if unneeded:
            for first in unneeded:
                del self._runs[first]
            self._worker.start(DropImages(unneeded)).result()
        pieces = self._tower.pieces(*self._tower.tiles_of(len(medium.ids)))
        run = _Run(medium, np.cumsum(np.tile(pieces, self._tower.layers)))
        self._runs[first_id(medium)] = run
        return run

    def _note_rate(self, operations: float, seconds: float) -> None:
        self._rate = operations / seconds

    def _may_begin(self, medium: Medium) -> bool:
        """Return whether the rows of an image fit into memory beside all rows that requests still need."""
        if first_id(medium) in self._runs:
            return True
        needed = self._all_needed()
        waiting = sum(rows.size for first, rows in self._encoded.items() if first in needed)
        return not waiting or waiting + self._bytes(medium) <= self._memory

    # ------------------------------------------------------------------------------------------------ the store

    def _has(self, medium: Medium) -> bool:
        first = first_id(medium)
        if first not in self._encoded:
            return False
        self._encoded.move_to_end(first)
        return True

    def _make_room(self, size: int) -> None:
        """Drop rows that no request waits for until this many more bytes fit, or until none are left."""
        needed = self._all_needed()
        # By tenant, not by salt: a client with a new salt for each image has only few bytes under each salt.
        tenants = {first: self._tenant_of(Namespace(salt=rows.salt)) for first, rows in self._encoded.items()}
        by_tenant: Counter[Hashable] = Counter()
        for first, rows in self._encoded.items():
            by_tenant[tenants[first]] += rows.size
        dropped: list[int] = []
        while by_tenant.total() + size > self._memory:
            free = [first for first in self._encoded if first not in needed]
            if not free:
                break
            most = max(by_tenant[tenants[first]] for first in free)
            victim = next(first for first in free if by_tenant[tenants[first]] == most)
            by_tenant[tenants[victim]] -= self._encoded.pop(victim).size
            dropped.append(victim)
        if dropped:
            self._worker.start(DropImages(tuple(dropped))).result()
            self._note()

    def _drop(self, medium: Medium) -> None:
        if self._encoded.pop(first_id(medium), None) is not None:
            self._worker.start(DropImages((first_id(medium),))).result()
            self._note()

    def _note(self) -> None:
        firsts = sorted(self._encoded)
        self._bounds = (
            np.array(firsts, np.int64),
            np.array([self._encoded[first].last_id for first in firsts], np.int64),
        )

    def _all_needed(self) -> set[int]:
        return {first_id(medium) for medium in (*self._needed, *self._in_use)}

    def _bytes(self, medium: Medium) -> int:
        return len(medium.ids) * self._row_bytes


def _failure(reason: str) -> InputError:
    return InputError(f"an image cannot be encoded: {reason}", field="image", code="image_failed")


def _image_rows(sequence: SequenceState) -> np.ndarray:
    """Return the ids of the image rows that a sequence's prompt has to compute.

    If no row is missing, the prompt's last row is computed again.
    """
    path = sequence.leaf.path()
    pending = [np.asarray(node.tokens[node.num_computed :]) for node in path if node.num_pending]
    ids = np.concatenate(pending) if pending else np.asarray(path[-1].tokens[-1:])
    return ids[ids >= MEDIA_BASE]
