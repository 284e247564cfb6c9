"""Batches and live requests take turns on the engine."""

from __future__ import annotations

import asyncio
import threading
import time

import numpy as np
import pytest
from batching import LONG, batch_of, completion, ended, lines_of
from serving import until

from prefold.api.streams import ResponseStream
from prefold.engine.pace import StepPolicy
from prefold.engine.schedule.fair import FairAdmission
from prefold.engine.schedule.steps import MakeStore, SlotStep
from prefold.spec.requests import Owner, Readout, Request
from prefold.trie import Spool

LAST = Readout("last")


@pytest.mark.parametrize("kind", ["completions", "embeddings"])
def test_live_requests_go_on_beside_a_batch(client, llm, kind, slow_steps):
    if kind == "completions":
        lines, endpoint = [completion(i, **LONG) for i in range(300)], "/v1/completions"
    else:
        lines, endpoint = embeddings(3000), "/v1/embeddings"
        # However long it takes to ask meanwhile: the batch does not end before.
        slow_steps(llm.engine.worker, 0.01)
    batch = batch_of(client, lines, endpoint)
    until(lambda: client.batches.retrieve(batch.id).request_counts.completed > 3)
    options = {
        "model": "tiny",
        "prompt": "no yes",
        "max_tokens": 5,
        "temperature": 0,
        "extra_body": {"ignore_eos": True},
    }
    text = client.completions.create(**options).choices[0].text
    vector = client.embeddings.create(model="tiny", input="no yes").data[0].embedding
    beside = client.batches.retrieve(batch.id)
    assert beside.status == "in_progress", "the batch had ended before"
    client.batches.cancel(batch.id)
    ended(client, batch)
    assert text == client.completions.create(**options).choices[0].text
    assert np.allclose(vector, client.embeddings.create(model="tiny", input="no yes").data[0].embedding, atol=1e-6)


def embeddings(count):
    texts = [" ".join(["the yes no"] * 30) + f" {i}" for i in range(count)]
    return [
        {"custom_id": str(i), "url": "/v1/embeddings", "method": "POST", "body": {"input": text}}
        for i, text in enumerate(texts)
    ]


def test_numbers_of_a_batch_and_texts_are_in_the_same_steps(kept, client, llm, monkeypatch, few_rows, start_by):
    steps = []

    def begin(start, message, *more):
        if isinstance(message, MakeStore):
            return start(message, *more)
        steps.append(message)
        if len(steps) == 2:  # the batch waits until the engine has the request for a text
            until(lambda: any(new.request.sampling for new in llm.engine.generator._new.copy()))
        return start(message, *more)

    # However long steps take, which on a busy machine leaves the batch nothing beside a short text.
    monkeypatch.setattr(kept.state.handler.step_policy, "_batch_rows", lambda *given: 8)
    start_by(llm.engine.worker, begin)
    lines = embeddings(200)
    batch = batch_of(client, lines, "/v1/embeddings")
    until(lambda: len(steps) > 1)
    options = {"model": "tiny", "prompt": "no yes", "max_tokens": 20, "temperature": 0}
    text = client.completions.create(**options, extra_body={"ignore_eos": True}).choices[0].text
    done = ended(client, batch)
    assert {type(step) for step in steps} == {SlotStep}
    assert any(step.read_outs and len(step.read_outs[0].rows) < len(step.reads) for step in steps), "no step has both"
    assert text == llm.generate("no yes", max_tokens=20, ignore_eos=True).text
    found = lines_of(client, done.output_file_id)
    vectors = [found[str(i)]["response"]["body"]["data"][0]["embedding"] for i in range(200)]
    assert np.allclose(vectors, llm.embed([line["body"]["input"] for line in lines]), atol=1e-5)


def test_a_batch_has_its_share_beside_a_large_live_request_that_never_pauses(llm, few_rows, start_by):
    service, worker = llm.engine, llm.engine.worker
    steps, results = [], []
    live = [Request(np.array([1, i // 64, i % 64, i % 7], np.int32)) for i in range(4000)]
    spool = Spool()
    for i in range(4):
        spool.add(Request(np.array([200, 201 + i, 210], np.int32)), bytes([i]))

    def run():
        windows = spool.windows(max_tokens=1 << 20, share=True)
        results.extend(service.run(windows, LAST, owner=Owner("batch", True)))

    batch = threading.Thread(target=run)

    def start(begin, message, *more):
        kinds = {"batch" if token >= 200 else "live" for token in message.tokens.tolist()}
        steps.append(kinds)
        if len(steps) == 2:
            batch.start()
            until(lambda: service.generator.num_waiting)
        return begin(message, *more)

    start_by(worker, start)

    async def ask():
        reply = ResponseStream(asyncio.get_running_loop(), 1)
        service.submit(live, LAST, reply)
        return await reply.answer()

    before = service.step_policy
    service.set_step_policy(StepPolicy(FairAdmission(batch_share=0.5), batch_share=0.5))
    try:
        assert len(asyncio.run(ask())) == 4000
        batch.join()
    finally:
        service.set_step_policy(before)
    assert len(results) == 4
    first = next(number for number, kinds in enumerate(steps) if "batch" in kinds)
    assert any("live" in kinds for kinds in steps[first + 1 :]), steps


def test_a_batch_of_numbers_that_is_cancelled_ends_before_the_next_step(client, llm, few_rows, start_by):
    calls, steps = [], []

    def start(begin, message, *more):
        if isinstance(message, MakeStore):
            return begin(message, *more)
        steps.append(message.num_rows)
        if not calls:
            calls.append(client.batches.cancel(client.batches.list(limit=1).data[0].id))
        return begin(message, *more)

    start_by(llm.engine.worker, start)
    done = ended(client, batch_of(client, embeddings(200), "/v1/embeddings"))
    assert done.status == "cancelled" and done.request_counts.completed < 200 and len(calls) == 1
    assert len(client.embeddings.create(model="tiny", input="yes").data) == 1


def test_a_batch_begins_at_once(kept, client):
    batches = kept.state.batches
    before, batches.look_seconds = batches.look_seconds, 3000.0
    time.sleep(0.5)  # until the looks that have begun are over
    assert ended(client, batch_of(client, [completion(1)])).status == "completed"
    batches.look_seconds = before
    assert ended(client, batch_of(client, [completion(1)])).status == "completed"
