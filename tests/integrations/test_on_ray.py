"""What stands in front of a fleet on Ray: items of many callers, over a fleet of threads, and over a real one."""

from __future__ import annotations

import asyncio
import json
import os
import random
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from answering import answer_of
from fake_jobs import digest
from fake_replicas import ThreadReplicas
from tiny import tiny_checkpoint
from tiny_vision import tiny_vision

from prefold.cluster.fleet import Fleet
from prefold.errors import FleetError, InputError, JobError
from prefold.integrations import shared
from prefold.spec.requests import Readout, Request, Sampling
from prefold.tasks.base import Work
from prefold.tasks.results import Relevance


class Task:
    """Makes a request of each item, which is a text: "echo" says it again, "digest" reads a number of it."""

    def __init__(self, name, options):
        if name not in ("echo", "digest"):
            raise InputError(f"there is no task {name!r}", field="task")
        self.name, self.options, self.shift = name, options, 0.0
        self.readout = Readout("tokens" if name == "echo" else "last")
        self.inputs = SimpleNamespace(tokenizer=None)

    def prepare(self, items):
        sampling = Sampling(max_tokens=4, seed=0) if self.name == "echo" else None
        return [self._work(item, sampling) for item in items]

    def _work(self, item, sampling):
        if not item:
            return InputError("it is empty")
        return Work([Request(np.frombuffer(item.encode(), np.uint8).astype(np.int32), sampling=sampling)], item)

    def calibration_items(self):
        return ["calibrate"] if self.options.get("calibrated") else []

    def with_calibration(self, outputs):
        self.shift = outputs[0].score
        return self

    def finish(self, note, results):
        (found,) = results
        if self.name == "echo":
            return answer_of(text=found[0].text)
        return Relevance(float(found.values[0]) - self.shift)


def run(replicas, go, **fleet):
    """What `go(front)` returns, with a front of a fleet of these replicas."""
    with closing(Fleet(replicas, **fleet)) as made:
        return asyncio.run(asyncio.wait_for(go(shared._Front(lambda: shared.Tasks(made, Task))), 100))


def texts(count=200):
    rng = random.Random(0)
    return ["".join(rng.choice("abcefgh ") for _ in range(50)) for _ in range(count)]


def test_items_of_many_callers_and_of_two_tasks_are_each_answered_once():
    items = texts(120)

    async def go(front):
        async def one(name, number):
            await asyncio.sleep(number * 0.0005)
            return await front.run_many(name, {}, [items[number]])

        echoes = asyncio.gather(*(one("echo", number) for number in range(120)))
        numbers = asyncio.gather(*(one("digest", number) for number in range(120)))
        many = front.run_many("digest", {}, ["", *items])
        found = await echoes, await numbers, await many
        return *found, (await front.stats())["requests"]

    replicas = ThreadReplicas("ab", before=lambda name, tokens: time.sleep(0.001))
    echoes, numbers, (empty, *many), requests = run(replicas, go)
    assert [one.choices[0].text for (one,) in echoes] == [f"{item}/0" for item in items]
    wanted = [Relevance(digest(item.encode())) for item in items]
    assert [one for (one,) in numbers] == many == wanted
    assert isinstance(empty, InputError) and requests == 3 * 120 and all(replicas.given.values())


def test_requests_of_one_kind_make_room_for_those_of_another(monkeypatch):
    """As long as echoes are asked for without end, a digest is answered too."""
    monkeypatch.setattr("prefold.cluster.leases._TURN", 0.05)
    answered = []

    async def go(front):
        async def echo():
            while not answered:
                await front.run_many("echo", {}, ["abc"])

        async def number():
            await asyncio.sleep(0.2)
            answered.extend(await front.run_many("digest", {}, ["abc"]))

        await asyncio.gather(echo(), echo(), echo(), number())

    run(ThreadReplicas("a", before=lambda name, tokens: time.sleep(0.001)), go)
    assert answered == [Relevance(digest(b"abc"))]


def test_a_task_that_asks_for_it_is_calibrated_once():
    replicas = ThreadReplicas("a")

    async def go(front):
        return await asyncio.gather(*(front.run_many("digest", {"calibrated": True}, [text]) for text in "ab"))

    (a,), (b,) = run(replicas, go)
    shift = digest(b"calibrate")
    assert (a.score, b.score) == (digest(b"a") - shift, digest(b"b") - shift)
    assert replicas.given == {"a": 3}


def test_an_item_that_replicas_die_of_is_given_up_and_no_other():
    items, poison = texts(60), texts(60)[30].encode()

    def before(name, tokens):
        if bytes(tokens.astype(np.uint8)) == poison:
            replicas.lose(name, "it died")
            time.sleep(0.2)

    replicas = ThreadReplicas("ab", before=before, returns=True)
    found = run(replicas, lambda front: front.run_many("echo", {}, items))
    assert isinstance(found[30], InputError) and found[30].code == "replicas_lost" and len(replicas.killed) >= 2
    assert [one.choices[0].text for one in found if not isinstance(one, InputError)] == [
        f"{item}/0" for item in items[:30] + items[31:]
    ]


def test_where_no_replica_can_start_callers_are_told_those_who_wait_and_those_who_come():
    replicas = ThreadReplicas("ab", loads=dict.fromkeys("ab", "there is no model 'misspelt'"))

    async def go(front):
        for _ in range(2):
            with pytest.raises(FleetError, match="no model 'misspelt'"):
                await front.run_many("echo", {}, ["a"])

    run(replicas, go)


def test_what_cannot_be_opened_or_made_is_said():
    async def go(front):
        with pytest.raises(InputError, match="no task 'sing'"):
            await front.run_many("sing", {}, ["a"])
        return await front.run_many("echo", {}, ["a"])

    assert run(ThreadReplicas("a"), go) == [answer_of(text="a/0")]

    def fails():
        raise JobError("there is no room")

    with pytest.raises(JobError, match="no room"):
        asyncio.run(shared._Front(fails).run_many("echo", {}, ["a"]))


@pytest.mark.parametrize("sees", [False, True])
def test_tasks_are_made_without_the_weights(tmp_path, sees):
    """So that the actor needs no memory for a model that only replicas run."""
    folder = tiny_vision(tmp_path) if sees else tiny_checkpoint(tmp_path, "llama")
    for file in Path(folder).glob("*.safetensors"):
        file.write_bytes(b"")
    make, media = shared.tasks_of(str(folder), {"adapters": {"fr": "nowhere"}, "dtype": "float32"})
    task = make("generate", {"max_tokens": 3})
    good, other = task.prepare([{"prompt": "a", "adapter": "fr"}, {"prompt": "a", "adapter": "de"}])
    assert good.requests[0].namespace.adapter == "fr" and isinstance(other, InputError)
    assert (media is not None) == (task.inputs.images is not None) == sees


ON_RAY = """
import asyncio, json, sys
import ray
from prefold.integrations.shared import RayModel

texts = json.loads(sys.argv[2])
ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
model = RayModel.of(sys.argv[1], {"dtype": "float32", "kv_memory": 1 << 22}, 2)

async def both():
    items = [{"prompt": text} for text in texts]
    made = asyncio.gather(*(model.run_one("generate", {"max_tokens": 5}, item) for item in items))
    vectors = model.run_many_async("embed", {}, [{"text": text} for text in texts])
    return await made, await vectors

made, vectors = asyncio.run(both())
again = model.run_many("embed", {}, [{"text": ""}, {"text": texts[0]}])
made = [one.choices[0].text for one in made]
found = [made, [one.embedding.tolist() for one in vectors], str(again[0]), model.stats()]
print(json.dumps(found))
"""


@pytest.mark.slow
def test_texts_and_numbers_of_a_model_of_a_ray_cluster_are_those_of_an_llm(tmp_path):
    from prefold import LLM

    model, some = str(tiny_checkpoint(tmp_path, "llama")), texts(60)
    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    environment = os.environ | {"PYTHONPATH": root, "TOKENIZERS_PARALLELISM": "false"}
    command = [sys.executable, "-c", ON_RAY, model, json.dumps(some)]
    done = subprocess.run(command, env=environment, capture_output=True, timeout=600)
    assert done.returncode == 0, done.stderr.decode()[-3000:]
    made, vectors, wrong, stats = json.loads(done.stdout.decode().splitlines()[-1])
    with LLM(model, dtype="float32") as llm:
        assert made == [one.text for one in llm.generate(some, max_tokens=5)]
        assert np.abs(np.array(vectors) - llm.embed(some)).max() < 1e-5
    assert "text" in wrong and stats["requests"] == 2 * len(some) + 1
