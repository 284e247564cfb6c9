"""Numbers that are read for several readers of one engine take turns, also with those of one large request."""

from __future__ import annotations

import asyncio
import time

import numpy as np
import pytest
from books import check_books
from generating import until_idle
from tiny import tiny_checkpoint

from prefold import LLM
from prefold.api.streams import ResponseStream
from prefold.engine.handles import Handle, ReadGroup
from prefold.engine.pace import StepPolicy
from prefold.engine.schedule.fair import FairAdmission
from prefold.engine.thread import EngineThread
from prefold.spec.requests import Owner, Readout, Request, Result

LAST = Readout("last")
ROWS = 32


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    folder = tiny_checkpoint(tmp_path_factory.mktemp("readings"), "llama")
    with LLM(str(folder), dtype="float32", device="cpu", max_batch_rows=ROWS, cache="off") as made:
        yield made


def requests(count, seed=0, begin=20):
    """Requests in any order that begin alike, and their unique tokens."""
    rng = np.random.default_rng(seed)
    stem = rng.integers(0, 200, begin)
    made = [np.concatenate((stem, [i // 16, i % 16, 5])) for i in rng.permutation(count)]
    unique = len({tuple(one[:n]) for one in made for n in range(1, len(one) + 1)})
    return [Request(one.astype(np.int32)) for one in made], unique


def expected(llm, asked):
    return np.stack([result.values for result in run_alone(llm, asked)])


def run_alone(llm, asked):
    async def ask():
        reply = ResponseStream(asyncio.get_running_loop(), 1)
        llm.engine.submit(asked, LAST, reply)
        return await reply.answer()

    return asyncio.run(ask())


@pytest.mark.parametrize("owners", [("a", "b", False), ("a", "a", False), ("a", "b", True)])
def test_a_large_reading_gives_way_to_a_small_one(llm, owners, start_by):
    """The large one is that of another tenant, of the same, and of a key whose class is batch."""
    large, unique = requests(400)
    small = [Request(np.array([7, 8, 9], np.int32))]
    wanted, service, worker = expected(llm, large), llm.engine, llm.engine.worker
    steps, seen = [], []

    async def ask():
        loop = asyncio.get_running_loop()
        a, b = ResponseStream(loop, 1, Owner(owners[0], owners[2])), ResponseStream(loop, 1, Owner(owners[1]))

        def begin(start, message, *more):
            steps.append(message.num_rows)
            if len(steps) == 3:
                service.submit(small, LAST, b)
            if "7, 8, 9" in str(message.tokens.tolist()):
                seen.append(len(steps))
            return start(message, *more)

        start_by(worker, begin)
        service.submit(large, LAST, a)
        await b.answer()
        return np.stack([result.values for result in await a.answer()])

    np.testing.assert_allclose(asyncio.run(ask()), wanted, atol=1e-5)
    assert max(steps) <= ROWS < unique // 10
    assert len(seen) == 1 and seen[0] < 10, (seen, len(steps))
    assert sum(steps) <= unique + 3 + 23, "rows of what is open are there for what comes next"


def test_a_reading_that_is_alone_computes_nothing_twice(llm):
    large, unique = requests(200, begin=40)
    llm.engine.reset_stats()
    run_alone(llm, large)
    assert llm.stats.rows_computed == unique


def test_as_many_requests_are_open_as_fill_a_few_steps(llm):
    for begin in (0, 20, 200):
        large, _ = requests(300, begin=begin)
        reading, opened = ReadGroup(Handle(1), large, LAST, rows=ROWS, shares=True), []
        while not opened or any(result is None for result in reading.results):
            while (number := reading.next()) is not None:
                opened.append(number)
            open = [number for number in opened if reading.results[number] is None]
            # Each has at least one row of its own, and at most three; the first has the path above them too.
            assert len(open) <= 2 * ROWS
            assert len(open) >= min(300 - len(opened) + len(open), (2 * ROWS - begin) // 3)
            is_last = reading.book(open[0], Result(np.zeros(1)))
        assert is_last and sorted(opened) == list(range(300))


def test_a_large_reading_that_fails_is_ended_once_and_others_go_on(llm, start_by):
    large, _ = requests(200)
    large[100].tokens[-1] = 250
    small, service, worker = [Request(np.array([7, 8, 9], np.int32))], llm.engine, llm.engine.worker
    failed = []

    def fail(start, message, *more):
        if (message.tokens == 250).any():
            failed.append(message)
            raise RuntimeError("made up")
        return start(message, *more)

    start_by(worker, fail)

    async def ask():
        loop = asyncio.get_running_loop()
        a, b = ResponseStream(loop, 1, Owner("a")), ResponseStream(loop, 1, Owner("b"))
        service.submit(large, LAST, a)
        service.submit(small, LAST, b)
        await b.answer()
        with pytest.raises(RuntimeError, match="made up"):
            await a.answer()

    asyncio.run(ask())
    assert failed and not service.handles
    until_idle(service)
    service.call(lambda: check_books(service.generator.scheduler))


def test_requests_of_a_batch_are_not_taken_for_live_ones(llm):
    """Neither numbers nor texts of a key whose class is batch keep the steps of batches short."""
    service = llm.engine
    pace = StepPolicy(FairAdmission(), clock=lambda: 0.0)  # a pause goes by only where time does
    service.set_step_policy(pace)

    async def ask(is_batch):
        reply = ResponseStream(asyncio.get_running_loop(), 1, Owner("a", is_batch))
        service.submit(requests(50)[0], LAST, reply)
        await reply.answer()

    try:
        asyncio.run(ask(True))
        assert pace.pause == 0.0
        asyncio.run(ask(False))
        assert pace.pause > 0.0
    finally:
        service.set_step_policy(None)


def test_the_thread_ends_though_what_woke_it_was_taken_while_it_worked():
    class Working:
        def __init__(self):
            self.ended = []

        def work(self):
            thread.is_closed = True
            thread.wake()  # so far as `close` does it
            thread.take_in()  # as every look for what came does

        def end_all(self, error):
            self.ended.append(error)

    service = Working()
    thread = EngineThread(service)
    thread.wake()
    thread._thread.join(10) if thread._thread else None
    for _ in range(1000):
        if service.ended:
            break
        time.sleep(0.01)
    assert service.ended
