"""A model of a Ray cluster that all its processes find by name: one actor that stands in front, and replicas behind it.

Whoever makes the front owns it, and it owns the replicas, so all of them end with the driver. The front gives each item
to the replica that would begin with it first, by the router, which is fed with the bytes of items in place of their
tokens. What a replica had when it was lost is given to others again, one item at a time; an item that was there when
two were lost is given up.
"""

from __future__ import annotations

import asyncio
import json
import threading
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..cluster.router import Prompt, Router
from ..errors import InputError, MissingExtraError
from .shared import SharedModel

__all__ = ["RayModel"]

_AT_ONCE = 1000  # calls that an actor answers at once
_LONGEST = 1 << 14  # bytes of an item that the router looks at
_models: dict[str, RayModel] = {}
_lock = threading.Lock()
_OUTPUT = 64  # tokens that an item is thought to generate, where nothing says how many


class RayModel:
    """The client of a model. key: names it; replicas: how many there are of it."""

    @classmethod
    def of(cls, model: str, options: Mapping[str, Any], replicas: int = 1) -> RayModel:
        """Returns the model of the cluster with these options; it is made where need be, and kept by this process."""
        key = json.dumps([model, options, replicas], sort_keys=True, default=str)
        with _lock:
            if key not in _models:
                _models[key] = cls(key, model, options, replicas)
            return _models[key]

    def __init__(self, key: str, model: str, options: Mapping[str, Any], replicas: int = 1):
        ray = _ray()
        front = ray.remote(num_cpus=0, max_restarts=0, max_concurrency=_AT_ONCE)(_Front)
        name = f"prefold-{zlib.crc32(key.encode()):08x}"
        self._actor = front.options(name=name, get_if_exists=True).remote(model, dict(options), replicas)

    async def run_one(self, name: str, options: Mapping[str, Any], item: Any) -> Any:
        """Returns what a task gives for an item, or its InputError."""
        return await self._actor.run_one.remote(name, dict(options), item)

    def run_many(self, name: str, options: Mapping[str, Any], items: Sequence[Any]) -> list[Any]:
        """Returns what a task gives for each item, or the item's InputError."""
        return _ray().get(self._actor.run_many.remote(name, dict(options), list(items)))

    async def run_many_async(self, name: str, options: Mapping[str, Any], items: Sequence[Any]) -> list[Any]:
        """Returns what `run_many` does."""
        return await self._actor.run_many.remote(name, dict(options), list(items))

    def stats(self) -> dict[str, Any]:
        """Returns the counters of all replicas, as a mapping."""
        return _ray().get(self._actor.stats.remote())


class _Front:
    """The process that knows the replicas."""

    def __init__(self, model: str, options: dict[str, Any], replicas: int):
        ray = _ray()
        gpus = 1 if str(options.get("device", "auto")).startswith("cuda") else 0
        if options.get("device", "auto") == "auto" and ray.cluster_resources().get("GPU"):
            gpus = 1
        beside = {"num_gpus": gpus, "num_cpus": 0 if gpus else options.get("threads") or 1}
        actor = ray.remote(max_restarts=-1, max_task_retries=0, max_concurrency=_AT_ONCE, **beside)(_Replica)
        self._replicas = [actor.remote(model, options) for _ in range(replicas)]
        self._router = Router()
        for number in range(replicas):
            self._router.join(number, reports=False)
        self._keys = 0
        self._lives = [0] * replicas  # how often each was lost
        self._alone = [asyncio.Lock() for _ in range(replicas)]  # who runs under suspicion

    async def run_one(self, name: str, options: dict[str, Any], item: Any) -> Any:
        (answer,) = await self.run_many(name, options, [item])
        return answer

    async def run_many(self, name: str, options: dict[str, Any], items: list[Any]) -> list[Any]:
        texts = [_text(item) for item in items]
        limit = int(options.get("max_tokens") or _OUTPUT) if name == "generate" else 0
        parts: dict[int, list[int]] = {}
        keys: dict[int, int] = {}
        for i in sorted(range(len(items)), key=texts.__getitem__):
            keys[i], replica = self._send(texts[i], limit)
            parts.setdefault(replica, []).append(i)
        answers: list[Any] = [None] * len(items)

        async def run(replica: int, some: list[int]) -> None:
            found = await self._ask(replica, name, options, [items[i] for i in some])
            for i, answer in zip(some, found or [None] * len(some), strict=True):
                self._end(keys[i], answer)
                answers[i] = answer if found else await self._again(name, options, items[i])

        await asyncio.gather(*(run(*part) for part in parts.items()))
        return answers

    def _send(self, text: bytes, limit: int) -> tuple[int, int]:
        """Returns (a key, the replica that is to get the item)."""
        prompt = Prompt(np.frombuffer(text, np.uint8).astype(np.int32), limit)
        replica = self._router.choose(prompt)
        assert isinstance(replica, int)
        self._keys += 1
        self._router.send(self._keys, prompt, replica)
        return self._keys, replica

    def _end(self, key: int, answer: Any) -> None:
        if key in self._router.in_flight:
            made = answer.get("num_generated", 0) if isinstance(answer, dict) else None
            self._router.end(key, output_rows=made)

    async def _ask(self, replica: int, name: str, options: dict[str, Any], items: list[Any]) -> list[Any] | None:
        """Returns a replica's answers, None where it was lost. Ray starts it anew; what it held is forgotten."""
        from ray.exceptions import RayActorError

        life = self._lives[replica]
        try:
            return await self._replicas[replica].run_many.remote(name, options, items)
        except RayActorError:
            if self._lives[replica] == life:  # the first call that says so
                self._lives[replica] += 1
                self._router.leave(replica)
                self._router.join(replica, reports=False)
            return None

    async def _again(self, name: str, options: dict[str, Any], item: Any) -> Any:
        """Returns the answer to an item whose replica was lost; the error of one that another is lost with."""
        key, replica = self._send(_text(item), 0)
        async with self._alone[replica]:
            found = await self._ask(replica, name, options, [item])
        self._end(key, found and found[0])
        if found is not None:
            return found[0]
        remedy = "see what is unusual about the row, or run it again by itself"
        return InputError("two replicas were lost while they worked on it", remedy=remedy, code="replicas_lost")

    async def stats(self) -> dict[str, Any]:
        return _added(await asyncio.gather(*(replica.stats.remote() for replica in self._replicas)))


class _Replica:
    """The process that holds a model."""

    def __init__(self, model: str, options: dict[str, Any]):
        self._model = SharedModel(model, {"threads": 1} | options)

    async def run_many(self, name: str, options: dict[str, Any], items: list[Any]) -> list[Any]:
        if name == "generate":
            return list(await asyncio.gather(*(self._model.run_one(name, options, item) for item in items)))
        return await asyncio.to_thread(self._model.run_many, name, options, items)

    async def stats(self) -> dict[str, Any]:
        return self._model.stats()


def _text(item: Any) -> bytes:
    """Returns an item as bytes, at least one: items that begin alike begin alike."""
    return json.dumps(item, default=str).encode()[:_LONGEST] or b"-"


def _added(found: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns the sums of counters, by name."""
    out: dict[str, Any] = {}
    for name, value in found[0].items():
        values = [one[name] for one in found]
        if isinstance(value, Mapping):
            out[name] = _added([one or {} for one in values])
        elif isinstance(value, (int, float)):
            numbers = [one or 0 for one in values]
            out[name] = max(numbers) if name.endswith("_peak") else sum(numbers)
        else:
            out[name] = value
    return out


def _ray() -> Any:
    try:
        import ray
    except ImportError:
        raise MissingExtraError("ray", "ray", "a model on Ray") from None
    return ray
