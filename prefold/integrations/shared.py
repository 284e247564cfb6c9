"""A model that many callers have together, for functions on columns of data frames.

model = SharedModel.of("smollm2-135m", {"threads": 4})       one for a process, made at the first call
model = RayModel.of("smollm2-135m", {"threads": 4}, 2)       one for a Ray cluster, with 2 replicas
answer = await model.run_one("generate", {...}, item)        joins what others ask for at the same time
answers = model.run_many("embed", {...}, items)              an answer, or an InputError, for each item
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
from functools import partial
from typing import Any, Self

from ..cluster.fleet import Fleet
from ..errors import FleetError, InputError, JobError, MissingExtraError, PrefoldError, record_error
from ..model_options import ModelOptions, model_options
from ..options import OPTIONS
from ..plugins import add_plugins, plugins
from ..stream import Feed, LiveInput
from ..tasks import make_task
from ..tasks.run import calibrated, calibrated_by, draw_seed, finish, finish_items, results_of, run_items, with_seed
from ..types import Readout

# What is both, such as a seed, is a task's.
LLM_OPTIONS = {"tokenizer", *ModelOptions.__dataclass_fields__}
LLM_OPTIONS -= {name for kind in OPTIONS.values() for name in kind.__dataclass_fields__}
_models: dict[str, Any] = {}
_lock = threading.Lock()
_AT_ONCE = 1000  # calls that the actor answers at once
_WINDOW = 1 << 20  # tokens that wait for replicas
_TURN = 1.0  # seconds after which the requests of one kind make room for those of another
Make = Callable[[str, Mapping[str, Any]], Any]  # a task of a name and options


def split_options(options: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns (keywords of `LLM`, all other options). Raises InputError for a cache of approximate results, which
    columns do not tell from others."""
    own = {name: value for name, value in options.items() if name in LLM_OPTIONS}
    if getattr(own.get("cache"), "shifted", None) is not None:
        message = "chunks are to be reused at other positions, and columns do not say which results are approximate"
        raise InputError(message, field="cache", remedy="leave `shifted` out of the CacheOptions")
    return own, {name: value for name, value in options.items() if name not in own}


class Model:
    """Runs tasks on a model that many callers share."""

    @classmethod
    def of(cls, *arguments: Any) -> Self:
        """Returns the model made of these arguments, which this process makes where need be, and keeps."""
        key = json.dumps([cls.__name__, *arguments], sort_keys=True, default=str)
        with _lock:
            if key not in _models:
                _models[key] = cls(*arguments)
            return _models[key]

    def run_many(self, name: str, options: Mapping[str, Any], items: Sequence[Any]) -> list[Any]:
        """Returns what a task gives for each item, or the item's InputError."""
        raise NotImplementedError

    async def run_many_async(self, name: str, options: Mapping[str, Any], items: Sequence[Any]) -> list[Any]:
        """Returns what `run_many` does, which runs in a thread."""
        return await asyncio.to_thread(self.run_many, name, options, items)

    async def run_one(self, name: str, options: Mapping[str, Any], item: Any) -> Any:
        """Returns what a task gives for an item, or its InputError."""
        (answer,) = await self.run_many_async(name, options, [item])
        return answer


class SharedModel(Model):
    """Runs tasks on an LLM of this process. Any thread and any event loop may call it."""

    def __init__(self, model: str, options: Mapping[str, Any]):
        from ..llm import LLM

        self._llm = LLM(model, **options)
        self._tasks: dict[str, Any] = {}
        self._tasks_lock = threading.Lock()

    def _task(self, name: str, options: Mapping[str, Any]) -> Any:
        """Returns the task with these options, which is made once."""
        key = json.dumps([name, options], sort_keys=True, default=str)
        with self._tasks_lock:
            if key not in self._tasks:
                llm = self._llm
                beside = {"adapters": llm.engine.adapters, "images": llm.images}
                made = make_task(name, llm.checkpoint, llm.tokenizer, dict(options), **beside)
                self._tasks[key] = calibrated(llm.engine, made)
            return self._tasks[key]

    def run_many(self, name: str, options: Mapping[str, Any], items: Sequence[Any]) -> list[Any]:
        return run_items(self._llm.engine, self._task(name, options), items)

    async def run_one(self, name: str, options: Mapping[str, Any], item: Any) -> Any:
        """Returns what a task gives for an item, or its InputError. Text of all callers is generated together."""
        if name != "generate":
            return await super().run_one(name, options, item)
        task = await asyncio.to_thread(self._task, name, options)
        (work,) = await asyncio.to_thread(task.prepare, [item])
        if isinstance(work, InputError):
            return work
        try:
            samples: Any = None
            async for event in self._llm.engine.astream(work.requests[0], self._llm.tokenizer, text=False):
                samples = event
            return finish(task, work.note, [samples])
        except Exception as error:
            return record_error(error)

    def stats(self) -> dict[str, Any]:
        """Returns the counters of the model, as a mapping."""
        return self._llm.stats.to_dict()


# ------------------------------------------------------------------------------------- a model of a Ray cluster


class RayModel(Model):
    """The client of a model of a Ray cluster, which has so many replicas, and which all its processes find by name.

    It is an actor with a fleet, whose replicas are on Ray too. The driver that makes the actor owns it, and it owns the
    replicas, so all of them end with the driver. Items come to it from any process; it makes requests of them, and
    those of all callers go to the replicas as a stream.
    """

    def __init__(self, model: str, options: Mapping[str, Any], replicas: int = 1):
        try:
            import ray
        except ImportError:
            raise MissingExtraError("ray", "ray", "a model on Ray") from None
        self._ray = ray
        key = json.dumps([model, options, replicas], sort_keys=True, default=str)
        front = ray.remote(num_cpus=0, max_restarts=0, max_concurrency=_AT_ONCE)(_Front)
        named = front.options(name=f"prefold-{zlib.crc32(key.encode()):08x}", get_if_exists=True)
        self._actor = named.remote(partial(_open_on_ray, model, dict(options), replicas, plugins()))

    def run_many(self, name: str, options: Mapping[str, Any], items: Sequence[Any]) -> list[Any]:
        return self._ray.get(self._actor.run_many.remote(name, dict(options), list(items)))

    async def run_many_async(self, name: str, options: Mapping[str, Any], items: Sequence[Any]) -> list[Any]:
        """Returns what `run_many` does, and keeps no thread."""
        return await self._actor.run_many.remote(name, dict(options), list(items))

    def stats(self) -> dict[str, Any]:
        """Returns the counters of all replicas, as a mapping."""
        return self._ray.get(self._actor.stats.remote())


def _open_on_ray(model: str, options: dict[str, Any], count: int, own: Sequence[str]) -> tuple[Fleet, Make]:
    """Returns the fleet of a model, and what makes its tasks. own: plugins of the driver."""
    from ..cluster.ray_replicas import RayReplicas

    add_plugins(own)
    make, media = tasks_of(model, options)
    replicas = RayReplicas(model, {"threads": 1} | options, count=count, notify=_notify)
    sharing = options.get("sharing", "auto")
    return Fleet(replicas, sharing="full" if sharing == "auto" else sharing, notify=_notify, media=media), make


def tasks_of(model: str, options: Mapping[str, Any]) -> tuple[Make, Any]:
    """Returns what makes the tasks of a model that runs elsewhere, and what gives their images ids; None for a model
    that takes text alone."""
    from ..checkpoint import resolve
    from ..model import config_from
    from ..text import tokenizer_or_none

    options = dict(options)
    tokenizer = options.pop("tokenizer", None)
    o = model_options(options)
    known = {"revision": o.revision, "load_format": o.load_format, "mmproj": o.images.mmproj}
    checkpoint = resolve(model, weights=False, **known, context_length=o.context_length)
    tokenizer = tokenizer_or_none(checkpoint) if tokenizer is None else tokenizer
    images = None
    if o.images.tower:
        config = config_from(checkpoint.config)
        images = config.image_inputs(checkpoint, tokenizer, hosts=o.images.allow_media_host)
    beside = {"adapters": tuple(o.adapters or ()), "images": images}

    def make(name: str, options: Mapping[str, Any]) -> Any:
        return make_task(name, checkpoint, tokenizer, dict(options), **beside)

    return make, None if images is None else images.table


class _Front:
    """The actor. open: returns a fleet, and what makes tasks of a name and options."""

    def __init__(self, open: Callable[[], tuple[Fleet, Make]]):
        self._open = open
        self._opened: Future[tuple[Fleet, Make]] = Future()
        self._opened.set_running_or_notify_cancel()  # so that no caller can cancel it
        self._tasks: dict[str, asyncio.Task[Any]] = {}
        self._numbers = itertools.count()
        # A task of each read-out, and the requests: the fleet runs those of one read-out at a time.
        self._lanes: dict[Readout, tuple[Any, Feed]] = {}
        self._answers: dict[bytes, Future[Any]] = {}  # of requests without an answer, by tag
        self._failure: Exception | None = None
        self._changed = threading.Condition()
        self._began = 0.0  # when the run did
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
        answers = [await asyncio.gather(*map(asyncio.wrap_future, some)) for some in self._put(task, works)]
        return await asyncio.to_thread(finish_items, task, works, answers)

    def _put(self, task: Any, works: Sequence[Any]) -> list[list[Future[Any]]]:
        """Puts the requests of each work on their way; returns what will have their answers."""
        seed, out = draw_seed(), []
        with self._changed:
            if self._failure is not None:
                raise self._failure
            if task.readout not in self._lanes:
                self._lanes[task.readout] = task, Feed(is_urgent=partial(self._is_over, task.readout))
            _, feed = self._lanes[task.readout]
            for number, work in enumerate(works):
                reads, answers = [], []
                for part, request in enumerate([] if isinstance(work, InputError) else work.requests):
                    answer: Future[Any] = Future()
                    answer.set_running_or_notify_cancel()
                    answers.append(answer)
                    tag = next(self._numbers).to_bytes(8, "little")
                    self._answers[tag] = answer
                    reads.append((with_seed(request, seed, number, part), tag))
                if reads:
                    feed.put(reads)
                out.append(answers)
            self._changed.notify()
        return out

    # ------------------------------------------------------------------------------------------ in the thread

    def _drive(self) -> None:
        """Runs the requests of one read-out after the other, as long as the actor lives."""
        try:
            opened = self._open()
            self._opened.set_result(opened)
        except Exception as error:
            self._opened.set_exception(error if isinstance(error, PrefoldError) else JobError(repr(error)))
            return
        fleet, _ = opened
        while True:
            with self._changed:
                readout = self._changed.wait_for(self._waiting)[0]
                task, feed = self._lanes[readout] = self._lanes.pop(readout)  # the others come first next time
            self._began = time.monotonic()
            try:
                for tag, answer in results_of(fleet, task, LiveInput(feed, _WINDOW)):  # type: ignore[arg-type]
                    self._answers.pop(tag).set_result(answer)
            except Exception as error:
                self._fail(error)

    def _waiting(self) -> list[Readout]:
        return [readout for readout, (_, feed) in tuple(self._lanes.items()) if feed.since is not None]

    def _is_over(self, readout: Readout) -> bool:
        """Returns whether the run of a read-out should come to its end, as requests of another wait. Otherwise it goes
        on, though nothing is asked: only a run hears of replicas."""
        return time.monotonic() - self._began > _TURN and any(other != readout for other in self._waiting())

    def _fail(self, error: Exception) -> None:
        """Ends all calls that wait with an error, and where no replica is left all that come."""
        reason = error if isinstance(error, PrefoldError) else JobError(f"the fleet has failed: {error!r}")
        with self._changed:
            self._failure = reason if isinstance(error, FleetError) else None
            for _, feed in self._lanes.values():
                while feed.take() is not None:
                    pass
            answers, self._answers = self._answers, {}
        for answer in answers.values():
            answer.set_exception(reason)


def _notify(line: str) -> None:
    print(f"prefold: {line}", file=sys.stderr, flush=True)
