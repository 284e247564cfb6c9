"""Models that many callers share, for functions on columns of data frames.

model = SharedModel.of("smollm2-135m", {"threads": 4})       one per process, loaded at the first call
model = RayModel.of("smollm2-135m", {"threads": 4}, 2)       one per Ray cluster, with 2 replicas
answer = await model.run_one("generate", {...}, item)        runs together with other callers' items
answers = model.run_many("embed", {...}, items)              an answer or an InputError for each item
"""

from __future__ import annotations

import asyncio
import json
import sys
import threading
import zlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, Self

from ..api.streams import ResponseStream
from ..cluster.fleet import Fleet
from ..engine.protocol import Engine
from ..errors import InputError, JobError, MissingExtraError, PrefoldError, record_error
from ..spec.environment import plugins
from ..spec.model import ModelSpec, model_options
from ..spec.plugins import add_plugins
from ..spec.task import OPTIONS
from ..tasks import make_task
from ..tasks.make import own_adapters
from ..tasks.results import Answer
from ..tasks.run import calibrated, finish_items, run_items, seed_of, with_seed

# A name that is also an option of a task, such as `seed`, is passed to the task.
LLM_OPTIONS = {"tokenizer", *ModelSpec.__dataclass_fields__}
LLM_OPTIONS -= {name for kind in OPTIONS.values() for name in kind.__dataclass_fields__}
_models: dict[str, Any] = {}
_lock = threading.Lock()
_AT_ONCE = 1000  # maximum number of calls that the actor answers concurrently
Make = Callable[[str, Mapping[str, Any]], Any]  # make(name, options) -> a task


def split_options(options: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return (keywords of `LLM`, all other options).

    Raise InputError for a cache with approximate results, because columns cannot mark them.
    """
    llm_options = {name: value for name, value in options.items() if name in LLM_OPTIONS}
    if getattr(llm_options.get("cache"), "shifted", None) is not None:
        message = "the cache reuses chunks at other positions, but columns cannot say which results are approximate"
        raise InputError(message, field="cache", remedy="leave `shifted` out of the CacheOptions")
    return llm_options, {name: value for name, value in options.items() if name not in llm_options}


class Model:
    """A model that runs tasks for many callers."""

    @classmethod
    def of(cls, *arguments: Any) -> Self:
        """Return the process's model for these arguments. The first call makes it."""
        key = json.dumps([cls.__name__, *arguments], sort_keys=True, default=str)
        with _lock:
            if key not in _models:
                _models[key] = cls(*arguments)
            return _models[key]

    def run_many(self, name: str, options: Mapping[str, Any], items: Sequence[Any]) -> list[Any]:
        """Return a task's answer to each item, or the item's InputError."""
        raise NotImplementedError

    async def run_many_async(self, name: str, options: Mapping[str, Any], items: Sequence[Any]) -> list[Any]:
        """Return a task's answer to each item, or the item's InputError. The work runs in a thread."""
        return await asyncio.to_thread(self.run_many, name, options, items)

    async def run_one(self, name: str, options: Mapping[str, Any], item: Any) -> Any:
        """Return a task's answer to an item, or its InputError."""
        (answer,) = await self.run_many_async(name, options, [item])
        return answer


class Tasks:
    """The tasks of a model, each made once, on an engine.

    Args:
        make: make(name, options) -> a task.
    """

    def __init__(self, engine: Engine, make: Make):
        self.engine, self._make = engine, make
        self._tasks: dict[str, Any] = {}
        self._lock = threading.Lock()

    def task(self, name: str, options: Mapping[str, Any]) -> Any:
        """Return the task with these options. If it asks for calibration, calibrate it first, which may be slow."""
        key = json.dumps([name, options], sort_keys=True, default=str)
        with self._lock:
            if key not in self._tasks:
                self._tasks[key] = calibrated(self.engine, self._make(name, options))
            return self._tasks[key]

    async def run(self, name: str, options: Mapping[str, Any], items: Sequence[Any]) -> list[Any]:
        """Return a task's answer to each item, or the item's InputError.

        The requests run together with other callers' requests. Cancelling the caller cancels its requests.
        """
        task, works = await asyncio.to_thread(self._prepared, name, options, items)
        loop = asyncio.get_running_loop()
        replies = [
            None if isinstance(work, InputError) or not work.requests else ResponseStream(loop, 0) for work in works
        ]
        try:
            await asyncio.to_thread(self._submit, task, works, replies)
            results = [[] if reply is None else await _results_of(task, reply) for reply in replies]
        finally:
            self.engine.cancel(*filter(None, replies))
        return await asyncio.to_thread(finish_items, task, works, results)

    def _prepared(self, name: str, options: Mapping[str, Any], items: Sequence[Any]) -> tuple[Any, Sequence[Any]]:
        task = self.task(name, options)
        return task, task.prepare(items)

    def _submit(self, task: Any, works: Sequence[Any], replies: Sequence[ResponseStream | None]) -> None:
        seed = seed_of(task)
        is_new = getattr(task, "seed", None) is None
        for number, (work, reply) in enumerate(zip(works, replies, strict=True)):
            if reply is not None:
                # The row's number in its table is unknown here. If the table has a seed, a hash of the row's tokens
                # replaces the number.
                requests = [
                    with_seed(request, seed, number if is_new else zlib.crc32(request.tokens.tobytes()), part)
                    for part, request in enumerate(work.requests)
                ]
                self.engine.submit(requests, task.readout, reply, task.inputs.tokenizer)


async def _results_of(task: Any, reply: ResponseStream) -> list[Any]:
    """Return the results of an item's requests, or their error as the only result."""
    try:
        answer = await reply.answer()
    except Exception as error:
        return [record_error(error)]
    return [answer] if task.readout.kind == "tokens" else list(answer)


class SharedModel(Model):
    """A model that runs tasks on an LLM of this process. Any thread and any event loop may call it."""

    def __init__(self, model: str, options: Mapping[str, Any]):
        from ..llm import LLM

        self._llm = llm = LLM(model, **options)
        further = {"adapters": llm.engine.facts.adapters, "images": llm.images, "config": llm.config}
        make: Make = lambda name, options: make_task(name, llm.checkpoint, llm.tokenizer, dict(options), **further)  # noqa: E731
        self._tasks = Tasks(llm.engine, make)

    def example(self, name: str, options: Mapping[str, Any]) -> Answer:
        """Return an example answer of a task, which has the names of its columns."""
        return self._tasks.task(name, options).example

    def run_many(self, name: str, options: Mapping[str, Any], items: Sequence[Any]) -> list[Any]:
        return run_items(self._llm.engine, self._tasks.task(name, options), items)

    async def run_one(self, name: str, options: Mapping[str, Any], item: Any) -> Any:
        """Return a task's answer to an item, or its InputError.

        Text is generated together for all callers. Embeddings and scores run as a row stream, which is faster.
        """
        if name != "generate":
            return await super().run_one(name, options, item)
        (answer,) = await self._tasks.run(name, options, [item])
        return answer

    def stats(self) -> dict[str, Any]:
        """Return the counters of the model."""
        return self._llm.stats.to_dict()


# ------------------------------------------------------------------------------------- a model on a Ray cluster


class RayModel(Model):
    """The client of a model on a Ray cluster: a named actor with a fleet of replicas.

    The driver that makes the actor owns it, and the actor owns the replicas, so all of them end with the driver. Any
    process may send items to the actor. The requests of all callers go to the replicas as one stream.
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
        """Return a task's answer to each item, or the item's InputError. No thread waits for it."""
        return await self._actor.run_many.remote(name, dict(options), list(items))

    def stats(self) -> dict[str, Any]:
        """Return the counters of all replicas together."""
        return self._ray.get(self._actor.stats.remote())


def _open_on_ray(model: str, options: dict[str, Any], count: int, own: Sequence[str]) -> Tasks:
    """Return the tasks of a model on a fleet.

    Args:
        own: Plugins of the driver.
    """
    from ..cluster.ray_replicas import RayReplicas

    add_plugins(own)
    make, media = tasks_of(model, options)
    replicas = RayReplicas(model, {"threads": 1} | options, count=count, notify=_notify)
    sharing = options.get("sharing", "auto")
    return Tasks(Fleet(replicas, sharing="full" if sharing == "auto" else sharing, notify=_notify, media=media), make)


def tasks_of(model: str, options: Mapping[str, Any]) -> tuple[Make, Any]:
    """Return (a function that makes the tasks of a model that runs elsewhere, the MediaTable of its images).

    The table is None for a model that takes text alone.
    """
    from ..checkpoint import resolve
    from ..model import config_from
    from ..text import tokenizer_or_none

    options = dict(options)
    tokenizer = options.pop("tokenizer", None)
    o = model_options(options)
    source = {"revision": o.revision, "load_format": o.load_format, "mmproj": o.images.mmproj}
    checkpoint = resolve(model, weights=False, **source, context_length=o.context_length)
    tokenizer = tokenizer_or_none(checkpoint) if tokenizer is None else tokenizer
    images = None
    if o.images.tower:
        config = config_from(checkpoint.config)
        images = config.image_inputs(checkpoint, tokenizer, hosts=o.images.allow_media_host)
    further = {"adapters": tuple(own_adapters(checkpoint, tokenizer, o.adapters)), "images": images}

    def make(name: str, options: Mapping[str, Any]) -> Any:
        return make_task(name, checkpoint, tokenizer, dict(options), **further)

    return make, None if images is None else images.table


class _Front:
    """The actor of a RayModel. It opens the model in a thread.

    Args:
        open: Returns the model's tasks.
    """

    def __init__(self, open: Callable[[], Tasks]):
        self._tasks: Future[Tasks] = Future()
        self._tasks.set_running_or_notify_cancel()  # prevents callers from cancelling it
        threading.Thread(target=self._open, args=(open,), name="prefold-front", daemon=True).start()

    def _open(self, open: Callable[[], Tasks]) -> None:
        try:
            self._tasks.set_result(open())
        except Exception as error:
            self._tasks.set_exception(error if isinstance(error, PrefoldError) else JobError(repr(error)))

    async def run_many(self, name: str, options: dict[str, Any], items: list[Any]) -> list[Any]:
        tasks = await asyncio.wrap_future(self._tasks)
        return await tasks.run(name, options, items)

    async def stats(self) -> dict[str, Any]:
        tasks = await asyncio.wrap_future(self._tasks)
        return tasks.engine.snapshot().stats.to_dict()


def _notify(line: str) -> None:
    print(f"prefold: {line}", file=sys.stderr, flush=True)
