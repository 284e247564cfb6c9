"""Changes of the scheduler's books that are broken off in the middle: what is called next finds them whole."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path

import numpy as np
import pytest

import prefold
from prefold.cache import CacheOptions, SlotPool
from prefold.cache.tree import BrokenOff
from prefold.schedule.generate import GenerateScheduler
from tests.schedule.traces import CheckedStore, expected, next_token, prompts_of

ROOMS = tuple(str(Path(prefold.__file__).parent / room) for room in ("schedule", "cache"))


@contextmanager
def interrupted_after(events: int) -> Iterator[None]:
    """KeyboardInterrupt before the bytecode of that number, of those that schedule/ and cache/ run in the block."""
    left = events

    def trace(frame, event, _):
        nonlocal left
        if not frame.f_code.co_filename.startswith(ROOMS):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        if event == "opcode":
            left -= 1
            if left == 0:
                raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)


class Driver:
    """Runs a scheduler as the engine does: what every sample has made is known beside it, and after a change that was
    broken off all is made anew from that."""

    def __init__(self, scheduler: GenerateScheduler, rng: random.Random, often: float):
        self.scheduler, self.rng, self.often = scheduler, rng, often
        self.store = CheckedStore()
        self.flights: list[tuple] = []
        self.open: dict[int, tuple] = {}  # key: (prompt, options, {sample: its tokens})
        self.ended: dict[tuple, list[int]] = {}
        self.interrupts = 0

    def changed(self, change: Callable[[], object]) -> None:
        """Make a change, or part of it; the books are whole afterwards."""
        interrupted = nullcontext()
        if self.rng.random() < self.often:
            interrupted = interrupted_after(int(self.rng.expovariate(1 / self.rng.choice([10, 100, 1000]))) + 1)
        with suppress(BrokenOff):
            try:
                with interrupted, self.scheduler.tree.change():
                    change()
            except KeyboardInterrupt:
                self.interrupts += 1
        if self.scheduler.tree.is_broken:
            self.flights.clear()
            self.scheduler.clear()
            for key, (prompt, options, made) in self.open.items():
                self.scheduler.submit(key, prompt, **options, made=made)
            self.scheduler.tree.is_broken = False

    def submit(self, key: int, prompt: np.ndarray, *, samples: int = 1, **options) -> None:
        def change() -> None:
            made = {sample: [] for sample in range(samples)}
            self.open[key] = (prompt, options, made)
            self.scheduler.submit(key, prompt, **options, made=made)

        while key not in self.open:
            self.changed(change)

    def cancel(self, key: int) -> None:
        def change() -> None:
            self.open.pop(key, None)
            self.scheduler.cancel(key)

        self.changed(change)
        while key in self.open:
            self.changed(change)

    def land(self) -> None:
        def change() -> None:
            step, tokens, stops = self.flights.pop(0)
            for sequence, token, stop in zip(step.takers, tokens, stops, strict=True):
                if sequence.state == "ended":
                    continue
                _, options, made = self.open[sequence.key]
                if not stop:
                    made[sequence.sample].append(token)
                if stop or len(made[sequence.sample]) == options["limit"]:
                    self.ended[sequence.key, sequence.sample] = made.pop(sequence.sample)
                    if not made:
                        del self.open[sequence.key]
            self.scheduler.commit(step, tokens, stops)

        self.changed(change)

    def step(self, stop_at, ahead: bool) -> bool:
        scheduler = self.scheduler
        if len(self.flights) > 1 or (self.flights and self.interrupts and self.rng.random() < 0.3):
            self.land()
        self.changed(scheduler.admit)
        scheduler.check()
        step = scheduler.plan()
        if self.flights and (step is None or not ahead):
            self.land()
            scheduler.check()
            return True
        if step is None:
            return bool(self.open)
        self.store.run(step, self.flights[-1][1] if self.flights else [])
        samples = [sequence.sample for sequence in step.takers]
        tokens = [next_token(path, sample) for path, sample in zip(self.store.paths, samples, strict=True)]
        stops = [stop_at(path, sample) for path, sample in zip(self.store.paths, samples, strict=True)]

        def change() -> None:
            scheduler.begin(step)
            self.flights.append((step, tokens, stops))

        self.changed(change)
        scheduler.check()
        return True


def run_trace(seed: int, often: float) -> int:
    """One random trace; returns how often it was broken off."""
    rng, numbers = random.Random(seed), np.random.default_rng(seed)
    cache = rng.choice([None, CacheOptions(min_overlap=0), CacheOptions(min_overlap=4, max_tokens=9)])
    scheduler = GenerateScheduler(
        SlotPool(rng.randint(30, 120)), max_batch_rows=rng.randint(1, 30), max_running=rng.randint(1, 8), cache=cache
    )  # fmt: skip
    sharing = rng.random() < 0.8
    driver = Driver(scheduler, rng, often)
    modulus, reserve = rng.randint(2, 5), rng.random() < 0.5
    stop_at = lambda path, sample: len(path) > 4 and (sum(path) + sample) % modulus == 0  # noqa: E731
    prompts = prompts_of(numbers, rng.randint(3, 12))
    asked = {key: (p, rng.choice([1, 1, 2]), rng.randint(1, 14)) for key, p in enumerate(prompts)}
    left, cancelled = list(asked), set()
    for _ in range(5000):
        for key in left[: rng.randint(0, 2)]:
            prompt, samples, limit = asked[key]
            namespace = () if sharing else (key,)
            driver.submit(key, prompt, samples=samples, limit=limit, reserve=reserve, namespace=namespace)
            left.remove(key)
        if rng.random() < 0.03:
            key = rng.choice(list(asked))
            if key not in left:
                cancelled.add(key)
                driver.cancel(key)
        if not driver.step(stop_at, ahead=rng.random() < 0.5) and not left and not driver.flights:
            break
    else:
        raise AssertionError("the work does not end")
    scheduler.admit()
    scheduler.check()
    assert not scheduler.has_work
    assert scheduler.pool.used_slots == (scheduler.cache.rows if scheduler.cache else 0)
    for key, (prompt, samples, limit) in asked.items():
        for sample in range(samples):
            if key not in cancelled:
                assert driver.ended[key, sample] == expected(prompt, sample, limit, stop_at), (seed, key)
    return driver.interrupts


def test_changes_that_are_broken_off():
    assert sum(run_trace(seed, 0.1) for seed in range(40)) > 40


@pytest.mark.slow
def test_many_changes_that_are_broken_off():
    interrupts, seed = 0, 1000
    while interrupts < 5000:
        interrupts += run_trace(seed, 0.1)
        seed += 1


@pytest.mark.parametrize("change", ["pin", "unpin", "clear"])
def test_the_cache_is_broken_off_by_its_user(change):
    """Wherever it happens, what comes next finds the books balanced."""
    for events in range(1, 400, 7):
        scheduler = GenerateScheduler(SlotPool(50), max_batch_rows=20, max_running=4, cache=CacheOptions(min_overlap=0))
        driver = Driver(scheduler, random.Random(0), 0.0)
        prompt = np.arange(9, dtype=np.int32)
        driver.submit(0, prompt, limit=1)
        while driver.step(lambda path, sample: False, ahead=False):
            pass
        scheduler.cache.pin((), prompt[:3])
        arguments = {"pin": ((), prompt[:5]), "unpin": ((), prompt[:3]), "clear": ()}[change]
        with suppress(KeyboardInterrupt), interrupted_after(events):
            getattr(scheduler.cache, change)(*arguments)
        driver.changed(lambda: None)
        driver.submit(1, prompt, limit=2)
        while driver.step(lambda path, sample: False, ahead=False):
            scheduler.check()
        assert len(driver.ended[1, 0]) == 2
