"""A model that many callers of a process have together, for functions on columns of data frames.

    model = SharedModel.of("smollm2-135m", {"threads": 4})       one for a process, made at the first call
    answer = await model.run_one("generate", {...}, item)        joins what others ask for at the same time
    answers = model.run_many("embed", {...}, items)              an answer, or an InputError, for each item

`on_ray.py` has the same for the processes of a cluster.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Mapping, Sequence
from typing import Any, Self

from ..errors import InputError, record_error
from ..model_options import ModelOptions
from ..options import OPTIONS

# What is both, such as a seed, is a task's.
LLM_OPTIONS = {"tokenizer", *ModelOptions.__dataclass_fields__}
LLM_OPTIONS -= {name for kind in OPTIONS.values() for name in kind.__dataclass_fields__}
_models: dict[str, Any] = {}
_lock = threading.Lock()


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
    def of(cls, *what: Any) -> Self:
        """Returns the model made of these arguments, which this process makes where need be, and keeps."""
        key = json.dumps([cls.__name__, *what], sort_keys=True, default=str)
        with _lock:
            if key not in _models:
                _models[key] = cls(*what)
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
        from ..tasks import make_task
        from ..tasks.run import calibrated

        key = json.dumps([name, options], sort_keys=True, default=str)
        with self._tasks_lock:
            if key not in self._tasks:
                llm = self._llm
                beside = {"adapters": llm.engine.adapters, "images": llm.images}
                made = make_task(name, llm.checkpoint, llm.tokenizer, dict(options), **beside)
                self._tasks[key] = calibrated(llm.engine, made)
            return self._tasks[key]

    def run_many(self, name: str, options: Mapping[str, Any], items: Sequence[Any]) -> list[Any]:
        from ..tasks.run import run_items

        return run_items(self._llm.engine, self._task(name, options), items)

    async def run_one(self, name: str, options: Mapping[str, Any], item: Any) -> Any:
        """Returns what a task gives for an item, or its InputError. Text of all callers is generated together."""
        from ..tasks.run import finish

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
