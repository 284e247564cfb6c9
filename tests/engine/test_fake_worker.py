"""The real engine over a worker that computes nothing: random traces in which memory runs out, steps fail, requests
are cancelled, and Ctrl-C comes. Run as a program it does so without torch: `test_fake_worker.py FIRST COUNT`."""

from __future__ import annotations

import os
import pickle
import random
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from books import check_books
from fake_worker import FakeWorker, Ticket, expected

from prefold.engine import EngineOptions, GenerateOptions, ModelEngine
from prefold.engine.cache import CacheOptions
from prefold.engine.loop import find_fault
from prefold.engine.schedule.steps import SlotResult, SlotStep
from prefold.engine.worker import Facts, Worker
from prefold.errors import InputError, OutOfMemoryError
from prefold.spec.requests import Readout, Request, Sampling


def run_trace(seed: int) -> tuple[int, int]:
    """A random trace; returns how often a sequence was preempted, and the books were made anew."""
    rng = random.Random(seed)
    worker = FakeWorker(rng, depth=rng.choice([1, 2, 2]), trouble=rng.choice([0.0, 0.05, 0.2]))
    cache = rng.choice([None, CacheOptions(min_overlap=0), CacheOptions(min_overlap=3, max_tokens=9)])
    generation = GenerateOptions(
        kv_memory=rng.choice([52, 70, 400]), max_running=rng.choice([2, 6, 20]), reserve_output=rng.random() < 0.5,
        cache=cache,
    )  # fmt: skip
    engine = ModelEngine(worker, EngineOptions(max_batch_rows=rng.choice([5, 24]), generation=generation))
    generator, make_anew, anew = engine.generator, engine.generator._rebuild_books, []
    generator._rebuild_books = lambda: anew.append(1) or make_anew()
    asked, answers, keys, cancelled = {}, {}, {}, set()
    for number in range(rng.randint(3, 12)):
        prompt = rng.choices([0, 1, 2], k=rng.randint(1, 9))
        sampling = Sampling(
            max_tokens=rng.choice([3, 14, 40]), n=rng.choice([1, 1, 2]), stop_ids=rng.choice([(), (2,)])
        )
        asked[number] = (prompt, sampling if rng.random() < 0.8 else None)
    waiting = list(asked)
    for _ in range(3000):
        for number in waiting[: (arriving := rng.randint(0, 3))]:
            prompt, sampling = asked[number]
            tokens = np.array(prompt, np.int32)
            request = Request(tokens, sampling=sampling)
            readout = Readout("last") if sampling is None else None
            told = lambda answer, number=number: answers.__setitem__(number, answer)  # noqa: E731
            keys[number] = generator.add(request, None, told, readout=readout)
        waiting = waiting[arriving:]
        if keys and rng.random() < 0.04:
            cancelled.add(number := rng.choice(list(keys)))
            generator.cancel(keys[number])
        with suppress(OutOfMemoryError, RuntimeError):
            generator.step()
        check_books(generator.scheduler)
        assert len(generator.in_flight) <= worker.facts.slot_depth
        if not waiting and not generator.has_work and not generator.in_flight:
            break
    else:
        raise AssertionError("the work does not end")
    assert generator.scheduler.pool.used_slots == (generator.scheduler.cache.rows if cache else 0)
    for number, (prompt, sampling) in asked.items():
        if number in cancelled:
            continue
        answer = answers[number]
        if sampling is None:
            assert answer.values[0] == float(hash(tuple(prompt)))
        else:
            assert [one.tokens for one in answer] == [expected(prompt, sampling)] * sampling.n, (seed, number)
    return generator.scheduler.stats.preemptions, len(anew)


@pytest.mark.parametrize("count", [50, pytest.param(300, marks=pytest.mark.slow)])
def test_traces_without_torch(count):
    root = Path(__file__).parents[2]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(root), *sys.path])}
    command = [sys.executable, __file__, "0", str(count)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    preempted, anew = map(int, done.stdout.split())
    assert preempted > count / 30 and anew > count / 30


def test_a_request_that_can_never_run_is_told_so():
    worker = FakeWorker(random.Random(0), 1, 0.0)
    engine = ModelEngine(worker, EngineOptions(generation=GenerateOptions(kv_memory=11)))
    answers = []
    engine.generator.add(Request(np.zeros(8, np.int32), sampling=Sampling(max_tokens=9)), None, answers.append)
    while engine.generator.step():
        pass
    assert isinstance(answers[0], InputError) and answers[0].code == "kv_memory"


class FailingOnce(FakeWorker):
    """Fails for one step: that of this number."""

    def __init__(self, number: int):
        super().__init__(random.Random(0), 2, 0.0)
        self.number = number

    def run(self, step: SlotStep) -> SlotResult:
        self.number -= 1
        if not self.number:
            raise RuntimeError("made up")
        return super().run(step)


def test_numbers_that_are_in_flight_when_the_next_step_fails_are_read_again():
    worker = FailingOnce(2)
    generator = ModelEngine(worker, EngineOptions(generation=GenerateOptions(kv_memory=100))).generator
    text, numbers = [], []
    generator.add(Request(np.array([0, 1], np.int32), sampling=Sampling(max_tokens=5)), None, text.append)
    generator.add(Request(np.array([2, 1], np.int32)), None, numbers.append, readout=Readout("last"))
    generator.step()
    with pytest.raises(RuntimeError, match="made up") as caught:
        generator.step()
    assert not find_fault(generator, caught.value)
    while generator.step():
        assert set(generator.scheduler.requests) == set(generator.open_keys)
    assert [one.tokens for one in text[0]] == [expected([0, 1], Sampling(max_tokens=5))]
    assert numbers[0].values[0] == float(hash((2, 1))) and not generator.scheduler.has_work


def two_texts(worker: Worker):
    """An engine with two requests, of which the second begins with 2."""
    engine = ModelEngine(worker, EngineOptions(generation=GenerateOptions(kv_memory=1000, max_running=500)))
    for prompt in ([0, 1], [2, 1]):
        ask(engine, prompt)
    return engine


def ask(engine: ModelEngine, prompt: list[int]) -> int:
    request = Request(np.array(prompt, np.int32), sampling=Sampling(max_tokens=50))
    return engine.generator.add(request, None, lambda answer: None)


class FailingFor2(FakeWorker):
    """Fails for steps in which a prompt begins with 2. While `guests` is there, each step brings it somebody new."""

    guests: ModelEngine | None = None

    def __init__(self) -> None:
        super().__init__(random.Random(0), 1, 0.0)
        self.steps = 0

    def run(self, step: SlotStep) -> SlotResult:
        self.steps += 1
        if self.steps > 100:
            pytest.fail("the search does not end")
        if self.guests is not None:
            ask(self.guests, [0, 0])
        if 2 in step.tokens[step.positions == 0]:
            raise RuntimeError("made up")
        return super().run(step)


def test_the_search_for_a_fault_ends_however_many_come_meanwhile():
    engine = two_texts(worker := FailingFor2())
    worker.guests = engine
    with pytest.raises(RuntimeError, match="made up") as caught:
        engine.generator.step()
    assert list(find_fault(engine.generator, caught.value)) == [1]
    worker.guests = None
    came = worker.steps
    engine.generator.end(1, InputError("made up"))
    engine.generator.step()
    assert len(engine.generator.open_keys) == 1 + came  # nobody is forgotten
    check_books(engine.generator.scheduler)


def test_a_fault_is_found_though_its_steps_fail_while_the_books_are_changed():
    engine = two_texts(worker := FakeWorker(random.Random(0), 1, 0.0))
    generator, tries = engine.generator, []
    plan = generator.scheduler.plan

    def fails_for_1(most):
        tries.append(1)
        if len(tries) > 100:
            pytest.fail("the search does not end")
        if any(sequence.key == 1 for sequence in generator.scheduler.running):
            raise RuntimeError("made up")
        return plan(most)

    generator.scheduler.plan = fails_for_1
    with pytest.raises(RuntimeError, match="made up") as caught:
        generator.step()
    assert list(find_fault(generator, caught.value)) == [1]
    generator.end(1, InputError("made up"))
    assert generator.step() and generator.open_keys == [0]
    check_books(generator.scheduler)
    assert worker.content


class Measuring(Worker):
    """Every token is 0; notes how large messages are."""

    facts = Facts(max_positions=5000)

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def start(self, message, prepared=None):
        self.sizes.append(len(pickle.dumps(message)))
        return Ticket(SlotResult(np.zeros(len(getattr(message, "reads", ())), np.int64)), None)


def size_of_a_step(kept: list[list[int]]) -> int:
    """Bytes of the message of a decoding step while these prompts are kept."""
    worker = Measuring()
    generation = GenerateOptions(kv_memory=20_000, cache=CacheOptions(min_overlap=0))
    generator = ModelEngine(worker, EngineOptions(max_batch_rows=4096, generation=generation)).generator
    for prompts, limit in ((kept, 1), ([[0, 1, 2]], 4)):
        for prompt in prompts:
            request = Request(np.array(prompt, np.int32), sampling=Sampling(max_tokens=limit))
            generator.add(request, None, lambda answer: None)
        while generator.step():
            pass
    return worker.sizes[-1]


def test_a_message_says_nothing_of_what_is_kept():
    rng = random.Random(0)
    assert size_of_a_step([rng.choices(range(3, 7), k=12) for _ in range(1000)]) == size_of_a_step([])


def test_prompts_that_go_on_from_each_other():
    """Three hundred nodes below each other are no deeper a message."""
    assert size_of_a_step([[3] * length for length in range(1, 301)]) == size_of_a_step([])


if __name__ == "__main__":
    preempted = anew = 0
    for seed in range(int(sys.argv[1]), int(sys.argv[1]) + int(sys.argv[2])):
        counts = run_trace(seed)
        preempted, anew = preempted + counts[0], anew + counts[1]
    assert "torch" not in sys.modules
    print(preempted, anew)


def test_steps_are_small_after_memory_was_too_small_and_large_again_after_long():
    class Short(FakeWorker):
        rows: list[int]
        is_short = True

        def start(self, message, prepared=None):
            if isinstance(message, SlotStep):
                if self.is_short and message.num_rows > 3:
                    raise OutOfMemoryError("made up")
                self.rows.append(message.num_rows)
            return super().start(message, prepared)

    worker = Short(random.Random(0), 1, 0.0)
    worker.rows = []
    generation = GenerateOptions(kv_memory=1000, max_running=4)
    engine = ModelEngine(worker, EngineOptions(max_batch_rows=24, generation=generation))
    generator = engine.generator

    def run(first: int) -> int:
        """Returns the rows of the largest step of a prompt that shares nothing with others, of 30 tokens."""
        worker.rows.clear()
        prompt = np.array([first, *[0, 1, 2] * 10], np.int32)
        generator.add(Request(prompt, sampling=Sampling(max_tokens=28, ignore_eos=True)), None, lambda answer: None)
        while generator.has_work:
            generator.step()
        return max(worker.rows)

    assert run(0) == 3 == engine.max_batch_rows
    worker.is_short = False
    largest = [run(1) for _ in range(60)]
    assert largest[0] == 3 and largest[-1] == 24 == engine.max_batch_rows
    assert largest == sorted(largest)
