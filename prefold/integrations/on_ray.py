"""A model of a Ray cluster that all its processes find by name: one actor with a fleet, whose replicas are on Ray too.

Whoever makes the actor owns it, and it owns the replicas, so all of them end with the driver. Items come to it from any
process; it makes requests of them, and the requests of all callers go to the replicas as a stream.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import sys
import threading
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from ..cluster.fleet import Fleet
from ..errors import FleetError, InputError, JobError, MissingExtraError, PrefoldError
from ..model_options import model_options
from ..plugins import add_plugins, plugins
from ..stream import Feed, LiveInput
from ..tasks import make_task
from ..tasks.run import calibrated_by, draw_seed, finish_items, results_of, with_seed
from .shared import Model

_AT_ONCE = 1000  # calls that the actor answers at once
_WINDOW = 1 << 20  # tokens that wait for replicas
_TURN = 1.0  # seconds after which the requests of one kind make room for those of another
Make = Callable[[str, Mapping[str, Any]], Any]  # a task of a name and options


class RayModel(Model):
    """The client of a model of the cluster, which has so many replicas; it is made where need be."""

    def __init__(self, model: str, options: Mapping[str, Any], replicas: int = 1):
        ray = _ray()
        key = json.dumps([model, options, replicas], sort_keys=True, default=str)
        front = ray.remote(num_cpus=0, max_restarts=0, max_concurrency=_AT_ONCE)(_Front)
        name = f"prefold-{zlib.crc32(key.encode()):08x}"
        named = front.options(name=name, get_if_exists=True)
        self._actor = named.remote(_OnRay(model, dict(options), replicas, plugins()))

    def run_many(self, name: str, options: Mapping[str, Any], items: Sequence[Any]) -> list[Any]:
        return _ray().get(self._actor.run_many.remote(name, dict(options), list(items)))

    async def run_many_async(self, name: str, options: Mapping[str, Any], items: Sequence[Any]) -> list[Any]:
        """Returns what `run_many` does, and keeps no thread."""
        return await self._actor.run_many.remote(name, dict(options), list(items))

    def stats(self) -> dict[str, Any]:
        """Returns the counters of all replicas, as a mapping."""
        return _ray().get(self._actor.stats.remote())


@dataclass(frozen=True)
class _OnRay:
    """Makes the fleet of a model, and what makes its tasks. own: plugins of the driver."""

    model: str
    options: dict[str, Any]
    replicas: int
    own: Sequence[str]

    def __call__(self) -> tuple[Fleet, Make]:
        from ..cluster.ray_replicas import RayReplicas

        add_plugins(self.own)
        make, media = self.tasks()
        replicas = RayReplicas(self.model, {"threads": 1} | self.options, count=self.replicas, notify=_notify)
        sharing = self.options.get("sharing", "auto")
        return Fleet(replicas, sharing="full" if sharing == "auto" else sharing, notify=_notify, media=media), make

    def tasks(self) -> tuple[Make, Any]:
        """Returns what makes the tasks, and what gives their images ids; None for a model that takes text alone."""
        from ..checkpoint import resolve
        from ..model import config_from
        from ..text import tokenizer_or_none

        given = dict(self.options)
        tokenizer = given.pop("tokenizer", None)
        o = model_options(given)
        known = {"revision": o.revision, "load_format": o.load_format, "mmproj": o.images.mmproj}
        checkpoint = resolve(self.model, weights=False, **known)
        tokenizer = tokenizer_or_none(checkpoint) if tokenizer is None else tokenizer
        images = None
        if o.images.tower:
            config = config_from(checkpoint.config)
            images = config.image_inputs(checkpoint, tokenizer, hosts=o.images.allow_media_host)

        def make(name: str, options: Mapping[str, Any]) -> Any:
            adapters = tuple(o.adapters or ())
            return make_task(name, checkpoint, tokenizer, dict(options), adapters=adapters, images=images)

        return make, None if images is None else images.table


@dataclass(eq=False)
class _Batch:
    """The items of one call. left: requests without a result."""

    results: list[Any]
    left: int
    done: Future[None]


class _Lane:
    """The requests of one readout on their way to the fleet, which runs one readout at a time."""

    def __init__(self, task: Any, is_urgent: Callable[[_Lane], bool]):
        self.task = task
        self.feed = Feed(is_urgent=lambda: is_urgent(self))


class _Front:
    """The actor. open: returns a fleet, and what makes tasks of a name and options."""

    def __init__(self, open: Callable[[], tuple[Fleet, Make]]):
        self._open = open
        self._opened: Future[tuple[Fleet, Make]] = Future()
        self._opened.set_running_or_notify_cancel()  # so that no caller can cancel it
        self._tasks: dict[str, asyncio.Task[Any]] = {}
        self._numbers = itertools.count()
        self._lanes: list[_Lane] = []
        self._open_requests: dict[bytes, tuple[_Batch, int, int]] = {}
        self._failure: Exception | None = None
        self._changed = threading.Condition()
        self._began = 0.0  # when the run of a lane did
        threading.Thread(target=self._drive, name="prefold-front", daemon=True).start()

    # ---------------------------------------------------------------------------------------- calls of others

    async def run_many(self, name: str, options: dict[str, Any], items: list[Any]) -> list[Any]:
        key = json.dumps([name, options], sort_keys=True, default=str)
        if key not in self._tasks:
            self._tasks[key] = asyncio.create_task(self._make(name, options))
        return await self._run(await asyncio.shield(self._tasks[key]), items)

    async def stats(self) -> dict[str, Any]:
        fleet, _ = await asyncio.wrap_future(self._opened)
        return fleet.stats.to_dict()

    async def _make(self, name: str, options: dict[str, Any]) -> Any:
        """Returns a task, calibrated where it asks for that."""
        _, make = await asyncio.wrap_future(self._opened)
        task = await asyncio.to_thread(make, name, options)
        items = task.calibration_items()
        return calibrated_by(task, await self._run(task, items)) if items else task

    async def _run(self, task: Any, items: Sequence[Any]) -> list[Any]:
        works = await asyncio.to_thread(task.prepare, items)
        batch = self._put(task, works)
        await asyncio.wrap_future(batch.done)
        return await asyncio.to_thread(finish_items, task, works, batch.results)

    def _put(self, task: Any, works: Sequence[Any]) -> _Batch:
        """Puts requests on their way; returns what will have their results."""
        counts = [0 if isinstance(work, InputError) else len(work.requests) for work in works]
        batch = _Batch([[None] * count for count in counts], sum(counts), Future())
        batch.done.set_running_or_notify_cancel()
        if not batch.left:
            batch.done.set_result(None)
            return batch
        with self._changed:
            if self._failure is not None:
                raise self._failure
            lane = next((one for one in self._lanes if one.task.readout == task.readout), None)
            if lane is None:
                self._lanes.append(lane := _Lane(task, self._is_over))
            seed = draw_seed()
            for number, work in enumerate(works):
                reads = []
                for part in range(counts[number]):
                    tag = next(self._numbers).to_bytes(8, "little")
                    self._open_requests[tag] = batch, number, part
                    reads.append((with_seed(work.requests[part], seed, number, part), tag))
                if reads:
                    lane.feed.put(reads)
            self._changed.notify()
        return batch

    # ------------------------------------------------------------------------------------------ in the thread

    def _drive(self) -> None:
        """Runs the requests of one lane after the other, as long as the actor lives."""
        try:
            opened = self._open()
            self._opened.set_result(opened)
        except Exception as error:
            self._opened.set_exception(error if isinstance(error, PrefoldError) else JobError(repr(error)))
            return
        fleet, _ = opened
        while True:
            with self._changed:
                self._changed.wait_for(lambda: any(map(_waits, self._lanes)))
                lane = next(filter(_waits, self._lanes))
                self._lanes.remove(lane)  # the others come first next time
                self._lanes.append(lane)
            self._began = time.monotonic()
            try:
                for tag, answer in results_of(fleet, lane.task, LiveInput(lane.feed, _WINDOW)):  # type: ignore[arg-type]
                    self._answer(tag, answer)
            except Exception as error:
                self._fail(error)

    def _is_over(self, lane: _Lane) -> bool:
        """Returns whether the run of a lane should come to its end, as another lane waits. Otherwise it goes on, though
        nothing is asked: only a run hears of replicas."""
        others = any(_waits(other) for other in tuple(self._lanes) if other is not lane)
        return others and time.monotonic() - self._began > _TURN

    def _answer(self, tag: bytes, answer: Any) -> None:
        batch, number, part = self._open_requests.pop(tag)
        batch.results[number][part] = answer
        batch.left -= 1
        if not batch.left:
            batch.done.set_result(None)

    def _fail(self, error: Exception) -> None:
        """Ends all calls that wait with an error, and where no replica is left all that come."""
        reason = error if isinstance(error, PrefoldError) else JobError(f"the fleet has failed: {error!r}")
        with self._changed:
            self._failure = reason if isinstance(error, FleetError) else None
            for lane in self._lanes:
                while lane.feed.take() is not None:
                    pass
            batches = {id(batch): batch for batch, _, _ in self._open_requests.values()}
            self._open_requests.clear()
        for batch in batches.values():
            batch.done.set_exception(reason)


def _waits(lane: _Lane) -> bool:
    return lane.feed.since is not None


def _notify(line: str) -> None:
    print(f"prefold: {line}", file=sys.stderr, flush=True)


def _ray() -> Any:
    try:
        import ray
    except ImportError:
        raise MissingExtraError("ray", "ray", "a model on Ray") from None
    return ray
