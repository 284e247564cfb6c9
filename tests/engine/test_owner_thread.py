"""One thread makes all steps of an engine: it begins and ends with what it serves, and leaves no caller waiting."""

from __future__ import annotations

import asyncio
import os
import random
import subprocess
import sys
import threading
import time
import weakref
from functools import partial
from pathlib import Path
from queue import SimpleQueue

import numpy as np
import pytest
from books import check_books
from fake_worker import FakeWorker, expected
from tiny import tiny_checkpoint

from prefold import LLM
from prefold.engine import EngineOptions, GenerateOptions, ModelEngine
from prefold.engine.cache import CacheOptions
from prefold.engine.calls import serve
from prefold.engine.handles import Handle
from prefold.engine.schedule.steps import SlotStep
from prefold.errors import ForkedError, OutOfMemoryError, PrefoldError, RankError
from prefold.spec.requests import Readout, Request, Sampling


class Raising(FakeWorker):
    """At the call of this number it raises an error, or gives a ticket that does."""

    def __init__(self, number: int, error: Exception, *, at_result: bool):
        super().__init__(random.Random(0), 2, 0.0)
        self.left, self.error, self.at_result = number, error, at_result

    def start(self, message, prepared=None):
        self.left -= 1
        if self.left:
            return super().start(message, prepared)
        if not self.at_result:
            raise self.error
        ticket = super().start(message, prepared)
        ticket.result = self.fail
        return ticket

    def fail(self):
        raise self.error


def engine_of(worker) -> ModelEngine:
    generation = GenerateOptions(kv_memory=200, max_running=4, cache=CacheOptions(min_overlap=0))
    return ModelEngine(worker, EngineOptions(max_batch_rows=24, generation=generation))


PROMPTS = [[0, 1, 2], [0, 1], [2], [2, 2]]
SAMPLING = Sampling(max_tokens=6)


def texts(engine):
    """The tokens of all texts; the error of the steps that fail for one of them."""
    windows = [[(n, Request(np.array(p, np.int32), sampling=SAMPLING)) for n, p in enumerate(PROMPTS)]]
    answers = dict(serve(engine, windows, max_waiting=4))
    return [answers[number][0].tokens for number in range(len(PROMPTS))]


def numbers(engine):
    """The numbers of prompts that are submitted together, and of one that is alone; the error of either."""
    requests, answers = [Request(np.array(p, np.int32)) for p in PROMPTS], SimpleQueue()
    for group in (requests, requests[:1]):
        handle = Handle()
        handle.put = lambda events, at=0.0: answers.put(events[-1])
        engine.submit(group, Readout("last"), handle)
    both = [answers.get(timeout=60) for _ in range(2)]
    for answer in both:
        if isinstance(answer, Exception):
            raise answer
    return sorted([result.values[0] for result in answer] for answer in both)


@pytest.mark.parametrize("ask", [texts, numbers])
@pytest.mark.parametrize("at_result", [False, True])
@pytest.mark.parametrize(
    "error",
    [RuntimeError("made up"), RankError("made up"), OutOfMemoryError("made up"), SystemExit("made up")],
    ids=repr,
)
def test_a_worker_that_raises_at_any_call_leaves_no_caller_waiting_and_no_slot_in_use(error, at_result, ask):
    alone = ask(engine_of(FakeWorker(random.Random(0), 2, 0.0)))
    assert ask is numbers or alone == [expected(prompt, SAMPLING) for prompt in PROMPTS]
    for number in range(2, 100):  # the first call makes room
        engine = engine_of(worker := Raising(number, error, at_result=at_result))
        try:
            assert ask(engine) == alone
        except (RuntimeError, PrefoldError) as raised:
            assert raised is error or (isinstance(error, SystemExit) and repr(error) in str(raised))
        if worker.left > 0:  # it was not called so often
            assert number > 6 or ask is numbers
            break
        while engine.generator.has_work:
            time.sleep(0.001)
        engine.call(partial(check_books, engine.generator.scheduler))
        assert engine.snapshot().used_slots == engine.cache.rows
        assert ask(engine) == alone  # the next call works
        engine.close()
    assert number > 2


def test_callers_of_an_engine_that_is_closed_get_an_error():
    entered = threading.Event()
    failures = []

    class Waiting(FakeWorker):
        """Its steps last until the engine is being closed."""

        def start(self, message, prepared=None):
            if isinstance(message, SlotStep):
                entered.set()
                while not engine._thread.is_closed:
                    time.sleep(0.001)
            return super().start(message, prepared)

    engine = engine_of(Waiting(random.Random(0), 1, 0.0))

    def ask() -> None:
        try:
            windows = [[(0, Request(np.zeros(2, np.int32), sampling=Sampling(max_tokens=100)))]]
            list(serve(engine, windows, max_waiting=4))
        except Exception as error:
            failures.append(error)

    asking = threading.Thread(target=ask)
    asking.start()
    entered.wait(60)
    engine.close()
    asking.join(60)
    assert not asking.is_alive() and isinstance(failures[0], PrefoldError) and "closed" in str(failures[0])


def test_a_model_that_was_closed_says_so(folder):
    llm = LLM(folder, dtype="float32", device="cpu", kv_memory=1 << 20)
    llm.generate("some text", max_tokens=1)
    llm.close()
    with pytest.raises(PrefoldError, match="closed"):
        llm.generate("some text", max_tokens=1)
    with pytest.raises(PrefoldError, match="closed"):
        asyncio.run(llm.agenerate("some text", max_tokens=1))


def test_an_interrupt_while_the_thread_begins_leaves_one_thread(monkeypatch):
    """Before it runs, and after."""
    start = threading.Thread.start
    for has_begun in (False, True):
        engine = engine_of(FakeWorker(random.Random(0), 1, 0.0))

        def interrupted(thread, has_begun=has_begun):
            if has_begun:
                start(thread)
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", interrupted)
            with pytest.raises(KeyboardInterrupt):
                engine.call(lambda: None)
        idents = {engine.call(threading.get_ident) for _ in range(20)}
        assert len(idents) == 1
        engine.close()


def test_the_engines_thread_does_not_wait_for_itself():
    engine = engine_of(FakeWorker(random.Random(0), 1, 0.0))
    windows = [[(0, Request(np.array([0, 1], np.int32), sampling=Sampling(max_tokens=2)))]]
    with pytest.raises(PrefoldError, match="own thread"):
        engine.call(lambda: list(serve(engine, windows, max_waiting=4)))
    assert engine.call(threading.current_thread).name == "prefold-engine"


def test_what_a_function_raises_comes_to_its_caller_and_the_thread_goes_on():
    engine = engine_of(FakeWorker(random.Random(0), 1, 0.0))
    with pytest.raises(ZeroDivisionError):
        engine.call(lambda: 1 // 0)
    assert engine.call(threading.current_thread).name == "prefold-engine"
    engine.close()
    assert engine.call(threading.current_thread) is threading.current_thread()


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    return str(tiny_checkpoint(tmp_path_factory.mktemp("owner"), "llama"))


def test_a_model_is_freed_with_its_last_name(folder):
    """Without a look of the garbage collector: a model is large."""
    llm = LLM(folder, dtype="float32", device="cpu", kv_memory=1 << 20)
    llm.generate("some text", max_tokens=2)
    llm.embed("some text")
    model, thread = weakref.ref(llm.model), llm.engine.call(threading.current_thread)
    del llm
    until = time.monotonic() + 60
    while (model() is not None or thread.is_alive()) and time.monotonic() < until:
        time.sleep(0.01)
    assert model() is None and not thread.is_alive()


def test_many_models_in_one_process(folder):
    llms = [LLM(folder, dtype="float32", device="cpu", kv_memory=1 << 20) for _ in range(6)]
    found: dict[int, list] = {}

    def ask(number: int) -> None:
        found[number] = [llms[number].generate("a text", max_tokens=5, ignore_eos=True).tokens for _ in range(3)]

    asking = [threading.Thread(target=ask, args=(number,)) for number in range(6)]
    for thread in asking:
        thread.start()
    for thread in asking:
        thread.join()
    assert len({tuple(map(tuple, one)) for one in found.values()}) == 1
    assert len({one.engine.call(threading.get_ident) for one in llms}) == 6


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the system has no fork")
def test_a_forked_process_is_told_so(folder):
    llm = LLM(folder, dtype="float32", device="cpu", kv_memory=1 << 20)
    llm.generate("some text", max_tokens=1)
    child = os.fork()
    if not child:
        try:
            llm.engine.call(lambda: None)
        except ForkedError:
            os._exit(7)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


def test_a_process_ends_while_steps_are_made(folder):
    code = f"""
import threading
from prefold import LLM
llm = LLM({folder!r}, dtype="float32", device="cpu", kv_memory=1 << 22)
began = threading.Event()
def ask():
    for piece in llm.stream("some text", max_tokens=400, ignore_eos=True):
        began.set()
threading.Thread(target=ask, daemon=True).start()
began.wait()
print("ends")
"""
    root = str(Path(__file__).parents[2])
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([root, *filter(None, sys.path)])}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0 and done.stdout == "ends\n", done.stderr[-2000:]


def test_numbers_and_texts_of_many_threads_take_turns(folder):
    llm = LLM(folder, dtype="float32", device="cpu", kv_memory=1 << 20, max_batch_rows=8)
    vectors, text = llm.embed(["one", "two"]), llm.generate("a text", max_tokens=9, ignore_eos=True).tokens
    failures = []

    def ask(number: int) -> None:
        for _ in range(4):
            if number % 2:
                if not np.allclose(llm.embed(["one", "two"]), vectors, atol=1e-5):
                    failures.append("numbers")
            elif llm.generate("a text", max_tokens=9, ignore_eos=True).tokens != text:
                failures.append("text")

    asking = [threading.Thread(target=ask, args=(number,)) for number in range(6)]
    for thread in asking:
        thread.start()
    for thread in asking:
        thread.join()
    assert not failures


GOES_IN_ITS_THREAD = """
import random, threading, time, weakref
from fake_worker import FakeWorker
from prefold.engine import ModelEngine, EngineOptions, GenerateOptions

going = threading.Event()

class Last:
    def __del__(self):
        going.set()
        time.sleep(0.5)
        print("freed", threading.current_thread().name, flush=True)

def run():
    engine = ModelEngine(FakeWorker(random.Random(0), 1, 0.0), EngineOptions(generation=GenerateOptions(kv_memory=100)))
    engine.last, deliver, came = Last(), type(engine)._deliver, threading.Event()
    def slowly(this):
        deliver(this)
        came.set()
        time.sleep(0.2)
    type(engine)._deliver = slowly
    engine.wake()
    came.wait()

run()
going.wait()
"""


def test_the_interpreter_waits_for_an_engine_that_goes_in_its_own_thread():
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[2]), *sys.path])}
    command = [sys.executable, "-c", GOES_IN_ITS_THREAD]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "freed prefold-engine\n"), done.stderr
