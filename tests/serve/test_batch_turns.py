"""Batches and live requests take turns on the engine, in steps and within them."""

from __future__ import annotations

import asyncio
import threading
import time

import numpy as np
import pytest
from batching import LONG, batch_of, completion, ended, lines_of
from serving import until

from prefold.engine.replies import Reply
from prefold.job.flow import Flow
from prefold.schedule.fair import FairAdmission
from prefold.schedule.steps import SlotStep, StreamStep
from prefold.serve import batches, lane
from prefold.stream import Spool
from prefold.types import Owner, Readout, Request

LAST = Readout("last")


@pytest.mark.parametrize("kind", ["completions", "embeddings"])
def test_live_requests_go_on_beside_a_batch(client, llm, kind, monkeypatch):
    if kind == "completions":
        lines, endpoint = [completion(i, **LONG) for i in range(300)], "/v1/completions"
    else:
        lines, endpoint = embeddings(3000), "/v1/embeddings"
        # However long it takes to ask meanwhile: the batch does not end before.
        advance = lane._BatchNumbers.advance
        monkeypatch.setattr(lane._BatchNumbers, "advance", lambda self: time.sleep(0.01) or advance(self))
    batch = batch_of(client, lines, endpoint)
    until(lambda: client.batches.retrieve(batch.id).request_counts.completed > 3, 60)
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


class Log:
    """Steps of the engine, as they begin and end: ("begins" or "ends", kind of message, results that wait)."""

    def __init__(self, llm, monkeypatch):
        self.entries, self.numbers, worker = [], None, llm.engine.worker
        begin, made, log = worker.start, lane._BatchNumbers.__init__, self

        def start(message, *more):
            left = 0 if log.numbers is None else log.numbers.came.qsize()
            log.entries.append(("begins", type(message), left))
            try:
                return begin(message, *more)
            finally:
                log.entries.append(("ends", type(message), left))

        def make(self, *arguments):
            made(self, *arguments)
            log.numbers = self

        monkeypatch.setattr(worker, "start", start)
        monkeypatch.setattr(lane._BatchNumbers, "__init__", make)


def test_a_live_request_comes_in_the_middle_of_a_step_of_a_batch(client, llm, monkeypatch):
    log, give_way, asked = Log(llm, monkeypatch), lane._BatchNumbers._give_way, []

    def ask():
        made = client.completions.create(model="tiny", prompt="no yes", max_tokens=5, temperature=0)
        asked.append(made.choices[0].text)

    asking = threading.Thread(target=ask)

    def wait_for_somebody(self):
        if log.entries[-1][:2] == ("begins", StreamStep) and asking.ident is None:
            asking.start()
            until(lambda: llm.engine.replies)
        give_way(self)

    monkeypatch.setattr(lane._BatchNumbers, "_give_way", wait_for_somebody)
    lines = embeddings(200)
    done = ended(client, batch_of(client, lines, "/v1/embeddings"))
    asking.join()
    kinds = [entry[:2] for entry in log.entries]
    place = kinds.index(("begins", SlotStep))
    assert kinds[place - 1] == ("begins", StreamStep) and kinds[place + 1] == ("ends", SlotStep)
    assert asked == [llm.generate("no yes", max_tokens=5).text]
    found = lines_of(client, done.output_file_id)
    vectors = [found[str(i)]["response"]["body"]["data"][0]["embedding"] for i in range(200)]
    assert np.allclose(vectors, llm.embed([line["body"]["input"] for line in lines]), atol=1e-5)


def test_a_batch_has_its_share_beside_a_large_live_request_that_never_pauses(llm, monkeypatch):
    """Also where a step of it begins, which waits for the lines of the one before."""
    service, worker = llm.engine, llm.engine.worker
    begin, steps, results = worker.start, [], []
    pace = lane.Pace(FairAdmission(), batch_share=0.5)
    monkeypatch.setattr(pace, "stream_rows", lambda most, **how: 3)
    live = [Request(np.array([1, i // 64, i % 64, i % 7], np.int32)) for i in range(4000)]
    spool = Spool()
    for i in range(4):
        spool.add(Request(np.array([200, 201 + i, 210], np.int32)), bytes([i]))
    read = lane.Lane(service, Owner("batch", True), pace).run

    def run():
        results.extend(read(spool.windows(max_tokens=1 << 20, share=True), LAST, stopping=lambda: False))

    batch = threading.Thread(target=run)

    def start(message, *more):
        steps.append("batch" if message.tokens[0] >= 200 else "live")
        if len(steps) == 2:
            batch.start()
            until(lambda: service._beside)
        return begin(message, *more)

    monkeypatch.setattr(type(llm.engine), "max_batch_rows", 32)
    monkeypatch.setattr(worker, "start", start)

    async def ask():
        reply = Reply(asyncio.get_running_loop(), 1)
        service.submit_numbers(reply, live, LAST)
        return await reply.answer()

    assert len(asyncio.run(ask())) == 4000
    batch.join()
    assert len(results) == 4 and steps.count("batch") > 1
    assert "live" in steps[steps.index("batch") :], steps


def test_a_batch_that_is_cancelled_ends_in_the_middle_of_a_step(client, llm, monkeypatch):
    log, give_way, calls = Log(llm, monkeypatch), lane._BatchNumbers._give_way, []

    def cancel(self):
        if log.entries[-1][:2] == ("begins", StreamStep):
            calls.append(client.batches.cancel(client.batches.list(limit=1).data[0].id))
        give_way(self)

    monkeypatch.setattr(lane._BatchNumbers, "_give_way", cancel)
    done = ended(client, batch_of(client, embeddings(200), "/v1/embeddings"))
    assert done.status == "cancelled" and done.request_counts.completed == 0 and len(calls) == 1
    assert len(client.embeddings.create(model="tiny", input="yes").data) == 1


def test_a_step_of_a_batch_begins_when_the_lines_of_the_last_are_written(client, llm, monkeypatch):
    write = Flow._write
    monkeypatch.setattr(Flow, "_write", lambda *arguments: time.sleep(0.002) or write(*arguments))
    monkeypatch.setattr(lane.Pace, "stream_rows", lambda self, most, **how: 100)
    log = Log(llm, monkeypatch)
    assert ended(client, batch_of(client, embeddings(100), "/v1/embeddings")).status == "completed"
    waiting = [left for what, kind, left in log.entries if (what, kind) == ("begins", StreamStep)]
    assert len(waiting) > 2 and not any(waiting)


def test_a_batch_begins_at_once(client, monkeypatch):
    monkeypatch.setattr(batches, "LOOK_SECONDS", 30.0)
    time.sleep(0.5)  # until the looks that have begun are over
    assert ended(client, batch_of(client, [completion(1)]), 20).status == "completed"
    monkeypatch.undo()
    assert ended(client, batch_of(client, [completion(1)]), 20).status == "completed"
