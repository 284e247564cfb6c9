"""The engine of one model and a fleet of replicas are one protocol: a caller need not know which of them it has."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections import Counter
from contextlib import closing
from dataclasses import replace
from queue import SimpleQueue
from types import SimpleNamespace

import numpy as np
import pytest
from fake_jobs import digest
from fake_replicas import SlowEngine, ThreadReplicas
from tiny import tiny_checkpoint

from prefold import LLM
from prefold.api.streams import astream
from prefold.cluster.fleet import Fleet
from prefold.cluster.leases import LeaseBook
from prefold.cluster.native_host import ReplicaHost, facts_of
from prefold.cluster.replicas import ReplicaFacts, ReplicaReport, Replicas
from prefold.engine import Engine
from prefold.engine.calls import stream
from prefold.engine.handles import Handle
from prefold.engine.samples import TextPiece
from prefold.errors import FleetError, InputError, JobError, PrefoldError
from prefold.spec.requests import Readout, Request, Sampling
from prefold.tasks.run import with_seed
from prefold.trie import Spool

LAST, TEXT = Readout("last"), Readout("tokens")
FACTS = ReplicaFacts({"prefold": "1"}, max_rows=64, max_running=4)
PROMPTS = ["yes no the", "yes no a", "the yes", "yes no the yes", "no"]


class Kept(Handle):
    """A handle whose events are kept."""

    def __init__(self):
        super().__init__()
        self.events, self._answered = [], threading.Event()

    def put(self, events, at=0.0):
        self.events += events
        if not isinstance(events[-1], TextPiece):
            self._answered.set()

    def answer(self):
        assert self._answered.wait(100)
        return self.events[-1]


@pytest.fixture(autouse=True)
def short_turns(monkeypatch):
    """Lets the requests of a call make room for those of another soon."""
    monkeypatch.setattr("prefold.cluster.leases._TURN", 0.01)


@pytest.fixture(scope="module")
def llms(tmp_path_factory):
    folder = str(tiny_checkpoint(tmp_path_factory.mktemp("door"), "llama"))
    made = [LLM(folder, dtype="float32", kv_memory=1 << 22) for _ in range(3)]
    yield made
    for llm in made:
        llm.close()


@pytest.fixture(scope="module", params=["one model", "a fleet"])
def engine(request, llms):
    """The engine of the first LLM, or a fleet of two replicas in this process, whose LLMs are the others."""
    if request.param == "one model":
        yield llms[0].engine
        return
    made = {name: lambda llm=llm: ReplicaHost(llm, facts_of(llm)) for name, llm in zip("ab", llms[1:], strict=True)}
    with closing(Fleet(Replicas(made))) as fleet:
        yield fleet


def requests_of(llm, **sampling):
    options = Sampling(**sampling) if sampling else None
    return [Request(llm.tokenizer.encode(prompt), sampling=options) for prompt in PROMPTS]


def test_texts_and_numbers_are_those_that_the_llm_gives(engine: Engine, llms):
    llm = llms[0]
    texts, numbers = [Kept() for _ in PROMPTS], Kept()
    many = Kept()
    requests = requests_of(llm, max_tokens=6, temperature=0.8, n=2)
    for place, (request, kept) in enumerate(zip(requests, texts, strict=True)):
        engine.submit([with_seed(request, 3, place)], TEXT, kept, llm.tokenizer)
    engine.submit(requests_of(llm), LAST, numbers)
    expected = llm.generate(PROMPTS, max_tokens=6, seed=3, temperature=0.8, n=2)
    for kept, samples in zip(texts, expected, strict=True):
        assert [(one.tokens, one.text) for one in kept.answer()] == [(one.tokens, one.text) for one in samples]
        assert len(kept.events) == 1 and kept.begun_at is not None
    for kept in (*texts, numbers):
        kept.answer()
    before = engine.snapshot().stats.rows_computed
    engine.submit(requests_of(llm), Readout("mean"), many, share=False)
    many.answer()
    tokens = sum(len(request.tokens) for request in requests_of(llm))
    assert engine.snapshot().stats.rows_computed - before == tokens  # each prompt by itself
    for kept, pooling in ((numbers, "last"), (many, "mean")):
        wanted = llm.embed(PROMPTS, pooling=pooling, normalize=False)
        assert np.allclose([result.values for result in kept.answer()], wanted, atol=1e-5)
    assert engine.snapshot().stats.requests >= 3 * len(PROMPTS)


def test_pieces_come_before_the_answer_to_threads_and_to_event_loops(engine: Engine, llms):
    llm = llms[0]
    asked = requests_of(llm, max_tokens=9, logprobs=1)
    pieces: dict[int, str] = {}
    answers = {}
    for number, event in stream(engine, asked, llm.tokenizer):
        if isinstance(event, TextPiece):
            assert number not in answers and all(logprobs is not None for _, logprobs in event.tokens)
            pieces[number] = pieces.get(number, "") + event.text
        else:
            answers[number] = event[0].text
    assert answers == pieces == dict(enumerate(one.text for one in llm.generate(PROMPTS, max_tokens=9)))

    async def go():
        return [event async for event in astream(engine, asked[0], llm.tokenizer)]

    *text, (answer,) = asyncio.run(go())
    assert "".join(piece.text for piece in text) == answer.text == answers[0]


def test_a_request_that_cannot_run_is_answered_with_its_error(engine: Engine, llms):
    grammar, other = Kept(), Kept()
    engine.submit(requests_of(llms[0], max_tokens=3, stop=("a",))[:1], TEXT, grammar)  # a stop string, and no tokenizer
    engine.submit(requests_of(llms[0], max_tokens=3)[:1], TEXT, other)
    assert isinstance(grammar.answer(), InputError) and grammar.answer().code == "no_tokenizer"
    assert len(other.answer()[0].tokens) == 3


# ------------------------------------------------------------------------------------------------- a fleet of threads


def prompt(text):
    return Request(np.frombuffer(text.encode(), np.uint8).astype(np.int32))


def test_requests_that_no_replica_has_are_not_computed_once_they_are_cancelled():
    begun, go_on, seen = threading.Event(), threading.Event(), []

    def before(name, tokens):
        seen.append(bytes(tokens.astype(np.uint8)).decode())
        begun.set()
        go_on.wait(100)

    facts = ReplicaFacts({"prefold": "1"}, max_rows=4, max_running=4)
    with closing(Fleet(ThreadReplicas("a", before=before, facts={"a": facts}))) as fleet:
        handles = [Kept() for _ in range(40)]
        for number, handle in enumerate(handles):
            fleet.submit([prompt(f"{number:02} is asked")], LAST, handle)
        assert begun.wait(100)
        fleet.cancel(*handles[:39])
        go_on.set()
        assert float(handles[39].answer()[0].values[0]) == digest(b"39 is asked")
        assert not any(handle.events for handle in handles[:39]) and len(set(seen)) < 20
        last = Kept()
        fleet.submit([prompt("the books are in order")], LAST, last)
        assert float(last.answer()[0].values[0]) == digest(b"the books are in order")


def test_a_job_runs_before_requests_that_wait_and_all_are_answered():
    replicas = ThreadReplicas("ab")
    with closing(Fleet(replicas)) as fleet, Spool() as spool:
        first, second = Kept(), Kept()
        fleet.submit([prompt("before the job")], LAST, first)
        first.answer()  # the run goes on, until the job wants its turn
        for number in range(50):
            spool.add(prompt(f"{number} in the job"), b"%d" % number)
        answers = fleet.run(spool.windows(max_tokens=200, share=True), LAST)
        tag, result = next(answers)
        fleet.submit([prompt("beside the job")], LAST, second)
        found = {tag: result} | dict(answers)
        assert not second.events or len(found) == 50
        assert {tag: float(one.values[0]) for tag, one in found.items()} == {
            b"%d" % number: digest(b"%d in the job" % number) for number in range(50)
        }
        assert float(second.answer()[0].values[0]) == digest(b"beside the job")


def test_nobody_waits_for_a_fleet_that_is_closed_or_lost():
    go_on = threading.Event()
    with closing(Fleet(ThreadReplicas("a", loads={"a": go_on}))) as fleet:
        waiting, late = Kept(), Kept()
        fleet.submit([prompt("a")], LAST, waiting)
        fleet.close()
        assert isinstance(waiting.answer(), PrefoldError) and "closed" in str(waiting.answer())
        fleet.submit([prompt("a")], LAST, late)
        assert "closed" in str(late.answer())
        go_on.set()
    with closing(Fleet(ThreadReplicas("a", loads={"a": "it has no memory"}))) as fleet:
        for kept in (Kept(), Kept()):
            fleet.submit([prompt("a")], LAST, kept)
            assert isinstance(kept.answer(), FleetError) and "no memory" in str(kept.answer())


def test_a_request_that_is_not_well_formed_is_refused_and_no_other():
    with closing(Fleet(ThreadReplicas("a"))) as fleet:
        bad, good = Kept(), Kept()
        fleet.submit([Request(np.zeros(0, np.int32))], LAST, bad)
        fleet.submit([prompt("good")], LAST, good)
        assert isinstance(bad.answer(), InputError)
        assert float(good.answer()[0].values[0]) == digest(b"good")


def test_a_readout_that_replicas_refuse_fails_no_other():
    class TextAlone(ThreadReplicas):
        def begin(self, name, call):
            super().begin(name, call)
            if call.readout.kind != "tokens":
                self.tell(name, ReplicaReport(failure=JobError("it generates text alone")))

    with closing(Fleet(TextAlone("ab"))) as fleet:
        numbers, texts = [Kept() for _ in range(20)], [Kept() for _ in range(20)]
        for number, (one, other) in enumerate(zip(numbers, texts, strict=True)):
            fleet.submit([prompt(f"{number} is read")], LAST, one)
            fleet.submit([replace(prompt(f"{number} is continued"), sampling=Sampling(max_tokens=2))], TEXT, other)
        assert all(isinstance(kept.answer(), JobError) for kept in numbers)
        assert all(kept.answer()[0].text.startswith(f"{number} is") for number, kept in enumerate(texts))


def test_streams_without_requests_leave_the_run_when_others_have_their_turn(monkeypatch):
    present, remove = [], LeaseBook.remove

    def removed(book, source):
        remove(book, source)
        present.append(len(book.sources))

    monkeypatch.setattr(LeaseBook, "remove", removed)
    with closing(Fleet(ThreadReplicas("a"))) as fleet:
        for number in (*range(30), *range(5)):
            kept = Kept()
            fleet.submit([prompt(f"{number}")], Readout("logprobs", top=number), kept)
            assert isinstance(kept.answer(), list)
    assert len(present) >= 30 and max(present) <= 3


def test_handles_may_submit_the_next_request_as_they_take_an_answer():
    """An agent's loop: each answer asks the next question, in the thread that brings the answers."""
    done: SimpleQueue = SimpleQueue()
    with closing(Fleet(ThreadReplicas("a"))) as fleet:

        class Next(Handle):
            def __init__(self, left):
                super().__init__()
                self.left = left

            def put(self, events, at=0.0):
                if not self.left:
                    done.put(events[-1])
                else:
                    fleet.submit([prompt(f"{self.left} left")], LAST, Next(self.left - 1))

        fleet.submit([prompt("begin")], LAST, Next(5))
        assert float(done.get(timeout=100)[0].values[0]) == digest(b"1 left")


def is_right(answer, text):
    """Whether an answer is the text's; replicas that were lost one after the other may have been blamed on it."""
    if isinstance(answer, Exception):
        return isinstance(answer, InputError) and answer.code == "replicas_lost"
    return float(answer[0].values[0]) == digest(text.encode())


@pytest.mark.parametrize("events", [200, pytest.param(5000, marks=pytest.mark.slow)])
def test_cancels_and_lost_replicas_leave_nobody_waiting(events):
    """Three threads submit and cancel, while jobs run and replicas are lost and come back."""
    replicas, wrong, counts = ThreadReplicas("ab", returns=True), [], Counter()

    def ask(fleet, seed):
        rng = random.Random(seed)
        while counts.total() < events or counts["lost"] <= events // 50:
            texts = [f"{rng.randrange(9)} is asked {rng.random()}" for _ in range(rng.randint(1, 6))]
            handles = [Kept() for _ in texts]
            for text, handle in zip(texts, handles, strict=True):
                fleet.submit([prompt(text)], LAST, handle, share=rng.random() < 0.8)
            time.sleep(rng.choice([0, 0.001, 0.01]))
            left = rng.randrange(len(texts) + 1)
            fleet.cancel(*handles[:left])
            counts["cancelled"] += left
            wrong.extend((text, handle.events) for text, handle in zip(texts[left:], handles[left:], strict=True)
                         if not is_right(handle.answer(), text) or len(handle.events) != 1)  # fmt: skip

    with closing(Fleet(replicas)) as fleet:
        asking = [threading.Thread(target=ask, args=(fleet, seed)) for seed in range(3)]
        for thread in asking:
            thread.start()
        rng = random.Random(3)
        while any(thread.is_alive() for thread in asking):
            time.sleep(rng.uniform(0, 0.05))
            name = rng.choice("ab")
            if name in replicas.hosts and counts["lost"] < events // 10:
                replicas.lose(name, "made up", died=rng.random() < 0.5)
                counts["lost"] += 1
            if rng.random() < 0.1:
                with Spool() as spool:
                    spool.add(prompt("in a job"), b"job")
                    assert [is_right([one], "in a job") for _, one in fleet.run(spool.windows(max_tokens=200), LAST)]
        assert not wrong, wrong[:3]
        assert not fleet.lanes.groups and not fleet.lanes.open


LEFT: dict[str, int] = {}  # how many more times a method of a FailingHost may be called, until it raises an error once


class FailingHost(ReplicaHost):
    def __getattribute__(self, name):
        if name in LEFT:
            LEFT[name] -= 1
            if LEFT[name] == 0:
                raise RuntimeError("made up")
        return super().__getattribute__(name)


@pytest.mark.parametrize("method", ["facts", "begin", "give", "end", "report", "_step", "_serve", "_complete"])
def test_a_host_that_raises_at_any_call_leaves_no_caller_waiting(method):
    texts = [f"{number % 3} is asked {number}" for number in range(12)]
    for number in range(1, 10):  # there are reports as long as a host lives
        LEFT[method] = number
        made = {name: lambda: FailingHost(SimpleNamespace(engine=SlowEngine()), FACTS) for name in "ab"}
        with closing(Fleet(Replicas(made))) as fleet:
            handles = [Kept() for _ in texts]
            for at, (text, handle) in enumerate(zip(texts, handles, strict=True)):
                fleet.submit([prompt(text)], LAST, handle, share=at % 2 == 0)
            answers = [handle.answer() for handle in handles]
            for text, answer in zip(texts, answers, strict=True):
                assert is_right(answer, text) or "made up" in str(answer)
            left = LEFT.pop(method)
            again = Kept()
            fleet.submit([prompt("after it")], LAST, again)
            assert is_right(again.answer(), "after it")
            assert not fleet.lanes.groups
        if left > 0:  # it was not called so often
            break
    assert number > 1
