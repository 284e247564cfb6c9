"""The front of a model on Ray, with actors that stand for real ones: what becomes of rows when replicas are lost."""

from __future__ import annotations

import asyncio
import random

import pytest

from prefold.errors import InputError, JobError
from prefold.integrations import on_ray

exceptions = pytest.importorskip("ray.exceptions")


class Method:
    def __init__(self, call):
        self.remote = call


class Replica:
    """Echoes items. dies_at: it ends at an item for which that holds, and is there again after so many pings."""

    def __init__(self, *, dies_at=lambda item: False, pings=3, torn=0):
        self.dies_at, self.pings, self.torn = dies_at, pings, torn
        self.lives, self.left, self.refused, self.answered, self.asked = 1, 0, 0, 0, 0
        self.run_many, self.life = Method(self._run_many), Method(self._life)

    async def _run_many(self, name, options, items):
        if self.left:
            self.refused += len(items)
            raise exceptions.ActorUnavailableError("it is restarting", None)
        self.asked += 1
        await asyncio.sleep(0.001)
        if any(self.dies_at(item) for item in items):
            self.lives, self.left = self.lives + 1, self.pings
            raise exceptions.ActorUnavailableError("it has died", None)
        if self.torn:
            self.torn -= 1
            raise exceptions.ActorUnavailableError("the connection is torn", None)
        self.answered += len(items)
        return [{"text": item, "num_generated": 1} for item in items]

    async def _life(self):
        if self.left:
            self.left -= 1
            raise exceptions.ActorUnavailableError("it is restarting", None)
        return f"life {self.lives}"


def run(monkeypatch, replicas, *waves):
    """What the front answers, row by row as Daft asks; each wave of items comes when all replicas are there again."""
    monkeypatch.setattr(on_ray, "_actors", lambda *_: replicas)
    monkeypatch.setattr(on_ray, "_PAUSE", 0.01)

    async def go():
        front = on_ray._Front("m", {}, len(replicas))

        async def one(number, item):
            await asyncio.sleep(number * 0.0005)
            return await front.run_one("generate", {"max_tokens": 16}, item)

        answers = []
        for items in waves:
            while any(member.meeting for member in front._members):
                await asyncio.sleep(0.01)
            answers += await asyncio.gather(*(one(*pair) for pair in enumerate(items)))
        return answers

    return asyncio.run(asyncio.wait_for(go(), 60))


def texts(count=200):
    rng = random.Random(0)
    return ["".join(rng.choice("abcdefgh ") for _ in range(50)) for _ in range(count)]


def test_a_replica_that_ray_starts_anew_gets_no_rows_until_it_is_there(monkeypatch):
    items = texts()
    died = []

    def once(item):
        return item == items[9] and not died and not died.append(item)

    dead, other = Replica(dies_at=once), Replica(dies_at=once)
    found = run(monkeypatch, [dead, other], items[:100], items[100:])
    assert [one["text"] for one in found] == items and died
    assert dead.refused + other.refused < 20, "what was on its way"
    assert min(dead.answered, other.answered) > 20, "it works again"


def test_the_only_replica_is_waited_for(monkeypatch):
    items, died = texts(40), []
    replica = Replica(dies_at=lambda item: item == items[5] and not died and not died.append(item))
    assert [one["text"] for one in run(monkeypatch, [replica], items)] == items


def test_a_row_that_two_replicas_die_of_is_given_up_and_no_other(monkeypatch):
    items = texts(60)
    replicas = [Replica(dies_at=lambda item: item == items[30]) for _ in range(2)]
    found = run(monkeypatch, replicas, items)
    assert isinstance(found[30], InputError) and found[30].code == "replicas_lost"
    assert [one["text"] for one in found if not isinstance(one, InputError)] == items[:30] + items[31:]


def test_a_row_that_replicas_die_of_is_searched_in_groups(monkeypatch):
    items = texts(256)
    replicas = [Replica(dies_at=lambda item: item == items[100]) for _ in range(2)]
    monkeypatch.setattr(on_ray, "_actors", lambda *_: replicas)
    monkeypatch.setattr(on_ray, "_PAUSE", 0.01)

    async def go():
        front = on_ray._Front("m", {}, len(replicas))
        return await asyncio.wait_for(front.run_many("generate", {"max_tokens": 16}, items), 60)

    found = asyncio.run(go())
    assert isinstance(found[100], InputError) and found[100].code == "replicas_lost"
    assert [one["text"] for one in found if not isinstance(one, InputError)] == items[:100] + items[101:]
    assert sum(replica.asked for replica in replicas) < 40, "each row by itself would be more than 100"


def test_a_torn_connection_is_no_death_however_often_it_tears(monkeypatch):
    items = texts(5)
    assert [one["text"] for one in run(monkeypatch, [Replica(torn=9)], items)] == items


def test_a_model_that_cannot_be_loaded_is_said(monkeypatch):
    async def fails(*_):
        error = exceptions.ActorDiedError()
        error._actor_init_failed, error.error_msg = True, "Traceback ...\nCheckpointError: there is no model 'misspelt'"
        raise error

    replica = Replica()
    replica.run_many = replica.life = Method(fails)
    with pytest.raises(JobError, match=r"cannot load its model.*no model 'misspelt'"):
        run(monkeypatch, [replica], ["a"])


def test_counters_of_replicas_are_added_though_one_has_generated_nothing():
    ours = {"requests": 1, "rows_peak": 5, "generation": None, "seconds": {"plan": 0.5}}
    other = {"requests": 2, "rows_peak": 3, "generation": {"generated_tokens": 7}, "seconds": {"model": 1.0}}
    both = {
        "requests": 3,
        "rows_peak": 5,
        "generation": {"generated_tokens": 7},
        "seconds": {"plan": 0.5, "model": 1.0},
    }
    for found in ([ours, other], [other, ours]):
        assert on_ray._added(found) == both
    assert on_ray._added([ours, ours])["generation"] is None


@pytest.mark.parametrize("options, place", [({"device": "cuda", "tensor_parallel": 2}, (2, 0)),
                                            ({"device": "cpu", "threads": 3, "tensor_parallel": 2}, (0, 6)),
                                            ({"device": "cpu"}, (0, 1))])  # fmt: skip
def test_a_replica_is_given_room_for_all_its_ranks(monkeypatch, options, place):
    asked = []

    class Ray:
        @staticmethod
        def remote(**given):
            asked.append((given["num_gpus"], given["num_cpus"]))
            return lambda cls: type("Actor", (), {"remote": staticmethod(lambda *_: None)})

    monkeypatch.setattr(on_ray, "_ray", lambda: Ray)
    assert len(on_ray._actors("m", options, 3)) == 3 and asked == [place]
