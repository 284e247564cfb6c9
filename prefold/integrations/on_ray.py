"""A model of a Ray cluster that all its processes find by name: one actor that stands in front, and replicas behind it.

Whoever makes the front owns it, and it owns the replicas, so all of them end with the driver. The front gives each item
to the replica that would begin with it first, by the router, which is fed with the bytes of items in place of their
tokens. What a replica had when it was lost is given to others again, in groups beside which no other group runs (see
`divided`); an item with which alone a second replica is lost is given up. A replica that Ray starts anew gets nothing
until its model is loaded and it answers.
"""

from __future__ import annotations

import asyncio
import json
import threading
import uuid
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..cluster.leases import divided
from ..cluster.router import Prompt, Router
from ..errors import InputError, JobError, MissingExtraError
from ..plugins import add_plugins, plugins
from .shared import SharedModel

__all__ = ["RayModel"]

_AT_ONCE = 1000  # calls that an actor answers at once
_LONGEST = 1 << 14  # bytes of an item that the router looks at
_models: dict[str, RayModel] = {}
_lock = threading.Lock()
_OUTPUT = 64  # tokens that an item is thought to generate, where nothing says how many
_PAUSE = 1.0  # seconds before a replica that does not answer is asked again
_TRIES = 5  # of a replica of which Ray says that it has died, and not that it is started anew


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


def _actors(model: str, options: dict[str, Any], replicas: int) -> list[Any]:
    """Returns the replicas, each with the GPUs or CPUs of all its ranks."""
    ray = _ray()
    device, ranks = str(options.get("device", "auto")), options.get("tensor_parallel") or 1
    on_gpu = device.startswith("cuda") or (device == "auto" and ray.cluster_resources().get("GPU"))
    threads = options.get("threads") or 1
    place = {"num_gpus": ranks, "num_cpus": 0} if on_gpu else {"num_gpus": 0, "num_cpus": threads * ranks}
    actor = ray.remote(max_restarts=-1, max_task_retries=0, max_concurrency=_AT_ONCE, **place)(_Replica)
    return [actor.remote(model, options, plugins()) for _ in range(replicas)]


@dataclass(eq=False)
class _Member:
    """A replica, as the front knows it.

    life     names its process: one that was started anew has another; None: it has not been asked yet
    meeting  waits for it to answer, while it gets no items, and returns whether its process has ended
    gone     why it does not come back
    alone    held by a group of items that were there when another replica was lost
    """

    actor: Any
    life: str | None = None
    meeting: asyncio.Task[bool] | None = None
    gone: str | None = None
    alone: asyncio.Lock = field(default_factory=asyncio.Lock)


class _Front:
    """The process that knows the replicas."""

    def __init__(self, model: str, options: dict[str, Any], replicas: int):
        self._members = [_Member(actor) for actor in _actors(model, options, replicas)]
        self._router = Router()
        for number in range(replicas):
            self._router.join(number, reports=False)
        self._changed = asyncio.Condition()  # somebody is back, or gone
        self._keys = 0
        self._first: asyncio.Future[Any] | None = None

    async def run_one(self, name: str, options: dict[str, Any], item: Any) -> Any:
        (answer,) = await self.run_many(name, options, [item])
        return answer

    async def run_many(self, name: str, options: dict[str, Any], items: list[Any]) -> list[Any]:
        if self._first is None:
            self._first = asyncio.gather(*(self._ask_life(member) for member in self._members))
        texts = [_text(item) for item in items]
        limit = int(options.get("max_tokens") or _OUTPUT) if name == "generate" else 0
        parts: dict[int, list[int]] = {}
        keys: dict[int, int] = {}
        for i in sorted(range(len(items)), key=texts.__getitem__):
            keys[i], replica = await self._send(texts[i], limit)
            parts.setdefault(replica, []).append(i)
        answers: list[Any] = [None] * len(items)

        async def run(replica: int, some: list[int]) -> None:
            found = await self._ask(replica, name, options, [items[i] for i in some])
            for i, answer in zip(some, found or [None] * len(some), strict=True):
                self._end(keys[i], answer)
                answers[i] = answer
            if found is None:
                await asyncio.gather(*(again(group) for group in divided(some)))

        async def again(some: Sequence[int]) -> None:
            found = await self._again(name, options, [items[i] for i in some])
            for i, answer in zip(some, found, strict=True):
                answers[i] = answer

        await asyncio.gather(*(run(*part) for part in parts.items()))
        return answers

    async def _send(self, text: bytes, limit: int) -> tuple[int, int]:
        """Returns (a key, the replica that is to get the item); waits while there is none, and raises JobError when
        none comes back."""
        prompt = Prompt(np.frombuffer(text, np.uint8).astype(np.int32), limit)
        while (replica := self._router.choose(prompt)) is None:
            if self._all_gone:
                raise JobError(f"no replica is left: {self._members[-1].gone}")
            async with self._changed:
                await self._changed.wait_for(lambda: self._router.replicas or self._all_gone)
        assert isinstance(replica, int)
        self._keys += 1
        self._router.send(self._keys, prompt, replica)
        return self._keys, replica

    @property
    def _all_gone(self) -> bool:
        return all(member.gone is not None for member in self._members)

    def _end(self, key: int, answer: Any) -> None:
        if key in self._router.in_flight:
            made = answer.get("num_generated", 0) if isinstance(answer, dict) else None
            self._router.end(key, output_rows=made)

    async def _ask(self, replica: int, name: str, options: dict[str, Any], items: list[Any]) -> list[Any] | None:
        """Returns a replica's answers, None where they were lost. Raises JobError where it cannot load its model."""
        from ray.exceptions import RayActorError

        member = self._members[replica]
        try:
            return await member.actor.run_many.remote(name, options, items)
        except RayActorError as error:
            if error.actor_init_failed:
                raise JobError(f"a replica cannot load its model: {_in_short(error)}") from None
            if member.meeting is None and member.gone is None:  # the first call that says so
                self._router.leave(replica)
                member.meeting = asyncio.create_task(self._meet(replica))
            return None

    async def _meet(self, replica: int) -> bool:
        """Waits until a replica that was lost answers again, and lets it take items; what it held is forgotten. Returns
        whether its process has ended, and not only what it said was lost."""
        from ray.exceptions import ActorUnavailableError, RayActorError

        member, tries, life = self._members[replica], 0, None
        while life is None and member.gone is None:
            try:
                life = await member.actor.life.remote()
            except ActorUnavailableError:  # Ray starts it anew, and it loads its model
                await asyncio.sleep(_PAUSE)
            except RayActorError as error:
                tries += 1
                if error.actor_init_failed or tries == _TRIES:
                    member.gone = _in_short(error)
                else:
                    await asyncio.sleep(_PAUSE)
        has_ended = life is None or life != member.life
        member.life, member.meeting = life, None
        if life is not None:
            self._router.join(replica, reports=False)
        async with self._changed:
            self._changed.notify_all()
        return has_ended

    @staticmethod
    async def _ask_life(member: _Member) -> None:
        """Learns the name of a replica's first process. Where that does not answer, whoever asks for more notices."""
        from ray.exceptions import RayActorError

        try:
            life = await member.actor.life.remote()
        except RayActorError:
            return
        if member.meeting is None:
            member.life = member.life or life

    async def _again(self, name: str, options: dict[str, Any], items: Sequence[Any]) -> list[Any]:
        """Returns the answers to items whose replica was lost. Where another is lost with them, they are divided; an
        item that was alone gets an error."""
        while True:
            key, replica = await self._send(_text(items[0]), 0)
            member = self._members[replica]
            async with member.alone:
                was_lost = member.meeting is not None or member.gone is not None  # while the item waited for its turn
                found = None if was_lost else await self._ask(replica, name, options, list(items))
                meeting = member.meeting
            self._end(key, found and found[0])
            if found is not None:
                return found
            if not was_lost and (meeting is None or await meeting):
                if len(items) > 1:
                    parts = (self._again(name, options, part) for part in divided(items))
                    return [answer for answers in await asyncio.gather(*parts) for answer in answers]
                remedy = "see what is unusual about the row, or run it again by itself"
                message = "two replicas were lost while they worked on it"
                return [InputError(message, remedy=remedy, code="replicas_lost")]

    async def stats(self) -> dict[str, Any]:
        there = [member for member in self._members if member.meeting is None and member.gone is None]
        return _added(await asyncio.gather(*(member.actor.stats.remote() for member in there)))


class _Replica:
    """The process that holds a model."""

    def __init__(self, model: str, options: dict[str, Any], own: list[str]):
        add_plugins(own)
        self._model = SharedModel(model, {"threads": 1} | options)
        self._life = uuid.uuid4().hex

    async def life(self) -> str:
        """Returns the name of this process."""
        return self._life

    async def run_many(self, name: str, options: dict[str, Any], items: list[Any]) -> list[Any]:
        if name == "generate":
            return list(await asyncio.gather(*(self._model.run_one(name, options, item) for item in items)))
        return await asyncio.to_thread(self._model.run_many, name, options, items)

    async def stats(self) -> dict[str, Any]:
        return self._model.stats()


def _text(item: Any) -> bytes:
    """Returns an item as bytes, at least one: items that begin alike begin alike."""
    return json.dumps(item, default=str).encode()[:_LONGEST] or b"-"


def _in_short(error: BaseException) -> str:
    """Returns the last line of what Ray says, which is the error itself: before it is where that was raised."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1][:400] if lines else type(error).__name__


def _added(found: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns the sums of counters, by name."""
    out: dict[str, Any] = {}
    for name in dict.fromkeys(name for one in found for name in one):
        # A replica that has generated nothing yet has no counters of that.
        values = [one[name] for one in found if one.get(name) is not None]
        value = values[0] if values else None
        if isinstance(value, Mapping):
            out[name] = _added(values)
        elif isinstance(value, (int, float)):
            out[name] = max(values) if name.endswith("_peak") else sum(values)
        else:
            out[name] = value
    return out


def _ray() -> Any:
    try:
        import ray
    except ImportError:
        raise MissingExtraError("ray", "ray", "a model on Ray") from None
    return ray
